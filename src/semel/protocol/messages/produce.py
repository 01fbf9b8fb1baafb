"""Produce (0): append record batches to partitions."""

from __future__ import annotations

from typing import Annotated

from msgspec import field

from semel.protocol.api import Api
from semel.protocol.schema import NO_UUID, Struct, ignorable, int16, int32, int64, record_set, tag, uuid, versions


class PartitionProduceData(Struct):
    index: int32 = 0
    records: record_set | None = None


class TopicProduceData(Struct):
    name: Annotated[str, versions("3-12"), ignorable] = ""
    topic_id: Annotated[uuid, versions("13+"), ignorable] = NO_UUID
    partition_data: list[PartitionProduceData] = []


class ProduceRequest(Struct):
    transactional_id: str | None = None
    acks: int16 = 0
    timeout_ms: int32 = 0
    topic_data: list[TopicProduceData] = []


class BatchIndexAndErrorMessage(Struct):
    batch_index: int32 = 0
    batch_index_error_message: str | None = None


class LeaderIdAndEpoch(Struct):
    leader_id: int32 = -1
    leader_epoch: int32 = -1


class PartitionProduceResponse(Struct):
    index: int32 = 0
    error_code: int16 = 0
    base_offset: int64 = 0
    log_append_time_ms: int64 = -1
    log_start_offset: Annotated[int64, versions("5+"), ignorable] = -1
    record_errors: Annotated[list[BatchIndexAndErrorMessage], versions("8+"), ignorable] = []
    error_message: Annotated[str | None, versions("8+"), ignorable] = None
    current_leader: Annotated[LeaderIdAndEpoch, versions("10+"), tag(0)] = field(default_factory=LeaderIdAndEpoch)


class TopicProduceResponse(Struct):
    name: Annotated[str, versions("3-12"), ignorable] = ""
    topic_id: Annotated[uuid, versions("13+"), ignorable] = NO_UUID
    partition_responses: list[PartitionProduceResponse] = []


class NodeEndpoint(Struct):
    node_id: int32 = 0
    host: str = ""
    port: int32 = 0
    rack: str | None = None


class ProduceResponse(Struct):
    responses: list[TopicProduceResponse] = []
    throttle_time_ms: int32 = 0
    node_endpoints: Annotated[list[NodeEndpoint], versions("10+"), tag(0)] = []


PRODUCE = Api(0, ProduceRequest, ProduceResponse, "3-13", flexible="9+")
