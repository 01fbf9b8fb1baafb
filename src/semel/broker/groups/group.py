"""A classic group: members, votes, leader, generation. No I/O and no time; the coordinator moves it by the table."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Collection, Iterator

from semel.broker.groups.member import Member, Protocols
from semel.broker.groups.records import NO_TIME
from semel.broker.groups.states import Act, Cell, Event, GroupState, decide
from semel.broker.groups.timers import Alarm
from semel.protocol.errors import DecodeError, ErrorCode
from semel.protocol.messages.groups import CONSUMER_SUBSCRIPTION
from semel.protocol.messages.internal_topics import GroupMetadataValue, MemberMetadata

CONSUMER = "consumer"
_VERSION_SIZE = 2


class GroupError(Exception):
    """A request that a group refuses. The code is Kafka's."""

    def __init__(self, code: ErrorCode, message: str = "") -> None:
        super().__init__(message or code.name)
        self.code = code


class Group:
    """State of one group. Methods keep the members, votes and leader consistent; they never answer anybody."""

    def __init__(self, group_id: str, now_ms: int, state: GroupState = GroupState.EMPTY) -> None:
        self.group_id = group_id
        self.state = state
        self.previous_state = GroupState.DEAD
        self.state_time_ms = now_ms
        self.generation = 0
        self.protocol_type: str | None = None
        self.protocol: str | None = None
        self.leader: str | None = None
        self.members: dict[str, Member] = {}
        self.static_ids: dict[str, str] = {}  # group.instance.id: member id
        self.pending: dict[str, Alarm] = {}  # member ids that were handed out and did not come back yet
        self.not_synced: set[str] = set()  # members of this generation whose SyncGroup is still to come
        self.grew = False  # somebody joined during the initial delay, so it may be extended
        self.topics: frozenset[str] | None = None  # what its consumers subscribe to; None: not known
        self.join_alarm: Alarm | None = None
        self.sync_alarm: Alarm | None = None
        self._supported: Counter[str] = Counter()  # protocol: how many members support it

    # -- the table -----------------------------------------------------------------------------------------------------
    def decide(self, event: Event) -> Cell:
        """What the event means now. Raises the cell's error where the answer is a refusal."""
        cell = decide(self.state, event)
        if cell.act is Act.REFUSE:
            raise GroupError(cell.error, f"group {self.group_id} is {self.state.value}: {event.name} refused")
        return cell

    def enter(self, state: GroupState, now_ms: int) -> None:
        self.previous_state, self.state, self.state_time_ms = self.state, state, now_ms

    @property
    def is_blank(self) -> bool:
        """Whether it never had a member: nothing but positions, or just created."""
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
        """Whether a member with these protocols can be in the group: one of them must be everybody's."""
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

    def has_room(self, member_id: str, max_size: int) -> bool:
        """While members are collected those who wait count; a group that shrank its limit thus drops the last ones."""
        if self.state in (GroupState.EMPTY, GroupState.DEAD):
            return True
        member = self.members.get(member_id)
        if self.state is GroupState.PREPARING:
            return (member is not None and member.joining is not None) or self.waiting_to_join < max_size
        return member is not None or len(self.members) < max_size

    # -- members -------------------------------------------------------------------------------------------------------
    def add(self, member: Member) -> None:
        if not self.members:
            self.protocol_type = member.protocol_type
        if member.group_instance_id is not None:
            self.static_ids[member.group_instance_id] = member.member_id
        self.members[member.member_id] = member
        self._supported.update(member.protocols.keys())
        if self.leader is None:
            self.leader = member.member_id
        self.forget_pending(member.member_id)

    def remove(self, member_id: str) -> Member | None:
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

    def rename(self, member: Member, new_id: str) -> None:
        """Gives a static member that came back its new member id, in the place of the old one."""
        old_id = member.member_id
        self.members = {new_id if key == old_id else key: value for key, value in self.members.items()}
        self.not_synced.discard(old_id)
        member.member_id = new_id
        if member.group_instance_id is not None:
            self.static_ids[member.group_instance_id] = new_id
        if self.leader == old_id:
            self.leader = new_id

    def update(self, member: Member, protocols: Protocols, rebalance_timeout_ms: int, session_timeout_ms: int) -> None:
        self._supported.subtract(member.protocols.keys())
        self._supported.update(protocols.keys())
        member.protocols = protocols
        member.rebalance_timeout_ms = rebalance_timeout_ms
        member.session_timeout_ms = session_timeout_ms

    def forget_pending(self, member_id: str) -> None:
        alarm = self.pending.pop(member_id, None)
        if alarm is not None:
            alarm.cancel()

    def absent(self) -> list[Member]:
        """Members that have not joined in this rebalance."""
        return [member for member in self.members.values() if member.joining is None]

    @property
    def rebalance_timeout_ms(self) -> int:
        return max((member.rebalance_timeout_ms for member in self.members.values()), default=0)

    # -- generations ---------------------------------------------------------------------------------------------------
    def elect_leader(self) -> bool:
        """Makes sure that the leader is somebody who waits for the next generation. False: nobody does."""
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
        if value.generation != self.generation or self.decide(Event.ASSIGNMENT_STORED).act is not Act.HAND_OUT:
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


def _member_of(entry: MemberMetadata, group: Group) -> Member:
    return Member(
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
