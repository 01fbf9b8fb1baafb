"""ListPartitionReassignments (46): moves of replicas under way."""

from __future__ import annotations

from semel.protocol.api import Api
from semel.protocol.schema import Struct, int16, int32


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
