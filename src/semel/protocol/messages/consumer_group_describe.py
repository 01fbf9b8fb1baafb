"""ConsumerGroupDescribe (69): state, members and assignments of KIP-848 groups."""

from __future__ import annotations

from typing import Annotated

from msgspec import field

from semel.protocol.api import Api
from semel.protocol.schema import NO_UUID, Struct, ignorable, int8, int16, int32, uuid, versions


class ConsumerGroupDescribeRequest(Struct):
    group_ids: list[str] = []
    include_authorized_operations: bool = False


class TopicPartitions(Struct):
    topic_id: uuid = NO_UUID
    topic_name: str = ""
    partitions: list[int32] = []


class Assignment(Struct):
    topic_partitions: list[TopicPartitions] = []


class Member(Struct):
    member_id: str = ""
    instance_id: str | None = None
    rack_id: str | None = None
    member_epoch: int32 = 0
    client_id: str = ""
    client_host: str = ""
    subscribed_topic_names: list[str] = []
    subscribed_topic_regex: str | None = None
    assignment: Assignment = field(default_factory=Assignment)
    target_assignment: Assignment = field(default_factory=Assignment)
    member_type: Annotated[int8, versions("1+"), ignorable] = -1


class DescribedGroup(Struct):
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
    groups: list[DescribedGroup] = []


CONSUMER_GROUP_DESCRIBE = Api(69, ConsumerGroupDescribeRequest, ConsumerGroupDescribeResponse, "0-1", flexible="0+")
