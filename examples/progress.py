"""A progress bar in a few lines; where there is no terminal it prints a line now and then instead."""

import shutil
import sys
import time

_BAR = 30  # characters


class Progress:
    """Shows `label ━━━━━━──── 700/1406 0:31 note` for a loop of `total` steps."""

    def __init__(self, label: str, total: int, lines: int = 5) -> None:
        """`lines` is how many lines the loop prints where there is no terminal."""
        self._label, self._total, self._lines = label, total, lines
        self._terminal = sys.stdout.isatty()
        self._begin = time.monotonic()
        self._drawn = 0.0

    def update(self, done: int, note: str = "") -> None:
        """Call it after each step with the number of steps done. Draws at most ten times a second."""
        now = time.monotonic()
        seconds = int(now - self._begin)
        counts = f"{done:>{len(str(self._total))}}/{self._total}  {seconds // 60}:{seconds % 60:02}  {note}"
        if not self._terminal:
            if done * self._lines // self._total > (done - 1) * self._lines // self._total:
                print(f"{self._label:<18} {counts}", flush=True)
        elif done == self._total or now - self._drawn >= 0.1:
            self._drawn = now
            width = shutil.get_terminal_size().columns - 1
            bar = "━" * (done * _BAR // self._total)
            line = f"{self._label:<18} {bar:─<{_BAR}} {counts}"
            print(f"\r{line[:width]:<{width}}", end="\n" if done == self._total else "", flush=True)
