"""DeleteAcls (31): delete access rules."""

from __future__ import annotations

from semel.protocol.api import Api
from semel.protocol.schema import Struct, int8, int16, int32


class DeleteAclsFilter(Struct):
    resource_type_filter: int8 = 0
    resource_name_filter: str | None = ""
    pattern_type_filter: int8 = 3
    principal_filter: str | None = ""
    host_filter: str | None = ""
    operation: int8 = 0
    permission_type: int8 = 0


class DeleteAclsRequest(Struct):
    filters: list[DeleteAclsFilter] = []


class DeleteAclsMatchingAcl(Struct):
    error_code: int16 = 0
    error_message: str | None = ""
    resource_type: int8 = 0
    resource_name: str = ""
    pattern_type: int8 = 3
    principal: str = ""
    host: str = ""
    operation: int8 = 0
    permission_type: int8 = 0


class DeleteAclsFilterResult(Struct):
    error_code: int16 = 0
    error_message: str | None = ""
    matching_acls: list[DeleteAclsMatchingAcl] = []


class DeleteAclsResponse(Struct):
    throttle_time_ms: int32 = 0
    filter_results: list[DeleteAclsFilterResult] = []


DELETE_ACLS = Api(31, DeleteAclsRequest, DeleteAclsResponse, "1-3", flexible="2+")
