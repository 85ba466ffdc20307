"""What a parameter is called, whatever is wrapped around its model."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


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
