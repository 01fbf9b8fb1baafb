"""A program that reads in a group: the real cores of consumer, member, fetching and commits, driven in virtual time.

It can be killed, frozen (SIGSTOP: then it comes back as a zombie), and get stuck (its heartbeats go on, its polls do
not), and it can close in good order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

from semel.client.consumer.commits import PendingCommit
from semel.client.consumer.core import ConsumerCore, RebalanceListener, TopicSubscription
from semel.client.consumer.decode import ROWS, rows
from semel.client.consumer.fetcher import FetchPlan
from semel.client.consumer.fetching import CommittedLookUp, LeadersLookUp, OffsetsLookUp
from semel.client.consumer.reader import ChunkReader
from semel.client.errors import ConnectionFailedError, FatalError, FencedError, KafkaError, error_of
from semel.client.group.consumer_protocol_core import ConsumerProtocolCore
from semel.client.group.core import MemberCore, Sharing, subscribed_topics
from semel.client.group.membership import GroupCore, Leaving
from semel.client.group.offset_requests import (
    FoundOffset,
    committed_offsets,
    list_offsets_request,
    offset_commit_error,
    offset_commit_request,
    offset_fetch_request,
    offsets_listed,
)
from semel.client.immediate import run
from semel.client.metadata import Metadata
from semel.client.settings import ConsumerSettings
from semel.client.types import OffsetAndMetadata, TopicPartition
from semel.client.wire import Pending
from semel.protocol.api import Api
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.groups import (
    CONSUMER_GROUP_HEARTBEAT,
    HEARTBEAT,
    JOIN_GROUP,
    LEAVE_GROUP,
    SYNC_GROUP,
    SyncGroupRequest,
    SyncGroupResponse,
)
from semel.protocol.messages.offsets import OFFSET_COMMIT, OFFSET_FETCH
from semel.protocol.messages.records import (
    FETCH,
    LIST_OFFSETS,
    FetchableTopicResponse,
    FetchResponse,
    PartitionData,
)
from tests.simulation.cluster_front import ClusterFront
from tests.simulation.group_history import GroupHistory
from tests.simulation.loop import NEVER_S
from tests.simulation.producer_process import WireClient
from tests.simulation.world import TOPIC, SimulatedConnection, World

GROUP = "g"
VERSIONS = {
    CONSUMER_GROUP_HEARTBEAT: 1,
    JOIN_GROUP: 9,
    SYNC_GROUP: 5,
    HEARTBEAT: 4,
    LEAVE_GROUP: 5,
    OFFSET_COMMIT: 9,
    OFFSET_FETCH: 9,
    FETCH: 13,
    LIST_OFFSETS: 7,
}
TURN_S = 0.02  # between two attempts at the same thing
IDLE_S = 1.0
CLOSE_S = 5.0
BEAT_TRIED_S = 3.0  # half a session
DOWN = ConnectionFailedError("the broker is down", ErrorCode.NETWORK_EXCEPTION)


class Lane(WireClient):
    """Connections of one process to one node. What happens to them while the process is frozen, it learns later."""

    def __init__(self, process: ConsumerProcess, node: int) -> None:
        super().__init__(process.world, self._connect)
        self.node = node
        self._process = process

    def _connect(self, on_bytes: Callable[[bytes], None], on_lost: Callable[[], None]) -> SimulatedConnection | None:
        opened: list[SimulatedConnection | None] = []

        def is_mine() -> bool:
            return bool(opened) and self._connection is opened[0]

        process = self._process
        connection = process.front.connect(
            self.node,
            lambda data: process.notice(lambda: on_bytes(data) if is_mine() else None),
            lambda: process.notice(lambda: on_lost() if is_mine() else None),
        )
        opened.append(connection)
        return connection

    def _time_out(self, connection: SimulatedConnection, pending: Pending) -> None:
        self._process.notice(lambda: WireClient._time_out(self, connection, pending))


class ListenerError(Exception):
    """The program's listener has a bug."""


class _Listener(RebalanceListener):
    def __init__(self, process: ConsumerProcess) -> None:
        self._process = process

    def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
        process = self._process
        process.revoked(partitions)
        if process.world.rng.random() < process.listener_bug_rate and process.world.may_strike():
            process.world.fault(f"the listener of {process.name} raises")
            raise ListenerError

    def on_partitions_lost(self, partitions: list[TopicPartition]) -> None:
        self._process.world.note(f"{self._process.name} lost {len(partitions)} partitions")


class ConsumerProcess:
    def __init__(self, world: World, front: ClusterFront, history: GroupHistory, name: str, **options: Any) -> None:
        self.world = world
        self.front = front
        self.history = history
        self.name = name
        self.is_over = False
        self.is_closing = False
        self.cut_rate = 0.0  # of requests, after which the connection is cut
        self.work_s = 0.1  # on the records of one poll, at most
        self.listener_bug_rate = 0.0  # of partitions that are given back
        self.stuck_until_s = 0.0
        self.frozen_until_s = 0.0
        self.most_bytes = 0
        self.settings = ConsumerSettings.of(
            bootstrap_servers="broker:9092", group_id=GROUP, auto_offset_reset="earliest", **options
        )
        self._metadata = Metadata()
        self.core = ConsumerCore(self.settings, self._metadata, world.rng.random, self._commit_before_revoke)
        self.member = self._new_member()
        self.core.subscribe(self.member, TopicSubscription([TOPIC]), _Listener(self))
        self._reader = ChunkReader(self.core.fetching.fetcher, self.settings.reads_committed)
        self._coordinator: int | None = None
        self._is_finding = False
        self._is_looking_up = False
        self._lanes: dict[str, Lane] = {}
        self._fetching: set[int] = set()  # nodes
        self._unnoticed: list[Callable[[], None]] = []
        self._next_turn_s = world.now_s
        self._beat_again_s = 0.0
        self._unsent: tuple[Any, float] | None = None  # a heartbeat or a departure, and how long it is tried
        self._last_commit: PendingCommit | None = None  # before a revocation or the end
        self._waits_for: PendingCommit | None = None  # the program, in a commit
        self._has_committed = False  # before it closes

    def _new_member(self) -> GroupCore:
        settings, world = self.settings, self.world
        if settings.group_protocol == "consumer":
            return ConsumerProtocolCore(settings, self._metadata, world.rng.random, self.name, world.now_s)
        return MemberCore(settings, world.rng.random, world.now_s)

    # --- the process ---

    @property
    def is_frozen(self) -> bool:
        return self.world.now_s < self.frozen_until_s

    def notice(self, event: Callable[[], None]) -> None:
        """Something happened on the network: a frozen process notices it later, a dead one never."""
        if self.is_over:
            return
        if self.is_frozen:
            self._unnoticed.append(event)
        else:
            event()
            self._next_turn_s = min(self._next_turn_s, self.world.now_s)

    def kill(self) -> None:
        self.world.fault(f"{self.name} is killed")
        self._end()

    def _end(self) -> None:
        self.is_over = True
        for lane in self._lanes.values():
            lane.cut()

    def freeze(self, seconds: float) -> None:
        if self.is_frozen:
            return
        self.world.fault(f"{self.name} is frozen for {seconds:.1f} s")
        self.frozen_until_s = self.world.now_s + seconds

    def stick(self, seconds: float) -> None:
        self.world.fault(f"{self.name} is stuck for {seconds:.1f} s")
        self.stuck_until_s = self.world.now_s + seconds

    def next_event_s(self) -> float:
        if self.is_over:
            return NEVER_S
        return max(min(max(self._next_turn_s, self.stuck_until_s), self._next_beat_s()), self.frozen_until_s)

    def _next_beat_s(self) -> float:
        return max(self._beat_again_s, 0.0 if self._unsent is not None else self.member.next_event_s())

    def run(self) -> None:
        if self.is_over or self.is_frozen:
            return
        unnoticed, self._unnoticed = self._unnoticed, []
        for event in unnoticed:
            self.notice(event)
        now_s = self.world.now_s
        if now_s >= self._next_beat_s():
            self._beat(now_s)
        if now_s >= self.stuck_until_s and now_s >= self._next_turn_s:
            self._turn(now_s)

    # --- the heartbeat thread ---

    def _beat(self, now_s: float) -> None:
        self._beat_again_s = now_s + TURN_S
        if self._unsent is None:
            request = self.member.beat(now_s)
            if request is None:
                return
            self._unsent = (request, now_s + BEAT_TRIED_S)
        request, until_s = self._unsent
        lane = self._coordinator_lane("heartbeat")
        if lane is not None:
            self._unsent = None
            if isinstance(request, Leaving):
                self.world.note(f"{self.name} leaves: {request.reason}")
                self._call(lane, request.api, request.request(VERSIONS[request.api]), lambda _: None)
            else:
                self._call(lane, self.member.beat_api, request, lambda response: self._beaten(request, response))
        elif now_s >= until_s:
            self._unsent = None
            if not isinstance(request, Leaving):
                self.member.not_beaten(request, now_s)
            self._forget_if_in_doubt()

    def _beaten(self, request: Any, response: Any) -> None:
        if isinstance(response, KafkaError) and response.code is ErrorCode.NOT_COORDINATOR:
            response = self.member.beat_api.response.struct(error_code=response.code)
        if isinstance(response, KafkaError):
            self.member.not_beaten(request, self.world.now_s)
        else:
            self.member.beaten(request, response, self.world.now_s)
        self._forget_if_in_doubt()

    # --- a turn of the program ---

    def _turn(self, now_s: float) -> None:
        self._turn_commits(now_s)
        if self._waits_for is not None and not self._waits_for.is_done:
            self._next_turn_s = now_s + TURN_S
            return
        self._waits_for = None
        try:
            if self.is_closing:
                self._close()
            else:
                self._poll(now_s)
        except FencedError:
            self.world.note(f"{self.name} is fenced")
            self._end()
        except ListenerError:
            self._next_turn_s = now_s + TURN_S
        except FatalError as error:
            if error.code is not ErrorCode.UNRELEASED_INSTANCE_ID:
                raise
            self._next_turn_s = now_s + IDLE_S  # the one before it was killed: until its session ends

    def _poll(self, now_s: float) -> None:
        self.member.polled(now_s)
        if run(self.core.follow_group()):
            if now_s >= self.core.topics_due_s() and self._look_up_topics():
                self.core.subscription.refreshed_at_s = now_s
            if run(self.core.is_ready_to_join()) and self.member.is_due_to_join(now_s):
                self._join(now_s)
        self._turn_fetching(now_s)
        if self.core.is_delivering and self._reader.has_records:
            self._deliver()
            self._turn_fetching(now_s)
            self._next_turn_s = now_s + self.world.rng.random() * self.work_s
        else:
            self._next_turn_s = max(now_s + TURN_S, min(now_s + IDLE_S, self._due_s(now_s)))
        self._maybe_commit(now_s)
        self._turn_commits(now_s)

    def _due_s(self, now_s: float) -> float:
        return min(
            self.core.fetching.next_retry_s(),
            self.core.commits.next_event_s(self._is_finding),
            self.core.group_due_s(self._is_looking_up, self._is_finding, now_s),
        )

    def _deliver(self) -> None:
        for partition, table in self._reader.take(ROWS, self.settings.max_poll_records, None):
            state = self.core.assigned.of(partition)
            assert not state.paused, f"{partition} is paused"
            self.history.delivered(state, [(record.offset, record.value) for record in rows(partition, table)])
        for state in self.core.assigned:
            self.history.moved(state)

    def pause_one(self) -> None:
        """Pauses a partition for a while."""
        states = list(self.core.assigned)
        if states:
            state = self.world.rng.choice(states)
            state.paused = True
            self.world.after(self.world.rng.random() * 3, lambda: setattr(state, "paused", False))

    # --- commits ---

    def _consumed(self) -> dict[TopicPartition, OffsetAndMetadata]:
        return {
            partition: OffsetAndMetadata(at, "", epoch)
            for partition, (at, epoch) in self.core.assigned.consumed().items()
        }

    def _maybe_commit(self, now_s: float) -> None:
        """Most often without waiting for it."""
        wanted = {at: to for at, to in self._consumed().items() if not self.history.is_committed(at, to.offset)}
        if not wanted or len(self.core.commits) > 3:
            return
        chance = self.world.rng.random()
        if chance < 0.4:
            self.core.commits.add(self.member.identity(), self._consumed(), None, 2.0, now_s)
        elif chance < 0.5 and not self.member.is_rebalancing:
            self._waits_for = self._commit(self._consumed())

    def _commit(self, wanted: dict[TopicPartition, OffsetAndMetadata]) -> PendingCommit:
        return self.core.commits.add(self.member.identity(), wanted, None, CLOSE_S, self.world.now_s, retried=True)

    def _commit_before_revoke(self) -> PendingCommit | None:
        wanted = self._consumed()
        self._last_commit = self._commit(wanted) if wanted else None
        return self._last_commit

    def revoked(self, partitions: list[TopicPartition]) -> None:
        self.world.note(f"{self.name} gives {len(partitions)} partitions back")
        if self._last_commit is None or self._last_commit.error is None:
            for partition in partitions:
                self.history.revoked(self.name, self.core.assigned.of(partition))

    def _turn_commits(self, now_s: float) -> None:
        commits = self.core.commits
        commits.expire(now_s)
        while (commit := commits.next_to_send(now_s)) is not None:
            lane = self._lanes.get("commit") if commits.in_flight else self._coordinator_lane("commit")
            if lane is None or not lane.connect():
                if not self._is_finding and self._coordinator is not None:
                    commits.unreachable(DOWN, now_s)
                    self._forget_if_in_doubt()
                break
            commits.sent(commit)
            self.history.commit_sent(commit.offsets)
            request = offset_commit_request(commit.member, commit.offsets)
            self._call(
                lane,
                OFFSET_COMMIT,
                request,
                lambda response, commit=commit: self._committed(commit, response, now_s),  # type: ignore[misc]
            )
        while commits.take_finished() is not None:
            pass

    def _committed(self, commit: PendingCommit, response: Any, sent_s: float) -> None:
        error = response if isinstance(response, KafkaError) else offset_commit_error(response, GROUP)
        if isinstance(error, ConnectionFailedError):
            self.history.commit_lost(commit.offsets, commit.member)
        elif error is None:
            self.history.commit_acknowledged(commit.offsets, commit.member, sent_s)
        if error is not None and error.code is not None:
            self.member.reported(error.code, commit.member, self.world.now_s)
        self.core.commits.responded(commit, error, self.world.now_s)
        self._forget_if_in_doubt()

    # --- the group ---

    def _join(self, now_s: float) -> None:
        lane = self._coordinator_lane("group")
        if lane is not None:
            request = self.member.join(self.core.subscription.topics, self.core.assigned.partitions)
            self._call(lane, self.member.join_api, request, self._joined)
        elif not self._is_finding:
            self.member.unreachable(now_s)
            self._forget_if_in_doubt()

    def _joined(self, response: Any) -> None:
        if isinstance(response, KafkaError):
            if response.code is not ErrorCode.NOT_COORDINATOR:
                self._unanswered()
                return
            response = self.member.join_api.response.struct(error_code=response.code)
        following = self.member.responded(response, self.world.now_s)
        self._forget_if_in_doubt()
        if isinstance(following, Sharing):
            self._look_up(lambda found: self._share_out(following, found))
        elif following is not None:
            self._sync(following)

    def _share_out(self, sharing: Sharing, is_found: bool) -> None:
        assert isinstance(self.member, MemberCore)
        if not is_found:
            self.member.not_shared(sharing, self.world.now_s)
            self._forget_if_in_doubt()
            return
        members = sharing.members()
        topics = subscribed_topics(members)
        counts = {name: len(topic.partitions) for name, topic in self._metadata.topics.items() if name in topics}
        request = self.member.sync(sharing, counts, sharing.shares(members, counts))
        if request is not None:
            self._sync(request)

    def _sync(self, request: SyncGroupRequest) -> None:
        lane = self._lanes.get("group")
        if lane is None or not lane.is_open:
            self._unanswered()
        else:
            self._call(lane, SYNC_GROUP, request, self._synced)

    def _synced(self, response: SyncGroupResponse | KafkaError) -> None:
        if isinstance(response, KafkaError):
            if response.code is not ErrorCode.NOT_COORDINATOR:
                self._unanswered()
                return
            response = SyncGroupResponse(error_code=response.code)
        assert isinstance(self.member, MemberCore)
        self.member.synced(response, self.world.now_s)
        self._forget_if_in_doubt()
        self.world.note(f"{self.name} is {self.member.state.value} in generation {self.member.generation}")

    def _unanswered(self) -> None:
        self.member.unanswered(self.world.now_s)
        self._forget_if_in_doubt()

    def _close(self) -> None:
        """Commits, gives everything back, leaves."""
        wanted = self._consumed()
        if wanted and not self._has_committed:
            self._has_committed = True
            self._last_commit = self._waits_for = self._commit(wanted)
            self._turn_commits(self.world.now_s)
            return
        with contextlib.suppress(ListenerError):
            run(self.core.leave())
        departure = self.member.leave("closed")
        lane = self._coordinator_lane("heartbeat")
        if departure is not None and lane is not None:
            self._call(lane, departure.api, departure.request(VERSIONS[departure.api]), lambda _: None)
        self.world.note(f"{self.name} is closed")
        self._end()

    def close(self) -> None:
        if not self.is_closing:
            self.is_closing = True
            self._last_commit = None

    # --- fetching ---

    def _turn_fetching(self, now_s: float) -> None:
        fetching = self.core.fetching
        if not self._is_looking_up:
            wanted = fetching.unresolved(now_s)
            if isinstance(wanted, CommittedLookUp):
                self._look_up_committed(wanted)
            elif wanted is not None:
                self._look_up_offsets(wanted)
        stale = fetching.stale_leaders(now_s)
        if stale is not None and not self._is_looking_up:
            self._look_up_leaders(stale)
        for plan in fetching.plan(sorted(self._fetching), now_s):
            self._fetch(plan, now_s)

    def _fetch(self, plan: FetchPlan, now_s: float) -> None:
        lane = self._lane(f"fetch-{plan.node_id}", plan.node_id)
        if not lane.connect():
            self.core.fetching.failed(plan, DOWN, now_s, now_s)
            self._forget_doubted()
            return
        self._fetching.add(plan.node_id)
        moved = [at for at in plan.requested if self.front.leaders[at.partition] != plan.node_id]
        if moved:
            parts = [PartitionData(at.partition, int(ErrorCode.NOT_LEADER_OR_FOLLOWER)) for at in moved]
            response = FetchResponse(responses=[FetchableTopicResponse(topic=TOPIC, partitions=parts)])
            self.world.after(self.world.network_delay_s(), lambda: self.notice(lambda: self._fetched(plan, response)))
        else:
            self._call(lane, FETCH, plan.request, lambda response: self._fetched(plan, response))

    def _fetched(self, plan: FetchPlan, response: Any) -> None:
        self._fetching.discard(plan.node_id)
        fetching, now_s = self.core.fetching, self.world.now_s
        if isinstance(response, KafkaError):
            fetching.failed(plan, response, now_s, now_s)
        else:
            fetching.responded(plan, response, now_s)
        self._forget_doubted()
        for state in self.core.assigned:
            self.history.fetched(state)
        waiting = sum(len(chunk.records) for chunk in fetching.fetcher.readable())
        self.most_bytes = max(self.most_bytes, waiting)

    # --- look-ups ---

    def _look_up(self, then: Callable[[bool], None]) -> None:
        """Metadata; `then` gets whether anyone responded."""

        def arrive() -> None:
            response = self.front.metadata()
            self.world.after(self.world.network_delay_s(), lambda: self.notice(lambda: learn(response)))

        def learn(response: Any) -> None:
            if response is not None:
                self._metadata.update(response, self.world.now_s)
            then(response is not None)

        self.world.after(self.world.network_delay_s(), arrive)

    def _look_up_topics(self) -> bool:
        subscription = self.core.subscription

        def then(is_found: bool) -> None:
            self._is_looking_up = False
            if is_found:
                self.core.topics_found(subscription, self._metadata.topics)

        if self._is_looking_up:
            return False
        self._is_looking_up = True
        self._look_up(then)
        return True

    def _look_up_leaders(self, stale: LeadersLookUp) -> None:
        began_s = self.world.now_s

        def then(is_found: bool) -> None:
            self._is_looking_up = False
            self.core.fetching.leaders_found(stale, self.world.now_s, began_s, None if is_found else DOWN)
            self._forget_doubted()

        self._is_looking_up = True
        self._look_up(then)

    def _look_up_committed(self, wanted: CommittedLookUp) -> None:
        fetching, began_s = self.core.fetching, self.world.now_s
        lowest = {at: self.history.lowest_start(at) for at in wanted.partitions}

        def then(response: Any) -> None:
            self._is_looking_up = False
            try:
                if isinstance(response, KafkaError):
                    raise response
                committed = committed_offsets(response, GROUP, VERSIONS[OFFSET_FETCH])
            except KafkaError as error:
                self._coordinator = None
                fetching.committed_not_found(wanted, error, self.world.now_s, began_s)
                return
            for at, low in lowest.items():
                assert low is None or at in committed, f"{at} has no committed offset, but {low} was acknowledged"
            self._watch_starts(lowest, lambda: fetching.committed_found(wanted, committed))

        lane = self._coordinator_lane("lookup")
        if lane is None:
            if not self._is_finding:
                self._coordinator = None
            fetching.committed_not_found(wanted, DOWN, began_s, began_s)
            return
        self._is_looking_up = True
        request = offset_fetch_request(GROUP, wanted.partitions, True, VERSIONS[OFFSET_FETCH], wanted.member)
        self._call(lane, OFFSET_FETCH, request, then)

    def _look_up_offsets(self, wanted: OffsetsLookUp) -> None:
        """One request to each leader."""
        began_s = self.world.now_s
        found: dict[TopicPartition, FoundOffset] = {}
        failed: dict[TopicPartition, KafkaError] = {}
        by_node: dict[int, dict[TopicPartition, int]] = {}
        for at, where in wanted.wanted.items():
            by_node.setdefault(self.front.leaders[at.partition], {})[at] = where
        self._is_looking_up = True

        def then(parts: dict[TopicPartition, int], response: Any) -> None:
            if isinstance(response, KafkaError):
                failed.update(dict.fromkeys(parts, response))
            else:
                outcome = offsets_listed(response)
                found.update(outcome.found)
                failed.update(outcome.failed)
            if len(found) + len(failed) == len(wanted.wanted):
                self._is_looking_up = False
                now_s = self.world.now_s
                lowest = {at: self.history.lowest_start(at) for at in found}
                self._watch_starts(
                    lowest, lambda: self.core.fetching.offsets_found(wanted, found, failed, now_s, began_s)
                )

        for node, parts in by_node.items():
            lane = self._lane(f"offsets-{node}", node)
            if lane.connect():
                request = list_offsets_request(parts, self.settings.isolation, 1_000)
                self._call(lane, LIST_OFFSETS, request, lambda response, parts=parts: then(parts, response))  # type: ignore[misc]
            else:
                then(parts, DOWN)

    def _watch_starts(self, lowest: dict[TopicPartition, int | None], event: Callable[[], None]) -> None:
        """Notes which partitions got an offset from it."""
        before = {state: state.version for state in self.core.assigned}
        event()
        for state, version in before.items():
            if state.version != version and state.is_ready:
                self.history.started(self.name, state, lowest.get(state.topic_partition))

    # --- the network ---

    def _lane(self, name: str, node: int) -> Lane:
        lane = self._lanes.get(name)
        if lane is None or lane.node != node:
            if lane is not None:
                lane.cut()
            lane = self._lanes[name] = Lane(self, node)
        return lane

    def _coordinator_lane(self, name: str) -> Lane | None:
        """None while the coordinator is not known or cannot be reached."""
        if self._coordinator is None:
            self._find_coordinator()
            return None
        lane = self._lane(name, self._coordinator)
        return lane if lane.connect() else None

    def _find_coordinator(self) -> None:
        if self._is_finding:
            return
        self._is_finding = True

        def arrive() -> None:
            node = self.front.find_coordinator()
            connects_s = TURN_S + self.world.rng.random() * 0.5
            self.world.after(self.world.network_delay_s() + connects_s, lambda: self.notice(lambda: learn(node)))

        def learn(node: int | None) -> None:
            self._is_finding, self._coordinator = False, node

        self.world.after(self.world.network_delay_s(), arrive)

    def _forget_if_in_doubt(self) -> None:
        in_doubt = [self.member.take_doubt(), self.core.commits.take_doubt()]
        if any(in_doubt):
            self._coordinator = None

    def _forget_doubted(self) -> None:
        for topic, _ in self.core.fetching.take_doubted():
            self._metadata.forget(topic)

    def _call(self, lane: Lane, api: Api[Any, Any], request: Any, then: Callable[[Any], None]) -> None:
        """`then` gets the response, or the error if there is none."""

        def settle(pending: Pending) -> None:
            try:
                response = pending.result()
            except KafkaError as error:
                response = error
            then(response)

        if api not in (FETCH, LIST_OFFSETS) and lane.node != self.front.coordinator:
            error = error_of(ErrorCode.NOT_COORDINATOR, api.name)
            self.world.after(self.world.network_delay_s(), lambda: self.notice(lambda: then(error)))
            return
        lane.send(api, request, VERSIONS[api], self.settings.request_timeout_ms / 1000, settle)
        if self.world.rng.random() < self.cut_rate and self.world.may_strike():
            cut = partial(lane.cut_by_fault, self.name)
            self.world.after(self.world.rng.random() * 4 * self.world.delay_s, lambda: self.notice(cut))
