"""ConsumerGroupHeartbeat (68) and ConsumerGroupDescribe (69): the consumer protocol of KIP-848."""

from __future__ import annotations

from typing import TYPE_CHECKING

from semel.broker.groups.consumer.guards import Beat, check_request
from semel.broker.groups.consumer.model import NOTHING, ConsumerGroup, Current, Partitions
from semel.broker.groups.consumer.records import by_topic
from semel.broker.groups.group import GroupError
from semel.broker.handlers.rights import GROUP_OPERATIONS, NOT_ASKED
from semel.protocol.errors import ErrorCode
from semel.protocol.messages import groups as described
from semel.protocol.messages.groups import (
    Assignment,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    TopicPartitionsResult,
)

if TYPE_CHECKING:
    from semel.broker.broker import Broker
    from semel.broker.context import RequestContext

CONSUMER_MEMBER = 1  # member type: follows the consumer protocol


async def consumer_group_heartbeat(
    broker: Broker, context: RequestContext, request: ConsumerGroupHeartbeatRequest
) -> ConsumerGroupHeartbeatResponse:
    consumers = broker.groups.consumers
    if not _is_served(broker):
        return ConsumerGroupHeartbeatResponse(error_code=ErrorCode.UNSUPPORTED_VERSION)
    try:
        check_request(request, context.version, consumers.config.assignors)
        answer = await consumers.heartbeat(Beat(request, context.client_id or "", context.client_host))
    except GroupError as error:
        return ConsumerGroupHeartbeatResponse(error_code=error.code, error_message=str(error))
    timing = consumers.timing_of(request.group_id)
    response = ConsumerGroupHeartbeatResponse(
        member_id=answer.member_id,
        member_epoch=answer.epoch,
        heartbeat_interval_ms=timing.heartbeat_interval_ms if request.member_epoch >= 0 else 0,
    )
    if answer.assigned is not None:
        topics = [TopicPartitionsResult(*entry) for entry in by_topic(answer.assigned).items()]
        response.assignment = Assignment(topics)
    return response


def consumer_group_describe(
    broker: Broker, context: RequestContext, request: described.ConsumerGroupDescribeRequest
) -> described.ConsumerGroupDescribeResponse:
    if not _is_served(broker):
        code = ErrorCode.UNSUPPORTED_VERSION
        refused = [described.DescribedConsumerGroup(code, group_id=each) for each in request.group_ids]
        return described.ConsumerGroupDescribeResponse(groups=refused)
    operations = GROUP_OPERATIONS if request.include_authorized_operations else NOT_ASKED
    return described.ConsumerGroupDescribeResponse(
        groups=[_describe(broker, group_id, operations) for group_id in request.group_ids]
    )


def _is_served(broker: Broker) -> bool:
    """The protocol can be switched off, as in Kafka."""
    return bool(broker.settings["group.version"] >= 1) and (
        "consumer" in broker.settings["group.coordinator.rebalance.protocols"]
    )


def _describe(broker: Broker, group_id: str, operations: int) -> described.DescribedConsumerGroup:
    groups = broker.groups
    group = groups.find_consumer_group(group_id)
    if not group_id:
        return described.DescribedConsumerGroup(ErrorCode.INVALID_GROUP_ID, group_id=group_id)
    if group is None:
        what = "not found" if groups.find(group_id) is None else "is not a consumer group"
        return described.DescribedConsumerGroup(ErrorCode.GROUP_ID_NOT_FOUND, f"Group {group_id} {what}.", group_id)
    return described.DescribedConsumerGroup(
        group_id=group_id,
        group_state=group.state.value,
        group_epoch=group.epoch,
        assignment_epoch=group.target_epoch,
        assignor_name=groups.consumers.planner.assignor_of(group),
        members=[_member(broker, group, member_id) for member_id in group.subscriptions],
        authorized_operations=operations,
    )


def _member(broker: Broker, group: ConsumerGroup, member_id: str) -> described.Member:
    subscription, current = group.subscriptions[member_id], group.current.get(member_id, Current())
    return described.Member(
        member_id=member_id,
        instance_id=subscription.instance_id,
        rack_id=subscription.rack_id,
        member_epoch=current.epoch,
        client_id=subscription.client_id,
        client_host=subscription.client_host,
        subscribed_topic_names=list(subscription.topics),
        subscribed_topic_regex=subscription.regex or "",
        assignment=_assignment(broker, current.assigned),
        target_assignment=_assignment(broker, group.target.get(member_id, NOTHING)),
        member_type=CONSUMER_MEMBER,
    )


def _assignment(broker: Broker, partitions: Partitions) -> described.ConsumerAssignment:
    """Topics that were deleted meanwhile have no name any more and are left out."""
    found = [(broker.topics.by_id(topic_id), topic_id, indexes) for topic_id, indexes in by_topic(partitions).items()]
    return described.ConsumerAssignment(
        [
            described.ConsumerTopicPartitions(topic_id, topic.name, indexes)
            for topic, topic_id, indexes in found
            if topic is not None
        ]
    )
