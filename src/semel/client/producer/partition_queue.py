"""The batches of one partition in their order, and what a response or a failure does to them. No I/O, no lock.

Up to five batches are unacknowledged at a time, and no batch is sent while five come before it from the oldest of them
on, acknowledged or not: the broker keeps five, and must recognise the oldest when it comes again. When one of them
fails, the queue drains: it waits for the responses to the others that are on their way, then sends all that are left
again, in order and with their old stamps. So order holds through retries, and the broker recognises those that it has
already.

A broker that has never seen a producer takes any sequence for its first. So the first batch goes alone: if it is
refused, a second one must not have taken its place.

The epoch is raised (idempotent producers) only when the broker has refused the first unacknowledged batch for a gap
before it. Sequences have no holes, so it cannot hold a later one either: all may be stamped anew, from 0. Not so if
both requests may still arrive, that of the refused batch and that of a batch before it that was given up: once the
broker has read them nothing is missing. Then the refused batch fails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from semel.client.producer.batches import NO_IDENTITY, Identity, ProducerBatch, split
from semel.protocol.errors import ErrorCode, Recovery

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
