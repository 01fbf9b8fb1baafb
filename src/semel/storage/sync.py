"""Group commit: many waiting appends share one fsync.

A log that was written to is synced at the end of the loop's iteration; what is appended to it during the sync shares
the next one. Logs do not wait for each other: each has its own sync under way. Back on the loop, its high watermark
moves and the waiting appends are completed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import platform
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable
from itertools import islice
from queue import SimpleQueue
from typing import Any, Literal, NamedTuple

from semel.protocol.errors import ErrorCode
from semel.storage.files import DiskFiles
from semel.storage.log import PartitionLog, SyncJob
from semel.storage.results import StorageError

# --- fdatasync without a thread: io_submit starts it, an eventfd reports its end (Linux) ---
#
# A thread that returns from fdatasync has to wait for Python's lock, which a busy event loop rarely releases. Here no
# thread waits: one system call starts the syncs of many files, and the loop reads their ends as it reads sockets.
# Where the system has no io_submit (`KernelSync.open` returns None), threads call fdatasync. Decision 82 has the
# figures.


_log = logging.getLogger("semel.storage")

SLOTS = 64  # syncs under way at a time


class _Numbers(NamedTuple):
    """Of the system calls; Python has no functions for them."""

    setup: int
    destroy: int
    submit: int
    get_events: int


_SYSTEM_CALLS = {"x86_64": _Numbers(206, 207, 209, 208), "aarch64": _Numbers(0, 1, 2, 4)}
_FDSYNC = 3
_RESULT_TO_FD = 1
# struct iocb: data, key, flags, operation, priority, fd, buffer, bytes, offset, reserved, flags, eventfd
_CONTROL_BLOCK = struct.Struct("<QIIHhIQQqQII")
_EVENT = struct.Struct("<QQqq")  # struct io_event: data, control block, result, second result


class KernelSync:
    """Syncs of up to SLOTS files. `on_done(key, error)` is called on the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_done: Callable[[Any, OSError | None], None]) -> None:
        self._loop = loop
        self._on_done = on_done
        self._numbers = _SYSTEM_CALLS[platform.machine()]
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._call.restype = ctypes.c_long
        self._control_blocks = ctypes.create_string_buffer(SLOTS * _CONTROL_BLOCK.size)
        self._pointers = (ctypes.c_void_p * SLOTS)()
        self._events = ctypes.create_string_buffer(SLOTS * _EVENT.size)
        self._free = list(range(SLOTS))
        self._keys: dict[int, Any] = {}  # slot: whose sync it is
        self._context = ctypes.c_ulong(0)
        self._system(self._numbers.setup, ctypes.c_long(SLOTS), ctypes.byref(self._context))
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # type: ignore[attr-defined,unused-ignore]
        loop.add_reader(self._eventfd, self._collect)

    @classmethod
    def open(cls, loop: asyncio.AbstractEventLoop, on_done: Callable[[Any, OSError | None], None]) -> KernelSync | None:
        """None where this system cannot do it."""
        is_known = sys.platform == "linux" and sys.byteorder == "little" and platform.machine() in _SYSTEM_CALLS
        if not is_known or not hasattr(os, "eventfd"):
            return None
        try:
            return cls(loop, on_done)
        except (OSError, NotImplementedError) as error:
            _log.info("fdatasync runs in threads: %s", error)
            return None

    def submit(self, wanted: list[tuple[int, Any]]) -> int:
        """Starts the syncs of (fd, key); returns how many of them, from the front: not all may fit."""
        count = min(len(wanted), len(self._free))
        base = ctypes.addressof(self._control_blocks)
        slots = self._free[:count]
        for number, slot in enumerate(slots):
            block = (slot, 0, 0, _FDSYNC, 0, wanted[number][0], 0, 0, 0, 0, _RESULT_TO_FD, self._eventfd)
            _CONTROL_BLOCK.pack_into(self._control_blocks, slot * _CONTROL_BLOCK.size, *block)
            self._pointers[number] = base + slot * _CONTROL_BLOCK.size
        try:
            taken = self._system(self._numbers.submit, self._context, ctypes.c_long(count), self._pointers)
        except OSError as error:
            _log.warning("cannot sync through the kernel: %s", error)
            return 0
        for number, slot in enumerate(slots[:taken]):
            self._keys[slot] = wanted[number][1]
        del self._free[:taken]
        return taken

    def _collect(self) -> None:
        try:
            os.eventfd_read(self._eventfd)  # type: ignore[attr-defined,unused-ignore]
        except BlockingIOError:
            return
        count = self._system(
            self._numbers.get_events, self._context, ctypes.c_long(0), ctypes.c_long(SLOTS), self._events, None
        )
        ended = [_EVENT.unpack_from(self._events, number * _EVENT.size) for number in range(count)]
        for slot, _, result, _ in ended:
            self._free.append(slot)
            error = OSError(-result, os.strerror(-result)) if result < 0 else None
            self._on_done(self._keys.pop(slot), error)

    def _system(self, number: int, *arguments: Any) -> int:
        result = int(self._call(ctypes.c_long(number), *arguments))
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return result

    def close(self) -> None:
        """Waits for what is under way."""
        if not self._loop.is_closed():
            self._loop.remove_reader(self._eventfd)
        self._system(self._numbers.destroy, self._context)
        os.close(self._eventfd)


FsyncMode = Literal["commit", "os"]
Outcome = Callable[[StorageError | None], None]
_JOBS_MAX = 64  # under way at a time; their files stay open until they end
_THREADS = 4


class SyncGroup:
    """fsync="commit": nothing is visible or acknowledged before it is on the disk. fsync="os": at once, as Kafka.

    With "os" only finished segments are synced, in the background, so that recovery need not read them.
    """

    def __init__(self, mode: FsyncMode) -> None:
        self.mode: FsyncMode = mode
        self.synced_logs = 0
        self._workers: _Workers | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unsynced: dict[PartitionLog, None] = {}
        self._under_way: dict[PartitionLog, bool] = {}  # and whether it was written to since its sync began
        self._waiting: dict[PartitionLog, list[tuple[int, Outcome]]] = {}
        self._scheduled = False  # `_start` is about to run
        self._idle: asyncio.Event | None = None

    @property
    def waits_for_disk(self) -> bool:
        return self.mode == "commit"

    def wait(self, log: PartitionLog, offset: int) -> asyncio.Future[None]:
        """Done once the log's high watermark reached `offset` (last offset + 1 of what is to be acknowledged).

        Call it right after the append, before anything is awaited: after a failed sync offsets are assigned again.
        Fails with StorageError(KAFKA_STORAGE_ERROR) if the fsync failed: then nothing may be acknowledged.
        Needs a running loop. Cheap check before: `log.high_watermark >= offset`.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_outcome(error: StorageError | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        self.notify(log, offset, on_outcome)
        return future

    def notify(self, log: PartitionLog, offset: int, on_outcome: Outcome) -> None:
        """As `wait`, without a future: calls `on_outcome` with None or the error, at once or when it is known."""
        try:
            if log.error is not None:
                on_outcome(log.error)
            elif log.high_watermark >= offset:
                on_outcome(None)
            elif offset > log.end_offset:
                on_outcome(_lost(log, offset))
            else:
                self._waiting.setdefault(log, []).append((offset, on_outcome))
        except StorageError as error:  # closed or deleted meanwhile
            on_outcome(error)

    def mark_unsynced(self, log: PartitionLog) -> None:
        """A log was written to. Its sync starts at the end of the loop's iteration, so that others join."""
        if log in self._under_way:
            self._under_way[log] = True
            return
        self._unsynced[log] = None
        self._schedule()

    def _schedule(self) -> None:
        if self._scheduled:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # no loop: the caller uses flush()
            return
        self._scheduled = True
        self._loop = loop
        loop.call_soon(self._start)

    def remove(self, log: PartitionLog) -> None:
        """The log was deleted: its waiting appends fail."""
        self._unsynced.pop(log, None)
        message = f"{log.topic}-{log.partition} was deleted"
        for _, on_outcome in self._waiting.pop(log, []):
            on_outcome(StorageError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, message))

    def _start(self) -> None:
        """Starts the syncs of the next logs, as many as may be under way."""
        self._scheduled = False
        logs = list(islice(self._unsynced, _JOBS_MAX - len(self._under_way)))
        for log in logs:
            del self._unsynced[log]
        jobs = [job for log in logs if log.is_open and (job := self._begin(log)) is not None]
        if jobs:
            if self._workers is None:
                assert self._loop is not None
                self._workers = _Workers(self._loop, self._ended)
            for job in jobs:
                self._under_way[job.log] = False
            self._workers.submit(jobs)
        self._start_next()

    def _begin(self, log: PartitionLog) -> SyncJob | None:
        try:
            return log.begin_sync()
        except StorageError as failure:  # no file handles left, or the file is gone
            self._complete(log, failure)
            return None

    def _ended(self, job: SyncJob, error: OSError | None) -> None:
        """Back on the loop."""
        self.synced_logs += 1
        if self._under_way.pop(job.log):
            self._unsynced[job.log] = None
        try:
            self._complete(job.log, job.log.end_sync(job, error))
        except Exception:  # of a callback: it must not stop the syncing of all other logs
            _log.exception("after the sync of %s", job.log)
        self._start_next()

    def _start_next(self) -> None:
        if self._unsynced and len(self._under_way) < _JOBS_MAX:
            self._schedule()
        elif self._idle is not None and self._is_idle:
            self._idle.set()

    @property
    def _is_idle(self) -> bool:
        return not (self._unsynced or self._under_way or self._scheduled)

    def _complete(self, log: PartitionLog, failure: StorageError | None) -> None:
        waiting = self._waiting.pop(log, None)
        if not waiting:
            return
        still, outcomes = [], []
        for offset, on_outcome in waiting:
            if failure is None and log.high_watermark < offset <= log.end_offset:
                still.append((offset, on_outcome))
            else:
                outcomes.append((on_outcome, failure or (_lost(log, offset) if offset > log.end_offset else None)))
        if still:
            self._waiting[log] = still
        for on_outcome, error in outcomes:
            try:
                on_outcome(error)
            except Exception:  # the other callbacks must run
                _log.exception("after the sync of %s", log)

    async def close(self) -> None:
        """Waits for the last sync and stops the workers."""
        while not self._is_idle:
            self._idle = asyncio.Event()
            await self._idle.wait()
        self.stop()

    def stop(self) -> None:
        """Stops the workers; they finish what they are doing."""
        if self._workers is not None:
            self._workers.stop()
            self._workers = None


def _lost(log: PartitionLog, offset: int) -> StorageError:
    """The log was cut back after a failed sync: an append beyond its end is lost."""
    return StorageError(
        ErrorCode.KAFKA_STORAGE_ERROR,
        f"{log.topic}-{log.partition} ends at {log.end_offset}, the batch up to {offset} is lost; send it again",
    )


class _Workers:
    """Run the syncs: the kernel, where it can and the job is one plain file; otherwise threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_done: Callable[[SyncJob, OSError | None], None]) -> None:
        self._loop = loop
        self._on_done = on_done
        self._kernel = KernelSync.open(loop, on_done)
        self._jobs: SimpleQueue[SyncJob | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._outcomes: deque[tuple[SyncJob, OSError | None]] = deque()
        self._is_scheduled = False  # `_report` is about to run on the loop

    def submit(self, jobs: list[SyncJob]) -> None:
        if self._kernel is not None:
            plain = [(job.handles[0].fd, job) for job in jobs if _is_plain(job)]
            taken = self._kernel.submit(plain) if plain else 0
            started = {job.log for _, job in plain[:taken]}
            jobs = [job for job in jobs if job.log not in started]
        for job in jobs:
            self._jobs.put(job)
        for _ in range(min(_THREADS, len(jobs)) - len(self._threads)):
            thread = threading.Thread(target=self._work, name="semel-fsync", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        """On a thread of its own."""
        while (job := self._jobs.get()) is not None:
            self._outcomes.append((job, job.log.run_sync(job)))
            if not self._is_scheduled:
                self._is_scheduled = True
                with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits for the outcome
                    self._loop.call_soon_threadsafe(self._report)

    def _report(self) -> None:
        self._is_scheduled = False  # before reading: a later outcome schedules again
        while self._outcomes:
            self._on_done(*self._outcomes.popleft())

    def stop(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        if self._kernel is not None:
            self._kernel.close()
            self._kernel = None


def _is_plain(job: SyncJob) -> bool:
    """Nothing to sync but one file, and no journal of a simulated power cut that has to know of it."""
    return len(job.handles) == 1 and not job.folders and type(job.log.files).sync_file is DiskFiles.sync_file
