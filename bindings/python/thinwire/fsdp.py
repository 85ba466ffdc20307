"""thinwire under FSDP2: dense inside a group of shards, sparse between the replicas.

    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    handle = thinwire.fsdp.attach(
        model, thinwire.redsync(density=0.001), optimizer, replicate_group=mesh["replicate"]
    )

FSDP2 reduce-scatters gradients inside the shard group, where the network is good; what this rank keeps of them is
averaged with the ranks that hold the same shard in the other replicas, by thinwire. Momentum is taken over from
``torch.optim.SGD`` as under DDP, see thinwire.ddp.

A step is a backward pass that reduces. To accumulate gradients over several, call
``model.set_requires_gradient_sync(False)`` before all but the last; ``set_requires_all_reduce`` is without effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ._engine import DTYPES, Engine
from ._errors import Error, ErrorCode
from ._handle import Handle, Timeout, unwrap
from ._shards import ShardGroup, rank_in, shard_groups
from ._thinwire import ReducerOptions
from .c10d import TorchCommunicator

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Handle", "attach"]


def attach(
    model: nn.Module,
    options: ReducerOptions,
    optimizer: Optimizer | None = None,
    *,
    replicate_group: DeviceMesh | dist.ProcessGroup,
    timeout: Timeout = None,
) -> Handle:
    """Makes thinwire reduce the gradients of an FSDP2 model between its replicas.

    Every rank calls it at the same point, between steps, after ``fully_shard`` and the making of the optimizer.

    Args:
        model: the root of modules that ``fully_shard(module, mesh=mesh["shard"])`` has sharded, on 1-D meshes.
        options: how to reduce, for example ``thinwire.redsync(density=0.001)``; the same on every rank. Sizes, such as
            ``dense_below``, are those of the shards.
        optimizer: whose momentum is taken over if it is SGD. None: the caller sees to it that no optimizer applies
            momentum to means that already have it.
        replicate_group: the ranks that hold the same shard as this one, as ``mesh["replicate"]`` or a process group.
        timeout: longest wait for another rank, as timedelta or in seconds; the backend's default unless given.

    Returns:
        A handle with detach(), flush(), stats(), state_dict() and load_state_dict(). It may be dropped: the model keeps
        it. After ``handle.detach()`` gradients are averaged densely between the replicas; the model may be attached
        again, and gives the same handle.

    Raises:
        Error: invalid_argument for options out of range, ``clip_norm`` among them, for momentum both in the options and
            in the optimizer, for a model that is not sharded, that FSDP2 replicates itself (a 2-D mesh), or that has an
            all-reduce hook already, and for a group whose ranks do not hold the same shard; unsupported for a torch
            without ``FSDPModule.set_all_reduce_hook``, or a parameter that is not in host memory.
    """
    inner = getattr(model, "_orig_mod", model)
    replicas = _process_group(replicate_group)
    groups = shard_groups(inner)
    hooks = [group.hook for group in groups if group.hook is not None]
    known = {hook.handle for hook in hooks if isinstance(hook, _Hook)}
    if len(known) > 1 or not all(isinstance(hook, _Hook) for hook in hooks):
        raise Error(
            ErrorCode.invalid_argument,
            "the model has an all-reduce hook already, and FSDP2 takes only one: attach thinwire instead of it",
        )
    handle = known.pop() if known else _FsdpHandle(replicas)
    handle._attach(inner, groups, options, optimizer, replicas, timeout)
    return handle


class _FsdpHandle(Handle):
    """A handle that is kept by the hooks of the model's FSDP2 modules."""

    _engine: _ShardEngine | None

    def _attach(
        self,
        model: nn.Module,
        groups: list[ShardGroup],
        options: ReducerOptions,
        optimizer: Optimizer | None,
        replicas: dist.ProcessGroup,
        timeout: Timeout,
    ) -> None:
        self._refuse_attached(options)
        _refuse_unfit(groups, options, replicas)
        if self._process_group is not replicas:
            self._process_group, self._communicator = replicas, None

        def connect() -> TorchCommunicator:
            communicator = self._connect(timeout)
            _check_replicas(communicator, groups)
            return communicator

        self._engine = _ShardEngine(options, groups, unwrap(optimizer), connect, model)
        for group in groups:
            group.set_hook(_Hook(self, group, replicas))


@dataclass(frozen=True, eq=False)
class _Hook:
    """What FSDP2 calls with the reduced gradient of one group."""

    handle: _FsdpHandle
    group: ShardGroup
    replicas: dist.ProcessGroup

    def __call__(self, gradient: Tensor) -> None:
        if self.handle._engine is None:
            gradient /= dist.get_world_size(self.replicas)  # first, against overflow
            dist.all_reduce(gradient, group=self.replicas)
        else:
            self.handle._engine.reduce(self.group, gradient)


class _ShardEngine(Engine):
    """The part of FSDP2, which reduces groups of shards and waits for each."""

    _wrapper = "FSDP2"

    def __init__(
        self,
        options: ReducerOptions,
        groups: list[ShardGroup],
        optimizer: Optimizer | None,
        connect: Callable[[], TorchCommunicator],
        model: nn.Module,
    ) -> None:
        shards = [shard for group in groups for shard in group.shards]
        super().__init__(
            options,
            {shard.name: shard.parameter for shard in shards},
            optimizer,
            connect,
            numels={shard.name: shard.numel for shard in shards},
        )
        in_force = self.reducer.options
        self._has_momentum = in_force.momentum > 0 or any(rule.momentum for rule in in_force.rules)
        self._shard = (rank_in(shards[0].ranks), len(shards[0].ranks))
        self._reduced: set[ShardGroup] = set()  # in this step; empty: the step is over
        self._handles.append(model.register_forward_pre_hook(self._end_step))
        for group in groups:
            group.watch(self._handles)

    def reduce(self, group: ShardGroup, gradient: Tensor) -> None:
        """The hook's work: the mean over the replicas replaces the flat gradient [n] of one group."""
        if not self._reduced or group in self._reduced:
            self._reduced.clear()
            self._begin_step()
        self._reduced.add(group)
        try:
            slices, buffer, divisor = self._prepare(group, gradient)
        except Error as error:
            self.reducer.fail(str(error)).wait()
            return
        self.reducer.reduce(slices, buffer).wait()
        if buffer is not gradient:
            gradient.copy_(buffer.mul_(divisor))

    def flush(self) -> None:
        """See Handle.flush."""
        self._reduced.clear()
        super().flush()

    def state_dict(self) -> dict[str, Any]:
        """See Handle.state_dict."""
        return {self._shard_key(): super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See Handle.load_state_dict."""
        if not isinstance(state, Mapping) or self._shard_key() not in state:
            has = ", ".join(map(repr, state)) if isinstance(state, Mapping) and state else "nothing of the kind"
            raise Error(
                ErrorCode.invalid_argument,
                f"the state lacks {self._shard_key()!r} and has {has}: each rank saves and loads its own",
            )
        super().load_state_dict(state[self._shard_key()])

    def _shard_key(self) -> str:
        """Keeps the shards apart where the states of all ranks stand in one dictionary."""
        return f"shard_{self._shard[0]}_of_{self._shard[1]}"

    def _notice_unreduced(self, optimizer: Optimizer) -> None:
        if self._unreduced is not None:
            self._warn_unreduced(
                "the optimizer steps, but FSDP2 has not called thinwire's hook: no backward pass was synchronized",
                stacklevel=5,
            )

    def _end_step(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._reduced.clear()

    def _prepare(self, group: ShardGroup, gradient: Tensor) -> tuple[list[tuple[str, int, bool]], Tensor, float]:
        """What to give to the reducer: slices, the gradient in true units, and what it was multiplied by before."""
        shards = group.reduced(gradient)
        if gradient.device.type != "cpu" or gradient.dtype not in DTYPES:
            raise Error(
                ErrorCode.invalid_argument,
                f"the gradient of parameter '{shards[0].name}' is {gradient.dtype} on {gradient.device}, expected "
                "float32, float16 or bfloat16 in host memory",
            )
        for shard in shards:
            if self._has_momentum and shard.parameter.grad is not None:
                raise Error(
                    ErrorCode.invalid_argument,
                    f"parameter '{shard.name}' has a gradient already, and momentum would count twice if another were "
                    "added: accumulate with model.set_requires_gradient_sync(False), and zero gradients with "
                    "set_to_none=True",
                )
        divisor = group.later_divisor(gradient)
        buffer = gradient if divisor == 1 else gradient.float().div_(divisor)
        return [(shard.name, shard.numel, True) for shard in shards], buffer, divisor


def _process_group(group: DeviceMesh | dist.ProcessGroup) -> dist.ProcessGroup:
    if not hasattr(group, "get_group"):
        return group
    if group.ndim != 1:
        raise Error(
            ErrorCode.invalid_argument,
            f"replicate_group is a mesh of {group.ndim} dimensions, expected the one of the replicas: "
            'mesh["replicate"]',
        )
    return group.get_group()


def _refuse_unfit(groups: list[ShardGroup], options: ReducerOptions, replicas: dist.ProcessGroup) -> None:
    """Refuses what cannot work, before anything is changed."""
    if not groups:
        raise Error(
            ErrorCode.invalid_argument,
            "the model has no FSDP2 module with a trainable parameter: call "
            'fully_shard(module, mesh=mesh["shard"]) before attach()',
        )
    if options.clip_norm > 0:
        raise Error(
            ErrorCode.invalid_argument,
            f"clip_norm is {options.clip_norm:g}, but under FSDP2 no rank has the whole gradient that it limits: "
            "clip the mean with torch.nn.utils.clip_grad_norm_ after the backward pass",
        )
    others = set(dist.get_process_group_ranks(replicas)) - {dist.get_rank()}
    for group in groups:
        first = group.shards[0]
        if first.parameter.device.type != "cpu":
            raise Error(
                ErrorCode.unsupported,
                f"parameter '{first.name}' is on {first.parameter.device}, but between replicas of FSDP2 this version "
                "reduces in host memory",
            )
        if group.is_replicated:
            raise Error(
                ErrorCode.invalid_argument,
                f"module '{group.name}' is sharded on a mesh with replicas, where FSDP2 reduces between them itself "
                'and nothing is left to save: use fully_shard(module, mesh=mesh["shard"])',
            )
        shared = others.intersection(first.ranks)
        if shared:
            raise Error(
                ErrorCode.invalid_argument,
                f"rank {min(shared)} is in replicate_group and holds another shard of module '{group.name}': shard "
                'with fully_shard(module, mesh=mesh["shard"]) and give the group of mesh["replicate"]',
            )


def _check_replicas(communicator: TorchCommunicator, groups: list[ShardGroup]) -> None:
    """Refuses a group whose ranks hold different shards, on all of them."""
    ranks = groups[0].shards[0].ranks
    mine = torch.tensor([rank_in(ranks), len(ranks)])
    every = torch.empty(communicator.size(), 2, dtype=mine.dtype)
    communicator.all_gather(mine.view(torch.uint8), every.view(-1).view(torch.uint8))
    for rank, (shard, shards) in enumerate(every.tolist()):
        if [shard, shards] != every[0].tolist():
            raise Error(
                ErrorCode.invalid_argument,
                f"rank {rank} of replicate_group holds shard {shard} of {shards}, rank 0 shard {every[0][0]} of "
                f"{every[0][1]}: all its ranks must hold the same",
            )
