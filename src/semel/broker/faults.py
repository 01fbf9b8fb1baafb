"""Named points where a test, or the chaos command, can kill, freeze or delay the broker exactly there.

    SEMEL_FAULTS="prepare_commit.after_journal:kill,marker.before:stop:2"

Each entry is name:action or name:action:n; it acts the n-th time that the point is reached (default: the first), once.
Before it acts, the broker prints `fault fired: NAME` to stderr.

    SEMEL_FAULTS="@/some/folder"

arms by files, while the broker runs: folder/NAME holds action or action:n. When it acts the file becomes NAME.fired.

Actions:

    kill       SIGKILL to itself: nothing is flushed, nobody is told
    stop       SIGSTOP to itself, until somebody sends SIGCONT
    exit       ends at once with exit code 3
    delay=MS   waits; other requests go on meanwhile where the point is `await`ed

Switched off, a point costs one look at a module attribute: `if faults.armed: ...`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

from semel.protocol.apis import NAMES

VARIABLE = "SEMEL_FAULTS"

_TRANSITIONS = {
    "init": "InitProducerId: the id's new owner",
    "add": "the first or one more partition of a transaction (also implicit, also offsets)",
    "prepare_commit": "the decision to commit",
    "prepare_abort": "the decision to abort (asked for, timed out or fenced)",
    "complete_commit": "all commit markers are written",
    "complete_abort": "all abort markers are written",
    "expire": "unused ids are forgotten",
}
_ANSWERS = list(NAMES.values())

# Every point, with what just happened or is about to happen.
POINTS: dict[str, str] = {
    **{f"{name}.before_journal": f"before the record is written: {what}" for name, what in _TRANSITIONS.items()},
    **{f"{name}.after_journal": f"after the record is durable: {what}" for name, what in _TRANSITIONS.items()},
    "marker.before": "before a commit or abort marker is written to a partition",
    "marker.after": "after a marker is written to a partition, perhaps not yet durable",
    "markers.durable": "after all markers of a transaction are durable",
    **{f"{api}.before_answer": f"the answer to {api} is ready, nothing of it is sent" for api in _ANSWERS},
    **{f"{api}.after_answer": f"the answer to {api} was given to the socket" for api in _ANSWERS},
    "producer_ids.before_store": "before a new block of producer ids is stored",
    "producer_ids.after_store": "after a new block of producer ids is durable",
    "recovery.before_markers": "after a restart, before the markers of a prepared transaction are written again",
}


class FaultError(Exception):
    """SEMEL_FAULTS says something that is not a fault."""


class _Fault(NamedTuple):
    action: str
    delay_ms: int
    nth: int


armed = False
_faults: dict[str, _Fault] = {}
_counts: dict[str, int] = {}
_folder: str | None = None  # faults are armed by files in it


def arm(text: str) -> None:
    """Switches on what a text says (as in SEMEL_FAULTS), and nothing else any more; "" switches everything off."""
    global armed, _folder
    _folder = text[1:] if text.startswith("@") else None
    if _folder is not None:
        _faults.clear()
        _counts.clear()
        armed = True
        return
    found = dict(_parse(entry) for entry in text.split(",") if entry.strip())
    _faults.clear()
    _counts.clear()
    _faults.update(found)
    armed = bool(found)


def _parse(entry: str) -> tuple[str, _Fault]:
    name, _, rest = entry.strip().partition(":")
    action, _, nth = rest.partition(":")
    action, _, delay = action.partition("=")
    if name not in POINTS:
        raise FaultError(f"there is no fault point {name!r}; the points are {', '.join(sorted(POINTS))}")
    if action not in ("kill", "stop", "exit", "delay"):
        raise FaultError(f"fault {entry.strip()!r} has no action kill, stop, exit or delay=MS")
    try:
        return name, _Fault(action, int(delay or 1000), int(nth or 1))
    except ValueError:
        raise FaultError(f"fault {entry.strip()!r} should read name:action or name:action:n, delay=MS") from None


def hit(name: str) -> None:
    """A point has been reached. Call it only `if faults.armed`."""
    fault = _due(name)
    if fault is not None:
        if fault.action == "delay":
            time.sleep(fault.delay_ms / 1000)
        else:
            _act(fault.action)


async def reach(name: str) -> None:
    """The same where other requests may go on during a delay."""
    fault = _due(name)
    if fault is not None:
        if fault.action == "delay":
            await asyncio.sleep(fault.delay_ms / 1000)
        else:
            _act(fault.action)


def _due(name: str) -> _Fault | None:
    assert name in POINTS, f"fault point {name!r} is missing in the table"
    fault = _faults.get(name) if _folder is None else _from_file(_folder, name)
    if fault is None:
        return None
    _counts[name] = _counts.get(name, 0) + 1
    if _counts[name] != fault.nth:
        return None
    if _folder is not None:
        del _counts[name]
        os.rename(f"{_folder}/{name}", f"{_folder}/{name}.fired")
    print(f"fault fired: {name}", file=sys.stderr, flush=True)
    return fault


def _from_file(folder: str, name: str) -> _Fault | None:
    try:
        return _parse(f"{name}:{Path(folder, name).read_text().strip()}")[1]
    except FileNotFoundError:
        return None


def _act(action: str) -> None:
    if action == "exit":
        os._exit(3)
    # To this thread: sent to the process, it lets this thread run on until another hears of it.
    signal.pthread_kill(threading.get_ident(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)


arm(os.environ.get(VARIABLE, ""))
