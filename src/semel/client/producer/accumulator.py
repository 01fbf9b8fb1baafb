"""Where records wait until they are sent: rows are gathered into batches per partition, memory is counted. No I/O, no
lock, no clock: `core.py` says what becomes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from semel.client.producer.batches import Place, ProducerBatch, Row
from semel.client.producer.partition_queue import PartitionQueue
from semel.client.settings import ProducerSettings

if TYPE_CHECKING:
    from semel.client.producer.tables import TablePart


class Accumulator:
    """All partition queues of one producer.

    `append` and `append_table` add to an open batch and are all that most records need; None says that there is no
    open batch with space for it. Then the caller makes sure of memory (`has_memory`) and opens one (`append_new`).

    Ctrl-C may come wherever a call ends: what belongs together is changed without one (`+=`, not `append`). A batch
    that was open and queued would be sent twice.
    """

    def __init__(self, settings: ProducerSettings) -> None:
        self.queues: dict[Place, PartitionQueue] = {}
        self.used_bytes = 0
        self.additions = 0  # counts what may be sent, so that a driver notices what comes while it works
        self.flushing = 0  # callers that wait for everything: nothing lingers meanwhile
        self.memory_bytes = settings.buffer_memory
        self._batch_size = min(settings.batch_size, settings.max_request_size)
        self._delivery_s = settings.delivery_timeout_ms / 1000
        self._linger_s = settings.linger_ms / 1000
        self._transactional = settings.transactional_id is not None

    # --- in ---
    def append(self, topic: str, partition: int, row: Row, size_bytes: int) -> ProducerBatch | None:
        """Adds a row to the open batch of its partition, which is returned; None if there is no space."""
        queue = self.queues.get((topic, partition))
        batch = None if queue is None else queue.open
        if (
            batch is None
            or batch.rows is None
            or batch.size_bytes + size_bytes > self._batch_size
            or self.used_bytes + size_bytes > self.memory_bytes
        ):
            return None
        batch.rows += (row,)
        if row[3]:
            batch.has_headers = True
        batch.count += 1
        batch.size_bytes += size_bytes
        self.used_bytes += size_bytes
        return batch

    def append_new(self, topic: str, partition: int, row: Row, size_bytes: int, now_s: float) -> ProducerBatch:
        batch = self.new_batch(topic, partition, now_s)
        batch.rows, batch.count = [row], 1
        batch.has_headers = bool(row[3])
        batch.size_bytes += size_bytes
        self._open(batch)
        return batch

    def append_table(self, topic: str, partition: int, part: TablePart) -> ProducerBatch | None:
        """Adds rows of a small table to the open batch of their partition, which is returned; None if there is no
        space, or the open batch has other columns."""
        queue = self.queues.get((topic, partition))
        batch = None if queue is None else queue.open
        if (
            batch is None
            or not batch.tables
            or batch.tables[0].kind != part.kind
            or batch.size_bytes + part.size_bytes > self._batch_size
            or self.used_bytes + part.size_bytes > self.memory_bytes
        ):
            return None
        row_count, size_bytes = part.row_count, part.size_bytes
        batch.tables += (part,)
        batch.count += row_count
        batch.size_bytes += size_bytes
        self.used_bytes += size_bytes
        return batch

    def append_new_table(self, topic: str, partition: int, part: TablePart, now_s: float) -> ProducerBatch:
        batch = self.new_batch(topic, partition, now_s)
        batch.tables, batch.count = [part], part.row_count
        batch.size_bytes += part.size_bytes
        self._open(batch)
        return batch

    def _open(self, batch: ProducerBatch) -> None:
        queue = self._queue(batch.topic, batch.partition)
        if queue.open is not None:
            _close_open(queue)
            self.additions += 1
        queue.open = batch
        self.used_bytes += batch.size_bytes

    def new_batch(self, topic: str, partition: int, now_s: float) -> ProducerBatch:
        """One that is to be filled and added by the caller."""
        return ProducerBatch(topic, partition, now_s, now_s + self._delivery_s)

    def add(self, batch: ProducerBatch) -> bool:
        """Adds an encoded batch behind what its partition has; whether that may be something to send."""
        queue = self._queue(batch.topic, batch.partition)
        is_news = not queue.queued  # otherwise there was something to send here already, and a reason not to
        _close_open(queue)
        queue.queued += (batch,)
        self.additions += is_news
        self.used_bytes += batch.size_bytes
        return is_news

    def _queue(self, topic: str, partition: int) -> PartitionQueue:
        queue = self.queues.get((topic, partition))
        if queue is None:
            queue = self.queues[topic, partition] = PartitionQueue(topic, partition, self._transactional)
        return queue

    def has_memory(self, size_bytes: int) -> bool:
        """Whether so much of buffer.memory is left; what is larger goes alone."""
        return self.used_bytes + min(size_bytes, self.memory_bytes) <= self.memory_bytes

    # --- out ---
    @property
    def is_empty(self) -> bool:
        return all(queue.is_empty for queue in self.queues.values())

    def batches(self) -> Iterator[ProducerBatch]:
        """All that are not done."""
        for queue in self.queues.values():
            yield from queue.batches()

    def close_lingering(self, now_s: float) -> None:
        """Closes the open batches that waited long enough."""
        for queue in self.queues.values():
            batch = queue.open
            if batch is not None and (self.flushing or batch.created_s + self._linger_s <= now_s):
                _close_open(queue)

    def close_all(self) -> None:
        """Closes all open batches: what is added from here on needs a new one."""
        for queue in self.queues.values():
            _close_open(queue)
        self.additions += 1

    def start_flush(self) -> None:
        """From here on nothing lingers, until `flushing` is lowered again."""
        self.flushing += 1
        self.additions += 1

    def next_event_s(self, looked_s: float) -> float:
        """When an open batch has lingered, a retry gets due after `looked_s`, or a batch is late."""
        at_s = float("inf")
        for queue in self.queues.values():
            if queue.open is not None:
                at_s = min(at_s, queue.open.created_s + self._linger_s)
            if queue.retry_at_s > looked_s and not queue.is_empty and not queue.draining:
                at_s = min(at_s, queue.retry_at_s)
            oldest = next(queue.batches(), None)
            if oldest is not None and not oldest.sent:
                at_s = min(at_s, oldest.deadline_s)
        return at_s


def _close_open(queue: PartitionQueue) -> None:
    if queue.open is not None:
        queue.queued += (queue.open,)
        queue.open = None


class StickyPartitioner:
    """Rows without a key stay with one partition until a batch is full, then move on to another one, which `choose`
    picks: a number below its argument."""

    def __init__(self, batch_size: int, choose: Callable[[int], int]) -> None:
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
