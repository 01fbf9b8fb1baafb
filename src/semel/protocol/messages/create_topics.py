"""CreateTopics (19): create topics."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Api
from semel.protocol.schema import NO_UUID, Struct, ignorable, int8, int16, int32, tag, uuid, versions


class CreatableReplicaAssignment(Struct):
    partition_index: int32 = 0
    broker_ids: list[int32] = []


class CreatableTopicConfig(Struct):
    name: str = ""
    value: str | None = ""


class CreatableTopic(Struct):
    name: str = ""
    num_partitions: int32 = 0
    replication_factor: int16 = 0
    assignments: list[CreatableReplicaAssignment] = []
    configs: list[CreatableTopicConfig] = []


class CreateTopicsRequest(Struct):
    topics: list[CreatableTopic] = []
    timeout_ms: int32 = 60000
    validate_only: bool = False


class CreatableTopicConfigs(Struct):
    name: str = ""
    value: str | None = ""
    read_only: bool = False
    config_source: int8 = -1
    is_sensitive: bool = False


class CreatableTopicResult(Struct):
    name: str = ""
    topic_id: Annotated[uuid, versions("7+"), ignorable] = NO_UUID
    error_code: int16 = 0
    error_message: str | None = ""
    topic_config_error_code: Annotated[int16, versions("5+"), tag(0), ignorable] = 0
    num_partitions: Annotated[int32, versions("5+"), ignorable] = -1
    replication_factor: Annotated[int16, versions("5+"), ignorable] = -1
    configs: Annotated[list[CreatableTopicConfigs] | None, versions("5+"), ignorable] = []


class CreateTopicsResponse(Struct):
    throttle_time_ms: int32 = 0
    topics: list[CreatableTopicResult] = []


CREATE_TOPICS = Api(19, CreateTopicsRequest, CreateTopicsResponse, "2-7", flexible="5+")
