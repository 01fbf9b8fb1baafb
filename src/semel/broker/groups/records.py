"""The records of `__consumer_offsets`, written as Apache Kafka 4.3 writes them and read in all of its versions.

A key starts with its type (int16: 0 and 1 an offset, 2 a classic group, 3 to 8 a consumer group), a value with its
version.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from itertools import zip_longest
from typing import NamedTuple

from semel.broker.coordinator_runtime import KeyValue
from semel.broker.groups.consumer.model import (
    Change,
    ClassicMetadata,
    Current,
    CurrentSet,
    EpochSet,
    MemberState,
    Partitions,
    Subscription,
    SubscriptionSet,
    TargetEpochSet,
    TargetSet,
)
from semel.protocol.messages import internal_topics as log
from semel.protocol.schema import NO_UUID

TOPIC = "__consumer_offsets"
OFFSET_KEYS = (0, 1)
GROUP_KEY = 2
GROUP_VALUE_VERSION = 3
OFFSET_VALUE_VERSION = 4  # the first with the topic's id
OFFSET_VALUE_VERSION_EXPIRING = 1  # the only one with a time of expiry (OffsetCommit 2-4 with a retention time)
NO_TIME = -1
_TYPE = struct.Struct(">h")


class OffsetKey(NamedTuple):
    """Where an offset belongs."""

    group: str
    topic: str
    partition: int


class CommittedOffset(NamedTuple):
    """A committed offset, and the offset of the record that says so."""

    offset: int
    leader_epoch: int
    metadata: str
    commit_time_ms: int
    expire_time_ms: int = NO_TIME
    topic_id: bytes = NO_UUID
    record_offset: int = -1


class OffsetRecord(NamedTuple):
    slot: OffsetKey
    value: CommittedOffset | None  # None: deleted


class GroupRecord(NamedTuple):
    group: str
    value: log.GroupMetadataValue | None  # None: deleted


GroupsRecord = OffsetRecord | GroupRecord | Change


def offset_key(slot: OffsetKey) -> bytes:
    key = log.OffsetCommitKey(group=slot.group, topic=slot.topic, partition=slot.partition)
    return _TYPE.pack(OFFSET_KEYS[-1]) + log.OFFSET_COMMIT_KEY.encode(key, 0)


def encode_offset(slot: OffsetKey, committed: CommittedOffset | None) -> KeyValue:
    if committed is None:
        return offset_key(slot), None
    expiring = committed.expire_time_ms != NO_TIME
    version = OFFSET_VALUE_VERSION_EXPIRING if expiring else OFFSET_VALUE_VERSION
    value = log.OffsetCommitValue(
        offset=committed.offset,
        leader_epoch=committed.leader_epoch,
        metadata=committed.metadata,
        commit_timestamp=committed.commit_time_ms,
        expire_timestamp=committed.expire_time_ms,
        topic_id=committed.topic_id,
    )
    return offset_key(slot), _TYPE.pack(version) + log.OFFSET_COMMIT_VALUE.encode(value, version)


def encode_group(group: str, value: log.GroupMetadataValue | None) -> KeyValue:
    if value is None:
        return _group_key(group), None
    version = GROUP_VALUE_VERSION
    return _group_key(group), _TYPE.pack(version) + log.GROUP_METADATA_VALUE.encode(value, version)


def read_record(key: bytes, value: bytes | None) -> GroupsRecord | None:
    """What a record says; None if it is of a kind that this broker does not write (share groups)."""
    (kind,) = _TYPE.unpack_from(key)
    if kind in KINDS:
        return change_of(kind, key, value)
    if kind in OFFSET_KEYS:
        slot = log.OFFSET_COMMIT_KEY.decode(key, 0, _TYPE.size)
        return OffsetRecord(
            OffsetKey(slot.group, slot.topic, slot.partition),
            None
            if value is None
            else _committed_of(log.OFFSET_COMMIT_VALUE.decode(value, _version(value), _TYPE.size)),
        )
    if kind == GROUP_KEY:
        return GroupRecord(
            log.GROUP_METADATA_KEY.decode(key, 0, _TYPE.size).group,
            None if value is None else log.GROUP_METADATA_VALUE.decode(value, _version(value), _TYPE.size),
        )
    return None


def _committed_of(value: log.OffsetCommitValue) -> CommittedOffset:
    return CommittedOffset(
        value.offset,
        value.leader_epoch,
        value.metadata,
        value.commit_timestamp,
        value.expire_timestamp,
        value.topic_id,
    )


def _group_key(group: str) -> bytes:
    return _TYPE.pack(GROUP_KEY) + log.GROUP_METADATA_KEY.encode(log.GroupMetadataKey(group=group), 0)


def _version(value: bytes) -> int:
    (version,) = _TYPE.unpack_from(value)
    return int(version)


EPOCH, MEMBER, TARGET_EPOCH, TARGET, CURRENT = 3, 5, 6, 7, 8
KINDS = frozenset((EPOCH, MEMBER, TARGET_EPOCH, TARGET, CURRENT))
_VERSION = b"\0\0"


def record_of(change: Change) -> KeyValue:
    """A change as Kafka writes it; what is None becomes a tombstone."""
    if isinstance(change, EpochSet):
        key = log.CONSUMER_GROUP_METADATA_KEY.encode(log.ConsumerGroupMetadataKey(change.group_id), 0)
        return _record(EPOCH, key, None if change.epoch is None else _epoch_value(change.epoch, change.topics_hash))
    if isinstance(change, TargetEpochSet):
        key = log.CONSUMER_GROUP_TARGET_ASSIGNMENT_METADATA_KEY.encode(
            log.ConsumerGroupTargetAssignmentMetadataKey(change.group_id), 0
        )
        return _record(TARGET_EPOCH, key, None if change.epoch is None else _target_epoch_value(change))
    member_key = log.CONSUMER_GROUP_MEMBER_METADATA_KEY.encode(
        log.ConsumerGroupMemberMetadataKey(change.group_id, change.member_id), 0
    )  # all three kinds about members have the same key behind their number
    if isinstance(change, SubscriptionSet):
        return _record(MEMBER, member_key, None if change.value is None else _member_value(change.value))
    if isinstance(change, TargetSet):
        return _record(TARGET, member_key, None if change.value is None else _target_value(change.value))
    return _record(CURRENT, member_key, None if change.value is None else _current_value(change.value))


def change_of(kind: int, key: bytes, value: bytes | None) -> Change:
    """The change that a record of one of KINDS holds."""
    body = None if value is None else value[_TYPE.size :]
    if kind == EPOCH:
        return _read_epoch(log.CONSUMER_GROUP_METADATA_KEY.decode(key, 0, _TYPE.size).group_id, body)
    if kind == TARGET_EPOCH:
        group_id = log.CONSUMER_GROUP_TARGET_ASSIGNMENT_METADATA_KEY.decode(key, 0, _TYPE.size).group_id
        if body is None:
            return TargetEpochSet(group_id, None)
        read = log.CONSUMER_GROUP_TARGET_ASSIGNMENT_METADATA_VALUE.decode(body, 0)
        return TargetEpochSet(group_id, read.assignment_epoch, read.assignment_timestamp)
    member = log.CONSUMER_GROUP_MEMBER_METADATA_KEY.decode(key, 0, _TYPE.size)
    if kind == MEMBER:
        return SubscriptionSet(member.group_id, member.member_id, None if body is None else _read_member(body))
    if kind == TARGET:
        return TargetSet(member.group_id, member.member_id, None if body is None else _read_target(body))
    return CurrentSet(member.group_id, member.member_id, None if body is None else _read_current(body))


def _record(kind: int, key: bytes, value: bytes | None) -> KeyValue:
    return _TYPE.pack(kind) + key, None if value is None else _VERSION + value


# -- values ------------------------------------------------------------------------------------------------------------
def _epoch_value(epoch: int, topics_hash: int) -> bytes:
    return log.CONSUMER_GROUP_METADATA_VALUE.encode(log.ConsumerGroupMetadataValue(epoch, topics_hash), 0)


def _read_epoch(group_id: str, body: bytes | None) -> EpochSet:
    if body is None:
        return EpochSet(group_id, None)
    read = log.CONSUMER_GROUP_METADATA_VALUE.decode(body, 0)
    return EpochSet(group_id, read.epoch, read.metadata_hash)


def _target_epoch_value(change: TargetEpochSet) -> bytes:
    value = log.ConsumerGroupTargetAssignmentMetadataValue(change.epoch or 0, change.time_ms)
    return log.CONSUMER_GROUP_TARGET_ASSIGNMENT_METADATA_VALUE.encode(value, 0)


def _member_value(value: Subscription) -> bytes:
    return log.CONSUMER_GROUP_MEMBER_METADATA_VALUE.encode(
        log.ConsumerGroupMemberMetadataValue(
            value.instance_id,
            value.rack_id,
            value.client_id,
            value.client_host,
            sorted(value.topics),
            value.regex or "",  # as Kafka writes it
            value.rebalance_timeout_ms,
            value.assignor,
            _classic_value(value.classic),
        ),
        0,
    )


def _classic_value(classic: ClassicMetadata | None) -> log.ClassicMemberMetadata | None:
    if classic is None:
        return None
    return log.ClassicMemberMetadata(
        classic.session_timeout_ms, [log.ClassicProtocol(*protocol) for protocol in classic.protocols]
    )


def _read_member(body: bytes) -> Subscription:
    read = log.CONSUMER_GROUP_MEMBER_METADATA_VALUE.decode(body, 0)
    classic = read.classic_member_metadata
    return Subscription(
        read.instance_id,
        read.rack_id,
        read.client_id,
        read.client_host,
        tuple(read.subscribed_topic_names),
        read.subscribed_topic_regex or None,
        read.rebalance_timeout_ms,
        read.server_assignor,
        None
        if classic is None
        else ClassicMetadata(
            classic.session_timeout_ms, tuple((each.name, bytes(each.metadata)) for each in classic.supported_protocols)
        ),
    )


def _target_value(partitions: Partitions) -> bytes:
    topics = [log.TargetTopicPartitions(*entry) for entry in by_topic(partitions).items()]
    return log.CONSUMER_GROUP_TARGET_ASSIGNMENT_MEMBER_VALUE.encode(
        log.ConsumerGroupTargetAssignmentMemberValue(topics), 0
    )


def _read_target(body: bytes) -> Partitions:
    return _partitions(log.CONSUMER_GROUP_TARGET_ASSIGNMENT_MEMBER_VALUE.decode(body, 0).topic_partitions)


def _current_value(value: Current) -> bytes:
    return log.CONSUMER_GROUP_CURRENT_MEMBER_ASSIGNMENT_VALUE.encode(
        log.ConsumerGroupCurrentMemberAssignmentValue(
            value.epoch,
            value.previous_epoch,
            int(value.state),
            _with_epochs(value.assigned, value),
            _with_epochs(value.revoking, value),
        ),
        0,
    )


def _with_epochs(partitions: Partitions, current: Current) -> list[log.CurrentTopicPartitions]:
    return [
        log.CurrentTopicPartitions(
            topic_id, indexes, [current.since.get((topic_id, index), current.epoch) for index in indexes]
        )
        for topic_id, indexes in by_topic(partitions).items()
    ]


def _read_current(body: bytes) -> Current:
    read = log.CONSUMER_GROUP_CURRENT_MEMBER_ASSIGNMENT_VALUE.decode(body, 0)
    latest = max(read.member_epoch, read.previous_member_epoch)  # for records of Kafka before 4.3
    return Current(
        read.member_epoch,
        read.previous_member_epoch,
        MemberState(read.state),
        _partitions(read.assigned_partitions),
        _partitions(read.partitions_pending_revocation),
        {
            (topic.topic_id, index): epoch
            for topic in (*read.assigned_partitions, *read.partitions_pending_revocation)
            for index, epoch in zip_longest(topic.partitions, topic.assignment_epochs or (), fillvalue=latest)
        },
    )


def _partitions(topics: Iterable[log.CurrentTopicPartitions | log.TargetTopicPartitions]) -> Partitions:
    return frozenset((topic.topic_id, index) for topic in topics for index in topic.partitions)


def by_topic(partitions: Partitions) -> dict[bytes, list[int]]:
    """Partitions as most messages list them."""
    topics: dict[bytes, list[int]] = {}
    for topic_id, index in sorted(partitions):
        topics.setdefault(topic_id, []).append(index)
    return topics
