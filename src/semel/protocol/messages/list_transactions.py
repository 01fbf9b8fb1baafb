"""ListTransactions (66): all transactional ids that a broker coordinates."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Api
from semel.protocol.schema import Struct, int16, int32, int64, versions


class ListTransactionsRequest(Struct):
    state_filters: list[str] = []
    producer_id_filters: list[int64] = []
    duration_filter: Annotated[int64, versions("1+")] = -1
    transactional_id_pattern: Annotated[str | None, versions("2+")] = None


class TransactionState(Struct):
    transactional_id: str = ""
    producer_id: int64 = 0
    transaction_state: str = ""


class ListTransactionsResponse(Struct):
    throttle_time_ms: int32 = 0
    error_code: int16 = 0
    unknown_state_filters: list[str] = []
    transaction_states: list[TransactionState] = []


LIST_TRANSACTIONS = Api(66, ListTransactionsRequest, ListTransactionsResponse, "0-2", flexible="0+")
