"""JoinGroup (11), Heartbeat (12), LeaveGroup (13), SyncGroup (14)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from semel.broker.groups.group import GroupError
from semel.broker.groups.membership import Joiner, LeavingMember
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.groups import (
    HeartbeatRequest,
    HeartbeatResponse,
    JoinGroupRequest,
    JoinGroupResponse,
    LeaveGroupRequest,
    LeaveGroupResponse,
    MemberResponse,
    SyncGroupRequest,
    SyncGroupResponse,
)

if TYPE_CHECKING:
    from semel.broker.broker import Broker
    from semel.broker.context import RequestContext

NULL_PROTOCOL_FROM = 7  # JoinGroup
PROTOCOL_REQUIRED_FROM = 5  # SyncGroup
MANY_MEMBERS_FROM = 3  # LeaveGroup


async def join_group(broker: Broker, context: RequestContext, request: JoinGroupRequest) -> JoinGroupResponse:
    joiner = Joiner(request, context.version, context.client_id or "", context.client_host)
    response = await broker.groups.membership.join(joiner)
    if context.version < NULL_PROTOCOL_FROM and response.protocol_name is None:
        response.protocol_name = ""
    return response


async def sync_group(broker: Broker, context: RequestContext, request: SyncGroupRequest) -> SyncGroupResponse:
    if context.version >= PROTOCOL_REQUIRED_FROM and None in (request.protocol_type, request.protocol_name):
        return SyncGroupResponse(error_code=ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
    return await broker.groups.membership.sync(request)


def heartbeat(broker: Broker, context: RequestContext, request: HeartbeatRequest) -> HeartbeatResponse:
    code = broker.groups.membership.heartbeat(
        request.group_id, request.generation_id, request.member_id, request.group_instance_id
    )
    return HeartbeatResponse(error_code=code)


async def leave_group(broker: Broker, context: RequestContext, request: LeaveGroupRequest) -> LeaveGroupResponse:
    """Before version 3 one member leaves, and its error is the error of the answer."""
    is_single = context.version < MANY_MEMBERS_FROM
    if is_single:
        leaving = [LeavingMember(request.member_id, None)]
    else:
        leaving = [LeavingMember(who.member_id, who.group_instance_id, who.reason) for who in request.members]
    try:
        codes = await broker.groups.membership.leave(request.group_id, leaving)
    except GroupError as error:
        return LeaveGroupResponse(error_code=error.code)
    if is_single:
        return LeaveGroupResponse(error_code=codes[0])
    return LeaveGroupResponse(
        members=[
            MemberResponse(who.member_id, who.group_instance_id, code) for who, code in zip(leaving, codes, strict=True)
        ]
    )
