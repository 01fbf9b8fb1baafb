"""The records of `__transaction_state`: the state of a transactional id, keyed by it."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Format
from semel.protocol.schema import Struct, int8, int16, int32, int64, tag


class TransactionLogKey(Struct):
    """Which transactional id a record is about."""

    transactional_id: str = ""


class PartitionsSchema(Struct):
    topic: str = ""
    partition_ids: list[int32] = []


class TransactionLogValue(Struct):
    """Owner, state and partitions of a transactional id."""

    producer_id: int64 = 0
    previous_producer_id: Annotated[int64, tag(0, "1+")] = -1
    next_producer_id: Annotated[int64, tag(1, "1+")] = -1
    producer_epoch: int16 = 0
    next_producer_epoch: Annotated[int16, tag(3, "1+")] = -1
    transaction_timeout_ms: int32 = 0
    transaction_status: int8 = 0
    transaction_partitions: list[PartitionsSchema] | None = []
    transaction_last_update_timestamp_ms: int64 = 0
    transaction_start_timestamp_ms: int64 = 0
    client_transaction_version: Annotated[int16, tag(2, "1+")] = 0


TRANSACTION_LOG_KEY = Format(TransactionLogKey, "0")
TRANSACTION_LOG_VALUE = Format(TransactionLogValue, "0-1", flexible="1+")
