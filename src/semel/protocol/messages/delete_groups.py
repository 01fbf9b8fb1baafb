"""DeleteGroups (42): delete groups and their positions."""

from __future__ import annotations

from semel.protocol.api import Api
from semel.protocol.schema import Struct, int16, int32


class DeleteGroupsRequest(Struct):
    groups_names: list[str] = []


class DeletableGroupResult(Struct):
    group_id: str = ""
    error_code: int16 = 0


class DeleteGroupsResponse(Struct):
    throttle_time_ms: int32 = 0
    results: list[DeletableGroupResult] = []


DELETE_GROUPS = Api(42, DeleteGroupsRequest, DeleteGroupsResponse, "0-2", flexible="2+")
