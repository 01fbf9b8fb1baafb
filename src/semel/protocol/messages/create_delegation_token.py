"""CreateDelegationToken (38): a token to log in with."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Api
from semel.protocol.schema import Struct, int16, int32, int64, versions


class CreatableRenewers(Struct):
    principal_type: str = ""
    principal_name: str = ""


class CreateDelegationTokenRequest(Struct):
    owner_principal_type: Annotated[str | None, versions("3+")] = ""
    owner_principal_name: Annotated[str | None, versions("3+")] = ""
    renewers: list[CreatableRenewers] = []
    max_lifetime_ms: int64 = 0


class CreateDelegationTokenResponse(Struct):
    error_code: int16 = 0
    principal_type: str = ""
    principal_name: str = ""
    token_requester_principal_type: Annotated[str, versions("3+")] = ""
    token_requester_principal_name: Annotated[str, versions("3+")] = ""
    issue_timestamp_ms: int64 = 0
    expiry_timestamp_ms: int64 = 0
    max_timestamp_ms: int64 = 0
    token_id: str = ""
    hmac: bytes = b""
    throttle_time_ms: int32 = 0


CREATE_DELEGATION_TOKEN = Api(38, CreateDelegationTokenRequest, CreateDelegationTokenResponse, "1-3", flexible="2+")
