"""ExpireDelegationToken (40): end the life of a token."""

from __future__ import annotations

from semel.protocol.api import Api
from semel.protocol.schema import Struct, int16, int32, int64


class ExpireDelegationTokenRequest(Struct):
    hmac: bytes = b""
    expiry_time_period_ms: int64 = 0


class ExpireDelegationTokenResponse(Struct):
    error_code: int16 = 0
    expiry_timestamp_ms: int64 = 0
    throttle_time_ms: int32 = 0


EXPIRE_DELEGATION_TOKEN = Api(40, ExpireDelegationTokenRequest, ExpireDelegationTokenResponse, "1-2", flexible="2+")
