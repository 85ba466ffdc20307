"""thinwire under torch.nn.parallel.DistributedDataParallel.

    handle = thinwire.ddp.attach(model, thinwire.redsync(density=0.001), optimizer)

and the rest of the training script stays as it is. Where a framework registers hooks itself, give it the pair
``HookState(...)`` and ``hook``.

Momentum belongs to thinwire: what ``torch.optim.SGD`` has of momentum, Nesterov and (where there is momentum) weight
decay is taken over from the optimizer and given back by ``detach()``. Learning rates and everything else stay with the
optimizer and may change at any time. Other optimizers, Adam among them, keep all they have.
"""

# No `from __future__ import annotations` here: DDP compares the annotations of a hook with the types themselves.

import copy
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ._buckets import BucketEngine
from ._errors import Error, ErrorCode
from ._handle import Handle, Timeout, unwrap
from ._momentum import escape
from ._names import named
from ._state import reshard
from ._thinwire import ParameterRule, ReducerOptions

__all__ = ["Handle", "HookState", "attach", "hook", "reshard"]


class HookState(Handle):
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
            units, and a step that the scaler skips is taken back: what it would have sent stays in the residuals. Needs
            the optimizer, and all of the model's parameters in it. A skip shows in a lowered scale: save states after
            ``scaler.update()``, and do not raise the scale by hand after a skip.
        check_replicas_every: for finding faults: after every so many steps of the optimizer, a checksum of all
            parameters is compared over the ranks, and the first one that differs is named. Not under Join.

    Raises:
        Error: invalid_argument for options out of range, a parameter of another type than float32, float16 and bfloat16
            (by name), momentum both in the options and in the optimizer, dampening, a scheduler that cycles momentum, a
            scaler whose factors are no powers of two, no process group; unsupported for a backend that does not reach
            host memory.
    """

    _engine: BucketEngine | None
    _parameters: dict[str, torch.Tensor]
    _model: "weakref.ref[DistributedDataParallel] | None"  # if known

    def __init__(
        self,
        options: ReducerOptions,
        named_parameters: Iterable[tuple[str, torch.Tensor]],
        optimizer: Optimizer | None = None,
        process_group: dist.ProcessGroup | None = None,
        timeout: Timeout = None,
        grad_scaler: Any = None,
        check_replicas_every: int = 0,
    ) -> None:
        super().__init__(process_group)
        self._parameters = named(named_parameters)
        self._model = None
        self.attach(options, optimizer, timeout, grad_scaler, check_replicas_every)

    def attach(
        self,
        options: ReducerOptions,
        optimizer: Optimizer | None = None,
        timeout: Timeout = None,
        grad_scaler: Any = None,
        check_replicas_every: int = 0,
    ) -> None:
        """Attaches again after `detach`, on every rank. Residuals start at zero. Arguments and errors: as above."""
        self._refuse_attached(options)
        self._engine = BucketEngine(
            options,
            self._parameters,
            unwrap(optimizer),
            lambda: self._connect(timeout),
            self._why_unreduced,
            grad_scaler,
            check_replicas_every,
        )

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

    # DDP models are copied and pickled with the states of their hooks. Threads and process groups do not travel.
    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__init__(None)
        self._parameters = {}
        self._model = None


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
    timeout: Timeout = None,
    grad_scaler: Any = None,
    check_replicas_every: int = 0,
) -> HookState:
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
    hooks = getattr(inner, "_comm_hooks", [])
    if any(registered is not hook for registered, _ in hooks):
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
    listed = list(hooks)
    hooks.clear()  # a copied model has the list of the original, but not its hook
    try:
        inner.register_comm_hook(handle, hook)
    except RuntimeError as error:
        hooks[:] = listed
        handle.detach()
        raise taken from error
    handle._model = weakref.ref(inner)
    _handles[inner] = handle
    return handle


_handles: "weakref.WeakKeyDictionary[DistributedDataParallel, HookState]" = weakref.WeakKeyDictionary()


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
