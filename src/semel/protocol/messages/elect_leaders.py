"""ElectLeaders (43): ask for the election of partition leaders."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Api
from semel.protocol.schema import Struct, int8, int16, int32, versions


class TopicPartitions(Struct):
    topic: str = ""
    partitions: list[int32] = []


class ElectLeadersRequest(Struct):
    election_type: Annotated[int8, versions("1+")] = 0
    topic_partitions: list[TopicPartitions] | None = []
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
