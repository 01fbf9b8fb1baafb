"""Reads a range of one partition as Arrow batches: what a task of the source does.

While the records of one answer are decoded and handed to Spark, the next fetch is already on its way. Memory: two
answers of at most FETCH_BYTES (or one batch, if that is larger) and the columns of one of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

from semel.client.cluster import Cluster, Leader
from semel.client.connection import Connection
from semel.client.errors import KafkaError, error_of
from semel.client.wire import Pending
from semel.protocol.errors import ErrorCode, Recovery
from semel.protocol.messages.fetch import FETCH, FetchPartition, FetchRequest, FetchTopic, PartitionData
from semel.spark.fetch_sizes import TopicSizes, needed
from semel.spark.planning import Range
from semel.spark.positions import earliest_offset
from semel.spark.stages import DECODE, stage
from semel.spark.stages import FETCH as FETCHING

log = logging.getLogger("semel.spark")

FETCH_BYTES = 4 * 1024 * 1024
FETCH_WAIT_MS = 500
NEWEST_WITH_NAMES = 12  # later versions of Fetch name topics by id
STALLED_S = 60.0  # a range that brings nothing for so long is an error, not a wait

_sizes = TopicSizes()  # for the next ranges of this worker


class DataLossError(RuntimeError):
    """Records that a query has not read yet are gone."""


class RangeReader:
    """Fetches one range, answer by answer."""

    def __init__(
        self,
        cluster: Cluster,
        wanted: Range,
        *,
        read_committed: bool,
        fail_on_data_loss: bool,
        fetch_bytes: int = FETCH_BYTES,
    ) -> None:
        self._cluster = cluster
        self._fetch_bytes = fetch_bytes
        self._range = wanted
        self._read_committed = read_committed
        self._fail_on_data_loss = fail_on_data_loss
        self._position = wanted.start

    def tables(self, *, headers: bool, views: bool = False) -> Iterator[Any]:
        """Tables of `offset`, `timestamp`, `timestamp_type`, `key`, `value` (and `headers`), in order of offset.

        With `views`, keys and values are of type binary_view and not copied out of the answer.
        """
        from semel.protocol.columns_decode import decode_record_set

        for start, data, records in self._answers():
            aborted = [(a.producer_id, a.first_offset) for a in data.aborted_transactions or []]
            with stage(DECODE):
                decoded = decode_record_set(
                    records,
                    start_offset=start,
                    aborted=aborted if self._read_committed else None,
                    headers=headers,
                    views=views,
                )
                table = self._cut(decoded.table)
            if table.num_rows:
                yield table

    def _answers(self) -> Iterator[tuple[int, PartitionData, memoryview]]:
        """(offset asked for, answer, the records of it that are needed) until the range is covered."""
        waiting: Pending | None = None
        connection: Connection | None = None
        last_progress_s = time.monotonic()
        while self._position < self._range.end:
            try:
                if waiting is None or connection is None:
                    connection = self._connect()
                    waiting = self._ask(connection)
                with stage(FETCHING):
                    connection.wait(waiting)
                    data = self._answer(waiting)
            except KafkaError as error:
                waiting = None
                self._recover(error, last_progress_s)
                continue
            found = needed(as_view(data.records), self._position, self._range.end)
            start, self._position, waiting = self._position, found.next_offset, None
            if self._position > start:
                _sizes.learn(self._range.topic, found)
                last_progress_s = time.monotonic()
                waiting = self._ask(connection) if self._position < self._range.end else None
                yield start, data, found.records
            elif time.monotonic() - last_progress_s > STALLED_S:
                self._give_up(self._nothing_came())

    def _connect(self) -> Connection:
        r, deadline = self._range, self._cluster.deadline()
        target = Leader(r.topic, r.partition)
        return self._cluster.patiently(
            lambda: self._cluster.connect(target, deadline), f"reading {r.topic}-{r.partition}", deadline, target
        )

    def _ask(self, connection: Connection) -> Pending:
        r = self._range
        most_bytes = _sizes.bytes_for(r.topic, r.end - self._position, self._fetch_bytes)
        partition = FetchPartition(partition=r.partition, fetch_offset=self._position, partition_max_bytes=most_bytes)
        request = FetchRequest(
            max_wait_ms=FETCH_WAIT_MS,
            min_bytes=1,
            max_bytes=most_bytes,
            isolation_level=int(self._read_committed),
            topics=[FetchTopic(topic=r.topic, partitions=[partition])],
        )
        version = connection.capabilities.version_of(FETCH, at_most=NEWEST_WITH_NAMES)
        return connection.send(FETCH, request, version=version)

    def _answer(self, pending: Pending) -> PartitionData:
        answer = pending.result()
        r = self._range
        if answer.error_code:
            raise error_of(answer.error_code, f"reading {r.topic}-{r.partition}")
        data: PartitionData = answer.responses[0].partitions[0]
        if data.error_code:
            raise error_of(data.error_code, f"reading {r.topic}-{r.partition} at offset {self._position}")
        return data

    def _recover(self, error: KafkaError, last_progress_s: float) -> None:
        """Returns if the range should be asked for again; raises what happened otherwise."""
        r = self._range
        if error.code in (ErrorCode.OFFSET_OUT_OF_RANGE, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION):
            self._skip_lost(error)
            return
        if error.recovery is not Recovery.RETRY or time.monotonic() - last_progress_s > STALLED_S:
            raise error
        self._cluster.forget(Leader(r.topic, r.partition))

    def _skip_lost(self, error: KafkaError) -> None:
        """Records of the range are gone: goes on behind them if that is allowed."""
        r = self._range
        if not self._fail_on_data_loss and error.code is ErrorCode.OFFSET_OUT_OF_RANGE:
            first = earliest_offset(self._cluster, r.topic, r.partition)
            if first > self._position:
                self._position = min(first, r.end)
                return
        self._give_up(
            f"{r.topic}-{r.partition}: offset {self._position} of the range {r.start} to {r.end} cannot be read: "
            f"{error}. The records were deleted (retention, DeleteRecords, or the topic itself). Set "
            "failOnDataLoss=false to go on without them",
            error,
        )

    def _give_up(self, what: str, cause: KafkaError | None = None) -> None:
        """The rest of the range will not come."""
        if self._fail_on_data_loss:
            raise DataLossError(what) from cause
        log.warning("%s; going on without the rest of the range, as failOnDataLoss=false asks", what)
        self._position = self._range.end

    def _cut(self, table: Any) -> Any:
        """Drops what lies behind the range: a batch may reach beyond its end."""
        offsets = table.column("offset")
        if not table.num_rows or offsets[table.num_rows - 1].as_py() < self._range.end:
            return table
        return table.slice(0, int(offsets.to_numpy().searchsorted(self._range.end)))

    def _nothing_came(self) -> str:
        r = self._range
        return (
            f"{r.topic}-{r.partition}: no record came from offset {self._position} on for {STALLED_S:.0f} s, but the "
            f"range ends at {r.end}. Either a transaction is open there (see `semel txn list`), or it was truncated"
        )


def as_view(records: Any) -> memoryview:
    """The record set of an answer: null where there is nothing."""
    return memoryview(b"" if records is None else records)
