"""DescribeProducers (61): which producers a partition remembers, and whether they have a transaction open."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from semel.broker.topics import name_problem
from semel.broker.turns import Turns
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.transactions import (
    DescribeProducersRequest,
    DescribeProducersResponse,
    PartitionResponse,
    ProducerState,
    TopicResponse,
)

if TYPE_CHECKING:
    from semel.broker.broker import BrokerNode
    from semel.broker.context import RequestContext


async def describe_producers(
    broker: BrokerNode, context: RequestContext, request: DescribeProducersRequest
) -> DescribeProducersResponse:
    turns = Turns()
    return DescribeProducersResponse(
        topics=[
            TopicResponse(topic.name, await turns.map(partial(_describe, broker, topic.name), topic.partition_indexes))
            for topic in request.topics
        ]
    )


def _describe(broker: BrokerNode, topic: str, index: int) -> PartitionResponse:
    if name_problem(topic):
        return PartitionResponse(index, ErrorCode.INVALID_TOPIC_EXCEPTION, name_problem(topic))
    log = broker.topics.find_log(topic, index)
    if log is None:
        message = None if broker.topics.get(topic) else "This server does not host this topic-partition."
        return PartitionResponse(index, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, message)
    states = [
        ProducerState(
            producer_id=info.producer_id,
            producer_epoch=info.epoch,
            last_sequence=info.last_sequence,
            last_timestamp=info.last_timestamp_ms,
            coordinator_epoch=info.coordinator_epoch,
            current_txn_start_offset=info.current_txn_start_offset,
        )
        for info in log.active_producers()
    ]
    return PartitionResponse(index, active_producers=states)
