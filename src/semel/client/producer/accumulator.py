"""Where records wait until they are sent: rows are gathered into batches per partition, memory is counted. No I/O, no
lock, no clock: `core.py` says what becomes of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from semel.client.errors import KafkaError
from semel.client.producer.batches import NO_IDENTITY, Identity, Place, ProducerBatch, Row, split
from semel.client.settings import ProducerSettings
from semel.protocol.errors import ErrorCode, Recovery

if TYPE_CHECKING:
    from semel.client.producer.tables import TablePart

# --- The batches of one partition in their order, and what a response or a failure does to them. No I/O, no lock ---
#
# Up to five batches are unacknowledged at a time, and no batch is sent while five come before it from the oldest of
# them on, acknowledged or not: the broker keeps five, and must recognise the oldest when it comes again. When one of
# them fails, the queue drains: it waits for the responses to the others that are on their way, then sends all that
# are left again, in order and with their old stamps. So order holds through retries, and the broker recognises those
# that it has already.
#
# A broker that has never seen a producer takes any sequence for its first. So the first batch goes alone: if it is
# refused, a second one must not have taken its place.
#
# The epoch is raised (idempotent producers) only when the broker has refused the first unacknowledged batch for a gap
# before it. Sequences have no holes, so it cannot hold a later one either: all may be stamped anew, from 0. Not so if
# both requests may still arrive, that of the refused batch and that of a batch before it that was given up: once the
# broker has read them nothing is missing. Then the refused batch fails.


MAX_UNACKED = 5  # what a broker keeps of a producer in a partition


class FailedBatchAction(Enum):
    """What becomes of a batch that was not stored."""

    RETRY = "retry"  # the same batch again, after the others have their responses
    RAISE_EPOCH = "raise epoch"  # a gap: the queue waits for `restart` with a new epoch
    SPLIT = "split"  # halves of it were put in its place
    FAIL = "fail"  # give up on it


# Errors that say "not stored, and something before it is missing".
GAP_ERRORS = frozenset({ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, ErrorCode.UNKNOWN_PRODUCER_ID})
TOO_LARGE_ERRORS = frozenset({ErrorCode.MESSAGE_TOO_LARGE, ErrorCode.RECORD_LIST_TOO_LARGE})


@dataclass(slots=True, eq=False, repr=False)
class PartitionQueue:
    topic: str
    partition: int
    transactional: bool = False
    open: ProducerBatch | None = None  # rows are still added to it
    queued: deque[ProducerBatch] = field(default_factory=deque)  # closed, never sent
    unacked: deque[ProducerBatch] = field(default_factory=deque)  # stamped and sent at least once, by sequence
    draining: bool = False
    gap: bool = False  # sequences were given to a batch that may not be in the log; a later response may show it
    restarting: bool = False  # the broker refused the first unacked batch for a gap before it
    retries: int = 0  # in a row
    retry_at_s: float = 0.0
    setback: KafkaError | None = None  # what the last try failed with
    identity: Identity = NO_IDENTITY
    _next_sequence: int = 0
    _gap_may_close: bool = False  # a batch in doubt was dropped: its request may still arrive
    # For each batch that left out of turn: how many unacked ones stand before it.
    _overtaken: list[int] = field(default_factory=list)
    _known: bool = False  # the broker has acknowledged a batch of this producer id

    def __repr__(self) -> str:
        return f"PartitionQueue({self.topic}-{self.partition}, {len(self.unacked)} unacked, {len(self.queued)} queued)"

    @property
    def is_empty(self) -> bool:
        return not (self.unacked or self.queued or (self.open and self.open.count))

    def batches(self) -> Iterator[ProducerBatch]:
        """All that are not done, oldest first."""
        yield from self.unacked
        yield from self.queued
        if self.open is not None and self.open.count:
            yield self.open

    # --- sending ---
    def wants_restart(self) -> bool:
        """Whether this queue waits for a raised epoch and has no response to wait for any more."""
        in_doubt = self.restarting or (self.gap and not self.unacked)
        return in_doubt and not any(batch.sent for batch in self.unacked)

    def restart(self, identity: Identity) -> None:
        """A new epoch: everything that is left is stamped anew, from sequence 0."""
        self.queued.extendleft(reversed(self.unacked))
        self.unacked.clear()
        self._overtaken.clear()
        self.gap = self.restarting = self.draining = False
        self._adopt(identity)

    def _adopt(self, identity: Identity) -> None:
        self._known = self._known and identity.producer_id == self.identity.producer_id
        self.identity = identity
        self._next_sequence = 0
        self._gap_may_close = False

    def can_send(self, now_s: float, identity: Identity, max_unacked: int = MAX_UNACKED) -> bool:
        """Whether `next_to_send` would give a batch."""
        if self.draining or self.restarting or now_s < self.retry_at_s:
            return False
        window = max_unacked - len(self._overtaken)
        for index, batch in enumerate(self.unacked):
            if not batch.sent:
                return index < window
        if self.gap or len(self.unacked) >= window or not self.queued or self.queued[0].data is None:
            return False
        if not self.unacked:
            return True
        if self.identity != identity:
            return False  # those finish under their own epoch first
        return self._known or identity == NO_IDENTITY

    def next_bytes(self) -> int:
        """The size of the next batch, 0 if there is none."""
        batch = next((each for each in self.unacked if not each.sent), self.queued[0] if self.queued else None)
        return len(batch.data) if batch is not None and batch.data is not None else 0

    def next_to_send(self, now_s: float, identity: Identity, max_unacked: int = MAX_UNACKED) -> ProducerBatch | None:
        """The batch to send now, stamped; None if the queue must wait. The caller sets `sent`."""
        if not self.can_send(now_s, identity, max_unacked):
            return None
        for batch in self.unacked:
            if not batch.sent:
                return batch
        if self.identity != identity:
            self._adopt(identity)
        batch = self.queued.popleft()
        sequence = self._next_sequence if identity != NO_IDENTITY else -1
        batch.stamp(identity, sequence, self.transactional)
        if sequence >= 0:
            self._next_sequence = batch.next_sequence
        self.unacked.append(batch)
        return batch

    # --- responses ---
    def acked(self, batch: ProducerBatch, base_offset: int, log_append_time: int) -> None:
        """The broker has it."""
        batch.sent = False
        batch.finish(base_offset, log_append_time)
        self._leave(batch)
        self.retries = 0
        self.retry_at_s = 0.0
        self.setback = None
        self._known = True
        if batch.identity == self.identity:
            self.gap = self._gap_may_close = False  # a later sequence was taken, so the one in doubt had been stored
        self._end_drain()

    def refused(self, batch: ProducerBatch, code: ErrorCode, retry_at_s: float) -> FailedBatchAction:
        """The broker did not store it, or it is unknown whether it did (a lost connection: NETWORK_EXCEPTION)."""
        batch.sent = False
        is_first = self.unacked[0] is batch
        verdict = self._verdict(batch, code, is_first)
        if verdict is FailedBatchAction.RETRY or verdict is FailedBatchAction.RAISE_EPOCH:
            self.retries += 1
            self.retry_at_s = max(self.retry_at_s, retry_at_s)
            self.draining = True
        if verdict is FailedBatchAction.RAISE_EPOCH:
            self.restarting = True
        if verdict is FailedBatchAction.SPLIT:
            at = self.unacked.index(batch)
            self.unacked.remove(batch)
            for half in reversed(split(batch)):
                self.unacked.insert(at, half)
            self._overtaken = [before + (before > at) for before in self._overtaken]
            self.draining = True
        self._end_drain()
        return verdict

    def _verdict(self, batch: ProducerBatch, code: ErrorCode, is_first: bool) -> FailedBatchAction:
        if code in TOO_LARGE_ERRORS and batch.count > 1:
            return FailedBatchAction.SPLIT
        if code in GAP_ERRORS and batch.sequence >= 0:
            if not is_first:
                return FailedBatchAction.RETRY  # what stands before it must be settled first
            is_risky = self._gap_may_close and batch.in_doubt
            return FailedBatchAction.FAIL if self.transactional or is_risky else FailedBatchAction.RAISE_EPOCH
        if code.recovery is Recovery.RETRY:
            return FailedBatchAction.RETRY
        return FailedBatchAction.FAIL

    def drop(self, batch: ProducerBatch) -> None:
        """The batch failed for good or expired; its sequences are gone, so what follows may need a new epoch."""
        batch.sent = False
        if batch in self.unacked:
            self._leave(batch)
            self.gap = batch.sequence >= 0
            self._gap_may_close = self._gap_may_close or batch.in_doubt
        elif batch is self.open:
            self.open = None
        else:
            self.queued.remove(batch)
        self._end_drain()

    def _leave(self, batch: ProducerBatch) -> None:
        """Takes it out of the unacked ones; notes if it leaves others behind."""
        at = self.unacked.index(batch)
        del self.unacked[at]
        if self._overtaken:
            moved = (before - (before > at) for before in self._overtaken)
            self._overtaken = [before for before in moved if before]
        if at:
            self._overtaken.append(at)

    def _end_drain(self) -> None:
        if self.draining and not any(batch.sent for batch in self.unacked):
            self.draining = False

    def expired(self, now_s: float) -> list[ProducerBatch]:
        """Those past their delivery timeout that are not in flight."""
        return [batch for batch in self.batches() if batch.deadline_s <= now_s and not batch.sent]


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
