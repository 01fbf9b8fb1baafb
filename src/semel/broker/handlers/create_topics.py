"""CreateTopics (19): create topics."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from semel.broker import describe_settings
from semel.broker.handlers.assignments import check_assignment
from semel.broker.handlers.config_resources import accept_topic_settings
from semel.broker.topics import TopicError, check_collision, plain_name
from semel.broker.turns import MANY, Turns
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.topics import (
    CreatableTopic,
    CreatableTopicConfigs,
    CreatableTopicResult,
    CreateTopicsRequest,
    CreateTopicsResponse,
)

if TYPE_CHECKING:
    from semel.broker.broker import BrokerNode
    from semel.broker.context import RequestContext
    from semel.broker.topics import Topic

_DEFAULT = -1

Wanted = tuple[str, int, dict[str, str]]


async def create_topics(
    broker: BrokerNode, context: RequestContext, request: CreateTopicsRequest
) -> CreateTopicsResponse:
    turns = Turns()
    counts = Counter(topic.name for topic in request.topics)
    results: dict[str, CreatableTopicResult] = {}
    wanted: list[Wanted] = []
    plain_names: dict[str, str] = {}
    async with broker.topics.changes:
        for asked in request.topics:
            try:
                if counts[asked.name] > 1:
                    raise TopicError(ErrorCode.INVALID_REQUEST, "Duplicate topic name.")
                wanted.append(_check(broker, asked, plain_names))
                results[asked.name] = CreatableTopicResult(asked.name)
            except TopicError as error:
                results[asked.name] = _refused(asked.name, error)
            await turns.next()
        for at in range(0, len(wanted), MANY):
            await _create(broker, wanted[at : at + MANY], request.validate_only, results, turns)
    return CreateTopicsResponse(topics=list(results.values()))


async def _create(
    broker: BrokerNode,
    wanted: list[Wanted],
    validate_only: bool,
    results: dict[str, CreatableTopicResult],
    turns: Turns,
) -> None:
    """Creates some topics for the price of one fsync; if that fails, none of them exists."""
    if validate_only:
        for name, count, configs in wanted:
            results[name] = _result(broker, broker.topics.draft(name, configs), count)
            await turns.next()
        return
    try:
        created = await turns.run(broker.topics.creation(wanted))
    except TopicError as error:  # the disk is full, say
        for name, _, _ in wanted:
            results[name] = _refused(name, error)
        return
    for topic in created:
        results[topic.name] = _result(broker, topic, len(topic.partitions))
        await turns.next()


def _refused(name: str, error: TopicError) -> CreatableTopicResult:
    return CreatableTopicResult(name, error_code=error.code, error_message=error.message, configs=[])


def _check(broker: BrokerNode, asked: CreatableTopic, earlier: dict[str, str]) -> Wanted:
    """(name, partitions, settings) of a topic that may be created next to the earlier ones of the request, whose names
    stand under their plain form."""
    plain = plain_name(asked.name)
    if plain in earlier:
        check_collision(asked.name, earlier[plain])
    configs: dict[str, str] = {}
    for config in asked.configs:
        if config.value is None:
            raise TopicError(ErrorCode.INVALID_CONFIG, f"Null value not supported for topic configs: {config.name}")
        configs[config.name] = config.value
    broker.topics.check_new(asked.name, 1, configs)
    count = _manual_count(broker, asked) if asked.assignments else _automatic_count(broker, asked)
    broker.topics.check_new(asked.name, count, configs)
    accept_topic_settings(broker, configs)
    earlier[plain] = asked.name
    return asked.name, count, configs


def _manual_count(broker: BrokerNode, asked: CreatableTopic) -> int:
    if asked.replication_factor != _DEFAULT:
        raise TopicError(
            ErrorCode.INVALID_REQUEST,
            "A manual partition assignment was specified, but replication factor was not set to -1.",
        )
    if asked.num_partitions != _DEFAULT:
        raise TopicError(
            ErrorCode.INVALID_REQUEST,
            "A manual partition assignment was specified, but numPartitions was not set to -1.",
        )
    if sorted(given.partition_index for given in asked.assignments) != list(range(len(asked.assignments))):
        raise TopicError(
            ErrorCode.INVALID_REPLICA_ASSIGNMENT, "partitions should be a consecutive 0-based integer sequence"
        )
    for given in asked.assignments:
        check_assignment(broker, given.broker_ids)
    return len(asked.assignments)


def _automatic_count(broker: BrokerNode, asked: CreatableTopic) -> int:
    factor = asked.replication_factor
    if factor < _DEFAULT or factor == 0:
        raise TopicError(
            ErrorCode.INVALID_REPLICATION_FACTOR,
            "Replication factor must be larger than 0, or -1 to use the default value.",
        )
    if asked.num_partitions < _DEFAULT or asked.num_partitions == 0:
        raise TopicError(ErrorCode.INVALID_PARTITIONS, "Number of partitions was set to an invalid non-positive value.")
    if factor > 1:
        raise TopicError(
            ErrorCode.INVALID_REPLICATION_FACTOR,
            f"Unable to replicate the partition {factor} time(s): The target replication factor of {factor} cannot be "
            "reached because only 1 broker(s) are registered or some brokers have all their log directories cordoned.",
        )
    count: int = broker.settings["num.partitions"] if asked.num_partitions == _DEFAULT else asked.num_partitions
    return count


def _result(broker: BrokerNode, topic: Topic, count: int) -> CreatableTopicResult:
    entries = describe_settings.of_topic(broker, topic)
    return CreatableTopicResult(
        name=topic.name,
        topic_id=topic.id,
        error_message=None,
        num_partitions=count,
        replication_factor=1,
        configs=[CreatableTopicConfigs(e.name, e.value, e.is_read_only, e.source, False) for e in entries],
    )
