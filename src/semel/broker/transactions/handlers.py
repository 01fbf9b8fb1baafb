"""The APIs of the transaction coordinator, one small function each: from a request to the coordinator, and back."""

from __future__ import annotations

import asyncio
from functools import partial

from semel.broker.broker import BrokerNode
from semel.broker.dispatch import LONGEST_SHOWN_ID, RequestContext
from semel.broker.expressions import ExpressionError, compile_expression
from semel.broker.groups.commits import Committer, OffsetToCommit
from semel.broker.topics import CONSUMER_OFFSETS, TopicPartition
from semel.broker.transactions.coordinator import NOTHING_KEPT, TransactionCoordinator, write_error
from semel.broker.transactions.events import OPERATOR, TraceEvent, TraceStep
from semel.broker.transactions.states import NO_EPOCH, NO_PRODUCER_ID, TxnState
from semel.broker.turns import Turns
from semel.protocol.errors import ErrorCode
from semel.protocol.messages import transactions as messages
from semel.protocol.messages.offsets import PartitionErrorCode, TopicErrorCodes
from semel.storage import StorageError

_STATE_NAMES = {state.label: state for state in TxnState}


# --- InitProducerId -------------------------------------------------------------------------------------------------
async def init_producer_id(
    broker: BrokerNode, ctx: RequestContext, request: messages.InitProducerIdRequest
) -> messages.InitProducerIdResponse:
    """A producer id; with a transactional id, one that fences its former owners.

    Two-phase commit is a right of the transactional id in Kafka, which this broker grants to all or none by a setting.
    """
    has_id, has_epoch = request.producer_id != NO_PRODUCER_ID, request.producer_epoch != NO_EPOCH
    if has_id != has_epoch:
        return _no_producer_id(ErrorCode.INVALID_REQUEST)
    if request.enable2_pc and not broker.settings["transaction.two.phase.commit.enable"]:
        return _no_producer_id(ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
    try:
        if request.transactional_id is None:
            return messages.InitProducerIdResponse(producer_id=broker.transactions.new_producer_id(), producer_epoch=0)
        expected = (request.producer_id, request.producer_epoch) if has_id else None
        asked = (request.transactional_id, request.transaction_timeout_ms, expected)
        coordinator, kept = broker.transactions, NOTHING_KEPT
        if request.keep_prepared_txn:
            owner, kept = await coordinator.init_keeping(*asked, two_phase_commit=request.enable2_pc)
        else:
            owner = await coordinator.init(*asked, two_phase_commit=request.enable2_pc)
    except StorageError as failure:  # no producer id can be reserved
        return _no_producer_id(failure.code)
    claimed = (
        (owner.producer_id, owner.epoch)
        if owner.error is ErrorCode.NONE
        else (request.producer_id, request.producer_epoch)
    )
    note = f"expects epoch {request.producer_epoch} of producer {request.producer_id}" if has_id else "as a new owner"
    broker.transactions.events.add(
        TraceStep.INIT, request.transactional_id, *claimed, owner.error, ctx.client, note=note
    )
    error = for_version(owner.error, ctx.version, knows_fenced_from=4)
    return messages.InitProducerIdResponse(
        error_code=error,
        producer_id=owner.producer_id,
        producer_epoch=owner.epoch,
        ongoing_txn_producer_id=kept[0],
        ongoing_txn_producer_epoch=kept[1],
    )


def _no_producer_id(error: ErrorCode) -> messages.InitProducerIdResponse:
    return messages.InitProducerIdResponse(error_code=error, producer_id=NO_PRODUCER_ID, producer_epoch=NO_EPOCH)


# --- adding ---------------------------------------------------------------------------------------------------------
async def add_partitions_to_txn(
    broker: BrokerNode, ctx: RequestContext, request: messages.AddPartitionsToTxnRequest
) -> messages.AddPartitionsToTxnResponse:
    """Partitions join a transaction. Up to version 3 from clients; later, from brokers, of many transactions."""
    if ctx.version <= 3:
        txn = messages.AddPartitionsToTxnTransaction(
            request.v3_and_below_transactional_id,
            request.v3_and_below_producer_id,
            request.v3_and_below_producer_epoch,
            topics=request.v3_and_below_topics,
        )
        topics = await _add_partitions(broker, ctx, txn)
        return messages.AddPartitionsToTxnResponse(results_by_topic_v3_and_below=topics)
    results = []
    turns = Turns()
    for txn in request.transactions:
        topics = await _add_partitions(broker, ctx, txn)
        results.append(messages.AddPartitionsToTxnResult(txn.transactional_id, topics))
        await turns.next()
    return messages.AddPartitionsToTxnResponse(results_by_transaction=results)


async def _add_partitions(
    broker: BrokerNode, ctx: RequestContext, txn: messages.AddPartitionsToTxnTransaction
) -> list[messages.AddPartitionsToTxnTopicResult]:
    """One transaction of a request. One partition that does not exist fails them all."""
    wanted = [(topic.name, index) for topic in txn.topics for index in topic.partitions]
    who = (txn.transactional_id, txn.producer_id, txn.producer_epoch)
    turns = Turns()
    unknown = set()
    for partition in wanted:
        if broker.topics.partition(*partition) is None:
            unknown.add(partition)
        await turns.next()
    if unknown:
        codes = dict.fromkeys(wanted, ErrorCode.OPERATION_NOT_ATTEMPTED)
        codes |= dict.fromkeys(unknown, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    elif txn.verify_only:
        codes = {partition: broker.transactions.verify(*who, partition) for partition in wanted}
    else:
        client_version = 2 if ctx.version >= 4 else 0
        error = await broker.transactions.add(*who, wanted, client_version)
        broker.transactions.events.add(TraceStep.ADD, *who, error, ctx.client, wanted)
        codes = dict.fromkeys(wanted, for_version(error, ctx.version, knows_fenced_from=2))
    return [
        messages.AddPartitionsToTxnTopicResult(
            name, [messages.AddPartitionsToTxnPartitionResult(index, code) for index, code in partitions.items()]
        )
        for name, partitions in _by_topic(codes).items()
    ]


async def add_offsets_to_txn(
    broker: BrokerNode, ctx: RequestContext, request: messages.AddOffsetsToTxnRequest
) -> messages.AddOffsetsToTxnResponse:
    """A group's partition of the offsets topic joins a transaction."""
    who = (request.transactional_id, request.producer_id, request.producer_epoch)
    partitions = [_offsets_partition(broker, request.group_id)]
    error = await broker.transactions.add(*who, partitions)
    note = _of_group(request.group_id)
    broker.transactions.events.add(TraceStep.ADD_OFFSETS, *who, error, ctx.client, partitions, note)
    return messages.AddOffsetsToTxnResponse(error_code=for_version(error, ctx.version, knows_fenced_from=2))


def _of_group(group_id: str) -> str:
    return f"group {group_id[:LONGEST_SHOWN_ID]}"


def _offsets_partition(broker: BrokerNode, group_id: str) -> TopicPartition:
    return CONSUMER_OFFSETS, broker.groups.partition_for(group_id)


# --- offsets --------------------------------------------------------------------------------------------------------
async def txn_offset_commit(
    broker: BrokerNode, ctx: RequestContext, request: messages.TxnOffsetCommitRequest
) -> messages.TxnOffsetCommitResponse:
    """A group's offsets, pending until the transaction ends. Partitions that do not exist are refused one by one."""
    codes: dict[TopicPartition, ErrorCode] = {}
    commits: dict[TopicPartition, OffsetToCommit] = {}  # of several offsets for a partition the last one counts
    limit = broker.settings["offset.metadata.max.bytes"]
    turns = Turns()
    for asked in request.topics:
        await turns.next()
        topic = broker.topics.get(asked.name)
        for part in asked.partitions:
            key = (asked.name, part.partition_index)
            codes[key] = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            if topic is not None and 0 <= part.partition_index < len(topic.partitions):
                codes[key] = ErrorCode.OFFSET_METADATA_TOO_LARGE
                if len(part.committed_metadata or "") <= limit:
                    commits[key] = OffsetToCommit.of(topic, part)
    if any(code is not ErrorCode.UNKNOWN_TOPIC_OR_PARTITION for code in codes.values()):
        error = await _commit_offsets(broker, ctx.version, request, list(commits.values()))
        for key, code in codes.items():
            if key in commits or (error is not ErrorCode.NONE and code is ErrorCode.OFFSET_METADATA_TOO_LARGE):
                codes[key] = error
        who = (request.transactional_id, request.producer_id, request.producer_epoch)
        broker.transactions.events.add(TraceStep.OFFSETS, *who, error, ctx.client, commits, _of_group(request.group_id))
    return messages.TxnOffsetCommitResponse(topics=_topic_errors(codes))


async def _commit_offsets(
    broker: BrokerNode, version: int, request: messages.TxnOffsetCommitRequest, commits: list[OffsetToCommit]
) -> ErrorCode:
    error = await _allow_offsets(broker, version, request)
    if error is not ErrorCode.NONE:
        return error
    who = Committer(request.generation_id, request.member_id, request.group_instance_id)
    producer = (request.producer_id, request.producer_epoch)
    outcome = await broker.groups.commits.commit(request.group_id, who, commits, producer=producer)
    return outcome.code


async def _allow_offsets(broker: BrokerNode, version: int, request: messages.TxnOffsetCommitRequest) -> ErrorCode:
    """As for any first write of a transaction: verified, or from version 5 on added (KIP-890)."""
    if not request.group_id:
        return ErrorCode.INVALID_GROUP_ID
    partition = _offsets_partition(broker, request.group_id)
    who = (request.transactional_id, request.producer_id, request.producer_epoch)
    if version >= 5:
        error = await broker.transactions.add(*who, [partition], client_version=2)
    else:
        error = broker.transactions.verify(*who, partition)
    return write_error(error, is_v2=True, knows_abortable=version >= 4)


# --- ending ---------------------------------------------------------------------------------------------------------
async def end_txn(broker: BrokerNode, ctx: RequestContext, request: messages.EndTxnRequest) -> messages.EndTxnResponse:
    """Commit or abort. The response follows the durable decision."""
    moment = broker.transactions.events.moment()
    owner = await broker.transactions.end(
        request.transactional_id,
        request.producer_id,
        request.producer_epoch,
        commit=request.committed,
        is_v2=ctx.version >= 5,
    )
    who = (request.transactional_id, request.producer_id, request.producer_epoch)
    note = "commit" if request.committed else "abort"
    broker.transactions.events.add(TraceStep.END, *who, owner.error, ctx.client, note=note, moment=moment)
    error = for_version(owner.error, ctx.version, knows_fenced_from=2)
    return messages.EndTxnResponse(error_code=error, producer_id=owner.producer_id, producer_epoch=owner.epoch)


async def write_txn_markers(
    broker: BrokerNode, ctx: RequestContext, request: messages.WriteTxnMarkersRequest
) -> messages.WriteTxnMarkersResponse:
    """Markers written by hand: how an operator aborts a hanging transaction (KIP-664)."""
    turns = Turns()
    results = []
    for marker in request.markers:
        results.append(await _write_marker(broker, marker))
        await turns.next()
    return messages.WriteTxnMarkersResponse(results)


async def _write_marker(broker: BrokerNode, marker: messages.WritableTxnMarker) -> messages.WritableTxnMarkerResult:
    partitions = [(topic.name, index) for topic in marker.topics for index in topic.partition_indexes]
    codes = await broker.write_markers(
        partitions,
        marker.producer_id,
        marker.producer_epoch,
        marker.coordinator_epoch,
        marker.transaction_result,
        max(marker.transaction_version, 1),
    )
    if any(code is ErrorCode.NONE for code in codes.values()):
        broker.counters.ends[marker.transaction_result, OPERATOR] += 1
    return messages.WritableTxnMarkerResult(marker.producer_id, _topic_errors(codes))


# --- operators ------------------------------------------------------------------------------------------------------
async def describe_transactions(
    broker: BrokerNode, ctx: RequestContext, request: messages.DescribeTransactionsRequest
) -> messages.DescribeTransactionsResponse:
    """State, owner and partitions of transactional ids."""
    states = await Turns().map(partial(_describe, broker.transactions), request.transactional_ids)
    return messages.DescribeTransactionsResponse(transaction_states=states)


def _describe(coordinator: TransactionCoordinator, transactional_id: str) -> messages.TransactionState:
    if not transactional_id:
        return messages.TransactionState(error_code=ErrorCode.INVALID_REQUEST, transactional_id=transactional_id)
    txn = coordinator.ids.find(transactional_id)
    if txn is None or txn.epoch == NO_EPOCH:
        return messages.TransactionState(
            error_code=ErrorCode.TRANSACTIONAL_ID_NOT_FOUND, transactional_id=transactional_id
        )
    topics = _by_topic(dict.fromkeys(sorted(txn.partitions), ErrorCode.NONE))
    return messages.TransactionState(
        transactional_id=transactional_id,
        transaction_state=txn.state.label,
        transaction_timeout_ms=txn.timeout_ms,
        transaction_start_time_ms=txn.started_ms,
        producer_id=txn.producer_id,
        producer_epoch=txn.epoch,
        topics=[messages.TransactionTopic(name, list(indexes)) for name, indexes in topics.items()],
    )


async def list_transactions(
    broker: BrokerNode, ctx: RequestContext, request: messages.ListTransactionsRequest
) -> messages.ListTransactionsResponse:
    """All transactional ids, or those that pass every filter."""
    unknown = [name for name in request.state_filters if name not in _STATE_NAMES]
    states = {_STATE_NAMES[name] for name in request.state_filters if name in _STATE_NAMES}
    producer_ids = set(request.producer_id_filters)
    started_before_ms = broker.clock.now_ms() - request.duration_filter
    found = [
        messages.ListedTransaction(id_, txn.producer_id, txn.state.label)
        for id_, txn in broker.transactions.ids.items()
        if (not producer_ids or txn.producer_id in producer_ids)
        and (not request.state_filters or txn.state in states)
        and (request.duration_filter < 0 or txn.started_ms < started_before_ms)
        and txn.epoch != NO_EPOCH
    ]
    if request.transactional_id_pattern:
        try:
            describes = compile_expression(request.transactional_id_pattern)
        except ExpressionError:
            return messages.ListTransactionsResponse(error_code=ErrorCode.INVALID_REGULAR_EXPRESSION)
        # The expression and the ids are the clients' choice: matching may take long, so it is done off the event loop.
        found = await asyncio.to_thread(lambda: [each for each in found if describes(each.transactional_id)])
    return messages.ListTransactionsResponse(unknown_state_filters=unknown, transaction_states=found)


def _by_topic(codes: dict[TopicPartition, ErrorCode]) -> dict[str, dict[int, ErrorCode]]:
    topics: dict[str, dict[int, ErrorCode]] = {}
    for (name, index), code in codes.items():
        topics.setdefault(name, {})[index] = code
    return topics


def _topic_errors(codes: dict[TopicPartition, ErrorCode]) -> list[TopicErrorCodes]:
    return [
        TopicErrorCodes(name, [PartitionErrorCode(index, code) for index, code in partitions.items()])
        for name, partitions in _by_topic(codes).items()
    ]


# --- which error a client of which version gets -----------------------------------------------------------------------
def for_version(error: ErrorCode, version: int, *, knows_fenced_from: int) -> ErrorCode:
    """PRODUCER_FENCED came late; older clients know its predecessor."""
    if error is ErrorCode.PRODUCER_FENCED and version < knows_fenced_from:
        return ErrorCode.INVALID_PRODUCER_EPOCH
    return error


# --- DescribeTransactionEvents (20000): what happened to transactional ids, for `semel trace` and `semel ui` ---


MOST_EVENTS = 10_000


async def describe_transaction_events(
    broker: BrokerNode, context: RequestContext, request: messages.DescribeTransactionEventsRequest
) -> messages.DescribeTransactionEventsResponse:
    kept = broker.transactions.events
    ids = dict.fromkeys(request.transactional_ids)
    found = sorted(event for id_ in ids for event in kept.of(id_)) if ids else kept.all()
    limit = min(max(request.limit, 1), MOST_EVENTS)
    chosen = [event for event in found if event.number > request.after][-limit:]
    return messages.DescribeTransactionEventsResponse(
        now_ms=broker.clock.now_ms(), events=await Turns().map(_message, chosen)
    )


def _message(event: TraceEvent) -> messages.TransactionTraceEvent:
    return messages.TransactionTraceEvent(
        number=event.number,
        time_ms=event.time_ms,
        step=event.step.number,
        api=event.step.api,
        transactional_id=event.transactional_id,
        producer_id=event.producer_id,
        producer_epoch=event.epoch,
        error_code=event.error,
        client=event.client,
        partitions=[messages.TracedPartition(topic, index) for topic, index in event.partitions],
        partition_count=event.partition_count,
        note=event.note,
    )
