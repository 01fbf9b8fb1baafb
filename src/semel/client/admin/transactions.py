"""The admin's part for transactions: open transactions, their producers, and ending what hangs."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import Any

import msgspec

from semel.client.admin.base import AdminBase
from semel.client.cluster_calls import ClusterCalls, Leader, transaction_coordinator
from semel.client.errors import FatalError, KafkaError, error_of
from semel.client.immediate import blocking
from semel.client.timing import Deadline
from semel.client.types import TopicPartition, checked_partitions
from semel.protocol.errors import ErrorCode
from semel.protocol.messages import transactions as messages

FENCING_TIMEOUT_MS = 60_000
UNDER_WAY = ("Ongoing", "PrepareCommit", "PrepareAbort", "PrepareEpochFence")
NO_TIMEOUT_MS = 2**31 - 1  # of two-phase commit


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

    @property
    def is_two_phase(self) -> bool:
        """Whether it has no timeout: only its owner, or somebody by force, ends it (KIP-939)."""
        return self.timeout_ms == NO_TIMEOUT_MS


class TransactionListing(msgspec.Struct, frozen=True):
    transactional_id: str
    producer_id: int
    state: str


class TransactionAdminCalls(AdminBase):
    async def list_transactions(
        self, states: Iterable[str] = (), producer_ids: Iterable[int] = (), timeout_ms: float | None = None
    ) -> list[TransactionListing]:
        """The transactional ids that the coordinators know, of all brokers."""
        request = messages.ListTransactionsRequest(state_filters=list(states), producer_id_filters=list(producer_ids))
        found = []
        for response in await self._call_all(messages.LIST_TRANSACTIONS, request, self._deadline(timeout_ms)):
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

    async def describe_transaction(self, transactional_id: str, timeout_ms: float | None = None) -> TransactionInfo:
        return await transaction_info(self.cluster, transactional_id, self._deadline(timeout_ms))

    async def abort_transaction(self, transactional_id: str, timeout_ms: float | None = None) -> tuple[int, int]:
        """Aborts what a transactional id has open and fences its owner; the new (producer id, epoch). Refuses an id
        that does not exist, rather than create it."""
        deadline = self._deadline(timeout_ms)
        await transaction_info(self.cluster, transactional_id, deadline)
        request = messages.InitProducerIdRequest(
            transactional_id=transactional_id, transaction_timeout_ms=FENCING_TIMEOUT_MS
        )
        response = await self._call(
            transaction_coordinator(transactional_id), messages.INIT_PRODUCER_ID, request, deadline
        )
        return response.producer_id, response.producer_epoch

    async def describe_producers(
        self, partition: tuple[str, int], timeout_ms: float | None = None
    ) -> list[ProducerInfo]:
        """The producers whose state a partition's leader has."""
        (checked,) = checked_partitions([partition])
        return await self._describe_producers(checked, self._deadline(timeout_ms))

    async def _describe_producers(self, partition: TopicPartition, deadline: Deadline) -> list[ProducerInfo]:
        response = await self._call(
            Leader(*partition),
            messages.DESCRIBE_PRODUCERS,
            messages.DescribeProducersRequest([messages.ProducersTopic(partition.topic, [partition.partition])]),
            deadline,
            errors=lambda response: (part.error_code for topic in response.topics for part in topic.partitions),
        )
        return producers_in(response.topics[0].partitions[0])

    async def abort_hanging_transaction(
        self, partition: tuple[str, int], start_offset: int, timeout_ms: float | None = None
    ) -> ProducerInfo:
        """Ends a transaction that its coordinator has forgotten, by an abort marker into the partition. Only for such:
        a live transaction, which a coordinator lists, is refused and ended by `abort_transaction`."""
        deadline = self._deadline(timeout_ms)
        (checked,) = checked_partitions([partition])
        open_ones = {
            producer.transaction_start: producer
            for producer in await self._describe_producers(checked, deadline)
            if producer.transaction_start >= 0
        }
        producer = open_ones.get(start_offset)
        if producer is None:
            starts = ", ".join(map(str, sorted(open_ones))) or "none"
            raise FatalError(f"{checked} has no open transaction that starts at offset {start_offset}; open: {starts}")
        await self._refuse_live(checked, producer.producer_id, deadline)
        marker = messages.WritableTxnMarker(
            producer_id=producer.producer_id,
            producer_epoch=producer.epoch,
            transaction_result=False,
            topics=[messages.WritableTxnMarkerTopic(checked.topic, [checked.partition])],
            coordinator_epoch=max(producer.coordinator_epoch, 0),
        )
        response = await self._call(
            Leader(*checked), messages.WRITE_TXN_MARKERS, messages.WriteTxnMarkersRequest([marker]), deadline
        )
        for topic in response.markers[0].topics:
            for part in topic.partitions:
                if part.error_code:
                    raise error_of(part.error_code, f"aborting the transaction in {checked}")
        return producer

    async def _refuse_live(self, partition: TopicPartition, producer_id: int, deadline: Deadline) -> None:
        """An abort marker in one partition of a transaction that commits would lose what it wrote there."""
        for entry in await self.list_transactions(producer_ids=[producer_id], timeout_ms=deadline.remaining_s() * 1000):
            found = await transaction_info(self.cluster, entry.transactional_id, deadline)
            if found.producer_id == producer_id and partition in found.partitions and found.state in UNDER_WAY:
                raise FatalError(
                    f"the transaction in {partition} is alive: it is {found.state} and belongs to the transactional id "
                    f"{entry.transactional_id!r}. To abort it in all of its partitions: semel txn abort "
                    f"{shlex.quote(entry.transactional_id)}"
                )


def producers_in(partition: messages.PartitionResponse) -> list[ProducerInfo]:
    return [
        ProducerInfo(
            entry.producer_id,
            entry.producer_epoch,
            entry.last_sequence,
            entry.last_timestamp,
            entry.coordinator_epoch,
            entry.current_txn_start_offset,
        )
        for entry in partition.active_producers
    ]


async def transaction_info(cluster: ClusterCalls[Any], transactional_id: str, deadline: Deadline) -> TransactionInfo:
    target = transaction_coordinator(transactional_id)
    try:
        response = await cluster.call(
            target,
            messages.DESCRIBE_TRANSACTIONS,
            messages.DescribeTransactionsRequest([transactional_id]),
            timeout_s=deadline.remaining_s(),
            errors=lambda response: (entry.error_code for entry in response.transaction_states),
        )
    except KafkaError as error:
        raise _explained(error, transactional_id) from error
    return info_of(response.transaction_states[0], (await cluster.locate(target, deadline)).node_id)


def info_of(entry: messages.TransactionState, coordinator: int) -> TransactionInfo:
    """A transaction as its coordinator describes it."""
    return TransactionInfo(
        entry.transactional_id,
        entry.transaction_state,
        entry.producer_id,
        entry.producer_epoch,
        entry.transaction_timeout_ms,
        entry.transaction_start_time_ms,
        [TopicPartition(topic.topic, index) for topic in entry.topics for index in topic.partitions],
        coordinator,
    )


describe_transaction = blocking(transaction_info)


def _explained(error: KafkaError, transactional_id: str) -> KafkaError:
    if error.code is ErrorCode.TRANSACTIONAL_ID_NOT_FOUND:
        return FatalError(
            f"there is no transactional id {transactional_id!r}; `semel txn list` shows what there is", error.code
        )
    return error
