"""Groups and positions as the log tells them, read when the broker starts."""

from __future__ import annotations

import logging
import struct

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


def replay(journal: Journal, groups: dict[str, Group], positions: Positions, now_ms: int) -> None:
    """Reads all partitions. What a transaction wrote is pending until its marker is met."""
    for partition in range(journal.partition_count):
        for header, records in journal.replay(partition):
            if header.is_control:
                _end_transaction(partition, header, records, positions)
            else:
                for record in records:
                    _take(partition, header, record, groups, positions)
    for group_id in positions.groups() - groups.keys():  # positions of somebody who does not use group management
        groups[group_id] = Group(group_id, now_ms)


def _end_transaction(partition: int, header: BatchHeader, records: list[Record], positions: Positions) -> None:
    for record in records:
        if record.key is not None and len(record.key) >= _MARKER_KEY.size:
            _, kind = _MARKER_KEY.unpack_from(record.key)
            positions.end_transaction((partition, header.producer_id), commit=kind == _COMMIT_MARKER)


def _take(partition: int, header: BatchHeader, record: Record, groups: dict[str, Group], positions: Positions) -> None:
    offset = record.offset
    if record.key is None:
        return
    try:
        entry = read_record(record.key, record.value)
    except (DecodeError, UnsupportedVersionError, struct.error) as error:
        logger.error("record %d of partition %d of __consumer_offsets is skipped: %s", offset, partition, error)
        return
    if isinstance(entry, GroupRecord):
        if entry.value is None:
            groups.pop(entry.group, None)
        else:
            groups[entry.group] = Group.from_record(entry.group, entry.value)
    elif isinstance(entry, PositionRecord):
        if entry.value is None:
            positions.delete(entry.slot)
        elif header.has_producer_id:
            positions.add_pending((partition, header.producer_id), entry.slot, position_of(entry.value, offset))
        else:
            positions.commit(entry.slot, position_of(entry.value, offset))
