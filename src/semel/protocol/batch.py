"""The header of a v2 record batch: the 61 bytes that a broker reads and the three fields that it patches.

Everything after the header is opaque here. `rows` and `columns` look inside.

    offset  size  field
         0     8  base offset                 (patched by the broker; not covered by the CRC)
         8     4  length of what follows this field
        12     4  partition leader epoch      (patched by the broker; not covered by the CRC)
        16     1  magic, always 2
        17     4  CRC-32C of everything from `attributes` to the end
        21     2  attributes: compression (0-2), timestamp type (3), transactional (4), control (5), delete horizon (6)
        23     4  last offset delta
        27     8  base timestamp
        35     8  max timestamp               (patched with LogAppendTime, then the CRC is computed anew)
        43     8  producer id
        51     2  producer epoch
        53     4  base sequence
        57     4  record count
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from semel.protocol.crc import crc32c
from semel.protocol.errors import CorruptBatchError, TooLargeError

Buffer = bytes | bytearray | memoryview

MAGIC = 2
LOG_OVERHEAD = 12  # base offset and length: what stands before the counted bytes
HEADER_SIZE = 61
CRC_START = 21  # the checksum covers the batch from its attributes on

COMPRESSION_MASK = 0x07
TIMESTAMP_TYPE_BIT = 0x08
TRANSACTIONAL_BIT = 0x10
CONTROL_BIT = 0x20
DELETE_HORIZON_BIT = 0x40

NO_PRODUCER_ID = -1
NO_PRODUCER_EPOCH = -1
NO_SEQUENCE = -1
NO_TIMESTAMP = -1

SMALLEST_RECORD = 7  # length, attributes, timestamp, offset, key length, value length, header count: a byte each
RECORD_OVERHEAD_BYTES = 64  # what a decoded record may take in memory beside its own bytes, for the limits
HEADER_OVERHEAD_BYTES = 64  # the same for one of its headers
DEFAULT_LIMIT_BYTES = 512 * 1024 * 1024  # the most that one decoded batch may take in memory, unless the caller says

HEADER = struct.Struct(">qiibIhiqqqhii")
_BASE_OFFSET = struct.Struct(">q")
_LEADER_EPOCH = struct.Struct(">i")
_ATTRIBUTES = struct.Struct(">h")
_MAX_TIMESTAMP = struct.Struct(">q")
_CRC = struct.Struct(">I")
_LENGTH = struct.Struct(">i")


class BatchHeader(NamedTuple):
    """The fields of a batch header, in the order of the wire."""

    base_offset: int
    length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def size(self) -> int:
        """Bytes of the whole batch on the wire and on disk."""
        return self.length + LOG_OVERHEAD

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.last_offset_delta

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.last_offset_delta + 1

    @property
    def last_sequence(self) -> int:
        """The sequence of the last record, wrapped from 2^31-1 to 0; -1 where there is no sequence."""
        if self.base_sequence == NO_SEQUENCE:
            return NO_SEQUENCE
        return (self.base_sequence + self.last_offset_delta) & 0x7FFFFFFF

    @property
    def compression(self) -> int:
        return self.attributes & COMPRESSION_MASK

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & TRANSACTIONAL_BIT)

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & CONTROL_BIT)

    @property
    def is_log_append_time(self) -> bool:
        return bool(self.attributes & TIMESTAMP_TYPE_BIT)

    @property
    def has_delete_horizon(self) -> bool:
        return bool(self.attributes & DELETE_HORIZON_BIT)

    @property
    def has_producer_id(self) -> bool:
        return self.producer_id > NO_PRODUCER_ID


def read_header(data: Buffer, at: int = 0) -> BatchHeader:
    """The header at a position. Checks that it is there, has the right magic and a possible length; not the CRC."""
    available = len(data) - at
    if available < HEADER_SIZE:
        raise CorruptBatchError(f"a batch header takes {HEADER_SIZE} bytes, but only {available} are left")
    header = BatchHeader._make(HEADER.unpack_from(data, at))
    if header.magic != MAGIC:
        raise CorruptBatchError(
            f"batch has magic {header.magic}, expected {MAGIC} (message formats 0 and 1 are not supported)"
        )
    if header.length < HEADER_SIZE - LOG_OVERHEAD:
        raise CorruptBatchError(
            f"batch says it is {header.length} bytes long, but a header alone takes {HEADER_SIZE - LOG_OVERHEAD}"
        )
    return header


def check_batch(data: Buffer, header: BatchHeader, at: int = 0) -> None:
    """Raises unless the batch at a position is whole, has the CRC that its header says and counts that can be."""
    available = len(data) - at
    if header.size > available:
        raise CorruptBatchError(f"batch takes {header.size} bytes, but only {available} are left")
    actual = crc32c(memoryview(data)[at + CRC_START : at + header.size])
    if actual != header.crc:
        raise CorruptBatchError(f"batch has CRC {actual:#010x}, its header says {header.crc:#010x}")
    if header.last_offset_delta < 0 or header.record_count < 0:
        raise CorruptBatchError(
            f"batch has last offset delta {header.last_offset_delta} and record count {header.record_count}; "
            "neither may be negative"
        )


def read_body(data: Buffer, header: BatchHeader, at: int = 0, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> memoryview:
    """The records of a checked batch, decompressed. Refuses counts that cannot be, before anything is made of them."""
    body = memoryview(data)[at + HEADER_SIZE : at + header.size]
    if not header.record_count:
        if len(body):
            raise CorruptBatchError(f"batch says it has no records, but {len(body)} bytes follow its header")
        return body
    overhead_bytes = header.record_count * RECORD_OVERHEAD_BYTES
    if overhead_bytes >= limit_bytes:
        raise TooLargeError(f"a batch of {header.record_count} records is over the limit of {limit_bytes} bytes")
    if header.attributes & COMPRESSION_MASK:
        from semel.protocol.compression import decompress

        body = memoryview(decompress(header.compression, body, limit_bytes - overhead_bytes))
    elif len(body) + overhead_bytes > limit_bytes:
        raise TooLargeError(f"a batch of {len(body)} bytes is over the limit of {limit_bytes} bytes")
    if header.record_count * SMALLEST_RECORD > len(body):
        raise CorruptBatchError(
            f"batch says it has {header.record_count} records, but its records take {len(body)} bytes"
        )
    return body


def check_header_count(count: int, limit_bytes: int) -> None:
    """Raises if the headers of a batch's records would take too much memory: two bytes on the wire make one header."""
    if count * HEADER_OVERHEAD_BYTES > limit_bytes:
        raise TooLargeError(f"{count} headers in a batch are over the limit of {limit_bytes} bytes")


def iter_headers(data: Buffer) -> Iterator[tuple[int, BatchHeader]]:
    """(position, header) of every whole batch, in order. A partial last batch, as fetch responses have, is left out."""
    at, end = 0, len(data)
    while end - at >= HEADER_SIZE:
        header = read_header(data, at)
        if header.size > end - at:
            return
        yield at, header
        at += header.size


def patch_offset(batch: bytearray | memoryview, base_offset: int, leader_epoch: int, at: int = 0) -> None:
    """Gives a batch its place in the log. The CRC does not cover these fields."""
    _BASE_OFFSET.pack_into(batch, at, base_offset)
    _LEADER_EPOCH.pack_into(batch, at + 12, leader_epoch)


def patch_log_append_time(batch: bytearray | memoryview, timestamp_ms: int, at: int = 0) -> None:
    """Stamps a batch with the broker's time (message.timestamp.type=LogAppendTime) and computes its CRC anew."""
    (attributes,) = _ATTRIBUTES.unpack_from(batch, at + 21)
    _ATTRIBUTES.pack_into(batch, at + 21, attributes | TIMESTAMP_TYPE_BIT)
    _MAX_TIMESTAMP.pack_into(batch, at + 35, timestamp_ms)
    seal_crc(batch, at)


def patch_max_timestamp(batch: bytearray | memoryview, timestamp_ms: int) -> None:
    """Gives a batch its highest timestamp and computes its CRC anew."""
    _MAX_TIMESTAMP.pack_into(batch, 35, timestamp_ms)
    seal_crc(batch)


def seal_crc(batch: bytearray | memoryview, at: int = 0) -> None:
    """Writes the CRC of the batch that starts at a position, from the length that its header says."""
    (length,) = _LENGTH.unpack_from(batch, at + 8)
    _CRC.pack_into(batch, at + 17, crc32c(memoryview(batch)[at + CRC_START : at + LOG_OVERHEAD + length]))


def next_sequence(sequence: int, count: int = 1) -> int:
    """The sequence after `count` more records: it wraps from 2^31-1 to 0. The only place where sequences are added."""
    return (sequence + count) & 0x7FFFFFFF
