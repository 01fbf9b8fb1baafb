"""A partition's log on disk: the object that the broker appends to and reads from. (API under construction.)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple
from uuid import UUID

from semel.storage.config import LogConfig

Isolation = Literal["high_watermark", "last_stable", "log_end"]


class AppendResult(NamedTuple):
    """Where an append landed. Under fsync=commit it is visible and safe once `high_watermark > last_offset`."""

    base_offset: int
    last_offset: int
    append_time_ms: int  # -1 unless the topic uses LogAppendTime (for a duplicate: as Kafka, the batch's timestamp)
    duplicate: bool  # the batch was already there; offsets are those of the first time
    log_start_offset: int


class ReadResult(NamedTuple):
    """Whole batches, from the one that holds the offset asked for. `records` is empty where nothing may be read yet."""

    records: bytes
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    aborted: list[tuple[int, int]] | None  # (producer id, first offset); only for up_to="last_stable"


class ProducerInfo(NamedTuple):
    """What DescribeProducers tells of a producer."""

    producer_id: int
    epoch: int
    last_sequence: int  # -1 if unknown
    last_timestamp_ms: int
    coordinator_epoch: int  # -1 if there never was a marker
    current_txn_start_offset: int  # -1 outside a transaction


class TimestampOffset(NamedTuple):
    timestamp_ms: int
    offset: int
    leader_epoch: int


class PartitionLog:
    """One partition. All methods are called on one thread (the broker's loop); only fsync happens elsewhere."""

    topic: str
    partition: int
    topic_id: UUID
    config: LogConfig  # may be replaced at any time
    leader_epoch: int  # stamped into every batch; raise it with begin_leader_epoch()
    start_offset: int
    end_offset: int
    high_watermark: int  # end of what readers may see; under fsync=commit what a power cut can't take back
    last_stable_offset: int  # min(high watermark, first offset of the earliest open transaction)
    size_bytes: int
    on_advance: Callable[[PartitionLog], None] | None  # called when the high watermark or the LSO moved: wake fetches

    def append(self, batches: memoryview | bytearray, *, now_ms: int, guard: object | None = None) -> AppendResult:
        """Appends a client's batch (exactly one), patching offset, epoch and LogAppendTime in place.

        Raises StorageError with Kafka's code. A transactional batch needs an open transaction or the guard that
        `start_verification` gave before the coordinator was asked.
        """
        raise NotImplementedError

    def append_records(
        self, batches: memoryview | bytearray, *, now_ms: int, guard: object | None = None
    ) -> AppendResult:
        """Appends batches of the broker itself (coordinators): any number of batches, no sequence check."""
        raise NotImplementedError

    def append_marker(
        self,
        producer_id: int,
        producer_epoch: int,
        coordinator_epoch: int,
        *,
        commit: bool,
        now_ms: int,
        transaction_version: int = 1,
    ) -> AppendResult:
        """Ends a producer's transaction here. INVALID_PRODUCER_EPOCH or TRANSACTION_COORDINATOR_FENCED if too old."""
        raise NotImplementedError

    def read(
        self, offset: int, max_bytes: int, *, up_to: Isolation = "high_watermark", min_one_batch: bool = True
    ) -> ReadResult:
        """Batches from `offset` on. OFFSET_OUT_OF_RANGE before the start or beyond the end of the log."""
        raise NotImplementedError

    def start_verification(
        self, producer_id: int, producer_epoch: int, sequence: int, *, supports_epoch_bump: bool
    ) -> object | None:
        """A guard to hand to `append` once the coordinator confirmed the transaction; None: already open, no need.

        A marker or an append with the guard makes it void, so a late confirmation cannot leave a hanging transaction.
        `supports_epoch_bump`: the producer speaks TV2 (Produce >= 12): its first sequence here must be 0.
        """
        raise NotImplementedError

    def has_open_transaction(self, producer_id: int, producer_epoch: int | None = None) -> bool:
        raise NotImplementedError

    def producer(self, producer_id: int) -> ProducerInfo | None:
        raise NotImplementedError

    def active_producers(self) -> list[ProducerInfo]:
        raise NotImplementedError

    def expire_producers(self, now_ms: int) -> int:
        """Forgets producers idle for producer.id.expiration.ms that have no open transaction. Returns how many."""
        raise NotImplementedError

    def offset_for_time(self, timestamp_ms: int) -> TimestampOffset | None:
        """The first record with this timestamp or a later one (ListOffsets by time); None if there is none."""
        raise NotImplementedError

    def max_timestamp(self) -> TimestampOffset | None:
        """The record with the highest timestamp (ListOffsets -3)."""
        raise NotImplementedError

    def epoch_end_offset(self, leader_epoch: int) -> tuple[int, int]:
        """(epoch, end offset) for OffsetForLeaderEpoch; (-1, -1) if the epoch is unknown."""
        raise NotImplementedError

    def delete_records(self, before_offset: int) -> int:
        """DeleteRecords: raises the log start offset (-1: to the high watermark) and returns the new one."""
        raise NotImplementedError

    def flush(self) -> None:
        """fsyncs everything now, on this thread, and advances the high watermark."""
        raise NotImplementedError

    def close(self) -> None:
        """Clean shutdown of this log: flush, snapshot, file handles closed."""
        raise NotImplementedError
