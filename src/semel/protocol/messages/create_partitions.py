"""CreatePartitions (37): give topics more partitions."""

from __future__ import annotations

from semel.protocol.api import Api
from semel.protocol.schema import Struct, int16, int32


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
