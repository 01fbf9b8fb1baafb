"""LeaveGroup (13): leave a group at once, instead of by time-out."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Api
from semel.protocol.schema import Struct, ignorable, int16, int32, versions


class MemberIdentity(Struct):
    member_id: str = ""
    group_instance_id: str | None = None
    reason: Annotated[str | None, versions("5+"), ignorable] = None


class LeaveGroupRequest(Struct):
    group_id: str = ""
    member_id: Annotated[str, versions("0-2")] = ""
    members: Annotated[list[MemberIdentity], versions("3+")] = []


class MemberResponse(Struct):
    member_id: str = ""
    group_instance_id: str | None = ""
    error_code: int16 = 0


class LeaveGroupResponse(Struct):
    throttle_time_ms: Annotated[int32, versions("1+"), ignorable] = 0
    error_code: int16 = 0
    members: Annotated[list[MemberResponse], versions("3+")] = []


LEAVE_GROUP = Api(13, LeaveGroupRequest, LeaveGroupResponse, "0-5", flexible="4+")
