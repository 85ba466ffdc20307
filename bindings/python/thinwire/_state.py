"""What the states of the ranks look like, what is refused, and states for another number of ranks.

A state is a dictionary under one key that names the rank, so that the states of all ranks can stand in one dictionary,
as they do in a checkpoint of torch.distributed.checkpoint:

    {"rank_0_of_2": {"version": 1, "step": 7, "residual": {"weight": tensor, ...}, ...}}
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ._errors import Error, ErrorCode

_VERSION = 1
_KEY = re.compile(r"rank_(\d+)_of_(\d+)")
_SECTIONS = ("residual", "velocity", "decay_momentum", "outside_momentum")


@dataclass
class RankState:
    """What one rank keeps from step to step."""

    step: int  # number of the next step
    selection: dict[str, tuple[float, int]]  # what ThresholdSearch reuses, by unit: its ratio, and how often it served
    residual: dict[str, Tensor]  # these four by name
    velocity: dict[str, Tensor] = field(default_factory=dict)
    decay_momentum: dict[str, Tensor] = field(default_factory=dict)
    outside_momentum: dict[str, Tensor] = field(default_factory=dict)


def pack(state: RankState, rank: int, world_size: int) -> dict[str, Any]:
    """The state in plain types.

    torch.distributed.checkpoint leaves empty dictionaries out and, when it loads, reads the keys that the state has
    before: so sections without tensors are left out here, "sections" says which there are, and the selection is a list.
    """
    sections = {name: getattr(state, name) for name in _SECTIONS if getattr(state, name)}
    content = {
        "version": _VERSION,
        "step": state.step,
        "selection": [(unit, *memory) for unit, memory in state.selection.items()],
        "sections": list(sections),
        **sections,
    }
    return {_key(rank, world_size): content}


def unpack(state: Mapping[str, Any], rank: int, world_size: int) -> RankState:
    """The counterpart of `pack`: one rank's state out of a dictionary that holds it.

    Raises:
        Error: invalid_argument for the state of another rank or number of ranks, or one that is not whole.
    """
    given = ranks_in(state)
    if (rank, world_size) in given:
        return _unpack(state[_key(rank, world_size)], rank)
    if all(ranks != world_size for _, ranks in given):
        raise _refused(
            f"the state is one of {given[0][1]} ranks, and the number of ranks is {world_size} now: make states for it "
            f"with thinwire.ddp.reshard(states, {world_size})"
        )
    raise _refused(
        f"rank {rank} of {world_size} was given the state of rank {given[0][0]} of {given[0][1]}: residuals differ "
        "from rank to rank, so each rank saves and loads its own"
    )


def reshard(
    states: Iterable[Mapping[str, Any]], world_size: int, conserve: Literal["mean", "sum"] = "mean"
) -> list[dict[str, Any]]:
    """States for another number of ranks, from those of all ranks of one run.

        states = [torch.load(f"rank{r}.pt", weights_only=True)["thinwire"] for r in range(8)]
        handle.load_state_dict(thinwire.ddp.reshard(states, 6)[rank])

    New rank q gets the residuals and velocities of the old ranks q, q + Q, q + 2Q, …, added up and scaled; a rank
    beyond the old ones starts at zero.

    Args:
        states: what `state_dict` returned on every rank, in any order; the states of several ranks may stand in one
            dictionary.
        world_size: the new number of ranks, Q.
        conserve: what stays the same, to the rounding of one f32 operation, of residuals and velocities alike. "mean":
            their mean over the ranks. It is what the model is still owed, so that with the same learning rate no
            gradient is lost or counted twice, and `flush` gives what it would have given before. "sum": their sum, for
            a learning rate that is scaled with the number of ranks, since what reaches the model is rate · sum / Q.

    Returns:
        A state for each new rank, in rank order. Step number, selection memory and the momentum of weight decay are
        those of old rank q mod P.

    Raises:
        Error: invalid_argument for a rank whose state is missing or given twice, states of several runs or steps, and
            what `load_state_dict` refuses in the state of a single rank.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise _refused(f"world_size is {world_size!r}, must be a whole number of at least 1")
    if conserve not in ("mean", "sum"):
        raise _refused(f"conserve is {conserve!r}, expected 'mean' or 'sum'")
    old = _gather(states)
    scale = world_size / len(old) if conserve == "mean" else 1.0
    return [
        pack(
            RankState(
                step=old[0].step,
                selection=old[rank % len(old)].selection,
                residual=_share([o.residual for o in old], rank, world_size, scale),
                velocity=_share([o.velocity for o in old], rank, world_size, scale),
                decay_momentum=_copies(old[rank % len(old)].decay_momentum),
                outside_momentum=_copies(old[rank % len(old)].outside_momentum),
            ),
            rank,
            world_size,
        )
        for rank in range(world_size)
    ]


def _share(old: list[dict[str, Tensor]], rank: int, world_size: int, scale: float) -> dict[str, Tensor]:
    """What a new rank gets of tensors that every old rank has."""
    result = {}
    for name, first in old[0].items():
        total = torch.zeros_like(first, dtype=torch.float64)
        for tensors in old[rank::world_size]:
            total += tensors[name]
        result[name] = (total * scale).float()
        if not result[name].isfinite().all():
            raise _refused(f"what the ranks' states have of '{name}' adds up to a value that is not finite")
    return result


def _copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _gather(states: Iterable[Mapping[str, Any]]) -> list[RankState]:
    """All ranks' states of one step, in rank order."""
    if isinstance(states, Mapping):
        states = [states]
    if not isinstance(states, Iterable):
        raise _refused(f"states is {states!r}, expected the states of all ranks")
    found: dict[tuple[int, int], RankState] = {}
    for state in states:
        for rank, ranks in ranks_in(state):
            if (rank, ranks) in found:
                raise _refused(f"the state of rank {rank} of {ranks} is given twice")
            found[rank, ranks] = _unpack(state[_key(rank, ranks)], rank)
    if not found:
        raise _refused("no state is given")
    sizes = sorted({ranks for _, ranks in found})
    if len(sizes) > 1:
        raise _refused(f"the states are of {sizes[0]} and of {sizes[1]} ranks: they are not of one run")
    for rank in range(sizes[0]):
        if (rank, sizes[0]) not in found:
            raise _refused(
                f"the state of rank {rank} of {sizes[0]} is missing: take a checkpoint that all ranks have written"
            )
    old = [found[rank, sizes[0]] for rank in range(sizes[0])]
    for rank, state in enumerate(old):
        if state.step != old[0].step:
            raise _refused(f"the state of rank {rank} is of step {state.step}, that of rank 0 of step {old[0].step}")
        for section in _SECTIONS:
            _refuse_difference(section, getattr(old[0], section), getattr(state, section), rank)
    return old


def _refuse_difference(section: str, first: dict[str, Tensor], other: dict[str, Tensor], rank: int) -> None:
    for name in sorted(first.keys() | other.keys()):
        if name not in first or name not in other:
            raise _refused(f"of the states of ranks 0 and {rank}, only one has the {section} of '{name}'")
        if first[name].shape != other[name].shape:
            raise _refused(
                f"the {section} of '{name}' has {first[name].numel()} elements in the state of rank 0, and "
                f"{other[name].numel()} in that of rank {rank}"
            )


def ranks_in(state: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Ranks and world sizes of the states that stand in a dictionary; at least one."""
    if not isinstance(state, Mapping):
        raise _refused(f"the state is of type {type(state).__name__}, expected what state_dict() returned")
    matches = [match for key in state if isinstance(key, str) and (match := _KEY.fullmatch(key))]
    if not matches:
        raise _refused("this is no state of thinwire: it lacks a key such as 'rank_0_of_2'")
    return [(int(match[1]), int(match[2])) for match in matches]


def _unpack(content: Any, rank: int) -> RankState:
    of = f"the state of rank {rank}"
    if not isinstance(content, Mapping):
        raise _refused(f"{of} is of type {type(content).__name__}, expected a dictionary")
    if type(content.get("version")) is not int or content["version"] != _VERSION:
        raise _refused(f"{of} has version {content.get('version')!r}, expected {_VERSION}")
    sections = content.get("sections", [])
    if not isinstance(sections, list) or not all(section in _SECTIONS for section in sections):
        raise _refused(f"the sections in {of} are {sections!r}, expected a list of names")
    wanted = ["step", "selection", "sections", "residual", *sections]
    missing = [key for key in wanted if key not in content]
    if missing:
        raise _refused(f"{of} lacks {missing[0]!r}: it is not whole")
    if not _is_count(content["step"], 63):
        raise _refused(f"the step in {of} is {content['step']!r}, expected a number of steps")
    return RankState(
        step=content["step"],
        selection=_selection(content["selection"], of),
        **{name: _tensors(content.get(name, {}), name, of) for name in _SECTIONS},
    )


def _selection(entries: Any, of: str) -> dict[str, tuple[float, int]]:
    result = {}
    for entry in entries if isinstance(entries, (list, tuple)) else [entries]:
        match entry:
            case (str(unit), float(ratio), uses) if _is_count(uses, 32):
                result[unit] = (ratio, uses)
            case _:
                raise _refused(
                    f"the selection in {of} holds {entry!r}, expected the name of a unit, a ratio and a count"
                )
    return result


def _tensors(values: Any, section: str, of: str) -> dict[str, Tensor]:
    if not isinstance(values, Mapping):
        raise _refused(f"the {section} in {of} is of type {type(values).__name__}, expected tensors by name")
    for name, value in values.items():
        if not isinstance(name, str) or not name.isprintable():
            raise _refused(f"the {section} in {of} has the name {name!r}, expected that of a parameter")
        is_tensor = isinstance(value, Tensor) and value.layout == torch.strided and value.is_floating_point()
        if not is_tensor or value.is_meta:
            what = f"{value.dtype}".removeprefix("torch.") if isinstance(value, Tensor) else type(value).__name__
            raise _refused(f"the {section} of '{name}' in {of} is of type {what}, expected a float32 tensor")
    return dict(values)


def _is_count(value: Any, bits: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << bits


def _key(rank: int, world_size: int) -> str:
    return f"rank_{rank}_of_{world_size}"


def _refused(sentence: str) -> Error:
    return Error(ErrorCode.invalid_argument, sentence)
