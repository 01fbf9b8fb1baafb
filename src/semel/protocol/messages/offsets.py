"""Committed offsets of groups."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Api
from semel.protocol.schema import NO_UUID, Struct, ignorable, int16, int32, int64, nullable, uuid, versions


# OffsetCommit (8): commit a group's offsets.
class OffsetCommitRequestPartition(Struct):
    partition_index: int32 = 0
    committed_offset: int64 = 0
    committed_leader_epoch: Annotated[int32, versions("6+"), ignorable] = -1
    committed_metadata: str | None = ""


class OffsetCommitRequestTopic(Struct):
    name: Annotated[str, versions("2-9"), ignorable] = ""
    topic_id: Annotated[uuid, versions("10+"), ignorable] = NO_UUID
    partitions: list[OffsetCommitRequestPartition] = []


class OffsetCommitRequest(Struct):
    group_id: str = ""
    generation_id_or_member_epoch: int32 = -1
    member_id: str = ""
    group_instance_id: Annotated[str | None, versions("7+")] = None
    retention_time_ms: Annotated[int64, versions("2-4"), ignorable] = -1
    topics: list[OffsetCommitRequestTopic] = []


class PartitionErrorCode(Struct):
    partition_index: int32 = 0
    error_code: int16 = 0


class TopicErrorCodes(Struct):
    name: str = ""
    partitions: list[PartitionErrorCode] = []


class OffsetCommitResponseTopic(Struct):
    name: Annotated[str, versions("2-9"), ignorable] = ""
    topic_id: Annotated[uuid, versions("10+"), ignorable] = NO_UUID
    partitions: list[PartitionErrorCode] = []


class OffsetCommitResponse(Struct):
    throttle_time_ms: Annotated[int32, versions("3+"), ignorable] = 0
    topics: list[OffsetCommitResponseTopic] = []


OFFSET_COMMIT = Api(8, OffsetCommitRequest, OffsetCommitResponse, "2-10", flexible="8+")


# OffsetFetch (9): read a group's committed offsets.
class OffsetFetchRequestTopics(Struct):
    name: Annotated[str, versions("1-9"), ignorable] = ""
    topic_id: Annotated[uuid, versions("10+"), ignorable] = NO_UUID
    partition_indexes: list[int32] = []


class OffsetFetchRequestGroup(Struct):
    group_id: str = ""
    member_id: Annotated[str | None, versions("9+"), ignorable] = None
    member_epoch: Annotated[int32, versions("9+"), ignorable] = -1
    topics: list[OffsetFetchRequestTopics] | None = []


class OffsetFetchRequest(Struct):
    group_id: Annotated[str, versions("1-7")] = ""
    topics: Annotated[list[OffsetFetchRequestTopics] | None, versions("1-7"), nullable("2-7")] = []
    groups: Annotated[list[OffsetFetchRequestGroup], versions("8+")] = []
    require_stable: Annotated[bool, versions("7+")] = False


class OffsetFetchResponsePartitions(Struct):
    partition_index: int32 = 0
    committed_offset: int64 = 0
    committed_leader_epoch: Annotated[int32, versions("5+"), ignorable] = -1
    metadata: str | None = ""
    error_code: int16 = 0


class OffsetFetchResponseTopics(Struct):
    name: Annotated[str, versions("1-9"), ignorable] = ""
    topic_id: Annotated[uuid, versions("10+"), ignorable] = NO_UUID
    partitions: list[OffsetFetchResponsePartitions] = []


class OffsetFetchResponseGroup(Struct):
    group_id: str = ""
    topics: list[OffsetFetchResponseTopics] = []
    error_code: int16 = 0


class OffsetFetchResponse(Struct):
    throttle_time_ms: Annotated[int32, versions("3+"), ignorable] = 0
    topics: Annotated[list[OffsetFetchResponseTopics], versions("1-7")] = []
    error_code: Annotated[int16, versions("2-7"), ignorable] = 0
    groups: Annotated[list[OffsetFetchResponseGroup], versions("8+")] = []


OFFSET_FETCH = Api(9, OffsetFetchRequest, OffsetFetchResponse, "1-10", flexible="6+")


# OffsetDelete (47): delete committed offsets of a group.
class OffsetDeleteRequestPartition(Struct):
    partition_index: int32 = 0


class OffsetDeleteRequestTopic(Struct):
    name: str = ""
    partitions: list[OffsetDeleteRequestPartition] = []


class OffsetDeleteRequest(Struct):
    group_id: str = ""
    topics: list[OffsetDeleteRequestTopic] = []


class OffsetDeleteResponse(Struct):
    error_code: int16 = 0
    throttle_time_ms: int32 = 0
    topics: list[TopicErrorCodes] = []


OFFSET_DELETE = Api(47, OffsetDeleteRequest, OffsetDeleteResponse, "0")
