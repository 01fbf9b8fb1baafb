"""Who is in a group: JoinGroup, SyncGroup, Heartbeat, LeaveGroup.

A request is judged (guards first, then the table), the table's act changes the group, and the request gets its response
at once or waits for the others.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from semel.broker.coordinator_runtime import client_error
from semel.broker.groups.classic_group import (
    CONSUMER,
    Act,
    ClassicMember,
    Group,
    GroupError,
    GroupEvent,
    GroupState,
    Protocols,
)
from semel.broker.groups.consumer.heartbeats import ConsumerGroups
from semel.broker.groups.consumer.model import (
    ClassicMetadata,
    ConsumerGroup,
    ConsumerGroupState,
    Current,
    MemberState,
    Subscription,
)
from semel.broker.groups.consumer.planner import JOINS, Beat, check_instance, deletion_of
from semel.broker.groups.migration import common_protocols, partitions_of, read_subscription, write_assignment
from semel.broker.groups.rebalance import (
    NO_MEMBER_ID,
    Rebalance,
    assignment_of,
    current_generation,
    join_error,
    same_generation,
    sync_error,
)
from semel.broker.groups.records import GroupRecord, GroupsRecord, by_topic
from semel.broker.groups.state import Core
from semel.broker.topics import Topics
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.groups import (
    ConsumerGroupHeartbeatRequest,
    JoinGroupRequest,
    JoinGroupResponse,
    MemberIdentity,
    SyncGroupRequest,
    SyncGroupResponse,
    TopicPartitions,
)
from semel.storage import StorageError

# --- Members that speak the classic protocol in a consumer group: during a migration both kinds are in it (KIP-848) ---
#
# The broker assigns. JoinGroup takes the member one step towards its target, as a heartbeat does for the others,
# SyncGroup returns what it has, and Heartbeat says when it has to join again.


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


NEW_MEMBER_JOIN_TIMEOUT_MS = 5 * 60_000  # as Kafka: a new member without a response for so long is dropped
MEMBER_ID_REQUIRED_FROM = 4
SKIP_ASSIGNMENT_FROM = 9

JoinAnswer = JoinGroupResponse | asyncio.Future[JoinGroupResponse]
SyncAnswer = SyncGroupResponse | asyncio.Future[SyncGroupResponse]


class Joiner(NamedTuple):
    """A JoinGroup request and who sent it."""

    request: JoinGroupRequest
    version: int
    client_id: str
    client_host: str

    @property
    def protocols(self) -> Protocols:
        return {protocol.name: bytes(protocol.metadata) for protocol in self.request.protocols}

    @property
    def rebalance_timeout_ms(self) -> int:
        """Version 0 has no timeout of its own for rebalances."""
        return self.request.session_timeout_ms if self.version == 0 else self.request.rebalance_timeout_ms

    @property
    def reason(self) -> str:
        return self.request.reason or "no reason given"


class ClassicMembership:
    """The requests of the rebalance protocol of classic groups."""

    def __init__(self, core: Core, rebalance: Rebalance, consumers: ConsumerGroups, mixed: MixedMembership) -> None:
        self._core = core
        self._rebalance = rebalance
        self._consumers = consumers
        self._mixed = mixed

    # -- JoinGroup -----------------------------------------------------------------------------------------------------
    async def join(self, joiner: Joiner) -> JoinGroupResponse:
        request, settings = joiner.request, self._core.settings
        if not request.group_id:
            return join_error(ErrorCode.INVALID_GROUP_ID, request.member_id)
        shortest_ms, longest_ms = settings["group.min.session.timeout.ms"], settings["group.max.session.timeout.ms"]
        if not shortest_ms <= request.session_timeout_ms <= longest_ms:
            return join_error(ErrorCode.INVALID_SESSION_TIMEOUT, request.member_id)
        group, stored = self._core.groups.get(request.group_id), None
        if group is None and (consumers := self._mixed.find(request.group_id)) is not None:
            return await self._mixed.join(consumers, joiner)
        if group is None and request.member_id != NO_MEMBER_ID:
            return join_error(ErrorCode.UNKNOWN_MEMBER_ID, request.member_id)
        try:
            if group is None:
                group, stored = self._create(request.group_id)
            response = self._judge_join(group, joiner)
        except StorageError as error:
            return join_error(client_error(error), request.member_id)
        except GroupError as error:
            return join_error(error.code, request.member_id)
        failure = None if stored is None else await asyncio.shield(stored)
        if failure is not None:
            self._rebalance.discard(group)
            return join_error(client_error(failure), request.member_id)
        return response if isinstance(response, JoinGroupResponse) else await asyncio.shield(response)

    def _create(self, group_id: str) -> tuple[Group, asyncio.Future[StorageError | None] | None]:
        """A new group; one of the consumer protocol that has no members gives way to it."""
        consumers = self._core.consumer_groups.get(group_id)
        if self._consumers.is_busy(group_id):
            raise GroupError(ErrorCode.COORDINATOR_NOT_AVAILABLE)
        if consumers is not None and consumers.state is not ConsumerGroupState.EMPTY:
            raise GroupError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
        group = Group(group_id, self._core.clock.now_ms())
        records: list[GroupsRecord] = [] if consumers is None else [*deletion_of(group_id)]
        records.append(GroupRecord(group_id, group.to_record()))
        self._core.groups[group_id] = group  # members may join while the record is written
        try:
            stored = self._core.runtime.write(self._core.partition_of(group_id), records)
        except StorageError:
            del self._core.groups[group_id]
            raise
        return self._core.groups[group_id], stored

    def _judge_join(self, group: Group, joiner: Joiner) -> JoinAnswer:
        member_id = joiner.request.member_id
        if not group.has_capacity(member_id, self._core.settings["group.max.size"]):
            self._rebalance.drop(group, member_id)
            return join_error(ErrorCode.GROUP_MAX_SIZE_REACHED, NO_MEMBER_ID)
        try:
            group.decide(GroupEvent.ID_REQUESTED)
            if not group.supports(joiner.request.protocol_type, joiner.protocols):
                raise GroupError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
            return self._join_known(group, joiner) if member_id != NO_MEMBER_ID else self._join_new(group, joiner)
        except GroupError as error:
            return join_error(error.code, member_id)

    def _join_new(self, group: Group, joiner: Joiner) -> JoinAnswer:
        instance_id = joiner.request.group_instance_id
        member_id = f"{joiner.client_id if instance_id is None else instance_id}-{self._core.new_id()}"
        if instance_id is not None and instance_id in group.static_ids:
            return self._replace(group, group.members[group.static_ids[instance_id]], member_id, joiner)
        if instance_id is not None or joiner.version < MEMBER_ID_REQUIRED_FROM:
            return self._add(group, member_id, joiner)
        self._rebalance.hand_out_id(group, member_id, joiner.request.session_timeout_ms)
        return join_error(ErrorCode.MEMBER_ID_REQUIRED, member_id)

    def _join_known(self, group: Group, joiner: Joiner) -> JoinAnswer:
        member_id, instance_id = joiner.request.member_id, joiner.request.group_instance_id
        if member_id in group.pending:
            if instance_id is not None:
                raise GroupError(ErrorCode.UNKNOWN_SERVER_ERROR, f"{member_id} was handed out to a dynamic member")
            return self._add(group, member_id, joiner)
        group.check_member(member_id, instance_id)
        member = group.members[member_id]
        cell = group.decide(_join_event(group, member, joiner.protocols))
        if cell.act is Act.SEND_GENERATION:
            return current_generation(group, member_id)
        group.update(member, joiner.protocols, joiner.rebalance_timeout_ms, joiner.request.session_timeout_ms)
        response = _await_join(member)
        self._rebalance.carry_out(group, cell, f"{member_id} joins again: {joiner.reason}")
        return response

    def _add(self, group: Group, member_id: str, joiner: Joiner) -> JoinAnswer:
        member = ClassicMember(
            member_id=member_id,
            group_instance_id=joiner.request.group_instance_id,
            client_id=joiner.client_id,
            client_host=joiner.client_host,
            rebalance_timeout_ms=joiner.rebalance_timeout_ms,
            session_timeout_ms=joiner.request.session_timeout_ms,
            protocol_type=joiner.request.protocol_type,
            protocols=joiner.protocols,
            is_new=True,
        )
        cell = group.decide(GroupEvent.JOIN_NEW)
        group.grew = True
        response = _await_join(member)
        group.add(member)
        self._rebalance.watch(group, member, NEW_MEMBER_JOIN_TIMEOUT_MS)
        self._rebalance.carry_out(group, cell, f"new member {member_id}: {joiner.reason}")
        return response

    def _replace(self, group: Group, member: ClassicMember, new_id: str, joiner: Joiner) -> JoinAnswer:
        """A static member came back. Its old process, if it still runs, is fenced at once."""
        old_id, old_leader = member.member_id, group.leader
        member.respond_to_join(join_error(ErrorCode.FENCED_INSTANCE_ID, old_id))
        member.respond_to_sync(sync_error(ErrorCode.FENCED_INSTANCE_ID))
        before = (member.protocols, member.rebalance_timeout_ms, member.session_timeout_ms)
        group.rename(member, new_id)
        group.update(member, joiner.protocols, joiner.rebalance_timeout_ms, joiner.request.session_timeout_ms)
        member.is_new = False
        self._rebalance.alive(member)
        unchanged = group.state is not GroupState.STABLE or group.choose_protocol() == group.protocol
        cell = group.decide(GroupEvent.JOIN_REPLACING if unchanged else GroupEvent.JOIN_REPLACING_CHANGED)
        response = _await_join(member)
        if cell.act is not Act.STORE_MEMBER:
            self._rebalance.carry_out(group, cell, f"static member {member.group_instance_id} is now {new_id}")
            return response

        def stored() -> None:  # if a rebalance began meanwhile, the response comes with its generation
            if member.joining is response and group.state is GroupState.STABLE:
                may_skip = joiner.version >= SKIP_ASSIGNMENT_FROM
                member.respond_to_join(same_generation(group, new_id, old_leader, may_skip=may_skip))

        def failed(code: ErrorCode) -> None:
            member.respond_to_join(join_error(code, NO_MEMBER_ID))
            if group.members.get(new_id) is member:
                group.update(member, *before)
                group.rename(member, old_id)

        self._rebalance.store(group, stored, failed)
        return response

    # -- SyncGroup -----------------------------------------------------------------------------------------------------
    async def sync(self, request: SyncGroupRequest) -> SyncGroupResponse:
        if not request.group_id:
            return sync_error(ErrorCode.INVALID_GROUP_ID)
        group = self._core.groups.get(request.group_id)
        if group is None and (consumers := self._mixed.find(request.group_id)) is not None:
            return self._mixed.sync(consumers, request)
        if group is None:
            return sync_error(ErrorCode.UNKNOWN_MEMBER_ID)
        try:
            response = self._judge_sync(group, request)
        except GroupError as error:
            return sync_error(error.code)
        return response if isinstance(response, SyncGroupResponse) else await asyncio.shield(response)

    def _judge_sync(self, group: Group, request: SyncGroupRequest) -> SyncAnswer:
        event = GroupEvent.SYNC_LEADER if group.leader == request.member_id else GroupEvent.SYNC_FOLLOWER
        if group.state is not GroupState.DEAD:
            group.check_member(request.member_id, request.group_instance_id)
            group.check_generation(request.generation_id)
            if _differ(request.protocol_type, group.protocol_type) or _differ(request.protocol_name, group.protocol):
                raise GroupError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
        cell = group.decide(event)
        member = group.members[request.member_id]
        self._rebalance.synced(group, member)
        if cell.act is Act.ANSWER_ASSIGNMENT:
            return assignment_of(group, member)
        member.respond_to_sync(sync_error(ErrorCode.REBALANCE_IN_PROGRESS))  # a request that this one repeats
        member.syncing = response = asyncio.get_running_loop().create_future()
        if cell.act is Act.STORE_ASSIGNMENT:
            given = {entry.member_id: bytes(entry.assignment) for entry in request.assignments}
            self._rebalance.store_assignment(group, given)
        return response

    # -- Heartbeat and LeaveGroup --------------------------------------------------------------------------------------
    def heartbeat(self, group_id: str, generation: int, member_id: str, instance_id: str | None) -> ErrorCode:
        if not group_id:
            return ErrorCode.INVALID_GROUP_ID
        group = self._core.groups.get(group_id)
        if group is None and (consumers := self._mixed.find(group_id)) is not None:
            return self._mixed.heartbeat(consumers, generation, member_id, instance_id)
        if group is None:
            return ErrorCode.UNKNOWN_MEMBER_ID
        try:
            if group.state is not GroupState.DEAD:
                group.check_member(member_id, instance_id)
                group.check_generation(generation)
            cell = group.decide(GroupEvent.HEARTBEAT)
        except GroupError as error:
            return error.code
        self._rebalance.alive(group.members[member_id])
        return cell.error

    async def leave(self, group_id: str, leaving: list[MemberIdentity]) -> list[ErrorCode]:
        """One code for each member, in order. GroupError where the request as a whole is refused."""
        if not group_id:
            raise GroupError(ErrorCode.INVALID_GROUP_ID)
        group = self._core.groups.get(group_id)
        if group is None:
            return await self._leave_consumers(group_id, leaving)
        if group.state is GroupState.DEAD:
            raise GroupError(ErrorCode.COORDINATOR_NOT_AVAILABLE)
        codes = [self._leave_one(group, identity) for identity in leaving]
        gone = [who for who, code in zip(leaving, codes, strict=True) if code is ErrorCode.NONE]
        if gone:
            names = ", ".join(f"{who.member_id or who.group_instance_id} ({who.reason or 'no reason'})" for who in gone)
            self._rebalance.carry_out(group, group.decide(GroupEvent.MEMBERS_LEFT), f"left: {names}")
            await self._core.runtime.settled(self._core.partition_of(group_id))
        return codes

    async def _leave_consumers(self, group_id: str, leaving: list[MemberIdentity]) -> list[ErrorCode]:
        """Operators remove members of a consumer group with the same request."""
        group = self._core.consumer_groups.get(group_id)
        known = [_consumer_id(group, who) if group is not None else None for who in leaving]
        await self._consumers.remove(group_id, [each for each in known if each is not None], "an operator removed it")
        return [ErrorCode.UNKNOWN_MEMBER_ID if each is None else ErrorCode.NONE for each in known]

    def _leave_one(self, group: Group, who: MemberIdentity) -> ErrorCode:
        member_id = who.member_id
        if member_id in group.pending:
            group.forget_pending(member_id)
            return ErrorCode.NONE
        if member_id == NO_MEMBER_ID and who.group_instance_id is not None:  # an administrator removes a static member
            member_id = group.static_ids.get(who.group_instance_id, NO_MEMBER_ID)
        try:
            group.check_member(member_id, who.group_instance_id)
        except GroupError as error:
            return error.code
        self._rebalance.drop(group, member_id)
        return ErrorCode.NONE


def _consumer_id(group: ConsumerGroup, who: MemberIdentity) -> str | None:
    member_id = who.member_id or group.static_ids.get(who.group_instance_id or "", NO_MEMBER_ID)
    return member_id if member_id in group.subscriptions else None


def _join_event(group: Group, member: ClassicMember, protocols: Protocols) -> GroupEvent:
    if not member.has_protocols(protocols):
        return GroupEvent.JOIN_CHANGED
    return GroupEvent.JOIN_SAME_LEADER if member.member_id == group.leader else GroupEvent.JOIN_SAME


def _await_join(member: ClassicMember) -> asyncio.Future[JoinGroupResponse]:
    """The future response to a member's JoinGroup. A request that this one repeats gets REBALANCE_IN_PROGRESS."""
    member.respond_to_join(join_error(ErrorCode.REBALANCE_IN_PROGRESS, member.member_id))
    member.joining = asyncio.get_running_loop().create_future()
    return member.joining


def _differ(requested: str | None, actual: str | None) -> bool:
    return requested is not None and actual is not None and requested != actual
