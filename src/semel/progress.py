"""How far a long command is: a line on the terminal, drawn over itself. Nothing where stderr is no terminal."""

from __future__ import annotations

import shutil
import sys
import time
from typing import IO, Self

BAR_WIDTH = 24
EVERY_S = 0.25


class ProgressBar:
    """`total` known: a bar, how much is done, and how long the rest will take. Not known: a count and a rate.

    A command that prints lines of its own meanwhile calls `hide` before each, and `show` after it."""

    def __init__(
        self, what: str, total: float | None = None, unit: str = "records", out: IO[str] | None = None
    ) -> None:
        self.what, self.total, self.unit = what, total, unit
        self._out = out or sys.stderr
        self._is_on = self._out is not None and self._out.isatty()  # None: stderr is closed
        self._is_shown = False
        self._started_s = time.monotonic()
        self._due_s = self._started_s + (EVERY_S if total is None else 0.0)  # what is quick shows no count at all

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.hide()

    def show(self, done: float, note: str = "", *, now: bool = False) -> None:
        """Draws, but not more often than the eye can follow, unless it must be `now`: after a line, or at a step."""
        at_s = time.monotonic()
        if not self._is_on or (at_s < self._due_s and not now):
            return
        self._due_s = at_s + EVERY_S
        line = self._line(done, at_s - self._started_s) + (f"  {note}" if note else "")
        width = shutil.get_terminal_size().columns
        self._is_shown = True
        print(f"\r\x1b[K{line[: width - 1]}", end="", file=self._out, flush=True)

    def hide(self) -> None:
        if self._is_shown:
            print("\r\x1b[K", end="", file=self._out, flush=True)
            self._is_shown = False

    def _line(self, done: float, elapsed_s: float) -> str:
        if self.total is None:
            return f"{self.what}: {done:,.0f} {self.unit}, {done / max(elapsed_s, 1e-9):,.0f}/s"
        part = min(1.0, done / self.total) if self.total > 0 else 1.0
        filled = round(part * BAR_WIDTH)
        bar = "#" * filled + "." * (BAR_WIDTH - filled)
        left = f", {_clock(elapsed_s / part - elapsed_s)} left" if 0 < part < 1 else ""
        return f"{self.what} [{bar}] {part:4.0%}, {done:,.0f} of {self.total:,.0f} {self.unit}{left}"


def _clock(duration_s: float) -> str:
    minutes, seconds = divmod(round(duration_s), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}" if minutes >= 60 else f"{minutes}:{seconds:02d}"
