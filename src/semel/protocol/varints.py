"""The signed varints inside a record: zigzag, seven bits per byte, at most 5 bytes for 32 bits and 10 for 64.

Reading is strict: a number wider than its type is refused. A longer spelling of a small number (0x80 0x00) is accepted,
as Kafka's clients do.
"""

from __future__ import annotations

from semel.protocol.errors import CorruptBatchError


def write_varint(out: bytearray, value: int) -> None:
    """Appends a number. The caller keeps it within 64 bits."""
    value = (value << 1) ^ (value >> 63)
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def read_varint(data: bytes | bytearray | memoryview, at: int, end: int, bits: int = 32) -> tuple[int, int]:
    """(number, position after it). `end` is where the surrounding record or batch ends."""
    if at < end and (byte := data[at]) < 0x80:  # most of them
        return (byte >> 1) ^ -(byte & 1), at + 1
    value = shift = 0
    while True:
        if at >= end:
            raise CorruptBatchError(f"a varint runs past the end of its record at byte {end}")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
        if shift >= bits:
            raise CorruptBatchError(f"a varint of more than {bits} bits before byte {at}")
    if value >> bits:
        raise CorruptBatchError(f"a varint of more than {bits} bits before byte {at}")
    return (value >> 1) ^ -(value & 1), at
