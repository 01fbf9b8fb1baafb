"""CreateAcls (30): create access rules."""

from __future__ import annotations

from semel.protocol.api import Api
from semel.protocol.schema import Struct, int8, int16, int32


class AclCreation(Struct):
    resource_type: int8 = 0
    resource_name: str = ""
    resource_pattern_type: int8 = 3
    principal: str = ""
    host: str = ""
    operation: int8 = 0
    permission_type: int8 = 0


class CreateAclsRequest(Struct):
    creations: list[AclCreation] = []


class AclCreationResult(Struct):
    error_code: int16 = 0
    error_message: str | None = ""


class CreateAclsResponse(Struct):
    throttle_time_ms: int32 = 0
    results: list[AclCreationResult] = []


CREATE_ACLS = Api(30, CreateAclsRequest, CreateAclsResponse, "1-3", flexible="2+")
