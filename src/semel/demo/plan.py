"""The faults of a demo: what is killed, and where each guarantee stands at that moment."""

from __future__ import annotations

from typing import NamedTuple

AT_MOST_ONCE, AT_LEAST_ONCE, EXACTLY_ONCE = "at_most_once", "at_least_once", "exactly_once"
GUARANTEES = (AT_MOST_ONCE, AT_LEAST_ONCE, EXACTLY_ONCE)

# Not a point of the sink: the sink's function has returned, Spark's own commit log is not written yet.
RETURNED = "returned"


class Fault(NamedTuple):
    """One kill -9, when all three pipelines have reached their points."""

    name: str
    victim: str  # "driver" or "broker"
    what: str  # for people
    points: dict[str, str]  # guarantee -> where it is held


HALF_WAY = {
    AT_MOST_ONCE: "sink.after_positions",  # positions are stored, rows are not written
    AT_LEAST_ONCE: "sink.after_write",  # rows are written, positions are not stored
    EXACTLY_ONCE: "sink.after_positions",  # everything is in the transaction, EndTxn is not sent
}
COMMITTED = {AT_MOST_ONCE: RETURNED, AT_LEAST_ONCE: RETURNED, EXACTLY_ONCE: "sink.after_commit"}

FAULTS = (
    Fault("half-way", "driver", "in the middle of a commit", HALF_WAY),
    Fault("broker", "broker", "in the middle of a commit", HALF_WAY),
    Fault("committed", "driver", "after the commit, before Spark notes it", COMMITTED),
)
