"""What compaction keeps: the latest record of every key, what was not aborted, the markers that are still needed."""

from __future__ import annotations

import hashlib
import heapq
import logging
from collections.abc import Iterable
from typing import NamedTuple

from semel.protocol.batch import (
    CONTROL_BIT,
    NO_TIMESTAMP,
    TIMESTAMP_TYPE_BIT,
    TRANSACTIONAL_BIT,
    BatchHeader,
)
from semel.protocol.errors import DecodeError
from semel.storage.record_scan import FoundRecord, scan_batch
from semel.storage.segment import Segment
from semel.storage.txnindex import AbortedTransaction

_log = logging.getLogger("semel.storage")

_SHORT_KEY_BYTES = 24  # longer keys are kept as a digest, which is longer than this: the two never meet


def short_key(key: bytes) -> bytes:
    return key if len(key) <= _SHORT_KEY_BYTES else hashlib.blake2b(key, digest_size=32).digest()


def bytes_of(segment: Segment, position: int, header: BatchHeader) -> bytes:
    return segment.files.read_at(segment.fd, header.size, position)


def marker_of(segment: Segment, position: int, header: BatchHeader) -> bool | None:
    """True for a commit, False for an abort, None for a control batch that holds no marker (any more)."""
    from semel.protocol.rows import MarkerType, decode_batch, decode_marker

    records = decode_batch(bytes_of(segment, position, header)).records
    marker = decode_marker(records[0]) if records else None
    return None if marker is None else marker.type is MarkerType.COMMIT


def records_of(segment: Segment, position: int, header: BatchHeader) -> list[FoundRecord]:
    """The records of a batch; none if they can't be read."""
    try:
        return scan_batch(bytes_of(segment, position, header), header)[1]
    except DecodeError:
        return []


class Transactions:
    """Which batches belong to aborted transactions, and which markers nobody needs any more.

    A pass may start behind the marker of an abort, or find it compacted away: an abort counts only for batches between
    its first offset and its marker, whether the marker is met or not.
    """

    def __init__(self, aborted: Iterable[AbortedTransaction]) -> None:
        self._coming = [(entry.first_offset, entry) for entry in aborted]
        heapq.heapify(self._coming)
        self._aborted: dict[int, AbortedTransaction] = {}
        self._seen: set[int] = set()  # producers of aborted transactions of which data was met
        self._committed: set[int] = set()

    def is_aborted_data(self, header: BatchHeader) -> bool:
        aborted = self._aborted_at(header)
        if not header.is_transactional:
            return False
        if aborted is not None:
            self._seen.add(header.producer_id)
            return True
        self._committed.add(header.producer_id)
        return False

    def end(self, header: BatchHeader, commit: bool | None) -> tuple[bool, AbortedTransaction | None]:
        """For a control batch: whether its marker is not needed, and the abort that has to stay in the index."""
        aborted = self._aborted_at(header)
        producer_id = header.producer_id
        if commit is None:
            return True, None
        if commit:
            needed = producer_id in self._committed
            self._committed.discard(producer_id)
            return not needed, None
        self._aborted.pop(producer_id, None)
        needed = producer_id in self._seen
        self._seen.discard(producer_id)
        return not needed, aborted if needed else None

    def _aborted_at(self, header: BatchHeader) -> AbortedTransaction | None:
        """The abort of the batch's producer that the batch lies in."""
        while self._coming and self._coming[0][0] <= header.last_offset:
            _, entry = heapq.heappop(self._coming)
            self._aborted[entry.producer_id] = entry
        found = self._aborted.get(header.producer_id)
        return found if found is not None and header.base_offset <= found.last_offset else None


class KeepingRules(NamedTuple):
    """What a pass of compaction knows before it starts."""

    keys: dict[bytes, int]  # key -> latest offset
    mapped_end: int  # what is at or after this offset stays as it is
    last_of_producers: dict[int, tuple[int, int]]  # producer id -> (last data offset or -1, epoch)
    now_ms: int
    delete_retention_ms: int

    def keeps(self, record: FoundRecord, horizon_ms: int | None) -> bool:
        """The latest of its key; a tombstone only until its horizon."""
        if record.offset >= self.mapped_end:
            return True
        if record.key is None or record.offset < self.keys.get(short_key(record.key), -1):
            return False
        return record.has_value or horizon_ms is None or self.now_ms < horizon_ms

    def is_last_of_producer(self, header: BatchHeader) -> bool:
        """Whether a producer's sequence, or its epoch, is known by this batch alone."""
        last = self.last_of_producers.get(header.producer_id) if header.has_producer_id else None
        if last is None:
            return False
        last_data_offset, epoch = last
        if last_data_offset >= 0:
            return header.last_offset == last_data_offset
        return header.is_control and header.producer_epoch == epoch


class Keeper:
    """Decides batch by batch, then record by record, what goes into the replacement."""

    def __init__(
        self, rules: KeepingRules, transactions: Transactions, target: Segment, index_interval_bytes: int
    ) -> None:
        self._rules = rules
        self._transactions = transactions
        self._target = target
        self._index_interval_bytes = index_interval_bytes

    def pass_on(self, segment: Segment, position: int, header: BatchHeader, is_last: bool) -> None:
        """`is_last`: of the stretch that is replaced; its offsets must stay known even if nothing else does."""
        horizon_ms = header.base_timestamp if header.has_delete_horizon else None
        keep_empty = is_last or self._rules.is_last_of_producer(header)
        if header.is_control:
            self._pass_on_marker(segment, position, header, horizon_ms, keep_empty)
        elif self._transactions.is_aborted_data(header):
            if keep_empty:
                self._write(empty_batch(header), header, NO_TIMESTAMP)
        else:
            self._filter(bytes_of(segment, position, header), header, horizon_ms, keep_empty)

    def _pass_on_marker(
        self, segment: Segment, position: int, header: BatchHeader, horizon_ms: int | None, keep_empty: bool
    ) -> None:
        """A marker that nobody needs any more gets a horizon first, and goes when that has passed."""
        commit = marker_of(segment, position, header)
        unneeded, aborted = self._transactions.end(header, commit)
        if aborted is not None:
            self._target.txn_index.append(aborted)
        expired = horizon_ms is not None and horizon_ms <= self._rules.now_ms
        if unneeded and (commit is None or expired):
            if keep_empty:
                self._write(empty_batch(header), header, NO_TIMESTAMP)
        elif unneeded and horizon_ms is None:
            self._write_with_horizon(bytes_of(segment, position, header), header)
        else:
            self._write(bytes_of(segment, position, header), header, header.max_timestamp)

    def _filter(self, data: bytes, header: BatchHeader, horizon_ms: int | None, keep_empty: bool) -> None:
        try:
            body, records = scan_batch(data, header)
        except DecodeError as error:  # taken while the topic was not compacted; nobody else's business
            _log.warning("a batch at offset %d is kept as it is, it can't be read: %s", header.base_offset, error)
            self._write(data, header, header.max_timestamp)
            return
        kept = [record for record in records if self._rules.keeps(record, horizon_ms)]
        if not kept:
            if keep_empty:
                self._write(empty_batch(header), header, NO_TIMESTAMP)
        elif horizon_ms is None and not all(record.has_value for record in kept):
            offsets = {record.offset for record in kept}
            self._write_with_horizon(data, header, offsets)
        elif len(kept) == len(records):
            self._write(data, header, header.max_timestamp)
        else:
            smaller = smaller_batch(header, kept, b"".join(body[record.start : record.end] for record in kept))
            self._write(smaller, header, max_timestamp_of(header, kept))

    def _write_with_horizon(self, data: bytes, header: BatchHeader, offsets: set[int] | None = None) -> None:
        """From now on the batch says until when its tombstones, or its marker, have to stay."""
        from semel.protocol.rows import TimestampType, decode_batch, encode_batch

        records = [record for record in decode_batch(data).records if offsets is None or record.offset in offsets]
        batch = encode_batch(
            records,
            base_offset=header.base_offset,
            last_offset=header.last_offset,
            base_timestamp=self._rules.now_ms + self._rules.delete_retention_ms,
            timestamp_type=TimestampType.LOG_APPEND_TIME if header.is_log_append_time else TimestampType.CREATE_TIME,
            producer_id=header.producer_id,
            producer_epoch=header.producer_epoch,
            base_sequence=header.base_sequence,
            leader_epoch=header.leader_epoch,
            transactional=header.is_transactional,
            control=header.is_control,
            delete_horizon=True,
            compression=header.compression,
        )
        self._write(batch, header, max(record.timestamp for record in records))

    def _write(self, batch: bytes | bytearray, header: BatchHeader, max_timestamp_ms: int) -> None:
        self._target.write(batch)
        self._target.note_batch(header.last_offset, max_timestamp_ms, len(batch), self._index_interval_bytes)


def max_timestamp_of(header: BatchHeader, kept: list[FoundRecord]) -> int:
    if header.is_log_append_time:
        return header.max_timestamp
    return header.base_timestamp + max(record.timestamp_delta for record in kept)


def smaller_batch(header: BatchHeader, kept: list[FoundRecord], body: bytes) -> bytearray:
    """The same batch with fewer records: their bytes stay, as offsets and times count from the same base."""
    from semel.protocol.rows import seal_batch

    start = (header.base_offset, 0, header.leader_epoch, header.magic, 0, header.attributes)
    fields = (*start, header.last_offset_delta, header.base_timestamp)
    producer = (header.producer_id, header.producer_epoch, header.base_sequence, len(kept))
    return seal_batch(fields, max_timestamp_of(header, kept), producer, body, header.compression)


def empty_batch(header: BatchHeader) -> bytearray:
    """A batch without records that still says who wrote it, with which sequence, over which offsets."""
    from semel.protocol.rows import seal_batch

    attributes = header.attributes & (TRANSACTIONAL_BIT | CONTROL_BIT | TIMESTAMP_TYPE_BIT)
    start = (header.base_offset, 0, header.leader_epoch, header.magic, 0, attributes)
    fields = (*start, header.last_offset_delta, NO_TIMESTAMP)
    producer = (header.producer_id, header.producer_epoch, header.base_sequence, 0)
    return seal_batch(fields, header.max_timestamp, producer, b"")
