"""Who a producer is to the brokers: nobody in particular, one with an id, or the owner of a transaction."""

from __future__ import annotations

from semel.client.accumulator import Place
from semel.client.batches import NO_IDENTITY, Batch, Identity
from semel.client.cluster import Cluster
from semel.client.coordinator import new_identity
from semel.client.errors import KafkaError
from semel.client.sender import LANE, NAMES_UP_TO

LAST_EPOCH = 0x7FFF


class PlainGate:
    """Without idempotence: a retry may store a record twice."""

    transactional_id: str | None = None

    def identity(self) -> Identity | None:
        return NO_IDENTITY

    def prepare(self) -> None:
        """Nothing to get."""

    def produce_version(self) -> tuple[int, int]:
        return 3, NAMES_UP_TO

    def admit(self, places: list[Place]) -> None:
        """Nothing to join."""

    def raise_epoch(self, stale: Identity) -> Identity | None:
        return None

    def failed(self, error: KafkaError) -> None:
        """The delivery tells; nothing else is lost."""

    def stored(self, batch: Batch) -> None:
        """Nothing to note."""

    def giving_up(self) -> KafkaError | None:
        return None


class IdempotentGate(PlainGate):
    """With a producer id from the cluster, got at the first send. The epoch is raised here, without asking anybody:
    nobody else has this id."""

    def __init__(self, cluster: Cluster, timeout_s: float) -> None:
        self._cluster = cluster
        self._timeout_s = timeout_s
        self._identity: Identity | None = None

    def identity(self) -> Identity | None:
        return self._identity

    def prepare(self) -> None:
        if self._identity is None:
            self._identity = new_identity(self._cluster, self._timeout_s, LANE)

    def raise_epoch(self, stale: Identity) -> Identity | None:
        if self._identity == stale:
            if stale.epoch >= LAST_EPOCH:
                self._identity = None  # `prepare` gets a new id
            else:
                self._identity = Identity(stale.producer_id, stale.epoch + 1)
        return self._identity


class FixedGate(PlainGate):
    """Writes with an identity that is given and never changes: that of a transaction which another process owns."""

    def __init__(self, transactional_id: str | None, identity: Identity, produce_version: tuple[int, int]) -> None:
        self.transactional_id = transactional_id
        self._identity = identity
        self._produce_version = produce_version
        self._error: KafkaError | None = None

    def identity(self) -> Identity | None:
        return self._identity

    def produce_version(self) -> tuple[int, int]:
        return self._produce_version

    def failed(self, error: KafkaError) -> None:
        if self._error is None:
            self._error = error

    def giving_up(self) -> KafkaError | None:
        return self._error
