"""Group commit: many waiting appends share one fsync.

Logs that were written to gather until the round before is over. A round syncs all of them on worker threads and then,
back on the loop, moves their high watermarks and wakes who waits. While it runs the next round gathers.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Literal

from semel.protocol.errors import ErrorCode
from semel.storage import mutants
from semel.storage.errors import StorageError
from semel.storage.log import PartitionLog
from semel.storage.results import SyncJob

_log = logging.getLogger("semel.storage")

FsyncMode = Literal["commit", "os"]
_ANSWERS_EARLY = "answer_before_fsync" in mutants.ACTIVE
_LOGS_PER_ROUND = 256  # their files stay open for the length of a round
_Outcome = list[tuple[SyncJob, OSError | None]]


class SyncGroup:
    """fsync="commit": nothing is visible or acknowledged before it is on the disk. fsync="os": at once, as Kafka.

    With "os" only finished segments are synced, in the background, so that recovery need not read them.
    """

    def __init__(self, mode: FsyncMode, *, workers: int = 2) -> None:
        self.mode: FsyncMode = mode
        self.rounds = 0
        self.synced_logs = 0
        self._workers = workers
        self._pool: ThreadPoolExecutor | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dirty: dict[PartitionLog, None] = {}
        self._waiting: dict[PartitionLog, list[tuple[int, asyncio.Future[None]]]] = {}
        self._running = False  # a round is under way or about to start
        self._idle: asyncio.Event | None = None

    @property
    def waits_for_disk(self) -> bool:
        return self.mode == "commit"

    def wait(self, log: PartitionLog, offset: int) -> asyncio.Future[None]:
        """Done once the log's high watermark reached `offset` (last offset + 1 of what is to be acknowledged).

        Call it right after the append, before anything is awaited: after a failed sync offsets are given out anew.
        Fails with StorageError(KAFKA_STORAGE_ERROR) if the fsync failed: then nothing may be acknowledged.
        Needs a running loop. Cheap check before: `log.high_watermark >= offset`.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            if log.offline is not None:
                future.set_exception(log.offline)
            elif log.high_watermark >= offset or _ANSWERS_EARLY:
                future.set_result(None)
            elif offset > log.end_offset:
                future.set_exception(_lost(log, offset))
            else:
                self._waiting.setdefault(log, []).append((offset, future))
        except StorageError as error:  # closed or deleted meanwhile
            future.set_exception(error)
        return future

    def mark_dirty(self, log: PartitionLog) -> None:
        """A log was written to. The round starts when the loop is done with what it is doing, so that others join."""
        self._dirty[log] = None
        if not self._running:
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:  # no loop: whoever uses logs this way calls flush()
                return
            self._running = True
            self._loop = loop
            loop.call_soon(self._start_round)

    def forget(self, log: PartitionLog) -> None:
        """The log was deleted: who waits for it gets an error."""
        self._dirty.pop(log, None)
        for _, future in self._waiting.pop(log, []):
            if not future.done():
                message = f"{log.topic}-{log.partition} was deleted"
                future.set_exception(StorageError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, message))

    def _start_round(self) -> None:
        logs = list(islice(self._dirty, _LOGS_PER_ROUND))
        for log in logs:
            del self._dirty[log]
        jobs = [job for log in logs if log.is_loaded and (job := self._begin(log)) is not None]
        if not jobs:
            self._round_over()
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="semel-fsync")
        assert self._loop is not None
        parts = [jobs[number :: self._workers] for number in range(min(self._workers, len(jobs)))]
        running = [self._loop.run_in_executor(self._pool, _sync_all, part) for part in parts]
        asyncio.gather(*running).add_done_callback(self._finish_round)

    def _begin(self, log: PartitionLog) -> SyncJob | None:
        try:
            return log.begin_sync()
        except StorageError as failure:  # no file handles left, or the file is gone
            self._wake(log, failure)
            return None

    def _finish_round(self, outcomes: asyncio.Future[list[_Outcome]]) -> None:
        self.rounds += 1
        for outcome in outcomes.result():
            for job, error in outcome:
                self.synced_logs += 1
                try:
                    self._wake(job.log, job.log.end_sync(job, error))
                except Exception:  # somebody's callback: it must not stop the syncing of all other logs
                    _log.exception("after the sync of %s", job.log)
        self._round_over()

    def _round_over(self) -> None:
        if self._dirty:
            assert self._loop is not None
            self._loop.call_soon(self._start_round)
        else:
            self._running = False
            if self._idle is not None:
                self._idle.set()

    def _wake(self, log: PartitionLog, failure: StorageError | None) -> None:
        waiting = self._waiting.pop(log, None)
        if not waiting:
            return
        still = []
        for offset, future in waiting:
            if future.done():
                continue
            if failure is not None:
                future.set_exception(failure)
            elif log.high_watermark >= offset:
                future.set_result(None)
            elif offset > log.end_offset:
                future.set_exception(_lost(log, offset))
            else:
                still.append((offset, future))
        if still:
            self._waiting[log] = still

    async def close(self) -> None:
        """Waits for the last round and stops the workers."""
        while self._running:
            self._idle = asyncio.Event()
            await self._idle.wait()
        self.stop()

    def stop(self) -> None:
        """Stops the workers; they finish what they are doing."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None


def _lost(log: PartitionLog, offset: int) -> StorageError:
    """The log was cut back after a failed sync, while somebody still held an offset of the part that is gone."""
    return StorageError(
        ErrorCode.KAFKA_STORAGE_ERROR,
        f"{log.topic}-{log.partition} ends at {log.end_offset}, what reached to {offset} was not kept; send it again",
    )


def _sync_all(jobs: list[SyncJob]) -> _Outcome:
    """On a worker thread."""
    return [(job, job.log.run_sync(job)) for job in jobs]
