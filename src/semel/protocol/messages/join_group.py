"""JoinGroup (11): enter a group, or take part in its next generation."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Api
from semel.protocol.schema import Struct, ignorable, int16, int32, nullable, versions


class JoinGroupRequestProtocol(Struct):
    name: str = ""
    metadata: bytes = b""


class JoinGroupRequest(Struct):
    group_id: str = ""
    session_timeout_ms: int32 = 0
    rebalance_timeout_ms: Annotated[int32, versions("1+"), ignorable] = -1
    member_id: str = ""
    group_instance_id: Annotated[str | None, versions("5+")] = None
    protocol_type: str = ""
    protocols: list[JoinGroupRequestProtocol] = []
    reason: Annotated[str | None, versions("8+"), ignorable] = None


class JoinGroupResponseMember(Struct):
    member_id: str = ""
    group_instance_id: Annotated[str | None, versions("5+"), ignorable] = None
    metadata: bytes = b""


class JoinGroupResponse(Struct):
    throttle_time_ms: Annotated[int32, versions("2+"), ignorable] = 0
    error_code: int16 = 0
    generation_id: int32 = -1
    protocol_type: Annotated[str | None, versions("7+"), ignorable] = None
    protocol_name: Annotated[str | None, nullable("7+")] = ""
    leader: str = ""
    skip_assignment: Annotated[bool, versions("9+")] = False
    member_id: str = ""
    members: list[JoinGroupResponseMember] = []


JOIN_GROUP = Api(11, JoinGroupRequest, JoinGroupResponse, "0-9", flexible="6+")
