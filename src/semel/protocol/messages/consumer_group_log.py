"""The records of `__consumer_offsets` about groups of the consumer protocol (KIP-848).

What stands in a key's first two bytes says which of them it is: 3, 5, 6, 7 or 8.
"""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Format
from semel.protocol.schema import NO_UUID, Struct, ignorable, int8, int32, int64, tag, uuid


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


class ConsumerGroupTargetAssignmentMemberKey(Struct):
    group_id: str = ""
    member_id: str = ""


class TargetTopicPartitions(Struct):
    topic_id: uuid = NO_UUID
    partitions: list[int32] = []


class ConsumerGroupTargetAssignmentMemberValue(Struct):
    """What a member shall have."""

    topic_partitions: list[TargetTopicPartitions] = []


class ConsumerGroupCurrentMemberAssignmentKey(Struct):
    group_id: str = ""
    member_id: str = ""


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
CONSUMER_GROUP_TARGET_ASSIGNMENT_MEMBER_KEY = Format(ConsumerGroupTargetAssignmentMemberKey, "0")
CONSUMER_GROUP_TARGET_ASSIGNMENT_MEMBER_VALUE = Format(ConsumerGroupTargetAssignmentMemberValue, "0", flexible="0+")
CONSUMER_GROUP_CURRENT_MEMBER_ASSIGNMENT_KEY = Format(ConsumerGroupCurrentMemberAssignmentKey, "0")
CONSUMER_GROUP_CURRENT_MEMBER_ASSIGNMENT_VALUE = Format(ConsumerGroupCurrentMemberAssignmentValue, "0", flexible="0+")
