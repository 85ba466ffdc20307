"""Momentum, Nesterov and coupled weight decay of torch.optim.SGD, while thinwire does them.

The velocity u <- m·u + g lives in the reducer, per rank. Coupled decay cannot go that way, since it is not part of any
gradient that travels: the same on every rank, it has a momentum of its own, w <- m·w + wd·p, that is added to the mean
before the optimizer steps. u + w is what SGD would keep as its momentum buffer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from ._errors import Error, ErrorCode
from ._layout import flatten, local, shaped
from ._thinwire import ParameterRule, Reducer, ReducerOptions

# What was taken from a parameter group stays noted in it under these keys, and so travels with the optimizer's
# state_dict: one that is loaded before attach() tells what to take, although momentum is 0 in it.
_TAKEN = {key: f"thinwire_{key}" for key in ("momentum", "nesterov", "weight_decay")}


@dataclass
class _Group:
    """What was taken from one parameter group."""

    index: int
    momentum: float
    nesterov: bool
    weight_decay: float
    members: list[tuple[str, Tensor]] = field(default_factory=list)  # reduced by thinwire, by name
    outsiders: list[tuple[str, Tensor]] = field(default_factory=list)  # others, whose momentum is kept up here


class Momentum:
    """Takes momentum over from an SGD optimizer, and gives it back.

    Args:
        optimizer: any optimizer; one that is not SGD, or a reducer without error feedback, leaves nothing to take over.
        names: names of the reduced parameters by id().
        options: the caller's; momentum may be given there or in the optimizer, not in both.

    Raises:
        Error: invalid_argument for momentum in both places, a scheduler that cycles it, or a dampening that is not 0.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str], options: ReducerOptions) -> None:
        self._optimizer = optimizer
        self._names = names
        self._is_watched = isinstance(optimizer, SGD) and options.error_feedback
        self._groups: list[_Group] = []
        self._decay: dict[str, Tensor] = {}  # w, f32, in the shape of what this rank holds of the parameter
        self._outside: dict[str, Tensor] = {}  # momentum buffers of outsiders, f32
        self._skips_decay = False
        _refuse_two_momenta(optimizer, names, options)
        if self._is_watched:
            for index, group in enumerate(optimizer.param_groups):
                self._plan(index, group)

    def _plan(self, index: int, group: dict[str, Any]) -> None:
        own = {key: group[key] for key in _TAKEN}
        if own["momentum"] == 0 and _TAKEN["momentum"] in group:
            own = {key: group[noted] for key, noted in _TAKEN.items()}
        members = [(self._names[id(p)], p) for p in group["params"] if id(p) in self._names]
        if members and group.get("base_momentum") != group.get("max_momentum"):  # left there by OneCycleLR, CyclicLR
            raise Error(
                ErrorCode.invalid_argument,
                f"a scheduler cycles the momentum of parameter group {index} of the optimizer, which thinwire takes "
                "over as it is: make the scheduler with cycle_momentum=False",
            )
        if own["momentum"] == 0 or not members:
            return
        if group["dampening"] != 0:
            raise Error(
                ErrorCode.invalid_argument,
                f"parameter group {index} of the optimizer has dampening {group['dampening']}, which thinwire's "
                "momentum does not have: set it to 0",
            )
        outsiders = [(f"{index}.{place}", p) for place, p in enumerate(group["params"]) if id(p) not in self._names]
        self._groups.append(
            _Group(
                index,
                float(own["momentum"]),
                bool(own["nesterov"]),
                float(own["weight_decay"]),
                members,
                outsiders,
            )
        )

    def extend(self, options: ReducerOptions) -> ReducerOptions:
        """A copy of the options with what was taken over."""
        rules = [
            ParameterRule(escape(name), momentum=group.momentum, nesterov=group.nesterov)
            for group in self._groups
            for name, _ in group.members
        ]
        kinds = {(group.momentum, group.nesterov) for group in self._groups}
        extended = copy.copy(options)
        if len(rules) == len(self._names) and len(kinds) == 1:  # the ordinary case: one momentum for all
            extended.momentum, extended.nesterov = kinds.pop()
        else:
            extended.rules = [*options.rules, *rules]
        return extended

    def take(self, reducer: Reducer, numels: Mapping[str, int]) -> None:
        """Sets the optimizer's own to 0; momentum buffers become the velocities of this rank, [numel] by name.

        Raises:
            Error: invalid_argument for a buffer that is none of the parameter's; then the optimizer is as it was.
        """
        for taken in self._groups:
            for name, parameter in taken.members + taken.outsiders:
                self._check_buffer(name, parameter)
        for taken in self._groups:
            group = self._optimizer.param_groups[taken.index]
            sign = _sign(group)
            for name, parameter in taken.members:
                buffer = self._pop_buffer(parameter)
                if buffer is not None:
                    flat = flatten(local(buffer), local(parameter), numels[name])
                    reducer.set_velocity(name, flat.mul_(sign))
            for key, parameter in taken.outsiders:
                buffer = self._pop_buffer(parameter)
                if buffer is not None:
                    self._outside[key] = local(buffer).detach().float().clone()
            for key, noted in _TAKEN.items():
                group[noted] = getattr(taken, key)
            group["momentum"], group["nesterov"], group["weight_decay"] = 0, False, 0

    def give_back(self, velocities: Mapping[str, Tensor] | None) -> None:
        """Restores the optimizer. velocities: mean over the ranks by name, flat f32; None drops the momentum so far."""
        for taken in self._groups:
            group = self._optimizer.param_groups[taken.index]
            for key, noted in _TAKEN.items():
                group.pop(noted, None)
                group[key] = getattr(taken, key)
            for name, parameter in taken.members:
                if velocities is None or name not in velocities:
                    continue
                buffer = shaped(velocities[name], local(parameter)).to(parameter.device) * _sign(group)
                if name in self._decay:
                    buffer += self._decay[name]
                self._set_buffer(parameter, buffer)
            for key, parameter in taken.outsiders:
                if key in self._outside:
                    self._set_buffer(parameter, self._outside[key])

    def before_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """The optimizer's step pre-hook: adds decay momentum to the means.

        Raises:
            Error: invalid_argument if the optimizer has a momentum or a decay of its own again; unsupported for a fused
                optimizer that unscales gradients itself.
        """
        self._refuse_own_momentum()
        if self._skips_decay:
            self._skips_decay = False
            return None
        if not any(group.weight_decay or group.outsiders for group in self._groups):
            return None
        if getattr(self._optimizer, "grad_scale", None) is not None:
            raise Error(
                ErrorCode.unsupported,
                "an SGD optimizer with fused=True unscales gradients after thinwire has added weight decay: "
                "use fused=False with a gradient scaler",
            )
        # args[0] is the optimizer. A closure computes the gradients inside the step.
        if len(args) > 1 and args[1] is not None:
            return (args[0], self._after(args[1]), *args[2:]), kwargs
        if kwargs.get("closure") is not None:
            return args, {**kwargs, "closure": self._after(kwargs["closure"])}
        self._adjust()
        return None

    def expect_flush(self, is_flush: bool) -> None:
        """Whether the next step takes what was flushed and nothing else: no decay, since no gradient came with it."""
        self._skips_decay = is_flush

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Copies of the decay momentum by parameter name, and of the momentum of parameters outside the model. What has
        not begun yet is zero, so that the names are the same in every step."""
        return {
            what: {
                name: kept[name].clone() if name in kept else torch.zeros_like(p, dtype=torch.float32)
                for name, p in self._owners(what).items()
            }
            for what, kept in (("decay_momentum", self._decay), ("outside_momentum", self._outside))
        }

    def check_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Refuses what `load_state_dict` cannot take.

        Raises:
            Error: invalid_argument naming the parameter.
        """
        known = self._taken()
        for what, tensors in state.items():
            for name, values in tensors.items():
                if name not in known or values.shape != known[name].shape:
                    raise Error(
                        ErrorCode.invalid_argument, f"the saved {what} of '{name}' fits no parameter of the optimizer"
                    )
                if not values.float().isfinite().all():
                    raise Error(
                        ErrorCode.invalid_argument, f"the saved {what} of '{name}' holds a value that is not finite"
                    )
            missing = self._owners(what).keys() - tensors.keys()
            if tensors and missing:
                raise Error(ErrorCode.invalid_argument, f"the state lacks the {what} of '{min(missing)}'")

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """The counterpart of `state_dict`, once `check_state` has found nothing. Without tensors it starts at zero."""
        known = self._taken()
        self._decay, self._outside = (
            {name: t.detach().to(known[name].device, torch.float32, copy=True) for name, t in state[what].items()}
            for what in ("decay_momentum", "outside_momentum")
        )

    def _taken(self) -> dict[str, Tensor]:
        return {name: local(p) for group in self._groups for name, p in group.members + group.outsiders}

    def _owners(self, what: str) -> dict[str, Tensor]:
        """The parameters that have such a momentum."""
        if what == "decay_momentum":
            return {name: local(p) for group in self._groups if group.weight_decay for name, p in group.members}
        return {key: p for group in self._groups for key, p in group.outsiders}

    def _check_buffer(self, name: str, parameter: Tensor) -> None:
        buffer = self._optimizer.state.get(parameter, {}).get("momentum_buffer")
        if buffer is None:
            return
        if not isinstance(buffer, Tensor) or buffer.shape != parameter.shape:
            what = f"has the shape {tuple(buffer.shape)}" if isinstance(buffer, Tensor) else f"is {buffer!r}"
            raise Error(
                ErrorCode.invalid_argument,
                f"the optimizer's momentum buffer of '{name}' {what}, expected the shape {tuple(parameter.shape)}",
            )
        values = local(buffer).float()
        if not (values.coalesce().values() if values.is_sparse else values).isfinite().all():
            raise Error(
                ErrorCode.invalid_argument,
                f"the optimizer's momentum buffer of '{name}' holds a value that is not finite",
            )

    def _pop_buffer(self, parameter: Tensor) -> Tensor | None:
        state = self._optimizer.state.get(parameter)
        return None if state is None else state.pop("momentum_buffer", None)

    def _set_buffer(self, parameter: Tensor, values: Tensor) -> None:
        buffer = torch.empty_like(parameter, requires_grad=False, memory_format=torch.preserve_format)
        local(buffer).copy_(values)
        self._optimizer.state[parameter]["momentum_buffer"] = buffer

    def _after(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def wrapped() -> Any:
            loss = closure()
            self._adjust()
            return loss

        return wrapped

    @torch.no_grad()
    def _adjust(self) -> None:
        for taken in self._groups:
            m, wd = taken.momentum, taken.weight_decay
            sign = _sign(self._optimizer.param_groups[taken.index])
            for name, parameter in taken.members:
                if wd == 0 or parameter.grad is None:
                    continue
                p, grad = local(parameter), local(parameter.grad)
                w = self._decay.get(name)
                if w is None:
                    w = self._decay[name] = torch.zeros_like(p, dtype=torch.float32)
                w.mul_(m).add_(p, alpha=wd)
                grad.add_(torch.add(w * m, p, alpha=wd) if taken.nesterov else w, alpha=sign)
            for key, parameter in taken.outsiders:
                if parameter.grad is None:
                    continue
                p, grad = local(parameter), local(parameter.grad)
                addend = torch.add(grad.float() * sign, p, alpha=wd)
                b = self._outside.get(key)
                b = self._outside[key] = addend.clone() if b is None else b.mul_(m).add_(addend)
                grad.copy_((torch.add(addend, b, alpha=m) if taken.nesterov else b) * sign)

    def _refuse_own_momentum(self) -> None:
        if not self._is_watched:
            return
        taken = {group.index for group in self._groups}
        for index, group in enumerate(self._optimizer.param_groups):
            if group["momentum"] != 0 and any(id(p) in self._names for p in group["params"]):
                raise Error(
                    ErrorCode.invalid_argument,
                    f"parameter group {index} of the optimizer has momentum {group['momentum']}, but thinwire took "
                    "momentum over when it was attached, and an optimizer that keeps its own momentum would apply it "
                    "twice: load optimizer states before attach(), and switch cycle_momentum off in schedulers",
                )
            if index in taken and group["weight_decay"] != 0:
                raise Error(
                    ErrorCode.invalid_argument,
                    f"parameter group {index} of the optimizer has weight_decay {group['weight_decay']}, but thinwire "
                    "took its decay over together with momentum: detach() before changing it",
                )


def _sign(group: dict[str, Any]) -> float:
    return -1.0 if group.get("maximize") else 1.0


def escape(name: str) -> str:
    """A pattern that matches this name only."""
    return "".join("\\" + c if c in "*?\\" else c for c in name)


def _refuse_two_momenta(optimizer: Optimizer, names: Mapping[int, str], options: ReducerOptions) -> None:
    wanted = options.momentum or max((rule.momentum or 0.0 for rule in options.rules), default=0.0)
    if wanted == 0:
        return
    for index, group in enumerate(optimizer.param_groups):
        if not any(id(p) in names for p in group["params"]):
            continue
        own = group.get("momentum") or group.get(_TAKEN["momentum"]) or group.get("betas")
        if own:
            raise Error(
                ErrorCode.invalid_argument,
                f"the options have momentum {wanted}, and the optimizer keeps its own momentum ({own} in parameter "
                f"group {index}): give momentum to one of the two",
            )
        if isinstance(optimizer, SGD) and group["weight_decay"] != 0:
            raise Error(
                ErrorCode.invalid_argument,
                f"the options have momentum {wanted}, and parameter group {index} of the optimizer has weight_decay "
                f"{group['weight_decay']}, which needs the same momentum: set momentum in the optimizer instead, and "
                "thinwire takes both over",
            )
