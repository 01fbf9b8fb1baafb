"""DescribeTopicPartitions (75): topics and partitions, page by page."""

from __future__ import annotations

from semel.protocol.api import Api
from semel.protocol.schema import NO_UUID, Struct, int16, int32, uuid


class TopicRequest(Struct):
    name: str = ""


class Cursor(Struct):
    topic_name: str = ""
    partition_index: int32 = 0


class DescribeTopicPartitionsRequest(Struct):
    topics: list[TopicRequest] = []
    response_partition_limit: int32 = 2000
    cursor: Cursor | None = None


class DescribeTopicPartitionsResponsePartition(Struct):
    error_code: int16 = 0
    partition_index: int32 = 0
    leader_id: int32 = 0
    leader_epoch: int32 = -1
    replica_nodes: list[int32] = []
    isr_nodes: list[int32] = []
    eligible_leader_replicas: list[int32] | None = None
    last_known_elr: list[int32] | None = None
    offline_replicas: list[int32] = []


class DescribeTopicPartitionsResponseTopic(Struct):
    error_code: int16 = 0
    name: str | None = ""
    topic_id: uuid = NO_UUID
    is_internal: bool = False
    partitions: list[DescribeTopicPartitionsResponsePartition] = []
    topic_authorized_operations: int32 = -2147483648


class CursorResult(Struct):
    topic_name: str = ""
    partition_index: int32 = 0


class DescribeTopicPartitionsResponse(Struct):
    throttle_time_ms: int32 = 0
    topics: list[DescribeTopicPartitionsResponseTopic] = []
    next_cursor: CursorResult | None = None


DESCRIBE_TOPIC_PARTITIONS = Api(75, DescribeTopicPartitionsRequest, DescribeTopicPartitionsResponse, "0", flexible="0+")
