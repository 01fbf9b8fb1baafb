"""DescribeTopicPartitions (75): topics in pages, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from semel.broker.handlers.rights import TOPIC_OPERATIONS
from semel.broker.topics import INTERNAL_TOPICS, name_problem
from semel.broker.turns import Turns
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.cluster import (
    CursorResult,
    DescribeTopicPartitionsRequest,
    DescribeTopicPartitionsResponse,
    DescribeTopicPartitionsResponsePartition,
    DescribeTopicPartitionsResponseTopic,
)

if TYPE_CHECKING:
    from semel.broker.broker import BrokerNode
    from semel.broker.context import RequestContext
    from semel.broker.topics import Topic


async def describe_topic_partitions(
    broker: BrokerNode, context: RequestContext, request: DescribeTopicPartitionsRequest
) -> DescribeTopicPartitionsResponse:
    names = sorted({asked.name for asked in request.topics} or {topic.name for topic in broker.topics})
    first = 0
    if request.cursor is not None and request.cursor.partition_index < 0:
        refused = [DescribeTopicPartitionsResponseTopic(ErrorCode.INVALID_REQUEST, name) for name in names]
        return DescribeTopicPartitionsResponse(topics=refused)
    if request.cursor is not None:
        names = [name for name in names if name >= request.cursor.topic_name]
        if names and names[0] == request.cursor.topic_name:
            first = request.cursor.partition_index
    room = max(1, min(request.response_partition_limit, broker.settings["max.request.partition.size.limit"]))
    response = DescribeTopicPartitionsResponse()
    turns = Turns()
    for name in names:
        await turns.next()
        if room == 0:
            response.next_cursor = CursorResult(name, 0)
            break
        topic = broker.topics.get(name)
        if topic is None:
            response.topics.append(_unknown(name))
            continue
        shown = _describe(broker, topic, first, room)
        response.topics.append(shown)
        if first + len(shown.partitions) < len(topic.partitions):
            response.next_cursor = CursorResult(name, first + len(shown.partitions))
            break
        room -= len(shown.partitions)
        first = 0
    return response


def _unknown(name: str) -> DescribeTopicPartitionsResponseTopic:
    code = ErrorCode.INVALID_TOPIC_EXCEPTION if name_problem(name) else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    return DescribeTopicPartitionsResponseTopic(
        code, name, is_internal=name in INTERNAL_TOPICS, topic_authorized_operations=TOPIC_OPERATIONS
    )


def _describe(broker: BrokerNode, topic: Topic, first: int, room: int) -> DescribeTopicPartitionsResponseTopic:
    node = [broker.node_id]
    return DescribeTopicPartitionsResponseTopic(
        name=topic.name,
        topic_id=topic.id,
        is_internal=topic.is_internal,
        partitions=[
            DescribeTopicPartitionsResponsePartition(
                0, part.index, broker.node_id, part.log.leader_epoch, node, node, [], []
            )
            for part in topic.partitions[first : first + room]
        ],
        topic_authorized_operations=TOPIC_OPERATIONS,
    )
