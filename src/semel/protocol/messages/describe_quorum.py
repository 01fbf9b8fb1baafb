"""DescribeQuorum (55): state of the controller quorum."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Api
from semel.protocol.schema import NO_UUID, Struct, ignorable, int16, int32, int64, uint16, uuid, versions


class PartitionData(Struct):
    partition_index: int32 = 0


class TopicData(Struct):
    topic_name: str = ""
    partitions: list[PartitionData] = []


class DescribeQuorumRequest(Struct):
    topics: list[TopicData] = []


class ReplicaState(Struct):
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
    current_voters: list[ReplicaState] = []
    observers: list[ReplicaState] = []


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
