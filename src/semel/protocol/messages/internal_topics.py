"""Records of the internal topics: `__transaction_state` and `__consumer_offsets`, classic and KIP-848."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Format
from semel.protocol.schema import NO_UUID, Struct, ignorable, int8, int16, int32, int64, tag, uuid, versions


# The records of `__transaction_state`: the state of a transactional id, keyed by it.
class TransactionLogKey(Struct):
    """Which transactional id a record is about."""

    transactional_id: str = ""


class PartitionsSchema(Struct):
    topic: str = ""
    partition_ids: list[int32] = []


class TransactionLogValue(Struct):
    """Owner, state and partitions of a transactional id."""

    producer_id: int64 = 0
    previous_producer_id: Annotated[int64, tag(0, "1+")] = -1
    next_producer_id: Annotated[int64, tag(1, "1+")] = -1
    producer_epoch: int16 = 0
    next_producer_epoch: Annotated[int16, tag(3, "1+")] = -1
    transaction_timeout_ms: int32 = 0
    transaction_status: int8 = 0
    transaction_partitions: list[PartitionsSchema] | None = []
    transaction_last_update_timestamp_ms: int64 = 0
    transaction_start_timestamp_ms: int64 = 0
    client_transaction_version: Annotated[int16, tag(2, "1+")] = 0


TRANSACTION_LOG_KEY = Format(TransactionLogKey, "0")
TRANSACTION_LOG_VALUE = Format(TransactionLogValue, "0-1", flexible="1+")


# The records of `__consumer_offsets`: committed offsets, and the groups themselves.
class OffsetCommitKey(Struct):
    """Which group, topic and partition a committed offset belongs to (key versions 0 and 1)."""

    group: str = ""
    topic: str = ""
    partition: int32 = 0


class OffsetCommitValue(Struct):
    offset: int64 = 0
    leader_epoch: Annotated[int32, versions("3+"), ignorable] = -1
    metadata: str = ""
    commit_timestamp: int64 = 0
    expire_timestamp: Annotated[int64, versions("1"), ignorable] = -1
    topic_id: Annotated[uuid, versions("4+"), tag(0), ignorable] = NO_UUID


class GroupMetadataKey(Struct):
    """Which classic group a record is about (key version 2)."""

    group: str = ""


class MemberMetadata(Struct):
    member_id: str = ""
    group_instance_id: Annotated[str | None, versions("3+"), ignorable] = None
    client_id: str = ""
    client_host: str = ""
    rebalance_timeout: Annotated[int32, versions("1+"), ignorable] = -1
    session_timeout: int32 = 0
    subscription: bytes = b""
    assignment: bytes = b""


class GroupMetadataValue(Struct):
    """A generation of a classic group: protocol, leader and members."""

    protocol_type: str = ""
    generation: int32 = 0
    protocol: str | None = ""
    leader: str | None = ""
    current_state_timestamp: Annotated[int64, versions("2+"), ignorable] = -1
    members: list[MemberMetadata] = []


OFFSET_COMMIT_KEY = Format(OffsetCommitKey, "0")
OFFSET_COMMIT_VALUE = Format(OffsetCommitValue, "0-4", flexible="4+")
GROUP_METADATA_KEY = Format(GroupMetadataKey, "0")
GROUP_METADATA_VALUE = Format(GroupMetadataValue, "0-4", flexible="4+")


# The records of `__consumer_offsets` about groups of the consumer protocol (KIP-848).
#
# What stands in a key's first two bytes says which of them it is: 3, 5, 6, 7 or 8.
class ConsumerGroupMetadataKey(Struct):
    group_id: str = ""


class ConsumerGroupMetadataValue(Struct):
    """The group's epoch, raised with every change of members, subscriptions or topics."""

    epoch: int32 = 0
    metadata_hash: Annotated[int64, tag(0)] = 0


class ConsumerGroupMemberMetadataKey(Struct):
    group_id: str = ""
    member_id: str = ""


class ClassicProtocol(Struct):
    name: str = ""
    metadata: bytes = b""


class ClassicMemberMetadata(Struct):
    session_timeout_ms: int32 = 0
    supported_protocols: list[ClassicProtocol] = []


class ConsumerGroupMemberMetadataValue(Struct):
    """Who a member is and what it wants."""

    instance_id: str | None = None
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    subscribed_topic_names: list[str] = []
    subscribed_topic_regex: str | None = None
    rebalance_timeout_ms: int32 = -1
    server_assignor: str | None = None
    classic_member_metadata: Annotated[ClassicMemberMetadata | None, tag(0)] = None


class ConsumerGroupTargetAssignmentMetadataKey(Struct):
    group_id: str = ""


class ConsumerGroupTargetAssignmentMetadataValue(Struct):
    """The group epoch that the target assignment was made for."""

    assignment_epoch: int32 = 0
    assignment_timestamp: Annotated[int64, tag(0), ignorable] = 0


class TargetTopicPartitions(Struct):
    topic_id: uuid = NO_UUID
    partitions: list[int32] = []


class ConsumerGroupTargetAssignmentMemberValue(Struct):
    """What a member shall have."""

    topic_partitions: list[TargetTopicPartitions] = []


class CurrentTopicPartitions(Struct):
    topic_id: uuid = NO_UUID
    partitions: list[int32] = []
    assignment_epochs: Annotated[list[int32] | None, tag(0)] = None


class ConsumerGroupCurrentMemberAssignmentValue(Struct):
    """What a member has, and what it still has to give back."""

    member_epoch: int32 = 0
    previous_member_epoch: int32 = 0
    state: int8 = 0
    assigned_partitions: list[CurrentTopicPartitions] = []
    partitions_pending_revocation: list[CurrentTopicPartitions] = []


CONSUMER_GROUP_METADATA_KEY = Format(ConsumerGroupMetadataKey, "0")
CONSUMER_GROUP_METADATA_VALUE = Format(ConsumerGroupMetadataValue, "0", flexible="0+")
CONSUMER_GROUP_MEMBER_METADATA_KEY = Format(ConsumerGroupMemberMetadataKey, "0")
CONSUMER_GROUP_MEMBER_METADATA_VALUE = Format(ConsumerGroupMemberMetadataValue, "0", flexible="0+")
CONSUMER_GROUP_TARGET_ASSIGNMENT_METADATA_KEY = Format(ConsumerGroupTargetAssignmentMetadataKey, "0")
CONSUMER_GROUP_TARGET_ASSIGNMENT_METADATA_VALUE = Format(ConsumerGroupTargetAssignmentMetadataValue, "0", flexible="0+")
CONSUMER_GROUP_TARGET_ASSIGNMENT_MEMBER_VALUE = Format(ConsumerGroupTargetAssignmentMemberValue, "0", flexible="0+")
CONSUMER_GROUP_CURRENT_MEMBER_ASSIGNMENT_VALUE = Format(ConsumerGroupCurrentMemberAssignmentValue, "0", flexible="0+")
