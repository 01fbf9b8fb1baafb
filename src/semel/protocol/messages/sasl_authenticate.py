"""SaslAuthenticate (36): one step of the SASL exchange."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Api
from semel.protocol.schema import Struct, ignorable, int16, int64, versions


class SaslAuthenticateRequest(Struct):
    auth_bytes: bytes = b""


class SaslAuthenticateResponse(Struct):
    error_code: int16 = 0
    error_message: str | None = ""
    auth_bytes: bytes = b""
    session_lifetime_ms: Annotated[int64, versions("1+"), ignorable] = 0


SASL_AUTHENTICATE = Api(36, SaslAuthenticateRequest, SaslAuthenticateResponse, "0-2", flexible="2+")
