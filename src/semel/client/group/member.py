"""The driver of a group member: the lock of its core, connections, heartbeats. What a response means is decided by
the core, of the classic protocol or another.

Nothing that a poll calls waits: `join` sends, `service` takes the response if there is one; connections are opened and
metadata is read aside. The consumer and its heartbeats, a thread or a task, share a member; the lock is held for every
call of the core, and never while something waits for the network.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic

from semel.client.cluster_calls import Connection, group_coordinator
from semel.client.errors import KafkaError
from semel.client.group.consumer_protocol_core import ConsumerProtocolCore
from semel.client.group.core import MemberCore, Sharing, subscribed_topics
from semel.client.group.membership import NEVER_S, GroupCore, Leaving, MembershipChange
from semel.client.metadata import Metadata, TopicMetadata
from semel.client.network import Background, Network
from semel.client.settings import ConsumerSettings
from semel.client.timing import Deadline
from semel.client.types import GroupMetadata, TopicPartition
from semel.client.waiting import TaskOutcome
from semel.client.wire import Pending
from semel.protocol.errors import DecodeError, ErrorCode
from semel.protocol.messages.groups import SYNC_GROUP, SyncGroupRequest, SyncGroupRequestAssignment

log = logging.getLogger(__name__)

GROUP_LANE, SHARE_LANE, HEARTBEAT_LANE, LEAVE_LANE = "group", "share", "heartbeat", "leave"
LEAVE_TIMEOUT_S = 3.0


def core_of(settings: ConsumerSettings, metadata: Metadata, now_s: float) -> GroupCore:
    if settings.group_protocol == "consumer":
        return ConsumerProtocolCore(settings, metadata, random.random, str(uuid.uuid4()), now_s)
    return MemberCore(settings, random.random, now_s)


class GroupMember(Generic[Connection]):
    def __init__(
        self,
        network: Network[Connection],
        settings: ConsumerSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core_of(settings, network.calls.metadata, clock())
        self._lock = threading.RLock()  # guards the core, the connection and the request on it
        self._network = network
        self._calls = network.calls
        self._settings = settings
        self._coordinator = group_coordinator(self.group_id)
        self._clock = clock
        self._connection: Connection | None = None  # for JoinGroup and SyncGroup
        self._pending: Pending | None = None
        self._heartbeat: Background | None = None

    @contextmanager
    def _locked(self) -> Iterator[GroupCore]:
        """The core; afterwards the coordinator is forgotten if the core doubts it. Ctrl-C may come between steps that
        belong together: then the member joins again."""
        with self._lock:
            try:
                yield self._core
            except KafkaError:
                raise
            except BaseException:
                self._pending = self._connection = None
                self._core.unanswered(self._clock())
                self._core.rejoin("a call was interrupted")
                raise
            finally:
                if self._core.take_doubt():
                    self._calls.forget(self._coordinator)

    # -- for the consumer ----------------------------------------------------------------------------------------------
    @property
    def group_id(self) -> str:
        return self._core.group_id

    @property
    def is_cooperative(self) -> bool:
        return self._core.is_cooperative

    @property
    def is_rebalancing(self) -> bool:
        return self._core.is_rebalancing

    @property
    def wants_to_join(self) -> bool:
        return self._core.wants_to_join

    @property
    def may_commit(self) -> bool:
        return self._core.may_commit

    @property
    def is_fenced(self) -> bool:
        return self._core.is_fenced

    @property
    def has_unknown_topics(self) -> bool:
        with self._lock:
            return self._core.has_unknown_topics

    @property
    def awaits_response(self) -> bool:
        """Whether `service` has a response to take, or will have."""
        return self._pending is not None or self._core.is_rebalancing

    @property
    def retry_at_s(self) -> float:
        return self._core.retry_at_s

    def identity(self) -> GroupMetadata:
        with self._locked() as core:
            return core.identity()

    def reader(self) -> GroupMetadata | None:
        with self._locked() as core:
            return core.reader()

    def renewed(self, identity: GroupMetadata) -> GroupMetadata | None:
        with self._locked() as core:
            return core.renewed(identity)

    def polled(self) -> None:
        with self._locked() as core:
            core.polled(self._clock())

    def take_change(self) -> MembershipChange:
        with self._locked() as core:
            return core.take_change()

    def needs_other_counts(self, counts: Mapping[str, int]) -> bool:
        with self._locked() as core:
            return core.needs_other_counts(counts)

    def adopted(self, partitions: Iterable[TopicPartition], gave_back: bool) -> None:
        with self._locked() as core:
            core.adopted(partitions, gave_back)

    def rejoin(self, reason: str) -> None:
        with self._locked() as core:
            core.rejoin(reason)

    def report(self, code: ErrorCode, identity: GroupMetadata) -> None:
        with self._locked() as core:
            core.reported(code, identity, self._clock())

    def connections(self) -> list[Connection]:
        """The one that a response is waited for on. An idle one that the broker closed would be readable for good."""
        with self._lock:
            connection = self._connection if self._pending is not None else None
            return [connection] if connection is not None and not connection.closed else []

    def join(self, topics: frozenset[str], owned: Iterable[TopicPartition]) -> None:
        """Sends JoinGroup if that is due and there is a connection; else opens one aside. The search's errors are
        raised by `aside.collect`."""
        aside = self._network.aside
        with self._locked() as core:
            if not core.is_due_to_join(self._clock()) or aside.is_busy(GROUP_LANE):
                return
            connection = self._connection
            if connection is not None:
                self._network.notice_closing(connection)
            if connection is None or connection.closed or connection.retiring:
                self._connection = None
                limit = Deadline(self._settings.request_timeout_ms / 1000)
                aside.start(
                    GROUP_LANE, lambda: self._calls.connect(self._coordinator, limit, GROUP_LANE), self._connected
                )
                return
            if not connection.capabilities.has(core.join_api):
                raise core.unsupported(connection.address)
            # A response may take as long as a rebalance, or be lost. Which of them is not known, and sending it again
            # does no harm: the coordinator has the member, which goes on waiting on the new connection.
            self._pending = self._network.send(connection, core.join_api, core.join(topics, owned))

    def _connected(self, outcome: TaskOutcome[Connection]) -> None:
        with self._locked() as core:
            try:
                self._connection = outcome.result()
            except KafkaError:
                core.unreachable(self._clock())
                raise

    # -- responses -----------------------------------------------------------------------------------------------------
    def service(self) -> None:
        """Takes the response to what `join`, or the response before, led to, if it has come."""
        with self._locked() as core:
            self._start_heartbeats()
            pending = self._pending
            if pending is None:
                return
            self._network.receive(self.connections())
            if not pending.done:
                return
            self._pending = None
            try:
                response = pending.result()
            except (KafkaError, DecodeError) as error:
                log.info("group %s: %s failed: %s", self.group_id, pending.api.name, error)
                core.unanswered(self._clock())
            else:
                self._follow(core.responded(response, self._clock()))
                self._start_heartbeats()
            self._network.wake()

    def _follow(self, next_step: SyncGroupRequest | Sharing | None) -> None:
        if isinstance(next_step, Sharing):
            self._network.spawn(lambda: self._share_out(next_step))
        elif next_step is not None:
            self._send_sync(next_step)

    def _send_sync(self, request: SyncGroupRequest) -> None:
        connection = self._connection
        if connection is None or connection.closed:
            self._core.unanswered(self._clock())
        else:
            self._pending = self._network.send(connection, SYNC_GROUP, request)

    async def _share_out(self, sharing: Sharing) -> None:
        """The leader's work, aside: an assignment for every member, sent with SyncGroup."""
        counts: dict[str, int] = {}
        shares: list[SyncGroupRequestAssignment] | None = None
        try:
            members = sharing.members()
            counts = await self._partition_counts(subscribed_topics(members))
            shares = sharing.shares(members, counts)
        except Exception as error:  # whatever it is, the member must not wait for an assignment that is not sent
            is_expected = isinstance(error, (KafkaError, DecodeError))
            level = logging.INFO if is_expected else logging.ERROR
            log.log(
                level, "group %s: cannot share partitions out now: %s", self.group_id, error, exc_info=not is_expected
            )
        with self._locked() as core:
            assert isinstance(core, MemberCore)
            if shares is None:
                core.not_shared(sharing, self._clock())
            else:
                request = core.sync(sharing, counts, shares)
                if request is not None:
                    self._send_sync(request)
        self._network.wake()

    async def _partition_counts(self, topics: frozenset[str]) -> dict[str, int]:
        known: dict[str, TopicMetadata] = {}
        if topics:
            deadline = Deadline(self._settings.request_timeout_ms / 1000)
            known = dict((await self._calls.refresh(sorted(topics), deadline, SHARE_LANE)).topics)
        return {name: len(known[name].partitions) for name in topics if name in known}

    # -- heartbeats ----------------------------------------------------------------------------------------------------
    def _start_heartbeats(self) -> None:
        if self._heartbeat is None and self._core.next_event_s() < NEVER_S:
            beating = Heartbeats(self, self._clock)
            self._heartbeat = self._network.background(f"semel-heartbeat-{self.group_id}", beating.run)

    def next_event_s(self) -> float:
        with self._lock:
            return self._core.next_event_s()

    async def beat(self) -> None:
        """One heartbeat if it is due; its wait holds no lock."""
        with self._locked() as core:
            request = core.beat(self._clock())
        if isinstance(request, Leaving):
            await self._send_leave(request, HEARTBEAT_LANE, Deadline(LEAVE_TIMEOUT_S))
        elif request is not None:
            await self._send_heartbeat(request)

    async def _send_heartbeat(self, request: Any) -> None:
        api, limit_s = self._core.beat_api, self._core.beat_limit_s
        response: Any = None
        try:
            response = await self._calls.call(
                self._coordinator, api, request, timeout_s=limit_s, errors=None, lane=HEARTBEAT_LANE
            )
        except KafkaError as error:
            log.warning("group %s: no heartbeat: %s", self.group_id, error)
        finally:
            with self._locked() as core:
                if response is None:
                    core.not_beaten(request, self._clock())
                else:
                    core.beaten(request, response, self._clock())
        self._network.wake()

    # -- leaving -------------------------------------------------------------------------------------------------------
    async def leave(self, reason: str, deadline: Deadline) -> None:
        """Gives the place up, so that others need not wait for the session to end. Static members keep theirs."""
        limit = Deadline(min(deadline.remaining_s(), LEAVE_TIMEOUT_S))
        with self._locked() as core:
            departure = core.leave(reason)
            self._pending = None
            heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is not None:
            await heartbeat.stop(timeout_s=min(1.0, limit.remaining_s()))
        if departure is not None:
            await self._send_leave(departure, LEAVE_LANE, limit)

    async def _send_leave(self, departure: Leaving, lane: str, deadline: Deadline) -> None:
        try:
            connection = await self._calls.connect(self._coordinator, deadline, lane)
            version = connection.capabilities.version_of(departure.api)
            request = departure.request(version)
            await self._calls.request(connection, departure.api, request, deadline.remaining_s(), version)
        except KafkaError as error:
            log.info("group %s: leaving failed (the session will end by itself): %s", self.group_id, error)


SERVICE_EVERY_S = 0.05  # while a rebalance is under way and the program is not in poll()
LOOK_EVERY_S = 1.0  # whether the consumer is still there


class Heartbeats:
    """Keep the membership alive while the program works on records: the one thread of a group consumer, or a task.

    They start with the first generation, use connections of their own, and touch nothing of the consumer but the
    member's locked state. They stop at max.poll.interval.ms: a program that does not come back to poll() loses its
    partitions, so that others can go on. See docs/decisions/0040."""

    def __init__(self, member: GroupMember[Any], clock: Callable[[], float] = time.monotonic) -> None:
        self._member = weakref.ref(member)  # a consumer that was dropped without close() must not live on through us
        self._clock = clock

    async def run(self, background: Background) -> None:
        while True:
            member = self._member()
            if member is None or background.is_stopped:
                return
            is_serving = member.awaits_response
            try:
                if is_serving:
                    member.service()
                else:
                    await member.beat()
            except Exception:  # a bug must not end the heartbeats silently
                if not background.is_stopped:  # what fails because the consumer is being closed is no bug
                    log.exception("a heartbeat failed in a way that was not foreseen; the next one follows")
            wait_s = SERVICE_EVERY_S if is_serving else min(member.next_event_s() - self._clock(), LOOK_EVERY_S)
            del member
            if await background.pause(max(wait_s, 0.001)):
                return
