"""Metadata (3): which brokers there are, and which topics with which partitions and leaders."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Api
from semel.protocol.schema import NO_UUID, Struct, ignorable, int16, int32, nullable, uuid, versions


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
