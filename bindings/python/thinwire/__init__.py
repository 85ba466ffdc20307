"""Residual gradient compression for data-parallel training on thin networks.

Each worker sends the few gradient entries that matter, keeps the rest in a residual, and sends them when they have
grown. With PyTorch:

    import thinwire.ddp

    model = DistributedDataParallel(network)
    thinwire.ddp.attach(model, thinwire.redsync(density=0.001), optimizer)

``thinwire`` itself needs neither PyTorch nor NumPy; ``thinwire.ddp`` and ``thinwire.c10d`` need PyTorch 2.1 or newer,
``thinwire.lightning`` Lightning as well, ``thinwire.fsdp`` PyTorch 2.8.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from . import plan
from ._errors import Error, ErrorCode
from ._thinwire import (
    Bucket,
    Codec,
    Communicator,
    HashedSlots,
    ParameterRule,
    Reducer,
    ReducerOptions,
    SampledTopK,
    Schedule,
    StepStats,
    ThresholdSearch,
    TopK,
    Traffic,
    TrimmedTopK,
    Work,
    dense,
    dgc,
    dragonn,
    make_thread_communicators,
    redsync,
    redsync_quantized,
    select,
    top_k,
)
from ._thinwire import version as __version__

__all__ = [
    "Bucket",
    "Codec",
    "Communicator",
    "Error",
    "ErrorCode",
    "HashedSlots",
    "ParameterRule",
    "Reducer",
    "ReducerOptions",
    "SampledTopK",
    "Schedule",
    "StepStats",
    "ThresholdSearch",
    "TopK",
    "Traffic",
    "TrimmedTopK",
    "Work",
    "__version__",
    "dense",
    "dgc",
    "dragonn",
    "make_thread_communicators",
    "plan",
    "redsync",
    "redsync_quantized",
    "select",
    "top_k",
]


def __getattr__(name: str) -> ModuleType:
    """Loads the parts that need PyTorch when they are asked for."""
    if name in ("c10d", "ddp", "fsdp", "lightning"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
