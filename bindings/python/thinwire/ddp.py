"""thinwire under torch.nn.parallel.DistributedDataParallel.

    handle = thinwire.ddp.attach(model, thinwire.redsync(density=0.001), optimizer)

and the rest of the training script stays as it is. Where a framework registers hooks itself, give it the pair
``HookState(...)`` and ``hook``.

Momentum belongs to thinwire: what ``torch.optim.SGD`` has of momentum, Nesterov and (where there is momentum) weight
decay is taken over from the optimizer and given back by ``detach()``. Learning rates and everything else stay with the
optimizer and may change at any time. Other optimizers, Adam among them, keep all they have.
"""

# No `from __future__ import annotations` here: DDP compares the annotations of a hook with the types themselves.

import atexit
import copy
import os
import weakref
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ._engine import Engine, named
from ._errors import Error, ErrorCode
from ._momentum import escape
from ._state import reshard
from ._thinwire import ParameterRule, ReducerOptions, StepStats
from ._trace import Trace
from .c10d import TorchCommunicator

__all__ = ["Handle", "HookState", "attach", "hook", "reshard"]

_Timeout = timedelta | float | None


class HookState:
    """The state of one model's communication hook, for ``model.register_comm_hook(HookState(...), hook)``.

    It holds a process group of its own and a thread that reduces one bucket after the other. Every rank makes it at the
    same point of the program, with the same options.

    Args:
        options: how to reduce. A parameter with sparse (COO) gradients is no exception, unless a rule says so; `attach`
            adds such rules.
        named_parameters: names and parameters of the model, as ``model.named_parameters()`` gives them. Residuals
            belong to names: ``module.`` and ``_orig_mod.`` are stripped, and a tied parameter counts once.
        optimizer: whose momentum is taken over if it is SGD. None: the caller sees to it that no optimizer applies
            momentum to means that already have it.
        process_group: the ranks that take part; the default group unless given.
        timeout: longest wait for another rank, as timedelta or in seconds; the backend's default unless given.
        grad_scaler: the torch.amp.GradScaler that scales the loss, where there is one. Residuals are then kept in true
            units, and a step that the scaler skips is taken back: what it would have sent stays in the residuals.
        check_replicas_every: for finding faults: after every so many steps of the optimizer, a checksum of all
            parameters is compared over the ranks, and the first one that differs is named. Not under Join.

    Raises:
        Error: invalid_argument for options out of range, a parameter of another type than float32, float16 and bfloat16
            (by name), momentum both in the options and in the optimizer, dampening, a scheduler that cycles momentum, a
            scaler whose factors are no powers of two, no process group; unsupported for a backend that does not reach
            host memory.
    """

    _parameters: dict[str, torch.Tensor]
    _process_group: dist.ProcessGroup | None
    _timeout: _Timeout
    _communicator: TorchCommunicator | None  # kept over detach and attach
    _engine: Engine | None  # while attached
    _model: "weakref.ref[DistributedDataParallel] | None"  # if known
    _process: int  # the one that the engine's thread lives in

    def __init__(
        self,
        options: ReducerOptions,
        named_parameters: Iterable[tuple[str, torch.Tensor]],
        optimizer: Optimizer | None = None,
        process_group: dist.ProcessGroup | None = None,
        timeout: _Timeout = None,
        grad_scaler: Any = None,
        check_replicas_every: int = 0,
    ) -> None:
        self._clear()
        self._parameters = named(named_parameters)
        self._process_group = process_group
        self.attach(options, optimizer, timeout, grad_scaler, check_replicas_every)

    def attach(
        self,
        options: ReducerOptions,
        optimizer: Optimizer | None = None,
        timeout: _Timeout = None,
        grad_scaler: Any = None,
        check_replicas_every: int = 0,
    ) -> None:
        """Attaches again after `detach`, on every rank. Residuals start at zero. Arguments and errors: as above."""
        if self._engine is not None:
            raise Error(ErrorCode.invalid_argument, "thinwire is attached already: detach() first")
        if not isinstance(options, ReducerOptions):
            raise Error(
                ErrorCode.invalid_argument,
                f"options is a {type(options).__name__}, expected ReducerOptions such as thinwire.redsync()",
            )
        self._engine = Engine(
            options,
            self._parameters,
            _unwrap(optimizer),
            lambda: self._connect(timeout),
            self._why_unreduced,
            grad_scaler,
            check_replicas_every,
        )
        _attached.add(self)

    def detach(self) -> None:
        """Stops reducing: from now on the hook averages densely, as DDP does by itself. Every rank calls it.

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
        """What the last step did, on this rank. Not active, with the reason, if DDP did not call the hook in it."""
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
        ranks there is `reshard`.

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

    def _connect(self, timeout: _Timeout) -> TorchCommunicator:
        """The communicator, that of the last time if it still serves: process groups are not easily given back."""
        known = self._communicator
        if known is None or known.dead or timeout != self._timeout:
            known = self._communicator = TorchCommunicator(self._process_group, timeout)
            self._timeout = timeout
        return known

    def _reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if self._engine is None:
            return allreduce_hook(self._process_group, bucket)
        return self._engine.reduce(bucket)

    def _why_unreduced(self, was_called: bool) -> str:
        """Why DDP has not called the hook after a backward pass; was_called: whether it ever has."""
        model = self._model() if self._model is not None else None
        if model is None:
            if not was_called:
                return (
                    "no model has registered it (Lightning's DDPStrategy does so on CUDA devices only: use "
                    "thinwire.lightning), or the forward pass did not go through the DistributedDataParallel"
                )
            return (
                "the backward pass ran under no_sync(), or its forward pass did not go through DistributedDataParallel"
            )
        if getattr(model, "static_graph", False):
            return "DDP with static_graph=True stops reducing once no_sync() was used: leave one of the two out"
        if not getattr(model, "require_forward_param_sync", True):
            return "the last forward pass ran under no_sync(), and no pass without it came before the optimizer's step"
        return f"the forward pass did not go through the DistributedDataParallel around {type(model.module).__name__}"

    def _attached(self) -> Engine:
        if self._engine is None:
            raise Error(ErrorCode.invalid_argument, "thinwire is not attached to this model: attach() first")
        return self._engine

    def _clear(self) -> None:
        self._parameters = {}
        self._process_group = self._timeout = self._communicator = self._engine = self._model = None
        self._process = os.getpid()

    # DDP models are copied and pickled with the states of their hooks. Threads and process groups do not travel.
    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._clear()


Handle = HookState


def hook(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The communication hook: ``model.register_comm_hook(state, thinwire.ddp.hook)``.

    The future holds the bucket's own buffer with the mean over the ranks in it, or a new tensor if it is sparse (COO).
    """
    return state._reduce(bucket)


def attach(
    model: nn.Module,
    options: ReducerOptions,
    optimizer: Optimizer | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: _Timeout = None,
    grad_scaler: Any = None,
    check_replicas_every: int = 0,
) -> Handle:
    """Makes a DDP model reduce its gradients by thinwire. Every rank calls it at the same point, between steps.

    Embeddings with ``sparse=True`` are always dense, unless a rule in `options` says otherwise: the whole table travels
    in every step, as f32, and takes as much memory in its reduction. The optimizer gets the mean as a sparse_coo tensor
    of those rows in which it is not zero; a row that was looked up but has the mean zero is not among them, which
    SparseAdam notices. Where that is too much, ``sparse=False`` makes the table a parameter like any other.

    Args:
        model: a DistributedDataParallel, or torch.compile's wrapper around one.
        options: how to reduce, for example ``thinwire.redsync(density=0.001)``.
        optimizer, process_group, timeout, grad_scaler, check_replicas_every: as in HookState; the process group is the
            model's unless given.

    Returns:
        A handle with detach(), flush(), stats(), report(), state_dict() and load_state_dict(). It may be dropped: the
        model keeps it. After ``handle.detach()`` the model may be attached again, and gives the same handle.

    Raises:
        Error: as HookState; invalid_argument for a model that is not DDP or that has a communication hook already.
    """
    inner = getattr(model, "_orig_mod", model)
    if not isinstance(inner, DistributedDataParallel):
        raise Error(
            ErrorCode.invalid_argument,
            f"the model is a {type(model).__name__}, expected a DistributedDataParallel: wrap it before attach()",
        )
    ignored = getattr(inner, "parameters_to_ignore", ())
    parameters = [(name, p) for name, p in inner.module.named_parameters() if name not in ignored]
    options = _with_dense_tables(options, inner.module, parameters)
    known = _handles.get(inner)
    if known is not None:
        if process_group not in (None, known._process_group):
            known._process_group, known._communicator = process_group, None
        known.attach(options, optimizer, timeout, grad_scaler, check_replicas_every)
        return known

    taken = Error(
        ErrorCode.invalid_argument,
        "the model has a communication hook already, and DDP takes only one: attach thinwire instead of it",
    )
    if getattr(inner, "_comm_hooks", None):
        raise taken
    handle = HookState(
        options,
        parameters,
        optimizer,
        process_group or inner.process_group,
        timeout,
        grad_scaler,
        check_replicas_every,
    )
    try:
        inner.register_comm_hook(handle, hook)
    except RuntimeError as error:  # a hook that DDP does not list
        handle.detach()
        raise taken from error
    handle._model = weakref.ref(inner)
    _handles[inner] = handle
    return handle


_handles: "weakref.WeakKeyDictionary[DistributedDataParallel, HookState]" = weakref.WeakKeyDictionary()
_attached: "weakref.WeakSet[HookState]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for state in list(_attached):
        state.close()


def _with_dense_tables(
    options: ReducerOptions, module: nn.Module, parameters: Iterable[tuple[str, torch.Tensor]]
) -> ReducerOptions:
    """The options with a rule for each embedding with sparse gradients, before the caller's own, which win."""
    tables = {id(m.weight) for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse}
    rules = [ParameterRule(escape(name), dense=True) for name, p in named(parameters).items() if id(p) in tables]
    if not rules or not isinstance(options, ReducerOptions):  # which HookState refuses
        return options
    extended = copy.copy(options)
    extended.rules = [*rules, *options.rules]
    return extended


def _unwrap(optimizer: Optimizer | None) -> Optimizer | None:
    """The optimizer inside wrappers that keep it under that name, such as Accelerate's."""
    inner = getattr(optimizer, "optimizer", None)
    return _unwrap(inner) if isinstance(inner, Optimizer) else optimizer
