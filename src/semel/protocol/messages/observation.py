"""An API of semel's broker that Kafka does not have: what happened to transactional ids, for people who look.

Its key is far above Kafka's. ApiVersions names it, so a client knows whether it is there; clients ignore keys that they
do not know.
"""

from __future__ import annotations

from semel.protocol.api import Api
from semel.protocol.schema import Struct, int16, int32, int64


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
