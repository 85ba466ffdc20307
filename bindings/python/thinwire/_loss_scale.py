"""A gradient scaler's part in a step: what it multiplied the gradients by, and whether it made the optimizer skip."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ._errors import Error, ErrorCode


class LossScale:
    """Reads a GradScaler.

    Args:
        scaler: a torch.amp.GradScaler or one like it; None where there is none.
        optimizer: what it steps.
        parameters: by name, those that are reduced.

    Raises:
        Error: invalid_argument for something else, one whose scale or factors are no powers of two, or an optimizer
            that does not have all the parameters: the scaler skips one optimizer and not another, but a step is taken
            back as a whole.
    """

    def __init__(self, scaler: Any, optimizer: Optimizer | None, parameters: Mapping[str, Tensor]) -> None:
        self._scaler = scaler
        self._last = math.inf  # the scale of the last step
        self._stepped = False  # the optimizer, since the last step began
        self._found_inf: Tensor | None = None  # of an optimizer that skips by itself
        self._warns = scaler is None
        if scaler is None:
            return
        if isinstance(scaler, type) or not hasattr(scaler, "get_scale") or not hasattr(scaler, "is_enabled"):
            raise Error(
                ErrorCode.invalid_argument,
                f"grad_scaler is a {type(scaler).__name__}, expected a torch.amp.GradScaler",
            )
        if not scaler.is_enabled():
            return
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]} if optimizer is not None else set()
        for name, parameter in parameters.items():
            if id(parameter) not in owned:
                raise Error(
                    ErrorCode.invalid_argument,
                    f"grad_scaler needs the optimizer that has all the model's parameters, and it lacks '{name}'"
                    if optimizer is not None
                    else "grad_scaler needs the optimizer whose steps the scaler skips: give optimizer",
                )
        for what in ("scale", "growth_factor", "backoff_factor"):
            value = getattr(scaler, f"get_{what}", lambda: 1.0)()
            if not isinstance(value, float | int) or math.frexp(value)[0] != 0.5:
                raise Error(
                    ErrorCode.invalid_argument,
                    f"the gradient scaler's {what} is {value}, which must be a power of two: then scaling leaves no "
                    "rounding error in the residuals",
                )

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """For the optimizer's step pre-hook. Warns once of a scaler that nobody told of."""
        self._stepped = True
        self._found_inf = getattr(optimizer, "found_inf", None)
        if self._warns and _is_called_by_scaler():
            self._warns = False
            warnings.warn(
                "a GradScaler scales the loss and thinwire was not told: residuals keep the scale of their step, "
                "clip_norm clips the scaled gradient, and a step that the scaler skips for a reason of its own is "
                "lost; give it to attach(..., grad_scaler=scaler)",
                stacklevel=6,
            )

    def take_skipped(self) -> bool:
        """Whether the scaler made the optimizer skip the last step; true only once."""
        if not self._is_on() or (self._stepped and self._found_inf is None):
            return False
        if self._stepped and not bool(self._found_inf):
            return False
        before, self._last = self._last, self._scaler.get_scale()
        return self._last < before < math.inf

    def begin_step(self) -> Callable[[], float]:
        """Reads the scale of the step that begins. What is returned waits for it, on any thread."""
        self._stepped, self._found_inf = False, None
        if not self._is_on():
            return _one
        scale = self._scaler._get_scale_async() if hasattr(self._scaler, "_get_scale_async") else None
        if scale is None or scale.device.type == "cpu":
            self._last = value = float(self._scaler.get_scale())
            return lambda: value
        host = torch.empty(1, dtype=torch.float32, pin_memory=True)
        host.copy_(scale.reshape(1), non_blocking=True)
        ready = torch.get_device_module(scale.device).Event()
        ready.record()

        def read() -> float:
            ready.synchronize()
            self._last = float(host)
            return self._last

        return read

    def _is_on(self) -> bool:
        return self._scaler is not None and self._scaler.is_enabled()


def _one() -> float:
    return 1.0


def _is_called_by_scaler() -> bool:
    frame = sys._getframe(2)
    for _ in range(12):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if frame.f_globals.get("__name__", "").endswith(".grad_scaler"):
            return bool(frame.f_locals["self"].is_enabled())
    return False
