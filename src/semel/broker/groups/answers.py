"""Answers of the rebalance protocol, made from a group."""

from __future__ import annotations

from semel.broker.groups.group import Group
from semel.broker.groups.member import Member
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.groups import JoinGroupResponse, JoinGroupResponseMember, SyncGroupResponse


def join_error(code: ErrorCode, member_id: str) -> JoinGroupResponse:
    return JoinGroupResponse(error_code=code, member_id=member_id, protocol_name=None)


def current_generation(group: Group, member_id: str, *, skip_assignment: bool = False) -> JoinGroupResponse:
    """The generation as a member sees it: the leader gets everybody's metadata."""
    return JoinGroupResponse(
        generation_id=group.generation,
        protocol_type=group.protocol_type,
        protocol_name=group.protocol,
        leader=group.leader or "",
        skip_assignment=skip_assignment,
        member_id=member_id,
        members=_metadata_of_all(group) if member_id == group.leader else [],
    )


def _metadata_of_all(group: Group) -> list[JoinGroupResponseMember]:
    protocol = group.protocol or ""
    return [
        JoinGroupResponseMember(member.member_id, member.group_instance_id, member.protocols[protocol])
        for member in group.members.values()
    ]


def same_generation(group: Group, member_id: str, old_leader: str | None, *, may_skip: bool) -> JoinGroupResponse:
    """What a static member hears that came back and changed nothing: the generation goes on.

    A leader must not assign anew. From version 9 on it can be told so; before that it is told that somebody else leads:
    the member id that it had.
    """
    answer = current_generation(group, member_id, skip_assignment=may_skip and member_id == group.leader)
    if not may_skip:
        answer.leader, answer.members = old_leader or "", []
    return answer


def sync_error(code: ErrorCode) -> SyncGroupResponse:
    return SyncGroupResponse(error_code=code)


def assignment_of(group: Group, member: Member) -> SyncGroupResponse:
    return SyncGroupResponse(
        protocol_type=group.protocol_type, protocol_name=group.protocol, assignment=member.assignment
    )
