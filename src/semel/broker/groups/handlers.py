"""The APIs of groups: each a small function from request to response."""

from __future__ import annotations

from collections.abc import Iterator

from semel.broker.broker import BrokerNode
from semel.broker.dispatch import RequestContext
from semel.broker.groups.classic_group import CONSUMER, Group, GroupError, GroupState
from semel.broker.groups.commits import Committer, OffsetToCommit
from semel.broker.groups.consumer.model import NOTHING, ConsumerGroup, Current, Partitions
from semel.broker.groups.consumer.planner import Beat, check_request
from semel.broker.groups.membership import Joiner
from semel.broker.groups.records import CommittedOffset, by_topic
from semel.broker.handlers.metadata import GROUP_OPERATIONS, NOT_ASKED
from semel.broker.topics import Topic
from semel.broker.turns import Turns
from semel.protocol.errors import ErrorCode
from semel.protocol.messages import groups as messages
from semel.protocol.messages import offsets
from semel.protocol.schema import NO_UUID

NULL_PROTOCOL_FROM = 7  # JoinGroup
PROTOCOL_REQUIRED_FROM = 5  # SyncGroup
MANY_MEMBERS_FROM = 3  # LeaveGroup


async def join_group(
    broker: BrokerNode, context: RequestContext, request: messages.JoinGroupRequest
) -> messages.JoinGroupResponse:
    joiner = Joiner(request, context.version, context.client_id or "", context.client_host)
    response = await broker.groups.membership.join(joiner)
    if context.version < NULL_PROTOCOL_FROM and response.protocol_name is None:
        response.protocol_name = ""
    return response


async def sync_group(
    broker: BrokerNode, context: RequestContext, request: messages.SyncGroupRequest
) -> messages.SyncGroupResponse:
    if context.version >= PROTOCOL_REQUIRED_FROM and None in (request.protocol_type, request.protocol_name):
        return messages.SyncGroupResponse(error_code=ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
    return await broker.groups.membership.sync(request)


def heartbeat(
    broker: BrokerNode, context: RequestContext, request: messages.HeartbeatRequest
) -> messages.HeartbeatResponse:
    code = broker.groups.membership.heartbeat(
        request.group_id, request.generation_id, request.member_id, request.group_instance_id
    )
    return messages.HeartbeatResponse(error_code=code)


async def leave_group(
    broker: BrokerNode, context: RequestContext, request: messages.LeaveGroupRequest
) -> messages.LeaveGroupResponse:
    """Before version 3 one member leaves, and its error is the error of the response."""
    is_single = context.version < MANY_MEMBERS_FROM
    leaving = [messages.MemberIdentity(request.member_id)] if is_single else request.members
    try:
        codes = await broker.groups.membership.leave(request.group_id, leaving)
    except GroupError as error:
        return messages.LeaveGroupResponse(error_code=error.code)
    if is_single:
        return messages.LeaveGroupResponse(error_code=codes[0])
    return messages.LeaveGroupResponse(
        members=[
            messages.MemberResponse(who.member_id, who.group_instance_id, code)
            for who, code in zip(leaving, codes, strict=True)
        ]
    )


TOPIC_IDS_FROM = 10
MANY_GROUPS_FROM = 8  # OffsetFetch
NO_OFFSET = CommittedOffset(-1, -1, "", -1)


# -- OffsetCommit ------------------------------------------------------------------------------------------------------
async def offset_commit(
    broker: BrokerNode, context: RequestContext, request: offsets.OffsetCommitRequest
) -> offsets.OffsetCommitResponse:
    """Partitions that do not exist are refused one by one; a group that refuses, refuses all others. Of several offsets
    for one partition the last one counts, and only that one is written."""
    groups = broker.groups
    limit = broker.settings["offset.metadata.max.bytes"]
    response = offsets.OffsetCommitResponse()
    commits: dict[tuple[str, int], OffsetToCommit] = {}
    turns = Turns()
    is_any_known = False
    names: list[str] = []
    for requested in request.topics:
        topic = _topic_of(broker, context, requested)
        names.append("" if topic is None else topic.name)
        missing = ErrorCode.UNKNOWN_TOPIC_ID if _by_id(context) and topic is None else _NO_PARTITION
        result = offsets.OffsetCommitResponseTopic(requested.name, requested.topic_id)
        response.topics.append(result)
        for part in requested.partitions:
            exists = topic is not None and 0 <= part.partition_index < len(topic.partitions)
            result.partitions.append(offsets.PartitionErrorCode(part.partition_index, _OPEN if exists else missing))
            if topic is not None and exists:
                is_any_known = True
                if not _too_long(part.committed_metadata, limit):
                    commits[topic.name, part.partition_index] = OffsetToCommit.of(topic, part)
            await turns.next()
    if is_any_known:
        outcome = await groups.commits.commit(
            request.group_id,
            Committer(request.generation_id_or_member_epoch, request.member_id, request.group_instance_id),
            list(commits.values()),
            version=context.version,
            retention_ms=request.retention_time_ms,
        )
        stored = set(list(commits)[: outcome.stored]) if outcome.code else set()
        for name, requested, result in zip(names, request.topics, response.topics, strict=True):
            for part, slot in zip(requested.partitions, result.partitions, strict=True):
                if slot.error_code == _OPEN:
                    code = ErrorCode.NONE if (name, part.partition_index) in stored else outcome.code
                    too_long = code is ErrorCode.NONE and _too_long(part.committed_metadata, limit)
                    slot.error_code = ErrorCode.OFFSET_METADATA_TOO_LARGE if too_long else code
    return response


_OPEN = -2  # a code that is not decided yet
_NO_PARTITION = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def _too_long(metadata: str | None, limit: int) -> bool:
    return metadata is not None and len(metadata) > limit


# -- OffsetFetch -------------------------------------------------------------------------------------------------------
async def offset_fetch(
    broker: BrokerNode, context: RequestContext, request: offsets.OffsetFetchRequest
) -> offsets.OffsetFetchResponse:
    """Up to version 7 about one group."""
    turns = Turns()
    if context.version >= MANY_GROUPS_FROM:
        groups = [await _fetch_group(broker, context, group, request.require_stable, turns) for group in request.groups]
        return offsets.OffsetFetchResponse(groups=groups)
    requested = offsets.OffsetFetchRequestGroup(request.group_id, topics=request.topics)
    group = await _fetch_group(broker, context, requested, request.require_stable, turns)
    return offsets.OffsetFetchResponse(topics=group.topics)


async def _fetch_group(
    broker: BrokerNode,
    context: RequestContext,
    group: offsets.OffsetFetchRequestGroup,
    require_stable: bool,
    turns: Turns,
) -> offsets.OffsetFetchResponseGroup:
    commits = broker.groups.commits
    if require_stable:
        await commits.settled(group.group_id)
    try:
        commits.check_reader(group.group_id, group.member_id, group.member_epoch)
    except GroupError as error:
        return offsets.OffsetFetchResponseGroup(group.group_id, error_code=error.code)
    topics = group.topics if group.topics is not None else _all_topics(broker, context, group.group_id)
    found = []
    for topic in topics:
        found.append(await _fetch_topic(broker, context, group.group_id, topic, require_stable, turns))
        await turns.next()
    return offsets.OffsetFetchResponseGroup(group.group_id, found)


def _all_topics(
    broker: BrokerNode, context: RequestContext, group_id: str
) -> Iterator[offsets.OffsetFetchRequestTopics]:
    """Everything that a group has offsets for. A response by topic id cannot name topics that are gone."""
    for name, partitions in list(broker.groups.commits.all_of(group_id).items()):  # the caller takes turns
        topic = broker.topics.get(name)
        if not _by_id(context):
            yield offsets.OffsetFetchRequestTopics(name=name, partition_indexes=list(partitions))
        elif topic is not None:
            yield offsets.OffsetFetchRequestTopics(topic_id=topic.id, partition_indexes=list(partitions))


async def _fetch_topic(
    broker: BrokerNode,
    context: RequestContext,
    group_id: str,
    requested: offsets.OffsetFetchRequestTopics,
    require_stable: bool,
    turns: Turns,
) -> offsets.OffsetFetchResponseTopics:
    topic = _topic_of(broker, context, requested)
    if _by_id(context) and topic is None:
        code = ErrorCode.UNKNOWN_TOPIC_ID
        return offsets.OffsetFetchResponseTopics(
            topic_id=requested.topic_id,
            partitions=[_partition(index, NO_OFFSET, code) for index in requested.partition_indexes],
        )
    name, topic_id = (topic.name, topic.id) if topic is not None else (requested.name, NO_UUID)
    commits = broker.groups.commits

    def fetch(index: int) -> offsets.OffsetFetchResponsePartitions:
        if require_stable and commits.is_pending(group_id, name, index):
            return _partition(index, NO_OFFSET, ErrorCode.UNSTABLE_OFFSET_COMMIT)
        return _partition(index, commits.committed(group_id, name, index, topic_id) or NO_OFFSET)

    found = await turns.map(fetch, requested.partition_indexes)
    return offsets.OffsetFetchResponseTopics(requested.name, requested.topic_id, found)


def _partition(
    index: int, committed: CommittedOffset, code: ErrorCode = ErrorCode.NONE
) -> offsets.OffsetFetchResponsePartitions:
    return offsets.OffsetFetchResponsePartitions(
        index, committed.offset, committed.leader_epoch, committed.metadata, code
    )


# -- OffsetDelete ------------------------------------------------------------------------------------------------------
async def offset_delete(
    broker: BrokerNode, context: RequestContext, request: offsets.OffsetDeleteRequest
) -> offsets.OffsetDeleteResponse:
    requested = [(topic.name, part.partition_index) for topic in request.topics for part in topic.partitions]
    existing = [where for where in requested if broker.topics.partition(*where) is not None]
    try:
        codes = await broker.groups.commits.delete(request.group_id, existing)
    except GroupError as error:
        return offsets.OffsetDeleteResponse(error_code=error.code)
    return offsets.OffsetDeleteResponse(
        topics=[
            offsets.TopicErrorCodes(
                topic.name,
                [
                    offsets.PartitionErrorCode(
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
    broker: BrokerNode,
    context: RequestContext,
    requested: offsets.OffsetCommitRequestTopic | offsets.OffsetFetchRequestTopics,
) -> Topic | None:
    return broker.topics.by_id(requested.topic_id) if _by_id(context) else broker.topics.get(requested.name)


NOT_FOUND_FROM = 6  # DescribeGroups: before, a group that is not there is described as Dead, without an error
CLASSIC = "classic"


async def describe_groups(
    broker: BrokerNode, context: RequestContext, request: messages.DescribeGroupsRequest
) -> messages.DescribeGroupsResponse:
    operations = GROUP_OPERATIONS if request.include_authorized_operations else NOT_ASKED
    return messages.DescribeGroupsResponse(
        groups=await Turns().map(lambda group_id: _describe(broker, context, group_id, operations), request.groups)
    )


def _describe(broker: BrokerNode, context: RequestContext, group_id: str, operations: int) -> messages.DescribedGroup:
    group = broker.groups.find(group_id)
    if group is None:
        other_kind = broker.groups.find_consumer_group(group_id) is not None
        missing = messages.DescribedGroup(group_id=group_id, group_state=GroupState.DEAD.value)
        if context.version >= NOT_FOUND_FROM:
            missing.error_code = ErrorCode.GROUP_ID_NOT_FOUND
            missing.error_message = f"Group {group_id} {'is not a classic group' if other_kind else 'not found'}."
        else:
            missing.authorized_operations = operations
        return missing
    return messages.DescribedGroup(
        group_id=group_id,
        group_state=group.state.value,
        protocol_type=group.protocol_type or "",
        protocol_data=(group.protocol or "") if group.state is GroupState.STABLE else "",
        members=_members(group),
        authorized_operations=operations,
    )


def _members(group: Group) -> list[messages.DescribedGroupMember]:
    """Subscriptions are shown for a stable group only: in others no protocol is agreed on."""
    protocol = group.protocol if group.state is GroupState.STABLE else None
    return [
        messages.DescribedGroupMember(
            member.member_id,
            member.group_instance_id,
            member.client_id,
            member.client_host,
            b"" if protocol is None else member.protocols[protocol],
            member.assignment,
        )
        for member in group.members.values()
    ]


def list_groups(
    broker: BrokerNode, context: RequestContext, request: messages.ListGroupsRequest
) -> messages.ListGroupsResponse:
    states = {state.strip().lower() for state in request.states_filter}
    types = {kind.strip().lower() for kind in request.types_filter}
    groups = broker.groups
    listed = [
        messages.ListedGroup(each.group_id, each.protocol_type or "", each.state.value, CLASSIC)
        for each in groups.groups()
    ]
    listed += [
        messages.ListedGroup(each.group_id, CONSUMER, each.state.value, CONSUMER) for each in groups.consumer_groups()
    ]
    return messages.ListGroupsResponse(
        groups=[
            group
            for group in listed
            if (not states or group.group_state.lower() in states) and (not types or group.group_type in types)
        ]
    )


async def delete_groups(
    broker: BrokerNode, context: RequestContext, request: messages.DeleteGroupsRequest
) -> messages.DeleteGroupsResponse:
    turns = Turns()
    results = []
    for group_id in dict.fromkeys(request.groups_names):
        results.append(messages.DeletableGroupResult(group_id, await broker.groups.delete(group_id)))
        await turns.next()
    return messages.DeleteGroupsResponse(results=results)


CLASSIC_MEMBER, CONSUMER_MEMBER = 0, 1  # member types: the protocol that it speaks


async def consumer_group_heartbeat(
    broker: BrokerNode, context: RequestContext, request: messages.ConsumerGroupHeartbeatRequest
) -> messages.ConsumerGroupHeartbeatResponse:
    consumers = broker.groups.consumers
    if not _is_served(broker):
        return messages.ConsumerGroupHeartbeatResponse(error_code=ErrorCode.UNSUPPORTED_VERSION)
    try:
        check_request(request, context.version, consumers.planner.assignors)
        outcome = await consumers.heartbeat(Beat(request, context.client_id or "", context.client_host))
    except GroupError as error:
        return messages.ConsumerGroupHeartbeatResponse(error_code=error.code, error_message=str(error))
    timing = consumers.timing_of(request.group_id)
    response = messages.ConsumerGroupHeartbeatResponse(
        member_id=outcome.member_id,
        member_epoch=outcome.epoch,
        heartbeat_interval_ms=timing.heartbeat_interval_ms if request.member_epoch >= 0 else 0,
    )
    if outcome.assigned is not None:
        topics = [messages.TopicPartitions(*entry) for entry in by_topic(outcome.assigned).items()]
        response.assignment = messages.Assignment(topics)
    return response


def consumer_group_describe(
    broker: BrokerNode, context: RequestContext, request: messages.ConsumerGroupDescribeRequest
) -> messages.ConsumerGroupDescribeResponse:
    if not _is_served(broker):
        code = ErrorCode.UNSUPPORTED_VERSION
        refused = [messages.DescribedConsumerGroup(code, group_id=each) for each in request.group_ids]
        return messages.ConsumerGroupDescribeResponse(groups=refused)
    operations = GROUP_OPERATIONS if request.include_authorized_operations else NOT_ASKED
    return messages.ConsumerGroupDescribeResponse(
        groups=[_describe_consumer_group(broker, group_id, operations) for group_id in request.group_ids]
    )


def _is_served(broker: BrokerNode) -> bool:
    """The protocol can be switched off, as in Kafka."""
    return bool(broker.settings["group.version"] >= 1) and (
        "consumer" in broker.settings["group.coordinator.rebalance.protocols"]
    )


def _describe_consumer_group(broker: BrokerNode, group_id: str, operations: int) -> messages.DescribedConsumerGroup:
    groups = broker.groups
    group = groups.find_consumer_group(group_id)
    if not group_id:
        return messages.DescribedConsumerGroup(ErrorCode.INVALID_GROUP_ID, group_id=group_id)
    if group is None:
        what = "not found" if groups.find(group_id) is None else "is not a consumer group"
        return messages.DescribedConsumerGroup(ErrorCode.GROUP_ID_NOT_FOUND, f"Group {group_id} {what}.", group_id)
    return messages.DescribedConsumerGroup(
        group_id=group_id,
        group_state=group.state.value,
        group_epoch=group.epoch,
        assignment_epoch=group.target_epoch,
        assignor_name=groups.consumers.planner.assignor_of(group),
        members=[_describe_consumer_member(broker, group, member_id) for member_id in group.subscriptions],
        authorized_operations=operations,
    )


def _describe_consumer_member(broker: BrokerNode, group: ConsumerGroup, member_id: str) -> messages.Member:
    subscription, current = group.subscriptions[member_id], group.current.get(member_id, Current())
    return messages.Member(
        member_id=member_id,
        instance_id=subscription.instance_id,
        rack_id=subscription.rack_id,
        member_epoch=current.epoch,
        client_id=subscription.client_id,
        client_host=subscription.client_host,
        subscribed_topic_names=list(subscription.topics),
        subscribed_topic_regex=subscription.regex or "",
        assignment=_assignment(broker, current.assigned | current.revoking),
        target_assignment=_assignment(broker, group.target.get(member_id, NOTHING)),
        member_type=CONSUMER_MEMBER if subscription.classic is None else CLASSIC_MEMBER,
    )


def _assignment(broker: BrokerNode, partitions: Partitions) -> messages.ConsumerAssignment:
    """Topics that were deleted meanwhile have no name any more and are left out."""
    found = [(broker.topics.by_id(topic_id), topic_id, indexes) for topic_id, indexes in by_topic(partitions).items()]
    return messages.ConsumerAssignment(
        [
            messages.ConsumerTopicPartitions(topic_id, topic.name, indexes)
            for topic, topic_id, indexes in found
            if topic is not None
        ]
    )
