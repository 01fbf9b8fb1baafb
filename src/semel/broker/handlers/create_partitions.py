"""CreatePartitions (37): give topics more partitions."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from semel.broker.handlers.assignments import check_assignment
from semel.broker.topics import MAX_PARTITIONS_PER_TOPIC, TopicError
from semel.broker.turns import Turns
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.topics import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreatePartitionsTopic,
    CreatePartitionsTopicResult,
)

if TYPE_CHECKING:
    from semel.broker.broker import BrokerNode
    from semel.broker.context import RequestContext
    from semel.broker.topics import Topic


async def create_partitions(
    broker: BrokerNode, context: RequestContext, request: CreatePartitionsRequest
) -> CreatePartitionsResponse:
    counts = Counter(asked.name for asked in request.topics)
    results: dict[str, CreatePartitionsTopicResult] = {}
    turns = Turns()
    async with broker.topics.changes:
        for asked in request.topics:
            try:
                if counts[asked.name] > 1:
                    raise TopicError(ErrorCode.INVALID_REQUEST, "Duplicate topic name.")
                topic = _check(broker, asked)
                if not request.validate_only:
                    await turns.run(broker.topics.addition(topic, asked.count))
                results[asked.name] = CreatePartitionsTopicResult(asked.name)
            except TopicError as error:
                results[asked.name] = CreatePartitionsTopicResult(asked.name, error.code, error.message)
            await turns.next()
    return CreatePartitionsResponse(results=list(results.values()))


def _check(broker: BrokerNode, asked: CreatePartitionsTopic) -> Topic:
    topic = broker.topics.get(asked.name)
    if topic is None:
        raise TopicError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, None)
    if topic.is_internal:
        raise TopicError(
            ErrorCode.INVALID_REQUEST, f"{topic.name} keeps its partitions: ids are spread over them by their hash."
        )
    now = len(topic.partitions)
    if asked.count == now:
        raise TopicError(ErrorCode.INVALID_PARTITIONS, f"Topic already has {now} partition(s).")
    if asked.count < now:
        raise TopicError(
            ErrorCode.INVALID_PARTITIONS,
            f"The topic {topic.name} currently has {now} partition(s); {asked.count} would not be an increase.",
        )
    if asked.count > MAX_PARTITIONS_PER_TOPIC:
        raise TopicError(
            ErrorCode.INVALID_PARTITIONS, f"Number of partitions may be {MAX_PARTITIONS_PER_TOPIC} at most."
        )
    if asked.assignments is not None:
        _check_assignments(broker, asked, asked.count - now)
    return topic


def _check_assignments(broker: BrokerNode, asked: CreatePartitionsTopic, added: int) -> None:
    assignments = asked.assignments or []
    if len(assignments) != added:
        raise TopicError(
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
            f"Attempted to add {added} additional partition(s), but only {len(assignments)} assignment(s) were "
            "specified.",
        )
    for assignment in assignments:
        check_assignment(broker, assignment.broker_ids)
