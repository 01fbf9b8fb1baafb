"""AlterPartitionReassignments (45): move replicas between brokers."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Api
from semel.protocol.schema import Struct, ignorable, int16, int32, versions


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
