"""Named points of the sink's protocol where a test can kill or stop the driver or a task. Off unless they are set.

SEMEL_SINK_FAULTS="sink.after_commit:kill:2"    name:action[:n], as for the broker; counted in each process
SEMEL_SINK_FAULTS="@/some/folder"               armed by files: the process that reaches the point `name` and is the
                                                first to rename folder/name@1 (or @2, ...) does what the file says;
                                                "stop:3" is for a process that is there for the third time
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

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
TASK_POINTS = {
    "task.after_opening": "an attempt owns its first partition, the rest of its rows is not sent",
    "task.after_rows": "all rows of an attempt are acknowledged, Spark has no report of them",
}
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "pass": None}  # pass: tells that it was here, goes on

listener: Callable[[str], None] | None = None  # is told of every point, in the thread that reached it

_counts: dict[str, int] = {}


def _parse(text: str) -> dict[str, tuple[str, int]]:
    found = {}
    known = {**POINTS, **TASK_POINTS}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, action, *nth = entry.split(":")
        if name not in known or action not in SIGNALS:
            raise ValueError(f"{VARIABLE}: {entry!r} is not name:kill or name:stop with a name of {', '.join(known)}")
        found[name] = (action, int(nth[0]) if nth else 1)
    return found


_text = os.environ.get(VARIABLE, "")
_folder = Path(_text[1:]) if _text.startswith("@") else None
_armed = _parse(_text) if _folder is None else {}


def reach(name: str) -> None:
    """A point has been reached."""
    if listener is not None:
        listener(name)
    if _folder is None and name not in _armed:
        return
    _counts[name] = _counts.get(name, 0) + 1
    if _folder is not None:
        _by_file(_folder, name)
    elif _counts[name] == _armed[name][1]:
        _fire(name, _armed[name][0])


def _by_file(folder: Path, name: str) -> None:
    """Renaming is atomic, so of many processes exactly one is hit by each file, which then has its process id."""
    for file in sorted(folder.glob(f"{name}@*[0-9]")):
        mine = file.with_name(f"{file.name}.{os.getpid()}-")
        try:
            action, _, nth = file.read_text().strip().partition(":")
            if _counts[name] < int(nth or 1):
                continue
            file.rename(mine)
        except OSError:
            continue
        mine.write_text(str(os.getpid()))
        mine.rename(file.with_name(f"{file.name}.fired"))
        _fire(name, action)
        return


def _fire(name: str, action: str) -> None:
    print(f"fault fired: {name}", file=sys.stderr, flush=True)
    number = SIGNALS[action]
    if number is not None:  # to this thread: sent to the process, it lets this thread run on until another hears of it
        signal.pthread_kill(threading.get_ident(), number)
