"""The faults of a demo, and the gate that holds the pipelines of the programs under test."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, NamedTuple

from semel.faults import Injector

AT_MOST_ONCE, AT_LEAST_ONCE, EXACTLY_ONCE = "at_most_once", "at_least_once", "exactly_once"
GUARANTEES = (AT_MOST_ONCE, AT_LEAST_ONCE, EXACTLY_ONCE)

# Not a point of the sink: the sink's function has returned, Spark's own commit log is not written yet.
RETURNED = "returned"


class DemoFault(NamedTuple):
    """One kill -9, when all three pipelines have reached their points."""

    name: str
    victim: str  # "driver" or "broker"
    what: str  # for people
    points: dict[str, str]  # guarantee -> where it is held


HALF_WAY = {
    AT_MOST_ONCE: "sink.after_offsets",  # offsets are stored, rows are not written
    AT_LEAST_ONCE: "sink.after_write",  # rows are written, offsets are not stored
    EXACTLY_ONCE: "sink.after_offsets",  # everything is in the transaction, EndTxn is not sent
}
COMMITTED = {AT_MOST_ONCE: RETURNED, AT_LEAST_ONCE: RETURNED, EXACTLY_ONCE: "sink.after_commit"}

FAULTS = (
    DemoFault("half-way", "driver", "in the middle of a commit", HALF_WAY),
    DemoFault("broker", "broker", "in the middle of a commit", HALF_WAY),
    DemoFault("committed", "driver", "after the commit, before Spark notes it", COMMITTED),
)


# --- inside the program that will be killed ---
ReportEvent = Callable[..., None]


class Gate(Injector):
    """Holds pipelines at a point of their commit until all of them are there, so that one kill hits every one.

    One fault at a time: `arm` it, and let it `open` if the program is to live on.

    A pipeline says in whose thread it works (`work_for`), when it has finished a batch (`count`) and which points it
    reaches. It is held at the fault's point once it has finished so many batches since the arming.
    """

    def __init__(self, guarantees: tuple[str, ...], report: ReportEvent) -> None:
        self._guarantees = guarantees
        self._report = report
        self._changed = threading.Condition()
        self._points: dict[str, str] = {}
        self._after = 0
        self._batches: dict[str, int] = {}
        self._held: set[str] = set()
        self._local = threading.local()

    def arm(self, name: str, after: int) -> None:
        fault = next(fault for fault in FAULTS if fault.name == name)
        with self._changed:
            self._points, self._after = fault.points, after
            self._batches, self._held = {}, set()
            self._changed.notify_all()

    def open(self) -> None:
        with self._changed:
            self._points = {}
            self._changed.notify_all()

    def work_for(self, guarantee: str | None) -> None:
        self._local.guarantee = guarantee

    def count(self, guarantee: str) -> None:
        with self._changed:
            self._batches[guarantee] = self._batches.get(guarantee, 0) + 1

    def hit(self, point: str) -> None:
        """A point has been reached by whoever this thread works for."""
        guarantee = getattr(self._local, "guarantee", None)
        with self._changed:
            if guarantee is None or self._points.get(guarantee) != point:
                return
            if self._batches.get(guarantee, 0) >= self._after:
                self._hold(guarantee, point)

    def _hold(self, guarantee: str, point: str) -> None:
        armed = self._points
        self._held.add(guarantee)
        self._report("held", guarantee=guarantee, point=point)
        if len(self._held) == len(self._guarantees):
            self._report("all_held")
        self._changed.wait_for(lambda: self._points is not armed)


# --- What a demo shows while it runs: lines that stay, and under them, on a terminal, a few that change ---


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
