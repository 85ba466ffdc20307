"""``python -m thinwire inspect CHECKPOINT`` and ``python -m thinwire info``."""

from __future__ import annotations

import argparse
import pickle
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import __version__
from ._errors import Error

if TYPE_CHECKING:
    from ._state import RankState

_MAGIC = b"THW1"  # of payloads
_LARGEST = 3  # entries shown of each residual


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns its exit status: 0, or 1 after a sentence on stderr."""
    parser = argparse.ArgumentParser(prog="python -m thinwire", description="Looks at checkpoints and at this machine.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("inspect", help="show what a checkpoint holds of thinwire")
    command.add_argument("file", type=Path, help="what torch.save wrote of a handle's state_dict(), alone or in a dict")
    command.set_defaults(run=lambda given: inspect(given.file))
    command = commands.add_parser("info", help="show versions and what PyTorch can reduce over")
    command.set_defaults(run=lambda given: info())
    given = parser.parse_args(arguments)
    try:
        for line in given.run(given):
            print(line)
    except _RefusedError as error:
        print(f"thinwire: {error}", file=sys.stderr)
        return 1
    return 0


def info() -> Iterator[str]:
    """Versions and backends, a line each."""
    yield f"{'thinwire':<12} {__version__}"
    yield f"{'python':<12} {sys.version.split()[0]}"
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        yield f"{'torch':<12} not installed"
        return
    yield f"{'torch':<12} {torch.__version__}"
    names = ("gloo", "nccl", "mpi", "ucc")
    there = [name for name in names if dist.is_available() and getattr(dist, f"is_{name}_available")()]
    yield f"{'backends':<12} {', '.join(there) or 'none'}"


def inspect(path: Path) -> Iterator[str]:
    """What the states in a checkpoint hold, in lines. Loads with ``weights_only=True``: nothing in the file runs."""
    checkpoint = _load(path)
    from ._state import unpack

    empty = True
    for place, rank, ranks, states in _states(checkpoint, ""):
        if not empty:
            yield ""
        empty = False
        try:
            state = unpack(states, rank, ranks)
        except Error as error:
            raise _RefusedError(f"'{path}': {error}") from error
        if place:
            yield f"{'at':<18} {place}"
        yield f"{'rank':<18} {rank} of {ranks}"
        yield from _describe(state)
    if empty:
        raise _RefusedError(f"'{path}' holds no state of thinwire: save a handle's state_dict() in it")


class _RefusedError(Exception):
    """A sentence for the user."""


def _load(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            start = file.read(len(_MAGIC))
    except OSError as error:
        raise _RefusedError(f"'{path}' cannot be read: {error.strerror}") from error
    if start == _MAGIC:
        raise _RefusedError(f"'{path}' is a payload, not a checkpoint: `thinwire inspect {path}` reads it")
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        what = "holds objects that are not loaded, since they could run code" if zipfile.is_zipfile(path) else "is none"
        raise _RefusedError(f"'{path}' is no checkpoint of tensors and plain types: it {what}") from error
    except (RuntimeError, ValueError, EOFError, KeyError, OSError) as error:
        raise _RefusedError(f"'{path}' is no checkpoint that torch.load reads") from error


def _states(value: Any, place: str) -> Iterator[tuple[str, int, int, Mapping[str, Any]]]:
    """Place, rank, number of ranks and the dictionary around each state in a checkpoint, however deep."""
    from ._state import ranks_in

    children: Any = ()
    if isinstance(value, Mapping):
        children = value.items()
        try:
            for rank, ranks in ranks_in(value):
                yield place, rank, ranks, value
            return
        except Error:
            pass  # no state is right here
    elif isinstance(value, (list, tuple)):
        children = enumerate(value)
    for key, child in children:
        yield from _states(child, f"{place}[{key!r}]")


def _describe(state: RankState) -> Iterator[str]:
    residual, velocity = state.residual, state.velocity
    extra = {"decay momentum": state.decay_momentum, "outside momentum": state.outside_momentum}
    rows = [("parameter", "numel", "residual", "nonzero", "velocity", "largest entries of the residual")]
    for name, v in residual.items():
        u = velocity.get(name)
        has_velocity = u is not None and u.numel() > 0
        rows.append(
            (name, str(v.numel()), _norm(v), _nonzero(v), _norm(u) if has_velocity else "-", " ".join(_largest(v)))
        )
    tensors = [*residual.values(), *velocity.values(), *(t for part in extra.values() for t in part.values())]
    yield f"{'step':<18} {state.step}"
    yield f"{'parameters':<18} {len(residual)}, {sum(v.numel() for v in residual.values())} elements"
    yield f"{'bytes':<18} {sum(t.numel() * t.element_size() for t in tensors)}"
    for key, part in extra.items():
        if part:
            yield f"{key:<18} {len(part)} tensors, {sum(t.numel() for t in part.values())} elements"
    yield ""
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in range(1, 5)), row[5]]
        yield "  ".join(cells).rstrip()
    if state.selection:
        yield ""
        yield "thresholds that serve again: unit, ratio, uses"
        for name, (ratio, uses) in state.selection.items():
            yield f"{name}  {ratio:.4g}  {uses}"


def _norm(tensor: Any) -> str:
    return f"{float(tensor.double().norm()):.4g}"


def _nonzero(tensor: Any) -> str:
    return f"{int(tensor.count_nonzero()) / max(1, tensor.numel()):.1%}"


def _largest(tensor: Any) -> Iterator[str]:
    """The entries of largest magnitude, as index:value."""
    flat = tensor.flatten()
    for index in flat.abs().topk(min(_LARGEST, flat.numel())).indices.tolist():
        if flat[index] != 0:
            yield f"{index}:{float(flat[index]):.4g}"


if __name__ == "__main__":
    sys.exit(main())
