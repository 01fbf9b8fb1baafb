"""The three guarantees: when offsets are committed, and what is done after an error.

    exactly_once    output and offsets in one transaction; after an error it is aborted and the records are read again
    at_least_once   output first, offsets when all of it is stored; after an error the records are read again
    at_most_once    offsets first, then the output; after an error the records are gone

`take` handles a batch, `settle` ends a unit of work (a transaction, or what is between two commits of offsets). After
an error the mode has `failed` until `undo` succeeds: nothing may be taken or settled in between.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from semel.client.consumer import Consumer
from semel.client.errors import CommitUncertainError, FencedError, KafkaError, RetriableError
from semel.client.producer import Producer
from semel.client.types import OffsetAndMetadata, TopicPartition
from semel.patterns.process_output import Deliveries, Emitter

log = logging.getLogger("semel.process")

ABORT_TIMEOUT_MS = 10_000
SETTLE_TRIES = 3


class Mode:
    """What the modes share. `begun` holds, for each partition, where the current unit of work began."""

    has_state = False
    _is_calling = False
    _called_s = 0.0

    def __init__(self, consumer: Consumer, make_producer: Callable[[], Producer], emitter: Emitter) -> None:
        self.consumer = consumer
        self.make_producer = make_producer
        self.producer = make_producer()
        self.emitter = emitter
        self.begun: dict[TopicPartition, int] = {}
        self.failed: BaseException | None = None
        self.records_out = 0
        self.dead_letters = 0
        self.duplicates = 0
        self.commits = 0
        self.aborts = 0

    @property
    def is_working(self) -> bool:
        return bool(self.begun)

    def start(self) -> None:
        """Once, before the first batch."""

    def assigned(self, partitions: list[TopicPartition]) -> None:
        """These are assigned now. What fails here is tried again by `take`."""

    def released(self, partitions: list[TopicPartition]) -> None:
        """These are not assigned any more; what was open is settled or dropped."""

    def take(self, batch: Any, firsts: dict[TopicPartition, int]) -> None:
        """Handles a batch; `firsts` is the offset of its first record in each partition."""
        raise NotImplementedError

    def settle(self) -> None:
        """Ends the unit of work for good."""
        raise NotImplementedError

    def set_aside(self, firsts: dict[TopicPartition, int]) -> None:
        """After `failed`: a batch that was read and must not be taken. `undo` goes back to where it began."""
        self._begin(firsts)

    def undo(self) -> None:
        """After `failed`: makes sure that the unit of work will not count, and goes back to where it began. What fails
        half-way can be called again."""
        self.drop()
        self._rewind()
        self.failed = None
        self.aborts += 1

    def drop(self) -> None:
        """Makes sure that the unit of work will not count."""

    def abandon(self) -> None:
        """As `drop`, at the end of the loop: nothing follows that would have to wait for it."""
        self.drop()

    def close(self) -> None:
        self.producer.close(timeout_ms=ABORT_TIMEOUT_MS)

    def end_calls(self) -> None:
        """Calls that wait for a broker, and those that follow, raise `ClosedError`. From another thread."""
        self.producer.close(timeout_ms=0)

    # -- how long it waits for brokers ---------------------------------------------------------------------------------
    @contextmanager
    def calling(self) -> Iterator[None]:
        """The function runs: what takes long is not a broker."""
        self._is_calling = True
        try:
            yield
        finally:
            self._called_s, self._is_calling = time.monotonic(), False

    def called_s(self, since_s: float) -> float:
        """When the function ran last, on time.monotonic(), if that was later."""
        return time.monotonic() if self._is_calling else max(since_s, self._called_s)

    # -- pieces --------------------------------------------------------------------------------------------------------
    def _begin(self, firsts: dict[TopicPartition, int]) -> None:
        for partition, offset in firsts.items():
            self.begun.setdefault(partition, offset)

    def _progress(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """The offsets after all that was taken, of the partitions that it came from."""
        consumed = self.consumer.consumed()
        return {partition: consumed[partition] for partition in self.begun if partition in consumed}

    def _emit(self, batch: Any) -> Deliveries:
        with self.calling():
            made = self.emitter.outputs(batch)
        sent = self.emitter.send(self.producer, made)
        self.records_out += sent.records
        self.dead_letters += sent.dead_letters
        return sent.deliveries

    def _rewind(self) -> None:
        """Back to what the group has committed; where that is nothing, to where the unit of work began."""
        mine = {part: at for part, at in self.begun.items() if part in self.consumer.assignment()}
        committed = self.consumer.committed(mine)
        for partition, began in mine.items():
            self.consumer.seek(partition, committed[partition].offset if partition in committed else began)
        self.begun = {}


class ExactlyOnce(Mode):
    _is_open = False  # whether the producer has an open transaction

    def start(self) -> None:
        self.producer.init_transactions()

    def take(self, batch: Any, firsts: dict[TopicPartition, int]) -> None:
        self._begin(firsts)
        if not self._is_open:
            self.producer.begin_transaction()
            self._is_open = True
        self._emit(batch)

    def settle(self) -> None:
        if not self.is_working:
            return
        offsets: dict[tuple[str, int], OffsetAndMetadata | int] = dict(self._progress().items())
        self.producer.send_offsets_to_transaction(offsets, self.consumer.group_metadata())
        self._commit()
        self._is_open = False
        self.begun = {}
        self.commits += 1

    def _commit(self) -> None:
        """After a lost response EndTxn is sent again: it commits once, or raises that it did not."""
        for left in reversed(range(SETTLE_TRIES)):
            try:
                self.producer.commit_transaction()
                return
            except CommitUncertainError as error:
                if not left:
                    raise
                log.warning("sending the commit again: %s", error)

    def drop(self) -> None:
        if self._is_open and not self._abort():
            # The next owner of the id ends what this one left; the group's offsets then show how it ended.
            self.producer.close(timeout_ms=0)
            self.producer = self.make_producer()
            self.producer.init_transactions()
        self._is_open = False

    def abandon(self) -> None:
        """What cannot be aborted now is left to the next owner of the id, or to the transaction's timeout."""
        if self._is_open:
            self._abort()

    def _abort(self) -> bool:
        if isinstance(self.failed, FencedError | CommitUncertainError):
            return False
        try:
            self.producer.abort_transaction(timeout_ms=ABORT_TIMEOUT_MS)
        except FencedError:
            raise  # whether to take the id back is for the loop to say: another instance may have it now
        except KafkaError as failure:
            log.warning("the transaction could not be aborted in the ordinary way: %s", failure)
            return False
        return True


class AtLeastOnce(Mode):
    def __init__(self, consumer: Consumer, make_producer: Callable[[], Producer], emitter: Emitter) -> None:
        super().__init__(consumer, make_producer, emitter)
        self._deliveries: Deliveries = []

    def take(self, batch: Any, firsts: dict[TopicPartition, int]) -> None:
        self._begin(firsts)
        self._deliveries += self._emit(batch)

    def settle(self) -> None:
        if not self.is_working:
            return
        for delivery in self._deliveries:
            delivery.result()
        self.consumer.commit(self._progress())
        self._deliveries, self.begun = [], {}
        self.commits += 1

    def drop(self) -> None:
        self._deliveries = []


class AtMostOnce(Mode):
    _is_committed = False

    def take(self, batch: Any, firsts: dict[TopicPartition, int]) -> None:
        self._begin(firsts)
        self._is_committed = False
        self.consumer.commit(self._progress())
        self._is_committed = True
        self.commits += 1
        try:
            for delivery in self._emit(batch):
                delivery.result()
        except RetriableError as error:
            log.warning("records were given up, as at_most_once says: %s", error)
        self.begun = {}

    def settle(self) -> None:
        """Nothing is left to do: `take` waits for its output."""
        self.begun = {}

    def drop(self) -> None:
        """Not committed for certain: they may be read again, since nothing was sent. Committed: they are gone."""
        if self._is_committed:
            self.begun = {}


MODES: dict[str, type[Mode]] = {
    "exactly_once": ExactlyOnce,
    "at_least_once": AtLeastOnce,
    "at_most_once": AtMostOnce,
}
