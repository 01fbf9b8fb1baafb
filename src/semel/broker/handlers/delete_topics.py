"""DeleteTopics (20): delete topics by name or id."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from semel.broker.topics import TopicError
from semel.broker.turns import MANY, Turns
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.topics import (
    DeletableTopicResult,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    DeleteTopicState,
)
from semel.protocol.schema import NO_UUID

if TYPE_CHECKING:
    from semel.broker.broker import BrokerNode
    from semel.broker.context import RequestContext
    from semel.broker.topics import Topic

_FIRST_WITH_DISABLED = 3


async def delete_topics(
    broker: BrokerNode, context: RequestContext, request: DeleteTopicsRequest
) -> DeleteTopicsResponse:
    asked = request.topics or [DeleteTopicState(name) for name in request.topic_names]
    if not broker.settings["delete.topic.enable"]:
        has_code = context.version >= _FIRST_WITH_DISABLED
        code = ErrorCode.TOPIC_DELETION_DISABLED if has_code else ErrorCode.INVALID_REQUEST
        refused = [DeletableTopicResult(s.name, s.topic_id, code, "Topic deletion is disabled.") for s in asked]
        return DeleteTopicsResponse(responses=refused)
    async with broker.topics.changes:
        return DeleteTopicsResponse(responses=await _delete(broker, asked))


async def _delete(broker: BrokerNode, asked: list[DeleteTopicState]) -> list[DeletableTopicResult]:
    turns = Turns()
    counts = Counter((state.name, state.topic_id) for state in asked)
    results: dict[tuple[str | None, bytes], DeletableTopicResult] = {}
    doomed: dict[str, Topic] = {}
    for state in asked:
        key = (state.name, state.topic_id)
        try:
            if counts[key] > 1:
                what = "id" if state.name is None else "name"
                raise TopicError(ErrorCode.INVALID_REQUEST, f"Duplicate topic {what}.")
            topic = _find(broker, state)
            doomed[topic.name] = topic
            results[key] = DeletableTopicResult(topic.name, topic.id)
        except TopicError as error:
            results[key] = DeletableTopicResult(state.name, state.topic_id, error.code, error.message)
        await turns.next()
    topics = list(doomed.values())
    try:
        for at in range(0, len(topics), MANY):
            await turns.run(broker.topics.deletion(topics[at : at + MANY]))
    except TopicError as error:  # the disk is full, say
        for result in results.values():
            if not result.error_code and result.name is not None and broker.topics.get(result.name) is not None:
                result.error_code, result.error_message = error.code, error.message
    return list(results.values())


def _find(broker: BrokerNode, state: DeleteTopicState) -> Topic:
    if state.name is not None and state.topic_id != NO_UUID:
        raise TopicError(ErrorCode.INVALID_REQUEST, "You may not specify both topic name and topic id.")
    if state.name is None and state.topic_id == NO_UUID:
        raise TopicError(ErrorCode.INVALID_REQUEST, "Neither topic name nor id were specified.")
    if state.name is None:
        topic = broker.topics.by_id(state.topic_id)
        if topic is None:
            raise TopicError(ErrorCode.UNKNOWN_TOPIC_ID, "This server does not host this topic ID.")
    else:
        topic = broker.topics.get(state.name)
        if topic is None:
            raise TopicError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "This server does not host this topic-partition.")
    if topic.is_internal:
        raise TopicError(
            ErrorCode.INVALID_TOPIC_EXCEPTION, f"{topic.name} is the memory of a coordinator and cannot be deleted."
        )
    return topic
