"""How many partitions a Produce request names, before it is decoded.

The size of its frame does not say: most of it is records. Counting jumps over the records, and stops at a limit.
"""

from __future__ import annotations

import struct

from semel.protocol.compiler import read_uvarint
from semel.protocol.errors import DecodeError
from semel.protocol.schema import Buffer

_FIRST_FLEXIBLE = 9
_FIRST_WITH_TOPIC_IDS = 13
_ACKS_AND_TIMEOUT_BYTES = 6
_INDEX_BYTES = _INT32_BYTES = 4
_INT16, _INT32 = struct.Struct(">h"), struct.Struct(">i")


def has_more_partitions(frame: Buffer, version: int, at: int, limit: int) -> bool:
    """Whether the request whose body starts at a position has more partitions than this. A request that is malformed
    has not: whatever decodes it says so."""
    buf = frame if isinstance(frame, memoryview) else memoryview(frame)
    try:
        reader = _Compact(buf) if version >= _FIRST_FLEXIBLE else _Plain(buf)
        return _has_more(reader, version, at, limit)
    except (struct.error, IndexError, DecodeError):
        return False


class _Plain:
    """Lengths as numbers of fixed size; -1 is null."""

    def __init__(self, buf: memoryview) -> None:
        self._buf = buf

    def after_string(self, at: int) -> int:
        (length,) = _INT16.unpack_from(self._buf, at)
        return at + 2 + max(int(length), 0)

    def after_bytes(self, at: int) -> int:
        (length,) = _INT32.unpack_from(self._buf, at)
        return at + _INT32_BYTES + max(int(length), 0)

    def count(self, at: int) -> tuple[int, int]:
        return _INT32.unpack_from(self._buf, at)[0], at + _INT32_BYTES

    def after_tags(self, at: int) -> int:
        return at


class _Compact(_Plain):
    """Lengths as varints, one more than they are; 0 is null."""

    def after_string(self, at: int) -> int:
        length, at = read_uvarint(self._buf, at)
        return at + max(length - 1, 0)

    after_bytes = after_string

    def count(self, at: int) -> tuple[int, int]:
        count, at = read_uvarint(self._buf, at)
        return count - 1, at

    def after_tags(self, at: int) -> int:
        count, at = read_uvarint(self._buf, at)
        for _ in range(min(count, len(self._buf))):
            _, at = read_uvarint(self._buf, at)
            length, at = read_uvarint(self._buf, at)
            at += length
        return at


def _has_more(reader: _Plain, version: int, at: int, limit: int) -> bool:
    at = reader.after_string(at) + _ACKS_AND_TIMEOUT_BYTES
    topics, at = reader.count(at)
    if topics > limit:
        return True
    total = 0
    for topics_left in range(topics, 0, -1):
        at = at + 16 if version >= _FIRST_WITH_TOPIC_IDS else reader.after_string(at)
        partitions, at = reader.count(at)
        total += max(partitions, 0)
        if total > limit:
            return True
        for _ in range(partitions if topics_left > 1 else 0):
            at = reader.after_tags(reader.after_bytes(at + _INDEX_BYTES))
        at = reader.after_tags(at) if topics_left > 1 else at
    return False
