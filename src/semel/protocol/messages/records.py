"""Writing, reading and looking up records: Produce, Fetch, ListOffsets, OffsetForLeaderEpoch, DeleteRecords."""

from __future__ import annotations

from typing import Annotated

from msgspec import field

from semel.protocol.api import Api
from semel.protocol.schema import NO_UUID, Struct, ignorable, int8, int16, int32, int64, record_set, tag, uuid, versions


# Produce (0): append record batches to partitions.
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


# Fetch (1): read record batches from partitions, waiting for new ones if asked to.
class ReplicaState(Struct):
    replica_id: int32 = -1
    replica_epoch: int64 = -1


class FetchPartition(Struct):
    partition: int32 = 0
    current_leader_epoch: Annotated[int32, versions("9+"), ignorable] = -1
    fetch_offset: int64 = 0
    last_fetched_epoch: Annotated[int32, versions("12+")] = -1
    log_start_offset: Annotated[int64, versions("5+"), ignorable] = -1
    partition_max_bytes: int32 = 0
    replica_directory_id: Annotated[uuid, versions("17+"), tag(0), ignorable] = NO_UUID
    high_watermark: Annotated[int64, versions("18+"), tag(1), ignorable] = 9223372036854775807


class FetchTopic(Struct):
    topic: Annotated[str, versions("4-12"), ignorable] = ""
    topic_id: Annotated[uuid, versions("13+"), ignorable] = NO_UUID
    partitions: list[FetchPartition] = []


class ForgottenTopic(Struct):
    topic: Annotated[str, versions("7-12"), ignorable] = ""
    topic_id: Annotated[uuid, versions("13+"), ignorable] = NO_UUID
    partitions: list[int32] = []


class FetchRequest(Struct):
    cluster_id: Annotated[str | None, versions("12+"), tag(0), ignorable] = None
    replica_id: Annotated[int32, versions("4-14")] = -1
    replica_state: Annotated[ReplicaState, versions("15+"), tag(1)] = field(default_factory=ReplicaState)
    max_wait_ms: int32 = 0
    min_bytes: int32 = 0
    max_bytes: int32 = 0x7FFFFFFF
    isolation_level: int8 = 0
    session_id: Annotated[int32, versions("7+"), ignorable] = 0
    session_epoch: Annotated[int32, versions("7+"), ignorable] = -1
    topics: list[FetchTopic] = []
    forgotten_topics_data: Annotated[list[ForgottenTopic], versions("7+")] = []
    rack_id: Annotated[str, versions("11+"), ignorable] = ""


class EpochEndOffset(Struct):
    epoch: int32 = -1
    end_offset: int64 = -1


class SnapshotId(Struct):
    end_offset: int64 = -1
    epoch: int32 = -1


class AbortedTransaction(Struct):
    producer_id: int64 = 0
    first_offset: int64 = 0


class PartitionData(Struct):
    partition_index: int32 = 0
    error_code: int16 = 0
    high_watermark: int64 = 0
    last_stable_offset: int64 = -1
    log_start_offset: Annotated[int64, versions("5+"), ignorable] = -1
    diverging_epoch: Annotated[EpochEndOffset, versions("12+"), tag(0)] = field(default_factory=EpochEndOffset)
    current_leader: Annotated[LeaderIdAndEpoch, versions("12+"), tag(1)] = field(default_factory=LeaderIdAndEpoch)
    snapshot_id: Annotated[SnapshotId, versions("12+"), tag(2)] = field(default_factory=SnapshotId)
    aborted_transactions: list[AbortedTransaction] | None = []
    preferred_read_replica: Annotated[int32, versions("11+")] = -1
    records: record_set | None = None


class FetchableTopicResponse(Struct):
    topic: Annotated[str, versions("4-12"), ignorable] = ""
    topic_id: Annotated[uuid, versions("13+"), ignorable] = NO_UUID
    partitions: list[PartitionData] = []


class FetchResponse(Struct):
    throttle_time_ms: int32 = 0
    error_code: Annotated[int16, versions("7+"), ignorable] = 0
    session_id: Annotated[int32, versions("7+")] = 0
    responses: list[FetchableTopicResponse] = []
    node_endpoints: Annotated[list[NodeEndpoint], versions("16+"), tag(0)] = []


FETCH = Api(1, FetchRequest, FetchResponse, "4-18", flexible="12+")


# ListOffsets (2): find the offset for a time, or the first, last and newest-stamped one.
class ListOffsetsPartition(Struct):
    partition_index: int32 = 0
    current_leader_epoch: Annotated[int32, versions("4+"), ignorable] = -1
    timestamp: int64 = 0


class ListOffsetsTopic(Struct):
    name: str = ""
    partitions: list[ListOffsetsPartition] = []


class ListOffsetsRequest(Struct):
    replica_id: int32 = 0
    isolation_level: Annotated[int8, versions("2+")] = 0
    topics: list[ListOffsetsTopic] = []
    timeout_ms: Annotated[int32, versions("10+"), ignorable] = 0


class ListOffsetsPartitionResponse(Struct):
    partition_index: int32 = 0
    error_code: int16 = 0
    timestamp: int64 = -1
    offset: int64 = -1
    leader_epoch: Annotated[int32, versions("4+")] = -1


class ListOffsetsTopicResponse(Struct):
    name: str = ""
    partitions: list[ListOffsetsPartitionResponse] = []


class ListOffsetsResponse(Struct):
    throttle_time_ms: Annotated[int32, versions("2+"), ignorable] = 0
    topics: list[ListOffsetsTopicResponse] = []


LIST_OFFSETS = Api(2, ListOffsetsRequest, ListOffsetsResponse, "1-11", flexible="6+")


# OffsetForLeaderEpoch (23): where a leader epoch ends: lets a consumer notice truncation.
class OffsetForLeaderPartition(Struct):
    partition: int32 = 0
    current_leader_epoch: int32 = -1
    leader_epoch: int32 = 0


class OffsetForLeaderTopic(Struct):
    topic: str = ""
    partitions: list[OffsetForLeaderPartition] = []


class OffsetForLeaderEpochRequest(Struct):
    replica_id: Annotated[int32, versions("3+"), ignorable] = -2
    topics: list[OffsetForLeaderTopic] = []


class LeaderEpochEndOffset(Struct):
    error_code: int16 = 0
    partition: int32 = 0
    leader_epoch: int32 = -1
    end_offset: int64 = -1


class OffsetForLeaderTopicResult(Struct):
    topic: str = ""
    partitions: list[LeaderEpochEndOffset] = []


class OffsetForLeaderEpochResponse(Struct):
    throttle_time_ms: int32 = 0
    topics: list[OffsetForLeaderTopicResult] = []


OFFSET_FOR_LEADER_EPOCH = Api(23, OffsetForLeaderEpochRequest, OffsetForLeaderEpochResponse, "2-4", flexible="4+")


# DeleteRecords (21): raise the first offset of partitions.
class DeleteRecordsPartition(Struct):
    partition_index: int32 = 0
    offset: int64 = 0


class DeleteRecordsTopic(Struct):
    name: str = ""
    partitions: list[DeleteRecordsPartition] = []


class DeleteRecordsRequest(Struct):
    topics: list[DeleteRecordsTopic] = []
    timeout_ms: int32 = 0


class DeleteRecordsPartitionResult(Struct):
    partition_index: int32 = 0
    low_watermark: int64 = 0
    error_code: int16 = 0


class DeleteRecordsTopicResult(Struct):
    name: str = ""
    partitions: list[DeleteRecordsPartitionResult] = []


class DeleteRecordsResponse(Struct):
    throttle_time_ms: int32 = 0
    topics: list[DeleteRecordsTopicResult] = []


DELETE_RECORDS = Api(21, DeleteRecordsRequest, DeleteRecordsResponse, "0-2", flexible="2+")
