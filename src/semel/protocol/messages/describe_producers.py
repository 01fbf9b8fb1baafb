"""DescribeProducers (61): producers that are active in partitions, with their sequences and open transactions."""

from __future__ import annotations

from semel.protocol.api import Api
from semel.protocol.schema import Struct, int16, int32, int64


class TopicRequest(Struct):
    name: str = ""
    partition_indexes: list[int32] = []


class DescribeProducersRequest(Struct):
    topics: list[TopicRequest] = []


class ProducerState(Struct):
    producer_id: int64 = 0
    producer_epoch: int32 = 0
    last_sequence: int32 = -1
    last_timestamp: int64 = -1
    coordinator_epoch: int32 = 0
    current_txn_start_offset: int64 = -1


class PartitionResponse(Struct):
    partition_index: int32 = 0
    error_code: int16 = 0
    error_message: str | None = None
    active_producers: list[ProducerState] = []


class TopicResponse(Struct):
    name: str = ""
    partitions: list[PartitionResponse] = []


class DescribeProducersResponse(Struct):
    throttle_time_ms: int32 = 0
    topics: list[TopicResponse] = []


DESCRIBE_PRODUCERS = Api(61, DescribeProducersRequest, DescribeProducersResponse, "0", flexible="0+")
