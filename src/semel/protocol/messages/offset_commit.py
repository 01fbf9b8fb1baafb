"""OffsetCommit (8): store a group's positions."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Api
from semel.protocol.schema import NO_UUID, Struct, ignorable, int16, int32, int64, uuid, versions


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


class OffsetCommitResponsePartition(Struct):
    partition_index: int32 = 0
    error_code: int16 = 0


class OffsetCommitResponseTopic(Struct):
    name: Annotated[str, versions("2-9"), ignorable] = ""
    topic_id: Annotated[uuid, versions("10+"), ignorable] = NO_UUID
    partitions: list[OffsetCommitResponsePartition] = []


class OffsetCommitResponse(Struct):
    throttle_time_ms: Annotated[int32, versions("3+"), ignorable] = 0
    topics: list[OffsetCommitResponseTopic] = []


OFFSET_COMMIT = Api(8, OffsetCommitRequest, OffsetCommitResponse, "2-10", flexible="8+")
