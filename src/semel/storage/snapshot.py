"""The producer snapshot (`<offset>.snapshot`): the producers of a partition as they were at an offset.

Layout: int16 version, uint32 CRC-32C of what follows, int32 count, then 46 bytes per producer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from crc32c import crc32c

from semel.storage.producer_state import NO_OFFSET, BatchInfo, ProducerEntry

VERSION = 1
_PREFIX = struct.Struct(">hI")
_COUNT = struct.Struct(">i")
_ENTRY = struct.Struct(">qhiqiqiq")


class CorruptSnapshotError(Exception):
    """A snapshot that is torn, or not one."""


def encode(entries: Iterable[ProducerEntry]) -> bytes:
    rows = [_encode_entry(entry) for entry in entries]
    body = _COUNT.pack(len(rows)) + b"".join(rows)
    return _PREFIX.pack(VERSION, crc32c(body)) + body


def decode(data: bytes, now_ms: int) -> list[ProducerEntry]:
    """The entries, ordered by the first offset of their open transaction. Raises unless every byte is as expected."""
    if len(data) < _PREFIX.size + _COUNT.size:
        raise CorruptSnapshotError(f"{len(data)} bytes are too few for a snapshot")
    version, crc = _PREFIX.unpack_from(data)
    body = memoryview(data)[_PREFIX.size :]
    if version != VERSION:
        raise CorruptSnapshotError(f"version is {version}, expected {VERSION}")
    if crc32c(body) != crc:
        raise CorruptSnapshotError(f"CRC is {crc32c(body):#010x}, the file says {crc:#010x}")
    (count,) = _COUNT.unpack_from(body)
    rows = body[_COUNT.size :]
    if count < 0 or len(rows) != count * _ENTRY.size:
        raise CorruptSnapshotError(f"{count} entries do not fit {len(rows)} bytes")
    entries = [_decode_entry(fields, now_ms) for fields in _ENTRY.iter_unpack(rows)]
    return sorted(entries, key=lambda entry: entry.txn_first_offset)


def _encode_entry(entry: ProducerEntry) -> bytes:
    last = entry.batches[-1] if entry.batches else BatchInfo(-1, -1, NO_OFFSET, NO_OFFSET, -1)
    return _ENTRY.pack(
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
    entry = ProducerEntry(producer_id)
    entry.epoch = epoch
    entry.coordinator_epoch = coordinator_epoch
    entry.last_timestamp_ms = timestamp_ms
    entry.last_append_ms = now_ms
    entry.txn_first_offset = txn_first_offset if txn_first_offset >= 0 else NO_OFFSET
    if last_offset >= 0:
        first_sequence = (last_sequence - delta) & 0x7FFFFFFF if last_sequence >= 0 else last_sequence
        entry.batches = [BatchInfo(first_sequence, last_sequence, last_offset - delta, last_offset, timestamp_ms)]
        entry.history_cut = True
    return entry
