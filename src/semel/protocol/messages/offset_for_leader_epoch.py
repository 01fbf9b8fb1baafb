"""OffsetForLeaderEpoch (23): where a leader epoch ends: lets a consumer notice truncation."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Api
from semel.protocol.schema import Struct, ignorable, int16, int32, int64, versions


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


class EpochEndOffset(Struct):
    error_code: int16 = 0
    partition: int32 = 0
    leader_epoch: int32 = -1
    end_offset: int64 = -1


class OffsetForLeaderTopicResult(Struct):
    topic: str = ""
    partitions: list[EpochEndOffset] = []


class OffsetForLeaderEpochResponse(Struct):
    throttle_time_ms: int32 = 0
    topics: list[OffsetForLeaderTopicResult] = []


OFFSET_FOR_LEADER_EPOCH = Api(23, OffsetForLeaderEpochRequest, OffsetForLeaderEpochResponse, "2-4", flexible="4+")
