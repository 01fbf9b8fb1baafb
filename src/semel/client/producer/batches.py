"""A record batch on its way to a broker. No I/O.

A batch is encoded once. The producer's id, epoch and sequence are stamped into its header just before it is first
sent; every retry carries the same stamp, so the broker can tell a retry from new data.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from semel.client.errors import KafkaError
from semel.protocol.batch import HEADER_SIZE, NO_TIMESTAMP, TRANSACTIONAL_BIT, next_sequence, read_header, seal_crc
from semel.protocol.rows import Record, encode_batch

if TYPE_CHECKING:
    from semel.client.producer.tables import TablePart

Place = tuple[str, int]  # topic, partition
Row = tuple[bytes | None, bytes | None, int, tuple[tuple[str, bytes | None], ...]]  # key, value, timestamp, headers

RECORD_OVERHEAD_BYTES = 24  # at most this much beside key, value and headers, for timestamps within 24 days
FEW_ROWS = 100  # up to this many rows, plain Python takes less time than the column codec
_ATTRIBUTES_AT, _PRODUCER_AT = 21, 43
_ATTRIBUTES, _PRODUCER = struct.Struct(">h"), struct.Struct(">qhi")


class Identity(NamedTuple):
    """The identity of a producer, by which the broker recognises its retries."""

    producer_id: int
    epoch: int


NO_IDENTITY = Identity(-1, -1)


class RecordMetadata(NamedTuple):
    """Where a record was stored. The offset is -1 with acks=0, which has no response."""

    topic: str
    partition: int
    offset: int
    timestamp: int


class BatchMetadata(NamedTuple):
    """Where a run of records was stored: `record_count` records from `base_offset` on."""

    topic: str
    partition: int
    base_offset: int
    record_count: int
    log_append_time: int  # -1 unless the topic stamps records itself


@dataclass(slots=True, eq=False, repr=False)
class ProducerBatch:
    topic: str
    partition: int
    created_s: float
    deadline_s: float
    data: bytearray | memoryview | None = None
    rows: list[Row] | None = None  # until they are encoded
    tables: list[TablePart] | None = None  # instead of rows, until they are encoded
    has_headers: bool = False  # of the rows
    count: int = 0
    size_bytes: int = HEADER_SIZE  # what it takes of buffer.memory
    compression: int = 0
    identity: Identity | None = None  # of the stamp, once there is one
    sequence: int = -1
    sent: bool = False  # a request with it is on its way and has no response yet
    in_doubt: bool = False  # a request with it has no response, and may still arrive
    attempts: int = 0
    done: bool = False
    base_offset: int = -1
    log_append_time: int = NO_TIMESTAMP
    error: KafkaError | None = None
    callbacks: list[Callable[[ProducerBatch], None]] | None = None
    parent: ProducerBatch | None = None  # the batch that this one is a half of
    halves: list[ProducerBatch] | None = None  # if the broker found it too large

    def __repr__(self) -> str:
        return f"Batch({self.topic}-{self.partition}, {self.count} records, sequence {self.sequence}, {self.identity})"

    def encode(self, compression: int) -> None:
        """Turns rows or tables into bytes, once."""
        if self.data is not None:
            return
        self.compression = compression
        if self.rows is not None:
            self.data = encode_rows(self.rows, compression, self.has_headers)
        elif self.tables is not None:
            from semel.client.producer.tables import encode_parts

            self.data = encode_parts(self.tables, compression)

    def stamp(self, identity: Identity, sequence: int, transactional: bool) -> None:
        """Writes id, epoch and sequence into the header. Never called again once a request with them was sent,
        except after the broker has refused the batch for good and the epoch was raised."""
        assert self.data is not None
        self.identity, self.sequence = identity, sequence
        _PRODUCER.pack_into(self.data, _PRODUCER_AT, identity.producer_id, identity.epoch, sequence)
        if transactional:
            (attributes,) = _ATTRIBUTES.unpack_from(self.data, _ATTRIBUTES_AT)
            _ATTRIBUTES.pack_into(self.data, _ATTRIBUTES_AT, attributes | TRANSACTIONAL_BIT)
        seal_crc(self.data)

    @property
    def next_sequence(self) -> int:
        return next_sequence(self.sequence, self.count)

    def finish(self, base_offset: int, log_append_time: int, error: KafkaError | None = None) -> None:
        self.base_offset = base_offset
        self.log_append_time = log_append_time
        self.error = error
        self.done = True
        self.data = None  # the deliveries may be kept for long; the bytes are not needed again
        self.rows = self.tables = None
        parent = self.parent
        if parent is not None and parent.halves is not None and all(half.done for half in parent.halves):
            failed = next((half.error for half in parent.halves if half.error is not None), None)
            parent.finish(parent.halves[0].base_offset, log_append_time, failed)

    def call_when_done(self, callback: Callable[[ProducerBatch], None]) -> None:
        """It is not done yet, and the lock that guards it is held."""
        if self.callbacks is None:
            self.callbacks = []
        self.callbacks.append(callback)

    def finished(self) -> Iterator[ProducerBatch]:
        """This batch and those that it was a part of, as far as they are done."""
        batch: ProducerBatch | None = self
        while batch is not None and batch.done:
            yield batch
            batch = batch.parent

    def part_with(self, index: int) -> tuple[ProducerBatch, int]:
        """The batch that record `index` was sent in, and its number there."""
        if self.halves is None:
            return self, index
        first, second = self.halves
        return first.part_with(index) if index < first.count else second.part_with(index - first.count)

    def parts(self) -> list[ProducerBatch]:
        return [self] if self.halves is None else [part for half in self.halves for part in half.parts()]

    def metadata(self, first: int, count: int) -> Iterator[BatchMetadata]:
        """Where some of its records were stored, a run for each half that they are in."""
        at, end = 0, first + count
        for part in self.parts():
            start, stop = max(first, at), min(end, at + part.count)
            if start < stop:
                base = part.base_offset + start - at if part.base_offset >= 0 else -1
                yield BatchMetadata(part.topic, part.partition, base, stop - start, part.log_append_time)
            at += part.count


def encode_rows(rows: Sequence[Row], compression: int, has_headers: bool) -> bytearray | memoryview:
    """Rows to one batch without a stamp: by columns, unless they are few or have headers."""
    if len(rows) <= FEW_ROWS or has_headers:
        records = [Record(i, row[2], row[0], row[1], row[3]) for i, row in enumerate(rows)]
        return encode_batch(records, compression=compression)
    from semel.client.producer.tables import encode_row_columns

    return encode_row_columns(rows, compression)


def split(batch: ProducerBatch) -> list[ProducerBatch]:
    """Two halves of a batch that the broker found too large; together they hold the same records and sequences."""
    from semel.protocol.rows import decode_batch

    assert batch.data is not None
    assert batch.count > 1
    header = read_header(batch.data)
    records = decode_batch(batch.data).records
    middle = len(records) // 2
    halves = []
    for start, part in ((0, records[:middle]), (middle, records[middle:])):
        half = ProducerBatch(batch.topic, batch.partition, batch.created_s, batch.deadline_s)
        moved = [record._replace(offset=i) for i, record in enumerate(part)]
        half.data = encode_batch(moved, base_timestamp=header.base_timestamp, compression=batch.compression)
        half.count = len(part)
        half.size_bytes = batch.size_bytes * len(part) // batch.count
        half.compression = batch.compression
        if batch.identity is not None:
            sequence = next_sequence(batch.sequence, start) if batch.sequence >= 0 else -1
            half.stamp(batch.identity, sequence, header.is_transactional)
        half.parent = batch
        halves.append(half)
    batch.halves = halves
    halves[1].size_bytes = batch.size_bytes - halves[0].size_bytes
    return halves
