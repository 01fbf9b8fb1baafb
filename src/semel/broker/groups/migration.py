"""Online migration between the two group protocols (KIP-848): what a group of one kind is as a group of the other.

A classic group of consumers becomes a consumer group when the first member of that protocol joins. Its classic members
stay, and the broker assigns their partitions too. When the last member of the consumer protocol has left, what remains
is a classic group again, whose members join anew. Pure: nothing is written or sent here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable

from semel.broker.groups.classic_group import CONSUMER, ClassicMember, Group, GroupError, GroupState, Protocols
from semel.broker.groups.consumer.model import (
    NOTHING,
    Change,
    ClassicMetadata,
    ConsumerGroup,
    Current,
    CurrentSet,
    EpochSet,
    Partitions,
    Subscription,
    SubscriptionSet,
    TargetEpochSet,
    TargetSet,
)
from semel.broker.groups.records import GroupRecord, GroupsRecord, by_topic
from semel.broker.topics import Topics
from semel.protocol.errors import DecodeError, ErrorCode
from semel.protocol.messages.groups import (
    CONSUMER_ASSIGNMENT,
    CONSUMER_SUBSCRIPTION,
    ConsumerProtocolAssignment,
    ConsumerProtocolSubscription,
    ConsumerProtocolTopic,
)

_VERSION = struct.Struct(">h")
_HIGHEST = 3  # version of subscriptions and assignments that is known; later ones start like it
UPGRADE, DOWNGRADE = ("bidirectional", "upgrade"), ("bidirectional", "downgrade")  # policies that allow it


# -- what consumers of the classic protocol send each other -----------------------------------------------------------
def read_subscription(metadata: bytes) -> tuple[int, ConsumerProtocolSubscription]:
    """(version, subscription). GroupError: a member that is not a consumer."""
    try:
        (version,) = _VERSION.unpack_from(metadata)
        return version, CONSUMER_SUBSCRIPTION.decode_from(metadata, min(version, _HIGHEST), _VERSION.size)[0]
    except (DecodeError, struct.error, ValueError) as error:
        raise GroupError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL, f"not a consumer's subscription: {error}") from error


def _read_assignment(data: bytes, topics: Topics) -> Partitions:
    """The partitions of topics that exist."""
    if not data:
        return NOTHING
    try:
        (version,) = _VERSION.unpack_from(data)
        read = CONSUMER_ASSIGNMENT.decode_from(data, min(version, _HIGHEST), _VERSION.size)[0]
    except (DecodeError, struct.error, ValueError) as error:
        raise GroupError(ErrorCode.GROUP_ID_NOT_FOUND, f"not a consumer's assignment: {error}") from error
    return partitions_of(read.assigned_partitions, topics)


def partitions_of(named: Iterable[ConsumerProtocolTopic], topics: Topics) -> Partitions:
    found = ((topics.get(entry.topic), entry.partitions) for entry in named)
    return frozenset((topic.id, index) for topic, indexes in found if topic is not None for index in indexes)


def write_assignment(metadata: bytes, partitions: Partitions, topics: Topics) -> bytes:
    """An assignment in the version of the subscription that the member sent."""
    version = min(read_subscription(metadata)[0], _HIGHEST)
    found = ((topics.by_id(topic_id), indexes) for topic_id, indexes in by_topic(partitions).items())
    named = [ConsumerProtocolTopic(topic.name, indexes) for topic, indexes in found if topic is not None]
    return _VERSION.pack(version) + CONSUMER_ASSIGNMENT.encode(ConsumerProtocolAssignment(named), version)


def common_protocols(group: ConsumerGroup, but: str = "") -> set[str] | None:
    """What all classic members support, but for one of them; None: there is no other."""
    supported = [
        {name for name, _ in each.classic.protocols}
        for member_id, each in group.subscriptions.items()
        if each.classic is not None and member_id != but
    ]
    return set.intersection(*supported) if supported else None


# -- upgrade -----------------------------------------------------------------------------------------------------------
def upgrade(group: Group, topics: Topics, max_size: int, time_ms: int) -> list[Change]:
    """A classic group with members as a consumer group. GroupError: it cannot be one."""
    if group.state is GroupState.DEAD or group.protocol_type != CONSUMER:
        raise GroupError(ErrorCode.GROUP_ID_NOT_FOUND, f"Group {group.group_id} is not a consumer group.")
    if len(group.members) >= max_size:
        raise GroupError(ErrorCode.GROUP_MAX_SIZE_REACHED, f"group {group.group_id} has {len(group.members)} members")
    id_, changes = group.group_id, list[Change]()
    for member in group.members.values():
        assigned = _read_assignment(member.assignment, topics)
        changes += [
            SubscriptionSet(id_, member.member_id, _subscription_of(member)),
            TargetSet(id_, member.member_id, assigned),
            CurrentSet(
                id_,
                member.member_id,
                Current(
                    group.generation,
                    group.generation,
                    assigned=assigned,
                    since=dict.fromkeys(assigned, group.generation),
                ),
            ),
        ]
    return [EpochSet(id_, group.generation), *changes, TargetEpochSet(id_, group.generation, time_ms)]


def _subscription_of(member: ClassicMember) -> Subscription:
    try:
        _, read = read_subscription(next(iter(member.protocols.values())))
    except GroupError as error:
        raise GroupError(ErrorCode.GROUP_ID_NOT_FOUND, str(error)) from error
    return Subscription(
        member.group_instance_id,
        read.rack_id,
        member.client_id,
        member.client_host,
        tuple(sorted(set(read.topics))),
        rebalance_timeout_ms=member.rebalance_timeout_ms,
        classic=ClassicMetadata(member.session_timeout_ms, tuple(member.protocols.items())),
    )


# -- downgrade ---------------------------------------------------------------------------------------------------------
def downgrade(
    before: ConsumerGroup, after: ConsumerGroup, topics: Topics, now_ms: int, deletion: Callable[[str], list[Change]]
) -> tuple[list[GroupsRecord], dict[str, Protocols]]:
    """The records that make a classic group of one that has only classic members left, and the protocols of each: a
    record of a group keeps but the one that is used."""
    group = Group(after.group_id, now_ms, GroupState.STABLE)
    group.generation = before.epoch  # that of its members, so that none of them has to give up what it has
    protocols: dict[str, Protocols] = {}
    for member_id, each in after.subscriptions.items():
        assert each.classic is not None
        protocols[member_id] = dict(each.classic.protocols)
        assigned = write_assignment(each.classic.protocols[0][1], after.target.get(member_id, NOTHING), topics)
        group.add(
            ClassicMember(
                member_id=member_id,
                group_instance_id=each.instance_id,
                client_id=each.client_id,
                client_host=each.client_host,
                rebalance_timeout_ms=each.rebalance_timeout_ms,
                session_timeout_ms=each.classic.session_timeout_ms,
                protocol_type=CONSUMER,
                protocols=protocols[member_id],
                assignment=assigned,
            )
        )
    group.protocol = group.choose_protocol()
    tombstones: list[GroupsRecord] = []
    for member_id in before.subscriptions:
        tombstones += [
            CurrentSet(group.group_id, member_id, None),
            TargetSet(group.group_id, member_id, None),
            SubscriptionSet(group.group_id, member_id, None),
        ]
    return [*tombstones, *deletion(group.group_id), GroupRecord(group.group_id, group.to_record())], protocols
