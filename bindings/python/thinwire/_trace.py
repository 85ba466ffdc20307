"""A timeline of some steps, for Perfetto."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from ._thinwire import Reducer, chrome_trace

Event = tuple[str, str, int, int, int]  # name, lane, step, begin and end in ns of time.monotonic_ns()


class Trace:
    """Notes what runs when, from now until `stop`. A context manager; also stopped by detach.

    Rows: the backward pass and the optimizer, and one per bucket with the stages of its reduction.
    """

    def __init__(self, reducer: Reducer, path: str | os.PathLike[str], rank: int, done: Callable[[], None]) -> None:
        text = os.fspath(path)
        self._path = Path(text.replace("{rank}", str(rank))) if rank == 0 or "{rank}" in text else None
        if self._path is not None:
            self._path.open("a").close()  # fails now rather than at the end
        self._reducer = reducer
        self._rank = rank
        self._done = done
        self._events: list[Event] = []
        self._running = True
        reducer.set_tracing(True)

    def note(self, name: str, lane: str, begin: int, end: int | None = None) -> None:
        """Something of the training loop's own thread; it ends now unless said otherwise."""
        self._events.append((name, lane, self._reducer.step, begin, time.monotonic_ns() if end is None else end))

    def stop(self) -> None:
        """Writes the file. Without effect if it was stopped already."""
        if not self._running:
            return
        self._running = False
        self._done()
        self._reducer.set_tracing(False)
        events = [*self._events, *self._reducer.take_trace()]
        if self._path is not None:
            self._path.write_text(chrome_trace(events, f"rank {self._rank}"))

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
