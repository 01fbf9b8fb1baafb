"""The admin's part for consumer groups: members, committed offsets and lag, and resetting offsets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from semel.client.admin.base import AdminBase, listed
from semel.client.cluster_calls import group_coordinator
from semel.client.consumer.base import OffsetsToCommit
from semel.client.errors import FatalError, KafkaError, error_of
from semel.client.group.assignors import decode_assignment
from semel.client.group.offset_calls import commit_offsets, fetch_committed, list_offsets
from semel.client.group.offset_requests import LATEST, READ_UNCOMMITTED, by_topic
from semel.client.timing import Deadline
from semel.client.types import GroupMetadata, OffsetAndMetadata, TopicPartition, checked_offsets, checked_partitions
from semel.protocol.errors import DecodeError, ErrorCode
from semel.protocol.messages import groups as messages
from semel.protocol.messages import offsets as offset_messages

DEAD, CONSUMER = "Dead", "consumer"


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


class GroupCalls(AdminBase):
    async def list_groups(self, timeout_ms: float | None = None) -> list[GroupListing]:
        """All groups of all brokers."""
        found = {}
        for response in await self._call_all(
            messages.LIST_GROUPS, messages.ListGroupsRequest(), self._deadline(timeout_ms)
        ):
            for group in response.groups:
                found[group.group_id] = GroupListing(
                    group.group_id, group.group_state, group.protocol_type, group.group_type
                )
        return [found[name] for name in sorted(found)]

    async def describe_group(self, group_id: str, timeout_ms: float | None = None) -> GroupInfo:
        """A group's state and members. A group without members and committed offsets is `Dead`."""
        return await self._describe_group(group_id, self._deadline(timeout_ms))

    async def _describe_group(self, group_id: str, deadline: Deadline) -> GroupInfo:
        coordinator = group_coordinator(group_id)
        response = await self._call(
            coordinator,
            messages.DESCRIBE_GROUPS,
            messages.DescribeGroupsRequest([group_id]),
            deadline,
            errors=lambda response: (
                group.error_code for group in response.groups if group.error_code != ErrorCode.GROUP_ID_NOT_FOUND
            ),
        )
        group = response.groups[0]
        node_id = (await self.cluster.locate(coordinator, deadline)).node_id
        members = [_member(member) for member in group.members]
        state = group.group_state or DEAD
        if state == DEAD:  # so it is to this API, too, if its members use the consumer protocol
            found = await self._describe_consumer_group(group_id, deadline)
            if found is not None:
                members = [_consumer_member(member) for member in found.members]
                return GroupInfo(group_id, found.group_state, CONSUMER, found.assignor_name, node_id, members)
        return GroupInfo(group_id, state, group.protocol_type, group.protocol_data, node_id, members)

    async def _describe_consumer_group(
        self, group_id: str, deadline: Deadline
    ) -> messages.DescribedConsumerGroup | None:
        """None: there is none, or the broker does not know the protocol (KIP-848)."""
        try:
            response = await self._call(
                group_coordinator(group_id),
                messages.CONSUMER_GROUP_DESCRIBE,
                messages.ConsumerGroupDescribeRequest([group_id]),
                deadline,
                errors=lambda response: (group.error_code for group in response.groups),
            )
        except KafkaError as error:
            if error.code in (ErrorCode.GROUP_ID_NOT_FOUND, ErrorCode.UNSUPPORTED_VERSION):
                return None
            raise
        return response.groups[0]

    async def group_lag(self, group_id: str, timeout_ms: float | None = None) -> list[GroupLag]:
        """The committed offset of each partition, the end of its log, the lag, and the member that reads it."""
        deadline = self._deadline(timeout_ms)
        group = await self._describe_group(group_id, deadline)
        committed = await self._committed(group_id, deadline)
        readers = {partition: member for member in group.members for partition in member.partitions}
        wanted = sorted(set(committed) | set(readers))
        ends = (await list_offsets(self.cluster, dict.fromkeys(wanted, LATEST), READ_UNCOMMITTED, deadline)).found
        return [_position(partition, committed, ends, readers) for partition in wanted]

    async def group_offsets(
        self, group_id: str, timeout_ms: float | None = None
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """All committed offsets of a group."""
        return await self._committed(group_id, self._deadline(timeout_ms))

    async def _committed(self, group_id: str, deadline: Deadline) -> dict[TopicPartition, OffsetAndMetadata]:
        return await self.cluster.retry(
            lambda: fetch_committed(self.cluster, group_id, None, False, deadline),
            f"reading the committed offsets of group {group_id!r}",
            deadline,
        )

    async def alter_group_offsets(
        self, group_id: str, offsets: OffsetsToCommit, timeout_ms: float | None = None
    ) -> None:
        """Moves a group that has no members now: the broker refuses while it has some."""
        deadline = self._deadline(timeout_ms)
        wanted = checked_offsets(offsets)
        try:
            await self.cluster.retry(
                lambda: commit_offsets(self.cluster, GroupMetadata(group_id), wanted, deadline),
                f"moving group {group_id!r}",
                deadline,
            )
        except KafkaError as error:
            raise _explained(error, group_id) from error

    async def delete_group_offsets(
        self, group_id: str, partitions: Iterable[tuple[str, int]], timeout_ms: float | None = None
    ) -> None:
        """Deletes committed offsets, so that auto.offset.reset decides. Refused for topics that a member reads."""
        topics = [
            offset_messages.OffsetDeleteRequestTopic(
                name, [offset_messages.OffsetDeleteRequestPartition(index) for index in indexes]
            )
            for name, indexes in by_topic(checked_partitions(partitions)).items()
        ]
        request = offset_messages.OffsetDeleteRequest(group_id, topics)
        response = await self._call(
            group_coordinator(group_id), offset_messages.OFFSET_DELETE, request, self._deadline(timeout_ms)
        )
        for topic in response.topics:
            for part in topic.partitions:
                if part.error_code:
                    what = f"deleting the committed offset of {topic.name}-{part.partition_index}"
                    raise error_of(part.error_code, what)

    async def delete_groups(self, group_ids: Iterable[str] | str, timeout_ms: float | None = None) -> None:
        """Deletes groups without members; the first that fails is raised."""
        deadline = self._deadline(timeout_ms)
        failures = []
        for group_id in listed(group_ids):
            try:
                await self._call(
                    group_coordinator(group_id),
                    messages.DELETE_GROUPS,
                    messages.DeleteGroupsRequest([group_id]),
                    deadline,
                    errors=lambda response: (result.error_code for result in response.results),
                )
            except KafkaError as error:
                failures.append(_explained(error, group_id))
        if failures:
            raise failures[0]


def _member(member: messages.DescribedGroupMember) -> MemberInfo:
    try:
        partitions = [TopicPartition(*partition) for partition in decode_assignment(member.member_assignment)]
    except DecodeError:
        partitions = []  # not a consumer: groups may be used for other things, with formats of their own
    return MemberInfo(
        member.member_id, member.group_instance_id, member.client_id, member.client_host.lstrip("/"), partitions
    )


def _consumer_member(member: messages.Member) -> MemberInfo:
    partitions = [
        TopicPartition(topic.topic_name, number)
        for topic in member.assignment.topic_partitions
        for number in topic.partitions
    ]
    return MemberInfo(
        member.member_id, member.instance_id, member.client_id, member.client_host.lstrip("/"), partitions
    )


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


_IN_USE = (ErrorCode.NON_EMPTY_GROUP, ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.ILLEGAL_GENERATION)


def _explained(error: KafkaError, group_id: str) -> KafkaError:
    if error.code in _IN_USE:
        return FatalError(f"group {group_id!r} has members; stop them first", error.code)
    if error.code is ErrorCode.GROUP_ID_NOT_FOUND:
        return FatalError(f"there is no group {group_id!r}; `semel group list` shows what there is", error.code)
    return error
