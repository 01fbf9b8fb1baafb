"""DescribeGroups (15), ListGroups (16), DeleteGroups (42)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from semel.broker.groups.group import Group
from semel.broker.groups.handlers import groups_of
from semel.broker.groups.states import GroupState
from semel.broker.handlers.rights import GROUP_OPERATIONS, NOT_ASKED
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.delete_groups import DeletableGroupResult, DeleteGroupsRequest, DeleteGroupsResponse
from semel.protocol.messages.describe_groups import (
    DescribedGroup,
    DescribedGroupMember,
    DescribeGroupsRequest,
    DescribeGroupsResponse,
)
from semel.protocol.messages.list_groups import ListedGroup, ListGroupsRequest, ListGroupsResponse

if TYPE_CHECKING:
    from semel.broker.broker import Broker
    from semel.broker.context import RequestContext

NOT_FOUND_FROM = 6  # DescribeGroups: before, a group that is not there is described as Dead, without an error
CLASSIC = "classic"


def describe_groups(broker: Broker, context: RequestContext, request: DescribeGroupsRequest) -> DescribeGroupsResponse:
    operations = GROUP_OPERATIONS if request.include_authorized_operations else NOT_ASKED
    return DescribeGroupsResponse(
        groups=[_describe(broker, context, group_id, operations) for group_id in request.groups]
    )


def _describe(broker: Broker, context: RequestContext, group_id: str, operations: int) -> DescribedGroup:
    group = groups_of(broker).find(group_id)
    if group is None:
        missing = DescribedGroup(group_id=group_id, group_state=GroupState.DEAD.value)
        if context.version >= NOT_FOUND_FROM:
            missing.error_code, missing.error_message = ErrorCode.GROUP_ID_NOT_FOUND, f"Group {group_id} not found."
        else:
            missing.authorized_operations = operations
        return missing
    return DescribedGroup(
        group_id=group_id,
        group_state=group.state.value,
        protocol_type=group.protocol_type or "",
        protocol_data=(group.protocol or "") if group.state is GroupState.STABLE else "",
        members=_members(group),
        authorized_operations=operations,
    )


def _members(group: Group) -> list[DescribedGroupMember]:
    """Subscriptions are shown for a stable group only: in others no protocol is agreed on."""
    protocol = group.protocol if group.state is GroupState.STABLE else None
    return [
        DescribedGroupMember(
            member.member_id,
            member.group_instance_id,
            member.client_id,
            member.client_host,
            b"" if protocol is None else member.protocols[protocol],
            member.assignment,
        )
        for member in group.members.values()
    ]


def list_groups(broker: Broker, context: RequestContext, request: ListGroupsRequest) -> ListGroupsResponse:
    states = {state.strip().lower() for state in request.states_filter}
    types = {kind.strip().lower() for kind in request.types_filter}
    return ListGroupsResponse(
        groups=[
            ListedGroup(group.group_id, group.protocol_type or "", group.state.value, CLASSIC)
            for group in groups_of(broker).groups()
            if (not states or group.state.value.lower() in states) and (not types or CLASSIC in types)
        ]
    )


async def delete_groups(broker: Broker, context: RequestContext, request: DeleteGroupsRequest) -> DeleteGroupsResponse:
    return DeleteGroupsResponse(
        results=[
            DeletableGroupResult(group_id, await groups_of(broker).delete(group_id))
            for group_id in dict.fromkeys(request.groups_names)
        ]
    )
