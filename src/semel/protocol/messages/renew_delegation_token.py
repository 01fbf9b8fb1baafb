"""RenewDelegationToken (39): let a token live longer."""

from __future__ import annotations

from semel.protocol.api import Api
from semel.protocol.schema import Struct, int16, int32, int64


class RenewDelegationTokenRequest(Struct):
    hmac: bytes = b""
    renew_period_ms: int64 = 0


class RenewDelegationTokenResponse(Struct):
    error_code: int16 = 0
    expiry_timestamp_ms: int64 = 0
    throttle_time_ms: int32 = 0


RENEW_DELEGATION_TOKEN = Api(39, RenewDelegationTokenRequest, RenewDelegationTokenResponse, "1-2", flexible="2+")
