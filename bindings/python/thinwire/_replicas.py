"""Are the replicas still the same? A checksum of every parameter, compared over the ranks."""

from __future__ import annotations

import ctypes
import struct
import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from ._errors import Error, ErrorCode
from .c10d import TorchCommunicator


def check_replicas(parameters: Mapping[str, Tensor], communicator: TorchCommunicator) -> None:
    """Compares all bits of all parameters. Every rank calls it at the same point, while no job runs.

    Raises:
        Error: remote, on every rank, naming the first parameter that differs and the ranks that differ from rank 0.
    """
    names, size = list(parameters), communicator.size()
    sums = struct.pack(f"<{len(names)}I", *map(_checksum, parameters.values()))
    mine = torch.frombuffer(bytearray(sums), dtype=torch.uint8)
    everyone = torch.empty(size * mine.numel(), dtype=torch.uint8)
    communicator.all_gather(mine, everyone)
    of_rank = everyone.view(size, len(names), 4)
    for place, name in enumerate(names):
        others = [rank for rank in range(1, size) if not torch.equal(of_rank[rank, place], of_rank[0, place])]
        if others:
            raise Error(
                ErrorCode.remote,
                f"the replicas differ: parameter '{name}' of rank {', '.join(map(str, others))} is not that of rank 0",
            )


def _checksum(parameter: Tensor) -> int:
    flat = parameter.detach().cpu().contiguous()
    return zlib.crc32((ctypes.c_char * (flat.numel() * flat.element_size())).from_address(flat.data_ptr()))
