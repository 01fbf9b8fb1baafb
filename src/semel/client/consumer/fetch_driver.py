"""The driver of fetching: sends what the core plans, takes the responses, and does its look-ups aside.

What they mean is decided by `fetching.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from semel.client.aside import TaskOutcome
from semel.client.cluster_calls import Leader, NodeTarget
from semel.client.consumer.fetcher import FIRST_VERSION_WITH_TOPIC_IDS, FetchPlan
from semel.client.consumer.fetching import CommittedLookUp, FetchingCore, LeadersLookUp, OffsetsLookUp
from semel.client.errors import KafkaError, error_of
from semel.client.group.offset_calls import fetch_committed, list_offsets
from semel.client.group.offset_requests import OffsetLookup
from semel.client.metadata import Metadata
from semel.client.network import Connection, Network
from semel.client.settings import ConsumerSettings
from semel.client.timing import Deadline
from semel.client.types import OffsetAndMetadata, TopicPartition
from semel.client.wire import Pending
from semel.protocol.errors import DecodeError, ErrorCode
from semel.protocol.messages.records import FETCH
from semel.protocol.schema import NO_UUID

LOOKUP_LANE = "lookup"
Value = TypeVar("Value")


class FetchDriver(Generic[Connection]):
    def __init__(
        self,
        core: FetchingCore,
        network: Network[Connection],
        settings: ConsumerSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._network = network
        self._calls = network.calls
        self._aside = network.aside
        self._settings = settings
        self._clock = clock
        self._connections: dict[int, Connection] = {}
        self._in_flight: dict[int, tuple[FetchPlan, Pending]] = {}
        self.requests_total = self.failed_total = 0

    @contextmanager
    def _deciding(self) -> Iterator[FetchingCore]:
        """The core; afterwards the leaders that it doubts are forgotten."""
        try:
            yield self._core
        finally:
            for partition in self._core.take_doubted():
                self._calls.forget(Leader(*partition))

    # -- requests ------------------------------------------------------------------------------------------------------
    def send(self, draining: bool = False) -> None:
        """Sends a fetch to every broker with none in flight that leads a partition which may hold more (see `plan`)."""
        now_s = self._clock()
        stale = self._core.stale_leaders(now_s)
        if stale is not None:
            self._look_up_leaders(stale)
        connecting = (node for node in self._calls.metadata.brokers if self._aside.is_busy(_lane(node)))
        for plan in self._core.plan([*self._in_flight, *connecting], now_s, draining):
            try:
                connection = self._connection_to(plan)
                if connection is not None:
                    self._in_flight[plan.node_id] = (plan, self._send(connection, plan))
            except KafkaError as error:
                self._failed(plan, error, now_s)

    def _send(self, connection: Connection, plan: FetchPlan) -> Pending:
        by_name = NO_UUID in plan.names
        at_most = FIRST_VERSION_WITH_TOPIC_IDS - 1 if by_name else 0x7FFF
        version = connection.capabilities.version_of(FETCH, at_most)
        timeout_s = (self._settings.request_timeout_ms + self._settings.fetch_max_wait_ms) / 1000
        pending = self._network.send(
            connection, FETCH, plan.request, version=version, timeout_s=timeout_s, may_be_large=True
        )
        self.requests_total += 1
        return pending

    def _connection_to(self, plan: FetchPlan) -> Connection | None:
        """To the plan's broker; if there is none, one is opened aside."""
        node_id = plan.node_id
        connection = self._connections.get(node_id)
        if connection is not None and not connection.closed and not connection.retiring:
            return connection
        self._connections.pop(node_id, None)
        self._aside.start(
            _lane(node_id),
            lambda: self._calls.connect(NodeTarget(node_id), self.look_up_deadline(), _lane(node_id)),
            lambda outcome: self._on_connected(plan, outcome),
        )
        return None

    def _on_connected(self, plan: FetchPlan, outcome: TaskOutcome[Connection]) -> None:
        try:
            self._connections[plan.node_id] = outcome.result()
        except KafkaError as error:
            self._failed(plan, error, outcome.started_s)

    @property
    def in_flight_count(self) -> int:
        return len(self._in_flight)

    def _failed(self, plan: FetchPlan, error: KafkaError, since_s: float) -> None:
        self.failed_total += 1
        with self._deciding() as core:
            core.failed(plan, error, self._clock(), since_s)

    # -- waiting and receiving -----------------------------------------------------------------------------------------
    def connections(self) -> list[Connection]:
        return [connection for connection in self._connections.values() if not connection.closed]

    def has_response(self) -> bool:
        """Whether `receive` would find one."""
        return any(pending.done for _, pending in self._in_flight.values())

    def receive(self) -> None:
        """Takes the responses that have come. Raises what the program must decide about."""
        self._network.receive(self.connections())
        for node_id, (plan, pending) in list(self._in_flight.items()):
            if pending.done:
                del self._in_flight[node_id]
                self._on_response(plan, pending)

    def _on_response(self, plan: FetchPlan, pending: Pending) -> None:
        now_s = self._clock()
        try:
            response = pending.result()
        except DecodeError as error:
            self._failed(plan, error_of(ErrorCode.NETWORK_EXCEPTION, "fetching", str(error)), now_s)
        except KafkaError as error:
            self._failed(plan, error, now_s)
        else:
            with self._deciding() as core:
                core.responded(plan, response, now_s)

    # -- look-ups ------------------------------------------------------------------------------------------------------
    def look_up(
        self, work: Callable[[], Coroutine[Any, Any, Value]], then: Callable[[TaskOutcome[Value]], None]
    ) -> bool:
        """Starts a look-up unless another one is under way."""
        return self._aside.start(LOOKUP_LANE, work, then)

    def look_up_deadline(self) -> Deadline:
        """For one attempt of what is done aside."""
        return Deadline(min(self._settings.request_timeout_ms, self._settings.default_api_timeout_ms) / 1000)

    def resolve(self) -> None:
        """Looks up the offsets that are still unknown. One try."""
        wanted = self._core.unresolved(self._clock())
        if isinstance(wanted, CommittedLookUp):
            self._look_up_committed(wanted)
        elif wanted is not None:
            self._look_up_offsets(wanted)

    def _look_up_leaders(self, stale: LeadersLookUp) -> None:
        def then(outcome: TaskOutcome[Metadata]) -> None:
            failure: KafkaError | None = None
            try:
                outcome.result()
            except KafkaError as error:
                failure = error
            with self._deciding() as core:
                core.leaders_found(stale, self._clock(), outcome.started_s, failure)

        self.look_up(lambda: self._calls.refresh(stale.topics, self.look_up_deadline(), LOOKUP_LANE), then)

    def _look_up_committed(self, wanted: CommittedLookUp) -> None:
        calls, group_id, partitions, member = self._calls, wanted.group_id, wanted.partitions, wanted.member
        stable = self._settings.reads_committed

        def then(outcome: TaskOutcome[dict[TopicPartition, OffsetAndMetadata]]) -> None:
            with self._deciding() as core:
                try:
                    committed = outcome.result()
                except KafkaError as error:
                    core.committed_not_found(wanted, error, self._clock(), outcome.started_s)
                else:
                    core.committed_found(wanted, committed)

        self.look_up(
            lambda: fetch_committed(calls, group_id, partitions, stable, self.look_up_deadline(), LOOKUP_LANE, member),
            then,
        )

    def _look_up_offsets(self, wanted: OffsetsLookUp) -> None:
        def then(outcome: TaskOutcome[OffsetLookup]) -> None:
            found, failed = outcome.result()
            with self._deciding() as core:
                core.offsets_found(wanted, found, failed, self._clock(), outcome.started_s)

        isolation = self._settings.isolation
        self.look_up(
            lambda: list_offsets(self._calls, wanted.wanted, isolation, self.look_up_deadline(), LOOKUP_LANE), then
        )


def _lane(node_id: int) -> str:
    return f"fetch-{node_id}"
