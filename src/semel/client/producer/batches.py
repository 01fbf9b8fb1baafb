"""A record batch on its way to a broker. No I/O.

A batch is encoded once. The producer's id, epoch and sequence are stamped into its header just before it is first
sent; every retry carries the same stamp, so the broker can tell a retry from new data.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from semel.client.errors import ConfigError, KafkaError, RecordTooLargeError, SerializationError, error_of
from semel.client.serde import InContext, checked
from semel.client.types import timestamp_ms
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


RefusedRecords = dict[int, str | None]  # by their number in a batch, with the broker's messages


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
    refused: RefusedRecords | None = None  # if the broker refused it
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

    def error_of(self, index: int) -> KafkaError | None:
        """Of one record: one that the broker names has an error of its own, the others failed with it."""
        why = (self.refused or {}).get(index)
        if self.error is None or self.error.code is None or why is None:
            return self.error
        return error_of(self.error.code, f"writing a record to {self.topic}-{self.partition}", why)

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


# --- What a program gives to `send`, as a row: serialized, checked, with its size. No I/O ---


Bytes = bytes | bytearray | memoryview | str
Serializer = Callable[[Any], Bytes] | InContext
Headers = Iterable[tuple[str, Bytes | None]] | Mapping[str, Bytes | None]


class RecordPacker:
    """Makes rows for one producer, with its serializers and its limit of size."""

    def __init__(self, key_serializer: Any, value_serializer: Any, max_request_size: int) -> None:
        of_key, of_value = checked(key_serializer=key_serializer, value_serializer=value_serializer)
        self._serializers: tuple[Serializer | None, Serializer | None] = of_key, of_value
        self._serializes = key_serializer is not None or value_serializer is not None
        self._in_context = isinstance(of_key, InContext) or isinstance(of_value, InContext)
        self._max_bytes = max_request_size
        # Of key and value: bytes of fewer need no check and no change. None of them if there are serializers.
        self.small_bytes = 0 if self._serializes else max_request_size - RECORD_OVERHEAD_BYTES - HEADER_SIZE

    def pack(
        self, topic: str, value: Any, key: Any, timestamp: int | datetime | None, headers: Headers | None, now_s: float
    ) -> tuple[Row, int]:
        """The row, and how many bytes it takes at most."""
        if self._serializes:
            of_key, of_value = self._serializers
            given = key
            headers = _as_pairs(headers) if self._in_context else headers  # to which serializers may add
            key = _serialized(key, of_key, "key", topic, headers, given)
            value = _serialized(value, of_value, "value", topic, headers, given)
        value = value if type(value) is bytes or value is None else _as_bytes(value, "value")
        key = key if type(key) is bytes or key is None else _as_bytes(key, "key")
        packed = () if headers is None else _as_headers(headers)
        size = RECORD_OVERHEAD_BYTES + (len(value) if value else 0) + (len(key) if key else 0)
        if packed:
            size += sum(10 + 3 * len(name) + len(data or b"") for name, data in packed)
        if size + HEADER_SIZE > self._max_bytes:
            raise _too_large(size + HEADER_SIZE, self._max_bytes)
        return (key, value, int(now_s * 1000) if timestamp is None else timestamp_ms(timestamp), packed), size


def _serialized(data: Any, serializer: Serializer | None, part: str, topic: str, headers: Any, key: Any) -> Any:
    """A key or value through its serializer; `key` is the record's, as it was given."""
    if serializer is None or data is None:
        return data
    try:
        made = serializer(data, topic, headers) if isinstance(serializer, InContext) else serializer(data)
        if made is None:
            raise ValueError("it became None, which would be a tombstone; send None for that")
        return made
    except Exception as error:
        raise SerializationError(
            f"a record for {topic!r} with the key {key!r:.200}: the {part} cannot be serialized: "
            f"{type(error).__name__}: {error}; nothing of it was sent",
            None,
            topic,
            key,
        ) from error


def _as_bytes(data: Any, what: str) -> bytes:
    if isinstance(data, str):
        return data.encode()
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data)
    raise ConfigError(f"a record's {what} is bytes, text or None, not {type(data).__name__}; encode it first")


def _as_pairs(headers: Headers | None) -> list[tuple[str, Bytes | None]]:
    return list(headers.items() if isinstance(headers, Mapping) else headers or ())


def _as_headers(headers: Headers) -> tuple[tuple[str, bytes | None], ...]:
    packed = []
    for name, value in _as_pairs(headers):
        if not isinstance(name, str) or not _is_utf8(name):
            raise ConfigError(f"a header's name is text that can be written as UTF-8, not {name!r}")
        packed.append((name, None if value is None else _as_bytes(value, f"header {name!r}")))
    return tuple(packed)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _too_large(size_bytes: int, limit_bytes: int) -> RecordTooLargeError:
    return RecordTooLargeError(
        f"the record takes about {size_bytes} bytes; max.request.size is {limit_bytes}: raise it (and the topic's "
        "max.message.bytes), or write smaller records"
    )
