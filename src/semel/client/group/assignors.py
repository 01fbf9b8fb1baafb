"""How the leader of a group shares partitions out. Pure: members and partition counts in, an assignment out.

`range` and `roundrobin` give the same result as Kafka's Java client, so that members of both kinds can lead one group.
`sticky` and `cooperative-sticky` share one algorithm: as even as possible, then as few moves as possible. The
cooperative one hands out a partition that moves only after its old owner has given it back (a second rebalance).
"""

from __future__ import annotations

import struct
from bisect import insort
from collections.abc import Callable, Iterable, Mapping
from itertools import cycle
from typing import Annotated, NamedTuple

from semel.protocol.api import Format
from semel.protocol.errors import DecodeError
from semel.protocol.messages.groups import (
    CONSUMER_ASSIGNMENT,
    CONSUMER_SUBSCRIPTION,
    ConsumerProtocolAssignment,
    ConsumerProtocolSubscription,
    ConsumerProtocolTopic,
)
from semel.protocol.schema import Struct, ignorable, int32, versions

Partition = tuple[str, int]
Assignment = dict[str, list[Partition]]

NO_GENERATION = -1
_VERSION = struct.Struct(">h")
_GENERATION = struct.Struct(">i")


class SubscribedMember(NamedTuple):
    """A member as the leader sees it."""

    member_id: str
    instance_id: str | None
    topics: frozenset[str]
    owned: frozenset[Partition] = frozenset()
    generation: int = NO_GENERATION

    @property
    def rank(self) -> tuple[bool, str]:
        """Static members come first, by their instance id; the others by member id. Kafka's own order."""
        return (self.instance_id is None, self.instance_id or self.member_id)


class Assignor(NamedTuple):
    """A named way to share partitions out. Cooperative members keep what they own during a rebalance."""

    name: str
    share: Callable[[list[SubscribedMember], Mapping[str, int]], Assignment]
    is_cooperative: bool = False
    sends_owned: bool = False


# -- range and round robin ---------------------------------------------------------------------------------------------
def share_ranges(members: list[SubscribedMember], partition_counts: Mapping[str, int]) -> Assignment:
    """Each topic is cut into ranges, one per subscribed member; the first members get one partition more."""
    result: Assignment = {member.member_id: [] for member in members}
    for topic in sorted(partition_counts):
        takers = [member for member in _ranked(members) if topic in member.topics]
        if not takers:
            continue
        least, extra = divmod(partition_counts[topic], len(takers))
        start = 0
        for index, member in enumerate(takers):
            end = start + least + (index < extra)
            result[member.member_id] += [(topic, partition) for partition in range(start, end)]
            start = end
    return result


def share_round_robin(members: list[SubscribedMember], partition_counts: Mapping[str, int]) -> Assignment:
    """All partitions of all topics are dealt out one by one, to members that have subscribed to the topic."""
    result: Assignment = {member.member_id: [] for member in members}
    turns = cycle(_ranked(members))
    wanted = frozenset[str]().union(*(member.topics for member in members))
    for partition in _all_partitions(partition_counts, wanted):
        taker = next(member for member in turns if partition[0] in member.topics)
        result[taker.member_id].append(partition)
    return result


# -- sticky ------------------------------------------------------------------------------------------------------------
def share_sticky(members: list[SubscribedMember], partition_counts: Mapping[str, int]) -> Assignment:
    """Members keep what they own as long as that is fair; what is left goes to the member with the fewest."""
    ranked = _ranked(members)
    wanted = frozenset[str]().union(*(member.topics for member in members))
    partitions = list(_all_partitions(partition_counts, wanted))
    kept = _valid_claims(ranked, set(partitions))
    _shed_surplus(ranked, kept, partitions)
    owned = {partition for claimed in kept.values() for partition in claimed}
    _deal([partition for partition in partitions if partition not in owned], ranked, kept)
    _even_out(ranked, kept)
    return {member_id: sorted(claimed) for member_id, claimed in kept.items()}


def share_cooperative_sticky(members: list[SubscribedMember], partition_counts: Mapping[str, int]) -> Assignment:
    """As `share_sticky`, but a partition that moves is assigned only after its owner has revoked it."""
    target = share_sticky(members, partition_counts)
    holders: dict[Partition, set[str]] = {}
    for member in members:
        for partition in member.owned:
            holders.setdefault(partition, set()).add(member.member_id)
    return {
        member_id: [partition for partition in share if holders.get(partition, {member_id}) == {member_id}]
        for member_id, share in target.items()
    }


def _valid_claims(members: list[SubscribedMember], partitions: set[Partition]) -> dict[str, set[Partition]]:
    """What each member rightly owns: of several claims the newest generation's wins; equal ones cancel each other."""
    best: dict[Partition, tuple[int, str | None]] = {}
    for member in members:
        for partition in member.owned:
            if partition not in partitions or partition[0] not in member.topics:
                continue
            generation, _ = best.get(partition, (NO_GENERATION - 1, None))
            if member.generation > generation:
                best[partition] = (member.generation, member.member_id)
            elif member.generation == generation:
                best[partition] = (generation, None)
    claims: dict[str, set[Partition]] = {member.member_id: set() for member in members}
    for partition, (_, owner) in best.items():
        if owner is not None:
            claims[owner].add(partition)
    return claims


def _shed_surplus(
    members: list[SubscribedMember], kept: dict[str, set[Partition]], partitions: list[Partition]
) -> None:
    """Where all want the same topics: no member keeps more than a fair share. (Otherwise `_even_out` does the work.)"""
    if len({member.topics for member in members}) != 1:
        return
    least, extra = divmod(len(partitions), len(members))
    for member in sorted(members, key=lambda member: -len(kept[member.member_id])):
        claimed = kept[member.member_id]
        allowed = least + 1 if extra > 0 and len(claimed) > least else least
        if len(claimed) >= allowed > least:
            extra -= 1
        for partition in sorted(claimed)[allowed:]:
            claimed.discard(partition)


def _deal(partitions: Iterable[Partition], members: list[SubscribedMember], kept: dict[str, set[Partition]]) -> None:
    """Each partition goes to the subscribed member that has least."""
    order = {member.member_id: index for index, member in enumerate(members)}
    queues: dict[str, list[tuple[int, int, str]]] = {}  # by topic; only where several subscriptions exist they differ
    same = len({member.topics for member in members}) == 1
    for partition in partitions:
        key = "" if same else partition[0]
        if key not in queues or not same:
            queues[key] = sorted(
                (len(kept[member.member_id]), order[member.member_id], member.member_id)
                for member in members
                if partition[0] in member.topics
            )
        count, rank, member_id = queues[key].pop(0)
        kept[member_id].add(partition)
        insort(queues[key], (count + 1, rank, member_id))


def _even_out(members: list[SubscribedMember], kept: dict[str, set[Partition]]) -> None:
    """Moves single partitions from the member with most to the one with fewest until no move makes it more even."""
    moved = True
    while moved:
        moved = False
        for giver in sorted(members, key=lambda member: -len(kept[member.member_id])):
            move = _best_move(giver, members, kept)
            if move is not None:
                partition, taker_id = move
                kept[giver.member_id].discard(partition)
                kept[taker_id].add(partition)
                moved = True
                break


def _best_move(
    giver: SubscribedMember, members: list[SubscribedMember], kept: dict[str, set[Partition]]
) -> tuple[Partition, str] | None:
    for taker in sorted(members, key=lambda member: len(kept[member.member_id])):
        if len(kept[giver.member_id]) - len(kept[taker.member_id]) < 2:
            return None
        movable = [partition for partition in kept[giver.member_id] if partition[0] in taker.topics]
        if movable:
            return max(movable), taker.member_id
    return None


def _ranked(members: list[SubscribedMember]) -> list[SubscribedMember]:
    return sorted(members, key=lambda member: member.rank)


def _all_partitions(partition_counts: Mapping[str, int], wanted: frozenset[str]) -> Iterable[Partition]:
    for topic in sorted(wanted & set(partition_counts)):
        for index in range(partition_counts[topic]):
            yield topic, index


RANGE = Assignor("range", share_ranges)
ROUND_ROBIN = Assignor("roundrobin", share_round_robin)
STICKY = Assignor("sticky", share_sticky, sends_owned=True)
COOPERATIVE_STICKY = Assignor("cooperative-sticky", share_cooperative_sticky, is_cooperative=True, sends_owned=True)
ASSIGNORS = {assignor.name: assignor for assignor in (RANGE, ROUND_ROBIN, STICKY, COOPERATIVE_STICKY)}


# -- on the wire -------------------------------------------------------------------------------------------------------
SUBSCRIPTION_VERSION = 3
ASSIGNMENT_VERSION = 3


def encode_subscription(
    topics: Iterable[str], owned: Iterable[Partition], generation: int, assignor: Assignor
) -> bytes:
    """What a member sends to the leader. The older places for the generation are filled too, for older leaders."""
    grouped = _grouped(owned)
    subscription = ConsumerProtocolSubscription(
        topics=sorted(topics),
        user_data=_user_data(grouped, generation, assignor),
        owned_partitions=grouped if assignor.is_cooperative else [],
        generation_id=generation,
    )
    return _VERSION.pack(SUBSCRIPTION_VERSION) + CONSUMER_SUBSCRIPTION.encode(subscription, SUBSCRIPTION_VERSION)


def decode_member(member_id: str, instance_id: str | None, data: bytes, assignor: Assignor) -> SubscribedMember:
    """A member's subscription as the leader received it, from any version of any client."""
    version = _version_of(data, f"the subscription of group member {member_id}")
    subscription, _ = CONSUMER_SUBSCRIPTION.decode_from(data, min(version, SUBSCRIPTION_VERSION), _VERSION.size)
    owned, generation = subscription.owned_partitions, subscription.generation_id
    if assignor.sends_owned and subscription.user_data:
        reported, reported_generation = _read_user_data(subscription.user_data, assignor)
        if not assignor.is_cooperative:  # what it had, in a generation that may be before its last one
            owned, generation = reported, reported_generation
        elif generation == NO_GENERATION:
            generation = reported_generation
    flat = frozenset((entry.topic, index) for entry in owned for index in entry.partitions)
    return SubscribedMember(member_id, instance_id, frozenset(subscription.topics), flat, generation)


def encode_assignment(partitions: Iterable[Partition]) -> bytes:
    assignment = ConsumerProtocolAssignment(assigned_partitions=_grouped(partitions))
    return _VERSION.pack(ASSIGNMENT_VERSION) + CONSUMER_ASSIGNMENT.encode(assignment, ASSIGNMENT_VERSION)


def decode_assignment(data: bytes) -> list[Partition]:
    """The partitions that a member was given; nothing at all is an empty assignment."""
    if not data:
        return []
    version = _version_of(data, "the assignment")
    assignment, _ = CONSUMER_ASSIGNMENT.decode_from(data, min(version, ASSIGNMENT_VERSION), _VERSION.size)
    return [(entry.topic, index) for entry in assignment.assigned_partitions for index in entry.partitions]


def _version_of(data: bytes, what: str) -> int:
    if len(data) < _VERSION.size:
        raise DecodeError(f"{what} starts with a 2-byte version, but has {len(data)} bytes")
    (version,) = _VERSION.unpack_from(data)
    if version < 0:
        raise DecodeError(f"{what} has version {version}; expected 0 or more")
    return int(version)


def _grouped(partitions: Iterable[Partition]) -> list[ConsumerProtocolTopic]:
    by_topic: dict[str, list[int]] = {}
    for topic, index in sorted(partitions):
        by_topic.setdefault(topic, []).append(index)
    return [ConsumerProtocolTopic(topic, indexes) for topic, indexes in by_topic.items()]


class StickyUserData(Struct):
    """Where `sticky` members of Kafka's Java client and librdkafka keep what they own."""

    previous: list[ConsumerProtocolTopic] = []  # noqa: RUF012 - msgspec copies empty defaults
    generation: Annotated[int32, versions("1+"), ignorable] = NO_GENERATION


_STICKY_USER_DATA = Format(StickyUserData, "0-1")


def _user_data(owned: list[ConsumerProtocolTopic], generation: int, assignor: Assignor) -> bytes | None:
    """Older clients keep it here: `cooperative-sticky` the generation, `sticky` the partitions and the generation."""
    if assignor.name == "cooperative-sticky":
        return _GENERATION.pack(generation)
    if assignor.name == "sticky" and generation != NO_GENERATION:
        return _STICKY_USER_DATA.encode(StickyUserData(owned, generation), 1)
    return None


def _read_user_data(data: bytes, assignor: Assignor) -> tuple[list[ConsumerProtocolTopic], int]:
    """Foreign data may be anything; what cannot be read claims nothing."""
    if assignor.is_cooperative and len(data) == _GENERATION.size:
        return [], int(_GENERATION.unpack(data)[0])
    for version in (1, 0):
        try:
            reported = _STICKY_USER_DATA.decode(data, version)
        except DecodeError:
            continue
        return reported.previous, reported.generation
    return [], NO_GENERATION
