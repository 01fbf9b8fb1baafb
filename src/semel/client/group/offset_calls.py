"""A group's committed offsets and a log's offsets, over the connections of any driver. One try each;
`list_offsets_retried` retries."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from semel.client.cluster_calls import ClusterCalls, CoordinatorTarget, Leader, group_coordinator
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


# -- offsets of the log ------------------------------------------------------------------------------------------------
async def list_offsets(
    calls: ClusterCalls[Any],
    wanted: Mapping[TopicPartition, int],
    isolation: int,
    deadline: Deadline,
    lane: str = "main",
) -> OffsetLookup:
    """The offset for a time (or EARLIEST, LATEST, MAX_TIMESTAMP) of each partition, from the leaders. One try."""
    outcome = OffsetLookup({}, {})
    for partitions in (await _by_leader(calls, wanted, deadline, outcome, lane)).values():
        try:
            await _list_offsets_of_leader(
                calls, {part: wanted[part] for part in partitions}, isolation, deadline, outcome, lane
            )
        except KafkaError as error:
            for partition in partitions:
                calls.forget(Leader(*partition))
                outcome.failed[partition] = error
    return outcome


async def list_offsets_retried(
    calls: ClusterCalls[Any],
    wanted: Mapping[TopicPartition, int],
    isolation: int,
    deadline: Deadline,
    left_out: Container[ErrorCode | None] = (),
) -> dict[TopicPartition, FoundOffset]:
    """As `list_offsets`, again for what failed, until the deadline. Partitions with an error of `left_out` are."""
    found: dict[TopicPartition, FoundOffset] = {}
    left = dict(wanted)

    async def attempt() -> dict[TopicPartition, FoundOffset]:
        outcome = await list_offsets(calls, left, isolation, deadline)
        found.update(outcome.found)
        failed = {part: error for part, error in outcome.failed.items() if error.code not in left_out}
        for part in left.keys() - failed.keys():
            del left[part]
        if failed:
            raise next(iter(failed.values()))
        return found

    return await calls.retry(attempt, "looking up offsets", deadline)


async def _by_leader(
    calls: ClusterCalls[Any], partitions: Iterable[TopicPartition], deadline: Deadline, outcome: OffsetLookup, lane: str
) -> dict[int, list[TopicPartition]]:
    grouped: dict[int, list[TopicPartition]] = {}
    for partition in partitions:
        try:
            leader = (await calls.partition(*partition, deadline, lane)).leader
        except KafkaError as error:
            outcome.failed[partition] = error
            continue
        grouped.setdefault(leader, []).append(partition)
    return grouped


async def _list_offsets_of_leader(
    calls: ClusterCalls[Any],
    wanted: Mapping[TopicPartition, int],
    isolation: int,
    deadline: Deadline,
    outcome: OffsetLookup,
    lane: str,
) -> None:
    timeout_ms = max(1, min(int(deadline.remaining_s() * 1000), calls.settings.request_timeout_ms))
    request = list_offsets_request(wanted, isolation, timeout_ms)
    connection = await calls.connect(Leader(*next(iter(wanted))), deadline, lane)
    response = await calls.request(connection, LIST_OFFSETS, request, timeout_ms / 1000)
    found, failed = offsets_listed(response)
    for partition in failed:
        calls.forget(Leader(*partition))
    outcome.found.update(found)
    outcome.failed.update(failed)


# -- committed offsets of a group --------------------------------------------------------------------------------------
async def fetch_committed(
    calls: ClusterCalls[Any],
    group_id: str,
    partitions: Iterable[TopicPartition] | None,
    require_stable: bool,
    deadline: Deadline,
    lane: str = "main",
    member: GroupMetadata | None = None,
) -> dict[TopicPartition, OffsetAndMetadata]:
    """The group's committed offsets (None: of all partitions that have one). One try: UNSTABLE_OFFSET_COMMIT, which
    `require_stable` brings while a transaction with newer offsets is open, is raised like any other error, and so is
    what says that `member` is not in its epoch."""
    coordinator = group_coordinator(group_id)
    with _forgetting(calls, coordinator):
        connection = await calls.connect(coordinator, deadline, lane)
        version = connection.capabilities.version_of(OFFSET_FETCH, LAST_VERSION_WITH_NAMES, 7 if require_stable else 2)
        request = offset_fetch_request(group_id, partitions, require_stable, version, member)
        response = await calls.request(connection, OFFSET_FETCH, request, _attempt_s(calls, deadline), version)
        return committed_offsets(response, group_id, version)


async def commit_offsets(
    calls: ClusterCalls[Any],
    member: GroupMetadata,
    offsets: Mapping[TopicPartition, OffsetAndMetadata],
    deadline: Deadline,
) -> None:
    """Commits, one try. The error of any partition is raised."""
    coordinator = group_coordinator(member.group_id)
    with _forgetting(calls, coordinator):
        connection = await calls.connect(coordinator, deadline)
        version = connection.capabilities.version_of(OFFSET_COMMIT, LAST_VERSION_WITH_NAMES)
        request = offset_commit_request(member, offsets)
        response = await calls.request(connection, OFFSET_COMMIT, request, _attempt_s(calls, deadline), version)
        error = offset_commit_error(response, member.group_id)
        if error is not None:
            raise error


@contextmanager
def _forgetting(calls: ClusterCalls[Any], coordinator: CoordinatorTarget) -> Iterator[None]:
    """A coordinator that cannot be reached may have moved: the next attempt looks for it again."""
    try:
        yield
    except KafkaError as error:
        if isinstance(error, ConnectionFailedError) or error.code in _COORDINATOR_MOVED:
            calls.forget(coordinator)
        raise


_COORDINATOR_MOVED = (ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE)


def _attempt_s(calls: ClusterCalls[Any], deadline: Deadline) -> float:
    return max(0.001, min(deadline.remaining_s(), calls.settings.request_timeout_ms / 1000))
