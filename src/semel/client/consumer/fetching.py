"""Fetching over the network: sends what the fetcher plans, takes the responses, and finds offsets to start from."""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from semel.client.aside import Aside, TaskOutcome
from semel.client.cluster import Cluster, Leader, NodeTarget
from semel.client.connection import BrokerConnection
from semel.client.consumer.assigned_partitions import AssignedPartitions, PartitionState, ResetTo
from semel.client.consumer.fetcher import FIRST_VERSION_WITH_TOPIC_IDS, Fetcher, FetchFailure, FetchPlan
from semel.client.errors import ConnectionFailedError, KafkaError, TimedOutError, error_of
from semel.client.group.offsets import OffsetLookup, fetch_committed, list_offsets
from semel.client.metadata import Metadata
from semel.client.settings import ConsumerSettings
from semel.client.timing import Deadline
from semel.client.types import (
    CorruptRecordError,
    NoOffsetError,
    OffsetAndMetadata,
    OffsetOutOfRangeError,
    PartitionError,
    TopicPartition,
    UnknownPartitionError,
)
from semel.client.wire import Pending
from semel.protocol.errors import DecodeError, ErrorCode, Recovery
from semel.protocol.messages.records import FETCH
from semel.protocol.schema import NO_UUID

LOOKUP_LANE = "lookup"
_UNKNOWN = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID)
Value = TypeVar("Value")
Versioned = tuple[PartitionState, int]  # and its version when a look-up began
_RESETS = {"earliest": ResetTo.EARLIEST, "latest": ResetTo.LATEST}


log = logging.getLogger(__name__)


class RetryBudget:
    """How long a consumer retries before poll() raises: default.api.timeout.ms. Before any broker was reached, a
    refused connection is raised when poll()'s own timeout ends: a wrong address must not look like an empty topic."""

    def __init__(
        self, limit_s: float, was_reached: Callable[[], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit_s = limit_s
        self._was_reached = was_reached
        self._clock = clock
        self._since_s: float | None = None
        self._last: KafkaError | None = None

    def succeeded(self) -> None:
        self._since_s = self._last = None

    def failed(self, error: KafkaError, since_s: float | None = None) -> None:
        """An attempt failed; `since_s`: when it began."""
        if self._last is None or str(self._last) != str(error):
            log.warning("consumer: %s", error)
        if self._since_s is None:
            self._since_s = self._clock() if since_s is None else since_s
        self._last = error

    def check(self, poll_ends: bool) -> None:
        """Raises if it has lasted too long."""
        if self._last is None or self._since_s is None:
            return
        lasted_s = self._clock() - self._since_s
        is_refused = isinstance(self._last, ConnectionFailedError) and not isinstance(self._last, TimeoutError)
        if lasted_s >= self._limit_s or (poll_ends and is_refused and not self._was_reached()):
            last, self._since_s, self._last = self._last, None, None
            raise TimedOutError(
                f"nothing could be read for {lasted_s:.3g} s; the last try: {last}", last.code
            ) from last


class Fetching:
    def __init__(
        self,
        cluster: Cluster,
        settings: ConsumerSettings,
        assigned: AssignedPartitions,
        retry_budget: RetryBudget,
        aside: Aside,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fetcher = Fetcher(assigned, settings)
        self._cluster = cluster
        self._settings = settings
        self._assigned = assigned
        self._retry_budget = retry_budget
        self._aside = aside
        self._clock = clock
        self._connections: dict[int, BrokerConnection] = {}
        self._in_flight: dict[int, tuple[FetchPlan, Pending]] = {}
        self._looked_at_s = 0.0  # when it was last looked for what to do

    # -- requests ------------------------------------------------------------------------------------------------------
    def send(self, draining: bool = False) -> None:
        """Sends a fetch to every broker that has none in flight and leads a partition with room (see `plan`)."""
        now_s = self._clock()
        names = {state.topic_partition.topic for state in self._assigned}
        self._look_up_leaders(names, now_s)
        topics = self._cluster.metadata.topics
        plans = self.fetcher.plan(
            self._leader_of,
            {name: topic.topic_id for name in names if (topic := topics.get(name)) is not None},
            [*self._in_flight, *(node for node in self._cluster.metadata.brokers if self._aside.is_busy(_lane(node)))],
            now_s,
            draining,
        )
        for plan in plans:
            try:
                connection = self._connection_to(plan)
                if connection is not None:
                    self._in_flight[plan.node_id] = (plan, self._send(connection, plan))
            except KafkaError as error:
                self._on_failed(plan, error)

    def _send(self, connection: BrokerConnection, plan: FetchPlan) -> Pending:
        by_name = NO_UUID in plan.names
        at_most = FIRST_VERSION_WITH_TOPIC_IDS - 1 if by_name else 0x7FFF
        version = connection.capabilities.version_of(FETCH, at_most)
        timeout_s = (self._settings.request_timeout_ms + self._settings.fetch_max_wait_ms) / 1000
        pending = connection.send(FETCH, plan.request, version=version, timeout_s=timeout_s)
        connection.read_ahead()
        return pending

    def _connection_to(self, plan: FetchPlan) -> BrokerConnection | None:
        """To the plan's broker; if there is none, one is opened aside."""
        node_id = plan.node_id
        connection = self._connections.get(node_id)
        if connection is not None and not connection.closed and not connection.retiring:
            return connection
        self._connections.pop(node_id, None)
        self._aside.start(
            _lane(node_id),
            lambda: self._cluster.connect(NodeTarget(node_id), self.look_up_deadline(), _lane(node_id)),
            lambda outcome: self._on_connected(plan, outcome),
        )
        return None

    def _on_connected(self, plan: FetchPlan, outcome: TaskOutcome[BrokerConnection]) -> None:
        try:
            self._connections[plan.node_id] = outcome.result()
        except KafkaError as error:
            self._on_failed(plan, error, outcome.started_s)

    # -- leaders -------------------------------------------------------------------------------------------------------
    def look_up(self, work: Callable[[], Value], then: Callable[[TaskOutcome[Value]], None]) -> bool:
        """Starts a look-up unless another one is under way."""
        return self._aside.start(LOOKUP_LANE, work, then)

    def look_up_deadline(self) -> Deadline:
        """For one attempt of what is done aside."""
        return Deadline(min(self._settings.request_timeout_ms, self._settings.default_api_timeout_ms) / 1000)

    def _look_up_leaders(self, names: set[str], now_s: float) -> None:
        """Looks up the leaders of all partitions to fetch whose metadata is old or in doubt."""
        metadata, max_age_s, at_s = self._cluster.metadata, self._settings.metadata_max_age_ms / 1000, time.monotonic()
        stale = {name for name in names if not metadata.is_fresh(name, at_s, max_age_s)}
        if not stale:
            return
        states = [
            state
            for state in self._assigned
            if state.topic_partition.topic in stale
            and state.is_ready
            and not state.paused
            and state.retry_at_s <= now_s
        ]
        if states:
            topics = sorted({state.topic_partition.topic for state in states})
            self.look_up(
                lambda: self._cluster.refresh(topics, self.look_up_deadline(), LOOKUP_LANE),
                lambda outcome: self._on_leaders(states, outcome),
            )

    def _on_leaders(self, states: list[PartitionState], outcome: TaskOutcome[Metadata]) -> None:
        failure: KafkaError | None = None
        try:
            outcome.result()
        except KafkaError as error:
            failure = error
        for state in states:
            problem = failure or self._leader_error(state.topic_partition)
            if problem is not None and self._assigned.get(state.topic_partition) is state:
                self._on_no_leader(state, problem, outcome.started_s)

    def _leader_error(self, partition: TopicPartition) -> KafkaError | None:
        """Why a partition cannot be fetched, by the metadata."""
        name, index = partition
        metadata = self._cluster.metadata
        topic = metadata.topics.get(name)
        if topic is None or name in metadata.errors:
            code = metadata.errors.get(name, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
            return error_of(code, f"looking up topic {name!r}")
        found = topic.partitions.get(index)
        if found is not None and found.leader >= 0:
            return None
        self._cluster.forget(Leader(name, index))
        if found is None:
            code, detail = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"it has {len(topic.partitions)} partitions"
            return error_of(code, f"partition {index} of {name!r}", detail)
        return error_of(found.error or ErrorCode.LEADER_NOT_AVAILABLE, f"partition {index} of {name!r}")

    def _leader_of(self, partition: TopicPartition) -> tuple[int, int] | None:
        """(node, epoch) by the metadata, unless that is in doubt; what is merely old is used while it is renewed."""
        metadata = self._cluster.metadata
        topic = metadata.topics.get(partition.topic)
        if topic is None or not metadata.is_fresh(partition.topic, 0.0, float("inf")):
            return None
        found = topic.partitions.get(partition.partition)
        return (found.leader, found.leader_epoch) if found is not None and found.leader >= 0 else None

    def _on_no_leader(self, state: PartitionState, error: KafkaError, since_s: float | None = None) -> None:
        now_s = self._clock()
        state.retry_at_s = now_s + self._settings.retry_backoff_max_ms / 1000
        if error.recovery is not Recovery.RETRY:
            raise error
        if error.code in _UNKNOWN:
            self._check_unknown(state, now_s)
        else:
            self._retry_budget.failed(error, since_s)

    def _check_unknown(self, state: PartitionState, now_s: float) -> None:
        """A topic may be on its way; one that stays away is an error. (A group's leader takes it off by itself.)"""
        state.unknown_since_s = state.unknown_since_s or now_s
        if now_s - state.unknown_since_s < self._settings.default_api_timeout_ms / 1000:
            return
        state.unknown_since_s = None
        raise UnknownPartitionError(
            f"partition {state.topic_partition} does not exist, and did not appear for "
            f"default.api.timeout.ms={self._settings.default_api_timeout_ms}; was the topic deleted? "
            "unassign it, or create the topic",
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            state.topic_partition,
        )

    # -- waiting and receiving -----------------------------------------------------------------------------------------
    def connections(self) -> list[BrokerConnection]:
        return [connection for connection in self._connections.values() if not connection.closed]

    def read_on(self, ready: set[int]) -> bool:
        """Reads what has come; whether that was only a part of a response, so that all there is to do is wait on."""
        mine = {fd: connection for connection in self.connections() for fd in connection.waits_for()}
        if not ready or not ready <= mine.keys():
            return False
        for fd in ready:
            mine[fd].progress()
        return not any(pending.done for _, pending in self._in_flight.values())

    def receive(self) -> None:
        """Takes the responses that have come. Raises what the program must decide about."""
        for connection in self.connections():
            connection.progress()
            connection.check_deadlines()
        for node_id, (plan, pending) in list(self._in_flight.items()):
            if pending.done:
                del self._in_flight[node_id]
                self._on_response(plan, pending)

    def _on_response(self, plan: FetchPlan, pending: Pending) -> None:
        try:
            response = pending.result()
            if response.error_code:
                raise error_of(response.error_code, f"fetching from broker {plan.node_id}")
            failures = self.fetcher.absorb(plan, response)
        except DecodeError as error:
            self._on_failed(plan, error_of(ErrorCode.NETWORK_EXCEPTION, "fetching", str(error)))
        except PartitionError:
            raise
        except KafkaError as error:
            self._on_failed(plan, error)
        else:
            self._retry_budget.succeeded()
            for failure in failures:
                self._on_failure(failure)

    def _on_failed(self, plan: FetchPlan, error: KafkaError, since_s: float | None = None) -> None:
        """The whole request failed: look for the leaders anew, a little later."""
        if error.recovery is not Recovery.RETRY:
            raise error
        self._retry_budget.failed(error, since_s)
        for partition, requested in plan.requested.items():
            self._cluster.forget(Leader(*partition))
            requested.state.retry_at_s = self._clock() + self._settings.retry_backoff_ms / 1000

    def _on_failure(self, failure: FetchFailure) -> None:
        """One partition of a response failed."""
        state, code, _ = failure
        partition = state.topic_partition
        if code is ErrorCode.OFFSET_OUT_OF_RANGE:
            self._on_out_of_range(failure)
        elif code is ErrorCode.CORRUPT_MESSAGE:
            raise CorruptRecordError(
                f"{partition}: the broker cannot read its log at offset {state.fetch_offset}; its disk needs a look",
                code,
                partition,
                state.fetch_offset,
            )
        elif code.retriable:
            self._cluster.forget(Leader(*partition))
            state.retry_at_s = self._clock() + self._settings.retry_backoff_ms / 1000
            if code in _UNKNOWN:
                self._check_unknown(state, self._clock())
        else:
            error = error_of(code, f"fetching {partition} at offset {state.fetch_offset}")
            raise PartitionError(str(error), code, partition, state.fetch_offset)

    def _on_out_of_range(self, failure: FetchFailure) -> None:
        state, code, data = failure
        if state.position is not None and state.position < state.fetch_offset:
            state.retry_at_s = self._clock() + self._settings.retry_backoff_ms / 1000
            return  # what was read ahead is delivered first
        reset_to = _RESETS.get(self._settings.auto_offset_reset)
        if reset_to is None:
            raise OffsetOutOfRangeError(
                f"{state.topic_partition} has no offset {state.fetch_offset} (any more): its log starts at "
                f"{data.log_start_offset}; auto.offset.reset=none leaves it to you: seek(), or seek_to_beginning()",
                code,
                state.topic_partition,
                state.fetch_offset,
            )
        state.reset(reset_to)

    # -- where to start ------------------------------------------------------------------------------------------------
    def resolve(self) -> None:
        """Finds the offsets that are still unknown: the group's, else by auto.offset.reset. One try each."""
        now_s = self._looked_at_s = self._clock()
        new = [state for state in self._assigned if state.is_new and state.retry_at_s <= now_s]
        group_id = self._settings.group_id
        if new and group_id is None:
            for state in new:
                self._start_without_committed(state)
        elif new and group_id is not None:
            self._look_up_committed(group_id, [(state, state.version) for state in new])
        resetting = [s for s in self._assigned if s.reset_to is not None and s.retry_at_s <= now_s]
        if resetting:
            self._look_up_resets([(state, state.version) for state in resetting])

    def _look_up_committed(self, group_id: str, new: list[Versioned]) -> None:
        partitions = [state.topic_partition for state, _ in new]
        stable = self._settings.reads_committed
        self.look_up(
            lambda: fetch_committed(self._cluster, group_id, partitions, stable, self.look_up_deadline(), LOOKUP_LANE),
            lambda outcome: self._on_committed(new, outcome),
        )

    def _on_committed(
        self, new: list[Versioned], outcome: TaskOutcome[dict[TopicPartition, OffsetAndMetadata]]
    ) -> None:
        states = [state for state, version in new if state.version == version]  # others have moved on since
        try:
            committed = outcome.result()
        except KafkaError as error:
            self._postpone(states, error, outcome.started_s)
            return
        missing = [state for state in states if state.topic_partition not in committed]
        for state in states:
            found = committed.get(state.topic_partition)
            if found is not None:
                state.seek(found.offset, found.leader_epoch)
        for state in missing:
            self._start_without_committed(state)

    def _start_without_committed(self, state: PartitionState) -> None:
        reset_to = _RESETS.get(self._settings.auto_offset_reset)
        if reset_to is None:
            raise NoOffsetError(
                f"group {self._settings.group_id!r} has no committed offset for {state.topic_partition}, and "
                "auto.offset.reset=none leaves it to you: seek(), or commit an offset first",
                None,
                state.topic_partition,
            )
        state.reset(reset_to)

    def _look_up_resets(self, resetting: list[Versioned]) -> None:
        wanted = {state.topic_partition: state.reset_to for state, _ in resetting if state.reset_to is not None}
        isolation = self._settings.isolation
        self.look_up(
            lambda: list_offsets(self._cluster, wanted, isolation, self.look_up_deadline(), LOOKUP_LANE),
            lambda outcome: self._on_resets(resetting, outcome),
        )

    def _on_resets(self, resetting: list[Versioned], outcome: TaskOutcome[OffsetLookup]) -> None:
        found, failed = outcome.result()
        if found:
            self._retry_budget.succeeded()
        states = [state for state, version in resetting if state.version == version]  # others have moved on since
        for state in states:
            if state.topic_partition in found:
                at = found[state.topic_partition]
                state.seek(at.offset, at.leader_epoch)
        for state in states:
            error = failed.get(state.topic_partition)
            if error is not None and error.code in _UNKNOWN:
                self._on_no_leader(state, error, outcome.started_s)
            elif error is not None:
                self._postpone([state], error, outcome.started_s)

    def _postpone(self, states: Iterable[PartitionState], error: KafkaError, since_s: float) -> None:
        if error.recovery is not Recovery.RETRY:
            raise error
        if error.code is not ErrorCode.UNSTABLE_OFFSET_COMMIT:  # a transaction is being finished, as it should be
            self._retry_budget.failed(error, since_s)
        for state in states:
            state.retry_at_s = self._clock() + self._settings.retry_backoff_ms / 1000

    def next_retry_s(self) -> float:
        """When a partition that failed may be tried again."""
        at_s = self._looked_at_s
        return min((s.retry_at_s for s in self._assigned if s.retry_at_s > at_s), default=float("inf"))


def _lane(node_id: int) -> str:
    return f"fetch-{node_id}"


def wait_ready(connections: Iterable[BrokerConnection], timeout_s: float, wakeup: int) -> set[int]:
    """Waits until a connection can go on or `wakeup` is readable; the file descriptors that are ready."""
    poller = select.poll()
    for connection in connections:
        for fd, events in connection.waits_for().items():
            poller.register(fd, events)
    poller.register(wakeup, select.POLLIN)
    return {fd for fd, _ in poller.poll(max(0.0, min(timeout_s, 3600.0)) * 1000)}
