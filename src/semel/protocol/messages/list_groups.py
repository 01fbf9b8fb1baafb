"""ListGroups (16): all groups that a broker coordinates."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Api
from semel.protocol.schema import Struct, ignorable, int16, int32, versions


class ListGroupsRequest(Struct):
    states_filter: Annotated[list[str], versions("4+")] = []
    types_filter: Annotated[list[str], versions("5+")] = []


class ListedGroup(Struct):
    group_id: str = ""
    protocol_type: str = ""
    group_state: Annotated[str, versions("4+"), ignorable] = ""
    group_type: Annotated[str, versions("5+"), ignorable] = ""


class ListGroupsResponse(Struct):
    throttle_time_ms: Annotated[int32, versions("1+"), ignorable] = 0
    error_code: int16 = 0
    groups: list[ListedGroup] = []


LIST_GROUPS = Api(16, ListGroupsRequest, ListGroupsResponse, "0-5", flexible="3+")
