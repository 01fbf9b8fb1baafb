"""What all coordinators share: an internal topic as their log, and state that changes only by replaying its records.

A coordinator decides (state, request, now) -> (records, response) without changing anything. The runtime appends the
records, and when they are durable it replays them, in the order of the log. A start replays the same records with the
same code, so what a restart finds is what the running broker had.

Two things can go wrong, each with one policy:
- The log refuses the append: nothing changed. The client gets a retriable error.
- The fsync fails: the log cuts itself back to what is durable. Until it can be read again the partition takes no
  writes; then its state is rebuilt by replay.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from semel.broker.clock import Clock
from semel.broker.topics import TopicError, Topics
from semel.protocol.batch import BatchHeader, iter_headers
from semel.protocol.errors import ErrorCode
from semel.protocol.partitioning import coordinator_partition
from semel.protocol.rows import DecodedBatch, Record, decode_batch, encode_batch
from semel.storage import PartitionLog, StorageError, SyncGroup

log = logging.getLogger(__name__)

READ_SIZE_BYTES = 1 << 20
RETRY_S = 1.0  # between two attempts to read a log after a failed fsync
BATCHES_PER_STEP = 1000  # read while rebuilding; between two steps other requests are handled

KeyValue = tuple[bytes | None, bytes | None]
Outcome = Callable[[StorageError | None], None]
Latest = dict[bytes, tuple[int, bytes | None]]  # key: (offset, value) of the last record

_MARKER_KEY = struct.Struct(">hh")  # version, type
_COMMIT_MARKER = 1

# How a client gets to know that the log could not be written: it looks for the coordinator again, or retries.
_CLIENT_ERRORS = {
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_ENOUGH_REPLICAS: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.REQUEST_TIMED_OUT: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_LEADER_OR_FOLLOWER: ErrorCode.NOT_COORDINATOR,
    ErrorCode.KAFKA_STORAGE_ERROR: ErrorCode.NOT_COORDINATOR,
    ErrorCode.MESSAGE_TOO_LARGE: ErrorCode.UNKNOWN_SERVER_ERROR,
    ErrorCode.RECORD_LIST_TOO_LARGE: ErrorCode.UNKNOWN_SERVER_ERROR,
}


def client_error(error: StorageError) -> ErrorCode:
    """The error code of a response whose records could not be written."""
    return _CLIENT_ERRORS.get(error.code, error.code)


class InternalTopic:
    """The log of a coordinator. The topic is created at the first write, as in Kafka, and compacted."""

    def __init__(self, name: str, topics: Topics, sync: SyncGroup, clock: Clock) -> None:
        self.name = name
        self._topics = topics
        self._sync = sync
        self._clock = clock

    @property
    def partition_count(self) -> int:
        """Of the topic; before it exists, as many as it will get."""
        topic = self._topics.get(self.name)
        return len(topic.partitions) if topic else self._topics.internal_partition_count(self.name)

    def leader_epoch(self, partition: int) -> int:
        return self._log(partition).leader_epoch

    def append(
        self, partition: int, records: list[KeyValue], producer: tuple[int, int] | None = None
    ) -> tuple[int, bool]:
        """Writes one batch. Returns its base offset, and whether it is durable already, as with fsync=os.

        StorageError: nothing was written.

        With `producer` (id, epoch) the batch belongs to that producer's transaction.
        """
        partition_log = self._log(partition)
        now_ms = self._clock.now_ms()
        guard = None
        if len(records) == 1 and producer is None:
            offset = partition_log.append_record(*records[0], now_ms=now_ms)
            return offset, partition_log.high_watermark > offset
        producer_id, producer_epoch = producer or (-1, -1)
        batch = encode_batch(
            [Record(offset, now_ms, key, value) for offset, (key, value) in enumerate(records)],
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            transactional=producer is not None,
        )
        if producer is not None and not partition_log.has_open_transaction(*producer):
            guard = partition_log.start_verification(*producer, -1, supports_epoch_bump=False)
        appended = partition_log.append_records(batch, now_ms=now_ms, guard=guard)
        return appended.base_offset, partition_log.high_watermark > appended.last_offset

    def transaction_start(self, partition: int, producer: tuple[int, int]) -> int:
        """Where the producer's open transaction began; without one, where its next write would begin it."""
        partition_log = self._log(partition)
        start = partition_log.transaction_start(*producer)
        return partition_log.end_offset if start is None else start

    def when_durable(self, partition: int, end_offset: int, on_outcome: Outcome) -> None:
        """Calls back, now or later, when everything before an offset is durable or failed. Call it after `append`."""
        self._sync.notify(self._log(partition), end_offset, on_outcome)

    def read(self, partition: int) -> Iterator[DecodedBatch]:
        """(header, records) of every durable batch, control ones too. Nothing if the topic does not exist."""
        partition_log = self._topics.find_log(self.name, partition)
        if partition_log is None:
            return
        offset = partition_log.start_offset
        while offset < partition_log.high_watermark:
            chunk = partition_log.read(offset, READ_SIZE_BYTES).records
            for at, header in iter_headers(chunk):
                if header.last_offset >= offset:
                    yield decode_batch(chunk, at)
                offset = max(offset, header.next_offset)
            if not chunk:
                return

    def _log(self, partition: int) -> PartitionLog:
        try:
            return self._topics.internal(self.name).partitions[partition].log
        except TopicError as error:
            raise StorageError(error.code, str(error)) from error


R = TypeVar("R")


class CoordinatorState(Protocol[R]):
    """The state of a coordinator. `replay`, `end_transaction` and `clear` are all that change what is persistent."""

    def encode(self, record: R, /) -> KeyValue: ...

    def decode(self, offset: int, key: bytes, value: bytes | None, /) -> R | None:
        """None: a record that this coordinator does not use."""

    def replay(self, partition: int, offset: int, record: R, producer_id: int | None, /) -> None:
        """With a producer id the record is pending until `end_transaction`."""

    def end_transaction(self, partition: int, producer_id: int, commit: bool, /) -> None: ...

    def clear(self, partition: int, has: Callable[[str], bool], /) -> None:
        """Forgets the values of the partition's keys (those that it `has`): its records are replayed again."""


@dataclass(slots=True, eq=False)
class _Write:
    """Records in the log, and what to do when they are durable."""

    apply: Callable[[], None]
    on_end: Outcome | None = None
    error: StorageError | None = None
    has_ended: bool = False  # durable or failed
    is_over: bool = False  # and replayed
    _done: asyncio.Future[StorageError | None] | None = None  # only if a caller waits

    def done(self) -> asyncio.Future[StorageError | None]:
        if self._done is None:
            self._done = asyncio.get_running_loop().create_future()
            if self.is_over:
                self._done.set_result(self.error)
        return self._done

    def finish(self) -> None:
        self.is_over = True
        if self._done is not None and not self._done.done():
            self._done.set_result(self.error)
        if self.on_end is not None:
            try:
                self.on_end(self.error)
            except Exception:  # it must not keep the writes behind it from being replayed
                log.exception("after a write to the log of a coordinator")


class CoordinatorRuntime(Generic[R]):
    """Writes the records of one coordinator and keeps its state equal to what is durable."""

    def __init__(self, topic: InternalTopic, state: CoordinatorState[R]) -> None:
        self.topic = topic
        self._state = state
        self._queues: defaultdict[int, deque[_Write]] = defaultdict(deque)  # of each partition, in the order of the log
        self.rebuilds: dict[int, asyncio.Future[None]] = {}  # of partitions after a failed fsync; done when it is over
        self._tasks: set[asyncio.Task[None]] = set()

    def partition_for(self, key: str) -> int:
        """The partition that keeps a group or a transactional id."""
        return coordinator_partition(key, self.topic.partition_count)

    # --- reading ------------------------------------------------------------------------------------------------------
    def load(self) -> None:
        """Replays all partitions. Called once, before the first write."""
        for partition in range(self.topic.partition_count):
            content = _Content()
            for header, records in self.topic.read(partition):
                content.add(header, records)
            self._replay_content(partition, content)

    def _replay_content(self, partition: int, content: _Content) -> None:
        self._replay_latest(partition, content.latest, None)
        for producer_id, pending in content.pending.items():
            self._replay_latest(partition, pending, producer_id)

    def _replay_latest(self, partition: int, latest: Latest, producer_id: int | None) -> None:
        for key, (offset, value) in latest.items():
            if value is not None:
                record = self._state.decode(offset, key, value)
                if record is not None:
                    self._state.replay(partition, offset, record, producer_id)

    # --- writing ------------------------------------------------------------------------------------------------------
    def write(
        self,
        partition: int,
        records: Sequence[R],
        *,
        producer: tuple[int, int] | None = None,
        on_end: Outcome | None = None,
    ) -> asyncio.Future[StorageError | None] | None:
        """Appends records as one batch now, and replays them when they are durable.

        None: that has happened. Otherwise a future that is done afterwards, with the error if the fsync failed; it may
        be cancelled or left alone, the records are replayed all the same. `on_end` is called right after the replay,
        before anything else can happen. Raises StorageError if nothing was written.
        """
        if partition in self.rebuilds:
            raise StorageError(
                ErrorCode.KAFKA_STORAGE_ERROR,
                f"{self.topic.name}-{partition} is read again after a failed fsync; try again",
            )
        base_offset, is_durable = self.topic.append(partition, list(map(self._state.encode, records)), producer)
        producer_id = producer[0] if producer else None
        if is_durable and not self._queues.get(partition):
            self._replay_written(partition, base_offset, records, producer_id)
            if on_end is not None:
                on_end(None)
            return None
        write = _Write(partial(self._replay_written, partition, base_offset, records, producer_id), on_end)
        self._queues[partition].append(write)
        self.topic.when_durable(partition, base_offset + len(records), partial(self._ended, partition, write))
        return None if write.is_over and write.error is None else write.done()

    async def commit(
        self, partition: int, records: Sequence[R], *, producer: tuple[int, int] | None = None
    ) -> ErrorCode:
        """As `write`; returns when the records are replayed, or with the error for the client."""
        try:
            written = self.write(partition, records, producer=producer)
            failure = None if written is None else await written
        except StorageError as error:
            failure = error
        return ErrorCode.NONE if failure is None else client_error(failure)

    def end_transaction(self, partition: int, producer_id: int, commit: bool) -> None:
        """A transaction's marker is durable: what the transaction wrote counts, or is dropped, after earlier writes."""
        write = _Write(partial(self._end_transaction, partition, producer_id, commit))
        self._queues[partition].append(write)
        self._ended(partition, write, None)

    async def settled(self, partition: int) -> None:
        """Returns when everything that was written to the partition so far is replayed or has failed."""
        queue = self._queues.get(partition)
        if queue:
            await asyncio.wait((queue[-1].done(),))

    async def finish_writes(self) -> None:
        """Waits for the writes under way."""
        waiting = [queue[-1].done() for queue in self._queues.values() if queue]
        if waiting:
            await asyncio.wait(waiting)

    async def stop(self) -> None:
        """Gives up reading logs that cannot be read."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, partition: int, write: _Write, error: StorageError | None) -> None:
        """A write is durable or failed. It is replayed after those before it, which may not have ended yet."""
        write.error, write.has_ended = error, True
        queue = self._queues[partition]
        while queue and queue[0].has_ended:
            first = queue.popleft()
            if first.error is None:
                first.apply()
            else:
                log.error("records of %s-%d are not durable: %s", self.topic.name, partition, first.error)
                self._start_rebuild(partition)
            first.finish()

    def _replay_written(self, partition: int, base_offset: int, records: Sequence[R], producer_id: int | None) -> None:
        try:
            for offset, record in enumerate(records, base_offset):
                self._state.replay(partition, offset, record, producer_id)
        except Exception:
            self._cannot_replay(partition)

    def _end_transaction(self, partition: int, producer_id: int, commit: bool) -> None:
        try:
            self._state.end_transaction(partition, producer_id, commit)
        except Exception:
            self._cannot_replay(partition)

    def _cannot_replay(self, partition: int) -> None:
        """The records are durable and cannot be taken back: the state has to follow."""
        log.exception("records of %s-%d cannot be replayed", self.topic.name, partition)
        self._start_rebuild(partition)

    # --- after a failed fsync -----------------------------------------------------------------------------------------
    def _start_rebuild(self, partition: int) -> None:
        if partition in self.rebuilds:
            return
        loop = asyncio.get_running_loop()
        self.rebuilds[partition] = loop.create_future()
        task = loop.create_task(self._rebuild(partition))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _rebuild(self, partition: int) -> None:
        while True:
            try:
                content = await self._read_in_steps(partition)
                self._state.clear(partition, lambda key: self.partition_for(key) == partition)
                self._replay_content(partition, content)
                break
            except Exception as error:
                log.error("%s-%d cannot be read yet; trying again: %s", self.topic.name, partition, error)
                await asyncio.sleep(RETRY_S)
        log.info("%s-%d was read again after a failed fsync", self.topic.name, partition)
        self.rebuilds.pop(partition).set_result(None)

    async def _read_in_steps(self, partition: int) -> _Content:
        content = _Content()
        for number, (header, records) in enumerate(self.topic.read(partition), 1):
            content.add(header, records)
            if number % BATCHES_PER_STEP == 0:
                await asyncio.sleep(0)
        return content


class _Content:
    """What the records of a partition amount to: only the last one of each key counts.

    Keys and values stay bytes, so that of a long log only what counts is decoded.
    """

    def __init__(self) -> None:
        self.latest: Latest = {}
        self.pending: dict[int, Latest] = {}  # what open transactions wrote, by producer id

    def add(self, header: BatchHeader, records: list[Record]) -> None:
        if header.is_control:
            self._end_transaction(header.producer_id, records)
            return
        target = self.pending.setdefault(header.producer_id, {}) if header.has_producer_id else self.latest
        for record in records:
            if record.key is not None:
                target[record.key] = (record.offset, record.value)
                if record.value is None:  # a deleted key is not brought back by a transaction that began before
                    for held in self.pending.values():
                        held.pop(record.key, None)

    def _end_transaction(self, producer_id: int, records: list[Record]) -> None:
        held = self.pending.pop(producer_id, {})
        if not any(map(_is_commit, records)):
            return
        for key, (offset, value) in held.items():
            if key not in self.latest or self.latest[key][0] < offset:  # a later record outside of transactions wins
                self.latest[key] = (offset, value)


def _is_commit(marker: Record) -> bool:
    if marker.key is None or len(marker.key) < _MARKER_KEY.size:
        return False
    return bool(_MARKER_KEY.unpack_from(marker.key)[1] == _COMMIT_MARKER)
