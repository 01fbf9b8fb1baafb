"""Groups and positions as the log tells them, read when the broker starts.

A log holds many records for the same key, and only the last one counts. So records are first sorted by their raw keys,
transactions included, and only what is left is looked into.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterable

from semel.broker.groups.consumer.model import Change, ConsumerGroup
from semel.broker.groups.consumer.records import KINDS, change_of
from semel.broker.groups.group import Group
from semel.broker.groups.ordered_log import Journal
from semel.broker.groups.positions import Positions
from semel.broker.groups.records import GroupRecord, PositionRecord, position_of, read_record
from semel.protocol.batch import BatchHeader
from semel.protocol.errors import DecodeError, UnsupportedVersionError
from semel.protocol.rows import Record

logger = logging.getLogger(__name__)

_MARKER_KEY = struct.Struct(">hh")  # version, type
_COMMIT_MARKER = 1

_KIND = struct.Struct(">h")

Latest = dict[bytes, tuple[int, bytes | None]]  # key: (offset, value) of the record that counts
Entry = GroupRecord | PositionRecord | Change | None


def replay(
    journal: Journal,
    groups: dict[str, Group],
    consumer_groups: dict[str, ConsumerGroup],
    positions: Positions,
    now_ms: int,
) -> None:
    """Reads all partitions. What a transaction wrote is pending until its marker is met."""
    for partition in range(journal.partition_count):
        latest, pending = _sort(journal.replay(partition))
        for entry, offset in _read(partition, latest):
            if isinstance(entry, PositionRecord):
                if entry.value is not None:
                    positions.commit(entry.slot, position_of(entry.value, offset))
            elif isinstance(entry, GroupRecord):
                if entry.value is not None:
                    groups[entry.group] = Group.from_record(entry.group, entry.value)
            elif entry is not None:
                consumer_groups.setdefault(entry.group_id, ConsumerGroup(entry.group_id)).apply(entry)
        for producer_id, held in pending.items():
            for entry, offset in _read(partition, held):
                if isinstance(entry, PositionRecord) and entry.value is not None:
                    positions.add_pending((partition, producer_id), entry.slot, position_of(entry.value, offset))
    known = groups.keys() | consumer_groups.keys()
    for group_id in positions.groups() - known:  # positions of somebody who does not use group management
        groups[group_id] = Group(group_id, now_ms)


def _sort(batches: Iterable[tuple[BatchHeader, list[Record]]]) -> tuple[Latest, dict[int, Latest]]:
    """What counts, and what open transactions hold, by producer id."""
    latest: Latest = {}
    pending: dict[int, Latest] = {}
    for header, records in batches:
        if header.is_control:
            _end_transaction(header.producer_id, records, latest, pending)
            continue
        target = pending.setdefault(header.producer_id, {}) if header.has_producer_id else latest
        for record in records:
            if record.key is not None:
                target[record.key] = (record.offset, record.value)
                if record.value is None:  # a deleted position is not brought back by a transaction that began before
                    for held in pending.values():
                        held.pop(record.key, None)
    return latest, pending


def _end_transaction(producer_id: int, records: list[Record], latest: Latest, pending: dict[int, Latest]) -> None:
    held = pending.pop(producer_id, {})
    if not any(_is_commit(record) for record in records):
        return
    for key, (offset, value) in held.items():
        if key not in latest or latest[key][0] < offset:  # a later plain commit wins
            latest[key] = (offset, value)


def _is_commit(marker: Record) -> bool:
    if marker.key is None or len(marker.key) < _MARKER_KEY.size:
        return False
    return bool(_MARKER_KEY.unpack_from(marker.key)[1] == _COMMIT_MARKER)


def _read(partition: int, latest: Latest) -> Iterable[tuple[Entry, int]]:
    for key, (offset, value) in latest.items():
        try:
            (kind,) = _KIND.unpack_from(key)
            if value is not None:
                yield (change_of(kind, key, value) if kind in KINDS else read_record(key, value)), offset
        except (DecodeError, UnsupportedVersionError, struct.error, ValueError) as error:
            logger.error("record %d of partition %d of __consumer_offsets is skipped: %s", offset, partition, error)
