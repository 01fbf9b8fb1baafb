"""Faults that are injected into processes: named points, the clock, a full disk, simulated power cuts.

A process that is to have faults is started as `python -m semel.prove INJECTION PROGRAM`, where INJECTION is an
`Injection` as JSON and PROGRAM is what follows `python` otherwise (`-m semel broker ...`). `command` makes such a
command line, `spark_python` the same for the Python processes that Spark starts.

Faults are armed by a text or by files. A text names points, separated by commas, such as

    prepare_commit.after_log:kill,marker.before:stop:2

Each entry is name:action or name:action:n; it acts the n-th time that the point is reached (default: the first), once.
Before it acts, the process prints `fault fired: NAME` to stderr. The text `@FOLDER` arms by files, while the process
runs; a file holds action or action:n and is renamed to FILE.fired, which then holds the process id:

    FOLDER/NAME       counted from the moment when the file is there
    FOLDER/NAME@1     (or @2, ...) counted from the start of each process; of many processes exactly one is hit

Actions:

    kill       SIGKILL to itself: nothing is flushed, no connection is closed in order
    stop       SIGSTOP to itself, until SIGCONT
    exit       ends at once with exit code 3
    delay=MS   waits; other requests go on meanwhile where the point is `await`ed
    pass       goes on
"""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import shlex
import signal
import struct
import sys
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from semel import faults
from semel.protocol.api import NAMES

_TRANSITIONS = {
    "init": "InitProducerId: the id's new owner",
    "add": "the first or one more partition of a transaction (also implicit, also offsets)",
    "prepare_commit": "the decision to commit",
    "prepare_abort": "the decision to abort (requested, timed out or fenced)",
    "complete_commit": "all commit markers are written",
    "complete_abort": "all abort markers are written",
    "expire": "unused ids are removed",
}

# Every point, with what just happened or is about to happen.
BROKER_POINTS: dict[str, str] = {
    **{f"{name}.before_log": f"before the record is written: {what}" for name, what in _TRANSITIONS.items()},
    **{f"{name}.after_log": f"after the record is durable: {what}" for name, what in _TRANSITIONS.items()},
    "marker.before": "before a commit or abort marker is written to a partition",
    "marker.after": "after a marker is written to a partition, perhaps not yet durable",
    "markers.durable": "after all markers of a transaction are durable",
    **{f"{api}.before_response": f"the response to {api} is ready, nothing of it is sent" for api in NAMES.values()},
    **{f"{api}.after_response": f"the response to {api} was given to the socket" for api in NAMES.values()},
    "producer_ids.before_store": "before a new block of producer ids is stored",
    "producer_ids.after_store": "after a new block of producer ids is durable",
    "recovery.before_markers": "after a restart, before the markers of a prepared transaction are written again",
}
SINK_POINTS = {
    "sink.before_begin": "the batch may be written, nothing is begun",
    "sink.after_begin": "the transaction is open (TV1), nothing is written",
    "sink.after_write": "all rows are in the log, nothing is audited",
    "sink.after_audit": "the counts are right, the ledger entry is not written",
    "sink.after_ledger": "the ledger entry is written, the offsets are not",
    "sink.after_offsets": "everything is written, EndTxn is not sent",
    "sink.after_commit": "the transaction is committed, Spark's commit log is not written",
}
POSTGRES_SINK_POINTS = {
    "postgres_sink.before_begin": "the batch may be written, nothing is begun",
    "postgres_sink.after_begin": "a round of staging tables is begun, nothing is written",
    "postgres_sink.after_write": "all rows are in staging tables",
    "postgres_sink.after_hold": "the database transaction is open, its owner row is locked",
    "postgres_sink.after_move": "the rows are moved, the ledger row is not written",
    "postgres_sink.after_ledger": "the ledger row is written, the staging tables are there",
    "postgres_sink.after_commit": "the database transaction is committed, Spark's commit log is not written",
}
POSTGRES_POINTS = {
    "postgres.before_commit": "everything of a database transaction is written, COMMIT is not sent",
    "postgres.after_commit": "a database transaction is committed",
}
POSTGRES_TASK_POINTS = {
    "postgres_task.after_stage": "the staging table of an attempt is committed, Spark has no report of it",
}
OUTBOX_POINTS = {
    "outbox.after_init": "a relay owns its transactional id and has not read what was sent",
    "outbox.before_commit": "the rows of a chunk are sent, EndTxn is not",
    "outbox.after_commit": "a chunk is in its topics, its rows are still in the table",
}
TASK_POINTS = {
    "task.after_opening": "an attempt owns its first partition, the rest of its rows is not sent",
    "task.after_rows": "all rows of an attempt are acknowledged, Spark has no report of them",
}
STATE_POINTS = {
    "state.sent": "a loop with state has sent its changes to the changelog, offsets and commit are to come",
    "state.committed": "the transaction is committed, the local stores have nothing of it",
    "state.write": "a local store is about to write what was committed to its file",
}
FILES_POINTS = {
    "files.claimed": "partitions are claimed in a folder, leftovers are not swept",
    "files.written": "the files of a unit of work are durable under temporary names",
    "files.renamed": "they have their names, no manifest names them",
    "files.manifest_written": "the manifest is durable under a temporary name",
    "files.linked": "the manifest has its number, its folder is not synced",
    "files.committed": "the manifest is durable, the group does not have the offsets",
    "files.checkpoint_written": "a checkpoint is durable, the manifests before it are still there",
}
COMPACTION_POINTS = {
    "files.compacted": "a manifest has exchanged small files for a large one, the small ones are still there",
}
# A unit of work of the loop, or a micro-batch, that writes topics and tables.
DECISION_POINTS = {
    "decision.prepared": "the records are in the log, the database has nothing",
    "decision.made": "the database has committed, EndTxn is not sent",
    "decision.ended": "EndTxn is confirmed, the next unit of work or micro-batch has not begun",
    "decision.copy_written": "the coordinator had aborted: the output is written again, the database does not know it",
    "decision.copy_decided": "the database knows the transaction of the copy, EndTxn is not sent",
}
POINTS = {
    **BROKER_POINTS,
    **OUTBOX_POINTS,
    **SINK_POINTS,
    **TASK_POINTS,
    **POSTGRES_POINTS,
    **POSTGRES_SINK_POINTS,
    **POSTGRES_TASK_POINTS,
    **STATE_POINTS,
    **FILES_POINTS,
    **COMPACTION_POINTS,
    **DECISION_POINTS,
}
_ACTIONS = ("kill", "stop", "exit", "delay", "pass")


class FaultError(Exception):
    """A text says something that is not a fault."""


# --- which process gets what ---
class Patch(msgspec.Struct, frozen=True):
    """A module outside of semel that changes it."""

    folder: str  # where the module is found
    module: str
    argument: str  # of its function `install`

    def install(self) -> None:
        sys.path.insert(0, self.folder)
        import_module(self.module).install(self.argument)


class Injection(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one process gets. Empty: nothing."""

    faults: str = ""
    control: str = ""  # the file of a `Control`
    power_cut: bool = False  # writes down what was synced, for `cut_power`
    patch: Patch | None = None  # changes semel itself: for tests alone

    def install(self) -> None:
        if self.faults or self.control or self.power_cut:
            faults.install(ProcessInjector(self))
        if self.patch is not None:
            self.patch.install()


def command(injection: Injection, *program: str | Path) -> list[str]:
    """The command line of a Python program with faults, or as it is if there are none."""
    words = [str(word) for word in program]
    if injection == Injection():
        return [sys.executable, *words]
    return [sys.executable, "-m", "semel.prove", msgspec.json.encode(injection).decode(), *words]


def spark_python(injection: Injection, file: Path) -> dict[str, str]:
    """The environment for a Spark driver whose Python processes (tasks, planning, commits) are to have faults, too."""
    from semel.spark.session import LAUNCHER

    before = f"SEMEL_PYTHON={shlex.quote(sys.executable)} exec {shlex.quote(str(LAUNCHER))}"
    words = command(injection)[1:]
    file.write_text(f'#!/bin/sh\n{before} {shlex.join(words)} "$@"\n')
    file.chmod(0o755)
    return {"PYSPARK_PYTHON": str(file)}


# --- inside the process ---
class _Fault(NamedTuple):
    action: str
    delay_ms: int
    nth: int


class ProcessInjector(faults.Injector):
    def __init__(self, injection: Injection) -> None:
        text = injection.faults
        self._folder = Path(text[1:]) if text.startswith("@") else None
        self._faults = {} if self._folder else dict(_parse(entry) for entry in text.split(",") if entry.strip())
        self._since_armed: dict[str, int] = {}
        self._since_start: dict[str, int] = {}
        self._control = Control(injection.control) if injection.control else None
        self._cuts_power = injection.power_cut

    def hit(self, point: str) -> None:
        if delay_s := self._act(point):
            time.sleep(delay_s)

    async def reach(self, point: str) -> None:
        if delay_s := self._act(point):
            await asyncio.sleep(delay_s)

    def _act(self, point: str) -> float:
        """Does what is due at a point; returns how long to wait if that is a delay, else 0."""
        fault = self._due(point)
        if fault is None:
            return 0.0
        if fault.action == "delay":
            return fault.delay_ms / 1000
        if fault.action == "exit":
            os._exit(3)
        number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}.get(fault.action)
        if number is not None:  # to this thread: sent to the process, this thread would run on for a moment
            signal.pthread_kill(threading.get_ident(), number)
        return 0.0

    def clock_offset_ms(self) -> int:
        return 0 if self._control is None else self._control.clock_offset_ms

    def files(self, data_dir: str | Path) -> Any:
        from semel.prove.powercut import JournaledFiles
        from semel.storage import DiskFiles

        files = JournaledFiles(data_dir) if self._cuts_power else DiskFiles()
        if self._control is not None:
            _make_fillable(files, self._control)
        return files

    def _due(self, point: str) -> _Fault | None:
        assert point in POINTS, f"fault point {point!r} is missing in the table"
        self._since_start[point] = self._since_start.get(point, 0) + 1
        fault = self._by_file(self._folder, point) if self._folder is not None else self._by_text(point)
        if fault is not None:
            print(f"fault fired: {point}", file=sys.stderr, flush=True)
        return fault

    def _by_text(self, point: str) -> _Fault | None:
        fault = self._faults.get(point)
        return fault if fault is not None and self._since_start[point] == fault.nth else None

    def _by_file(self, folder: Path, point: str) -> _Fault | None:
        fault = _read(folder / point)
        if fault is not None:
            self._since_armed[point] = self._since_armed.get(point, 0) + 1
            if self._since_armed[point] == fault.nth and _take(folder / point):
                del self._since_armed[point]
                return fault
        for file in sorted(folder.glob(f"{point}@*[0-9]")):
            fault = _read(file)
            if fault is not None and self._since_start[point] >= fault.nth and _take(file):
                return fault
        return None


def _parse(entry: str) -> tuple[str, _Fault]:
    point, _, rest = entry.strip().partition(":")
    action, _, nth = rest.partition(":")
    action, _, delay = action.partition("=")
    if point not in POINTS:
        raise FaultError(f"there is no fault point {point!r}; the points are {', '.join(sorted(POINTS))}")
    if action not in _ACTIONS:
        raise FaultError(f"fault {entry.strip()!r} has no action kill, stop, exit, pass or delay=MS")
    try:
        return point, _Fault(action, int(delay or 1000), int(nth or 1))
    except ValueError:
        raise FaultError(f"fault {entry.strip()!r} should read name:action or name:action:n, delay=MS") from None


def _read(file: Path) -> _Fault | None:
    try:
        return _parse(f"{file.name.partition('@')[0]}:{file.read_text().strip()}")[1]
    except FileNotFoundError:
        return None


def _take(file: Path) -> bool:
    """Renaming is atomic, so of many processes exactly one takes each file, which then has its process id."""
    mine = file.with_name(f"{file.name}.{os.getpid()}-")
    try:
        file.rename(mine)
    except OSError:
        return False
    mine.write_text(str(os.getpid()))
    mine.rename(file.with_name(f"{file.name}.fired"))
    return True


# --- the clock and the disk ---
class Control:
    """The clock and the disk of a running broker: a small file that both sides map into memory, so that a change is
    seen at once and a look costs no system call."""

    _LAYOUT = struct.Struct("<qq")  # milliseconds to add to the clock; 1: the disk is full

    def __init__(self, path: str | Path) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), self._LAYOUT.size)

    @classmethod
    def create(cls, path: Path) -> Control:
        path.write_bytes(bytes(cls._LAYOUT.size))
        return cls(path)

    @property
    def clock_offset_ms(self) -> int:
        return int(self._LAYOUT.unpack_from(self._memory)[0])

    @property
    def disk_is_full(self) -> bool:
        return bool(self._LAYOUT.unpack_from(self._memory)[1])

    def set(self, *, clock_offset_ms: int | None = None, disk_is_full: bool | None = None) -> None:
        """Changes what is named."""
        offset, full = self._LAYOUT.unpack_from(self._memory)
        offset = offset if clock_offset_ms is None else clock_offset_ms
        full = full if disk_is_full is None else int(disk_is_full)
        self._LAYOUT.pack_into(self._memory, 0, offset, full)

    def close(self) -> None:
        self._memory.close()


def _make_fillable(files: Any, control: Control) -> None:
    """New files and writes that make one larger fail while the control says that the disk is full."""
    write_at, open_file = files.write_at, files.open

    def check() -> None:
        if control.disk_is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def guarded_write(fd: int, content: bytes | bytearray | memoryview, position: int) -> int:
        if position + len(content) > os.fstat(fd).st_size:
            check()
        return int(write_at(fd, content, position))

    def guarded_open(path: str, *, create: bool = True) -> int:
        if create and not os.path.exists(path):
            check()
        return int(open_file(path, create=create))

    files.write_at, files.open = guarded_write, guarded_open
