"""Record batches as rows: the plain codec that reads like the specification. `columns` is the fast one.

A record, after the batch header that `batch` describes; every number is a zigzag varint unless it says otherwise:

    length of what follows
    attributes, one byte, unused
    timestamp - base timestamp of the batch      (64 bits)
    offset - base offset of the batch
    length of the key, -1 for null, and the key
    length of the value, -1 for null, and the value
    number of headers, and for each: length of the name, the name (UTF-8), length of the value or -1, the value

What both codecs accept: offsets rise within a batch and stay within its last offset; lengths below -1 are refused;
the fields fill the record and the records fill the batch. A header's name that is not UTF-8 is read with U+FFFD in
place of what is wrong, as Kafka's clients do. Where the batch carries the broker's time (LogAppendTime), all its
records have the batch's max timestamp.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

from semel.protocol.batch import (
    COMPRESSION_MASK,
    CONTROL_BIT,
    DEFAULT_LIMIT_BYTES,
    DELETE_HORIZON_BIT,
    HEADER,
    HEADER_SIZE,
    LOG_OVERHEAD,
    MAGIC,
    NO_PRODUCER_EPOCH,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    NO_TIMESTAMP,
    TIMESTAMP_TYPE_BIT,
    TRANSACTIONAL_BIT,
    BatchHeader,
    Buffer,
    check_batch,
    check_header_count,
    read_body,
    read_header,
    seal_crc,
)
from semel.protocol.errors import CorruptBatchError, EncodeError
from semel.protocol.varints import read_varint, write_varint

INT32_MAX = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


class TimestampType(IntEnum):
    CREATE_TIME = 0
    LOG_APPEND_TIME = 1


class Record(NamedTuple):
    """One record. Times are milliseconds since 1970."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


class DecodedBatch(NamedTuple):
    header: BatchHeader
    records: list[Record]


# --- encoding
def encode_batch(
    records: Sequence[Record],
    *,
    base_offset: int | None = None,
    last_offset: int | None = None,
    base_timestamp: int | None = None,
    timestamp_type: TimestampType = TimestampType.CREATE_TIME,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = NO_PRODUCER_EPOCH,
    base_sequence: int = NO_SEQUENCE,
    leader_epoch: int = -1,
    transactional: bool = False,
    control: bool = False,
    delete_horizon: bool = False,
    compression: int = 0,
) -> bytearray:
    """One batch. The base offset and timestamp are the first record's unless given; a batch without records needs
    `base_offset`, and `last_offset` where compaction took records away from its end."""
    if not records and base_offset is None:
        raise EncodeError("a batch without records needs a base offset")
    base_offset = records[0].offset if base_offset is None else base_offset
    if base_timestamp is None:
        base_timestamp = records[0].timestamp if records else NO_TIMESTAMP
    if last_offset is None:
        last_offset = records[-1].offset if records else base_offset
    if not 0 <= last_offset - base_offset <= INT32_MAX:
        raise EncodeError(f"a batch cannot reach from offset {base_offset} to {last_offset}")
    body = _encode_records(records, base_offset, last_offset, base_timestamp)
    attributes = (
        (compression & COMPRESSION_MASK)
        | (TIMESTAMP_TYPE_BIT if timestamp_type else 0)
        | (TRANSACTIONAL_BIT if transactional else 0)
        | (CONTROL_BIT if control else 0)
        | (DELETE_HORIZON_BIT if delete_horizon else 0)
    )
    start = (base_offset, 0, leader_epoch, MAGIC, 0, attributes, last_offset - base_offset, base_timestamp)
    max_timestamp = max((record.timestamp for record in records), default=NO_TIMESTAMP)
    header = BatchHeader(*start, max_timestamp, producer_id, producer_epoch, base_sequence, len(records))
    return seal_batch(header, body, compression)


def encode_single(
    timestamp: int,
    key: bytes | None,
    value: bytes | None,
    *,
    offset: int = 0,
    attributes: int = 0,
    leader_epoch: int = -1,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = NO_PRODUCER_EPOCH,
) -> bytearray:
    """A batch of one record, as `encode_batch` makes it, by hand: coordinators write little else."""
    key_size, value_size = _signed(-1 if key is None else len(key)), _signed(-1 if value is None else len(value))
    key, value = key or b"", value or b""
    size = 4 + len(key_size) + len(key) + len(value_size) + len(value)
    fields = (_signed(size), b"\0\0\0", key_size, key, value_size, value, b"\0")  # deltas and attributes; no headers
    length = HEADER_SIZE - LOG_OVERHEAD + len(fields[0]) + size
    numbers = (attributes, 0, timestamp, timestamp, producer_id, producer_epoch, NO_SEQUENCE, 1)
    batch = bytearray().join((HEADER.pack(offset, length, leader_epoch, MAGIC, 0, *numbers), *fields))
    seal_crc(batch)
    return batch


def _signed(value: int) -> bytes:
    """A varint; those of short keys and values are at hand."""
    if value < len(_SMALL) - 1:
        return _SMALL[value]
    out = bytearray()
    write_varint(out, value)
    return bytes(out)


_SMALL = [bytes(((number << 1) & 0x7F | 0x80, number >> 6) if number > 63 else (number << 1,)) for number in range(256)]
_SMALL.append(b"\1")  # -1 comes last


def seal_batch(
    header: BatchHeader, body: Buffer, compression: int = 0, compression_level: int | None = None
) -> bytearray:
    """Puts header and records together: compresses, and fills in the length and the CRC."""
    if compression and len(body):
        from semel.protocol.compression import compress

        body = compress(compression, body, compression_level)
    length = HEADER_SIZE - LOG_OVERHEAD + len(body)
    if length > INT32_MAX:
        raise EncodeError(f"a batch of {length} bytes does not fit its length field")
    try:
        batch = bytearray(HEADER.pack(*header._replace(length=length, crc=0)))
    except struct.error as error:
        raise EncodeError(f"a field of the batch header is out of range: {error}; {header}") from error
    batch += body
    seal_crc(batch)
    return batch


def _encode_records(records: Iterable[Record], base_offset: int, last_offset: int, base_timestamp: int) -> bytearray:
    body = bytearray()
    previous = base_offset - 1
    for record in records:
        if not previous < record.offset <= last_offset:
            raise EncodeError(f"offset {record.offset} after {previous} in a batch that ends at {last_offset}")
        previous = record.offset
        fields = _encode_fields(record, record.offset - base_offset, record.timestamp - base_timestamp)
        write_varint(body, len(fields))
        body += fields
    return body


def _encode_fields(record: Record, offset_delta: int, timestamp_delta: int) -> bytearray:
    if not INT64_MIN <= timestamp_delta <= INT64_MAX:
        raise EncodeError(f"timestamp {record.timestamp} is too far from the base timestamp of its batch")
    out = bytearray(1)
    write_varint(out, timestamp_delta)
    write_varint(out, offset_delta)
    _write_bytes(out, record.key)
    _write_bytes(out, record.value)
    write_varint(out, len(record.headers))
    for name, value in record.headers:
        try:
            _write_bytes(out, name.encode())
        except UnicodeEncodeError as error:
            raise EncodeError(f"the header name {name!r} cannot be written as UTF-8") from error
        _write_bytes(out, value)
    return out


def _write_bytes(out: bytearray, data: Buffer | None) -> None:
    if data is None:
        out.append(1)  # -1
    else:
        write_varint(out, len(data))
        out += data


# --- decoding
def decode_batch(data: Buffer, at: int = 0, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> DecodedBatch:
    """The batch at a position, checked: CRC, counts, lengths. Control records come out as they are."""
    header = read_header(data, at)
    check_batch(data, header, at)
    return DecodedBatch(header, decode_records(header, read_body(data, header, at, limit_bytes), limit_bytes))


def decode_records(header: BatchHeader, body: memoryview, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> list[Record]:
    """The records of a batch from its decompressed bytes."""
    data, end = bytes(body), len(body)
    records, at, last_delta, header_count = [], 0, -1, 0
    for _ in range(header.record_count):
        length, at = read_varint(data, at, end)
        if not 0 <= length <= end - at:
            raise CorruptBatchError(f"a record says it takes {length} bytes, but {end - at} are left in its batch")
        record, at = _decode_record(header, data, at, at + length)
        delta = record.offset - header.base_offset
        if not last_delta < delta <= header.last_offset_delta:
            raise CorruptBatchError(
                f"offset delta {delta} after {last_delta} in a batch that ends at {header.last_offset_delta}"
            )
        last_delta = delta
        if record.headers:
            header_count += len(record.headers)
            check_header_count(header_count, limit_bytes)
        records.append(record)
    if at != end:
        raise CorruptBatchError(f"{end - at} bytes are left after the {header.record_count} records of a batch")
    return records


def records_from(data: Buffer, at: int, offset: int) -> Iterator[Record]:
    """The records of the batch at a position from an offset on, one at a time: for a reader that wants few of many.
    Records before the offset are skipped, and what follows the last one that is taken is not decoded."""
    header = read_header(data, at)
    check_batch(data, header, at)
    body = bytes(read_body(data, header, at, DEFAULT_LIMIT_BYTES))
    place, end = 0, len(body)
    for _ in range(header.record_count):
        length, place = read_varint(body, place, end)
        if not 0 <= length <= end - place:
            raise CorruptBatchError(f"a record says it takes {length} bytes, but {end - place} are left in its batch")
        stop = place + length
        if header.base_offset >= offset or header.base_offset + _offset_delta(body, place, stop) >= offset:
            yield _decode_record(header, body, place, stop)[0]
        place = stop


def _offset_delta(data: bytes, at: int, end: int) -> int:
    _, at = read_varint(data, at + 1, end, bits=64)
    return read_varint(data, at, end)[0]


def _decode_record(header: BatchHeader, data: bytes, at: int, end: int) -> tuple[Record, int]:
    # The attributes, one byte, say nothing yet.
    timestamp_delta, at = read_varint(data, at + 1, end, bits=64)
    offset_delta, at = read_varint(data, at, end)
    key, at = _read_bytes(data, at, end)
    value, at = _read_bytes(data, at, end)
    headers, at = _read_headers(data, at, end)
    if at != end:
        raise CorruptBatchError(f"a record ends at byte {end}, but its fields end at byte {at}")
    if header.attributes & TIMESTAMP_TYPE_BIT:
        timestamp = header.max_timestamp
    else:
        timestamp = _wrap_int64(header.base_timestamp + timestamp_delta)
    return Record(header.base_offset + offset_delta, timestamp, key, value, headers), at


def _read_bytes(data: bytes, at: int, end: int) -> tuple[bytes | None, int]:
    length, at = read_varint(data, at, end)
    if length == -1:
        return None, at
    if not 0 <= length <= end - at:
        raise CorruptBatchError(f"a field says it takes {length} bytes, but {end - at} are left in its record")
    return data[at : at + length], at + length


def _read_headers(data: bytes, at: int, end: int) -> tuple[tuple[tuple[str, bytes | None], ...], int]:
    count, at = read_varint(data, at, end)
    if not count:
        return (), at
    if not 0 <= count <= (end - at) // 2:  # a name and a value of no bytes: their lengths, a byte each
        raise CorruptBatchError(f"a record says it has {count} headers in the {end - at} bytes that are left")
    headers = []
    for _ in range(count):
        name, at = _read_bytes(data, at, end)
        if name is None:
            raise CorruptBatchError("a header without a name")
        value, at = _read_bytes(data, at, end)
        headers.append((name.decode(errors="replace"), value))
    return tuple(headers), at


def _wrap_int64(value: int) -> int:
    """As Java's long addition does; only a hostile batch gets here with more than 64 bits."""
    return value if INT64_MIN <= value <= INT64_MAX else (value - INT64_MIN) % 2**64 + INT64_MIN


# --- control records
class MarkerType(IntEnum):
    ABORT = 0
    COMMIT = 1


class Marker(NamedTuple):
    """The record that ends a transaction in a partition."""

    type: MarkerType
    coordinator_epoch: int

    @property
    def is_commit(self) -> bool:
        return self.type is MarkerType.COMMIT


_MARKER_KEY = struct.Struct(">hh")  # version, type
_MARKER_VALUE = struct.Struct(">hi")  # version, coordinator epoch


def encode_marker(
    marker_type: MarkerType,
    *,
    offset: int = 0,
    timestamp: int,
    producer_id: int,
    producer_epoch: int,
    coordinator_epoch: int,
) -> bytearray:
    """A control batch with one marker."""
    key = _MARKER_KEY.pack(0, marker_type)
    value = _MARKER_VALUE.pack(0, coordinator_epoch)
    return encode_single(
        timestamp,
        key,
        value,
        offset=offset,
        attributes=TRANSACTIONAL_BIT | CONTROL_BIT,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
    )


def decode_marker(record: Record) -> Marker | None:
    """The marker in a control record; None for control records of other kinds, which readers skip."""
    if record.key is None or len(record.key) < _MARKER_KEY.size:
        raise CorruptBatchError(f"a control record's key takes {_MARKER_KEY.size} bytes, this one is {record.key!r}")
    version, kind = _MARKER_KEY.unpack_from(record.key)
    if version < 0:
        raise CorruptBatchError(f"a control record of version {version}, expected 0 or above")
    if kind not in (MarkerType.ABORT, MarkerType.COMMIT):
        return None
    if record.value is None or len(record.value) < _MARKER_VALUE.size:
        raise CorruptBatchError(f"a marker's value takes {_MARKER_VALUE.size} bytes, this one is {record.value!r}")
    _, coordinator_epoch = _MARKER_VALUE.unpack_from(record.value)
    return Marker(MarkerType(kind), coordinator_epoch)
