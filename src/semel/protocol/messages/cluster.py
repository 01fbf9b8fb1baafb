"""What a client learns about a cluster: versions, brokers, topics, coordinators, the quorum, features."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Api
from semel.protocol.schema import (
    NO_UUID,
    Struct,
    ignorable,
    int8,
    int16,
    int32,
    int64,
    nullable,
    tag,
    uint16,
    uuid,
    versions,
)


# ApiVersions (18): which APIs, versions and features a broker has. The first request of most clients.
class ApiVersionsRequest(Struct):
    client_software_name: Annotated[str, versions("3+"), ignorable] = ""
    client_software_version: Annotated[str, versions("3+"), ignorable] = ""


class ApiVersion(Struct):
    api_key: int16 = 0
    min_version: int16 = 0
    max_version: int16 = 0


class SupportedFeatureKey(Struct):
    name: str = ""
    min_version: int16 = 0
    max_version: int16 = 0


class FinalizedFeatureKey(Struct):
    name: str = ""
    max_version_level: int16 = 0
    min_version_level: int16 = 0


class ApiVersionsResponse(Struct):
    error_code: int16 = 0
    api_keys: list[ApiVersion] = []
    throttle_time_ms: Annotated[int32, versions("1+"), ignorable] = 0
    supported_features: Annotated[list[SupportedFeatureKey], versions("3+"), tag(0), ignorable] = []
    finalized_features_epoch: Annotated[int64, versions("3+"), tag(1), ignorable] = -1
    finalized_features: Annotated[list[FinalizedFeatureKey], versions("3+"), tag(2), ignorable] = []
    zk_migration_ready: Annotated[bool, versions("3+"), tag(3), ignorable] = False


API_VERSIONS = Api(18, ApiVersionsRequest, ApiVersionsResponse, "0-4", flexible="3+")


# Metadata (3): which brokers there are, and which topics with which partitions and leaders.
class MetadataRequestTopic(Struct):
    topic_id: Annotated[uuid, versions("10+"), ignorable] = NO_UUID
    name: Annotated[str | None, nullable("10+")] = ""


class MetadataRequest(Struct):
    topics: Annotated[list[MetadataRequestTopic] | None, nullable("1+")] = []
    allow_auto_topic_creation: Annotated[bool, versions("4+")] = True
    include_cluster_authorized_operations: Annotated[bool, versions("8-10")] = False
    include_topic_authorized_operations: Annotated[bool, versions("8+")] = False


class MetadataResponseBroker(Struct):
    node_id: int32 = 0
    host: str = ""
    port: int32 = 0
    rack: Annotated[str | None, versions("1+"), ignorable] = None


class MetadataResponsePartition(Struct):
    error_code: int16 = 0
    partition_index: int32 = 0
    leader_id: int32 = 0
    leader_epoch: Annotated[int32, versions("7+"), ignorable] = -1
    replica_nodes: list[int32] = []
    isr_nodes: list[int32] = []
    offline_replicas: Annotated[list[int32], versions("5+"), ignorable] = []


class MetadataResponseTopic(Struct):
    error_code: int16 = 0
    name: Annotated[str | None, nullable("12+")] = ""
    topic_id: Annotated[uuid, versions("10+"), ignorable] = NO_UUID
    is_internal: Annotated[bool, versions("1+"), ignorable] = False
    partitions: list[MetadataResponsePartition] = []
    topic_authorized_operations: Annotated[int32, versions("8+")] = -2147483648


class MetadataResponse(Struct):
    throttle_time_ms: Annotated[int32, versions("3+"), ignorable] = 0
    brokers: list[MetadataResponseBroker] = []
    cluster_id: Annotated[str | None, versions("2+"), ignorable] = None
    controller_id: Annotated[int32, versions("1+"), ignorable] = -1
    topics: list[MetadataResponseTopic] = []
    cluster_authorized_operations: Annotated[int32, versions("8-10")] = -2147483648
    error_code: Annotated[int16, versions("13+"), ignorable] = 0


METADATA = Api(3, MetadataRequest, MetadataResponse, "0-13", flexible="9+")


# DescribeTopicPartitions (75): topics and partitions, page by page.
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


class DescribeTopicPartitionsResponse(Struct):
    throttle_time_ms: int32 = 0
    topics: list[DescribeTopicPartitionsResponseTopic] = []
    next_cursor: Cursor | None = None


DESCRIBE_TOPIC_PARTITIONS = Api(75, DescribeTopicPartitionsRequest, DescribeTopicPartitionsResponse, "0", flexible="0+")


# FindCoordinator (10): which broker keeps a group (key type 0) or a transactional id (key type 1).
class FindCoordinatorRequest(Struct):
    key: Annotated[str, versions("0-3")] = ""
    key_type: Annotated[int8, versions("1+")] = 0
    coordinator_keys: Annotated[list[str], versions("4+")] = []


class Coordinator(Struct):
    key: str = ""
    node_id: int32 = 0
    host: str = ""
    port: int32 = 0
    error_code: int16 = 0
    error_message: str | None = ""


class FindCoordinatorResponse(Struct):
    throttle_time_ms: Annotated[int32, versions("1+"), ignorable] = 0
    error_code: Annotated[int16, versions("0-3")] = 0
    error_message: Annotated[str | None, versions("1-3"), ignorable] = ""
    node_id: Annotated[int32, versions("0-3")] = 0
    host: Annotated[str, versions("0-3")] = ""
    port: Annotated[int32, versions("0-3")] = 0
    coordinators: Annotated[list[Coordinator], versions("4+")] = []


FIND_COORDINATOR = Api(10, FindCoordinatorRequest, FindCoordinatorResponse, "0-6", flexible="3+")


# DescribeCluster (60): cluster id, controller and brokers.
class DescribeClusterRequest(Struct):
    include_cluster_authorized_operations: bool = False
    endpoint_type: Annotated[int8, versions("1+")] = 1
    include_fenced_brokers: Annotated[bool, versions("2+")] = False


class DescribeClusterBroker(Struct):
    broker_id: int32 = 0
    host: str = ""
    port: int32 = 0
    rack: str | None = None
    is_fenced: Annotated[bool, versions("2+")] = False


class DescribeClusterResponse(Struct):
    throttle_time_ms: int32 = 0
    error_code: int16 = 0
    error_message: str | None = None
    endpoint_type: Annotated[int8, versions("1+")] = 1
    cluster_id: str = ""
    controller_id: int32 = -1
    brokers: list[DescribeClusterBroker] = []
    cluster_authorized_operations: int32 = -2147483648


DESCRIBE_CLUSTER = Api(60, DescribeClusterRequest, DescribeClusterResponse, "0-2", flexible="0+")


# DescribeQuorum (55): state of the controller quorum.
class QuorumPartition(Struct):
    partition_index: int32 = 0


class QuorumTopic(Struct):
    topic_name: str = ""
    partitions: list[QuorumPartition] = []


class DescribeQuorumRequest(Struct):
    topics: list[QuorumTopic] = []


class QuorumReplicaState(Struct):
    replica_id: int32 = 0
    replica_directory_id: Annotated[uuid, versions("2+")] = NO_UUID
    log_end_offset: int64 = 0
    last_fetch_timestamp: Annotated[int64, versions("1+"), ignorable] = -1
    last_caught_up_timestamp: Annotated[int64, versions("1+"), ignorable] = -1


class PartitionDataResult(Struct):
    partition_index: int32 = 0
    error_code: int16 = 0
    error_message: Annotated[str | None, versions("2+"), ignorable] = ""
    leader_id: int32 = 0
    leader_epoch: int32 = 0
    high_watermark: int64 = 0
    current_voters: list[QuorumReplicaState] = []
    observers: list[QuorumReplicaState] = []


class TopicDataResult(Struct):
    topic_name: str = ""
    partitions: list[PartitionDataResult] = []


class Listener(Struct):
    name: str = ""
    host: str = ""
    port: uint16 = 0


class Node(Struct):
    node_id: int32 = 0
    listeners: list[Listener] = []


class DescribeQuorumResponse(Struct):
    error_code: int16 = 0
    error_message: Annotated[str | None, versions("2+"), ignorable] = ""
    topics: list[TopicDataResult] = []
    nodes: Annotated[list[Node], versions("2+")] = []


DESCRIBE_QUORUM = Api(55, DescribeQuorumRequest, DescribeQuorumResponse, "0-2", flexible="0+")


# UpdateFeatures (57): finalise feature levels.
class FeatureUpdateKey(Struct):
    feature: str = ""
    max_version_level: int16 = 0
    allow_downgrade: Annotated[bool, versions("0")] = False
    upgrade_type: Annotated[int8, versions("1+")] = 1


class UpdateFeaturesRequest(Struct):
    timeout_ms: int32 = 60000
    feature_updates: list[FeatureUpdateKey] = []
    validate_only: Annotated[bool, versions("1+")] = False


class UpdatableFeatureResult(Struct):
    feature: str = ""
    error_code: int16 = 0
    error_message: str | None = ""


class UpdateFeaturesResponse(Struct):
    throttle_time_ms: int32 = 0
    error_code: int16 = 0
    error_message: str | None = ""
    results: Annotated[list[UpdatableFeatureResult], versions("0-1"), ignorable] = []


UPDATE_FEATURES = Api(57, UpdateFeaturesRequest, UpdateFeaturesResponse, "0-2", flexible="0+")


# UnregisterBroker (64): forget a broker that is gone.
class UnregisterBrokerRequest(Struct):
    broker_id: int32 = 0


class UnregisterBrokerResponse(Struct):
    throttle_time_ms: int32 = 0
    error_code: int16 = 0
    error_message: str | None = ""


UNREGISTER_BROKER = Api(64, UnregisterBrokerRequest, UnregisterBrokerResponse, "0", flexible="0+")
