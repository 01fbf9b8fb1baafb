"""EndTxn (26): commit or abort a transaction."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Api
from semel.protocol.schema import Struct, ignorable, int16, int32, int64, versions


class EndTxnRequest(Struct):
    transactional_id: str = ""
    producer_id: int64 = 0
    producer_epoch: int16 = 0
    committed: bool = False


class EndTxnResponse(Struct):
    throttle_time_ms: int32 = 0
    error_code: int16 = 0
    producer_id: Annotated[int64, versions("5+"), ignorable] = -1
    producer_epoch: Annotated[int16, versions("5+"), ignorable] = -1


END_TXN = Api(26, EndTxnRequest, EndTxnResponse, "0-5", flexible="3+")
