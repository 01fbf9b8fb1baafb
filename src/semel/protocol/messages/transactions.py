"""Producer ids, transactions, their markers, and what administrators see of them."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Api
from semel.protocol.messages.offsets import TopicErrorCodes
from semel.protocol.schema import Struct, ignorable, int8, int16, int32, int64, versions


# InitProducerId (22): get a producer id and epoch; with a transactional id, fence its earlier owners.
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


# AddPartitionsToTxn (24): add partitions to a transaction; from version 4 on, broker to broker and in bulk.
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


# AddOffsetsToTxn (25): add a group's offsets to a transaction.
class AddOffsetsToTxnRequest(Struct):
    transactional_id: str = ""
    producer_id: int64 = 0
    producer_epoch: int16 = 0
    group_id: str = ""


class AddOffsetsToTxnResponse(Struct):
    throttle_time_ms: int32 = 0
    error_code: int16 = 0


ADD_OFFSETS_TO_TXN = Api(25, AddOffsetsToTxnRequest, AddOffsetsToTxnResponse, "0-4", flexible="3+")


# TxnOffsetCommit (28): commit a group's offsets inside a transaction.
class TxnOffsetCommitRequestPartition(Struct):
    partition_index: int32 = 0
    committed_offset: int64 = 0
    committed_leader_epoch: Annotated[int32, versions("2+"), ignorable] = -1
    committed_metadata: str | None = ""


class TxnOffsetCommitRequestTopic(Struct):
    name: str = ""
    partitions: list[TxnOffsetCommitRequestPartition] = []


class TxnOffsetCommitRequest(Struct):
    transactional_id: str = ""
    group_id: str = ""
    producer_id: int64 = 0
    producer_epoch: int16 = 0
    generation_id: Annotated[int32, versions("3+")] = -1
    member_id: Annotated[str, versions("3+")] = ""
    group_instance_id: Annotated[str | None, versions("3+")] = None
    topics: list[TxnOffsetCommitRequestTopic] = []


class TxnOffsetCommitResponse(Struct):
    throttle_time_ms: int32 = 0
    topics: list[TopicErrorCodes] = []


TXN_OFFSET_COMMIT = Api(28, TxnOffsetCommitRequest, TxnOffsetCommitResponse, "0-5", flexible="3+")


# EndTxn (26): commit or abort a transaction.
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


# WriteTxnMarkers (27): write commit or abort markers into partitions: broker to broker, or an operator.
class WritableTxnMarkerTopic(Struct):
    name: str = ""
    partition_indexes: list[int32] = []


class WritableTxnMarker(Struct):
    producer_id: int64 = 0
    producer_epoch: int16 = 0
    transaction_result: bool = False
    topics: list[WritableTxnMarkerTopic] = []
    coordinator_epoch: int32 = 0
    transaction_version: Annotated[int8, versions("2+"), ignorable] = 0


class WriteTxnMarkersRequest(Struct):
    markers: list[WritableTxnMarker] = []


class WritableTxnMarkerResult(Struct):
    producer_id: int64 = 0
    topics: list[TopicErrorCodes] = []


class WriteTxnMarkersResponse(Struct):
    markers: list[WritableTxnMarkerResult] = []


WRITE_TXN_MARKERS = Api(27, WriteTxnMarkersRequest, WriteTxnMarkersResponse, "1-2", flexible="1+")


# DescribeProducers (61): producers that are active in partitions, with their sequences and open transactions.
class ProducersTopic(Struct):
    name: str = ""
    partition_indexes: list[int32] = []


class DescribeProducersRequest(Struct):
    topics: list[ProducersTopic] = []


class ProducerState(Struct):
    producer_id: int64 = 0
    producer_epoch: int32 = 0
    last_sequence: int32 = -1
    last_timestamp: int64 = -1
    coordinator_epoch: int32 = 0
    current_txn_start_offset: int64 = -1


class PartitionResponse(Struct):
    partition_index: int32 = 0
    error_code: int16 = 0
    error_message: str | None = None
    active_producers: list[ProducerState] = []


class TopicResponse(Struct):
    name: str = ""
    partitions: list[PartitionResponse] = []


class DescribeProducersResponse(Struct):
    throttle_time_ms: int32 = 0
    topics: list[TopicResponse] = []


DESCRIBE_PRODUCERS = Api(61, DescribeProducersRequest, DescribeProducersResponse, "0", flexible="0+")


# DescribeTransactions (65): state of transactional ids.
class DescribeTransactionsRequest(Struct):
    transactional_ids: list[str] = []


class TransactionTopic(Struct):
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
    topics: list[TransactionTopic] = []


class DescribeTransactionsResponse(Struct):
    throttle_time_ms: int32 = 0
    transaction_states: list[TransactionState] = []


DESCRIBE_TRANSACTIONS = Api(65, DescribeTransactionsRequest, DescribeTransactionsResponse, "0", flexible="0+")


# ListTransactions (66): all transactional ids that a broker coordinates.
class ListTransactionsRequest(Struct):
    state_filters: list[str] = []
    producer_id_filters: list[int64] = []
    duration_filter: Annotated[int64, versions("1+")] = -1
    transactional_id_pattern: Annotated[str | None, versions("2+")] = None


class ListedTransaction(Struct):
    transactional_id: str = ""
    producer_id: int64 = 0
    transaction_state: str = ""


class ListTransactionsResponse(Struct):
    throttle_time_ms: int32 = 0
    error_code: int16 = 0
    unknown_state_filters: list[str] = []
    transaction_states: list[ListedTransaction] = []


LIST_TRANSACTIONS = Api(66, ListTransactionsRequest, ListTransactionsResponse, "0-2", flexible="0+")


# --- An API of semel's broker that Kafka does not have: what happened to transactional ids, for people who look ---
#
# Its key is far above Kafka's. ApiVersions names it, so a client knows whether it is there; clients ignore keys that
# they do not know.


# DescribeTransactionEvents (20000): the last steps of transactional ids, oldest first.
class DescribeTransactionEventsRequest(Struct):
    transactional_ids: list[str] = []  # empty: all that there are events of
    after: int64 = -1  # only events with a higher number
    limit: int32 = 1000  # the newest of them


class TracedPartition(Struct):
    topic: str = ""
    partition: int32 = 0


class TransactionTraceEvent(Struct):
    number: int64 = 0  # counts all events of the broker since its start
    time_ms: int64 = 0
    step: str = ""  # its number in the figure of KIP-98
    api: str = ""
    transactional_id: str = ""
    producer_id: int64 = -1
    producer_epoch: int16 = -1
    error_code: int16 = 0
    client: str = ""  # id and address; empty for what the broker does by itself
    partitions: list[TracedPartition] = []  # some of them
    partition_count: int32 = 0
    note: str = ""


class DescribeTransactionEventsResponse(Struct):
    throttle_time_ms: int32 = 0
    error_code: int16 = 0
    now_ms: int64 = 0
    events: list[TransactionTraceEvent] = []


DESCRIBE_TRANSACTION_EVENTS = Api(
    20000, DescribeTransactionEventsRequest, DescribeTransactionEventsResponse, "0", flexible="0+"
)
