"""InitProducerId (22): get a producer id and epoch; with a transactional id, fence its earlier owners."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Api
from semel.protocol.schema import Struct, int16, int32, int64, versions


class InitProducerIdRequest(Struct):
    transactional_id: str | None = ""
    transaction_timeout_ms: int32 = 0
    producer_id: Annotated[int64, versions("3+")] = -1
    producer_epoch: Annotated[int16, versions("3+")] = -1
    enable2_pc: Annotated[bool, versions("6+")] = False
    keep_prepared_txn: Annotated[bool, versions("6+")] = False


class InitProducerIdResponse(Struct):
    throttle_time_ms: int32 = 0
    error_code: int16 = 0
    producer_id: int64 = -1
    producer_epoch: int16 = 0
    ongoing_txn_producer_id: Annotated[int64, versions("6+")] = -1
    ongoing_txn_producer_epoch: Annotated[int16, versions("6+")] = -1


INIT_PRODUCER_ID = Api(22, InitProducerIdRequest, InitProducerIdResponse, "0-6", flexible="2+")
