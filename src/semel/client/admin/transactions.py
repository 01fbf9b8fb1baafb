"""The admin's part for transactions: open transactions, their producers, and ending what hangs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from semel.client.cluster import Cluster, Leader, NodeTarget, transaction_coordinator
from semel.client.errors import FatalError, KafkaError, error_of
from semel.client.types import TopicPartition
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.transactions import (
    DESCRIBE_PRODUCERS,
    DESCRIBE_TRANSACTIONS,
    INIT_PRODUCER_ID,
    LIST_TRANSACTIONS,
    WRITE_TXN_MARKERS,
    DescribeProducersRequest,
    DescribeTransactionsRequest,
    InitProducerIdRequest,
    ListTransactionsRequest,
    ProducersTopic,
    WritableTxnMarker,
    WritableTxnMarkerTopic,
    WriteTxnMarkersRequest,
)

if TYPE_CHECKING:
    from semel.client.timing import Deadline

FENCING_TIMEOUT_MS = 60_000


class ProducerInfo(msgspec.Struct, frozen=True):
    """A producer whose state a partition has; `transaction_start` is -1 without an open transaction."""

    producer_id: int
    epoch: int
    last_sequence: int
    last_timestamp: int
    coordinator_epoch: int
    transaction_start: int


class TransactionInfo(msgspec.Struct, frozen=True):
    transactional_id: str
    state: str
    producer_id: int
    epoch: int
    timeout_ms: int
    start_time_ms: int
    partitions: list[TopicPartition]
    coordinator: int


class TransactionListing(msgspec.Struct, frozen=True):
    transactional_id: str
    producer_id: int
    state: str


def list_transactions(
    cluster: Cluster, states: Iterable[str], producer_ids: Iterable[int], deadline: Deadline
) -> list[TransactionListing]:
    """The transactional ids that the coordinators know, of all brokers."""
    cluster.retry(lambda: cluster.refresh([], deadline), "looking up the brokers", deadline)
    request = ListTransactionsRequest(state_filters=list(states), producer_id_filters=list(producer_ids))
    found = []
    for node_id in sorted(cluster.metadata.brokers):
        response = cluster.call(NodeTarget(node_id), LIST_TRANSACTIONS, request, timeout_s=deadline.remaining_s())
        if response.unknown_state_filters:
            raise FatalError(
                f"there is no transaction state {response.unknown_state_filters[0]!r}; states are Empty, Ongoing, "
                "PrepareCommit, PrepareAbort, CompleteCommit, CompleteAbort, PrepareEpochFence and Dead"
            )
        found += [
            TransactionListing(entry.transactional_id, entry.producer_id, entry.transaction_state)
            for entry in response.transaction_states
        ]
    return sorted(found, key=lambda entry: entry.transactional_id)


def describe_transaction(cluster: Cluster, transactional_id: str, deadline: Deadline) -> TransactionInfo:
    target = transaction_coordinator(transactional_id)
    try:
        response = cluster.call(
            target,
            DESCRIBE_TRANSACTIONS,
            DescribeTransactionsRequest([transactional_id]),
            timeout_s=deadline.remaining_s(),
            errors=lambda response: (entry.error_code for entry in response.transaction_states),
        )
    except KafkaError as error:
        raise _explained(error, transactional_id) from error
    entry = response.transaction_states[0]
    return TransactionInfo(
        entry.transactional_id,
        entry.transaction_state,
        entry.producer_id,
        entry.producer_epoch,
        entry.transaction_timeout_ms,
        entry.transaction_start_time_ms,
        [TopicPartition(topic.topic, index) for topic in entry.topics for index in topic.partitions],
        cluster.locate(target, deadline).node_id,
    )


def fence(cluster: Cluster, transactional_id: str, deadline: Deadline) -> tuple[int, int]:
    """Takes the transactional id over: what its owner left open is aborted and the owner is refused from now on.

    Returns the new (producer id, epoch). Refuses an id that does not exist, rather than create it."""
    describe_transaction(cluster, transactional_id, deadline)
    request = InitProducerIdRequest(transactional_id=transactional_id, transaction_timeout_ms=FENCING_TIMEOUT_MS)
    response = cluster.call(
        transaction_coordinator(transactional_id), INIT_PRODUCER_ID, request, timeout_s=deadline.remaining_s()
    )
    return response.producer_id, response.producer_epoch


def describe_producers(cluster: Cluster, partition: TopicPartition, deadline: Deadline) -> list[ProducerInfo]:
    """The producers whose state a partition's leader has."""
    response = cluster.call(
        Leader(*partition),
        DESCRIBE_PRODUCERS,
        DescribeProducersRequest([ProducersTopic(partition.topic, [partition.partition])]),
        timeout_s=deadline.remaining_s(),
        errors=lambda response: (part.error_code for topic in response.topics for part in topic.partitions),
    )
    return [
        ProducerInfo(
            entry.producer_id,
            entry.producer_epoch,
            entry.last_sequence,
            entry.last_timestamp,
            entry.coordinator_epoch,
            entry.current_txn_start_offset,
        )
        for entry in response.topics[0].partitions[0].active_producers
    ]


def abort_hanging(cluster: Cluster, partition: TopicPartition, start_offset: int, deadline: Deadline) -> ProducerInfo:
    """Writes an abort marker for the transaction that begins at an offset of a partition and that its coordinator has
    forgotten. Only for such: a live transaction is ended by `fence`."""
    open_ones = {
        producer.transaction_start: producer
        for producer in describe_producers(cluster, partition, deadline)
        if producer.transaction_start >= 0
    }
    producer = open_ones.get(start_offset)
    if producer is None:
        starts = ", ".join(map(str, sorted(open_ones))) or "none"
        raise FatalError(f"{partition} has no open transaction that starts at offset {start_offset}; open: {starts}")
    marker = WritableTxnMarker(
        producer_id=producer.producer_id,
        producer_epoch=producer.epoch,
        transaction_result=False,
        topics=[WritableTxnMarkerTopic(partition.topic, [partition.partition])],
        coordinator_epoch=max(producer.coordinator_epoch, 0),
    )
    response = cluster.call(
        Leader(*partition), WRITE_TXN_MARKERS, WriteTxnMarkersRequest([marker]), timeout_s=deadline.remaining_s()
    )
    for topic in response.markers[0].topics:
        for part in topic.partitions:
            if part.error_code:
                raise error_of(part.error_code, f"aborting the transaction in {partition}")
    return producer


def _explained(error: KafkaError, transactional_id: str) -> KafkaError:
    if error.code is ErrorCode.TRANSACTIONAL_ID_NOT_FOUND:
        return FatalError(
            f"there is no transactional id {transactional_id!r}; `semel txn list` shows what there is", error.code
        )
    return error
