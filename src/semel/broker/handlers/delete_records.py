"""DeleteRecords (21): raise the start of logs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from semel.broker.turns import Turns
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.records import (
    DeleteRecordsPartition,
    DeleteRecordsPartitionResult,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteRecordsTopicResult,
)
from semel.storage import StorageError

if TYPE_CHECKING:
    from semel.broker.broker import BrokerNode
    from semel.broker.context import RequestContext


async def delete_records(
    broker: BrokerNode, context: RequestContext, request: DeleteRecordsRequest
) -> DeleteRecordsResponse:
    turns = Turns()
    return DeleteRecordsResponse(
        topics=[
            DeleteRecordsTopicResult(
                topic.name, await turns.map(partial(_delete, broker, topic.name), topic.partitions)
            )
            for topic in request.topics
        ]
    )


def _delete(broker: BrokerNode, topic: str, ask: DeleteRecordsPartition) -> DeleteRecordsPartitionResult:
    partition = broker.topics.partition(topic, ask.partition_index)
    if partition is None:
        return DeleteRecordsPartitionResult(ask.partition_index, -1, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    if partition.topic.is_internal:
        return DeleteRecordsPartitionResult(ask.partition_index, -1, ErrorCode.INVALID_TOPIC_EXCEPTION)
    if not partition.log.config.delete:
        return DeleteRecordsPartitionResult(ask.partition_index, -1, ErrorCode.POLICY_VIOLATION)
    try:
        start_offset = partition.log.delete_records(ask.offset)
    except StorageError as error:
        return DeleteRecordsPartitionResult(ask.partition_index, -1, error.code)
    partition.wake_all()
    return DeleteRecordsPartitionResult(ask.partition_index, start_offset)
