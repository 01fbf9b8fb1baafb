"""Requests for offsets, and what their responses say: a group's committed offsets, and offsets of the log. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from semel.client.errors import KafkaError, error_of
from semel.client.types import GroupMetadata, OffsetAndMetadata, TopicPartition
from semel.protocol.messages.offsets import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
    OffsetFetchResponse,
)
from semel.protocol.messages.records import (
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopic,
)

LAST_VERSION_WITH_NAMES = 9  # of OffsetCommit and OffsetFetch; later ones say topic ids, which a deleted topic lacks
FIRST_FETCH_OF_GROUPS = 8
CONSUMER_REPLICA = -1
EARLIEST, LATEST, MAX_TIMESTAMP = -2, -1, -3
READ_UNCOMMITTED, READ_COMMITTED = 0, 1


class FoundOffset(NamedTuple):
    """An offset of the log; -1 where there is none, such as for a time after the last record."""

    offset: int
    timestamp: int
    leader_epoch: int


class OffsetLookup(NamedTuple):
    """What one try found, and the partitions that failed."""

    found: dict[TopicPartition, FoundOffset]
    failed: dict[TopicPartition, KafkaError]


# -- offsets of the log ------------------------------------------------------------------------------------------------
def list_offsets_request(wanted: Mapping[TopicPartition, int], isolation: int, timeout_ms: int) -> ListOffsetsRequest:
    """The offset for a time (or EARLIEST, LATEST, MAX_TIMESTAMP) of each partition."""
    topics = [
        ListOffsetsTopic(
            name, [ListOffsetsPartition(partition, -1, wanted[TopicPartition(name, partition)]) for partition in parts]
        )
        for name, parts in by_topic(wanted).items()
    ]
    return ListOffsetsRequest(CONSUMER_REPLICA, isolation, topics, timeout_ms)


def offsets_listed(response: ListOffsetsResponse) -> OffsetLookup:
    outcome = OffsetLookup({}, {})
    for topic in response.topics:
        for part in topic.partitions:
            partition = TopicPartition(topic.name, part.partition_index)
            if part.error_code:
                outcome.failed[partition] = error_of(part.error_code, f"looking up an offset of {partition}")
            else:
                outcome.found[partition] = FoundOffset(part.offset, part.timestamp, part.leader_epoch)
    return outcome


# -- committed offsets of a group --------------------------------------------------------------------------------------
def offset_fetch_request(
    group_id: str,
    partitions: Iterable[TopicPartition] | None,
    require_stable: bool,
    version: int,
    member: GroupMetadata | None = None,
) -> OffsetFetchRequest:
    """`member`: who must be in its epoch for the response to be of use (9+)."""
    topics = None
    if partitions is not None:
        topics = [OffsetFetchRequestTopics(name=n, partition_indexes=p) for n, p in by_topic(partitions).items()]
    if version >= FIRST_FETCH_OF_GROUPS:
        group = OffsetFetchRequestGroup(group_id, topics=topics)
        if member is not None:
            group.member_id, group.member_epoch = member.member_id, member.generation_id
        return OffsetFetchRequest(groups=[group], require_stable=require_stable)
    return OffsetFetchRequest(group_id=group_id, topics=topics, require_stable=require_stable)


def committed_offsets(
    response: OffsetFetchResponse, group_id: str, version: int
) -> dict[TopicPartition, OffsetAndMetadata]:
    """Those that there are. The first error is raised."""
    group = response.groups[0] if version >= FIRST_FETCH_OF_GROUPS else response
    what = f"reading the committed offsets of group {group_id!r}"
    if group.error_code:
        raise error_of(group.error_code, what)
    committed: dict[TopicPartition, OffsetAndMetadata] = {}
    for topic in group.topics:
        for part in topic.partitions:
            if part.error_code:
                raise error_of(part.error_code, f"{what} for {topic.name}-{part.partition_index}")
            if part.committed_offset >= 0:
                committed[TopicPartition(topic.name, part.partition_index)] = OffsetAndMetadata(
                    part.committed_offset, part.metadata or "", part.committed_leader_epoch
                )
    return committed


def offset_commit_request(
    member: GroupMetadata, offsets: Mapping[TopicPartition, OffsetAndMetadata]
) -> OffsetCommitRequest:
    topics = [
        OffsetCommitRequestTopic(
            name=name,
            partitions=[
                OffsetCommitRequestPartition(index, committed.offset, committed.leader_epoch, committed.metadata)
                for index in parts
                for committed in (offsets[TopicPartition(name, index)],)
            ],
        )
        for name, parts in by_topic(offsets).items()
    ]
    return OffsetCommitRequest(
        group_id=member.group_id,
        generation_id_or_member_epoch=member.generation_id,
        member_id=member.member_id,
        group_instance_id=member.group_instance_id,
        topics=topics,
    )


def offset_commit_error(response: OffsetCommitResponse, group_id: str) -> KafkaError | None:
    """The first error of a partition."""
    for topic in response.topics:
        for part in topic.partitions:
            if part.error_code:
                what = f"committing an offset of {topic.name}-{part.partition_index} for group {group_id!r}"
                return error_of(part.error_code, what)
    return None


def by_topic(partitions: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    grouped: dict[str, list[int]] = {}
    for topic, partition in partitions:
        grouped.setdefault(topic, []).append(partition)
    return grouped
