"""What stands between a model's communication hook and the reducer while thinwire is attached."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from ._errors import Error, ErrorCode
from ._layout import local, shaped
from ._loss_scale import LossScale
from ._momentum import Momentum
from ._replicas import check_replicas
from ._report import describe
from ._state import RankState, pack, unpack
from ._thinwire import Reducer, ReducerOptions, StepStats
from ._trace import Trace
from .c10d import TorchCommunicator

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_FLUSH_ELEMENTS = 1 << 22  # of one bucket of a flush: 16 MiB of f32


class Engine:
    """A reducer, the names of the parameters, and the optimizer's momentum.

    Args:
        options: how to reduce; the same on every rank.
        parameters: by name, those that the wrapper reduces.
        optimizer: whose momentum to take over, if any.
        connect: makes the communicator, once everything else has been found sound; the reducer's thread uses it alone.
        grad_scaler: what scales the loss, if anything.
        check_replicas_every: compares the replicas after every so many steps of the optimizer; 0: never.
        numels: elements of the reduced gradients by name, where shards are padded; those of the parameters otherwise.

    Raises:
        Error: for parameters, options or an optimizer that do not fit; then the optimizer is as it was.
    """

    _wrapper: ClassVar[str]  # what calls the hook, in words

    def __init__(
        self,
        options: ReducerOptions,
        parameters: Mapping[str, Tensor],
        optimizer: Optimizer | None,
        connect: Callable[[], TorchCommunicator],
        grad_scaler: Any = None,
        check_replicas_every: int = 0,
        numels: Mapping[str, int] | None = None,
    ) -> None:
        options.validate()
        _check_parameters(parameters)
        _check_optimizer(optimizer, parameters)
        _check_interval(check_replicas_every, optimizer)
        self._scale = LossScale(grad_scaler, optimizer, parameters)
        self._parameters = dict(parameters)
        self._numels = {name: p.numel() for name, p in parameters.items()} if numels is None else dict(numels)
        self._names = {id(p): name for name, p in parameters.items()}
        self._momentum = None if optimizer is None else Momentum(optimizer, self._names, options)
        if self._momentum is not None:
            options = self._momentum.extend(options)
        self._communicator = connect()
        self.reducer = Reducer(options, list(self._numels.items()), self._communicator)
        if self._momentum is not None:
            self._momentum.take(self.reducer, self._numels)

        # Why the last step reduced nothing, if so.
        self._unreduced: str | None = f"{self._wrapper} has not called the hook yet"
        self._has_warned = False
        self._read_scale: Callable[[], float] = lambda: 1.0
        self._norms: deque[tuple[int, float]] = deque(maxlen=8)  # residual over gradient, by step
        self._trace: Trace | None = None
        self._check_replicas_every = check_replicas_every
        self._optimizer_steps = 0
        self._optimizer_began = 0  # the last step, in ns
        self._handles: list[Any] = []  # of hooks
        if optimizer is not None:
            self._handles.append(optimizer.register_step_pre_hook(self._before_optimizer_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_optimizer_step))

    def flush(self) -> None:
        """Averages what waits in the residuals into the gradients. See Handle.flush."""
        self._begin_step("flush")
        for names in _groups(self._numels, _FLUSH_ELEMENTS):
            numels = [self._numels[name] for name in names]
            mean = torch.zeros(sum(numels))
            self.reducer.reduce([(name, numel, True) for name, numel in zip(names, numels, strict=True)], mean).wait()
            for name, part in zip(names, mean.split(numels), strict=True):
                _write_gradient(self._parameters[name], part)

    def stats(self) -> StepStats:
        """See Handle.stats."""
        return self.reducer.stats() if self._unreduced is None else StepStats(self.reducer.step, self._unreduced)

    def report(self) -> str:
        """See Handle.report."""
        return describe(self.stats(), list(self._norms), self._read_scale())

    def trace(self, path: str | os.PathLike[str]) -> Trace:
        """See Handle.trace."""
        if self._trace is not None:
            raise Error(ErrorCode.invalid_argument, "a trace is running already: stop() it first")
        self._trace = Trace(self.reducer, path, self._communicator.rank(), self._forget_trace)
        return self._trace

    def state_dict(self) -> dict[str, Any]:
        """See Handle.state_dict."""
        self._undo_if_skipped()
        state = self.reducer.state()
        saved = RankState(
            step=state["step"],
            selection=state["selection"],
            residual={name: torch.from_dlpack(v) for name, v in state["residual"].items()},
            velocity={name: torch.from_dlpack(u) for name, u in state["velocity"].items()},
            **({} if self._momentum is None else self._momentum.state_dict()),
        )
        return pack(saved, self._communicator.rank(), self._communicator.size())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See Handle.load_state_dict."""
        saved = unpack(state, self._communicator.rank(), self._communicator.size())
        momentum = {"decay_momentum": saved.decay_momentum, "outside_momentum": saved.outside_momentum}
        if self._momentum is not None:
            self._momentum.check_state(momentum)
        elif any(momentum.values()):
            raise Error(
                ErrorCode.invalid_argument,
                "the state has momentum of an optimizer, but thinwire was attached without one",
            )
        self.reducer.load(saved.step, _host_arrays(saved.residual), _host_arrays(saved.velocity), saved.selection)
        if self._momentum is not None:
            self._momentum.load_state_dict(momentum)

    def release(self) -> None:
        """Stops, and gives momentum back to the optimizer. Every rank calls it, unless the communicator is dead."""
        self._undo_if_skipped()
        velocities = None
        try:
            if self._momentum is not None and not self._communicator.dead:
                velocities = self._mean_velocities()
        finally:
            try:
                self.close()
            finally:
                if self._momentum is not None:
                    self._momentum.give_back(velocities)

    def close(self) -> None:
        """Waits for the jobs in the queue and stops the thread. Leaves the optimizer as it is."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.reducer.close()
        if self._trace is not None:
            self._trace.stop()

    def _begin_step(self, mode: Literal["scheduled", "flush"] = "scheduled") -> None:
        self._unreduced = None
        self._undo_if_skipped()
        self.reducer.begin_step(mode)
        if self._momentum is not None:
            self._momentum.expect_flush(mode == "flush")
        if mode == "flush":
            return
        self._read_scale = self._scale.begin_step()
        if self.reducer.step % StepStats.norm_interval == 1:
            last = self.reducer.stats()
            if last.gradient_norm > 0:
                self._norms.append((self.reducer.step - 1, last.residual_norm / last.gradient_norm))

    def _undo_if_skipped(self) -> None:
        if self._scale.take_skipped():
            with contextlib.suppress(Error):  # of a step that failed, and is taken back already
                self.reducer.undo_step()

    def _forget_trace(self) -> None:
        self._trace = None

    def _before_optimizer_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        self._scale.before_optimizer_step(optimizer)
        self._optimizer_began = time.monotonic_ns()
        return None if self._momentum is None else self._momentum.before_step(args, kwargs)

    def _after_optimizer_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._trace is not None:
            self._trace.note("optimizer step", "training loop", self._optimizer_began)
        self._notice_unreduced(optimizer)
        self._optimizer_steps += 1
        if self._check_replicas_every and self._optimizer_steps % self._check_replicas_every == 0:
            self.reducer.stats()  # waits: no job may run meanwhile
            check_replicas(self._parameters, self._communicator)

    def _notice_unreduced(self, optimizer: Optimizer) -> None:
        """Notices gradients that the optimizer used although the hook was not called for them."""
        raise NotImplementedError

    def _warn_unreduced(self, reason: str, stacklevel: int) -> None:
        self._unreduced = reason
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(reason, stacklevel=stacklevel + 1)

    def _mean_velocities(self) -> dict[str, Tensor]:
        mine = {name: torch.from_dlpack(u) for name, u in self.reducer.state()["velocity"].items()}
        self.reducer.close()  # its thread uses the communicator no more
        for names in _groups({name: u.numel() for name, u in mine.items()}, _FLUSH_ELEMENTS):
            flat = torch.cat([mine[name] for name in names])
            self._communicator.all_reduce(flat, flat)
            flat /= self._communicator.size()
            mine.update(zip(names, flat.split([mine[name].numel() for name in names]), strict=True))
        return mine


def _check_parameters(parameters: Mapping[str, Tensor]) -> None:
    """Refuses parameters whose gradients cannot be reduced, by name."""
    if not parameters:
        raise Error(ErrorCode.invalid_argument, "there is no parameter that requires a gradient")
    for name, p in parameters.items():
        if p.dtype not in DTYPES:
            raise Error(
                ErrorCode.invalid_argument,
                f"parameter '{name}' is {name_of(p.dtype)}, expected float32, float16 or bfloat16",
            )
        if p.is_meta:
            raise Error(ErrorCode.invalid_argument, f"parameter '{name}' is on the meta device and has no values")


def _check_optimizer(optimizer: Optimizer | None, parameters: Mapping[str, Tensor]) -> None:
    if optimizer is None:
        return
    if not isinstance(optimizer, Optimizer):
        raise Error(
            ErrorCode.invalid_argument,
            f"optimizer is a {type(optimizer).__name__}, expected one torch.optim.Optimizer, or None",
        )
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(p) in own for p in parameters.values()):
        raise Error(
            ErrorCode.invalid_argument,
            f"the optimizer has none of the model's parameters, such as '{next(iter(parameters))}'",
        )


def _check_interval(check_replicas_every: int, optimizer: Optimizer | None) -> None:
    if not isinstance(check_replicas_every, int) or check_replicas_every < 0:
        raise Error(
            ErrorCode.invalid_argument,
            f"check_replicas_every is {check_replicas_every!r}, expected a number of steps, or 0 for never",
        )
    if check_replicas_every and optimizer is None:
        raise Error(ErrorCode.invalid_argument, "check_replicas_every counts the optimizer's steps: give optimizer")


def name_of(dtype: torch.dtype) -> str:
    """For error messages."""
    return str(dtype).removeprefix("torch.")


def _groups(numels: Mapping[str, int], limit: int) -> list[list[str]]:
    """The names of all that is not empty in order, in groups of at most `limit` elements or of one name."""
    groups: list[list[str]] = []
    filled = limit + 1
    for name, numel in numels.items():
        if numel == 0:
            continue
        if filled + numel > limit:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += numel
    return groups


def _write_gradient(parameter: Tensor, mean: Tensor) -> None:
    values = shaped(mean, local(parameter))
    if parameter.grad is not None and parameter.grad.is_sparse:
        parameter.grad = values.to(parameter.dtype).to_sparse(parameter.grad.sparse_dim())
    elif parameter.grad is not None:
        local(parameter.grad).copy_(values)
    elif mean.any():  # a parameter that was never used stays without a gradient
        parameter.grad = torch.empty_like(parameter, requires_grad=False, memory_format=torch.preserve_format)
        local(parameter.grad).copy_(values)


def _host_arrays(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().to("cpu", torch.float32).reshape(-1).contiguous() for name, t in tensors.items()}
