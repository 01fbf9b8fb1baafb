"""The coordinator's way to its journal: written at once, applied once durable, and applied in the order of the log.

Many writes may wait for one fsync together. Each is applied to memory only when it is durable and everything before it
in its partition has been applied, so that memory is always what a replay of the log up to some point would give.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol

from semel.broker.groups.records import KeyValue
from semel.protocol.batch import BatchHeader
from semel.protocol.errors import ErrorCode
from semel.protocol.rows import Record
from semel.storage import StorageError

logger = logging.getLogger(__name__)

# What a failed write means to a client of the coordinator: look for the coordinator again, then retry.
_ANSWERS = {
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_ENOUGH_REPLICAS: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.REQUEST_TIMED_OUT: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_LEADER_OR_FOLLOWER: ErrorCode.NOT_COORDINATOR,
    ErrorCode.KAFKA_STORAGE_ERROR: ErrorCode.NOT_COORDINATOR,
    ErrorCode.MESSAGE_TOO_LARGE: ErrorCode.UNKNOWN_SERVER_ERROR,
    ErrorCode.RECORD_LIST_TOO_LARGE: ErrorCode.UNKNOWN_SERVER_ERROR,
}


class Journal(Protocol):
    """The internal topic behind it."""

    @property
    def partition_count(self) -> int: ...

    def partition_for(self, key: str) -> int: ...

    def append(
        self, partition: int, records: list[KeyValue], *, producer: tuple[int, int] | None = None
    ) -> Awaitable[int]: ...

    def replay(self, partition: int) -> Iterator[tuple[BatchHeader, list[Record]]]: ...


class OrderedLog:
    """Writes to `__consumer_offsets`."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._tails: dict[int, asyncio.Task[int]] = {}  # the last write of each partition

    def partition_for(self, group_id: str) -> int:
        return self._journal.partition_for(group_id)

    def write(
        self,
        partition: int,
        records: list[KeyValue],
        apply: Callable[[int], None],
        *,
        producer: tuple[int, int] | None = None,
    ) -> asyncio.Task[int]:
        """Writes one batch now; `apply` gets its base offset once it is durable. The task ends after that.

        StorageError is raised here or from the task; then nothing is applied. The write goes on if the caller is
        cancelled: await the task shielded.
        """
        durable = self._journal.append(partition, records, producer=producer)
        task = asyncio.get_running_loop().create_task(self._finish(durable, self._unfinished(partition), apply))
        self._tails[partition] = task
        task.add_done_callback(_note_failure)
        return task

    async def settled(self, partition: int) -> None:
        """Returns when everything that was written to the partition so far is applied or has failed."""
        tail = self._unfinished(partition)
        if tail is not None:
            await asyncio.wait([tail])

    def after_writes(self, partition: int, action: Callable[[], None]) -> None:
        """Runs an action when everything that was written to the partition so far is applied: now, if it all is."""
        tail = self._unfinished(partition)
        if tail is None:
            action()
        else:
            tail.add_done_callback(lambda _: action())

    async def close(self) -> None:
        """Waits for the writes that are on their way."""
        unfinished = [task for task in self._tails.values() if not task.done()]
        if unfinished:
            await asyncio.wait(unfinished)

    def _unfinished(self, partition: int) -> asyncio.Task[int] | None:
        tail = self._tails.get(partition)
        return None if tail is None or tail.done() else tail

    @staticmethod
    async def _finish(durable: Awaitable[int], previous: asyncio.Task[int] | None, apply: Callable[[int], None]) -> int:
        try:
            base_offset = await durable
        finally:
            if previous is not None and not previous.done():
                await asyncio.wait([previous])
        apply(base_offset)
        return base_offset


def error_of(error: StorageError) -> ErrorCode:
    """What a client is told when the coordinator could not write."""
    return _ANSWERS.get(error.code, error.code)


def _note_failure(task: asyncio.Task[int]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("a record of __consumer_offsets could not be written: %s", task.exception())
