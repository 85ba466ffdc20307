"""thinwire in Lightning.

    trainer = Trainer(strategy="ddp", callbacks=[thinwire.lightning.Thinwire(thinwire.redsync(density=0.001))])

Lightning's own ``DDPStrategy(ddp_comm_hook=...)`` registers hooks on CUDA devices only, and says nothing elsewhere.
This callback works wherever the strategy is DDP, with automatic and manual optimization.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from . import ddp
from ._errors import Error, ErrorCode
from ._thinwire import ReducerOptions

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback

__all__ = ["Thinwire"]

_KEY = "thinwire"  # in checkpoints


class Thinwire(Callback):
    """Attaches thinwire to the model when ``trainer.fit`` starts to train. Without effect in a run without
    DDP on one device.

    The momentum of the optimizer is taken over as in `thinwire.ddp.attach`. Where there are several optimizers, each
    keeps its own.

    Checkpoints of the trainer hold the states of all ranks, and `fit(ckpt_path=...)` goes on from there, on any number
    of ranks (see `thinwire.ddp.reshard`). For that, rank 0 gathers 8 bytes per parameter (4 without momentum) from each
    rank whenever a checkpoint is saved.

    Args:
        options: how to reduce, for example ``thinwire.redsync(density=0.001)``.
        flush: whether to apply what waits in the residuals when training ends, in one more step of SGD.
        timeout: longest wait for another rank, as timedelta or in seconds; the backend's default unless given.

    Raises:
        Error: as `thinwire.ddp.attach`, when training starts; invalid_argument for a strategy that is not DDP, and
            for a checkpoint with thinwire's state in a run without DDP.
    """

    handle: ddp.Handle | None  # from the first training step on, and after training

    def __init__(self, options: ReducerOptions, flush: bool = False, timeout: timedelta | float | None = None) -> None:
        self.handle = None
        self._options, self._flush, self._timeout = options, flush, timeout
        self._loaded: dict[str, Any] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forgets the last fit. Lightning restores checkpoints after this."""
        self._loaded = None
        if stage == "fit" and self.handle is not None:
            self.handle.detach()
            self.handle = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attaches: DDP wraps the model and optimizers are restored before this."""
        if not isinstance(trainer.strategy.model, DistributedDataParallel) and trainer.world_size == 1:
            if self._loaded is not None:
                raise Error(
                    ErrorCode.invalid_argument,
                    "the checkpoint holds momentum and residuals of thinwire, which a run without DDP would lose: use "
                    "strategy='ddp', with one device too",
                )
            return
        optimizer = trainer.optimizers[0] if len(trainer.optimizers) == 1 else None
        self.handle = ddp.attach(
            trainer.strategy.model,
            self._options,
            optimizer,
            timeout=self._timeout,
            grad_scaler=None if optimizer is None else getattr(trainer.precision_plugin, "scaler", None),
        )
        if self._loaded is not None:
            self.handle.load_state_dict(self._loaded)
            self._loaded = None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Flushes if asked. Stays attached, so that a checkpoint saved after `fit` has everything."""
        if self._flush and self.handle is not None:
            self.handle.flush()
            for optimizer in trainer.optimizers:
                if isinstance(optimizer, SGD):  # others would take the small rest for a whole gradient
                    optimizer.step()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Lightning calls it on every rank, and writes the checkpoint of rank 0."""
        if self.handle is None:
            return
        states: list[Any] | None = [None] * trainer.world_size if trainer.global_rank == 0 else None
        dist.gather_object(self.handle.state_dict(), states)
        if states is not None:
            checkpoint[_KEY] = states

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keeps this rank's state until thinwire is attached."""
        states = checkpoint.get(_KEY)
        if states:
            self._loaded = ddp.reshard(states, trainer.world_size)[trainer.global_rank]
