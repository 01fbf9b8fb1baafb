"""Under which producer id and epoch batches are written, and what a failed batch means for them. No I/O.

Three of the four kinds: without an id, with an id from the cluster, or with one that was given. The fourth, a
transaction, is in `transaction.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

from semel.client.errors import KafkaError
from semel.client.producer.batches import NO_IDENTITY, Identity, Place, ProducerBatch

NAMES_UP_TO = 12  # later versions of Produce name topics by id
LAST_EPOCH = 0x7FFF


class WriteIdentity:
    """What a producer's core must know of its identity. As it is: none, so a retry may store a record twice."""

    transactional_id: str | None = None
    transaction_number = 0  # changes with every transaction
    _identity: Identity | None = NO_IDENTITY

    @property
    def current(self) -> Identity | None:
        """The identity that batches are stamped with; None while nothing may be sent."""
        return self._identity

    @property
    def is_wanted(self) -> bool:
        """Whether a producer id must be requested before anything can be sent; `received` takes it."""
        return False

    @property
    def produce_versions(self) -> tuple[int, int]:
        """(lowest, highest) version of Produce that may be used now."""
        return 3, NAMES_UP_TO

    def received(self, identity: Identity) -> None:
        """The producer id that was requested."""

    def raise_epoch(self, stale: Identity) -> Identity | None:
        """The next epoch, if `stale` is still the current identity. None: not now."""
        return None

    def check_accepts(self) -> None:
        """Raises unless records may be added now."""

    def may_write(self, place: Place) -> bool:
        """Whether a partition may be written now: in TV1 not before the transaction has it."""
        return True

    def failed(self, error: KafkaError) -> None:
        """A batch fails. Called before the batch is done: who sees it done sees this, too."""

    def stored(self, batch: ProducerBatch) -> None:
        """The broker has a batch."""

    def lost(self) -> KafkaError | None:
        """Why nothing is worth sending any more: the transaction is being aborted, or the producer fenced."""
        return None

    def partitions_to_add(self, places: Iterable[Place]) -> list[Place]:
        """Those that the coordinator must add before they are written (TV1); `added` takes the outcome."""
        return []

    def added(self, places: Iterable[Place]) -> None:
        """The coordinator has these; none of them if the request failed."""


class IdempotentIdentity(WriteIdentity):
    """With a producer id from the cluster, requested for the first batch. The epoch is raised here, without a request:
    no other producer has this id."""

    _identity = None

    @property
    def is_wanted(self) -> bool:
        return self._identity is None

    def received(self, identity: Identity) -> None:
        self._identity = identity

    def raise_epoch(self, stale: Identity) -> Identity | None:
        if self._identity == stale:
            last = stale.epoch >= LAST_EPOCH
            self._identity = None if last else Identity(stale.producer_id, stale.epoch + 1)
        return self._identity


class FixedIdentity(WriteIdentity):
    """Writes with an identity that is given and never changes: that of a transaction which another process owns. The
    first failure ends it."""

    def __init__(self, transactional_id: str | None, identity: Identity, produce_versions: tuple[int, int]) -> None:
        self.transactional_id = transactional_id
        self._identity = identity
        self._produce_versions = produce_versions
        self._error: KafkaError | None = None

    @property
    def produce_versions(self) -> tuple[int, int]:
        return self._produce_versions

    def failed(self, error: KafkaError) -> None:
        if self._error is None:
            self._error = error

    def lost(self) -> KafkaError | None:
        return self._error
