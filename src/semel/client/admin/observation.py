"""The admin's part for those who look at a whole cluster: what many single calls would find out, with few requests."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from semel.client.admin.base import AdminBase
from semel.client.admin.transactions import ProducerInfo, TransactionInfo, info_of, producers_in
from semel.client.cluster_calls import Leader, NodeTarget
from semel.client.errors import KafkaError
from semel.client.group.offset_calls import list_offsets_retried
from semel.client.group.offset_requests import (
    LAST_VERSION_WITH_NAMES,
    LATEST,
    READ_COMMITTED,
    READ_UNCOMMITTED,
    by_topic,
)
from semel.client.timing import Deadline
from semel.client.types import OffsetAndMetadata, TopicPartition
from semel.protocol.errors import ErrorCode
from semel.protocol.messages import groups as group_messages
from semel.protocol.messages import offsets as offset_messages
from semel.protocol.messages import transactions as messages

log = logging.getLogger("semel.client")

IDS_PER_REQUEST = 1_000
PARTITIONS_PER_REQUEST = 2_000
GROUPS_PER_REQUEST = 200
DECIDED = ("PrepareCommit", "PrepareAbort")  # transactions whose markers are on their way
MARKERS_MS = 5_000
LOOK_AGAIN_MS = 10
GONE = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID)


class _OpenTransaction(NamedTuple):
    """What a partition has of a transaction without a marker."""

    place: TopicPartition
    producer_id: int
    start: int


class TransactionStep(msgspec.Struct, frozen=True):
    """One step of a transaction as semel's broker saw it. `step` is its number in the figure of KIP-98."""

    number: int
    time_ms: int
    step: str
    api: str
    transactional_id: str
    producer_id: int
    epoch: int
    error: str  # the name of its error code; empty: none
    client: str  # id and address of the client; empty: the broker itself
    partitions: list[TopicPartition]  # some of them
    partition_count: int
    note: str


class GroupCommits(msgspec.Struct, frozen=True):
    """A group and its committed offsets; `unstable` are those that an open transaction has newer ones for."""

    state: str
    committed: dict[TopicPartition, OffsetAndMetadata]
    unstable: list[TopicPartition]


class ObservationCalls(AdminBase):
    async def describe_transactions(
        self, states: Iterable[str] = (), timeout_ms: float | None = None
    ) -> list[TransactionInfo]:
        """All transactional ids, or those in one of these states, as `describe_transaction` shows one."""
        deadline = self._deadline(timeout_ms)
        await self.cluster.retry(lambda: self.cluster.refresh([], deadline), "looking up the brokers", deadline)
        found: list[TransactionInfo] = []
        for node_id in sorted(self.cluster.metadata.brokers):
            request = messages.ListTransactionsRequest(state_filters=list(states))
            listed = await self._call(NodeTarget(node_id), messages.LIST_TRANSACTIONS, request, deadline)
            ids = [entry.transactional_id for entry in listed.transaction_states]
            for at in range(0, len(ids), IDS_PER_REQUEST):
                found += await self._described(node_id, ids[at : at + IDS_PER_REQUEST], deadline)
        return sorted(found, key=lambda each: each.transactional_id)

    async def _described(self, node_id: int, ids: list[str], deadline: Deadline) -> list[TransactionInfo]:
        """What the coordinator says that listed them. Ids that have gone since are left out."""
        request = messages.DescribeTransactionsRequest(ids)
        response = await self._call(NodeTarget(node_id), messages.DESCRIBE_TRANSACTIONS, request, deadline, None)
        return [info_of(entry, node_id) for entry in response.transaction_states if entry.error_code == ErrorCode.NONE]

    async def producers_of(
        self, partitions: Iterable[tuple[str, int]], timeout_ms: float | None = None
    ) -> dict[TopicPartition, list[ProducerInfo]]:
        """The producers that partitions know, with a request to each leader. Partitions that have no leader, or moved
        just now, are left out."""
        deadline = self._deadline(timeout_ms)
        by_leader: dict[int, list[TopicPartition]] = {}
        for topic, index in partitions:
            try:
                leader = (await self.cluster.partition(topic, index, deadline)).leader
            except KafkaError:
                continue
            by_leader.setdefault(leader, []).append(TopicPartition(topic, index))
        found: dict[TopicPartition, list[ProducerInfo]] = {}
        for leader, wanted in by_leader.items():
            for at in range(0, len(wanted), PARTITIONS_PER_REQUEST):
                found |= await self._producers_at(leader, wanted[at : at + PARTITIONS_PER_REQUEST], deadline)
        return found

    async def await_markers(self, partitions: Iterable[tuple[str, int]], timeout_ms: float = MARKERS_MS) -> None:
        """Waits until the transactions that are decided now have their markers in these partitions: a commit is
        acknowledged before that, and who reads up to the end in that moment would miss it. Open transactions are not
        waited for, nor those that the brokers do not show to this client."""
        deadline = self._deadline(timeout_ms)
        backoff = self.cluster.backoff(LOOK_AGAIN_MS)
        try:
            places = await self._unstable([TopicPartition(*place) for place in partitions], deadline)
            decided = await self._decided_in(places, deadline)
            while decided & await self._open_in(places, deadline):
                if not await self.cluster.pause(backoff, deadline):
                    return
        except KafkaError as error:  # who reads goes up to the last stable offset, as without this
            log.debug("not known whether markers are on their way: %s", error)

    async def _unstable(self, places: list[TopicPartition], deadline: Deadline) -> list[TopicPartition]:
        """The partitions that end behind their last stable offset."""
        wanted = dict.fromkeys(places, LATEST)
        stable = await list_offsets_retried(self.cluster, wanted, READ_COMMITTED, deadline)
        ends = await list_offsets_retried(self.cluster, wanted, READ_UNCOMMITTED, deadline)
        return [place for place in places if stable[place].offset < ends[place].offset]

    async def _open_in(self, places: list[TopicPartition], deadline: Deadline) -> set[_OpenTransaction]:
        found = await self.producers_of(places, deadline.remaining_s() * 1000) if places else {}
        return {
            _OpenTransaction(place, each.producer_id, each.transaction_start)
            for place, known in found.items()
            for each in known
            if each.transaction_start >= 0
        }

    async def _decided_in(self, places: list[TopicPartition], deadline: Deadline) -> set[_OpenTransaction]:
        still_open = await self._open_in(places, deadline)
        ids = sorted({each.producer_id for each in still_open})
        if not ids:
            return set()
        request = messages.ListTransactionsRequest(state_filters=list(DECIDED), producer_id_filters=ids)
        responses = await self._call_all(messages.LIST_TRANSACTIONS, request, deadline)
        decided = {entry.producer_id for response in responses for entry in response.transaction_states}
        return {each for each in still_open if each.producer_id in decided}

    async def offsets_of_existing(
        self, places: Iterable[TopicPartition], at: int, isolation: int, timeout_ms: float | None = None
    ) -> dict[TopicPartition, int]:
        """The offset for a time (or EARLIEST, LATEST) in each partition. Those that do not exist are left out."""
        wanted = dict.fromkeys(places, at)
        found = await list_offsets_retried(self.cluster, wanted, isolation, self._deadline(timeout_ms), GONE)
        return {place: each.offset for place, each in found.items()}

    async def _producers_at(
        self, node_id: int, wanted: list[TopicPartition], deadline: Deadline
    ) -> dict[TopicPartition, list[ProducerInfo]]:
        request = messages.DescribeProducersRequest(
            [messages.ProducersTopic(*each) for each in by_topic(wanted).items()]
        )
        response = await self._call(NodeTarget(node_id), messages.DESCRIBE_PRODUCERS, request, deadline, None)
        found = {}
        for described in response.topics:
            for part in described.partitions:
                if part.error_code:
                    self.cluster.forget(Leader(described.name, part.partition_index))
                else:
                    found[TopicPartition(described.name, part.partition_index)] = producers_in(part)
        return found

    async def committed_of_all(self, timeout_ms: float | None = None) -> dict[str, GroupCommits]:
        """State and committed offsets of all groups, and which of these offsets an open transaction is about to move.
        Groups that moved to another broker just now are left out."""
        deadline = self._deadline(timeout_ms)
        await self.cluster.retry(lambda: self.cluster.refresh([], deadline), "looking up the brokers", deadline)
        found: dict[str, GroupCommits] = {}
        for node_id in sorted(self.cluster.metadata.brokers):
            target = NodeTarget(node_id)
            listed = await self._call(target, group_messages.LIST_GROUPS, group_messages.ListGroupsRequest(), deadline)
            states = {group.group_id: group.group_state for group in listed.groups}
            for at in range(0, len(states), GROUPS_PER_REQUEST):
                ids = list(states)[at : at + GROUPS_PER_REQUEST]
                stable = await self._committed_at(target, ids, True, deadline)
                unstable = [group for group, each in stable.items() if each[1]]
                now = await self._committed_at(target, unstable, False, deadline) if unstable else {}
                for group, (offsets, pending) in stable.items():
                    found[group] = GroupCommits(states[group], now[group][0] if group in now else offsets, pending)
        return found

    async def _committed_at(
        self, target: NodeTarget, ids: list[str], require_stable: bool, deadline: Deadline
    ) -> dict[str, tuple[dict[TopicPartition, OffsetAndMetadata], list[TopicPartition]]]:
        """Of each group: its committed offsets, and the partitions whose offset is pending."""
        groups = [offset_messages.OffsetFetchRequestGroup(group, topics=None) for group in ids]
        response = await self.cluster.call(
            target,
            offset_messages.OFFSET_FETCH,
            offset_messages.OffsetFetchRequest(groups=groups, require_stable=require_stable),
            timeout_s=deadline.remaining_s(),
            errors=None,
            at_most=LAST_VERSION_WITH_NAMES,
            at_least=8,
        )
        found = {}
        for group in response.groups:
            if group.error_code:
                continue
            committed: dict[TopicPartition, OffsetAndMetadata] = {}
            pending: list[TopicPartition] = []
            for topic in group.topics:
                for part in topic.partitions:
                    place = TopicPartition(topic.name, part.partition_index)
                    if part.error_code == ErrorCode.UNSTABLE_OFFSET_COMMIT:
                        pending.append(place)
                    elif part.committed_offset >= 0:
                        committed[place] = OffsetAndMetadata(part.committed_offset, part.metadata or "")
            found[group.group_id] = (committed, pending)
        return found

    async def transaction_events(
        self,
        transactional_ids: Iterable[str] = (),
        after: int = -1,
        limit: int = 1000,
        timeout_ms: float | None = None,
    ) -> list[TransactionStep] | None:
        """The last steps of transactions, oldest first. None: the broker is not semel's and keeps none."""
        deadline = self._deadline(timeout_ms)
        capabilities = await self.cluster.capabilities("looking up the APIs", timeout_s=deadline.remaining_s())
        api = messages.DESCRIBE_TRANSACTION_EVENTS
        if not capabilities.has(api):
            return None
        request = messages.DescribeTransactionEventsRequest(list(transactional_ids), after, limit)
        found: list[TransactionStep] = []
        for response in await self._call_all(api, request, deadline):
            found += [_step(event) for event in response.events]
        return found


def _step(event: messages.TransactionTraceEvent) -> TransactionStep:
    return TransactionStep(
        event.number,
        event.time_ms,
        event.step,
        event.api,
        event.transactional_id,
        event.producer_id,
        event.producer_epoch,
        ErrorCode.of(event.error_code).name if event.error_code else "",
        event.client,
        [TopicPartition(each.topic, each.partition) for each in event.partitions],
        event.partition_count,
        event.note,
    )
