"""DescribeGroups (15): state, members and assignments of groups."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Api
from semel.protocol.schema import Struct, ignorable, int16, int32, versions


class DescribeGroupsRequest(Struct):
    groups: list[str] = []
    include_authorized_operations: Annotated[bool, versions("3+")] = False


class DescribedGroupMember(Struct):
    member_id: str = ""
    group_instance_id: Annotated[str | None, versions("4+"), ignorable] = None
    client_id: str = ""
    client_host: str = ""
    member_metadata: bytes = b""
    member_assignment: bytes = b""


class DescribedGroup(Struct):
    error_code: int16 = 0
    error_message: Annotated[str | None, versions("6+")] = None
    group_id: str = ""
    group_state: str = ""
    protocol_type: str = ""
    protocol_data: str = ""
    members: list[DescribedGroupMember] = []
    authorized_operations: Annotated[int32, versions("3+")] = -2147483648


class DescribeGroupsResponse(Struct):
    throttle_time_ms: Annotated[int32, versions("1+"), ignorable] = 0
    groups: list[DescribedGroup] = []


DESCRIBE_GROUPS = Api(15, DescribeGroupsRequest, DescribeGroupsResponse, "0-6", flexible="5+")
