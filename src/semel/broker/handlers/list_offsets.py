"""ListOffsets (2): find the offset for a time, or the first, last and newest-stamped one."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from semel.broker.handlers.epochs import epoch_error
from semel.broker.turns import Turns
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.records import (
    ListOffsetsPartition,
    ListOffsetsPartitionResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopicResponse,
)
from semel.storage import StorageError

if TYPE_CHECKING:
    from semel.broker.broker import BrokerNode
    from semel.broker.context import RequestContext
    from semel.storage import PartitionLog, TimestampOffset

LATEST, EARLIEST, MAX_TIMESTAMP, EARLIEST_LOCAL, LATEST_TIERED, EARLIEST_PENDING_UPLOAD = -1, -2, -3, -4, -5, -6
_FIRST_VERSION_WITH = {MAX_TIMESTAMP: 7, EARLIEST_LOCAL: 8, LATEST_TIERED: 9, EARLIEST_PENDING_UPLOAD: 11}
_READ_COMMITTED = 1

Found = tuple[int, int, int]  # timestamp, offset, leader epoch
_NOTHING: Found = (-1, -1, -1)


async def list_offsets(broker: BrokerNode, context: RequestContext, request: ListOffsetsRequest) -> ListOffsetsResponse:
    response = ListOffsetsResponse()
    turns = Turns()
    for topic in request.topics:
        counts = Counter(ask.partition_index for ask in topic.partitions)
        found = []
        for ask in topic.partitions:
            found.append(await _answer(broker, context, request.isolation_level, topic.name, counts, ask))
            await turns.next()
        response.topics.append(ListOffsetsTopicResponse(topic.name, found))
        await turns.next()
    return response


async def _answer(
    broker: BrokerNode,
    context: RequestContext,
    isolation: int,
    topic: str,
    counts: Counter[int],
    ask: ListOffsetsPartition,
) -> ListOffsetsPartitionResponse:
    log = broker.topics.find_log(topic, ask.partition_index)
    if counts[ask.partition_index] > 1:
        code, found = ErrorCode.INVALID_REQUEST, _NOTHING
    elif log is None:
        code, found = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, _NOTHING
    else:
        code, found = await _find(broker, log, ask, context.version, isolation)
    timestamp, offset, epoch = found
    epoch = epoch if context.version >= 4 else -1
    return ListOffsetsPartitionResponse(ask.partition_index, code, timestamp, offset, epoch)


async def _find(
    broker: BrokerNode, log: PartitionLog, ask: ListOffsetsPartition, version: int, isolation: int
) -> tuple[ErrorCode, Found]:
    code = epoch_error(log, ask.current_leader_epoch)
    if code is not ErrorCode.NONE:
        return code, _NOTHING
    if version < _FIRST_VERSION_WITH.get(ask.timestamp, 0) or ask.timestamp < EARLIEST_PENDING_UPLOAD:
        return ErrorCode.UNSUPPORTED_VERSION, _NOTHING
    try:
        return ErrorCode.NONE, await _look(broker, log, ask.timestamp, isolation)
    except StorageError as error:
        return error.code, _NOTHING


async def _look(broker: BrokerNode, log: PartitionLog, timestamp_ms: int, isolation: int) -> Found:
    end_offset = log.last_stable_offset if isolation == _READ_COMMITTED else log.high_watermark
    if timestamp_ms == LATEST:
        return -1, end_offset, log.leader_epoch
    if timestamp_ms in (EARLIEST, EARLIEST_LOCAL):
        epoch = log.epoch_at(log.start_offset)
        return -1, log.start_offset, epoch
    if timestamp_ms in (LATEST_TIERED, EARLIEST_PENDING_UPLOAD):
        return _NOTHING  # there is no tiered storage
    found = await _look_by_time(broker, log, timestamp_ms)
    if found is None or found.offset >= end_offset:
        return _NOTHING
    return found


async def _look_by_time(broker: BrokerNode, log: PartitionLog, timestamp_ms: int) -> TimestampOffset | None:
    """A batch may hold a million records: a thread decodes it. Others may change the log meanwhile, so what follows
    the batch is looked for anew."""
    is_highest = timestamp_ms == MAX_TIMESTAMP
    batch = log.batch_of_max_timestamp() if is_highest else log.batch_for_time(timestamp_ms)
    while batch is not None:
        if batch.is_large:
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(broker.inspectors, batch.first_record)
        else:
            found = batch.first_record()
        if found is not None or is_highest:
            return found
        batch = log.batch_for_time(timestamp_ms, batch.header.next_offset)
    return None
