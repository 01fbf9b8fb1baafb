"""ConsumerGroupHeartbeat (68): the one request of the consumer rebalance protocol of KIP-848."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Api
from semel.protocol.schema import NO_UUID, Struct, int16, int32, uuid, versions


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


class TopicPartitionsResult(Struct):
    topic_id: uuid = NO_UUID
    partitions: list[int32] = []


class Assignment(Struct):
    topic_partitions: list[TopicPartitionsResult] = []


class ConsumerGroupHeartbeatResponse(Struct):
    throttle_time_ms: int32 = 0
    error_code: int16 = 0
    error_message: str | None = None
    member_id: str | None = None
    member_epoch: int32 = 0
    heartbeat_interval_ms: int32 = 0
    assignment: Assignment | None = None


CONSUMER_GROUP_HEARTBEAT = Api(68, ConsumerGroupHeartbeatRequest, ConsumerGroupHeartbeatResponse, "0-1", flexible="0+")
