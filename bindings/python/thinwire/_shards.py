"""What thinwire has to know of FSDP2 and torch does not tell: the one place that reads its private attributes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ._errors import Error, ErrorCode
from ._names import named

try:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors
except ImportError:  # before torch 2.6
    FSDPModule = None


@dataclass(frozen=True)
class Shard:
    """What this rank holds of one parameter."""

    name: str
    parameter: Tensor  # a DTensor
    numel: int  # of its part in the reduced gradient: that of the largest shard, the others are padded with zeros
    ranks: tuple[int, ...]  # that hold the shards, in their order


class ShardGroup:
    """Parameters whose gradients FSDP2 reduces together, in one flat tensor.

    Args:
        name: of the module that holds them.
        group: FSDP2's own object.
        names: of the trainable parameters, by id().
    """

    def __init__(self, name: str, group: Any, names: Mapping[int, str]) -> None:
        self.name = name
        self._group = group
        self._members = [
            (part, _shard(names[id(part.sharded_param)], part))
            for part in group.fsdp_params
            if id(part.sharded_param) in names
        ]
        self.shards = [shard for _, shard in self._members]
        self._used: set[str] = set()  # parameters that got a gradient since the last reduction

    @property
    def is_replicated(self) -> bool:
        """Whether FSDP2 itself reduces between replicas."""
        return hasattr(self._group.mesh_info, "replicate_mesh_size")

    @property
    def hook(self) -> Callable[[Tensor], None] | None:
        """The all-reduce hook that is set."""
        return self._group._all_reduce_hook

    def set_hook(self, hook: Callable[[Tensor], None]) -> None:
        """FSDP2 calls `hook` in each backward pass, with the flat gradient [n] that it keeps."""
        for module in self._group.modules:
            module.set_all_reduce_hook(hook)

    def watch(self, handles: list[Any]) -> None:
        """Notes which parameters get gradients, until what is appended to `handles` is removed."""
        watched: set[str] = set()

        def before_forward(module: nn.Module, args: Any) -> None:
            for part, shard in self._members if len(watched) < len(self._members) else ():
                whole = getattr(part, "_unsharded_param", None)  # made by the first all-gather, and kept
                if whole is not None and shard.name not in watched:
                    watched.add(shard.name)
                    note = partial(_note, self._used, shard.name)  # without self, which a tensor's hook would keep
                    handles.append(whole.register_post_accumulate_grad_hook(note))

        handles += [module.register_forward_pre_hook(before_forward) for module in self._group.modules]

    def reduced(self, gradient: Tensor) -> list[Shard]:
        """The shards that the flat gradient consists of, in its order: FSDP2 leaves out parameters without a gradient.

        Raises:
            Error: invalid_argument for a size that is not theirs.
        """
        used = set(self._used)
        self._used.clear()
        by_part = {id(part): shard for part, shard in self._members}
        parts = self._group.fsdp_params
        order = getattr(self._group, "_reduce_scatter_param_indices", range(len(parts)))
        shards = [by_part[id(parts[index])] for index in order if id(parts[index]) in by_part]
        if gradient.numel() != sum(shard.numel for shard in shards):
            shards = [shard for shard in shards if shard.name in used]
        if gradient.numel() == sum(shard.numel for shard in shards):
            return shards
        expected = ", ".join(f"'{shard.name}'" for shard in shards) or "none of its parameters"
        raise Error(
            ErrorCode.invalid_argument,
            f"the gradient of module '{self.name}' has {gradient.numel()} elements, expected "
            f"{sum(shard.numel for shard in shards)} of {expected}: detach() before parameters are released or "
            "replaced, and attach() after it",
        )

    def later_divisor(self, gradient: Tensor) -> float:
        """What FSDP2 divides by after the hook. It divides f16 in two parts, against overflow."""
        group = self._group
        _, later, *_ = _get_gradient_divide_factors(
            group._reduce_scatter_process_group,
            None,
            gradient.dtype,
            gradient.device.type,
            group.gradient_divide_factor,
            group.force_sum_reduction_for_comms,
        )
        return later or 1.0


def _shard(name: str, part: Any) -> Shard:
    parameter = part.sharded_param
    ranks = tuple(parameter.device_mesh.mesh.flatten().tolist())
    return Shard(name, parameter, part.padded_sharded_param_size.numel(), ranks)


def _note(used: set[str], name: str, parameter: Tensor) -> None:
    used.add(name)


def _groups_of(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    only = state._fsdp_param_group  # all that torch 2.8 has
    return [] if only is None else [only]


def shard_groups(model: nn.Module) -> list[ShardGroup]:
    """The groups of all FSDP2 modules in `model` that have trainable parameters. Reshards them.

    Raises:
        Error: unsupported for a torch whose FSDP2 has no all-reduce hook, or keeps its parameters in another way.
    """
    if FSDPModule is None or not hasattr(FSDPModule, "set_all_reduce_hook"):
        raise Error(
            ErrorCode.unsupported,
            f"torch {torch.__version__} has no FSDPModule.set_all_reduce_hook, which thinwire.fsdp needs: "
            "use torch 2.8 or newer",
        )
    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    try:
        for _, module in modules:
            module.reshard()
        by_id = {id(p): name for name, p in named(model.named_parameters()).items()}
        groups: dict[int, ShardGroup] = {}
        for name, module in modules:
            for group in _groups_of(module._get_fsdp_state()):
                groups.setdefault(id(group), ShardGroup(name, group, by_id))
        return [group for group in groups.values() if group.shards]
    except AttributeError as error:
        raise Error(
            ErrorCode.unsupported,
            f"FSDP2 of torch {torch.__version__} keeps its parameters in another way than thinwire knows: {error}",
        ) from error


def rank_in(ranks: tuple[int, ...]) -> int:
    """The place of this process in a list of ranks."""
    return ranks.index(dist.get_rank())
