"""A classic group: the table of its life, its members, votes, leader and generation. No I/O and no clock.

    Empty                no members; may have offsets
    PreparingRebalance   members are being collected; all have to join again
    CompletingRebalance  a generation is formed; its leader's assignment is awaited
    Stable               all members have an assignment
    Dead                 deleted; an object that a request still refers to

A cell of the table says which state comes next and what the coordinator has to do. Guards that look at members,
generations and protocols are checked before (`Group.check_member` and others), so that every cell is certain.
"""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from semel.broker.clock import Alarm, cancel_all
from semel.broker.groups.records import NO_TIME
from semel.protocol.errors import DecodeError, ErrorCode
from semel.protocol.messages.groups import CONSUMER_SUBSCRIPTION, JoinGroupResponse, SyncGroupResponse
from semel.protocol.messages.internal_topics import GroupMetadataValue, MemberMetadata


class GroupState(Enum):
    """A state, by the name that Kafka's tools show."""

    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


class GroupEvent(Enum):
    """What can happen to a group."""

    ID_REQUESTED = auto()  # a JoinGroup without a member id, from a client that has to come back with one
    JOIN_NEW = auto()  # a member that the group does not know yet (or only as pending)
    JOIN_REPLACING = auto()  # a static member under a new member id; the chosen protocol stays
    JOIN_REPLACING_CHANGED = auto()  # a static member under a new member id; another protocol would be chosen
    JOIN_SAME = auto()  # a follower, with the protocols that it had
    JOIN_SAME_LEADER = auto()  # the leader, with the protocols that it had
    JOIN_CHANGED = auto()  # a known member with other protocols
    JOIN_DONE = auto()  # all are here, or the time is over; there are members, and one that waits
    JOIN_DONE_NOBODY = auto()  # the same, and no member is left
    JOIN_DONE_NOBODY_WAITS = auto()  # the same; only static members are left and none of them came back
    SYNC_LEADER = auto()
    SYNC_FOLLOWER = auto()
    SYNC_OVERDUE = auto()  # some members of this generation never sent SyncGroup
    ASSIGNMENT_STORED = auto()  # the leader's assignment is durable
    ASSIGNMENT_LOST = auto()  # it could not be written
    HEARTBEAT = auto()
    MEMBERS_LEFT = auto()  # by LeaveGroup
    MEMBER_EXPIRED = auto()  # by session timeout
    PENDING_EXPIRED = auto()  # a member id was handed out and never used
    COMMIT = auto()  # offsets from a valid member of this generation
    COMMIT_SIMPLE = auto()  # offsets from a client without group management
    TXN_COMMIT = auto()
    TXN_COMMIT_SIMPLE = auto()
    DELETE_OFFSETS = auto()  # of a group whose subscriptions the coordinator can read
    DELETE_OFFSETS_OPAQUE = auto()  # of a group with a protocol type of its own
    DELETE = auto()
    EXPIRE = auto()  # no offsets and no members left


class Act(Enum):
    """What the coordinator does about it."""

    IGNORE = auto()
    REFUSE = auto()  # respond with the cell's error
    ACCEPT = auto()  # go on, nothing about the group changes
    ACCEPT_ALIVE = auto()  # the same, and the member's session starts anew; the cell's error is the response
    PREPARE = auto()  # begin a rebalance: waiting SyncGroups get an error, the join phase starts
    TRY_COMPLETE = auto()  # end the join phase if all members are here and it is not the initial delay
    COMPLETE_IF_ALL = auto()  # end the join phase if all members are here
    START_GENERATION = auto()  # respond to all JoinGroups, await the SyncGroups
    BECOME_EMPTY = auto()  # write a generation without members
    WAIT_LONGER = auto()  # another round of the rebalance timeout
    SEND_GENERATION = auto()  # respond to this JoinGroup with the current generation
    STORE_MEMBER = auto()  # write the new member id, then respond: no rebalance
    AWAIT_LEADER = auto()  # the response to this SyncGroup comes with the leader's
    STORE_ASSIGNMENT = auto()  # write the assignment
    HAND_OUT = auto()  # respond to all SyncGroups
    ANSWER_ASSIGNMENT = auto()
    WRITE_TOMBSTONES = auto()  # for the group and its offsets


class Cell(NamedTuple):
    """One cell of the table. `to` is None where the state stays."""

    act: Act
    to: GroupState | None = None
    error: ErrorCode = ErrorCode.NONE


def _refuse(error: ErrorCode) -> Cell:
    return Cell(Act.REFUSE, error=error)


_SKIP = Cell(Act.IGNORE)
_OK = Cell(Act.ACCEPT)
_OK_ALIVE = Cell(Act.ACCEPT_ALIVE)
_JOIN_ALIVE = Cell(Act.ACCEPT_ALIVE, error=ErrorCode.REBALANCE_IN_PROGRESS)
_GONE = _refuse(ErrorCode.COORDINATOR_NOT_AVAILABLE)
_NO_GROUP = _refuse(ErrorCode.GROUP_ID_NOT_FOUND)
_STRANGER = _refuse(ErrorCode.UNKNOWN_MEMBER_ID)
_IN_USE = _refuse(ErrorCode.NON_EMPTY_GROUP)
_JOIN_FIRST = _refuse(ErrorCode.REBALANCE_IN_PROGRESS)
_PREPARE = Cell(Act.PREPARE, GroupState.PREPARING)
_TRY = Cell(Act.TRY_COMPLETE)
_IF_ALL = Cell(Act.COMPLETE_IF_ALL)
_START = Cell(Act.START_GENERATION, GroupState.COMPLETING)
_EMPTIED = Cell(Act.BECOME_EMPTY, GroupState.EMPTY)
_LONGER = Cell(Act.WAIT_LONGER)
_CURRENT = Cell(Act.SEND_GENERATION)
_STORE_ID = Cell(Act.STORE_MEMBER)
_STORE = Cell(Act.STORE_ASSIGNMENT)
_AWAIT = Cell(Act.AWAIT_LEADER)
_HAND_OUT = Cell(Act.HAND_OUT, GroupState.STABLE)
_ASSIGNED = Cell(Act.ANSWER_ASSIGNMENT)
_DELETED = Cell(Act.WRITE_TOMBSTONES, GroupState.DEAD)

# fmt: off
STATES = (GroupState.EMPTY, GroupState.PREPARING, GroupState.COMPLETING, GroupState.STABLE, GroupState.DEAD)
_ROWS: dict[GroupEvent, tuple[Cell, Cell, Cell, Cell, Cell]] = {
    #                               Empty       Preparing    Completing   Stable      Dead
    GroupEvent.ID_REQUESTED:            (_OK,        _OK,         _OK,         _OK,        _GONE),
    GroupEvent.JOIN_NEW:                (_PREPARE,   _TRY,        _PREPARE,    _PREPARE,   _GONE),
    GroupEvent.JOIN_REPLACING:          (_STRANGER,  _TRY,        _PREPARE,    _STORE_ID,  _GONE),
    GroupEvent.JOIN_REPLACING_CHANGED:  (_STRANGER,  _TRY,        _PREPARE,    _PREPARE,   _GONE),
    GroupEvent.JOIN_SAME:               (_STRANGER,  _TRY,        _CURRENT,    _CURRENT,   _GONE),
    GroupEvent.JOIN_SAME_LEADER:        (_STRANGER,  _TRY,        _CURRENT,    _PREPARE,   _GONE),
    GroupEvent.JOIN_CHANGED:            (_STRANGER,  _TRY,        _PREPARE,    _PREPARE,   _GONE),
    GroupEvent.JOIN_DONE:               (_SKIP,      _START,      _SKIP,       _SKIP,      _SKIP),
    GroupEvent.JOIN_DONE_NOBODY:        (_SKIP,      _EMPTIED,    _SKIP,       _SKIP,      _SKIP),
    GroupEvent.JOIN_DONE_NOBODY_WAITS:  (_SKIP,      _LONGER,     _SKIP,       _SKIP,      _SKIP),
    GroupEvent.SYNC_LEADER:             (_STRANGER,  _JOIN_FIRST, _STORE,      _ASSIGNED,  _GONE),
    GroupEvent.SYNC_FOLLOWER:           (_STRANGER,  _JOIN_FIRST, _AWAIT,      _ASSIGNED,  _GONE),
    GroupEvent.SYNC_OVERDUE:            (_SKIP,      _SKIP,       _PREPARE,    _PREPARE,   _SKIP),
    GroupEvent.ASSIGNMENT_STORED:       (_SKIP,      _SKIP,       _HAND_OUT,   _SKIP,      _SKIP),
    GroupEvent.ASSIGNMENT_LOST:         (_SKIP,      _SKIP,       _PREPARE,    _SKIP,      _SKIP),
    GroupEvent.HEARTBEAT:               (_STRANGER,  _JOIN_ALIVE, _OK_ALIVE,   _OK_ALIVE,  _GONE),
    GroupEvent.MEMBERS_LEFT:            (_SKIP,      _TRY,        _PREPARE,    _PREPARE,   _SKIP),
    GroupEvent.MEMBER_EXPIRED:          (_SKIP,      _IF_ALL,     _PREPARE,    _PREPARE,   _SKIP),
    GroupEvent.PENDING_EXPIRED:         (_SKIP,      _IF_ALL,     _SKIP,       _SKIP,      _SKIP),
    GroupEvent.COMMIT:                  (_STRANGER,  _OK_ALIVE,   _JOIN_FIRST, _OK_ALIVE,  _GONE),
    GroupEvent.COMMIT_SIMPLE:           (_OK,        _STRANGER,   _STRANGER,   _STRANGER,  _GONE),
    GroupEvent.TXN_COMMIT:              (_STRANGER,  _OK,         _OK,         _OK,        _GONE),
    GroupEvent.TXN_COMMIT_SIMPLE:       (_OK,        _OK,         _OK,         _OK,        _GONE),
    GroupEvent.DELETE_OFFSETS:        (_OK,        _OK,         _OK,         _OK,        _NO_GROUP),
    GroupEvent.DELETE_OFFSETS_OPAQUE: (_OK,        _IN_USE,     _IN_USE,     _IN_USE,    _NO_GROUP),
    GroupEvent.DELETE:                  (_DELETED,      _IN_USE,     _IN_USE,     _IN_USE,    _NO_GROUP),
    GroupEvent.EXPIRE:                  (_DELETED,      _SKIP,       _SKIP,       _SKIP,      _SKIP),
}
# fmt: on

TABLE: dict[tuple[GroupState, GroupEvent], Cell] = {
    (state, event): cell for event, row in _ROWS.items() for state, cell in zip(STATES, row, strict=True)
}


def decide(state: GroupState, event: GroupEvent) -> Cell:
    return TABLE[state, event]


Protocols = dict[str, bytes]  # protocol name: the member's metadata for it, in the order that the member prefers


@dataclass(slots=True, eq=False)
class ClassicMember:
    """What a group knows about a member. `joining` and `syncing` are its requests that wait for a response."""

    member_id: str
    group_instance_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    session_timeout_ms: int
    protocol_type: str
    protocols: Protocols
    assignment: bytes = b""
    is_new: bool = False  # has had no response yet: does not know its id, so it cannot send heartbeats
    joining: asyncio.Future[JoinGroupResponse] | None = None
    syncing: asyncio.Future[SyncGroupResponse] | None = None
    session: Alarm | None = field(default=None, repr=False)

    @property
    def is_static(self) -> bool:
        return self.group_instance_id is not None

    @property
    def needs_no_heartbeat(self) -> bool:
        """A member whose request waits here is alive; but a new member may be gone unnoticed."""
        return not self.is_new and (self.joining is not None or self.syncing is not None)

    def has_protocols(self, protocols: Protocols) -> bool:
        """Whether these are the same protocols with the same metadata, in the same order of preference."""
        return list(self.protocols.items()) == list(protocols.items())

    def vote(self, candidates: set[str]) -> str:
        return next(name for name in self.protocols if name in candidates)

    def respond_to_join(self, response: JoinGroupResponse) -> bool:
        waiting, self.joining = self.joining, None
        if waiting is not None and not waiting.done():
            waiting.set_result(response)
        return waiting is not None

    def respond_to_sync(self, response: SyncGroupResponse) -> bool:
        waiting, self.syncing = self.syncing, None
        if waiting is not None and not waiting.done():
            waiting.set_result(response)
        return waiting is not None


CONSUMER = "consumer"
_VERSION_SIZE = 2


class GroupError(Exception):
    """A request that a group refuses. The code is Kafka's."""

    def __init__(self, code: ErrorCode, message: str = "") -> None:
        super().__init__(message or code.name)
        self.code = code


class Group:
    """State of one group. Methods keep the members, votes and leader consistent; they never send a response."""

    def __init__(self, group_id: str, now_ms: int, state: GroupState = GroupState.EMPTY) -> None:
        self.group_id = group_id
        self.state = state
        self.previous_state = GroupState.DEAD
        self.state_time_ms = now_ms
        self.generation = 0
        self.protocol_type: str | None = None
        self.protocol: str | None = None
        self.leader: str | None = None
        self.members: dict[str, ClassicMember] = {}
        self.static_ids: dict[str, str] = {}  # group.instance.id: member id
        self.pending: dict[str, Alarm] = {}  # member ids that were handed out and did not come back yet
        self.not_synced: set[str] = set()  # members of this generation whose SyncGroup is still to come
        self.grew = False  # a member joined during the initial delay, so it may be extended
        self.topics: frozenset[str] | None = None  # what its consumers subscribe to; None: not known
        self.join_alarm: Alarm | None = None
        self.sync_alarm: Alarm | None = None
        self._supported: Counter[str] = Counter()  # protocol: how many members support it

    # -- the table -----------------------------------------------------------------------------------------------------
    def decide(self, event: GroupEvent) -> Cell:
        """What the event means now. Raises the cell's error where the response is a refusal."""
        cell = decide(self.state, event)
        if cell.act is Act.REFUSE:
            raise GroupError(cell.error, f"group {self.group_id} is {self.state.value}: {event.name} refused")
        return cell

    def enter(self, state: GroupState, now_ms: int) -> None:
        self.previous_state, self.state, self.state_time_ms = self.state, state, now_ms

    @property
    def is_blank(self) -> bool:
        """Whether it never had a member: nothing but offsets, or just created."""
        return self.state is GroupState.EMPTY and self.generation == 0 and not self.members and not self.pending

    # -- guards --------------------------------------------------------------------------------------------------------
    def check_member(self, member_id: str, instance_id: str | None) -> None:
        if instance_id is not None:
            owner = self.static_ids.get(instance_id)
            if owner is None:
                raise GroupError(ErrorCode.UNKNOWN_MEMBER_ID, f"no member with group.instance.id {instance_id}")
            if owner != member_id:
                raise GroupError(
                    ErrorCode.FENCED_INSTANCE_ID, f"group.instance.id {instance_id} belongs to {owner}, not {member_id}"
                )
        if member_id not in self.members:
            raise GroupError(ErrorCode.UNKNOWN_MEMBER_ID, f"{member_id} is no member of group {self.group_id}")

    def check_generation(self, generation: int) -> None:
        if generation != self.generation:
            raise GroupError(
                ErrorCode.ILLEGAL_GENERATION, f"generation {generation}, group {self.group_id} is at {self.generation}"
            )

    def supports(self, protocol_type: str, protocols: Collection[str]) -> bool:
        """Whether a member with these protocols can be in the group: all members must support one of them."""
        if self.state is GroupState.EMPTY:
            return bool(protocol_type) and bool(protocols)
        return protocol_type == self.protocol_type and any(
            self._supported[name] == len(self.members) for name in protocols
        )

    @property
    def all_joined(self) -> bool:
        return not self.pending and all(member.joining is not None for member in self.members.values())

    @property
    def waiting_to_join(self) -> int:
        return sum(member.joining is not None for member in self.members.values())

    def has_capacity(self, member_id: str, max_size: int) -> bool:
        """While members are collected those who wait count; a group that shrank its limit thus drops the last ones."""
        if self.state in (GroupState.EMPTY, GroupState.DEAD):
            return True
        member = self.members.get(member_id)
        if self.state is GroupState.PREPARING:
            return (member is not None and member.joining is not None) or self.waiting_to_join < max_size
        return member is not None or len(self.members) < max_size

    # -- members -------------------------------------------------------------------------------------------------------
    def add(self, member: ClassicMember) -> None:
        if not self.members:
            self.protocol_type = member.protocol_type
        if member.group_instance_id is not None:
            self.static_ids[member.group_instance_id] = member.member_id
        self.members[member.member_id] = member
        self._supported.update(member.protocols.keys())
        if self.leader is None:
            self.leader = member.member_id
        self.forget_pending(member.member_id)

    def remove(self, member_id: str) -> ClassicMember | None:
        """Takes a member out; another becomes leader if it was the leader."""
        self.forget_pending(member_id)
        self.not_synced.discard(member_id)
        member = self.members.pop(member_id, None)
        if member is None:
            return None
        self._supported.subtract(member.protocols.keys())
        if member.group_instance_id is not None:
            self.static_ids.pop(member.group_instance_id, None)
        if self.leader == member_id:
            self.leader = next(iter(self.members), None)
        return member

    def rename(self, member: ClassicMember, new_id: str) -> None:
        """Gives a static member that came back its new member id, in the place of the old one."""
        old_id = member.member_id
        self.members = {new_id if key == old_id else key: value for key, value in self.members.items()}
        self.not_synced.discard(old_id)
        member.member_id = new_id
        if member.group_instance_id is not None:
            self.static_ids[member.group_instance_id] = new_id
        if self.leader == old_id:
            self.leader = new_id

    def update(
        self, member: ClassicMember, protocols: Protocols, rebalance_timeout_ms: int, session_timeout_ms: int
    ) -> None:
        self._supported.subtract(member.protocols.keys())
        self._supported.update(protocols.keys())
        member.protocols = protocols
        member.rebalance_timeout_ms = rebalance_timeout_ms
        member.session_timeout_ms = session_timeout_ms

    def forget_pending(self, member_id: str) -> None:
        cancel_all(self.pending.pop(member_id, None))

    def absent(self) -> list[ClassicMember]:
        """Members that have not joined in this rebalance."""
        return [member for member in self.members.values() if member.joining is None]

    @property
    def rebalance_timeout_ms(self) -> int:
        return max((member.rebalance_timeout_ms for member in self.members.values()), default=0)

    # -- generations ---------------------------------------------------------------------------------------------------
    def elect_leader(self) -> bool:
        """Makes sure that the leader waits for the next generation. False: no member does."""
        if self.leader is None:
            return False
        if self.members[self.leader].joining is not None:
            return True
        for member in self.members.values():
            if member.joining is not None:
                self.leader = member.member_id
                return True
        return False

    def choose_protocol(self) -> str:
        """The one that most members prefer among those that all of them support."""
        candidates = {name for name, count in self._supported.items() if count == len(self.members)}
        votes = Counter(member.vote(candidates) for member in self.members.values())
        return votes.most_common(1)[0][0]

    def next_generation(self) -> None:
        self.generation += 1
        self.protocol = self.choose_protocol() if self.members else None
        self.topics = self._subscribed_topics()
        self.not_synced.clear()

    def _subscribed_topics(self) -> frozenset[str] | None:
        if self.protocol_type != CONSUMER:
            return None
        if self.members and self.protocol is None:
            return None
        try:
            return frozenset(
                topic for member in self.members.values() for topic in _topics_of(member.protocols[self.protocol or ""])
            )
        except DecodeError:
            return None

    def subscribes(self, topic: str) -> bool:
        """A consumer group whose subscriptions cannot be read is taken to subscribe to everything."""
        return self.protocol_type == CONSUMER if self.topics is None else topic in self.topics

    # -- as a record ---------------------------------------------------------------------------------------------------
    def to_record(self, assignment: dict[str, bytes] | None = None) -> GroupMetadataValue:
        """The group as the log keeps it, with the given assignment or the one that its members have."""
        return GroupMetadataValue(
            protocol_type=self.protocol_type or "",
            generation=self.generation,
            protocol=self.protocol,
            leader=self.leader,
            current_state_timestamp=self.state_time_ms,
            members=list(self._member_records(assignment)),
        )

    def _member_records(self, assignment: dict[str, bytes] | None) -> Iterator[MemberMetadata]:
        for member in self.members.values():
            yield MemberMetadata(
                member_id=member.member_id,
                group_instance_id=member.group_instance_id,
                client_id=member.client_id,
                client_host=member.client_host,
                rebalance_timeout=member.rebalance_timeout_ms,
                session_timeout=member.session_timeout_ms,
                subscription=member.protocols[self.protocol or ""],
                assignment=member.assignment if assignment is None else assignment.get(member.member_id, b""),
            )

    @classmethod
    def from_record(cls, group_id: str, value: GroupMetadataValue) -> Group:
        state = GroupState.STABLE if value.members else GroupState.EMPTY
        group = cls(group_id, value.current_state_timestamp, state)
        group.generation = value.generation
        group.protocol_type = value.protocol_type or None
        group.protocol = value.protocol
        group.leader = value.leader
        for entry in value.members:
            group.add(_member_of(entry, group))
        group.topics = group._subscribed_topics()
        return group

    def replay(self, value: GroupMetadataValue) -> None:
        """A record of this group is durable. The members have their assignment, unless a rebalance began meanwhile."""
        if value.generation != self.generation or self.decide(GroupEvent.ASSIGNMENT_STORED).act is not Act.HAND_OUT:
            return
        self.enter(GroupState.STABLE, value.current_state_timestamp)
        for entry in value.members:
            member = self.members.get(entry.member_id)
            if member is not None:
                member.assignment = entry.assignment

    @property
    def emptied_ms(self) -> int | None:
        """Since when the group has no members; None for records of old brokers that do not tell."""
        return None if self.state_time_ms == NO_TIME else self.state_time_ms


def _member_of(entry: MemberMetadata, group: Group) -> ClassicMember:
    return ClassicMember(
        member_id=entry.member_id,
        group_instance_id=entry.group_instance_id,
        client_id=entry.client_id,
        client_host=entry.client_host,
        rebalance_timeout_ms=entry.session_timeout if entry.rebalance_timeout == -1 else entry.rebalance_timeout,
        session_timeout_ms=entry.session_timeout,
        protocol_type=group.protocol_type or "",
        protocols={group.protocol or "": entry.subscription},
        assignment=entry.assignment,
    )


def _topics_of(metadata: bytes) -> list[str]:
    """The topics in a consumer's subscription. Every version starts as version 0 does."""
    if len(metadata) < _VERSION_SIZE:
        raise DecodeError(f"a subscription starts with a version of {_VERSION_SIZE} bytes, but has {len(metadata)}")
    (version,) = struct.unpack_from(">h", metadata)
    if version < 0:
        raise DecodeError(f"subscription has version {version}")
    return CONSUMER_SUBSCRIPTION.decode_from(metadata, 0, _VERSION_SIZE)[0].topics
