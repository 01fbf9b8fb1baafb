"""The producers of a partition, and the rules by which a batch is appended, recognised as a duplicate or refused.

Pure: no files, no clock. Every rule is checked before anything changes; `apply_*` runs only after the batch is written.

The order of the rules for a client's batch is Kafka's:
  1. same epoch and the (first, last) sequence of one of the last 5 batches: a retry; the result has the first offset
  2. transactional, without an open transaction and without a verified guard: INVALID_TXN_STATE
  3. epoch below the current one: INVALID_PRODUCER_EPOCH
  4. a new epoch starts at sequence 0; an unknown producer may start anywhere (at 0 if it speaks TV2)
  5. same epoch: the next sequence, which is 0 after 2^31-1: else OUT_OF_ORDER_SEQUENCE_NUMBER
  6. not transactional while its transaction is open: INVALID_TXN_STATE
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from semel.protocol.batch import NO_PRODUCER_EPOCH, NO_SEQUENCE, NO_TIMESTAMP, next_sequence
from semel.protocol.crc import crc32c
from semel.protocol.errors import ErrorCode
from semel.storage.results import StorageError

BATCHES_REMEMBERED = 5
EPOCH_MAX = 32767
NO_OFFSET = -1
NO_COORDINATOR_EPOCH = -1


class BatchInfo(NamedTuple):
    """A batch that is in the log, as its producer may send it again."""

    first_sequence: int
    last_sequence: int
    base_offset: int
    last_offset: int
    timestamp_ms: int


class DataBatch(NamedTuple):
    """A producer's batch that is to be appended."""

    producer_id: int
    epoch: int
    first_sequence: int
    last_sequence: int
    transactional: bool
    timestamp_ms: int


class MarkerBatch(NamedTuple):
    """The end of a producer's transaction."""

    producer_id: int
    epoch: int
    coordinator_epoch: int
    committed: bool
    timestamp_ms: int


@dataclass(slots=True, eq=False)
class ProducerEntry:
    """One producer's state in one partition."""

    producer_id: int
    epoch: int = NO_PRODUCER_EPOCH
    coordinator_epoch: int = NO_COORDINATOR_EPOCH
    last_timestamp_ms: int = NO_TIMESTAMP
    last_append_ms: int = 0  # by the broker's clock: expiry must not depend on what clients write as time
    txn_first_offset: int = NO_OFFSET
    batches: list[BatchInfo] = field(default_factory=list)  # oldest first, at most 5
    history_cut: bool = False  # restored from a snapshot, which keeps only the last batch

    @property
    def last_sequence(self) -> int:
        return self.batches[-1].last_sequence if self.batches else NO_SEQUENCE

    @property
    def last_offset(self) -> int:
        return self.batches[-1].last_offset if self.batches else NO_OFFSET

    def take_epoch(self, epoch: int) -> None:
        """An epoch change, by data or by a marker, clears the history: sequences start at 0 again."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.batches = []
            self.history_cut = False

    def find(self, epoch: int, first_sequence: int, last_sequence: int) -> BatchInfo | None:
        if epoch == self.epoch:
            for batch in self.batches:
                if batch.first_sequence == first_sequence and batch.last_sequence == last_sequence:
                    return batch
        return None


@dataclass(slots=True, eq=False)
class Verification:
    """A transaction that its coordinator has to confirm. The object itself is the guard of the append."""

    epoch: int
    lowest_sequence: int
    supports_epoch_bump: bool
    created_ms: int

    def add(self, epoch: int, sequence: int) -> None:
        """A later batch must not overtake an earlier one that still waits for its verification."""
        if epoch > self.epoch or (epoch == self.epoch and sequence < self.lowest_sequence):
            self.epoch = epoch
            self.lowest_sequence = sequence


class CompletedTransaction(NamedTuple):
    producer_id: int
    first_offset: int
    marker_offset: int
    last_stable_offset: int  # what the LSO may become, once the marker is durable
    committed: bool


class ProducerStates:
    """The producers of one partition and their open transactions."""

    __slots__ = ("_undurable", "open_transactions", "producers", "verifications")

    def __init__(self) -> None:
        self.producers: dict[int, ProducerEntry] = {}
        self.open_transactions: dict[int, int] = {}  # first offset -> producer id, in the order of offsets
        self.verifications: dict[int, Verification] = {}
        self._undurable: dict[int, int] = {}  # first offset -> marker offset: decided, but not durable yet

    # Data

    def check_client_batch(self, batch: DataBatch, guard: object | None) -> BatchInfo | None:
        """The batch's place in the log if it is a retry, None if it may be appended; raises if it is refused."""
        entry = self.producers.get(batch.producer_id)
        if entry is not None:
            duplicate = entry.find(batch.epoch, batch.first_sequence, batch.last_sequence)
            if duplicate is not None:
                return duplicate
        self._check_transaction(entry, batch, guard)
        _check_epoch(entry, batch.producer_id, batch.epoch)
        self._check_sequence(entry, batch)
        _check_not_mixed(entry, batch)
        return None

    def check_coordinator_batch(self, batch: DataBatch, guard: object | None) -> None:
        """A batch of the broker's own coordinators carries no sequence: only transaction and epoch are checked."""
        entry = self.producers.get(batch.producer_id)
        self._check_transaction(entry, batch, guard)
        _check_epoch(entry, batch.producer_id, batch.epoch)
        _check_not_mixed(entry, batch)

    def apply_data(self, batch: DataBatch, base_offset: int, last_offset: int, now_ms: int) -> None:
        entry = self.producers.get(batch.producer_id)
        if entry is None:
            entry = self.producers[batch.producer_id] = ProducerEntry(batch.producer_id)
        entry.take_epoch(batch.epoch)
        entry.batches.append(
            BatchInfo(batch.first_sequence, batch.last_sequence, base_offset, last_offset, batch.timestamp_ms)
        )
        if len(entry.batches) > BATCHES_REMEMBERED:
            del entry.batches[0]
        entry.last_timestamp_ms = batch.timestamp_ms
        entry.last_append_ms = now_ms
        if batch.transactional:
            self.verifications.pop(batch.producer_id, None)
            if entry.txn_first_offset == NO_OFFSET:
                entry.txn_first_offset = base_offset
                self.open_transactions[base_offset] = batch.producer_id

    def _check_transaction(self, entry: ProducerEntry | None, batch: DataBatch, guard: object | None) -> None:
        if not batch.transactional:
            return
        if entry is not None and entry.txn_first_offset != NO_OFFSET and batch.epoch <= entry.epoch:
            return  # a newer epoch is a new owner and needs a guard of its own; an older one is refused below
        if guard is None or self.verifications.get(batch.producer_id) is not guard:
            raise StorageError(
                ErrorCode.INVALID_TXN_STATE,
                f"producer {batch.producer_id} (epoch {batch.epoch}) wrote a transactional batch, but has no open "
                "transaction here and none was verified; add the partition to the transaction first",
            )

    def _check_sequence(self, entry: ProducerEntry | None, batch: DataBatch) -> None:
        sequence = batch.first_sequence
        verification = self.verifications.get(batch.producer_id)
        if verification is not None:
            if verification.supports_epoch_bump and sequence != 0 and (entry is None or not entry.batches):
                raise _out_of_order(batch, "0, as nothing of this producer is known here")
            if verification.epoch == batch.epoch and sequence > verification.lowest_sequence:
                raise _out_of_order(batch, f"{verification.lowest_sequence}, which still waits for its verification")
        if entry is None or entry.epoch == NO_PRODUCER_EPOCH:
            return
        if batch.epoch != entry.epoch:
            if sequence != 0:
                raise _out_of_order(batch, f"0, as epoch {batch.epoch} is new (was {entry.epoch})")
        else:
            expected = next_sequence(entry.last_sequence) if entry.batches else 0
            if sequence != expected:
                raise _out_of_order(batch, str(expected))

    # Markers

    def check_marker(self, marker: MarkerBatch, transaction_version: int) -> None:
        """TV2 markers carry the next epoch, so an equal one is stale, unless it repeats a marker that is here."""
        producer_id, epoch = marker.producer_id, marker.epoch
        entry = self.producers.get(producer_id)
        if entry is None:
            return
        stale = epoch <= entry.epoch if transaction_version >= 2 else epoch < entry.epoch
        repeated = epoch == entry.epoch and (entry.txn_first_offset == NO_OFFSET or epoch == EPOCH_MAX)
        if stale and not (transaction_version >= 2 and repeated):
            raise StorageError(
                ErrorCode.INVALID_PRODUCER_EPOCH,
                f"marker for producer {producer_id} has epoch {epoch}, but epoch {entry.epoch} was seen already",
            )
        if marker.coordinator_epoch < entry.coordinator_epoch:
            raise StorageError(
                ErrorCode.TRANSACTION_COORDINATOR_FENCED,
                f"marker for producer {producer_id} comes from coordinator epoch {marker.coordinator_epoch}, "
                f"but epoch {entry.coordinator_epoch} was seen already",
            )

    def apply_marker(self, marker: MarkerBatch, offset: int) -> CompletedTransaction | None:
        """Ends the producer's transaction. None if it had none here: such a marker moves nothing but the epoch."""
        completed = self.completion(marker, offset)
        entry = self.producers.get(marker.producer_id)
        if entry is None:
            entry = self.producers[marker.producer_id] = ProducerEntry(marker.producer_id)
        entry.take_epoch(marker.epoch)
        entry.coordinator_epoch = marker.coordinator_epoch
        entry.last_timestamp_ms = marker.timestamp_ms
        entry.last_append_ms = max(entry.last_append_ms, marker.timestamp_ms)
        entry.txn_first_offset = NO_OFFSET
        self.verifications.pop(marker.producer_id, None)
        if completed is not None:
            del self.open_transactions[completed.first_offset]
            self._undurable[completed.first_offset] = offset
        return completed

    def completion(self, marker: MarkerBatch, offset: int) -> CompletedTransaction | None:
        """What a marker at `offset` would end. Changes nothing."""
        entry = self.producers.get(marker.producer_id)
        if entry is None or entry.txn_first_offset == NO_OFFSET:
            return None
        first = entry.txn_first_offset
        stable = self._stable_after(first, offset)
        return CompletedTransaction(marker.producer_id, first, offset, stable, marker.committed)

    def _stable_after(self, first_offset: int, marker_offset: int) -> int:
        """The last stable offset without the transaction that begins at `first_offset`."""
        for other in self.open_transactions:
            if other != first_offset:
                return other
        return marker_offset + 1

    # What readers may see

    def first_unstable_offset(self) -> int | None:
        """The lowest offset of a transaction that is open, or whose marker is not durable yet."""
        first_open = next(iter(self.open_transactions), None)
        if not self._undurable:
            return first_open
        first_undurable = min(self._undurable)
        return first_undurable if first_open is None else min(first_open, first_undurable)

    def settle(self, high_watermark: int) -> None:
        """Markers below the high watermark are durable."""
        if self._undurable:
            self._undurable = {first: last for first, last in self._undurable.items() if last >= high_watermark}

    # Verification and expiry

    def start_verification(
        self, producer_id: int, epoch: int, sequence: int, *, supports_epoch_bump: bool, now_ms: int
    ) -> Verification | None:
        _check_epoch(self.producers.get(producer_id), producer_id, epoch)
        if self.has_open_transaction(producer_id, epoch):  # one of an older epoch has another owner
            return None
        verification = self.verifications.get(producer_id)
        if verification is None:
            verification = Verification(epoch, sequence, supports_epoch_bump, now_ms)
            self.verifications[producer_id] = verification
        else:
            verification.add(epoch, sequence)
        return verification

    def has_open_transaction(self, producer_id: int, epoch: int | None = None) -> bool:
        entry = self.producers.get(producer_id)
        return entry is not None and entry.txn_first_offset != NO_OFFSET and epoch in (None, entry.epoch)

    def transaction_start(self, producer_id: int, epoch: int) -> int | None:
        """The first offset of the producer's open transaction."""
        return self.producers[producer_id].txn_first_offset if self.has_open_transaction(producer_id, epoch) else None

    def expire(self, now_ms: int, expiration_ms: int) -> int:
        """Forgets producers that were idle for long, never one with an open transaction."""
        idle = [
            entry.producer_id
            for entry in self.producers.values()
            if entry.txn_first_offset == NO_OFFSET and now_ms - entry.last_append_ms >= expiration_ms
        ]
        for producer_id in idle:
            del self.producers[producer_id]
        stale = [pid for pid, pending in self.verifications.items() if now_ms - pending.created_ms >= expiration_ms]
        for producer_id in stale:
            del self.verifications[producer_id]
        return len(idle)

    def restore(self, entry: ProducerEntry) -> None:
        """Takes an entry of a snapshot. Call it in the order of first offsets of open transactions."""
        self.producers[entry.producer_id] = entry
        if entry.txn_first_offset != NO_OFFSET:
            self.open_transactions[entry.txn_first_offset] = entry.producer_id


def _check_epoch(entry: ProducerEntry | None, producer_id: int, epoch: int) -> None:
    if entry is not None and epoch < entry.epoch:
        raise StorageError(
            ErrorCode.INVALID_PRODUCER_EPOCH,
            f"producer {producer_id} wrote with epoch {epoch}, but epoch {entry.epoch} was seen already; "
            "a newer instance took over",
        )


def _check_not_mixed(entry: ProducerEntry | None, batch: DataBatch) -> None:
    if entry is not None and entry.txn_first_offset != NO_OFFSET and not batch.transactional:
        raise StorageError(
            ErrorCode.INVALID_TXN_STATE,
            f"producer {batch.producer_id} wrote a plain batch while its transaction, "
            f"which began at offset {entry.txn_first_offset}, is open",
        )


def _out_of_order(batch: DataBatch, expected: str) -> StorageError:
    return StorageError(
        ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
        f"producer {batch.producer_id} (epoch {batch.epoch}) sent sequence {batch.first_sequence}, expected {expected}",
    )


# Snapshots: `<offset>.snapshot` holds the producers as they were at an offset. Layout: int16 version, uint32 CRC-32C of
# what follows, int32 count, then 46 bytes per producer.

SNAPSHOT_VERSION = 1
_SNAPSHOT_PREFIX = struct.Struct(">hI")
_SNAPSHOT_COUNT = struct.Struct(">i")
_SNAPSHOT_ENTRY = struct.Struct(">qhiqiqiq")


class CorruptSnapshotError(Exception):
    """A snapshot that is torn, or not one."""


def encode_snapshot(entries: Iterable[ProducerEntry]) -> bytes:
    rows = [_encode_entry(entry) for entry in entries]
    body = _SNAPSHOT_COUNT.pack(len(rows)) + b"".join(rows)
    return _SNAPSHOT_PREFIX.pack(SNAPSHOT_VERSION, crc32c(body)) + body


def decode_snapshot(data: bytes, now_ms: int) -> list[ProducerEntry]:
    """The entries, ordered by the first offset of their open transaction. Raises unless every byte is as expected."""
    if len(data) < _SNAPSHOT_PREFIX.size + _SNAPSHOT_COUNT.size:
        raise CorruptSnapshotError(f"{len(data)} bytes are too few for a snapshot")
    version, crc = _SNAPSHOT_PREFIX.unpack_from(data)
    body = memoryview(data)[_SNAPSHOT_PREFIX.size :]
    if version != SNAPSHOT_VERSION:
        raise CorruptSnapshotError(f"version is {version}, expected {SNAPSHOT_VERSION}")
    if crc32c(body) != crc:
        raise CorruptSnapshotError(f"CRC is {crc32c(body):#010x}, the file says {crc:#010x}")
    (count,) = _SNAPSHOT_COUNT.unpack_from(body)
    rows = body[_SNAPSHOT_COUNT.size :]
    if count < 0 or len(rows) != count * _SNAPSHOT_ENTRY.size:
        raise CorruptSnapshotError(f"{count} entries do not fit {len(rows)} bytes")
    entries = [_decode_entry(fields, now_ms) for fields in _SNAPSHOT_ENTRY.iter_unpack(rows)]
    return sorted(entries, key=lambda entry: entry.txn_first_offset)


def _encode_entry(entry: ProducerEntry) -> bytes:
    last = entry.batches[-1] if entry.batches else BatchInfo(-1, -1, NO_OFFSET, NO_OFFSET, -1)
    return _SNAPSHOT_ENTRY.pack(
        entry.producer_id,
        entry.epoch,
        last.last_sequence,
        last.last_offset,
        last.last_offset - last.base_offset,
        entry.last_timestamp_ms,
        entry.coordinator_epoch,
        entry.txn_first_offset,
    )


def _decode_entry(fields: tuple[int, ...], now_ms: int) -> ProducerEntry:
    producer_id, epoch, last_sequence, last_offset, delta, timestamp_ms, coordinator_epoch, txn_first_offset = fields
    txn_first_offset = max(txn_first_offset, NO_OFFSET)
    entry = ProducerEntry(producer_id, epoch, coordinator_epoch, timestamp_ms, now_ms, txn_first_offset)
    if last_offset >= 0:
        first_sequence = (last_sequence - delta) & 0x7FFFFFFF if last_sequence >= 0 else last_sequence
        entry.batches = [BatchInfo(first_sequence, last_sequence, last_offset - delta, last_offset, timestamp_ms)]
        entry.history_cut = True
    return entry
