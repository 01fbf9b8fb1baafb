"""Group membership, classic and KIP-848, and what administrators see of it."""

from __future__ import annotations

from typing import Annotated

from msgspec import field

from semel.protocol.api import Api, Format
from semel.protocol.schema import NO_UUID, Struct, ignorable, int8, int16, int32, nullable, uuid, versions


# JoinGroup (11): enter a group, or take part in its next generation.
class JoinGroupRequestProtocol(Struct):
    name: str = ""
    metadata: bytes = b""


class JoinGroupRequest(Struct):
    group_id: str = ""
    session_timeout_ms: int32 = 0
    rebalance_timeout_ms: Annotated[int32, versions("1+"), ignorable] = -1
    member_id: str = ""
    group_instance_id: Annotated[str | None, versions("5+")] = None
    protocol_type: str = ""
    protocols: list[JoinGroupRequestProtocol] = []
    reason: Annotated[str | None, versions("8+"), ignorable] = None


class JoinGroupResponseMember(Struct):
    member_id: str = ""
    group_instance_id: Annotated[str | None, versions("5+"), ignorable] = None
    metadata: bytes = b""


class JoinGroupResponse(Struct):
    throttle_time_ms: Annotated[int32, versions("2+"), ignorable] = 0
    error_code: int16 = 0
    generation_id: int32 = -1
    protocol_type: Annotated[str | None, versions("7+"), ignorable] = None
    protocol_name: Annotated[str | None, nullable("7+")] = ""
    leader: str = ""
    skip_assignment: Annotated[bool, versions("9+")] = False
    member_id: str = ""
    members: list[JoinGroupResponseMember] = []


JOIN_GROUP = Api(11, JoinGroupRequest, JoinGroupResponse, "0-9", flexible="6+")


# SyncGroup (14): hand in (the leader) and receive (everyone) a generation's assignment.
class SyncGroupRequestAssignment(Struct):
    member_id: str = ""
    assignment: bytes = b""


class SyncGroupRequest(Struct):
    group_id: str = ""
    generation_id: int32 = 0
    member_id: str = ""
    group_instance_id: Annotated[str | None, versions("3+")] = None
    protocol_type: Annotated[str | None, versions("5+"), ignorable] = None
    protocol_name: Annotated[str | None, versions("5+"), ignorable] = None
    assignments: list[SyncGroupRequestAssignment] = []


class SyncGroupResponse(Struct):
    throttle_time_ms: Annotated[int32, versions("1+"), ignorable] = 0
    error_code: int16 = 0
    protocol_type: Annotated[str | None, versions("5+"), ignorable] = None
    protocol_name: Annotated[str | None, versions("5+"), ignorable] = None
    assignment: bytes = b""


SYNC_GROUP = Api(14, SyncGroupRequest, SyncGroupResponse, "0-5", flexible="4+")


# Heartbeat (12): stay a member of a group, and hear of rebalances.
class HeartbeatRequest(Struct):
    group_id: str = ""
    generation_id: int32 = 0
    member_id: str = ""
    group_instance_id: Annotated[str | None, versions("3+")] = None


class HeartbeatResponse(Struct):
    throttle_time_ms: Annotated[int32, versions("1+"), ignorable] = 0
    error_code: int16 = 0


HEARTBEAT = Api(12, HeartbeatRequest, HeartbeatResponse, "0-4", flexible="4+")


# LeaveGroup (13): leave a group at once, instead of by timeout.
class MemberIdentity(Struct):
    member_id: str = ""
    group_instance_id: str | None = None
    reason: Annotated[str | None, versions("5+"), ignorable] = None


class LeaveGroupRequest(Struct):
    group_id: str = ""
    member_id: Annotated[str, versions("0-2")] = ""
    members: Annotated[list[MemberIdentity], versions("3+")] = []


class MemberResponse(Struct):
    member_id: str = ""
    group_instance_id: str | None = ""
    error_code: int16 = 0


class LeaveGroupResponse(Struct):
    throttle_time_ms: Annotated[int32, versions("1+"), ignorable] = 0
    error_code: int16 = 0
    members: Annotated[list[MemberResponse], versions("3+")] = []


LEAVE_GROUP = Api(13, LeaveGroupRequest, LeaveGroupResponse, "0-5", flexible="4+")


# ConsumerGroupHeartbeat (68): the one request of the consumer rebalance protocol of KIP-848.
class TopicPartitions(Struct):
    topic_id: uuid = NO_UUID
    partitions: list[int32] = []


class ConsumerGroupHeartbeatRequest(Struct):
    group_id: str = ""
    member_id: str = ""
    member_epoch: int32 = 0
    instance_id: str | None = None
    rack_id: str | None = None
    rebalance_timeout_ms: int32 = -1
    subscribed_topic_names: list[str] | None = None
    subscribed_topic_regex: Annotated[str | None, versions("1+")] = None
    server_assignor: str | None = None
    topic_partitions: list[TopicPartitions] | None = None


class Assignment(Struct):
    topic_partitions: list[TopicPartitions] = []


class ConsumerGroupHeartbeatResponse(Struct):
    throttle_time_ms: int32 = 0
    error_code: int16 = 0
    error_message: str | None = None
    member_id: str | None = None
    member_epoch: int32 = 0
    heartbeat_interval_ms: int32 = 0
    assignment: Assignment | None = None


CONSUMER_GROUP_HEARTBEAT = Api(68, ConsumerGroupHeartbeatRequest, ConsumerGroupHeartbeatResponse, "0-1", flexible="0+")


# DescribeGroups (15): state, members and assignments of groups.
class DescribeGroupsRequest(Struct):
    groups: list[str] = []
    include_authorized_operations: Annotated[bool, versions("3+")] = False


class DescribedGroupMember(Struct):
    member_id: str = ""
    group_instance_id: Annotated[str | None, versions("4+"), ignorable] = None
    client_id: str = ""
    client_host: str = ""
    member_metadata: bytes = b""
    member_assignment: bytes = b""


class DescribedGroup(Struct):
    error_code: int16 = 0
    error_message: Annotated[str | None, versions("6+")] = None
    group_id: str = ""
    group_state: str = ""
    protocol_type: str = ""
    protocol_data: str = ""
    members: list[DescribedGroupMember] = []
    authorized_operations: Annotated[int32, versions("3+")] = -2147483648


class DescribeGroupsResponse(Struct):
    throttle_time_ms: Annotated[int32, versions("1+"), ignorable] = 0
    groups: list[DescribedGroup] = []


DESCRIBE_GROUPS = Api(15, DescribeGroupsRequest, DescribeGroupsResponse, "0-6", flexible="5+")


# ConsumerGroupDescribe (69): state, members and assignments of KIP-848 groups.
class ConsumerGroupDescribeRequest(Struct):
    group_ids: list[str] = []
    include_authorized_operations: bool = False


class ConsumerTopicPartitions(Struct):
    topic_id: uuid = NO_UUID
    topic_name: str = ""
    partitions: list[int32] = []


class ConsumerAssignment(Struct):
    topic_partitions: list[ConsumerTopicPartitions] = []


class Member(Struct):
    member_id: str = ""
    instance_id: str | None = None
    rack_id: str | None = None
    member_epoch: int32 = 0
    client_id: str = ""
    client_host: str = ""
    subscribed_topic_names: list[str] = []
    subscribed_topic_regex: str | None = None
    assignment: ConsumerAssignment = field(default_factory=ConsumerAssignment)
    target_assignment: ConsumerAssignment = field(default_factory=ConsumerAssignment)
    member_type: Annotated[int8, versions("1+"), ignorable] = -1


class DescribedConsumerGroup(Struct):
    error_code: int16 = 0
    error_message: str | None = None
    group_id: str = ""
    group_state: str = ""
    group_epoch: int32 = 0
    assignment_epoch: int32 = 0
    assignor_name: str = ""
    members: list[Member] = []
    authorized_operations: int32 = -2147483648


class ConsumerGroupDescribeResponse(Struct):
    throttle_time_ms: int32 = 0
    groups: list[DescribedConsumerGroup] = []


CONSUMER_GROUP_DESCRIBE = Api(69, ConsumerGroupDescribeRequest, ConsumerGroupDescribeResponse, "0-1", flexible="0+")


# ListGroups (16): all groups that a broker coordinates.
class ListGroupsRequest(Struct):
    states_filter: Annotated[list[str], versions("4+")] = []
    types_filter: Annotated[list[str], versions("5+")] = []


class ListedGroup(Struct):
    group_id: str = ""
    protocol_type: str = ""
    group_state: Annotated[str, versions("4+"), ignorable] = ""
    group_type: Annotated[str, versions("5+"), ignorable] = ""


class ListGroupsResponse(Struct):
    throttle_time_ms: Annotated[int32, versions("1+"), ignorable] = 0
    error_code: int16 = 0
    groups: list[ListedGroup] = []


LIST_GROUPS = Api(16, ListGroupsRequest, ListGroupsResponse, "0-5", flexible="3+")


# DeleteGroups (42): delete groups and their committed offsets.
class DeleteGroupsRequest(Struct):
    groups_names: list[str] = []


class DeletableGroupResult(Struct):
    group_id: str = ""
    error_code: int16 = 0


class DeleteGroupsResponse(Struct):
    throttle_time_ms: int32 = 0
    results: list[DeletableGroupResult] = []


DELETE_GROUPS = Api(42, DeleteGroupsRequest, DeleteGroupsResponse, "0-2", flexible="2+")


# What consumers hand each other inside JoinGroup and SyncGroup: subscriptions and assignments.
class ConsumerProtocolTopic(Struct):
    topic: str = ""
    partitions: list[int32] = []


class ConsumerProtocolSubscription(Struct):
    """What a member wants, and what it owns."""

    topics: list[str] = []
    user_data: bytes | None = None
    owned_partitions: Annotated[list[ConsumerProtocolTopic], versions("1+"), ignorable] = []
    generation_id: Annotated[int32, versions("2+"), ignorable] = -1
    rack_id: Annotated[str | None, versions("3+"), ignorable] = None


class ConsumerProtocolAssignment(Struct):
    """What a member is given."""

    assigned_partitions: list[ConsumerProtocolTopic] = []
    user_data: bytes | None = None


CONSUMER_SUBSCRIPTION = Format(ConsumerProtocolSubscription, "0-3")
CONSUMER_ASSIGNMENT = Format(ConsumerProtocolAssignment, "0-3")
