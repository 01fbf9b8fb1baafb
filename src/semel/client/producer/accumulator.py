"""Where records wait until they are sent: rows are gathered into batches per partition, memory is counted.

One lock guards it all. Callers hold it for moments only; encoding and I/O happen outside of it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from threading import Condition, Lock
from typing import TYPE_CHECKING

from semel.client.errors import BufferFullError, KafkaError
from semel.client.producer.batches import Delivery, ProducerBatch, Row
from semel.client.producer.partition_queue import PartitionQueue
from semel.client.settings import ProducerSettings
from semel.client.timing import Deadline

if TYPE_CHECKING:
    from semel.client.producer.tables import TablePart

Place = tuple[str, int]  # topic, partition


class Accumulator:
    """All partition queues of one producer."""

    def __init__(self, settings: ProducerSettings, wake: Callable[[], None]) -> None:
        self.changed = Condition(Lock())  # guards everything here; notified when batches are done
        self.queues: dict[Place, PartitionQueue] = {}
        self.used_bytes = 0
        self.additions = 0  # counts closed batches, so that the sender notices those that come while it works
        self.ended: KafkaError | None = None  # why nothing is sent any more
        self.flushing = 0  # callers in flush(): nothing lingers meanwhile
        self._batch_size = min(settings.batch_size, settings.max_request_size)
        self._memory_bytes = settings.buffer_memory
        self._max_block_s = settings.max_block_ms / 1000
        self._delivery_s = settings.delivery_timeout_ms / 1000
        self._linger_s = settings.linger_ms / 1000
        self._transactional = settings.transactional_id is not None
        self._wake = wake

    # --- in ---

    def append(self, topic: str, partition: int, row: Row, size_bytes: int) -> Delivery:
        """Adds a row to the open batch of its partition. Blocks while memory is full, up to max.block.ms."""
        wake = False
        with self.changed:
            if self.used_bytes + size_bytes > self._memory_bytes:
                self._wait_for_memory(size_bytes)
            queue = self.queues.get((topic, partition)) or self._new_queue(topic, partition)
            batch = queue.open
            if batch is None or batch.rows is None or batch.size_bytes + size_bytes > self._batch_size:
                if batch is not None:
                    queue.queued.append(batch)
                    self.additions += 1
                batch = queue.open = self.new_batch(topic, partition)
                batch.rows = []
                self.used_bytes += batch.size_bytes
                wake = True
            assert batch.rows is not None
            batch.rows.append(row)
            if row[3]:
                batch.has_headers = True
            batch.count += 1
            batch.size_bytes += size_bytes
            self.used_bytes += size_bytes
            delivery = Delivery(batch, batch.count - 1, row[2], self.changed)
        if wake:
            self._wake()
        return delivery

    def append_table(self, topic: str, partition: int, part: TablePart) -> tuple[ProducerBatch, int]:
        """Adds rows of a small table to the open batch of their partition: the batch, and where they begin in it."""
        wake = False
        with self.changed:
            if self.used_bytes + part.size_bytes > self._memory_bytes:
                self._wait_for_memory(part.size_bytes)
            queue = self.queues.get((topic, partition)) or self._new_queue(topic, partition)
            batch = queue.open
            tables = None if batch is None else batch.tables
            if (
                batch is None
                or not tables
                or tables[0].kind != part.kind
                or batch.size_bytes + part.size_bytes > self._batch_size
            ):
                if batch is not None:
                    queue.queued.append(batch)
                    self.additions += 1
                batch = queue.open = self.new_batch(topic, partition)
                tables = batch.tables = []
                self.used_bytes += batch.size_bytes
                wake = True
            tables.append(part)
            first = batch.count
            batch.count += part.row_count
            batch.size_bytes += part.size_bytes
            self.used_bytes += part.size_bytes
        if wake:
            self._wake()
        return batch, first

    def new_batch(self, topic: str, partition: int) -> ProducerBatch:
        now_s = time.monotonic()
        return ProducerBatch(topic, partition, now_s, now_s + self._delivery_s)

    def add(self, batch: ProducerBatch) -> None:
        """Adds an encoded batch behind what its partition has. Blocks while memory is full, up to max.block.ms."""
        with self.changed:
            if self.used_bytes + batch.size_bytes > self._memory_bytes:
                self._wait_for_memory(batch.size_bytes)
            queue = self.queues.get((batch.topic, batch.partition)) or self._new_queue(batch.topic, batch.partition)
            is_news = not queue.queued  # otherwise the sender has something to send here, and a reason not to
            self._close_open(queue)
            queue.queued.append(batch)
            self.additions += is_news
            self.used_bytes += batch.size_bytes
        if is_news:
            self._wake()

    def _new_queue(self, topic: str, partition: int) -> PartitionQueue:
        queue = self.queues[topic, partition] = PartitionQueue(topic, partition, self._transactional)
        return queue

    def _wait_for_memory(self, size_bytes: int) -> None:
        self._wake()
        size_bytes = min(size_bytes, self._memory_bytes)  # what is larger goes alone
        self.changed.wait_for(
            lambda: self.used_bytes + size_bytes <= self._memory_bytes or self.ended is not None, self._max_block_s
        )
        if self.ended is not None:
            raise type(self.ended)(str(self.ended))
        if self.used_bytes + size_bytes > self._memory_bytes:
            raise BufferFullError(
                f"buffer.memory is full: {self.used_bytes} of {self._memory_bytes} bytes wait to be sent and nothing "
                f"got free within max.block.ms ({self._max_block_s * 1000:.0f}); is the broker reachable? send slower, "
                "or raise buffer.memory"
            )

    # --- out; the lock is held by the caller ---

    def close_lingering(self, now_s: float) -> None:
        """Closes the open batches that waited long enough."""
        for queue in self.queues.values():
            batch = queue.open
            if batch is not None and (self.flushing or batch.created_s + self._linger_s <= now_s):
                self._close_open(queue)

    def _close_open(self, queue: PartitionQueue) -> None:
        if queue.open is not None:
            queue.queued.append(queue.open)
            queue.open = None

    def next_event_s(self) -> float:
        """When an open batch has lingered or a retry is due; on time.monotonic()."""
        at_s = float("inf")
        for queue in self.queues.values():
            if queue.open is not None:
                at_s = min(at_s, queue.open.created_s + self._linger_s)
            if queue.retry_at_s and not queue.is_empty and not queue.draining:
                at_s = min(at_s, queue.retry_at_s)
            oldest = next(queue.batches(), None)
            if oldest is not None and not oldest.sent:
                at_s = min(at_s, oldest.deadline_s)
        return at_s

    def release(self, batches: Iterable[ProducerBatch]) -> None:
        """These are done: gives their memory back and wakes the threads that wait."""
        for batch in batches:
            self.used_bytes -= batch.size_bytes
        self.changed.notify_all()

    def fail_all(self, error: KafkaError) -> list[ProducerBatch]:
        """Fails everything, on its way or not, and refuses what comes later; returns what failed."""
        if self.ended is None:
            self.ended = error
            self._memory_bytes = -1  # so that adding need not look at `ended` for every record
        for queue in self.queues.values():
            for batch in queue.unacked:
                batch.sent = False
        return self.fail_waiting(error)

    def fail_waiting(self, error: KafkaError) -> list[ProducerBatch]:
        """Fails everything that is not on its way right now; returns it. The gate gets the error before."""
        failed = []
        for queue in self.queues.values():
            for batch in [each for each in queue.batches() if not each.sent]:
                queue.drop(batch)
                batch.finish(-1, -1, error)
                failed.append(batch)
        self.release(failed)
        return failed

    # --- waiting ---

    def start_flush(self) -> None:
        """From here on nothing lingers."""
        with self.changed:
            self.flushing += 1

    def flush(self, deadline: Deadline, until: Callable[[], bool] | None = None) -> bool:
        """Waits until everything that was here at the call is done; whether that happened in time."""
        with self.changed:
            waiting = [batch for queue in self.queues.values() for batch in queue.batches()][::-1]
            self.flushing += 1
            self.additions += 1  # what lingers is due now
            self._wake()
            try:
                return self.changed.wait_for(
                    lambda: _all_done(waiting) or (until is not None and until()), deadline.remaining_s()
                )
            finally:
                self.flushing -= 1


def _all_done(batches: list[ProducerBatch]) -> bool:
    """Also takes the done ones off the end, so that they are not looked at again."""
    while batches and batches[-1].done:
        batches.pop()
    return not batches


class StickyPartitioner:
    """Rows without a key stay with one partition until a batch is full, then move on to another one."""

    def __init__(self, batch_size: int, choose: Callable[[int], int] = random.randrange) -> None:
        self._batch_size = batch_size
        self._choose = choose
        self._current: dict[str, tuple[int, int]] = {}  # topic: partition, bytes given to it

    def partition(self, topic: str, partitions: int, size_bytes: int) -> int:
        current, given = self._current.get(topic, (-1, 0))
        if current < 0 or given >= self._batch_size or current >= partitions:
            current, given = self._other(current, partitions), 0
        self._current[topic] = (current, given + size_bytes)
        return current

    def _other(self, current: int, partitions: int) -> int:
        if partitions == 1:
            return 0
        if not 0 <= current < partitions:
            return self._choose(partitions)
        return (current + 1 + self._choose(partitions - 1)) % partitions
