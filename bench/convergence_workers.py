"""P workers in one process: a reducer each, connected as threads, and the check that they lose nothing."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

import thinwire

TIMEOUT = 300.0  # seconds, for a worker that has stalled
ROUNDING = 4 * np.finfo(np.float32).eps  # of a handful of f32 operations, relative to their largest operand
SMALLEST = float(np.finfo(np.float32).smallest_subnormal)  # velocities of dead units decay down to it


class ConservationError(Exception):
    """What was sent and what waits do not add up to what came in; the message says where."""


@dataclass(frozen=True)
class Place:
    """Where a parameter lies in the flat buffers."""

    name: str
    begin: int
    end: int


class FlatModel:
    """A model whose parameters are views of one buffer [numel], in the order in which backward reaches them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        named = list(model.named_parameters())[::-1]
        self.parameters = [p for _, p in named]
        self.places: list[Place] = []
        for name, p in named:
            begin = self.places[-1].end if self.places else 0
            self.places.append(Place(name, begin, begin + p.numel()))
        self.flat = nn.Parameter(torch.empty(self.places[-1].end))
        for p, view in zip(self.parameters, self.views(self.flat.data), strict=True):
            view.copy_(p.data)
            p.data = view

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Views of a buffer [numel] in the shapes and memory formats of the parameters."""
        return [
            buffer[place.begin : place.end].as_strided(p.shape, p.stride())
            for place, p in zip(self.places, self.parameters, strict=True)
        ]


class Workers:
    """P reducers of one bucket that holds all parameters.

    Args:
        options: how to reduce.
        places: the parameters of the bucket.
        ranks: P.
    """

    def __init__(self, options: thinwire.ReducerOptions, places: list[Place], ranks: int) -> None:
        self._options, self._places = options, places
        self._communicators = thinwire.make_thread_communicators(ranks, timeout=TIMEOUT)
        named = [(place.name, place.end - place.begin) for place in places]
        self._reducers = [thinwire.Reducer(options, named, one) for one in self._communicators]
        self._slices = [(name, numel, True) for name, numel in named]

    def reduce(self, gradients: Tensor, mode: str = "scheduled", check: bool = False) -> list[thinwire.StepStats]:
        """One step. Row w of gradients [P, numel] f32 is what worker w brings, and afterwards the mean.

        check: whether to see that nothing is lost and that all means are the same, bit for bit.
        Errors: ConservationError; thinwire.Error.
        """
        before = [self._state(reducer) for reducer in self._reducers] if check else None
        brought = gradients.numpy().copy() if check else None
        for reducer in self._reducers:
            reducer.begin_step(mode)
        works = [
            reducer.reduce(self._slices, row) for reducer, row in zip(self._reducers, gradients.unbind(), strict=True)
        ]
        for work in works:
            work.wait()
        stats = [reducer.stats() for reducer in self._reducers]
        if check:
            after = [self._state(reducer) for reducer in self._reducers]
            check_step(self._options, self._places, before, brought, after, gradients.numpy(), stats, mode)
        return stats

    def flush(self, numel: int) -> None:
        """Averages what waits, and sees that nothing waits then. Errors: ConservationError."""
        self.reduce(torch.zeros(len(self._reducers), numel), "flush", check=True)
        for worker, reducer in enumerate(self._reducers):
            for place, (v, _) in zip(self._places, self._state(reducer), strict=True):
                if v.any():
                    raise ConservationError(
                        f"parameter '{place.name}' of worker {worker} has {np.count_nonzero(v)} elements waiting after "
                        "a flush"
                    )

    def close(self) -> None:
        """Stops the reducers' threads."""
        for reducer in self._reducers:
            reducer.close()

    def _state(self, reducer: thinwire.Reducer) -> list[tuple[np.ndarray, np.ndarray]]:
        """Copies of v and u by parameter."""
        return [
            (np.from_dlpack(reducer.residual(place.name)), np.from_dlpack(reducer.velocity(place.name)))
            for place in self._places
        ]


State = list[tuple[np.ndarray, np.ndarray]]  # v and u (empty without momentum) by parameter


def check_step(
    options: thinwire.ReducerOptions,
    places: list[Place],
    before: list[State],
    gradients: np.ndarray,
    after: list[State],
    means: np.ndarray,
    stats: list[thinwire.StepStats],
    mode: str = "scheduled",
) -> None:
    """Sees that a step kept the books, element by element. States and rows by worker.

    With a = v + x, the residual after the worker's gradient came in by the rule of momentum, in f32:
    the means are the same on all workers, bit for bit; what a worker did not send stays a, bit for bit; it changed no
    more than it says it sent; where no worker sent, the mean is 0; and the sum over the workers of a - v' is P times
    the mean. Where rounding is not fed back, the last rule cannot hold and is left out.
    Errors: ConservationError.
    """
    ranks = len(before)
    for worker in range(1, ranks):
        if not np.array_equal(means[0].view(np.uint32), means[worker].view(np.uint32)):
            raise ConservationError(f"the means of workers 0 and {worker} differ")
    balanced = mode == "flush" or options.rounding_feedback
    clips = [1.0] * ranks if mode == "flush" else [one.clip_factor for one in stats]
    for worker, clip in enumerate(clips):
        if mode != "flush" and not math.isclose(clip, clip_factor(options, gradients[worker], ranks), rel_tol=1e-5):
            raise ConservationError(f"step {stats[0].step}: worker {worker} clipped its gradient by a factor of {clip}")
    changed = [0] * ranks
    for number, place in enumerate(places):
        here = slice(place.begin, place.end)
        sent = np.zeros(place.end - place.begin)
        size = np.zeros_like(sent)  # of what is added up
        untouched = np.ones(len(sent), bool)
        for worker in range(ranks):
            v, u = before[worker][number]
            left = after[worker][number][0]
            x = np.zeros_like(v) if mode == "flush" else addend(options, u, gradients[worker, here], clips[worker])
            a = accumulated(options, v, x, mode)
            same = a.view(np.uint32) == left.view(np.uint32)
            same |= (a == 0) & (left == 0)  # of either sign
            untouched &= same
            changed[worker] += np.count_nonzero(~same)
            sent += np.where(same, 0.0, a.astype(np.float64) - left)
            size += np.abs(v).astype(np.float64) + np.abs(x) + np.abs(left)
        mean = means[0, here].astype(np.float64)
        wrong = untouched & (mean != 0)
        if balanced:
            wrong |= np.abs(sent / ranks - mean) > ROUNDING * size + ranks * SMALLEST
        if wrong.any():
            at = int(np.argmax(wrong))
            raise ConservationError(
                f"step {stats[0].step}, parameter '{place.name}': at element {at} the {ranks} workers took "
                f"{sent[at]:.9g} out of their residuals, but the mean is {mean[at]:.9g} ({np.count_nonzero(wrong)} "
                f"elements of {len(wrong)} are wrong)"
            )
    numel = places[-1].end
    for worker, one in enumerate(stats):
        allowed = one.entries_sent + numel - one.sparse_numel
        if changed[worker] > allowed:
            raise ConservationError(
                f"step {one.step}: worker {worker} changed {changed[worker]} elements of its residuals, but says that "
                f"it sent {allowed}"
            )


def addend(options: thinwire.ReducerOptions, u: np.ndarray, gradient: np.ndarray, clip: float) -> np.ndarray:
    """What is added to v, by the rule of momentum, each operation rounded to f32."""
    g = gradient if clip == 1.0 else gradient * np.float32(clip)
    if options.momentum == 0:
        return g
    m = np.float32(options.momentum)
    velocity = m * u + g
    return m * velocity + g if options.nesterov else velocity


def accumulated(options: thinwire.ReducerOptions, v: np.ndarray, x: np.ndarray, mode: str) -> np.ndarray:
    """The residual when x has come in, each operation rounded to f32."""
    if not options.error_feedback:
        return x
    decays = options.residual_decay != 1 and mode != "flush"
    return (np.float32(options.residual_decay) * v if decays else v) + x


def clip_factor(options: thinwire.ReducerOptions, gradient: np.ndarray, ranks: int) -> float:
    """What local clipping multiplies a worker's gradient [numel] by: it holds the norm to clip_norm · sqrt(ranks)."""
    limit = options.clip_norm * math.sqrt(ranks)
    norm = float(np.linalg.norm(gradient.astype(np.float64)))
    return limit / norm if 0 < limit < norm else 1.0
