"""Between a parameter's shape and the flat order in which buckets and residuals hold its elements.

DDP's buckets hold elements in the order in which the parameter lies in memory: for channels_last and transposed
parameters that is not the logical order.
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements lie gap-free and once each in memory, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((st, sz) for st, sz in zip(tensor.stride(), tensor.shape, strict=True) if sz != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def shaped(flat: Tensor, like: Tensor) -> Tensor:
    """A view of `flat` [numel and perhaps padding], in bucket order, in the shape of the parameter `like`."""
    if is_dense(like):
        return flat.as_strided(like.shape, like.stride(), flat.storage_offset())
    return flat.view(like.shape)


def flatten(values: Tensor, like: Tensor, numel: int) -> Tensor:
    """A new f32 tensor [numel]: `values`, of the shape of `like` or sparse_coo, in bucket order, then zeros."""
    flat = torch.zeros(numel, dtype=torch.float32)
    shaped(flat, like).add_(values.detach().to("cpu", torch.float32))
    return flat


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a DTensor, in the same memory and without a history; any other tensor itself."""
    return tensor.to_local().detach() if hasattr(tensor, "to_local") else tensor
