"""UnregisterBroker (64): forget a broker that is gone."""

from __future__ import annotations

from semel.protocol.api import Api
from semel.protocol.schema import Struct, int16, int32


class UnregisterBrokerRequest(Struct):
    broker_id: int32 = 0


class UnregisterBrokerResponse(Struct):
    throttle_time_ms: int32 = 0
    error_code: int16 = 0
    error_message: str | None = ""


UNREGISTER_BROKER = Api(64, UnregisterBrokerRequest, UnregisterBrokerResponse, "0", flexible="0+")
