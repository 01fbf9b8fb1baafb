"""The records of `__consumer_offsets`, written as Apache Kafka 4.3 writes them and read in all of its versions.

A key starts with its type (int16: 0 and 1 a position, 2 a group), a value with its version.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from semel.broker.coordinator_runtime import KeyValue
from semel.protocol.messages.internal_topics import (
    GROUP_METADATA_KEY,
    GROUP_METADATA_VALUE,
    OFFSET_COMMIT_KEY,
    OFFSET_COMMIT_VALUE,
    GroupMetadataKey,
    GroupMetadataValue,
    OffsetCommitKey,
    OffsetCommitValue,
)
from semel.protocol.schema import NO_UUID

TOPIC = "__consumer_offsets"
POSITION_KEYS = (0, 1)
GROUP_KEY = 2
GROUP_VALUE_VERSION = 3
POSITION_VALUE_VERSION = 4  # the first with the topic's id
POSITION_VALUE_VERSION_EXPIRING = 1  # the only one with a time of expiry (OffsetCommit 2-4 with a retention time)
NO_TIME = -1
_TYPE = struct.Struct(">h")


class Slot(NamedTuple):
    """Where a position belongs."""

    group: str
    topic: str
    partition: int


class Position(NamedTuple):
    """A committed position, and the offset of the record that says so."""

    offset: int
    leader_epoch: int
    metadata: str
    commit_time_ms: int
    expire_time_ms: int = NO_TIME
    topic_id: bytes = NO_UUID
    record_offset: int = -1


class PositionRecord(NamedTuple):
    slot: Slot
    value: Position | None  # None: deleted


class GroupRecord(NamedTuple):
    group: str
    value: GroupMetadataValue | None  # None: deleted


def position_key(slot: Slot) -> bytes:
    key = OffsetCommitKey(group=slot.group, topic=slot.topic, partition=slot.partition)
    return _TYPE.pack(POSITION_KEYS[-1]) + OFFSET_COMMIT_KEY.encode(key, 0)


def encode_position(slot: Slot, position: Position | None) -> KeyValue:
    if position is None:
        return position_key(slot), None
    expiring = position.expire_time_ms != NO_TIME
    version = POSITION_VALUE_VERSION_EXPIRING if expiring else POSITION_VALUE_VERSION
    value = OffsetCommitValue(
        offset=position.offset,
        leader_epoch=position.leader_epoch,
        metadata=position.metadata,
        commit_timestamp=position.commit_time_ms,
        expire_timestamp=position.expire_time_ms,
        topic_id=position.topic_id,
    )
    return position_key(slot), _TYPE.pack(version) + OFFSET_COMMIT_VALUE.encode(value, version)


def encode_group(group: str, value: GroupMetadataValue | None) -> KeyValue:
    if value is None:
        return _group_key(group), None
    version = GROUP_VALUE_VERSION
    return _group_key(group), _TYPE.pack(version) + GROUP_METADATA_VALUE.encode(value, version)


def read_record(key: bytes, value: bytes | None) -> PositionRecord | GroupRecord | None:
    """What a record says; None if it is of a kind that this broker does not write (groups of KIP-848, share groups)."""
    (kind,) = _TYPE.unpack_from(key)
    if kind in POSITION_KEYS:
        slot = OFFSET_COMMIT_KEY.decode(key, 0, _TYPE.size)
        return PositionRecord(
            Slot(slot.group, slot.topic, slot.partition),
            None if value is None else _position_of(OFFSET_COMMIT_VALUE.decode(value, _version(value), _TYPE.size)),
        )
    if kind == GROUP_KEY:
        return GroupRecord(
            GROUP_METADATA_KEY.decode(key, 0, _TYPE.size).group,
            None if value is None else GROUP_METADATA_VALUE.decode(value, _version(value), _TYPE.size),
        )
    return None


def _position_of(value: OffsetCommitValue) -> Position:
    return Position(
        value.offset,
        value.leader_epoch,
        value.metadata,
        value.commit_timestamp,
        value.expire_timestamp,
        value.topic_id,
    )


def _group_key(group: str) -> bytes:
    return _TYPE.pack(GROUP_KEY) + GROUP_METADATA_KEY.encode(GroupMetadataKey(group=group), 0)


def _version(value: bytes) -> int:
    (version,) = _TYPE.unpack_from(value)
    return int(version)
