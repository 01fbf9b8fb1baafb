"""Keys and places of the records in a batch, without making records of them: compaction looks at every one, twice."""

from __future__ import annotations

from typing import NamedTuple

from semel.protocol.batch import BatchHeader, read_body
from semel.protocol.errors import CorruptBatchError
from semel.protocol.varints import read_varint


class FoundRecord(NamedTuple):
    offset: int
    timestamp_delta: int
    key: bytes | None
    has_value: bool
    start: int  # of its bytes in the decompressed batch, length and all
    end: int


def scan_batch(data: bytes, header: BatchHeader) -> tuple[bytes, list[FoundRecord]]:
    """The decompressed records of a batch and where each is. Raises DecodeError if they are not records."""
    body = bytes(read_body(data, header))
    found: list[FoundRecord] = []
    at, limit, base_offset = 0, len(body), header.base_offset
    for _ in range(header.record_count):
        start = at
        length, at = read_varint(body, at, limit)
        end = at + length
        if length < 0 or end > limit:
            raise CorruptBatchError(f"a record says it takes {length} bytes, but {limit - at} are left in its batch")
        timestamp_delta, at = read_varint(body, at + 1, end, 64)
        offset_delta, at = read_varint(body, at, end)
        key_length, at = read_varint(body, at, end)
        key = None
        if key_length >= 0:
            key = body[at : at + key_length]
            at += key_length
        value_length, _ = read_varint(body, at, end)
        found.append(FoundRecord(base_offset + offset_delta, timestamp_delta, key, value_length >= 0, start, end))
        at = end
    if at != limit:
        raise CorruptBatchError(f"{limit - at} bytes are left after the {header.record_count} records of a batch")
    return body, found
