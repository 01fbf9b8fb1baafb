"""A member of a consumer group: Kafka's classic protocol, driven by the table in `states.py`.

Nothing here waits: `join` sends, `service` takes the response if there is one; connections are opened and metadata is
read aside. The consumer's thread and the heartbeat thread share a member; its lock guards everything, and is never held
while something waits for the network. What the consumer must know (a new
assignment, partitions that were lost, an error) waits in `take_change` until its next poll().
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from semel.client.aside import Aside, TaskOutcome, in_thread
from semel.client.cluster import Cluster, group_coordinator
from semel.client.connection import BrokerConnection
from semel.client.errors import KafkaError, error_of
from semel.client.group.assignors import (
    ASSIGNORS,
    NO_GENERATION,
    decode_assignment,
    decode_member,
    encode_assignment,
    encode_subscription,
)
from semel.client.group.states import MembershipEffect, MembershipEvent, MembershipState, event_of, step
from semel.client.metadata import TopicMetadata
from semel.client.settings import ConsumerSettings
from semel.client.timing import Backoff, Deadline
from semel.client.types import GroupMetadata, RebalanceError, TopicPartition
from semel.client.wire import Pending
from semel.protocol.errors import DecodeError, ErrorCode
from semel.protocol.messages.groups import (
    HEARTBEAT,
    JOIN_GROUP,
    LEAVE_GROUP,
    SYNC_GROUP,
    HeartbeatRequest,
    JoinGroupRequest,
    JoinGroupRequestProtocol,
    JoinGroupResponse,
    LeaveGroupRequest,
    MemberIdentity,
    SyncGroupRequest,
    SyncGroupRequestAssignment,
    SyncGroupResponse,
)

log = logging.getLogger(__name__)

PROTOCOL_TYPE = "consumer"
GROUP_LANE, SHARE_LANE, HEARTBEAT_LANE, LEAVE_LANE = "group", "share", "heartbeat", "leave"
LEAVE_TIMEOUT_S = 3.0
_MEMBERSHIP_EVENTS = (
    MembershipEvent.REBALANCE,
    MembershipEvent.STALE,
    MembershipEvent.EXPELLED,
    MembershipEvent.TAKEN_OVER,
    MembershipEvent.COORDINATOR_LOST,
)


class MembershipChange(NamedTuple):
    """What changed in the membership since the last call of `take_change`."""

    lost: bool = False  # the partitions are gone, without a chance to commit
    assignment: list[TopicPartition] | None = None
    error: KafkaError | None = None


class GroupMember:
    def __init__(
        self,
        cluster: Cluster,
        settings: ConsumerSettings,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if settings.group_id is None:
            raise ValueError("a group member needs a group.id")
        self.group_id = settings.group_id
        self.state = MembershipState.UNJOINED
        self.member_id = ""
        self.generation = NO_GENERATION
        self.is_leader = False
        self.retry_at_s = 0.0
        self.shared_counts: dict[str, int] = {}  # the leader's: partitions of each topic when it shared them out
        self._cluster = cluster
        self._settings = settings
        self._coordinator = group_coordinator(self.group_id)
        self._assignors = [ASSIGNORS[name] for name in settings.partition_assignment_strategy]
        self._wake = wake
        self._clock = clock
        self._lock = threading.RLock()
        self._connection: BrokerConnection | None = None  # for JoinGroup and SyncGroup
        self._pending: Pending | None = None
        self._change = MembershipChange()
        self._backoff = Backoff(settings.retry_backoff_ms, settings.retry_backoff_max_ms)
        self._heartbeat: HeartbeatThread | None = None
        self._last_poll_s = clock()
        self._identity: GroupMetadata | None = None
        self._joins_again = False

    # -- for the consumer ----------------------------------------------------------------------------------------------
    @property
    def is_cooperative(self) -> bool:
        """Partitions are kept during a rebalance only if every assignor on offer works that way."""
        return all(assignor.is_cooperative for assignor in self._assignors)

    @property
    def is_rebalancing(self) -> bool:
        return self.state in (MembershipState.JOINING, MembershipState.SYNCING)

    def identity(self) -> GroupMetadata:
        """The identity that commits: the member in its last generation. It stays the same when the generation is
        lost, so that the coordinator refuses it: one without member and generation would let a zombie commit."""
        with self._lock:
            if self._identity is None:
                raise RebalanceError(
                    f"this consumer is not in a generation of group {self.group_id!r} yet; call poll() until it has "
                    "partitions"
                )
            return self._identity

    def _is_current(self, identity: GroupMetadata | None) -> bool:
        known = identity is not None and (identity.generation_id, identity.member_id)
        return known == (self.generation, self.member_id) and self.state in (
            MembershipState.STABLE,
            MembershipState.UNJOINED,
        )

    def polled(self) -> None:
        """The program is alive; called at every poll."""
        self._last_poll_s = self._clock()

    def take_change(self) -> MembershipChange:
        with self._lock:
            change, self._change = self._change, MembershipChange()
            return change

    def rejoin(self, reason: str) -> None:
        """Starts a new generation: topics or partitions changed, or partitions were given back."""
        with self._lock:
            log.info("group %s: joining again: %s", self.group_id, reason)
            if self.is_rebalancing:
                self._joins_again = True  # the generation under way does not know of the change yet
            elif self.state in (MembershipState.STABLE, MembershipState.UNJOINED):
                self._apply(MembershipEvent.REBALANCE)

    def connections(self) -> list[BrokerConnection]:
        """The one that a response is waited for on. An idle one that the broker closed would be readable for good."""
        with self._lock:
            connection = self._connection if self._pending is not None else None
            return [connection] if connection is not None and not connection.closed else []

    def join(self, topics: frozenset[str], owned: Iterable[TopicPartition], aside: Aside) -> None:
        """Sends JoinGroup if that is due and there is a connection; else opens one aside. The search's errors are
        raised by `aside.collect`."""
        with self._lock:
            if (
                self.state is not MembershipState.UNJOINED
                or self._clock() < self.retry_at_s
                or aside.is_busy(GROUP_LANE)
            ):
                return
            connection = self._connection
            if connection is not None:
                connection.notice_closing()
            if connection is None or connection.closed or connection.retiring:
                self._connection = None
                limit = Deadline(self._settings.request_timeout_ms / 1000)
                aside.start(
                    GROUP_LANE, lambda: self._cluster.connect(self._coordinator, limit, GROUP_LANE), self._connected
                )
                return
            request = self._join_request(topics, list(owned))
            self._joins_again = False
            self._apply(MembershipEvent.JOIN_SENT)
            # A response may take as long as a rebalance, or be lost. Which of them is not known, and sending it again
            # does no harm: the coordinator has the member, which goes on waiting on the new connection.
            self._pending = connection.send(JOIN_GROUP, request)

    def _connected(self, outcome: TaskOutcome[BrokerConnection]) -> None:
        with self._lock:
            try:
                self._connection = outcome.result()
            except KafkaError:
                self._cluster.forget(self._coordinator)
                self.retry_at_s = self._clock() + self._backoff.next_s()
                raise

    def _join_request(self, topics: frozenset[str], owned: list[TopicPartition]) -> JoinGroupRequest:
        return JoinGroupRequest(
            group_id=self.group_id,
            session_timeout_ms=self._settings.session_timeout_ms,
            rebalance_timeout_ms=self._settings.max_poll_interval_ms,
            member_id=self.member_id,
            group_instance_id=self._settings.group_instance_id,
            protocol_type=PROTOCOL_TYPE,
            protocols=[
                JoinGroupRequestProtocol(a.name, encode_subscription(topics, owned, self.generation, a))
                for a in self._assignors
            ],
        )

    # -- responses -----------------------------------------------------------------------------------------------------
    def service(self) -> None:
        """Takes the response to JoinGroup or SyncGroup if it has come."""
        with self._lock:
            pending = self._pending
            if pending is None:
                return
            for connection in self.connections():
                connection.progress()
                connection.check_deadlines()
            if not pending.done:
                return
            self._pending = None
            try:
                response = pending.result()
            except (KafkaError, DecodeError) as error:
                log.info("group %s: %s failed: %s", self.group_id, pending.api.name, error)
                self._apply(MembershipEvent.COORDINATOR_LOST)
            else:
                (self._on_joined if pending.api is JOIN_GROUP else self._on_synced)(response)
            self._wake()

    def _on_joined(self, response: JoinGroupResponse) -> None:
        code = ErrorCode.of(response.error_code)
        if code is not ErrorCode.NONE:
            if code is ErrorCode.MEMBER_ID_REQUIRED:
                self.member_id = response.member_id
            self._apply(event_of(code), code, "joining")
            return
        self.member_id, self.generation = response.member_id, response.generation_id
        self._identity = GroupMetadata(self.group_id, self.generation, self.member_id, self._settings.group_instance_id)
        self.is_leader = response.leader == response.member_id
        self._apply(MembershipEvent.JOINED)
        if self.is_leader and not response.skip_assignment:
            in_thread(self._share_out, response)
        else:
            self._sync(response, [])

    def _sync(self, response: JoinGroupResponse, shares: list[SyncGroupRequestAssignment]) -> None:
        connection = self._connection
        if connection is None or connection.closed:
            self._apply(MembershipEvent.COORDINATOR_LOST)
            return
        request = SyncGroupRequest(
            group_id=self.group_id,
            generation_id=self.generation,
            member_id=self.member_id,
            group_instance_id=self._settings.group_instance_id,
            protocol_type=PROTOCOL_TYPE,
            protocol_name=response.protocol_name,
            assignments=shares,
        )
        self._pending = connection.send(SYNC_GROUP, request)

    def _share_out(self, response: JoinGroupResponse) -> None:
        """The leader's work, in a thread of its own: an assignment for every member, sent with SyncGroup."""
        shares: list[SyncGroupRequestAssignment] = []
        failure: Exception | None = None
        try:
            shares = self._shares(response)
        except Exception as error:  # whatever it is, the member must not wait for an assignment that is not sent
            failure = error
            is_expected = isinstance(error, (KafkaError, DecodeError))
            level = logging.INFO if is_expected else logging.ERROR
            log.log(
                level, "group %s: cannot share partitions out now: %s", self.group_id, error, exc_info=not is_expected
            )
        with self._lock:
            if (
                self.state is not MembershipState.SYNCING
                or self.generation != response.generation_id
                or self._pending is not None
            ):
                return  # the group went on meanwhile
            if failure is None:
                self._sync(response, shares)
            else:
                self._apply(MembershipEvent.COORDINATOR_LOST)
        self._wake()

    def _shares(self, response: JoinGroupResponse) -> list[SyncGroupRequestAssignment]:
        assignor = ASSIGNORS[response.protocol_name or ""]
        members = [decode_member(m.member_id, m.group_instance_id, m.metadata, assignor) for m in response.members]
        topics = frozenset[str]().union(*(member.topics for member in members))
        known: dict[str, TopicMetadata] = {}
        if topics:
            deadline = Deadline(self._settings.request_timeout_ms / 1000)
            known = dict(self._cluster.refresh(sorted(topics), deadline, SHARE_LANE).topics)
        counts = {name: len(known[name].partitions) for name in topics if name in known}
        self.shared_counts = counts
        shares = assignor.share(members, counts)
        return [SyncGroupRequestAssignment(name, encode_assignment(share)) for name, share in shares.items()]

    def _on_synced(self, response: SyncGroupResponse) -> None:
        code = ErrorCode.of(response.error_code)
        if code is not ErrorCode.NONE:
            self._apply(event_of(code), code, "syncing with")
            return
        partitions = [TopicPartition(*partition) for partition in decode_assignment(response.assignment)]
        self._apply(MembershipEvent.SYNCED)
        self._backoff.reset()
        self._change = self._change._replace(assignment=partitions)
        if self._joins_again:
            self._joins_again = False
            self._apply(MembershipEvent.REBALANCE)
        if self._heartbeat is None:
            self._heartbeat = HeartbeatThread(self, self._settings.heartbeat_interval_ms / 1000)
            self._heartbeat.start()

    # -- events --------------------------------------------------------------------------------------------------------
    def report(self, code: ErrorCode, identity: GroupMetadata) -> None:
        """The error of a commit may end the membership; that of an older generation is ignored."""
        with self._lock:
            event = event_of(code)
            if self._is_current(identity) and event in _MEMBERSHIP_EVENTS:
                self._apply(event, code, "committing to")

    def _apply(self, event: MembershipEvent, code: ErrorCode | None = None, doing: str = "") -> None:
        self.state, effect = step(self.state, event)
        if effect & MembershipEffect.FORGET_GENERATION:
            self.generation = NO_GENERATION
        if effect & MembershipEffect.FORGET_MEMBER_ID:
            self.member_id = ""
        if effect & MembershipEffect.LOSE_PARTITIONS:
            self._change = MembershipChange(lost=True, error=self._change.error)
        if effect & MembershipEffect.FIND_COORDINATOR:
            self._cluster.forget(self._coordinator)
        if effect & MembershipEffect.BACK_OFF:
            self.retry_at_s = self._clock() + self._backoff.next_s()
        if effect & MembershipEffect.RAISE and code is not None:
            self._change = self._change._replace(error=error_of(code, f"{doing} group {self.group_id!r}"))

    # -- the heartbeat thread's part -----------------------------------------------------------------------------------
    def beat(self) -> None:
        """One heartbeat; its wait holds no lock."""
        with self._lock:
            if self.generation == NO_GENERATION or self.state not in (MembershipState.STABLE, MembershipState.UNJOINED):
                return
            identity = self._identity
            assert identity is not None
            is_too_slow = self._clock() - self._last_poll_s > self._settings.max_poll_interval_ms / 1000
            if is_too_slow:
                log.warning(
                    "group %s: poll() was not called for max.poll.interval.ms=%s; leaving the group so that others can "
                    "go on. Lower max.poll.records, or raise the setting",
                    self.group_id,
                    self._settings.max_poll_interval_ms,
                )
                self._apply(MembershipEvent.EXPELLED)
        if is_too_slow:
            limit = Deadline(LEAVE_TIMEOUT_S)
            self._send_leave(identity.member_id, "max.poll.interval.ms passed without a poll", HEARTBEAT_LANE, limit)
            return
        request = HeartbeatRequest(
            self.group_id, identity.generation_id, identity.member_id, identity.group_instance_id
        )
        code = self._send_heartbeat(request)
        if code is not ErrorCode.NONE:
            with self._lock:
                if self._is_current(identity):
                    self._apply(event_of(code), code, "heartbeat to")
            self._wake()

    def _send_heartbeat(self, request: HeartbeatRequest) -> ErrorCode:
        limit_s = min(self._settings.session_timeout_ms, self._settings.request_timeout_ms) / 1000
        try:
            response: Any = self._cluster.call(
                self._coordinator, HEARTBEAT, request, timeout_s=limit_s, errors=None, lane=HEARTBEAT_LANE
            )
        except KafkaError as error:
            log.warning("group %s: no heartbeat: %s", self.group_id, error)
            return ErrorCode.NONE  # the next one tries again; the broker returns an error if the session has ended
        return ErrorCode.of(response.error_code)

    # -- leaving -------------------------------------------------------------------------------------------------------
    def leave(self, reason: str, deadline: Deadline) -> None:
        """Gives the place up, so that others need not wait for the session to end. Static members keep theirs."""
        limit = Deadline(min(deadline.remaining_s(), LEAVE_TIMEOUT_S))
        with self._lock:
            if self.state is MembershipState.LEFT:
                return
            self.state, effect = step(self.state, MembershipEvent.LEAVE)
            self._pending = None
            heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is not None:
            heartbeat.stop(timeout_s=min(1.0, limit.remaining_s()))
        if effect & MembershipEffect.SEND_LEAVE:
            self._send_leave(self.member_id, reason, LEAVE_LANE, limit)

    def _send_leave(self, member_id: str, reason: str, lane: str, deadline: Deadline) -> None:
        if not member_id or self._settings.group_instance_id is not None:
            return
        try:
            connection = self._cluster.connect(self._coordinator, deadline, lane)
            version = connection.capabilities.version_of(LEAVE_GROUP)
            if version >= 3:
                identity = MemberIdentity(member_id, self._settings.group_instance_id, reason)
                request = LeaveGroupRequest(self.group_id, members=[identity])
            else:
                request = LeaveGroupRequest(self.group_id, member_id=member_id)
            connection.call(LEAVE_GROUP, request, max(0.001, deadline.remaining_s()), version)
        except KafkaError as error:
            log.info("group %s: LeaveGroup failed (the session will end by itself): %s", self.group_id, error)


SERVICE_EVERY_S = 0.05  # while a rebalance is under way and the program is not in poll()


class HeartbeatThread:
    """Keeps the membership alive while the program works on records; the one thread of a group consumer.

    It starts with the first generation, uses connections of its own, and touches nothing of the consumer but the
    member's locked state. It stops at max.poll.interval.ms: a program that does not come back to poll() loses its
    partitions, so that others can go on. See docs/decisions/0040."""

    def __init__(self, member: GroupMember, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._member = weakref.ref(member)  # a consumer that was dropped without close() must not live on through us
        self._interval_s = interval_s
        self._clock = clock
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"semel-heartbeat-{member.group_id}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        next_beat_s = self._clock() + self._interval_s
        while True:
            member = self._member()
            if member is None or self._stopped.is_set():
                return
            rebalancing = member.is_rebalancing
            if rebalancing:
                self._attempt(member.service)
            elif self._clock() >= next_beat_s:
                self._attempt(member.beat)
                next_beat_s = self._clock() + self._interval_s
            del member
            wait_s = SERVICE_EVERY_S if rebalancing else min(next_beat_s - self._clock(), 1.0)
            if self._stopped.wait(max(wait_s, 0.001)):
                return

    def _attempt(self, step: Callable[[], None]) -> None:
        """A bug must not end the heartbeats silently; what fails because the consumer is being closed is no bug."""
        try:
            step()
        except Exception:
            if not self._stopped.is_set():
                log.exception("a heartbeat failed in a way that was not foreseen; the next one follows")
