"""Reads a range of one partition as Arrow batches: what a task of the source does.

While the records of one response are decoded and handed to Spark, the next fetch is already on its way. Memory: two
responses of at most FETCH_BYTES (or one batch, if that is larger) and the columns of one of them.

A fetch names bytes, a range offsets. A small range that requested a large response would read, check and decode several
times what it needs. So a worker remembers what the records of a topic took, for its next ranges (`TopicSizes`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple
from uuid import UUID

from semel.client.cluster import Cluster
from semel.client.cluster_calls import Leader
from semel.client.connection import BrokerConnection
from semel.client.errors import KafkaError, UnsupportedByBrokerError, error_of, is_network
from semel.client.timing import Backoff, Deadline
from semel.client.wire import Pending
from semel.protocol.batch import iter_headers
from semel.protocol.errors import ErrorCode, Recovery
from semel.protocol.messages.records import FETCH, FetchPartition, FetchRequest, FetchTopic, PartitionData
from semel.protocol.schema import NO_UUID
from semel.spark.offsets import Range
from semel.spark.stages import DECODE, stage
from semel.spark.stages import FETCH as FETCHING
from semel.spark.topics import earliest_offset, list_offsets

LEAST_BYTES = 64 * 1024
KEPT_TOPICS = 256


class Needed(NamedTuple):
    """The part of a response that lies before the end of a range: whole batches, of which the last may reach beyond."""

    records: memoryview
    first_offset: int  # of the first batch, which may begin before the requested offset
    next_offset: int  # where the next fetch starts; the requested offset itself if no batch is whole
    largest_batch_bytes: int


def needed(records: memoryview, offset: int, end: int) -> Needed:
    used_bytes = largest_bytes = 0
    first_offset = offset
    for at, header in iter_headers(records):
        if header.base_offset >= end:
            offset = max(offset, end)  # whatever was in between has been compacted away
            break
        first_offset = min(first_offset, header.base_offset)
        offset = max(offset, header.next_offset)
        used_bytes = at + header.size
        largest_bytes = max(largest_bytes, header.size)
    return Needed(records[:used_bytes], first_offset, offset, largest_bytes)


class TopicSizes:
    """What the records of topics took on the wire, when they were last read."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[float, int]] = {}  # bytes per offset, bytes of the largest batch

    def note(self, topic: str, found: Needed) -> None:
        if found.largest_batch_bytes:
            while len(self._of) >= KEPT_TOPICS:
                self._of.pop(next(iter(self._of)))
            bytes_per_offset = len(found.records) / (found.next_offset - found.first_offset)
            self._of[topic] = (bytes_per_offset, found.largest_batch_bytes)

    def bytes_for(self, topic: str, offsets: int, most: int) -> int:
        """Enough for so many offsets, as far as is known: with a batch to spare, as responses end in half batches."""
        if topic not in self._of:
            return most
        bytes_per_offset, largest_batch_bytes = self._of[topic]
        return min(most, max(LEAST_BYTES, int(offsets * bytes_per_offset) + largest_batch_bytes))


log = logging.getLogger("semel.spark")

FETCH_BYTES = 4 * 1024 * 1024
FETCH_WAIT_MS = 500
ANY_VERSION = 0x7FFF
NEWEST_WITH_NAMES = 12  # later versions of Fetch name topics by id
NOT_THERE = frozenset(
    {ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID, ErrorCode.INCONSISTENT_TOPIC_ID}
)
STALLED_S = 60.0  # a range that brings nothing for so long is an error, not a wait
EARLIEST_LOCAL_OFFSET = -4  # before it, records are in remote storage
EMPTY_RESPONSES = 3  # in a row, from a log that reaches beyond the range: there is nothing left in it

_sizes = TopicSizes()  # for the next ranges of this worker


class DataLossError(RuntimeError):
    """Records that a query has not read yet are gone."""


def created_anew(topic: str, read_up_to: str) -> str:
    return (
        f"topic {topic!r} was deleted and created anew: the query stands at {read_up_to}, which was of the old topic, "
        "and what it had not read of that is gone. Set failOnDataLoss=false to go on from the start of the new topic, "
        "or start with a new checkpoint"
    )


@dataclass(eq=False)
class RangeReader:
    cluster: Cluster
    wanted: Range
    _: KW_ONLY
    read_committed: bool
    fail_on_data_loss: bool
    fetch_bytes: int = FETCH_BYTES

    def __post_init__(self) -> None:
        wanted = self.wanted
        self._offset = wanted.start
        self._topic_id = UUID(wanted.topic_id).bytes if wanted.topic_id else NO_UUID
        self._name = f"reading {wanted.topic}-{wanted.partition}"
        self._progressed()

    def tables(self, *, headers: bool, views: bool = False) -> Iterator[Any]:
        """Tables of `offset`, `timestamp`, `timestamp_type`, `key`, `value` (and `headers`), in order of offset.

        With `views`, keys and values are of type binary_view and not copied out of the response.
        """
        from semel.protocol.columns_decode import decode_record_set

        for start, data, records in self._responses():
            aborted = [(a.producer_id, a.first_offset) for a in data.aborted_transactions or []]
            with stage(DECODE):
                decoded = decode_record_set(
                    records,
                    start_offset=start,
                    aborted=aborted if self.read_committed else None,
                    headers=headers,
                    views=views,
                )
                table = self._cut(decoded.table)
            if table.num_rows:
                yield table

    def _responses(self) -> Iterator[tuple[int, PartitionData, memoryview]]:
        """(offset requested, response, the records of it that are needed) until the range is covered."""
        waiting: Pending | None = None
        connection: BrokerConnection | None = None
        while self._offset < self.wanted.end:
            try:
                if waiting is None or connection is None:
                    connection = self._connect()
                    waiting = self._send_fetch(connection)
                with stage(FETCHING):
                    connection.wait(waiting)
                    data = self._answer(waiting)
            except KafkaError as error:
                waiting = None
                self._recover(error)
                continue
            records: Any = data.records  # None where there is nothing
            found = needed(memoryview(records or b""), self._offset, self.wanted.end)
            start, self._offset, waiting = self._offset, found.next_offset, None
            if self._offset == start:
                self._nothing_came(data)
                continue
            _sizes.note(self.wanted.topic, found)
            self._progressed()
            waiting = self._send_fetch(connection) if self._offset < self.wanted.end else None
            yield start, data, found.records

    def _progressed(self) -> None:
        """What failed before is over. Time is counted from the next failure on: what the query does with the rows takes
        as long as it takes."""
        self._retries: tuple[Backoff, Deadline] | None = None
        self._stall_deadline: Deadline | None = None
        self._empty_responses = 0
        self.cluster.outages.over(self._name)

    def _connect(self) -> BrokerConnection:
        """One attempt: `_recover` decides about others."""
        return self.cluster.connect(Leader(self.wanted.topic, self.wanted.partition), self.cluster.deadline())

    def _send_fetch(self, connection: BrokerConnection) -> Pending:
        r = self.wanted
        most_bytes = _sizes.bytes_for(r.topic, r.end - self._offset, self.fetch_bytes)
        partition = FetchPartition(partition=r.partition, fetch_offset=self._offset, partition_max_bytes=most_bytes)
        request = FetchRequest(
            max_wait_ms=FETCH_WAIT_MS,
            min_bytes=1,
            max_bytes=most_bytes,
            isolation_level=int(self.read_committed),
            topics=[FetchTopic(topic=r.topic, topic_id=self._topic_id, partitions=[partition])],
        )
        at_most = NEWEST_WITH_NAMES if self._topic_id == NO_UUID else ANY_VERSION
        version = connection.capabilities.version_of(FETCH, at_most)
        return connection.send(FETCH, request, version=version)

    def _answer(self, pending: Pending) -> PartitionData:
        response = pending.result()
        if response.error_code:
            raise error_of(response.error_code, self._name)
        if not response.responses:  # throttled: Kafka then leaves out the partitions
            time.sleep(min(response.throttle_time_ms, FETCH_WAIT_MS) / 1000)
            return PartitionData(high_watermark=-1)
        data: PartitionData = response.responses[0].partitions[0]
        if data.error_code:
            raise error_of(data.error_code, f"{self._name} at offset {self._offset}")
        return data

    def _recover(self, error: KafkaError) -> None:
        """Returns, after a pause, if the range should be requested again; raises what happened otherwise."""
        if error.code is ErrorCode.OFFSET_OUT_OF_RANGE:
            self._skip_lost(error)
            return
        if error.recovery is not Recovery.RETRY:
            raise error
        self.cluster.forget(Leader(self.wanted.topic, self.wanted.partition))
        if error.code in NOT_THERE and self._is_recreated():
            self._give_up(created_anew(self.wanted.topic, f"its offset {self._offset}"), error)
            return
        if not is_network(error):  # of the network the cluster says it
            self.cluster.outages.failed(self._name, error)
        self._retries = self._retries or (self.cluster.backoff(), self.cluster.deadline())
        if self.cluster.pause(*self._retries):
            return
        if error.code not in NOT_THERE:
            raise error
        self._give_up(self._unreadable(error), error)

    def _is_recreated(self) -> bool:
        """Whether the cluster has another topic under this name by now. Ids never come back: no retry helps."""
        try:
            found = self.cluster.topic(self.wanted.topic).topic_id
        except KafkaError:
            return False
        return NO_UUID not in (found, self._topic_id) and found != self._topic_id

    def _skip_lost(self, error: KafkaError) -> None:
        """Records of the range are gone: goes on behind them if that is allowed."""
        r = self.wanted
        if not self.fail_on_data_loss:
            first = earliest_offset(self.cluster, r.topic, r.partition)
            if first > self._offset:
                self._offset = min(first, r.end)
                return
        self._give_up(self._unreadable(error), error)

    def _unreadable(self, error: KafkaError) -> str:
        r = self.wanted
        return (
            f"{r.topic}-{r.partition}: offset {self._offset} of the range {r.start} to {r.end} cannot be read: "
            f"{error}. The records were deleted (retention, DeleteRecords, or the topic itself). Set "
            "failOnDataLoss=false to go on without them"
        )

    def _give_up(self, what: str, cause: KafkaError | None = None) -> None:
        """The rest of the range will not come."""
        if self.fail_on_data_loss:
            raise DataLossError(what) from cause
        log.warning("%s; going on without the rest of the range, as failOnDataLoss=false says", what)
        self._offset = self.wanted.end

    def _cut(self, table: Any) -> Any:
        """Drops what lies behind the range: a batch may reach beyond its end."""
        from semel.protocol.arrow_numbers import to_numpy

        offsets = table.column("offset")
        if not table.num_rows or offsets[table.num_rows - 1].as_py() < self.wanted.end:
            return table
        return table.slice(0, int(to_numpy(offsets).searchsorted(self.wanted.end)))

    def _nothing_came(self, data: PartitionData) -> None:
        """A response without a record. Where the log reaches beyond the range all the same, its last records have been
        compacted away; Kafka may return nothing for once although there is something, so several responses count. They
        do not count for what is in remote storage: while that is slow, every response is empty."""
        reaches_to = data.last_stable_offset if self.read_committed else data.high_watermark
        self._empty_responses = self._empty_responses + 1 if reaches_to >= self.wanted.end else 0
        self._stall_deadline = self._stall_deadline or Deadline(STALLED_S)
        if self._empty_responses == EMPTY_RESPONSES and not self._is_remote():
            self._offset = self.wanted.end
        elif self._stall_deadline.expired:
            r = self.wanted
            self._give_up(
                f"{r.topic}-{r.partition}: no record came from offset {self._offset} on for {STALLED_S:.0f} s, but "
                f"the range ends at {r.end}. Either a transaction is open there (see `semel txn list`), or the log was "
                "truncated, or its remote storage does not respond"
            )

    def _is_remote(self) -> bool:
        """Whether the leader has moved the next records to remote storage (KIP-405)."""
        self._empty_responses = 0
        r = self.wanted
        try:
            found = list_offsets(self.cluster, {(r.topic, r.partition): EARLIEST_LOCAL_OFFSET}, self.read_committed)
        except UnsupportedByBrokerError:  # older than remote storage
            return False
        return found[r.topic][r.partition] > self._offset
