"""OffsetForLeaderEpoch (23): where an epoch of the log ended, for readers who check whether their past still holds."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from semel.broker.handlers.epochs import epoch_error
from semel.broker.turns import Turns
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.records import (
    LeaderEpochEndOffset,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
    OffsetForLeaderPartition,
    OffsetForLeaderTopicResult,
)

if TYPE_CHECKING:
    from semel.broker.broker import BrokerNode
    from semel.broker.context import RequestContext


async def offset_for_leader_epoch(
    broker: BrokerNode, context: RequestContext, request: OffsetForLeaderEpochRequest
) -> OffsetForLeaderEpochResponse:
    turns = Turns()
    return OffsetForLeaderEpochResponse(
        topics=[
            OffsetForLeaderTopicResult(
                topic.topic, await turns.map(partial(_find, broker, topic.topic), topic.partitions)
            )
            for topic in request.topics
        ]
    )


def _find(broker: BrokerNode, topic: str, ask: OffsetForLeaderPartition) -> LeaderEpochEndOffset:
    log = broker.topics.find_log(topic, ask.partition)
    if log is None:
        return LeaderEpochEndOffset(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ask.partition)
    code = epoch_error(log, ask.current_leader_epoch)
    if code is not ErrorCode.NONE:
        return LeaderEpochEndOffset(code, ask.partition)
    epoch, end_offset = log.epoch_end_offset(ask.leader_epoch)
    return LeaderEpochEndOffset(ErrorCode.NONE, ask.partition, epoch, end_offset)
