"""The drivers of a consumer's cores: of fetching, of commits, and the engine: one turn of its loop, and waiting."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from semel.client.cluster_calls import Connection, Leader, NodeTarget, group_coordinator
from semel.client.consumer.commits import WHAT, Callback, CommitsCore, Offsets, PendingCommit
from semel.client.consumer.core import ConsumerCore, RebalanceListener, TopicSubscription
from semel.client.consumer.fetcher import FIRST_VERSION_WITH_TOPIC_IDS, FetchPlan
from semel.client.consumer.fetching import CommittedLookUp, FetchingCore, LeadersLookUp, OffsetsLookUp
from semel.client.errors import ClosedError, KafkaError, error_of
from semel.client.group.member import GROUP_LANE, GroupMember
from semel.client.group.offset_calls import fetch_committed, list_offsets
from semel.client.group.offset_requests import (
    LAST_VERSION_WITH_NAMES,
    OffsetLookup,
    offset_commit_error,
    offset_commit_request,
)
from semel.client.metadata import Metadata
from semel.client.network import Network
from semel.client.settings import ConsumerSettings
from semel.client.timing import Deadline
from semel.client.types import GroupMetadata, OffsetAndMetadata, TopicPartition
from semel.client.waiting import TaskOutcome
from semel.client.wire import Pending
from semel.protocol.errors import DecodeError, ErrorCode, Recovery
from semel.protocol.messages.offsets import OFFSET_COMMIT
from semel.protocol.messages.records import FETCH
from semel.protocol.schema import NO_UUID

log = logging.getLogger("semel.client.consumer")

# --- fetching: sends what the core plans, takes the responses, and does its look-ups aside ---

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


# --- commits: the connection to the coordinator, waits, callbacks ---


COMMIT_LANE = "commit"


class CommitDriver(Generic[Connection]):
    """`on_error` gets the error code of a response to a commit, and who committed."""

    def __init__(
        self,
        core: CommitsCore,
        network: Network[Connection],
        on_error: Callable[[ErrorCode, GroupMetadata], None],
    ) -> None:
        self._core = core
        self._network = network
        self._calls = network.calls
        self._aside = network.aside
        self._on_error = on_error
        self._connection: Connection | None = None
        self._is_in_doubt = False  # whether the connection leads to the coordinator
        self._requests: dict[PendingCommit, Pending] = {}
        self._callback_error: Exception | None = None

    def __len__(self) -> int:
        return len(self._core)

    def connections(self) -> list[Connection]:
        """The one in use, while there is a commit for it."""
        connection = self._connection
        return [connection] if len(self._core) and connection is not None and not connection.closed else []

    # -- the calls -----------------------------------------------------------------------------------------------------
    def send(
        self,
        member: GroupMetadata,
        offsets: Offsets,
        callback: Callback | None,
        timeout_s: float,
        retried: bool = False,
    ) -> PendingCommit:
        """Sends it as soon as those before it allow, and never waits. A later `turn` calls back."""
        commit = self._core.add(member, offsets, callback, timeout_s, time.monotonic(), retried)
        self.turn()
        return commit

    async def commit(self, member: GroupMetadata, offsets: Offsets, deadline: Deadline) -> None:
        """Waits for the commits before it and for its own; raises if the group does not have the offsets. If it is
        interrupted, the group may have them or not."""
        commit = self.send(member, offsets, _ignored, deadline.remaining_s(), retried=True)
        try:
            await self.wait(lambda: commit.is_done, deadline)
        finally:  # Ctrl-C, or cancelled: later ones do not wait for it
            if not commit.is_done:
                self._core.withdraw(commit)
        if commit.error is not None:
            raise commit.error

    def raise_callback_error(self) -> None:
        """What a callback has raised: not where it was called, which may be amid the end of the consumer."""
        error, self._callback_error = self._callback_error, None
        if error is not None:
            raise error

    async def wait(self, done: Callable[[], bool], deadline: Deadline) -> None:
        """Until `done` or the deadline."""
        while True:
            self.turn()
            if done() or deadline.expired:
                return
            until_s = min(time.monotonic() + deadline.remaining_s(), self.due_at_s())
            await self._network.wait(self.connections(), until_s)

    # -- a turn --------------------------------------------------------------------------------------------------------
    def turn(self) -> None:
        """Takes responses and sends what may be sent now; never waits, but calls back."""
        if len(self._core):
            self._core.not_sent_but(self._requests)
            self._aside.collect(COMMIT_LANE)
            self._network.receive(self.connections())
            self._receive()
            self._core.expire(time.monotonic())
            self._send_next()
        self._call_back()

    def due_at_s(self) -> float:
        """On time.monotonic(): when `turn` has something to do without an event."""
        if not len(self._core):
            return float("inf")
        is_connecting = self._aside.is_busy(COMMIT_LANE)
        due_s = self._core.next_event_s(connecting=is_connecting)
        return min(due_s, self._network.next_deadline_s(self.connections()))

    def _receive(self) -> None:
        for commit, pending in [(c, p) for c, p in self._requests.items() if p.done]:
            del self._requests[commit]
            try:
                error = offset_commit_error(pending.result(), commit.member.group_id)
            except DecodeError as problem:
                error = error_of(ErrorCode.NETWORK_EXCEPTION, WHAT, str(problem))
            except KafkaError as problem:
                error = problem
            if error is not None and error.code is not None:
                self._on_error(error.code, commit.member)
            self._ended(commit, error)

    def _ended(self, commit: PendingCommit, error: KafkaError | None) -> None:
        self._core.responded(commit, error, time.monotonic())
        self._forget_if_in_doubt(commit.member.group_id)

    def _forget_if_in_doubt(self, group_id: str) -> None:
        if self._core.take_doubt():
            self._calls.forget(group_coordinator(group_id))
            self._is_in_doubt = True

    def _call_back(self) -> None:
        while (commit := self._core.take_finished()) is not None:
            if commit.callback is not None:
                try:
                    commit.callback(commit.offsets, commit.error)
                except Exception as error:
                    if self._callback_error is not None:
                        log.exception("a callback of a commit failed, after another one")
                    self._callback_error = self._callback_error or error
            elif commit.error is not None:
                log.warning("offsets were not committed; the next commit covers them: %s", commit.error)

    # -- sending -------------------------------------------------------------------------------------------------------
    def _send_next(self) -> None:
        while (commit := self._core.next_to_send(time.monotonic())) is not None:
            connection = self._connection_for(commit)
            if connection is None:
                return
            try:
                self._send(commit, connection)
            except KafkaError as error:  # the broker is too old for it
                self._ended(commit, error)

    def _send(self, commit: PendingCommit, connection: Connection) -> None:
        version = connection.capabilities.version_of(OFFSET_COMMIT, LAST_VERSION_WITH_NAMES)
        request = offset_commit_request(commit.member, commit.offsets)
        limit_s = min(commit.deadline_s - time.monotonic(), self._calls.settings.request_timeout_ms / 1000)
        self._requests[commit] = self._network.send(
            connection, OFFSET_COMMIT, request, version=version, timeout_s=max(0.0, limit_s)
        )
        self._core.sent(commit)

    def _connection_for(self, commit: PendingCommit) -> Connection | None:
        """The one that the commits before it are on; a new one only when none is on its way."""
        if self._core.in_flight:
            return next(iter(self.connections()), None)
        if self._is_in_doubt or any(connection.retiring for connection in self.connections()):
            self._connection, self._is_in_doubt = None, False
        if not self.connections():
            group_id = commit.member.group_id
            limit_s = self._calls.settings.request_timeout_ms / 1000
            self._connection = None
            self._aside.start(
                COMMIT_LANE,
                lambda: self._calls.connect(group_coordinator(group_id), Deadline(limit_s), COMMIT_LANE),
                lambda outcome: self._connected(group_id, outcome),
            )
        return self._connection

    def _connected(self, group_id: str, outcome: TaskOutcome[Connection]) -> None:
        try:
            self._connection = outcome.result()
        except KafkaError as error:
            self._core.unreachable(error, time.monotonic())
            self._forget_if_in_doubt(group_id)


def _ignored(offsets: Offsets, error: KafkaError | None) -> None:
    """The caller of `commit` gets the error."""


class ConsumerEngine(Generic[Connection]):
    def __init__(
        self,
        settings: ConsumerSettings,
        network: Network[Connection],
        commit_before_revoke: Callable[[], PendingCommit | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.network = network
        self.calls = network.calls
        self.core = ConsumerCore(settings, self.calls.metadata, random.random, commit_before_revoke)
        self.assigned = self.core.assigned
        self.fetcher = self.core.fetching.fetcher
        self.aside = network.aside
        self.fetching = FetchDriver(self.core.fetching, network, settings, clock)
        self.commits = CommitDriver(self.core.commits, network, self._on_commit_error)
        self.member: GroupMember[Connection] | None = None
        self.closed = False
        self._clock = clock

    # -- a turn --------------------------------------------------------------------------------------------------------
    async def turn(self) -> None:
        """Does everything that can be done now; waits for nothing but the program's listener. Group, commits,
        responses, offsets, requests."""
        self._collect()
        if self.member is not None:
            await self._turn_group(self.member)
        self.commits.turn()
        self.commits.raise_callback_error()
        if self.closed:  # by the listener, or by what is called back after a commit
            self.check_usable()
        self.fetching.receive()
        self.fetching.resolve()
        self.fetching.send()

    def _collect(self) -> None:
        """Takes what was done aside."""
        while True:
            try:
                self.aside.collect()
                return
            except KafkaError as error:
                if error.recovery is not Recovery.RETRY:
                    raise
                self.core.retry_budget.failed(error, self._clock())

    async def wait(self, deadline: Deadline) -> None:
        """Waits for the network, for what is done aside, for the heartbeats, or for a retry."""
        until_s = min(
            self._clock() + deadline.remaining_s(), self.core.fetching.next_retry_s(), self.commits.due_at_s()
        )
        connections = [*self.fetching.connections(), *self.commits.connections()]
        if self.member is not None:
            until_s = min(until_s, self._group_due_s())
            connections += self.member.connections()
        until_s = min(until_s, self.network.next_deadline_s(connections))
        await self.network.wait(connections, until_s, self.fetching)

    def wake(self) -> None:
        """Ends a wait; any thread may call it."""
        self.network.wake()

    async def run_until(self, done: Callable[[], bool], deadline: Deadline) -> bool:
        """Turns until `done` or the deadline; whether it is done."""
        while True:
            await self.turn()
            if done():
                return True
            self.core.retry_budget.check(self._clock(), deadline.expired, self.calls.was_reached)
            if deadline.expired:
                return False
            await self.wait(deadline)
            if self.closed:  # by a signal handler, say
                self.check_usable()

    # -- the group -----------------------------------------------------------------------------------------------------
    async def _turn_group(self, member: GroupMember[Connection]) -> None:
        member.polled()
        member.service()
        if not await self.core.follow_group():
            return
        if self._clock() >= self.core.topics_due_s():
            self._look_up_topics()
        if await self.core.is_ready_to_join():
            member.join(self.core.subscription.topics, self.assigned.partitions)

    def _look_up_topics(self) -> None:
        subscription, wanted = self.core.subscription, self.core.subscription.wanted
        if self.fetching.look_up(
            lambda: self.calls.refresh(wanted, self.fetching.look_up_deadline(), LOOKUP_LANE),
            lambda outcome: self._on_topics(subscription, outcome),
        ):
            subscription.refreshed_at_s = self._clock()

    def _on_topics(self, subscription: TopicSubscription, outcome: TaskOutcome[Metadata]) -> None:
        try:
            topics = dict(outcome.result().topics)
        except KafkaError as error:
            if error.recovery is not Recovery.RETRY:
                raise
            self.core.retry_budget.failed(error, outcome.started_s)
        else:
            self.core.topics_found(subscription, topics)

    def _group_due_s(self) -> float:
        """When the group has something to do without an event."""
        looking_up, connecting = self.aside.is_busy(LOOKUP_LANE), self.aside.is_busy(GROUP_LANE)
        return self.core.group_due_s(looking_up, connecting, self._clock())

    def subscribe(self, subscription: TopicSubscription, listener: RebalanceListener) -> None:
        if self.member is None:
            self.member = GroupMember(self.network, self.settings, self._clock)
        # A pattern names no topic: looking up one that was deleted must not create it again.
        by_name = self.settings.allow_auto_create_topics and subscription.pattern is None
        self.calls.settings = self.settings.replace(allow_auto_create_topics=by_name)
        self.core.subscribe(self.member, subscription, listener)

    async def leave_group(self, reason: str, deadline: Deadline) -> None:
        """Gives partitions back, calls the listener and leaves. The caller has committed."""
        self.calls.settings = self.settings
        try:
            await self.core.leave()
        finally:
            member, self.member = self.member, None
            if member is not None:
                await member.leave(reason, deadline)

    def _on_commit_error(self, code: Any, identity: Any) -> None:
        if self.member is not None:
            self.member.report(code, identity)

    # -- state ---------------------------------------------------------------------------------------------------------
    def check_usable(self) -> None:
        if self.closed:
            raise ClosedError("this consumer is closed; make a new one")
        self.network.check_owner()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.assigned.assign([])  # an iteration that is under way ends
        self.network.close()
