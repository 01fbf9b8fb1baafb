"""DescribeGroups (15), ListGroups (16), DeleteGroups (42)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from semel.broker.groups.group import CONSUMER, Group
from semel.broker.groups.states import GroupState
from semel.broker.handlers.rights import GROUP_OPERATIONS, NOT_ASKED
from semel.broker.turns import Turns
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.groups import (
    DeletableGroupResult,
    DeleteGroupsRequest,
    DeleteGroupsResponse,
    DescribedGroup,
    DescribedGroupMember,
    DescribeGroupsRequest,
    DescribeGroupsResponse,
    ListedGroup,
    ListGroupsRequest,
    ListGroupsResponse,
)

if TYPE_CHECKING:
    from semel.broker.broker import Broker
    from semel.broker.context import RequestContext

NOT_FOUND_FROM = 6  # DescribeGroups: before, a group that is not there is described as Dead, without an error
CLASSIC = "classic"


async def describe_groups(
    broker: Broker, context: RequestContext, request: DescribeGroupsRequest
) -> DescribeGroupsResponse:
    operations = GROUP_OPERATIONS if request.include_authorized_operations else NOT_ASKED
    return DescribeGroupsResponse(
        groups=await Turns().map(lambda group_id: _describe(broker, context, group_id, operations), request.groups)
    )


def _describe(broker: Broker, context: RequestContext, group_id: str, operations: int) -> DescribedGroup:
    group = broker.groups.find(group_id)
    if group is None:
        other_kind = broker.groups.find_consumer_group(group_id) is not None
        missing = DescribedGroup(group_id=group_id, group_state=GroupState.DEAD.value)
        if context.version >= NOT_FOUND_FROM:
            missing.error_code = ErrorCode.GROUP_ID_NOT_FOUND
            missing.error_message = f"Group {group_id} {'is not a classic group' if other_kind else 'not found'}."
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
    groups = broker.groups
    listed = [
        ListedGroup(each.group_id, each.protocol_type or "", each.state.value, CLASSIC) for each in groups.groups()
    ]
    listed += [ListedGroup(each.group_id, CONSUMER, each.state.value, CONSUMER) for each in groups.consumer_groups()]
    return ListGroupsResponse(
        groups=[
            group
            for group in listed
            if (not states or group.group_state.lower() in states) and (not types or group.group_type in types)
        ]
    )


async def delete_groups(broker: Broker, context: RequestContext, request: DeleteGroupsRequest) -> DeleteGroupsResponse:
    turns = Turns()
    results = []
    for group_id in dict.fromkeys(request.groups_names):
        results.append(DeletableGroupResult(group_id, await broker.groups.delete(group_id)))
        await turns.next()
    return DeleteGroupsResponse(results=results)
