"""The faults of a demo, and the gate that holds the pipelines of the programs under test."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

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
Tell = Callable[..., None]


class Gate(Injector):
    """Holds pipelines at a point of their commit until all of them are there, so that one kill hits every one.

    One fault at a time: `arm` it, and let it `open` if the program is to live on.

    A pipeline says in whose thread it works (`work_for`), when it has finished a batch (`count`) and which points it
    reaches. It is held at the fault's point once it has finished so many batches since the arming.
    """

    def __init__(self, guarantees: tuple[str, ...], tell: Tell) -> None:
        self._guarantees = guarantees
        self._tell = tell
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
        self._tell("held", guarantee=guarantee, point=point)
        if len(self._held) == len(self._guarantees):
            self._tell("all_held")
        self._changed.wait_for(lambda: self._points is not armed)
