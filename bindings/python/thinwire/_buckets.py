"""DDP's buckets on their way into the reducer and out of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.optim import Optimizer

from ._engine import DTYPES, Engine, name_of
from ._errors import Error
from ._layout import flatten, shaped
from ._staging import Staging, future_for, needs_staging
from ._thinwire import Bucket, ReducerOptions, Work
from .c10d import TorchCommunicator


class BucketEngine(Engine):
    """The part of DDP, which reduces buckets. Arguments and errors as those of Engine.

    Args:
        why_unreduced: words for a backward pass after which DDP did not call the hook, given whether it ever has.
    """

    _wrapper = "DDP"

    def __init__(
        self,
        options: ReducerOptions,
        parameters: Mapping[str, Tensor],
        optimizer: Optimizer | None,
        connect: Callable[[], TorchCommunicator],
        why_unreduced: Callable[[bool], str],
        grad_scaler: Any = None,
        check_replicas_every: int = 0,
    ) -> None:
        super().__init__(options, parameters, optimizer, connect, grad_scaler, check_replicas_every)
        self._works: list[Work] = []  # of the current step
        self._last_bucket: int | None = None  # index of the last bucket seen in the step; None: the step is over
        self._touched: set[int] = set()  # parameters that got a gradient since they were last reduced
        self._backward_began: list[int] = []  # when, in ns; empty before the first gradient
        self._reduced: set[int] = set()  # parameters that have been in a bucket
        self._layouts: dict[int, tuple[list[int], Bucket]] = {}  # ids of the parameters, by index of the bucket
        self._why_unreduced = why_unreduced
        self._staging = Staging()
        touch = partial(_touch, self._touched, self._backward_began)
        self._handles += [p.register_post_accumulate_grad_hook(touch) for p in parameters.values()]

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """The hook's work: queues the bucket; the future holds its buffer, with the mean in it."""
        index, buffer, parameters = bucket.index(), bucket.buffer(), bucket.parameters()
        if self._last_bucket is None or index == 0 or index <= self._last_bucket:
            self._works.clear()
            self._begin_step()
        self._last_bucket = None if bucket.is_last() else index

        future = future_for(buffer)
        ids = list(map(id, parameters))
        known = self._layouts.get(index)
        problem = self._problem(index, buffer, parameters) if known is None or known[0] != ids else None
        if problem is None:
            self._works.append(self._submit(bucket, self._bucket(index, ids, parameters), future))
        else:
            self._works.append(self.reducer.fail(problem, partial(_settle, future, partial(future.set_result, buffer))))
        self._touched.difference_update(ids)
        self._reduced.update(ids)
        if bucket.is_last():
            # DDP words a failed future in its own way. What fails in this backward pass is raised as it is, at its end
            # and before DDP looks. There is no such place outside of a backward pass (Join's shadow steps).
            with contextlib.suppress(AttributeError, RuntimeError):
                torch.autograd.Variable._execution_engine.queue_callback(self._raise_failure)
        return future.then(_value)

    def _bucket(self, index: int, ids: list[int], parameters: list[Tensor]) -> Bucket:
        """For the reducer; kept for the next step, in which it is most often the same."""
        known = self._layouts.get(index)
        is_whole = self._touched.issuperset(ids)
        if is_whole and known is not None and known[0] == ids:
            return known[1]
        made = Bucket([(self._names[id(p)], p.numel(), id(p) in self._touched) for p in parameters])
        if is_whole:
            self._layouts[index] = ids, made
        return made

    def _submit(self, bucket: dist.GradBucket, reduced: Bucket, future: Future[Tensor]) -> Work:
        buffer, read_scale = bucket.buffer(), self._read_scale
        if buffer.is_sparse:  # alone in its bucket
            parameter = bucket.parameters()[0]
            flat = flatten(buffer, parameter, parameter.numel())
            done = partial(_settle, future, lambda: future.set_result(_sparse(flat, parameter, buffer)))
            return self.reducer.reduce(reduced, flat, done, read_scale())
        if not needs_staging(buffer):
            done = partial(_settle, future, partial(future.set_result, buffer))
            return self.reducer.reduce(reduced, buffer, done, read_scale())
        host, wait = self._staging.to_host(bucket.index(), buffer)

        def prepare() -> float:
            wait()
            return read_scale()

        done = partial(_settle, future, partial(self._staging.to_device, future, host, buffer))
        return self.reducer.reduce(reduced, host, done, prepare=prepare)

    def flush(self) -> None:
        """See Handle.flush."""
        self._last_bucket = None
        self._touched.clear()  # what was there is replaced
        super().flush()

    def _raise_failure(self) -> None:
        end = time.monotonic_ns()
        began = self._backward_began.pop() if self._backward_began else end
        for work in self._works:
            work.wait()
        if self._trace is not None:
            self._trace.note("backward pass", "training loop", began, end)
            self._trace.note("wait for the means", "training loop", end)

    def _before_optimizer_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        for work in self._works:  # torch 2.1 drops what `_raise_failure` raises
            work.wait()
        return super()._before_optimizer_step(optimizer, args, kwargs)

    def _problem(self, index: int, buffer: Tensor, parameters: list[Tensor]) -> str | None:
        """Why this bucket cannot be reduced, or None."""
        unknown = [p for p in parameters if id(p) not in self._names]
        if unknown:
            return f"a parameter of shape {tuple(unknown[0].shape)} in bucket {index} is not among the named parameters"
        name = self._names[id(parameters[0])]
        if buffer.dtype not in DTYPES:
            return (
                f"the gradient of parameter '{name}' is {name_of(buffer.dtype)}, expected float32, float16 or bfloat16"
            )
        return None

    def _notice_unreduced(self, optimizer: Optimizer) -> None:
        """Notices gradients that the optimizer used although DDP has not called the hook for them.

        After the step, since a closure computes them inside of it. Parameters that DDP never reduces do not count once
        it has reduced others.
        """
        left = self._touched & self._reduced if self._reduced else self._touched
        stepped = [p for group in optimizer.param_groups for p in group["params"]] if left else []
        used = [id(p) for p in stepped if id(p) in left and p.grad is not None]
        if not used:
            return
        self._touched.difference_update(used)
        self._warn_unreduced(
            f"the optimizer used gradients of {len(used)} parameters, '{self._names[used[0]]}' among them, for which "
            f"DDP has not called thinwire's hook: {self._why_unreduced(bool(self._reduced))}",
            stacklevel=5,
        )


def _touch(touched: set[int], began: list[int], parameter: Tensor) -> None:
    if not began:
        began.append(time.monotonic_ns())
    touched.add(id(parameter))


def _settle(future: Future[Tensor], succeed: Callable[[], None], error: Error | None) -> None:
    try:
        if error is not None:
            raise error
        succeed()
    except Exception as failure:  # a future that is never settled would never be done
        future.set_exception(failure)


def _sparse(mean: Tensor, parameter: Tensor, like: Tensor) -> Tensor:
    """The mean [numel], f32 in bucket order, as a sparse_coo tensor of the rows that are not zero."""
    return shaped(mean, parameter).to(like.device, like.dtype).to_sparse(like.sparse_dim())


def _value(future: Future[Tensor]) -> Tensor:
    return future.value()
