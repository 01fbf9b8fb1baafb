"""OffsetCommit (8), OffsetFetch (9), OffsetDelete (47)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from semel.broker.groups.commits import Commit, Committer
from semel.broker.groups.group import GroupError
from semel.broker.groups.records import Position
from semel.broker.turns import Turns
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.offsets import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
    OffsetCommitResponsePartition,
    OffsetCommitResponseTopic,
    OffsetDeleteRequest,
    OffsetDeleteResponse,
    OffsetDeleteResponsePartition,
    OffsetDeleteResponseTopic,
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
    OffsetFetchResponse,
    OffsetFetchResponseGroup,
    OffsetFetchResponsePartition,
    OffsetFetchResponsePartitions,
    OffsetFetchResponseTopic,
    OffsetFetchResponseTopics,
)
from semel.protocol.schema import NO_UUID

if TYPE_CHECKING:
    from semel.broker.broker import Broker
    from semel.broker.context import RequestContext
    from semel.broker.topics import Topic

TOPIC_IDS_FROM = 10
MANY_GROUPS_FROM = 8  # OffsetFetch
NO_POSITION = Position(-1, -1, "", -1)


# -- OffsetCommit ------------------------------------------------------------------------------------------------------
async def offset_commit(broker: Broker, context: RequestContext, request: OffsetCommitRequest) -> OffsetCommitResponse:
    """Partitions that do not exist are refused one by one; a group that refuses, refuses all others. Of several offsets
    for one partition the last one counts, and only that one is written."""
    groups = broker.groups
    limit = groups.config.metadata_max_size
    response = OffsetCommitResponse()
    commits: dict[tuple[str, int], Commit] = {}
    turns = Turns()
    is_any_known = False
    for asked in request.topics:
        topic = _topic_of(broker, context, asked)
        missing = ErrorCode.UNKNOWN_TOPIC_ID if _by_id(context) and topic is None else _NO_PARTITION
        answer = OffsetCommitResponseTopic(asked.name, asked.topic_id)
        response.topics.append(answer)
        for part in asked.partitions:
            exists = topic is not None and 0 <= part.partition_index < len(topic.partitions)
            answer.partitions.append(OffsetCommitResponsePartition(part.partition_index, _OPEN if exists else missing))
            if topic is not None and exists:
                is_any_known = True
                if not _too_long(part.committed_metadata, limit):
                    commits[topic.name, part.partition_index] = _commit_of(topic, part)
            await turns.next()
    if is_any_known:
        code = await groups.commits.commit(
            request.group_id,
            Committer(request.generation_id_or_member_epoch, request.member_id, request.group_instance_id),
            list(commits.values()),
            version=context.version,
            retention_ms=request.retention_time_ms,
        )
        _fill_in(request, response, code, limit)
    return response


_OPEN = -2  # a code that is not decided yet
_NO_PARTITION = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def _fill_in(request: OffsetCommitRequest, response: OffsetCommitResponse, code: ErrorCode, limit: int) -> None:
    for asked, answer in zip(request.topics, response.topics, strict=True):
        for part, slot in zip(asked.partitions, answer.partitions, strict=True):
            if slot.error_code == _OPEN:
                too_long = code is ErrorCode.NONE and _too_long(part.committed_metadata, limit)
                slot.error_code = ErrorCode.OFFSET_METADATA_TOO_LARGE if too_long else code


def _too_long(metadata: str | None, limit: int) -> bool:
    return metadata is not None and len(metadata) > limit


def _commit_of(topic: Topic, part: OffsetCommitRequestPartition) -> Commit:
    return Commit(
        topic.name,
        part.partition_index,
        part.committed_offset,
        part.committed_leader_epoch,
        part.committed_metadata or "",
        topic.id,
    )


# -- OffsetFetch -------------------------------------------------------------------------------------------------------
async def offset_fetch(broker: Broker, context: RequestContext, request: OffsetFetchRequest) -> OffsetFetchResponse:
    """Up to version 7 about one group; the answer is made in the new form and turned into the old one."""
    if context.version >= MANY_GROUPS_FROM:
        asked = request.groups
    else:
        asked = [OffsetFetchRequestGroup(request.group_id, topics=_new_form(request))]
    turns = Turns()
    answers = [await _fetch_group(broker, context, group, request.require_stable, turns) for group in asked]
    if context.version >= MANY_GROUPS_FROM:
        return OffsetFetchResponse(groups=answers)
    return OffsetFetchResponse(topics=[_old_form(topic) for topic in answers[0].topics])


async def _fetch_group(
    broker: Broker, context: RequestContext, group: OffsetFetchRequestGroup, require_stable: bool, turns: Turns
) -> OffsetFetchResponseGroup:
    commits = broker.groups.commits
    if require_stable:
        await commits.settled(group.group_id)
    try:
        commits.check_reader(group.group_id, group.member_id, group.member_epoch)
    except GroupError as error:
        return OffsetFetchResponseGroup(group.group_id, error_code=error.code)
    topics = group.topics if group.topics is not None else _all_topics(broker, context, group.group_id)
    found = [await _fetch_topic(broker, context, group.group_id, topic, require_stable, turns) for topic in topics]
    return OffsetFetchResponseGroup(group.group_id, found)


def _all_topics(broker: Broker, context: RequestContext, group_id: str) -> Iterator[OffsetFetchRequestTopics]:
    """Everything that a group has positions for. Clients that speak of ids cannot be told of topics that are gone."""
    for name, partitions in broker.groups.commits.all_of(group_id).items():
        topic = broker.topics.get(name)
        if not _by_id(context):
            yield OffsetFetchRequestTopics(name=name, partition_indexes=list(partitions))
        elif topic is not None:
            yield OffsetFetchRequestTopics(topic_id=topic.id, partition_indexes=list(partitions))


async def _fetch_topic(
    broker: Broker,
    context: RequestContext,
    group_id: str,
    asked: OffsetFetchRequestTopics,
    require_stable: bool,
    turns: Turns,
) -> OffsetFetchResponseTopics:
    topic = _topic_of(broker, context, asked)
    if _by_id(context) and topic is None:
        code = ErrorCode.UNKNOWN_TOPIC_ID
        return OffsetFetchResponseTopics(
            topic_id=asked.topic_id,
            partitions=[_partition(index, NO_POSITION, code) for index in asked.partition_indexes],
        )
    name, topic_id = (topic.name, topic.id) if topic is not None else (asked.name, NO_UUID)
    commits = broker.groups.commits

    def fetch(index: int) -> OffsetFetchResponsePartitions:
        if require_stable and commits.is_pending(group_id, name, index):
            return _partition(index, NO_POSITION, ErrorCode.UNSTABLE_OFFSET_COMMIT)
        return _partition(index, commits.position(group_id, name, index, topic_id) or NO_POSITION)

    found = await turns.map(fetch, asked.partition_indexes)
    return OffsetFetchResponseTopics(asked.name, asked.topic_id, found)


def _partition(index: int, position: Position, code: ErrorCode = ErrorCode.NONE) -> OffsetFetchResponsePartitions:
    return OffsetFetchResponsePartitions(index, position.offset, position.leader_epoch, position.metadata, code)


def _new_form(request: OffsetFetchRequest) -> list[OffsetFetchRequestTopics] | None:
    if request.topics is None:
        return None
    return [OffsetFetchRequestTopics(name=t.name, partition_indexes=t.partition_indexes) for t in request.topics]


def _old_form(topic: OffsetFetchResponseTopics) -> OffsetFetchResponseTopic:
    return OffsetFetchResponseTopic(
        topic.name,
        [
            OffsetFetchResponsePartition(
                part.partition_index, part.committed_offset, part.committed_leader_epoch, part.metadata, part.error_code
            )
            for part in topic.partitions
        ],
    )


# -- OffsetDelete ------------------------------------------------------------------------------------------------------
async def offset_delete(broker: Broker, context: RequestContext, request: OffsetDeleteRequest) -> OffsetDeleteResponse:
    asked = [(topic.name, part.partition_index) for topic in request.topics for part in topic.partitions]
    existing = [where for where in asked if broker.topics.partition(*where) is not None]
    try:
        codes = await broker.groups.commits.delete(request.group_id, existing)
    except GroupError as error:
        return OffsetDeleteResponse(error_code=error.code)
    return OffsetDeleteResponse(
        topics=[
            OffsetDeleteResponseTopic(
                topic.name,
                [
                    OffsetDeleteResponsePartition(
                        part.partition_index, codes.get((topic.name, part.partition_index), _NO_PARTITION)
                    )
                    for part in topic.partitions
                ],
            )
            for topic in request.topics
        ]
    )


# -- topics by name and by id ------------------------------------------------------------------------------------------
def _by_id(context: RequestContext) -> bool:
    return context.version >= TOPIC_IDS_FROM


def _topic_of(
    broker: Broker, context: RequestContext, asked: OffsetCommitRequestTopic | OffsetFetchRequestTopics
) -> Topic | None:
    return broker.topics.by_id(asked.topic_id) if _by_id(context) else broker.topics.get(asked.name)
