"""A group's committed offsets and a log's offsets. One try each; `retried` and `list_offsets_retried` retry.

Used by the consumer and by the admin client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from semel.client.cluster import Cluster, CoordinatorTarget, Leader, checked_call, group_coordinator
from semel.client.errors import ConnectionFailedError, KafkaError
from semel.client.group.offset_requests import (
    LAST_VERSION_WITH_NAMES,
    FoundOffset,
    OffsetLookup,
    committed_offsets,
    list_offsets_request,
    offset_commit_error,
    offset_commit_request,
    offset_fetch_request,
    offsets_listed,
)
from semel.client.timing import Deadline
from semel.client.types import GroupMetadata, OffsetAndMetadata, TopicPartition
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.offsets import OFFSET_COMMIT, OFFSET_FETCH
from semel.protocol.messages.records import LIST_OFFSETS
from semel.protocol.schema import Struct

Value = TypeVar("Value")
Response = TypeVar("Response", bound=Struct)


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
    timeout_ms = max(1, min(int(deadline.remaining_s() * 1000), cluster.settings.request_timeout_ms))
    request = list_offsets_request(wanted, isolation, timeout_ms)
    connection = cluster.connect(Leader(*next(iter(wanted))), deadline, lane)
    response = checked_call(connection, LIST_OFFSETS, request, timeout_ms / 1000)
    found, failed = offsets_listed(response)
    for partition in failed:
        cluster.forget(Leader(*partition))
    outcome.found.update(found)
    outcome.failed.update(failed)


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
        request = offset_fetch_request(group_id, partitions, require_stable, version)
        response = checked_call(connection, OFFSET_FETCH, request, _attempt_s(cluster, deadline), version)
        return committed_offsets(response, group_id, version)


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
            raise error


@contextmanager
def _forgetting(cluster: Cluster, coordinator: CoordinatorTarget) -> Iterator[None]:
    """A coordinator that cannot be reached may have moved: the next attempt looks for it again."""
    try:
        yield
    except KafkaError as error:
        if isinstance(error, ConnectionFailedError) or error.code in _COORDINATOR_MOVED:
            cluster.forget(coordinator)
        raise


def retried(cluster: Cluster, attempt: Callable[[Deadline], Value], what: str, timeout_s: float | None = None) -> Value:
    """Runs one of the single tries above until it succeeds, fails for good or time is up."""
    deadline = cluster.deadline(timeout_s)
    return cluster.retry(lambda: attempt(deadline), what, deadline)


_COORDINATOR_MOVED = (ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE)


def _attempt_s(cluster: Cluster, deadline: Deadline) -> float:
    return max(0.001, min(deadline.remaining_s(), cluster.settings.request_timeout_ms / 1000))
