"""Creating, changing and placing topics and their partitions."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Api
from semel.protocol.schema import NO_UUID, Struct, ignorable, int8, int16, int32, int64, nullable, tag, uuid, versions


# CreateTopics (19): create topics.
class CreatableReplicaAssignment(Struct):
    partition_index: int32 = 0
    broker_ids: list[int32] = []


class CreatableTopicConfig(Struct):
    name: str = ""
    value: str | None = ""


class CreatableTopic(Struct):
    name: str = ""
    num_partitions: int32 = 0
    replication_factor: int16 = 0
    assignments: list[CreatableReplicaAssignment] = []
    configs: list[CreatableTopicConfig] = []


class CreateTopicsRequest(Struct):
    topics: list[CreatableTopic] = []
    timeout_ms: int32 = 60000
    validate_only: bool = False


class CreatableTopicConfigs(Struct):
    name: str = ""
    value: str | None = ""
    read_only: bool = False
    config_source: int8 = -1
    is_sensitive: bool = False


class CreatableTopicResult(Struct):
    name: str = ""
    topic_id: Annotated[uuid, versions("7+"), ignorable] = NO_UUID
    error_code: int16 = 0
    error_message: str | None = ""
    topic_config_error_code: Annotated[int16, versions("5+"), tag(0), ignorable] = 0
    num_partitions: Annotated[int32, versions("5+"), ignorable] = -1
    replication_factor: Annotated[int16, versions("5+"), ignorable] = -1
    configs: Annotated[list[CreatableTopicConfigs] | None, versions("5+"), ignorable] = []


class CreateTopicsResponse(Struct):
    throttle_time_ms: int32 = 0
    topics: list[CreatableTopicResult] = []


CREATE_TOPICS = Api(19, CreateTopicsRequest, CreateTopicsResponse, "2-7", flexible="5+")


# DeleteTopics (20): delete topics, by name or id.
class DeleteTopicState(Struct):
    name: str | None = None
    topic_id: uuid = NO_UUID


class DeleteTopicsRequest(Struct):
    topics: Annotated[list[DeleteTopicState], versions("6+")] = []
    topic_names: Annotated[list[str], versions("1-5"), ignorable] = []
    timeout_ms: int32 = 0


class DeletableTopicResult(Struct):
    name: Annotated[str | None, nullable("6+")] = ""
    topic_id: Annotated[uuid, versions("6+"), ignorable] = NO_UUID
    error_code: int16 = 0
    error_message: Annotated[str | None, versions("5+"), ignorable] = None


class DeleteTopicsResponse(Struct):
    throttle_time_ms: int32 = 0
    responses: list[DeletableTopicResult] = []


DELETE_TOPICS = Api(20, DeleteTopicsRequest, DeleteTopicsResponse, "1-6", flexible="4+")


# CreatePartitions (37): give topics more partitions.
class CreatePartitionsAssignment(Struct):
    broker_ids: list[int32] = []


class CreatePartitionsTopic(Struct):
    name: str = ""
    count: int32 = 0
    assignments: list[CreatePartitionsAssignment] | None = []


class CreatePartitionsRequest(Struct):
    topics: list[CreatePartitionsTopic] = []
    timeout_ms: int32 = 0
    validate_only: bool = False


class CreatePartitionsTopicResult(Struct):
    name: str = ""
    error_code: int16 = 0
    error_message: str | None = None


class CreatePartitionsResponse(Struct):
    throttle_time_ms: int32 = 0
    results: list[CreatePartitionsTopicResult] = []


CREATE_PARTITIONS = Api(37, CreatePartitionsRequest, CreatePartitionsResponse, "0-3", flexible="2+")


# ElectLeaders (43): ask for the election of partition leaders.
class PartitionsOfTopic(Struct):
    topic: str = ""
    partitions: list[int32] = []


class ElectLeadersRequest(Struct):
    election_type: Annotated[int8, versions("1+")] = 0
    topic_partitions: list[PartitionsOfTopic] | None = []
    timeout_ms: int32 = 60000


class PartitionResult(Struct):
    partition_id: int32 = 0
    error_code: int16 = 0
    error_message: str | None = ""


class ReplicaElectionResult(Struct):
    topic: str = ""
    partition_result: list[PartitionResult] = []


class ElectLeadersResponse(Struct):
    throttle_time_ms: int32 = 0
    error_code: Annotated[int16, versions("1+")] = 0
    replica_election_results: list[ReplicaElectionResult] = []


ELECT_LEADERS = Api(43, ElectLeadersRequest, ElectLeadersResponse, "0-2", flexible="2+")


# AlterPartitionReassignments (45): move replicas between brokers.
class ReassignablePartition(Struct):
    partition_index: int32 = 0
    replicas: list[int32] | None = None


class ReassignableTopic(Struct):
    name: str = ""
    partitions: list[ReassignablePartition] = []


class AlterPartitionReassignmentsRequest(Struct):
    timeout_ms: int32 = 60000
    allow_replication_factor_change: Annotated[bool, versions("1+")] = True
    topics: list[ReassignableTopic] = []


class ReassignablePartitionResponse(Struct):
    partition_index: int32 = 0
    error_code: int16 = 0
    error_message: str | None = ""


class ReassignableTopicResponse(Struct):
    name: str = ""
    partitions: list[ReassignablePartitionResponse] = []


class AlterPartitionReassignmentsResponse(Struct):
    throttle_time_ms: int32 = 0
    allow_replication_factor_change: Annotated[bool, versions("1+"), ignorable] = True
    error_code: int16 = 0
    error_message: str | None = ""
    responses: list[ReassignableTopicResponse] = []


ALTER_PARTITION_REASSIGNMENTS = Api(
    45, AlterPartitionReassignmentsRequest, AlterPartitionReassignmentsResponse, "0-1", flexible="0+"
)


# ListPartitionReassignments (46): moves of replicas under way.
class ListPartitionReassignmentsTopics(Struct):
    name: str = ""
    partition_indexes: list[int32] = []


class ListPartitionReassignmentsRequest(Struct):
    timeout_ms: int32 = 60000
    topics: list[ListPartitionReassignmentsTopics] | None = None


class OngoingPartitionReassignment(Struct):
    partition_index: int32 = 0
    replicas: list[int32] = []
    adding_replicas: list[int32] = []
    removing_replicas: list[int32] = []


class OngoingTopicReassignment(Struct):
    name: str = ""
    partitions: list[OngoingPartitionReassignment] = []


class ListPartitionReassignmentsResponse(Struct):
    throttle_time_ms: int32 = 0
    error_code: int16 = 0
    error_message: str | None = ""
    topics: list[OngoingTopicReassignment] = []


LIST_PARTITION_REASSIGNMENTS = Api(
    46, ListPartitionReassignmentsRequest, ListPartitionReassignmentsResponse, "0", flexible="0+"
)


# AlterReplicaLogDirs (34): move replicas to another data folder.
class AlterReplicaLogDirTopic(Struct):
    name: str = ""
    partitions: list[int32] = []


class AlterReplicaLogDir(Struct):
    path: str = ""
    topics: list[AlterReplicaLogDirTopic] = []


class AlterReplicaLogDirsRequest(Struct):
    dirs: list[AlterReplicaLogDir] = []


class AlterReplicaLogDirPartitionResult(Struct):
    partition_index: int32 = 0
    error_code: int16 = 0


class AlterReplicaLogDirTopicResult(Struct):
    topic_name: str = ""
    partitions: list[AlterReplicaLogDirPartitionResult] = []


class AlterReplicaLogDirsResponse(Struct):
    throttle_time_ms: int32 = 0
    results: list[AlterReplicaLogDirTopicResult] = []


ALTER_REPLICA_LOG_DIRS = Api(34, AlterReplicaLogDirsRequest, AlterReplicaLogDirsResponse, "1-2", flexible="2+")


# DescribeLogDirs (35): sizes of the logs in each data folder.
class DescribeLogDirsRequest(Struct):
    topics: list[PartitionsOfTopic] | None = []


class DescribeLogDirsPartition(Struct):
    partition_index: int32 = 0
    partition_size: int64 = 0
    offset_lag: int64 = 0
    is_future_key: bool = False


class DescribeLogDirsTopic(Struct):
    name: str = ""
    partitions: list[DescribeLogDirsPartition] = []


class DescribeLogDirsResult(Struct):
    error_code: int16 = 0
    log_dir: str = ""
    topics: list[DescribeLogDirsTopic] = []
    total_bytes: Annotated[int64, versions("4+"), ignorable] = -1
    usable_bytes: Annotated[int64, versions("4+"), ignorable] = -1
    is_cordoned: Annotated[bool, versions("5+"), ignorable] = False


class DescribeLogDirsResponse(Struct):
    throttle_time_ms: int32 = 0
    error_code: Annotated[int16, versions("3+"), ignorable] = 0
    results: list[DescribeLogDirsResult] = []


DESCRIBE_LOG_DIRS = Api(35, DescribeLogDirsRequest, DescribeLogDirsResponse, "1-5", flexible="2+")
