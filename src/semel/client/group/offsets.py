"""A group's committed offsets and a log's offsets. One try each; `retried` and `list_offsets_retried` retry.

Used by the consumer and by the admin client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from semel.client.cluster import Cluster, CoordinatorTarget, Leader, checked_call, group_coordinator
from semel.client.errors import ConnectionFailedError, KafkaError, error_of
from semel.client.timing import Deadline
from semel.client.types import GroupMetadata, OffsetAndMetadata, TopicPartition
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.offsets import (
    OFFSET_COMMIT,
    OFFSET_FETCH,
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
)
from semel.protocol.messages.records import (
    LIST_OFFSETS,
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsTopic,
)
from semel.protocol.schema import Struct

Value = TypeVar("Value")
Response = TypeVar("Response", bound=Struct)

LAST_VERSION_WITH_NAMES = 9  # of OffsetCommit and OffsetFetch; later ones say topic ids, which a deleted topic lacks
CONSUMER_REPLICA = -1
EARLIEST, LATEST, MAX_TIMESTAMP = -2, -1, -3


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
def list_offsets(
    cluster: Cluster, wanted: Mapping[TopicPartition, int], isolation: int, deadline: Deadline, lane: str = "main"
) -> OffsetLookup:
    """The offset for a time (or EARLIEST, LATEST, MAX_TIMESTAMP) of each partition, from the leaders. One try."""
    outcome = OffsetLookup({}, {})
    for partitions in _by_leader(cluster, wanted, deadline, outcome, lane).values():
        try:
            _list_offsets_of_leader(
                cluster, {part: wanted[part] for part in partitions}, isolation, deadline, outcome, lane
            )
        except KafkaError as error:
            for partition in partitions:
                cluster.forget(Leader(*partition))
                outcome.failed[partition] = error
    return outcome


def list_offsets_retried(
    cluster: Cluster, wanted: Mapping[TopicPartition, int], isolation: int, deadline: Deadline
) -> dict[TopicPartition, FoundOffset]:
    """As `list_offsets`, again for what failed, until the deadline."""
    found: dict[TopicPartition, FoundOffset] = {}

    def attempt() -> dict[TopicPartition, FoundOffset]:
        left = {part: time for part, time in wanted.items() if part not in found}
        outcome = list_offsets(cluster, left, isolation, deadline)
        found.update(outcome.found)
        if outcome.failed:
            raise next(iter(outcome.failed.values()))
        return found

    return cluster.retry(attempt, "looking up offsets", deadline)


def _by_leader(
    cluster: Cluster, partitions: Iterable[TopicPartition], deadline: Deadline, outcome: OffsetLookup, lane: str
) -> dict[int, list[TopicPartition]]:
    grouped: dict[int, list[TopicPartition]] = {}
    for partition in partitions:
        try:
            leader = cluster.partition(*partition, deadline, lane).leader
        except KafkaError as error:
            outcome.failed[partition] = error
            continue
        grouped.setdefault(leader, []).append(partition)
    return grouped


def _list_offsets_of_leader(
    cluster: Cluster,
    wanted: Mapping[TopicPartition, int],
    isolation: int,
    deadline: Deadline,
    outcome: OffsetLookup,
    lane: str,
) -> None:
    topics = [
        ListOffsetsTopic(
            name, [ListOffsetsPartition(partition, -1, wanted[TopicPartition(name, partition)]) for partition in parts]
        )
        for name, parts in by_topic(wanted).items()
    ]
    timeout_ms = max(1, min(int(deadline.remaining_s() * 1000), cluster.settings.request_timeout_ms))
    request = ListOffsetsRequest(CONSUMER_REPLICA, isolation, topics, timeout_ms)
    connection = cluster.connect(Leader(*next(iter(wanted))), deadline, lane)
    response = checked_call(connection, LIST_OFFSETS, request, timeout_ms / 1000)
    for topic in response.topics:
        for part in topic.partitions:
            partition = TopicPartition(topic.name, part.partition_index)
            if part.error_code:
                cluster.forget(Leader(*partition))
                outcome.failed[partition] = error_of(part.error_code, f"looking up an offset of {partition}")
            else:
                outcome.found[partition] = FoundOffset(part.offset, part.timestamp, part.leader_epoch)


# -- committed offsets of a group --------------------------------------------------------------------------------------
def fetch_committed(
    cluster: Cluster,
    group_id: str,
    partitions: Iterable[TopicPartition] | None,
    require_stable: bool,
    deadline: Deadline,
    lane: str = "main",
) -> dict[TopicPartition, OffsetAndMetadata]:
    """The group's committed offsets (None: of all partitions that have one). One try: UNSTABLE_OFFSET_COMMIT, which
    `require_stable` brings while a transaction with newer offsets is open, is raised like any other error."""
    coordinator = group_coordinator(group_id)
    with _forgetting(cluster, coordinator):
        connection = cluster.connect(coordinator, deadline, lane)
        version = connection.capabilities.version_of(OFFSET_FETCH, LAST_VERSION_WITH_NAMES, 7 if require_stable else 2)
        request = _offset_fetch(group_id, partitions, require_stable, version)
        response = checked_call(connection, OFFSET_FETCH, request, _attempt_s(cluster, deadline), version)
    group = response.groups[0] if version >= 8 else response
    what = f"reading the committed offsets of group {group_id!r}"
    _raise_if(group.error_code, what, cluster, coordinator)
    committed: dict[TopicPartition, OffsetAndMetadata] = {}
    for topic in group.topics:
        for part in topic.partitions:
            _raise_if(part.error_code, f"{what} for {topic.name}-{part.partition_index}", cluster, coordinator)
            if part.committed_offset >= 0:
                committed[TopicPartition(topic.name, part.partition_index)] = OffsetAndMetadata(
                    part.committed_offset, part.metadata or "", part.committed_leader_epoch
                )
    return committed


def _offset_fetch(
    group_id: str, partitions: Iterable[TopicPartition] | None, require_stable: bool, version: int
) -> OffsetFetchRequest:
    topics = None
    if partitions is not None:
        topics = [OffsetFetchRequestTopics(name=n, partition_indexes=p) for n, p in by_topic(partitions).items()]
    if version >= 8:
        groups = [OffsetFetchRequestGroup(group_id, topics=topics)]
        return OffsetFetchRequest(groups=groups, require_stable=require_stable)
    return OffsetFetchRequest(group_id=group_id, topics=topics, require_stable=require_stable)


def offset_commit_request(
    member: GroupMetadata, offsets: Mapping[TopicPartition, OffsetAndMetadata]
) -> OffsetCommitRequest:
    topics = [
        OffsetCommitRequestTopic(
            name=name,
            partitions=[
                OffsetCommitRequestPartition(index, position.offset, position.leader_epoch, position.metadata)
                for index in parts
                for position in (offsets[TopicPartition(name, index)],)
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


def commit_offsets(
    cluster: Cluster, member: GroupMetadata, offsets: Mapping[TopicPartition, OffsetAndMetadata], deadline: Deadline
) -> None:
    """Commits, one try. The error of any partition is raised."""
    coordinator = group_coordinator(member.group_id)
    with _forgetting(cluster, coordinator):
        connection = cluster.connect(coordinator, deadline)
        version = connection.capabilities.version_of(OFFSET_COMMIT, LAST_VERSION_WITH_NAMES)
        request = offset_commit_request(member, offsets)
        response = checked_call(connection, OFFSET_COMMIT, request, _attempt_s(cluster, deadline), version)
    error = offset_commit_error(response, member.group_id)
    if error is not None:
        if error.code in _COORDINATOR_MOVED:
            cluster.forget(coordinator)
        raise error


def offset_commit_error(response: OffsetCommitResponse, group_id: str) -> KafkaError | None:
    """The first error of a partition."""
    for topic in response.topics:
        for part in topic.partitions:
            if part.error_code:
                what = f"committing an offset of {topic.name}-{part.partition_index} for group {group_id!r}"
                return error_of(part.error_code, what)
    return None


@contextmanager
def _forgetting(cluster: Cluster, coordinator: CoordinatorTarget) -> Iterator[None]:
    """A coordinator that cannot be reached may have moved: the next attempt looks for it again."""
    try:
        yield
    except ConnectionFailedError:
        cluster.forget(coordinator)
        raise


def retried(cluster: Cluster, attempt: Callable[[Deadline], Value], what: str, timeout_s: float | None = None) -> Value:
    """Runs one of the single tries above until it succeeds, fails for good or time is up."""
    deadline = cluster.deadline(timeout_s)
    return cluster.retry(lambda: attempt(deadline), what, deadline)


_COORDINATOR_MOVED = (ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE)


def _raise_if(code: int, what: str, cluster: Cluster, coordinator: object) -> None:
    if not code:
        return
    if code in _COORDINATOR_MOVED:
        cluster.forget(coordinator)  # type: ignore[arg-type]
    raise error_of(code, what)


def _attempt_s(cluster: Cluster, deadline: Deadline) -> float:
    return max(0.001, min(deadline.remaining_s(), cluster.settings.request_timeout_ms / 1000))


def by_topic(partitions: Iterable[TopicPartition]) -> dict[str, list[int]]:
    grouped: dict[str, list[int]] = {}
    for topic, partition in partitions:
        grouped.setdefault(topic, []).append(partition)
    return grouped
