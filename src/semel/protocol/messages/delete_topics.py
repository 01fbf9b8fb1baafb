"""DeleteTopics (20): delete topics, by name or id."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Api
from semel.protocol.schema import NO_UUID, Struct, ignorable, int16, int32, nullable, uuid, versions


class DeleteTopicState(Struct):
    name: str | None = None
    topic_id: uuid = NO_UUID


class DeleteTopicsRequest(Struct):
    topics: Annotated[list[DeleteTopicState], versions("6+")] = []
    topic_names: Annotated[list[str], versions("1-5"), ignorable] = []
    timeout_ms: int32 = 0


class DeletableTopicResult(Struct):
    name: Annotated[str | None, nullable("6+")] = ""
    topic_id: Annotated[uuid, versions("6+"), ignorable] = NO_UUID
    error_code: int16 = 0
    error_message: Annotated[str | None, versions("5+"), ignorable] = None


class DeleteTopicsResponse(Struct):
    throttle_time_ms: int32 = 0
    responses: list[DeletableTopicResult] = []


DELETE_TOPICS = Api(20, DeleteTopicsRequest, DeleteTopicsResponse, "1-6", flexible="4+")
