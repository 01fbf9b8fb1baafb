"""Changes of consumer groups as records of `__consumer_offsets`, and back."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from semel.broker.coordinator_runtime import KeyValue
from semel.broker.groups.consumer.model import (
    Change,
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

EPOCH, MEMBER, TARGET_EPOCH, TARGET, CURRENT = 3, 5, 6, 7, 8
KINDS = frozenset((EPOCH, MEMBER, TARGET_EPOCH, TARGET, CURRENT))
_KIND = struct.Struct(">h")
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
    """The change that a record of one of KINDS tells of."""
    body = None if value is None else value[_KIND.size :]
    if kind == EPOCH:
        return _read_epoch(log.CONSUMER_GROUP_METADATA_KEY.decode(key, 0, _KIND.size).group_id, body)
    if kind == TARGET_EPOCH:
        group_id = log.CONSUMER_GROUP_TARGET_ASSIGNMENT_METADATA_KEY.decode(key, 0, _KIND.size).group_id
        if body is None:
            return TargetEpochSet(group_id, None)
        read = log.CONSUMER_GROUP_TARGET_ASSIGNMENT_METADATA_VALUE.decode(body, 0)
        return TargetEpochSet(group_id, read.assignment_epoch, read.assignment_timestamp)
    member = log.CONSUMER_GROUP_MEMBER_METADATA_KEY.decode(key, 0, _KIND.size)
    if kind == MEMBER:
        return SubscriptionSet(member.group_id, member.member_id, None if body is None else _read_member(body))
    if kind == TARGET:
        return TargetSet(member.group_id, member.member_id, None if body is None else _read_target(body))
    return CurrentSet(member.group_id, member.member_id, None if body is None else _read_current(body))


def _record(kind: int, key: bytes, value: bytes | None) -> KeyValue:
    return _KIND.pack(kind) + key, None if value is None else _VERSION + value


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
        ),
        0,
    )


def _read_member(body: bytes) -> Subscription:
    read = log.CONSUMER_GROUP_MEMBER_METADATA_VALUE.decode(body, 0)
    return Subscription(
        read.instance_id,
        read.rack_id,
        read.client_id,
        read.client_host,
        tuple(read.subscribed_topic_names),
        read.subscribed_topic_regex or None,
        read.rebalance_timeout_ms,
        read.server_assignor,
    )


def _target_value(partitions: Partitions) -> bytes:
    topics = [log.TargetTopicPartitions(*entry) for entry in by_topic(partitions).items()]
    return log.CONSUMER_GROUP_TARGET_ASSIGNMENT_MEMBER_VALUE.encode(
        log.ConsumerGroupTargetAssignmentMemberValue(topics), 0
    )


def _read_target(body: bytes) -> Partitions:
    read = log.CONSUMER_GROUP_TARGET_ASSIGNMENT_MEMBER_VALUE.decode(body, 0)
    return frozenset((topic.topic_id, index) for topic in read.topic_partitions for index in topic.partitions)


def _current_value(value: Current) -> bytes:
    return log.CONSUMER_GROUP_CURRENT_MEMBER_ASSIGNMENT_VALUE.encode(
        log.ConsumerGroupCurrentMemberAssignmentValue(
            value.epoch,
            value.previous_epoch,
            int(value.state),
            [log.CurrentTopicPartitions(*entry) for entry in by_topic(value.assigned).items()],
            [log.CurrentTopicPartitions(*entry) for entry in by_topic(value.revoking).items()],
        ),
        0,
    )


def _read_current(body: bytes) -> Current:
    read = log.CONSUMER_GROUP_CURRENT_MEMBER_ASSIGNMENT_VALUE.decode(body, 0)
    return Current(
        read.member_epoch,
        read.previous_member_epoch,
        MemberState(read.state),
        _partitions(read.assigned_partitions),
        _partitions(read.partitions_pending_revocation),
    )


def _partitions(topics: Iterable[log.CurrentTopicPartitions]) -> Partitions:
    return frozenset((topic.topic_id, index) for topic in topics for index in topic.partitions)


def by_topic(partitions: Partitions) -> dict[bytes, list[int]]:
    """Partitions as most messages list them."""
    topics: dict[bytes, list[int]] = {}
    for topic_id, index in sorted(partitions):
        topics.setdefault(topic_id, []).append(index)
    return topics
