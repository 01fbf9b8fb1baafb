"""Named points of the sink's protocol where a test can kill or stop the driver. Off unless they are set.

SEMEL_SINK_FAULTS="sink.after_commit:kill:2"    name:action[:n], as for the broker
"""

from __future__ import annotations

import os
import signal
import sys

VARIABLE = "SEMEL_SINK_FAULTS"

POINTS = {
    "sink.before_begin": "the batch may be written, nothing is begun",
    "sink.after_begin": "the transaction is open (TV1), nothing is written",
    "sink.after_write": "all rows are in the log, nothing is audited",
    "sink.after_audit": "the counts are right, the ledger entry is not written",
    "sink.after_ledger": "the ledger entry is written, the positions are not",
    "sink.after_positions": "everything is written, EndTxn is not sent",
    "sink.after_commit": "the transaction is committed, Spark's commit log is not written",
}

_counts: dict[str, int] = {}


def _parse(text: str) -> dict[str, tuple[str, int]]:
    found = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, action, *nth = entry.split(":")
        if name not in POINTS or action not in ("kill", "stop"):
            raise ValueError(f"{VARIABLE}: {entry!r} is not name:kill or name:stop with a name of {', '.join(POINTS)}")
        found[name] = (action, int(nth[0]) if nth else 1)
    return found


_armed = _parse(os.environ.get(VARIABLE, ""))


def reach(name: str) -> None:
    """A point has been reached."""
    if not _armed or name not in _armed:
        return
    action, nth = _armed[name]
    _counts[name] = _counts.get(name, 0) + 1
    if _counts[name] == nth:
        print(f"fault fired: {name}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)
