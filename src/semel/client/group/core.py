"""What a member of a consumer group decides: when to join, what a response means, when to beat, when to leave.

A state machine without a thread, a socket, a clock or a lock, after the table in `states.py`; Kafka's classic protocol.
Events and the time are arguments of its methods; requests and the time of the next event come out of them. A driver
(`member.py`) owns the rest:

    core.polled(now_s)                          # the program is alive
    if core.is_due_to_join(now_s): core.join(topics, owned)    # JoinGroup; then `joined`, or `unanswered`
    core.responded(response, now_s)             # SyncGroup, or a `Sharing` first (leader); then `responded` again
    core.sync(sharing, counts, shares)          # the leader's SyncGroup
    core.beat(now_s)                            # a heartbeat, or the departure of a member that does not poll
    core.beaten(request, response, now_s)       # what the coordinator says to a heartbeat
    core.reported(code, identity, now_s)        # what it says to a commit
    core.take_change()                          # for the consumer: an assignment, lost partitions, an error
    core.take_doubt()                           # whether the coordinator must be looked up again
    core.next_event_s()                         # when to call `beat` again, if nothing else happens
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from semel.client.errors import FatalError, KafkaError, UnsupportedByBrokerError, error_of
from semel.client.group.assignors import (
    ASSIGNORS,
    NO_GENERATION,
    Assignor,
    SubscribedMember,
    decode_assignment,
    decode_member,
    encode_assignment,
    encode_subscription,
)
from semel.client.group.membership import NEVER_S, MemberBase, MembershipChange
from semel.client.group.states import MembershipEffect, MembershipEvent, MembershipState, event_of, step
from semel.client.settings import ConsumerSettings
from semel.client.types import GroupMetadata, TopicPartition
from semel.protocol.api import Api
from semel.protocol.errors import DecodeError, ErrorCode
from semel.protocol.messages.groups import (
    HEARTBEAT,
    JOIN_GROUP,
    LEAVE_GROUP,
    HeartbeatRequest,
    HeartbeatResponse,
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
FIRST_LEAVE_WITH_REASON = 3
# What the response to a commit says about the membership.
_MEMBERSHIP_EVENTS = (
    MembershipEvent.REBALANCE,
    MembershipEvent.STALE,
    MembershipEvent.EXPELLED,
    MembershipEvent.TAKEN_OVER,
    MembershipEvent.COORDINATOR_LOST,
)
_IN_A_REBALANCE = (MembershipState.JOINING, MembershipState.SYNCING)
_KEPT_BY_HEARTBEATS = (MembershipState.STABLE, MembershipState.UNJOINED)


class Departure(NamedTuple):
    """A member that leaves, so that others need not wait for its session to end."""

    group_id: str
    member_id: str
    reason: str

    @property
    def api(self) -> Api[Any, Any]:
        return LEAVE_GROUP

    def request(self, version: int) -> LeaveGroupRequest:
        if version >= FIRST_LEAVE_WITH_REASON:
            return LeaveGroupRequest(self.group_id, members=[MemberIdentity(self.member_id, None, self.reason)])
        return LeaveGroupRequest(self.group_id, member_id=self.member_id)


class Sharing:
    """The leader's work in one generation: an assignment for every member. Pure, and may take a while."""

    def __init__(self, response: JoinGroupResponse) -> None:
        self._response = response

    def members(self) -> list[SubscribedMember]:
        """Raises DecodeError if the subscription of one of them cannot be read."""
        assignor = ASSIGNORS[self._response.protocol_name or ""]
        return [decode_member(m.member_id, m.group_instance_id, m.metadata, assignor) for m in self._response.members]

    def shares(self, members: list[SubscribedMember], counts: Mapping[str, int]) -> list[SyncGroupRequestAssignment]:
        shared = ASSIGNORS[self._response.protocol_name or ""].share(members, counts)
        return [SyncGroupRequestAssignment(name, encode_assignment(share)) for name, share in shared.items()]


def subscribed_topics(members: Iterable[SubscribedMember]) -> frozenset[str]:
    return frozenset[str]().union(*(member.topics for member in members))


class MemberCore(MemberBase):
    """One member. `random` returns numbers from 0 to 1, for the length of pauses."""

    join_api, beat_api = JOIN_GROUP, HEARTBEAT
    has_unknown_topics = False  # an assignment names topics

    def __init__(self, settings: ConsumerSettings, random: Callable[[], float], now_s: float) -> None:
        super().__init__(settings, random, now_s)
        self.state = MembershipState.UNJOINED
        self.member_id = ""
        self.generation = NO_GENERATION
        self.is_leader = False
        self.shared_counts: Mapping[str, int] = {}  # the leader's: partitions of each topic when it shared them out
        self.beat_limit_s = min(settings.session_timeout_ms, settings.request_timeout_ms) / 1000
        self._assignors = [ASSIGNORS[name] for name in settings.partition_assignment_strategy]
        self._next_beat_s = NEVER_S
        self._is_beating = False  # a heartbeat has no response yet
        self._protocol_name: str | None = None  # which the coordinator chose for this generation
        self._had: tuple[list[TopicPartition], int] = ([], NO_GENERATION)  # the last assignment, and its generation
        self._sharing: Sharing | None = None
        self._joins_again = False

    # --- for the consumer ---

    @property
    def is_cooperative(self) -> bool:
        """Partitions are kept during a rebalance only if every assignor on offer works that way."""
        return all(assignor.is_cooperative for assignor in self._assignors)

    @property
    def is_rebalancing(self) -> bool:
        return self.state in _IN_A_REBALANCE

    @property
    def wants_to_join(self) -> bool:
        return self.state is MembershipState.UNJOINED

    @property
    def may_commit(self) -> bool:
        return self.state is MembershipState.STABLE

    @property
    def is_fenced(self) -> bool:
        return self.state is MembershipState.FENCED

    def reader(self) -> GroupMetadata | None:
        """The identity that fetches committed offsets; None: the coordinator does not ask for it."""
        return None

    def renewed(self, identity: GroupMetadata) -> GroupMetadata | None:
        """The identity for another attempt of a commit that was refused as stale; None: a generation does not go on."""
        return None

    def needs_other_counts(self, counts: Mapping[str, int]) -> bool:
        """Whether this member shared partitions out, and topics have other numbers of them now."""
        if not self.is_leader or self.state is not MembershipState.STABLE:
            return False
        return any(count != self.shared_counts.get(name, 0) for name, count in counts.items())

    def adopted(self, partitions: Iterable[TopicPartition], gave_back: bool) -> None:
        """The consumer has taken an assignment on. What a cooperative member gave back is shared out in another
        round."""
        if self.is_cooperative and gave_back:
            self.rejoin("gave partitions back that others are to have")

    def take_change(self) -> MembershipChange:
        change, self._change = self._change, MembershipChange()
        return change

    def rejoin(self, reason: str) -> None:
        """Starts a new generation: topics or partitions changed, or partitions were given back."""
        log.info("group %s: joining again: %s", self.group_id, reason)
        if self.is_rebalancing:
            self._joins_again = True  # the generation under way does not know of the change yet
        elif self.state in _KEPT_BY_HEARTBEATS:
            self._apply(MembershipEvent.REBALANCE, 0.0)

    # --- a new generation ---

    def unsupported(self, address: str) -> KafkaError:
        return UnsupportedByBrokerError(f"{address} does not serve consumer groups", ErrorCode.UNSUPPORTED_VERSION)

    def is_due_to_join(self, now_s: float) -> bool:
        return self.state is MembershipState.UNJOINED and now_s >= self.retry_at_s

    def join(self, topics: frozenset[str], owned: Iterable[TopicPartition]) -> JoinGroupRequest:
        """JoinGroup, to be sent now."""
        mine = list(owned)
        request = JoinGroupRequest(
            group_id=self.group_id,
            session_timeout_ms=self._settings.session_timeout_ms,
            rebalance_timeout_ms=self._settings.max_poll_interval_ms,
            member_id=self.member_id,
            group_instance_id=self._settings.group_instance_id,
            protocol_type=PROTOCOL_TYPE,
            protocols=[
                JoinGroupRequestProtocol(a.name, encode_subscription(topics, *self._claims(a, mine), a))
                for a in self._assignors
            ],
        )
        self._joins_again = False
        self._apply(MembershipEvent.JOIN_SENT, 0.0)
        return request

    def _claims(self, assignor: Assignor, owned: list[TopicPartition]) -> tuple[list[TopicPartition], int]:
        """What the leader is to leave with this member if it can. Eager members own nothing when they join: `sticky`
        goes by what they had."""
        return (owned, self.generation) if assignor.is_cooperative or not assignor.sends_owned else self._had

    def unanswered(self, now_s: float) -> None:
        """JoinGroup or SyncGroup got no response, or one that makes no sense, or could not be sent."""
        if self.is_rebalancing:
            self._apply(MembershipEvent.COORDINATOR_LOST, now_s)

    def responded(
        self, response: JoinGroupResponse | SyncGroupResponse, now_s: float
    ) -> SyncGroupRequest | Sharing | None:
        """The response to what `join`, or this, returned; what follows."""
        if isinstance(response, JoinGroupResponse):
            return self.joined(response, now_s)
        self.synced(response, now_s)
        return None

    def joined(self, response: JoinGroupResponse, now_s: float) -> SyncGroupRequest | Sharing | None:
        """SyncGroup, to be sent now; a leader has to share partitions out first. None: another join will follow."""
        code = ErrorCode.of(response.error_code)
        if code is not ErrorCode.NONE:
            if code is ErrorCode.MEMBER_ID_REQUIRED:
                self.member_id = response.member_id
            self._apply(event_of(code), now_s, code, "joining")
            return None
        self._apply(MembershipEvent.JOINED, now_s)
        self.member_id, self.generation = response.member_id, response.generation_id
        self._identity = GroupMetadata(self.group_id, self.generation, self.member_id, self._settings.group_instance_id)
        self._protocol_name = response.protocol_name
        self.is_leader = response.leader == response.member_id
        if self.is_leader and not response.skip_assignment:
            self._sharing = Sharing(response)
            return self._sharing
        return self._sync_request([])

    def sync(
        self, sharing: Sharing, counts: Mapping[str, int], shares: list[SyncGroupRequestAssignment]
    ) -> SyncGroupRequest | None:
        """The leader's SyncGroup; None if the group went on meanwhile. `counts`: partitions of each topic."""
        if not self._is_wanted(sharing):
            return None
        self.shared_counts = counts
        return self._sync_request(shares)

    def not_shared(self, sharing: Sharing, now_s: float) -> None:
        """The leader could not share partitions out: it joins again, and so does everybody."""
        if self._is_wanted(sharing):
            self._apply(MembershipEvent.COORDINATOR_LOST, now_s)

    def _is_wanted(self, sharing: Sharing) -> bool:
        is_wanted = self._sharing is sharing and self.state is MembershipState.SYNCING
        self._sharing = None if is_wanted else self._sharing
        return is_wanted

    def _sync_request(self, shares: list[SyncGroupRequestAssignment]) -> SyncGroupRequest:
        return SyncGroupRequest(
            group_id=self.group_id,
            generation_id=self.generation,
            member_id=self.member_id,
            group_instance_id=self._settings.group_instance_id,
            protocol_type=PROTOCOL_TYPE,
            protocol_name=self._protocol_name,
            assignments=shares,
        )

    def synced(self, response: SyncGroupResponse, now_s: float) -> None:
        code = ErrorCode.of(response.error_code)
        if code is not ErrorCode.NONE:
            self._apply(event_of(code), now_s, code, "syncing with")
            return
        try:
            partitions = [TopicPartition(*partition) for partition in decode_assignment(response.assignment)]
        except DecodeError as error:  # its leader may be of any client
            failure = FatalError(
                f"the assignment that the leader of group {self.group_id!r} made cannot be read: {error}"
            )
            self._change = self._change._replace(error=failure)
            self._apply(MembershipEvent.COORDINATOR_LOST, now_s)
            return
        self._apply(MembershipEvent.SYNCED, now_s)
        self._pauses.reset()
        self._next_beat_s = now_s + self._settings.heartbeat_interval_ms / 1000
        self._change = self._change._replace(assignment=partitions)
        self._had = partitions, self.generation
        if self._joins_again:
            self._joins_again = False
            self._apply(MembershipEvent.REBALANCE, now_s)

    # --- heartbeats ---

    def next_event_s(self) -> float:
        """When `beat` has something to do."""
        if not self._has_a_session:
            return NEVER_S
        return min(NEVER_S if self._is_beating else self._next_beat_s, self._poll_limit_s)

    @property
    def _has_a_session(self) -> bool:
        return self.generation != NO_GENERATION and self.state in _KEPT_BY_HEARTBEATS

    def beat(self, now_s: float) -> HeartbeatRequest | Departure | None:
        """A heartbeat if it is due (then `beaten`, or `not_beaten`). A member whose program does not poll leaves, so
        that others can go on; a static one waits for the end of its session."""
        if not self._has_a_session:
            return None
        if self._is_too_slow(now_s):
            self._warn_too_slow()
            departure = self._departure("max.poll.interval.ms passed without a poll")
            self._apply(MembershipEvent.EXPELLED, now_s)
            return departure
        if self._is_beating or now_s < self._next_beat_s:
            return None
        self._is_beating = True
        identity = self.identity()
        return HeartbeatRequest(self.group_id, identity.generation_id, identity.member_id, identity.group_instance_id)

    def beaten(self, request: HeartbeatRequest, response: HeartbeatResponse, now_s: float) -> None:
        """What the coordinator said to a heartbeat; nothing counts that it said to an older generation."""
        code = ErrorCode.of(response.error_code)
        self._plan_beat(now_s)
        if code is not ErrorCode.NONE and self._is_current(request.generation_id, request.member_id):
            self._apply(event_of(code), now_s, code, "heartbeat to")

    def not_beaten(self, request: HeartbeatRequest, now_s: float) -> None:
        """No response. The next heartbeat tries again; the coordinator returns an error if the session has ended."""
        self._is_in_doubt = True
        self._plan_beat(now_s)

    def _plan_beat(self, now_s: float) -> None:
        self._is_beating = False
        self._next_beat_s = now_s + self._settings.heartbeat_interval_ms / 1000

    def reported(self, code: ErrorCode, identity: GroupMetadata, now_s: float) -> None:
        """The error of a commit may end the membership; that of an older generation is ignored."""
        event = event_of(code)
        if event in _MEMBERSHIP_EVENTS and self._is_current(identity.generation_id, identity.member_id):
            self._apply(event, now_s, code, "committing to")

    def _is_current(self, generation: int, member_id: str) -> bool:
        return (generation, member_id) == (self.generation, self.member_id) and self.state in _KEPT_BY_HEARTBEATS

    # --- the end ---

    def leave(self, reason: str) -> Departure | None:
        """For good. What to send to the coordinator, if anything: static members keep their place."""
        self.state, effect = step(self.state, MembershipEvent.LEAVE)
        return self._departure(reason) if effect & MembershipEffect.SEND_LEAVE else None

    def _departure(self, reason: str) -> Departure | None:
        if not self.member_id or self._settings.group_instance_id is not None:
            return None
        return Departure(self.group_id, self.member_id, reason)

    def _apply(self, event: MembershipEvent, now_s: float, code: ErrorCode | None = None, doing: str = "") -> None:
        self.state, effect = step(self.state, event)
        if effect & MembershipEffect.FORGET_GENERATION:
            self.generation = NO_GENERATION
        if effect & MembershipEffect.FORGET_MEMBER_ID:
            self.member_id = ""
        if effect & MembershipEffect.LOSE_PARTITIONS:
            self._change = MembershipChange(lost=True, error=self._change.error)
            self._had = [], NO_GENERATION
        if effect & MembershipEffect.FIND_COORDINATOR:
            self._is_in_doubt = True
        if effect & MembershipEffect.BACK_OFF:
            self.retry_at_s = now_s + self._pauses.next_s()
        if effect & MembershipEffect.RAISE and code is not None:
            self._change = self._change._replace(error=error_of(code, f"{doing} group {self.group_id!r}"))
