"""AddOffsetsToTxn (25): add a group's positions to a transaction."""

from __future__ import annotations

from semel.protocol.api import Api
from semel.protocol.schema import Struct, int16, int32, int64


class AddOffsetsToTxnRequest(Struct):
    transactional_id: str = ""
    producer_id: int64 = 0
    producer_epoch: int16 = 0
    group_id: str = ""


class AddOffsetsToTxnResponse(Struct):
    throttle_time_ms: int32 = 0
    error_code: int16 = 0


ADD_OFFSETS_TO_TXN = Api(25, AddOffsetsToTxnRequest, AddOffsetsToTxnResponse, "0-4", flexible="3+")
