"""The requests of a transaction, each as one call: to the coordinator of the transactional id or of a group.

Both generations of the protocol: TV1 adds partitions and groups to a transaction before they are written; in TV2 the
write itself does it, and every end raises the epoch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from semel.client.cluster import Cluster
from semel.client.cluster_calls import (
    AnyNode,
    ClusterCalls,
    Request,
    Response,
    group_coordinator,
    transaction_coordinator,
)
from semel.client.errors import ConnectionFailedError, TimedOutError, UnsupportedByBrokerError
from semel.client.group.offset_requests import by_topic
from semel.client.immediate import blocking
from semel.client.producer.batches import Identity, Place
from semel.client.producer.transaction import VERSIONS
from semel.client.settings import ProducerSettings
from semel.client.timing import Deadline
from semel.client.types import CheckedOffsets, GroupMetadata
from semel.protocol.api import Api
from semel.protocol.errors import ErrorCode
from semel.protocol.messages import transactions as messages
from semel.protocol.messages.records import PRODUCE

FEATURE = "transaction.version"
TWO_PHASE_VERSION = 6  # of InitProducerId
FIRST_WAIT_MS = 1  # a coordinator that is busy with the last transaction is done in milliseconds


class EndResult(NamedTuple):
    """The identity to go on with, and whether an earlier request may have been lost on its way."""

    identity: Identity
    was_repeated: bool


async def request_identity(calls: ClusterCalls[Any], timeout_s: float, lane: str = "main") -> Identity:
    """A producer id for an idempotent producer without transactions."""
    request = messages.InitProducerIdRequest(None, 2**31 - 1)
    response = await calls.call(
        AnyNode(), messages.INIT_PRODUCER_ID, request, timeout_s=timeout_s, at_most=5, lane=lane
    )
    return Identity(response.producer_id, response.producer_epoch)


new_identity = blocking(request_identity)


class CoordinatorCalls:
    """Calls in the name of one transactional id. Errors are raised as `semel.client.errors` sorts them."""

    def __init__(self, calls: ClusterCalls[Any], settings: ProducerSettings, transactional_id: str) -> None:
        self.cluster = calls
        self.transactional_id = transactional_id
        self._settings = settings
        self._target = transaction_coordinator(transactional_id)

    async def _call(self, api: Api[Request, Response], request: Request, timeout_s: float, **options: Any) -> Response:
        """To the coordinator of the transactional id."""
        return await self.cluster.call(
            self._target, api, request, timeout_s=timeout_s, first_wait_ms=FIRST_WAIT_MS, **options
        )

    async def generation(self, timeout_s: float) -> int:
        """2 if the cluster finalised KIP-890's transactions, else 1."""
        finalised = await self.cluster.feature(FEATURE, self._target, timeout_s)
        return max(1, min(finalised, self._settings.transaction_version_max))

    async def fences_open_transactions(self, timeout_s: float) -> bool:
        """Whether the coordinator takes an owner that renews its id while its transaction is open for another one, and
        fences it: Kafka before 4.1, which Produce v13 came with."""
        found = await self.cluster.capabilities("looking up Produce", self._target, timeout_s)
        return not found.has(PRODUCE, at_least=13)

    async def init(self, timeout_s: float, expected: Identity | None = None) -> Identity:
        """Takes over the id: fences its earlier owners, finishes or aborts what they left.

        With the expected identity only if it is still ours, which raises the epoch; a `FencedError` if not.
        """
        response = await self._init(timeout_s, expected, keep_prepared=False)
        return Identity(response.producer_id, response.producer_epoch)

    async def init_keeping(self, timeout_s: float) -> tuple[Identity, Identity | None]:
        """Takes over the id and keeps what its last owner left open; that transaction's identity, if there is one."""
        response = await self._init(timeout_s, None, keep_prepared=True)
        ongoing = Identity(response.ongoing_txn_producer_id, response.ongoing_txn_producer_epoch)
        return Identity(response.producer_id, response.producer_epoch), ongoing if ongoing.producer_id >= 0 else None

    async def _init(
        self, timeout_s: float, expected: Identity | None, keep_prepared: bool
    ) -> messages.InitProducerIdResponse:
        settings = self._settings
        request = messages.InitProducerIdRequest(self.transactional_id, settings.transaction_timeout_ms)
        if expected is not None:
            request.producer_id, request.producer_epoch = expected
        if not settings.transaction_two_phase_commit_enable:
            at_least = 3 if expected is not None else 0
            return await self._call(messages.INIT_PRODUCER_ID, request, timeout_s, at_most=5, at_least=at_least)
        request.enable2_pc, request.keep_prepared_txn = True, keep_prepared
        try:
            return await self._call(messages.INIT_PRODUCER_ID, request, timeout_s, at_least=TWO_PHASE_VERSION)
        except UnsupportedByBrokerError as error:
            raise UnsupportedByBrokerError(
                "the coordinator does not serve two-phase commit (KIP-939: InitProducerId version "
                f"{TWO_PHASE_VERSION}): {error}. Apache Kafka up to 4.3 does not; semel's broker does with the setting "
                "transaction.two.phase.commit.enable=true. Without it, leave that option of the producer out",
                error.code,
            ) from error

    async def add_partitions(
        self, identity: Identity, places: Iterable[Place], timeout_s: float, lane: str = "main"
    ) -> None:
        """TV1: these partitions will be written."""
        request = messages.AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=self.transactional_id,
            v3_and_below_producer_id=identity.producer_id,
            v3_and_below_producer_epoch=identity.epoch,
            v3_and_below_topics=[
                messages.AddPartitionsToTxnTopic(name, partitions) for name, partitions in by_topic(places).items()
            ],
        )
        api = messages.ADD_PARTITIONS_TO_TXN
        await self._call(api, request, timeout_s, errors=_partition_errors, at_most=3, lane=lane)

    async def commit_offsets(
        self,
        identity: Identity,
        group: GroupMetadata,
        offsets: CheckedOffsets,
        generation: int,
        timeout_s: float,
    ) -> None:
        """A group's offsets become part of the transaction."""
        deadline = Deadline(timeout_s)
        if generation == 1:
            request = messages.AddOffsetsToTxnRequest(self.transactional_id, *identity, group.group_id)
            await self._call(messages.ADD_OFFSETS_TO_TXN, request, deadline.remaining_s())
        low, high = VERSIONS[generation].txn_offset_commit
        await self.cluster.call(
            group_coordinator(group.group_id),
            messages.TXN_OFFSET_COMMIT,
            self._offsets_request(identity, group, offsets),
            timeout_s=deadline.remaining_s(),
            errors=lambda response: [part.error_code for topic in response.topics for part in topic.partitions],
            at_least=max(low, 3 if group.member_id or group.generation_id >= 0 else 0),
            at_most=high,
            first_wait_ms=FIRST_WAIT_MS,
        )

    def _offsets_request(
        self, identity: Identity, group: GroupMetadata, offsets: CheckedOffsets
    ) -> messages.TxnOffsetCommitRequest:
        topics: dict[str, messages.TxnOffsetCommitRequestTopic] = {}
        for (name, partition), committed in offsets.items():
            topic = topics.setdefault(name, messages.TxnOffsetCommitRequestTopic(name))
            topic.partitions.append(
                messages.TxnOffsetCommitRequestPartition(
                    partition, committed.offset, committed.leader_epoch, committed.metadata
                )
            )
        return messages.TxnOffsetCommitRequest(
            self.transactional_id,
            group.group_id,
            *identity,
            group.generation_id,
            group.member_id,
            group.group_instance_id,
            list(topics.values()),
        )

    async def end(
        self, identity: Identity, commit: bool, generation: int, deadline: Deadline, may_be_repeat: bool = False
    ) -> EndResult:
        """Commits or aborts. After a lost response EndTxn is sent again: the coordinator recognises a repeated end.

        Raises `EndUnknownError` if no response came in time.
        """
        low, high = VERSIONS[generation].end_txn
        request = messages.EndTxnRequest(self.transactional_id, *identity, commit)
        repeated = may_be_repeat
        backoff = self.cluster.backoff()
        while True:
            try:
                remaining_s = deadline.remaining_s()
                response = await self._call(
                    messages.END_TXN, request, remaining_s, resend=False, at_least=low, at_most=high
                )
            except ConnectionFailedError as error:
                repeated = True
                self.cluster.forget(self._target)
                if not await self.cluster.pause(backoff, deadline):
                    raise EndUnknownError(f"no response to EndTxn: {error}", maybe_sent=repeated) from error
                continue
            except TimedOutError as error:
                raise EndUnknownError(str(error), maybe_sent=repeated) from error
            except Exception as error:
                error.was_repeated = repeated  # type: ignore[attr-defined]
                raise
            if generation == 2:
                return EndResult(Identity(response.producer_id, response.producer_epoch), repeated)
            return EndResult(identity, repeated)


class CoordinatorClient:
    """The same calls for threads, which block."""

    def __init__(self, cluster: Cluster, settings: ProducerSettings, transactional_id: str) -> None:
        self.cluster = cluster
        self.calls = CoordinatorCalls(cluster.calls, settings, transactional_id)

    generation = blocking(CoordinatorCalls.generation)
    fences_open_transactions = blocking(CoordinatorCalls.fences_open_transactions)
    init = blocking(CoordinatorCalls.init)
    init_keeping = blocking(CoordinatorCalls.init_keeping)
    add_partitions = blocking(CoordinatorCalls.add_partitions)
    commit_offsets = blocking(CoordinatorCalls.commit_offsets)
    end = blocking(CoordinatorCalls.end)


class EndUnknownError(TimedOutError):
    """EndTxn had no response in time; `maybe_sent` says whether the coordinator may have got it."""

    def __init__(self, message: str, code: ErrorCode | None = None, maybe_sent: bool = False) -> None:
        super().__init__(message, code)
        self.maybe_sent = maybe_sent


def _partition_errors(response: messages.AddPartitionsToTxnResponse) -> list[int]:
    """The cause first: partitions that were only not attempted say nothing."""
    codes = [
        partition.partition_error_code
        for topic in response.results_by_topic_v3_and_below
        for partition in topic.results_by_partition
    ]
    return sorted(codes, key=lambda code: code == 55)
