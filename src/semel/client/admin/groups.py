"""The admin's part for consumer groups: members, committed offsets and lag, and resetting offsets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from semel.client.cluster import Cluster, NodeTarget, group_coordinator
from semel.client.errors import FatalError, KafkaError, error_of
from semel.client.group.assignors import decode_assignment
from semel.client.group.offset_requests import LATEST, by_topic
from semel.client.group.offsets import commit_offsets, fetch_committed, list_offsets, retried
from semel.client.types import GroupMetadata, OffsetAndMetadata, TopicPartition
from semel.protocol.errors import DecodeError, ErrorCode
from semel.protocol.messages.groups import (
    DELETE_GROUPS,
    DESCRIBE_GROUPS,
    LIST_GROUPS,
    DeleteGroupsRequest,
    DescribedGroupMember,
    DescribeGroupsRequest,
    ListGroupsRequest,
)
from semel.protocol.messages.offsets import (
    OFFSET_DELETE,
    OffsetDeleteRequest,
    OffsetDeleteRequestPartition,
    OffsetDeleteRequestTopic,
)

if TYPE_CHECKING:
    from semel.client.timing import Deadline

READ_UNCOMMITTED, READ_COMMITTED = 0, 1


class GroupListing(msgspec.Struct, frozen=True):
    group_id: str
    state: str
    protocol_type: str
    type: str


class MemberInfo(msgspec.Struct, frozen=True):
    member_id: str
    instance_id: str | None
    client_id: str
    host: str
    partitions: list[TopicPartition]


class GroupInfo(msgspec.Struct, frozen=True):
    group_id: str
    state: str
    protocol_type: str
    assignor: str
    coordinator: int
    members: list[MemberInfo]


class GroupLag(msgspec.Struct, frozen=True):
    """Where a group stands in a partition; None where something is not known."""

    topic: str
    partition: int
    committed: int | None
    end: int | None
    lag: int | None
    member_id: str | None = None
    client_id: str | None = None
    host: str | None = None


def list_groups(cluster: Cluster, deadline: Deadline) -> list[GroupListing]:
    """All groups of all brokers."""
    cluster.retry(lambda: cluster.refresh([], deadline), "looking up the brokers", deadline)
    found = {}
    for node_id in sorted(cluster.metadata.brokers):
        response = cluster.call(NodeTarget(node_id), LIST_GROUPS, ListGroupsRequest(), timeout_s=deadline.remaining_s())
        for group in response.groups:
            found[group.group_id] = GroupListing(
                group.group_id, group.group_state, group.protocol_type, group.group_type
            )
    return [found[name] for name in sorted(found)]


def describe_group(cluster: Cluster, group_id: str, deadline: Deadline) -> GroupInfo:
    """A group's state and members. A group without members and committed offsets is `Dead`."""
    coordinator = group_coordinator(group_id)
    response = cluster.call(
        coordinator,
        DESCRIBE_GROUPS,
        DescribeGroupsRequest([group_id]),
        timeout_s=deadline.remaining_s(),
        errors=lambda response: (
            group.error_code for group in response.groups if group.error_code != ErrorCode.GROUP_ID_NOT_FOUND
        ),
    )
    group = response.groups[0]
    node_id = cluster.locate(coordinator, deadline).node_id
    members = [_member(member) for member in group.members]
    return GroupInfo(group_id, group.group_state or "Dead", group.protocol_type, group.protocol_data, node_id, members)


def _member(member: DescribedGroupMember) -> MemberInfo:
    try:
        partitions = [TopicPartition(*partition) for partition in decode_assignment(member.member_assignment)]
    except DecodeError:
        partitions = []  # not a consumer: groups may be used for other things, with formats of their own
    return MemberInfo(
        member.member_id, member.group_instance_id, member.client_id, member.client_host.lstrip("/"), partitions
    )


def group_lag(cluster: Cluster, group: GroupInfo, deadline: Deadline) -> list[GroupLag]:
    """Every partition that the group has a committed offset for or reads, with its lag."""
    committed = retried(
        cluster,
        lambda limit: fetch_committed(cluster, group.group_id, None, False, limit),
        f"reading the committed offsets of group {group.group_id!r}",
        deadline.remaining_s(),
    )
    readers = {partition: member for member in group.members for partition in member.partitions}
    wanted = sorted(set(committed) | set(readers))
    ends = list_offsets(cluster, dict.fromkeys(wanted, LATEST), READ_UNCOMMITTED, deadline).found
    return [_position(partition, committed, ends, readers) for partition in wanted]


def _position(
    partition: TopicPartition,
    committed: Mapping[TopicPartition, OffsetAndMetadata],
    ends: Mapping[TopicPartition, tuple[int, int, int]],
    readers: Mapping[TopicPartition, MemberInfo],
) -> GroupLag:
    at = committed[partition].offset if partition in committed else None
    end = ends[partition][0] if partition in ends else None
    lag = max(0, end - at) if at is not None and end is not None else None
    reader = readers.get(partition)
    who = (reader.member_id, reader.client_id, reader.host) if reader else (None, None, None)
    return GroupLag(*partition, at, end, lag, *who)


def delete_groups(cluster: Cluster, group_ids: Iterable[str], deadline: Deadline) -> dict[str, KafkaError | None]:
    outcome: dict[str, KafkaError | None] = {}
    for group_id in group_ids:
        try:
            cluster.call(
                group_coordinator(group_id),
                DELETE_GROUPS,
                DeleteGroupsRequest([group_id]),
                timeout_s=deadline.remaining_s(),
                errors=lambda response: (result.error_code for result in response.results),
            )
            outcome[group_id] = None
        except KafkaError as error:
            outcome[group_id] = _explained(error, group_id)
    return outcome


def set_offsets(
    cluster: Cluster, group_id: str, offsets: Mapping[TopicPartition, OffsetAndMetadata], deadline: Deadline
) -> None:
    """Commits offsets from outside. The broker refuses while the group has members."""
    try:
        retried(
            cluster,
            lambda limit: commit_offsets(cluster, GroupMetadata(group_id), offsets, limit),
            f"moving group {group_id!r}",
            deadline.remaining_s(),
        )
    except KafkaError as error:
        raise _explained(error, group_id) from error


def delete_offsets(cluster: Cluster, group_id: str, partitions: Iterable[TopicPartition], deadline: Deadline) -> None:
    """Deletes committed offsets, so that auto.offset.reset decides. Refused for topics that a member reads."""
    topics = [
        OffsetDeleteRequestTopic(name, [OffsetDeleteRequestPartition(index) for index in indexes])
        for name, indexes in by_topic(partitions).items()
    ]
    response = cluster.call(
        group_coordinator(group_id),
        OFFSET_DELETE,
        OffsetDeleteRequest(group_id, topics),
        timeout_s=deadline.remaining_s(),
    )
    for topic in response.topics:
        for part in topic.partitions:
            if part.error_code:
                raise error_of(part.error_code, f"deleting the committed offset of {topic.name}-{part.partition_index}")


_IN_USE = (ErrorCode.NON_EMPTY_GROUP, ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.ILLEGAL_GENERATION)


def _explained(error: KafkaError, group_id: str) -> KafkaError:
    if error.code in _IN_USE:
        return FatalError(f"group {group_id!r} has members; stop them first", error.code)
    if error.code is ErrorCode.GROUP_ID_NOT_FOUND:
        return FatalError(f"there is no group {group_id!r}; `semel group list` shows what there is", error.code)
    return error
