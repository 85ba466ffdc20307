"""What stands between DDP's hook and the reducer while thinwire is attached to a model."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.optim import Optimizer

from ._errors import Error, ErrorCode
from ._layout import flatten, shaped
from ._momentum import Momentum
from ._thinwire import Reducer, ReducerOptions, StepStats, Work
from .c10d import TorchCommunicator

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_FLUSH_ELEMENTS = 1 << 22  # of one bucket of a flush: 16 MiB of f32
_FORMAT = 1  # of state dictionaries
_STATE_KEYS = ("rank", "world_size", "step", "residual", "velocity", "decay_momentum", "outside_momentum")


class Engine:
    """A reducer, the names of the parameters, and the optimizer's momentum.

    Args:
        options: how to reduce; the same on every rank.
        parameters: by name, those that DDP reduces.
        optimizer: whose momentum to take over, if any.
        connect: makes the communicator, once everything else has been found sound; the reducer's thread uses it alone.

    Raises:
        Error: for parameters, options or an optimizer that do not fit; then the optimizer is as it was.
    """

    def __init__(
        self,
        options: ReducerOptions,
        parameters: Mapping[str, Tensor],
        optimizer: Optimizer | None,
        connect: Callable[[], TorchCommunicator],
    ) -> None:
        options.validate()
        _check_parameters(parameters)
        self._parameters = dict(parameters)
        self._names = {id(p): name for name, p in parameters.items()}
        self._momentum = None if optimizer is None else Momentum(optimizer, self._names, options)
        if self._momentum is not None:
            options = self._momentum.extend(options)
        self._communicator = connect()
        self.reducer = Reducer(options, [(name, p.numel()) for name, p in parameters.items()], self._communicator)
        if self._momentum is not None:
            self._momentum.take(self.reducer)

        self._works: list[Work] = []  # of the current step
        self._last_bucket: int | None = None  # index of the last bucket seen in the step; None: the step is over
        self._was_called = False
        self._touched: set[int] = set()  # parameters that got a gradient since they were last reduced
        touch = partial(_touch, self._touched)
        self._handles: list[Any] = [p.register_post_accumulate_grad_hook(touch) for p in parameters.values()]
        if optimizer is not None:
            self._handles.append(optimizer.register_step_pre_hook(self._before_optimizer_step))

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """The hook's work: queues the bucket; the future holds its buffer, with the mean in it."""
        index, buffer, parameters = bucket.index(), bucket.buffer(), bucket.parameters()
        if self._last_bucket is None or index == 0 or index <= self._last_bucket:
            self._begin_step()
        self._last_bucket = None if bucket.is_last() else index

        future: Future[Tensor] = Future()
        problem = self._problem(index, buffer, parameters)
        done = partial(_settle, future, buffer)
        if problem is None and buffer.is_sparse:  # alone in its bucket
            flat = flatten(buffer, parameters[0])
            done = partial(_settle_sparse, future, flat, parameters[0], buffer)
            buffer = flat
        if problem is None:
            slices = [(self._names[id(p)], p.numel(), id(p) in self._touched) for p in parameters]
            self._works.append(self.reducer.reduce(slices, buffer, done))
        else:
            self._works.append(self.reducer.fail(problem, done))
        self._touched.difference_update(map(id, parameters))
        if bucket.is_last():
            # DDP words a failed future in its own way. What fails in this backward pass is raised as it is, at its end
            # and before DDP looks. There is no such place outside of a backward pass (Join's shadow steps).
            with contextlib.suppress(AttributeError, RuntimeError):
                torch.autograd.Variable._execution_engine.queue_callback(self._raise_failure)
        return future.then(_value)

    def flush(self) -> None:
        """Averages what waits in the residuals into the gradients. See HookState.flush."""
        self._last_bucket = None
        self.reducer.begin_step("flush")
        for group in _groups(self._parameters, _FLUSH_ELEMENTS):
            mean = torch.zeros(sum(p.numel() for _, p in group))
            self.reducer.reduce([(name, p.numel(), True) for name, p in group], mean).wait()
            begin = 0
            for _, p in group:
                _write_gradient(p, shaped(mean[begin : begin + p.numel()], p))
                begin += p.numel()
        if self._momentum is not None:
            self._momentum.expect_flush(True)

    def stats(self) -> StepStats:
        """What the last step did, on this rank."""
        return self.reducer.stats()

    def state_dict(self) -> dict[str, Any]:
        """See HookState.state_dict."""
        state = self.reducer.state()
        none: dict[str, Any] = {"decay_momentum": {}, "outside_momentum": {}}
        return {
            "version": _FORMAT,
            "rank": self._communicator.rank(),
            "world_size": self._communicator.size(),
            "step": state["step"],
            "residual": {name: torch.from_dlpack(v) for name, v in state["residual"].items()},
            "velocity": {name: torch.from_dlpack(u) for name, u in state["velocity"].items()},
            "selection": state["selection"],
            **(none if self._momentum is None else self._momentum.state_dict()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See HookState.load_state_dict."""
        if state.get("version") != _FORMAT:
            raise Error(
                ErrorCode.invalid_argument,
                f"this is no state of thinwire, or one of another version: version is {state.get('version')!r}, "
                f"expected {_FORMAT}",
            )
        missing = [key for key in _STATE_KEYS if key not in state]
        if missing:
            raise Error(ErrorCode.invalid_argument, f"the state lacks {missing[0]!r}: it is not whole")
        mine, saved = (self._communicator.rank(), self._communicator.size()), (state["rank"], state["world_size"])
        if mine != saved:
            raise Error(
                ErrorCode.invalid_argument,
                f"rank {mine[0]} of {mine[1]} was given the state of rank {saved[0]} of {saved[1]}: residuals differ "
                "from rank to rank, so each rank saves and loads its own",
            )
        self.reducer.load(
            state["step"],
            _host_arrays(state["residual"]),
            _host_arrays(state["velocity"]),
            state.get("selection", {}),
        )
        if self._momentum is not None:
            self._momentum.load_state_dict(state)

    def release(self) -> None:
        """Stops, and gives momentum back to the optimizer. Every rank calls it, unless the communicator is dead."""
        velocities = None
        try:
            if self._momentum is not None and not self._communicator.dead:
                velocities = self._mean_velocities()
        finally:
            self.close()
            if self._momentum is not None:
                self._momentum.give_back(velocities)

    def close(self) -> None:
        """Waits for the jobs in the queue and stops the thread. Leaves the optimizer as it is."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.reducer.close()

    def _begin_step(self) -> None:
        self._was_called = True
        self._works.clear()
        if self._momentum is not None:
            self._momentum.expect_flush(False)
        self.reducer.begin_step()

    def _raise_failure(self) -> None:
        for work in self._works:
            work.wait()

    def _problem(self, index: int, buffer: Tensor, parameters: list[Tensor]) -> str | None:
        """Why this bucket cannot be reduced, or None."""
        unknown = [p for p in parameters if id(p) not in self._names]
        if unknown:
            return f"a parameter of shape {tuple(unknown[0].shape)} in bucket {index} is not among the named parameters"
        name = self._names[id(parameters[0])]
        if buffer.dtype not in _DTYPES:
            return f"the gradient of parameter '{name}' is {_dtype(buffer)}, expected float32, float16 or bfloat16"
        if buffer.device.type != "cpu":
            return f"the gradient of parameter '{name}' is on {buffer.device}, this version reduces in host memory"
        return None

    def _before_optimizer_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        has_closure = len(args) > 1 or bool(kwargs)
        if not self._was_called and not has_closure:
            self._was_called = True
            warnings.warn(
                "the optimizer steps, but DDP has not called thinwire's hook: it reduces by itself, or not at all",
                stacklevel=4,
            )
        return None if self._momentum is None else self._momentum.before_step(args, kwargs)

    def _mean_velocities(self) -> dict[str, Tensor]:
        local = {name: torch.from_dlpack(u) for name, u in self.reducer.state()["velocity"].items()}
        self.reducer.close()  # its thread uses the communicator no more
        for group in _groups(local, _FLUSH_ELEMENTS):
            flat = torch.cat([u for _, u in group])
            self._communicator.all_reduce(flat, flat)
            flat /= self._communicator.size()
            local.update(zip((name for name, _ in group), flat.split([u.numel() for _, u in group]), strict=True))
        return local


def _check_parameters(parameters: Mapping[str, Tensor]) -> None:
    """Refuses parameters whose gradients cannot be reduced, by name."""
    if not parameters:
        raise Error(ErrorCode.invalid_argument, "there is no parameter that requires a gradient")
    for name, p in parameters.items():
        if p.dtype not in _DTYPES:
            raise Error(
                ErrorCode.invalid_argument,
                f"parameter '{name}' is {_dtype(p)}, expected float32, float16 or bfloat16",
            )
        if p.device.type != "cpu":
            raise Error(
                ErrorCode.unsupported, f"parameter '{name}' is on {p.device}, this version reduces in host memory"
            )


def _touch(touched: set[int], parameter: Tensor) -> None:
    touched.add(id(parameter))


def _settle(future: Future[Tensor], buffer: Tensor, error: Error | None) -> None:
    if error is None:
        future.set_result(buffer)
    else:
        future.set_exception(error)


def _settle_sparse(future: Future[Tensor], mean: Tensor, parameter: Tensor, like: Tensor, error: Error | None) -> None:
    """The mean [numel], f32 in bucket order, as a sparse_coo tensor of the rows that are not zero."""
    if error is None:
        future.set_result(shaped(mean, parameter).to(like.dtype).to_sparse(like.sparse_dim()))
    else:
        future.set_exception(error)


def _value(future: Future[Tensor]) -> Tensor:
    return future.value()


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _groups(tensors: Mapping[str, Tensor], limit: int) -> list[list[tuple[str, Tensor]]]:
    """The non-empty tensors in order, in groups of at most `limit` elements or of one tensor."""
    groups: list[list[tuple[str, Tensor]]] = []
    filled = limit + 1
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            continue
        if filled + tensor.numel() > limit:
            groups.append([])
            filled = 0
        groups[-1].append((name, tensor))
        filled += tensor.numel()
    return groups


def _write_gradient(parameter: Tensor, mean: Tensor) -> None:
    if parameter.grad is not None and parameter.grad.is_sparse:
        parameter.grad = mean.to(parameter.dtype).to_sparse(parameter.grad.sparse_dim())
    elif parameter.grad is not None:
        parameter.grad.copy_(mean)
    elif mean.any():  # a parameter that was never used stays without a gradient
        parameter.grad = torch.empty_like(parameter, memory_format=torch.preserve_format).copy_(mean)


def _host_arrays(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().to("cpu", torch.float32).reshape(-1).contiguous() for name, t in tensors.items()}


def named(named_parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Trainable parameters by their plain names.

    What wrappers add is stripped: a leading ``module.`` (DDP) and ``_orig_mod.`` anywhere (torch.compile). Where that
    would give two parameters one name, those keep theirs. A tied parameter has its first name.
    """
    first: dict[int, tuple[str, Tensor]] = {}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            first.setdefault(id(parameter), (name, parameter))
    plain = [_plain(name) for name, _ in first.values()]
    doubled = {name for name in plain if plain.count(name) > 1} if len(set(plain)) < len(plain) else set()
    return {
        name if short in doubled else short: parameter
        for short, (name, parameter) in zip(plain, first.values(), strict=True)
    }


def _plain(name: str) -> str:
    parts = [part for part in name.split(".") if part != "_orig_mod"]
    while len(parts) > 1 and parts[0] == "module":
        parts.pop(0)
    return ".".join(parts)
