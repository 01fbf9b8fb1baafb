"""AddPartitionsToTxn (24): add partitions to a transaction; from version 4 on, broker to broker and in bulk."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Api
from semel.protocol.schema import Struct, ignorable, int16, int32, int64, versions


class AddPartitionsToTxnTopic(Struct):
    name: str = ""
    partitions: list[int32] = []


class AddPartitionsToTxnTransaction(Struct):
    transactional_id: str = ""
    producer_id: int64 = 0
    producer_epoch: int16 = 0
    verify_only: bool = False
    topics: list[AddPartitionsToTxnTopic] = []


class AddPartitionsToTxnRequest(Struct):
    transactions: Annotated[list[AddPartitionsToTxnTransaction], versions("4+")] = []
    v3_and_below_transactional_id: Annotated[str, versions("0-3")] = ""
    v3_and_below_producer_id: Annotated[int64, versions("0-3")] = 0
    v3_and_below_producer_epoch: Annotated[int16, versions("0-3")] = 0
    v3_and_below_topics: Annotated[list[AddPartitionsToTxnTopic], versions("0-3")] = []


class AddPartitionsToTxnPartitionResult(Struct):
    partition_index: int32 = 0
    partition_error_code: int16 = 0


class AddPartitionsToTxnTopicResult(Struct):
    name: str = ""
    results_by_partition: list[AddPartitionsToTxnPartitionResult] = []


class AddPartitionsToTxnResult(Struct):
    transactional_id: str = ""
    topic_results: list[AddPartitionsToTxnTopicResult] = []


class AddPartitionsToTxnResponse(Struct):
    throttle_time_ms: int32 = 0
    error_code: Annotated[int16, versions("4+"), ignorable] = 0
    results_by_transaction: Annotated[list[AddPartitionsToTxnResult], versions("4+")] = []
    results_by_topic_v3_and_below: Annotated[list[AddPartitionsToTxnTopicResult], versions("0-3")] = []


ADD_PARTITIONS_TO_TXN = Api(24, AddPartitionsToTxnRequest, AddPartitionsToTxnResponse, "0-5", flexible="3+")
