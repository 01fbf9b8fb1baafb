"""A broker and a log in memory, so that the coordinator can be stopped at any moment of a write."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator

from semel.broker.coordinator_runtime import Outcome
from semel.broker.transactions.coordinator import TransactionCoordinator
from semel.broker.transactions.records import decode_key, decode_value
from semel.broker.transactions.states import Transaction
from semel.protocol.batch import BatchHeader
from semel.protocol.errors import ErrorCode
from semel.protocol.partitioning import coordinator_partition
from semel.protocol.rows import Record
from semel.storage import StorageError
from tests.support.clock import ManualClock
from tests.support.waiting import PATIENCE_S

TopicPartition = tuple[str, int]
_HEADER = BatchHeader(0, 0, 0, 2, 0, 0, 0, 0, 0, -1, -1, -1, 1)


class MemoryTopic:
    """Keeps what was written. `gate` holds writes back from being durable.

    With `fail_sync` a write fails, and as with a real log nothing can be read or written until the disk is sound again;
    then what was not durable is cut off.
    """

    name = "__transaction_state"
    partition_count = 4

    def __init__(self) -> None:
        self.records: list[list[tuple[bytes | None, bytes | None]]] = [[] for _ in range(self.partition_count)]
        self.durable: list[int] = [0] * self.partition_count
        self.gate = asyncio.Event()
        self.gate.set()
        self.refuse: ErrorCode | None = None
        self.most_records: int | None = None  # that a batch may have
        self.batches: list[int] = []  # how many records each has, over all partitions
        self.fail_sync = False
        self.failed_syncs = 0
        self._offline: set[int] = set()
        self._waiting: list[asyncio.Task[None]] = []

    def partition_for(self, key: str) -> int:
        return coordinator_partition(key, self.partition_count)

    def leader_epoch(self, partition: int) -> int:
        return 3

    def append(
        self,
        partition: int,
        records: list[tuple[bytes | None, bytes | None]],
        producer: tuple[int, int] | None = None,
    ) -> tuple[int, bool]:
        if self.refuse is not None:
            raise StorageError(self.refuse, "refused by the test")
        if self.most_records is not None and len(records) > self.most_records:
            raise StorageError(ErrorCode.MESSAGE_TOO_LARGE, "too large for the test")
        self._heal(partition)
        self.batches.append(len(records))
        base = len(self.records[partition])
        self.records[partition] += records
        return base, False

    def when_durable(self, partition: int, end_offset: int, on_outcome: Outcome) -> None:
        async def wait() -> None:
            await self.gate.wait()
            self._end(partition, end_offset, on_outcome)

        if self.gate.is_set():
            self._end(partition, end_offset, on_outcome)
        else:
            self._waiting.append(asyncio.ensure_future(wait()))

    def _end(self, partition: int, end_offset: int, on_outcome: Outcome) -> None:
        if self.fail_sync:
            self.failed_syncs += 1
            self._offline.add(partition)
            on_outcome(_broken())
        else:
            self.durable[partition] = max(self.durable[partition], end_offset)
            on_outcome(None)

    def _heal(self, partition: int) -> None:
        if partition in self._offline:
            if self.fail_sync:
                raise _broken()
            self._offline.remove(partition)
            del self.records[partition][self.durable[partition] :]

    def read(self, partition: int) -> Iterator[tuple[BatchHeader, list[Record]]]:
        self._heal(partition)
        for offset, (key, value) in enumerate(self.records[partition]):
            yield _HEADER, [Record(offset, 0, key, value)]

    def crash(self) -> None:
        """What was not durable is gone."""
        for partition, end in enumerate(self.durable):
            del self.records[partition][end:]

    def history(self, transactional_id: str) -> list[Transaction | None]:
        """The durable records of an id, in order."""
        partition = self.partition_for(transactional_id)
        return [
            decode_value(value) if value is not None else None
            for key, value in self.records[partition][: self.durable[partition]]
            if key is not None and decode_key(key) == transactional_id
        ]


def _broken() -> StorageError:
    return StorageError(ErrorCode.KAFKA_STORAGE_ERROR, "the disk of the test is broken")


class StandInBroker:
    """What the coordinator asks of a broker. Lives on over restarts of the coordinator, as a disk does."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.log = MemoryTopic()
        self.settings: dict[str, int] = {
            "transaction.max.timeout.ms": 900_000,
            "transactional.id.expiration.ms": 7 * 86_400_000,
            "transaction.abort.timed.out.transaction.cleanup.interval.ms": 10_000,
            "transaction.remove.expired.transaction.cleanup.interval.ms": 3_600_000,
            "transaction.version": 2,
        }
        self.next_producer_id = 0
        self.markers: list[tuple[TopicPartition, int, int, bool]] = []
        self.marker_gate = asyncio.Event()
        self.marker_gate.set()
        self.marker_codes: dict[TopicPartition, ErrorCode] = {}

    def reserve_producer_ids(self, count: int) -> range:
        first, self.next_producer_id = self.next_producer_id, self.next_producer_id + count
        return range(first, first + count)

    async def write_markers(
        self,
        partitions: Collection[TopicPartition],
        producer_id: int,
        producer_epoch: int,
        coordinator_epoch: int,
        commit: bool,
        transaction_version: int = 1,
    ) -> dict[TopicPartition, ErrorCode]:
        await self.marker_gate.wait()
        assert coordinator_epoch == 3
        self.markers += [(partition, producer_id, producer_epoch, commit) for partition in partitions]
        return {partition: self.marker_codes.get(partition, ErrorCode.NONE) for partition in partitions}

    def coordinator(self) -> TransactionCoordinator:
        return TransactionCoordinator(
            self.settings,  # type: ignore[arg-type]
            self.clock,
            self.log,  # type: ignore[arg-type]
            self.reserve_producer_ids,
            lambda *marker: self.write_markers(*marker),
        )


async def idle(coordinator: TransactionCoordinator) -> None:
    """Waits until no id is busy with a transition."""
    for entry in coordinator.ids.active():
        if entry.is_pending:
            await asyncio.wait_for(asyncio.shield(entry.settled()), PATIENCE_S)
