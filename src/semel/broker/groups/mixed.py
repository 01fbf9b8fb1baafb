"""Members that speak the classic protocol in a consumer group: during a migration both kinds are in it (KIP-848).

The broker assigns. JoinGroup takes the member one step towards its target, as a heartbeat does for the others,
SyncGroup returns what it has, and Heartbeat says when it has to join again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from semel.broker.groups.classic_group import CONSUMER, GroupError
from semel.broker.groups.consumer.heartbeats import ConsumerGroups
from semel.broker.groups.consumer.model import ClassicMetadata, ConsumerGroup, Current, MemberState, Subscription
from semel.broker.groups.consumer.planner import JOINS, Beat, check_instance
from semel.broker.groups.migration import common_protocols, partitions_of, read_subscription, write_assignment
from semel.broker.groups.rebalance import NO_MEMBER_ID, join_error, sync_error
from semel.broker.groups.records import by_topic
from semel.broker.groups.state import Core
from semel.broker.topics import Topics
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.groups import (
    ConsumerGroupHeartbeatRequest,
    JoinGroupResponse,
    SyncGroupRequest,
    SyncGroupResponse,
    TopicPartitions,
)

if TYPE_CHECKING:
    from semel.broker.groups.membership import Joiner

MEMBER_ID_REQUIRED_FROM = 4  # JoinGroup


class MixedMembership:
    """The requests of classic members of consumer groups."""

    def __init__(self, core: Core, consumers: ConsumerGroups, topics: Topics) -> None:
        self._core = core
        self._consumers = consumers
        self._topics = topics

    def find(self, group_id: str) -> ConsumerGroup | None:
        """The consumer group whose members are requested, if it has some."""
        group = self._core.consumer_groups.get(group_id)
        return group if group is not None and group.subscriptions else None

    # -- JoinGroup -----------------------------------------------------------------------------------------------------
    async def join(self, group: ConsumerGroup, joiner: Joiner) -> JoinGroupResponse:
        request = joiner.request
        is_new = request.member_id == NO_MEMBER_ID and request.group_instance_id is None
        try:
            beat = self._as_beat(group, joiner)
            if is_new and joiner.version >= MEMBER_ID_REQUIRED_FROM:
                return join_error(ErrorCode.MEMBER_ID_REQUIRED, self._core.new_id())
            result = await self._consumers.heartbeat(beat)
        except GroupError as error:
            return join_error(error.code, request.member_id)
        return JoinGroupResponse(
            generation_id=result.epoch,
            protocol_type=CONSUMER,
            protocol_name=next(iter(joiner.protocols)),
            member_id=result.member_id,
        )

    def _as_beat(self, group: ConsumerGroup, joiner: Joiner) -> Beat:
        """The request in the words of the consumer protocol. GroupError: no consumer, or none that fits the others."""
        request, protocols = joiner.request, joiner.protocols
        common = common_protocols(group, but=request.member_id)
        fits = common is None or not common.isdisjoint(protocols)
        if request.protocol_type != CONSUMER or not protocols or not fits:
            raise GroupError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
        _, subscription = read_subscription(next(iter(protocols.values())))
        owned = by_topic(partitions_of(subscription.owned_partitions, self._topics))
        beat = ConsumerGroupHeartbeatRequest(
            request.group_id,
            request.member_id or self._core.new_id(),
            JOINS,
            request.group_instance_id,
            subscription.rack_id,
            joiner.rebalance_timeout_ms,
            subscription.topics,
            topic_partitions=[TopicPartitions(*entry) for entry in owned.items()],
        )
        classic = ClassicMetadata(request.session_timeout_ms, tuple(protocols.items()))
        return Beat(beat, joiner.client_id, joiner.client_host, classic)

    # -- SyncGroup and Heartbeat ---------------------------------------------------------------------------------------
    def sync(self, group: ConsumerGroup, request: SyncGroupRequest) -> SyncGroupResponse:
        try:
            member = self._check(group, request.member_id, request.group_instance_id, request.generation_id)
            assert member.classic is not None
            name, metadata = member.classic.protocols[0]
            if request.protocol_type not in (None, CONSUMER) or request.protocol_name not in (None, name):
                raise GroupError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
            current = group.current.get(request.member_id, Current())
            if group.epoch > current.epoch and current.state is not MemberState.UNREVOKED:
                self._consumers.await_join(group, request.member_id)
                raise GroupError(ErrorCode.REBALANCE_IN_PROGRESS)
        except GroupError as error:
            return sync_error(error.code)
        self._consumers.watch(group, request.member_id)
        assignment = write_assignment(metadata, current.assigned, self._topics)
        return SyncGroupResponse(protocol_type=CONSUMER, protocol_name=name, assignment=assignment)

    def heartbeat(self, group: ConsumerGroup, generation: int, member_id: str, instance_id: str | None) -> ErrorCode:
        try:
            self._check(group, member_id, instance_id, generation)
        except GroupError as error:
            return error.code
        self._consumers.watch(group, member_id)
        if not group.must_join(member_id):
            return ErrorCode.NONE
        self._consumers.await_join(group, member_id)
        return ErrorCode.REBALANCE_IN_PROGRESS

    def _check(self, group: ConsumerGroup, member_id: str, instance_id: str | None, generation: int) -> Subscription:
        if instance_id is not None:
            check_instance(group.static_ids.get(instance_id), member_id, instance_id)
        member = group.subscriptions.get(member_id)
        if member is None or member.classic is None:
            raise GroupError(ErrorCode.UNKNOWN_MEMBER_ID, f"{member_id} is no classic member of {group.group_id}")
        if generation != group.current.get(member_id, Current()).epoch:
            raise GroupError(ErrorCode.ILLEGAL_GENERATION, f"generation {generation} is not that of {member_id}")
        return member
