"""Requests about one log: ListOffsets (2), OffsetForLeaderEpoch (23), DeleteRecords (21), DescribeProducers (61)."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial

from semel.broker.broker import BrokerNode
from semel.broker.dispatch import RequestContext
from semel.broker.topics import name_problem
from semel.broker.turns import Turns
from semel.protocol.errors import ErrorCode
from semel.protocol.messages import records as messages
from semel.protocol.messages import transactions
from semel.storage import PartitionLog, StorageError, TimestampOffset


# --- Leader epochs: a client that knows an older or a newer leader than this one gets an error ---
def epoch_error(log: PartitionLog, current_leader_epoch: int) -> ErrorCode:
    """-1 stands for a client that does not know the epoch."""
    if current_leader_epoch in (-1, log.leader_epoch):
        return ErrorCode.NONE
    if current_leader_epoch < log.leader_epoch:
        return ErrorCode.FENCED_LEADER_EPOCH
    return ErrorCode.UNKNOWN_LEADER_EPOCH


# --- ListOffsets (2): find the offset for a time, or the first, last and newest-stamped one ---
LATEST, EARLIEST, MAX_TIMESTAMP, EARLIEST_LOCAL, LATEST_TIERED, EARLIEST_PENDING_UPLOAD = -1, -2, -3, -4, -5, -6
_FIRST_VERSION_WITH = {MAX_TIMESTAMP: 7, EARLIEST_LOCAL: 8, LATEST_TIERED: 9, EARLIEST_PENDING_UPLOAD: 11}
_READ_COMMITTED = 1

Found = tuple[int, int, int]  # timestamp, offset, leader epoch
_NOTHING: Found = (-1, -1, -1)


async def list_offsets(
    broker: BrokerNode, context: RequestContext, request: messages.ListOffsetsRequest
) -> messages.ListOffsetsResponse:
    response = messages.ListOffsetsResponse()
    turns = Turns()
    for topic in request.topics:
        counts = Counter(requested.partition_index for requested in topic.partitions)
        found = []
        for requested in topic.partitions:
            found.append(await _find_one(broker, context, request.isolation_level, topic.name, counts, requested))
            await turns.next()
        response.topics.append(messages.ListOffsetsTopicResponse(topic.name, found))
        await turns.next()
    return response


async def _find_one(
    broker: BrokerNode,
    context: RequestContext,
    isolation: int,
    topic: str,
    counts: Counter[int],
    requested: messages.ListOffsetsPartition,
) -> messages.ListOffsetsPartitionResponse:
    log = broker.topics.find_log(topic, requested.partition_index)
    if counts[requested.partition_index] > 1:
        code, found = ErrorCode.INVALID_REQUEST, _NOTHING
    elif log is None:
        code, found = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, _NOTHING
    else:
        code, found = await _find(broker, log, requested, context.version, isolation)
    timestamp, offset, epoch = found
    epoch = epoch if context.version >= 4 else -1
    return messages.ListOffsetsPartitionResponse(requested.partition_index, code, timestamp, offset, epoch)


async def _find(
    broker: BrokerNode, log: PartitionLog, requested: messages.ListOffsetsPartition, version: int, isolation: int
) -> tuple[ErrorCode, Found]:
    code = epoch_error(log, requested.current_leader_epoch)
    if code is not ErrorCode.NONE:
        return code, _NOTHING
    if version < _FIRST_VERSION_WITH.get(requested.timestamp, 0) or requested.timestamp < EARLIEST_PENDING_UPLOAD:
        return ErrorCode.UNSUPPORTED_VERSION, _NOTHING
    try:
        return ErrorCode.NONE, await _look(broker, log, requested.timestamp, isolation)
    except StorageError as error:
        return error.code, _NOTHING


async def _look(broker: BrokerNode, log: PartitionLog, timestamp_ms: int, isolation: int) -> Found:
    end_offset = log.last_stable_offset if isolation == _READ_COMMITTED else log.high_watermark
    if timestamp_ms == LATEST:
        return -1, end_offset, log.leader_epoch
    if timestamp_ms in (EARLIEST, EARLIEST_LOCAL):
        epoch = log.epoch_at(log.start_offset)
        is_empty = log.start_offset == log.high_watermark  # the next record there is of the current epoch
        return -1, log.start_offset, log.leader_epoch if epoch == -1 and is_empty else epoch
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


# --- OffsetForLeaderEpoch (23): where an epoch of the log ended, for consumers that check for truncation ---
async def offset_for_leader_epoch(
    broker: BrokerNode, context: RequestContext, request: messages.OffsetForLeaderEpochRequest
) -> messages.OffsetForLeaderEpochResponse:
    topics = ((topic.topic, topic.partitions) for topic in request.topics)
    ends = await Turns().map_topics(messages.OffsetForLeaderTopicResult, partial(_epoch_end, broker), topics)
    return messages.OffsetForLeaderEpochResponse(topics=ends)


def _epoch_end(
    broker: BrokerNode, topic: str, requested: messages.OffsetForLeaderPartition
) -> messages.LeaderEpochEndOffset:
    log = broker.topics.find_log(topic, requested.partition)
    if log is None:
        return messages.LeaderEpochEndOffset(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, requested.partition)
    code = epoch_error(log, requested.current_leader_epoch)
    if code is not ErrorCode.NONE:
        return messages.LeaderEpochEndOffset(code, requested.partition)
    epoch, end_offset = log.epoch_end_offset(requested.leader_epoch)
    return messages.LeaderEpochEndOffset(ErrorCode.NONE, requested.partition, epoch, end_offset)


# --- DeleteRecords (21): raise the start of logs ---
async def delete_records(
    broker: BrokerNode, context: RequestContext, request: messages.DeleteRecordsRequest
) -> messages.DeleteRecordsResponse:
    topics = ((topic.name, topic.partitions) for topic in request.topics)
    results = await Turns().map_topics(messages.DeleteRecordsTopicResult, partial(_delete, broker), topics)
    return messages.DeleteRecordsResponse(topics=results)


def _delete(
    broker: BrokerNode, topic: str, requested: messages.DeleteRecordsPartition
) -> messages.DeleteRecordsPartitionResult:
    result = messages.DeleteRecordsPartitionResult(requested.partition_index, -1)
    partition = broker.topics.partition(topic, requested.partition_index)
    if partition is None:
        result.error_code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    elif partition.topic.is_internal:
        result.error_code = ErrorCode.INVALID_TOPIC_EXCEPTION
    elif not partition.log.config.delete:
        result.error_code = ErrorCode.POLICY_VIOLATION
    else:
        try:
            result.low_watermark = partition.log.delete_records(requested.offset)
            partition.wake_all()
        except StorageError as error:
            result.error_code = error.code
    return result


# --- DescribeProducers (61): which producers a partition remembers, and whether they have a transaction open ---
async def describe_producers(
    broker: BrokerNode, context: RequestContext, request: transactions.DescribeProducersRequest
) -> transactions.DescribeProducersResponse:
    topics = ((topic.name, topic.partition_indexes) for topic in request.topics)
    described = await Turns().map_topics(transactions.TopicResponse, partial(_describe, broker), topics)
    return transactions.DescribeProducersResponse(topics=described)


def _describe(broker: BrokerNode, topic: str, index: int) -> transactions.PartitionResponse:
    if (problem := name_problem(topic)) is not None:
        reason = f"Topic name is invalid: {problem}"
        return transactions.PartitionResponse(index, ErrorCode.INVALID_TOPIC_EXCEPTION, reason)
    log = broker.topics.find_log(topic, index)
    if log is None:
        message = None if broker.topics.get(topic) else "This server does not host this topic-partition."
        return transactions.PartitionResponse(index, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, message)
    states = [
        transactions.ProducerState(
            producer_id=entry.producer_id,
            producer_epoch=entry.epoch,
            last_sequence=entry.last_sequence,
            last_timestamp=entry.last_timestamp_ms,
            coordinator_epoch=entry.coordinator_epoch,
            current_txn_start_offset=entry.txn_first_offset,
        )
        for entry in log.states.producers.values()
    ]
    return transactions.PartitionResponse(index, active_producers=states)
