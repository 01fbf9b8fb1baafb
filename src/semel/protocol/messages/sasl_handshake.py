"""SaslHandshake (17): choose the SASL mechanism."""

from __future__ import annotations

from semel.protocol.api import Api
from semel.protocol.schema import Struct, int16


class SaslHandshakeRequest(Struct):
    mechanism: str = ""


class SaslHandshakeResponse(Struct):
    error_code: int16 = 0
    mechanisms: list[str] = []


SASL_HANDSHAKE = Api(17, SaslHandshakeRequest, SaslHandshakeResponse, "0-1")
