"""ListOffsets (2): find the offset for a time, or the first, last and newest-stamped one."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Api
from semel.protocol.schema import Struct, ignorable, int8, int16, int32, int64, versions


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
