"""What a demo shows while it runs: lines that stay, and under them, on a terminal, a few that change."""

from __future__ import annotations

import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import IO

from semel.demo.program import GUARANTEES

REDRAW_S = 0.1
PLAIN_EVERY_S = 5.0
BARS = " ▁▂▃▄▅▆▇█"
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


@dataclass
class Lane:
    batches: int = 0
    rows: int = 0
    state: str = "waiting"
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=12))

    def add(self, rows: int) -> None:
        self.batches += 1
        self.rows += rows
        self.recent.append(rows)
        self.state = ""


class Screen:
    """Writes to a terminal, or plain lines to anything else."""

    def __init__(self, out: IO[str] | None = None, *, silent: bool = False) -> None:
        self._out = out or sys.stdout
        self._silent = silent
        self._live = not silent and self._out.isatty()
        self._drawn = 0  # lines of the changing part
        self._started_s = self._last_s = time.monotonic()
        self.lanes = {guarantee: Lane() for guarantee in GUARANTEES}
        self.footer = ""

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def line(self, text: str = "") -> None:
        """A line that stays."""
        if self._silent:
            return
        self.erase()
        print(text, file=self._out, flush=True)
        self._last_s = 0.0 if self._live else time.monotonic()

    def moment(self, text: str, *, bad: bool = False) -> None:
        """Something happened just now."""
        mark = self._red("✗ ") if bad else "  "
        self.line(f"{self.elapsed_s:6.1f} s  {mark}{self._red(text) if bad else text}")

    def refresh(self) -> None:
        """Draws the changing part again, if it is time to."""
        every_s = REDRAW_S if self._live else PLAIN_EVERY_S
        if self._silent or time.monotonic() - self._last_s < every_s:
            return
        self._last_s = time.monotonic()
        if not self._live:
            done = ", ".join(f"{guarantee} {lane.rows:,} rows" for guarantee, lane in self.lanes.items())
            print(f"{self.elapsed_s:6.1f} s    ... {done}", file=self._out, flush=True)
            return
        lines = [self._lane(guarantee, lane) for guarantee, lane in self.lanes.items()]
        spin = SPINNER[int(self.elapsed_s * 10) % len(SPINNER)]
        self.erase()
        print("\n".join(["", *lines, f"  {spin} {self.footer}"]), file=self._out, flush=True)
        self._drawn = len(lines) + 2

    def _lane(self, guarantee: str, lane: Lane) -> str:
        most = max(lane.recent, default=0) or 1
        bars = "".join(BARS[min(8, round(rows / most * 8))] for rows in lane.recent)
        state = self._red(lane.state) if lane.state else f"{lane.rows:>7,} rows in {lane.batches} batches"
        return f"  {guarantee:<14} {bars:<12}  {state}"

    def erase(self) -> None:
        """Takes the changing part away."""
        if self._drawn:
            print(f"\x1b[{self._drawn}A\x1b[J", end="", file=self._out, flush=True)
            self._drawn = 0

    def _red(self, text: str) -> str:
        return f"\x1b[31m{text}\x1b[0m" if self._live else text
