"""What a training script holds while thinwire is attached to its model."""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from ._engine import Engine
from ._errors import Error, ErrorCode
from ._thinwire import ReducerOptions, StepStats
from ._trace import Trace
from .c10d import TorchCommunicator

Timeout = timedelta | float | None


class Handle:
    """Holds the engine while thinwire is attached, and the communicator for as long as it serves.

    Args:
        process_group: the ranks that take part; the default group unless given.
    """

    _engine: Engine | None  # while attached
    _communicator: TorchCommunicator | None  # kept over detach and attach
    _process_group: dist.ProcessGroup | None
    _timeout: Timeout
    _process: int  # the one that the engine's thread lives in

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self._engine = self._communicator = self._timeout = None
        self._process_group = process_group
        self._process = os.getpid()
        _handles.add(self)

    def detach(self) -> None:
        """Stops reducing: from now on the hook averages densely. Every rank calls it.

        SGD gets momentum, Nesterov and weight decay back, and the mean of the ranks' velocities as its momentum buffer.
        What still waits in the residuals is dropped: `flush` first to keep it. Without effect if detached already.

        Raises:
            Error: timeout or remote if the other ranks do not come; the optimizer has its settings back all the same.
        """
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.release()

    def flush(self) -> None:
        """Averages over the ranks what waits in the residuals. Every rank calls it, between steps.

        The mean replaces what each parameter's `grad` holds; afterwards the residuals are zero. The caller goes on with
        ``optimizer.step()``: with SGD it applies what was flushed, without the weight decay that goes with momentum.
        For the end of training, before an evaluation or `detach`. An adaptive optimizer such as Adam takes the small
        rest for a whole gradient: lower its rate, or leave the step out.

        Raises:
            Error: what ended the last step; timeout or remote if the other ranks do not come.
        """
        self._attached().flush()

    def stats(self) -> StepStats:
        """What the last step did, on this rank. Not active, with the reason, if the hook was not called in it."""
        return self._attached().stats()

    def report(self) -> str:
        """The last step in words: active or not and why, bytes, density, norms, time per stage, exposed wait."""
        return self._attached().report()

    def trace(self, path: str | os.PathLike[str]) -> Trace:
        """Notes what runs when, from now on, for Perfetto (ui.perfetto.dev) or chrome://tracing:

            with handle.trace("trace.json"):
                for batch in islice(batches, 10): ...

        Rows: the training loop (backward pass, wait, optimizer), and each bucket with the stages of its reduction.
        Rank 0 writes its file when the block ends, at stop() or at detach; with "{rank}" in the path every rank does.

        Raises:
            Error: invalid_argument if a trace is running. OSError: the file cannot be written.
        """
        return self._attached().trace(path)

    @property
    def step(self) -> int:
        """Number of the current step, or of the next one before the first."""
        return self._attached().reducer.step

    @property
    def options(self) -> ReducerOptions:
        """A copy of the options in force, with the momentum that was taken over."""
        return self._attached().reducer.options

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, under a key such as ``"rank_0_of_2"``: the step number; residuals and velocities by
        parameter name, f32 [numel] in memory order; the momentum of weight decay in the parameters' shapes. Copies, as
        tensors and plain types only: ``torch.load`` takes it with ``weights_only=True``.

        Each rank saves its own: put the rank into the file name. With torch.distributed.checkpoint give the handle
        itself, ``dcp.save({..., "thinwire": handle}, checkpoint_id=...)``; the key keeps the ranks apart there. Save
        the optimizer and the model beside it. It may be called after an error too: what the failed step sent is back
        in the residuals.
        """
        return self._attached().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads what `state_dict` returned on the same rank of as many ranks. Between steps. For another number of
        ranks there is `thinwire.ddp.reshard`.

        The steps that follow are those of the run that was saved, bit for bit, if DDP's buckets do not matter to them;
        they do to units of whole buckets (``top_k()``), to dense all-reduces over 3 ranks and more, and to local
        clipping. DDP forms its buckets anew after the first backward pass of a process (the second one with
        static_graph): run that pass, on any batch, before loading, and the buckets are the same too.

        Raises:
            Error: invalid_argument for the state of another rank or world size, for names, sizes, types or values that
                do not fit, or a state that is not whole; then nothing is changed.
        """
        self._attached().load_state_dict(state)

    def close(self) -> None:
        """Waits for what is queued and stops the thread, without a word to other ranks or to the optimizer.

        Called at interpreter exit. In a forked child, where the thread does not exist, it does nothing.
        """
        if os.getpid() != self._process:
            return
        engine, self._engine, self._communicator = self._engine, None, None
        if engine is not None:
            engine.close()

    def _refuse_attached(self, options: ReducerOptions) -> None:
        """Refuses to attach twice, or with something that is no options."""
        if self._engine is not None:
            raise Error(ErrorCode.invalid_argument, "thinwire is attached already: detach() first")
        if not isinstance(options, ReducerOptions):
            raise Error(
                ErrorCode.invalid_argument,
                f"options is a {type(options).__name__}, expected ReducerOptions such as thinwire.redsync()",
            )

    def _connect(self, timeout: Timeout) -> TorchCommunicator:
        """The communicator, that of the last time if it still serves: process groups are not easily given back."""
        known = self._communicator
        if known is None or known.dead or timeout != self._timeout:
            known = self._communicator = TorchCommunicator(self._process_group, timeout)
            self._timeout = timeout
        return known

    def _attached(self) -> Engine:
        if self._engine is None:
            raise Error(ErrorCode.invalid_argument, "thinwire is not attached to this model: attach() first")
        return self._engine


_handles: weakref.WeakSet[Handle] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    with contextlib.ExitStack() as stack:  # all of them, whatever one of them raises
        for handle in list(_handles):
            stack.callback(handle.close)


def unwrap(optimizer: Optimizer | None) -> Optimizer | None:
    """The optimizer inside wrappers that keep it under that name, such as Accelerate's."""
    inner = getattr(optimizer, "optimizer", None)
    return unwrap(inner) if isinstance(inner, Optimizer) else optimizer
