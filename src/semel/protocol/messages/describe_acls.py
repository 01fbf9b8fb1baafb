"""DescribeAcls (29): list access rules."""

from __future__ import annotations

from semel.protocol.api import Api
from semel.protocol.schema import Struct, int8, int16, int32


class DescribeAclsRequest(Struct):
    resource_type_filter: int8 = 0
    resource_name_filter: str | None = ""
    pattern_type_filter: int8 = 3
    principal_filter: str | None = ""
    host_filter: str | None = ""
    operation: int8 = 0
    permission_type: int8 = 0


class AclDescription(Struct):
    principal: str = ""
    host: str = ""
    operation: int8 = 0
    permission_type: int8 = 0


class DescribeAclsResource(Struct):
    resource_type: int8 = 0
    resource_name: str = ""
    pattern_type: int8 = 3
    acls: list[AclDescription] = []


class DescribeAclsResponse(Struct):
    throttle_time_ms: int32 = 0
    error_code: int16 = 0
    error_message: str | None = ""
    resources: list[DescribeAclsResource] = []


DESCRIBE_ACLS = Api(29, DescribeAclsRequest, DescribeAclsResponse, "1-3", flexible="2+")
