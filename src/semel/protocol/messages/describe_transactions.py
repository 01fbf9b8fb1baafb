"""DescribeTransactions (65): state of transactional ids."""

from __future__ import annotations

from semel.protocol.api import Api
from semel.protocol.schema import Struct, int16, int32, int64


class DescribeTransactionsRequest(Struct):
    transactional_ids: list[str] = []


class TopicData(Struct):
    topic: str = ""
    partitions: list[int32] = []


class TransactionState(Struct):
    error_code: int16 = 0
    transactional_id: str = ""
    transaction_state: str = ""
    transaction_timeout_ms: int32 = 0
    transaction_start_time_ms: int64 = 0
    producer_id: int64 = 0
    producer_epoch: int16 = 0
    topics: list[TopicData] = []


class DescribeTransactionsResponse(Struct):
    throttle_time_ms: int32 = 0
    transaction_states: list[TransactionState] = []


DESCRIBE_TRANSACTIONS = Api(65, DescribeTransactionsRequest, DescribeTransactionsResponse, "0", flexible="0+")
