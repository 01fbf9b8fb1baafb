"""A task reads its range to the end, however the log looks and whatever one response says."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from semel.client import cluster_calls
from semel.client.cluster import Cluster
from semel.client.settings import ClientSettings
from semel.protocol.batch import patch_offset
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.cluster import (
    METADATA,
    MetadataResponse,
    MetadataResponseBroker,
    MetadataResponsePartition,
    MetadataResponseTopic,
)
from semel.protocol.messages.records import (
    FETCH,
    LIST_OFFSETS,
    FetchableTopicResponse,
    FetchResponse,
    ListOffsetsPartitionResponse,
    ListOffsetsResponse,
    ListOffsetsTopicResponse,
    PartitionData,
)
from semel.protocol.rows import Record, encode_batch
from semel.spark import reading
from semel.spark.offsets import Range
from semel.spark.reading import DataLossError, RangeReader
from tests.support.fake_broker import scripted

TOPIC = "t"
FIRST_ID, SECOND_ID = bytes([1] * 16), bytes([2] * 16)


class Log:
    """A partition behind a scripted broker: batches at any offsets, and faults for the next fetches."""

    def __init__(self, *batches: tuple[int, int], end: int, start: int = 0) -> None:
        self.batches = [batch_at(first, count) for first, count in batches]
        self.start, self.end = start, end
        self.local_start: int | None = start  # before it, records are in remote storage; None: a broker without one
        self.topic_id = FIRST_ID
        self.exists = True
        self.faults: list[Callable[[], FetchResponse]] = []
        self.fetches = 0
        self.address = ""

    @contextmanager
    def served(self) -> Iterator[Cluster]:
        answers = {METADATA: self.metadata, FETCH: self.fetch, LIST_OFFSETS: self.list_offsets}
        with scripted(answers) as self.address:
            limits = {"retry.backoff.ms": 1, "request.timeout.ms": 2000, "default.api.timeout.ms": 2000}
            settings = ClientSettings.of({"bootstrap.servers": self.address, **limits})
            with Cluster(settings) as cluster:
                yield cluster

    def metadata(self, request: Any, version: int) -> MetadataResponse:
        host, port = self.address.split(":")
        topic = MetadataResponseTopic(name=TOPIC, topic_id=self.topic_id)
        if self.exists:
            topic.partitions = [MetadataResponsePartition(leader_epoch=0, replica_nodes=[0], isr_nodes=[0])]
        else:
            topic.error_code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        return MetadataResponse(brokers=[MetadataResponseBroker(0, host, int(port))], controller_id=0, topics=[topic])

    def fetch(self, request: Any, version: int) -> FetchResponse:
        self.fetches += 1
        if self.faults:
            return self.faults.pop(0)()
        asked = request.topics[0].partitions[0].fetch_offset
        if not self.exists:
            return failed(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        if version >= 13 and request.topics[0].topic_id != self.topic_id:
            return failed(ErrorCode.UNKNOWN_TOPIC_ID)
        if not self.start <= asked <= self.end:
            return failed(ErrorCode.OFFSET_OUT_OF_RANGE)
        return self.found(b"".join(data for last, data in self.batches if last >= asked))

    def found(self, records: bytes) -> FetchResponse:
        return fetched(PartitionData(high_watermark=self.end, last_stable_offset=self.end, records=records))

    def list_offsets(self, request: Any, version: int) -> ListOffsetsResponse:
        asked = request.topics[0].partitions[0].timestamp
        offset = {-4: self.local_start, -2: self.start}.get(asked, self.end)
        if offset is None:
            found = ListOffsetsPartitionResponse(error_code=ErrorCode.UNSUPPORTED_VERSION)
        else:
            found = ListOffsetsPartitionResponse(offset=offset)
        return ListOffsetsResponse(topics=[ListOffsetsTopicResponse(name=TOPIC, partitions=[found])])


def batch_at(first: int, count: int) -> tuple[int, bytes]:
    batch = bytearray(encode_batch([Record(i, 0, None, b"v%d" % (first + i)) for i in range(count)]))
    patch_offset(batch, first, 0)
    return first + count - 1, bytes(batch)


def fetched(data: PartitionData) -> FetchResponse:
    return FetchResponse(responses=[FetchableTopicResponse(topic=TOPIC, topic_id=FIRST_ID, partitions=[data])])


def failed(code: ErrorCode) -> FetchResponse:
    return fetched(PartitionData(error_code=code, high_watermark=-1, records=b""))


def read(cluster: Cluster, start: int, end: int, *, fail_on_data_loss: bool = True) -> list[int]:
    """The offsets of the records that a range brings."""
    wanted = Range(TOPIC, 0, start, end)
    reader = RangeReader(cluster, wanted, read_committed=True, fail_on_data_loss=fail_on_data_loss)
    return [offset for table in reader.tables(headers=False) for offset in table.column("offset").to_pylist()]


@pytest.fixture(autouse=True)
def short_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the usual limits: no test depends on them."""
    monkeypatch.setattr(reading, "STALLED_S", 2.0)
    monkeypatch.setattr(reading, "FETCH_WAIT_MS", 10)


# --- compaction ---


def test_a_range_that_ends_inside_a_compaction_gap_is_read_to_its_end() -> None:
    log = Log((0, 10), (50, 10), end=60)
    with log.served() as cluster:
        assert read(cluster, 0, 30) == list(range(10))
        assert read(cluster, 20, 30) == []  # the whole range lies in the gap
        assert read(cluster, 30, 60) == list(range(50, 60))


def test_a_range_that_ends_in_a_gap_at_the_end_of_the_log_is_read_to_its_end() -> None:
    log = Log((0, 10), end=40)  # the last records of a closed segment were compacted away
    with log.served() as cluster:
        assert read(cluster, 0, 40) == list(range(10))
        assert read(cluster, 0, 30) == list(range(10))


def test_one_empty_response_is_no_gap() -> None:
    log = Log((0, 10), end=10)
    log.faults = [lambda: log.found(b"")]
    with log.served() as cluster:
        assert read(cluster, 0, 10) == list(range(10))
    assert not log.faults


def test_a_gap_at_the_end_of_the_log_of_a_broker_without_remote_storage() -> None:
    log = Log((0, 10), end=40)
    log.local_start = None
    with log.served() as cluster:
        assert read(cluster, 0, 40) == list(range(10))


def test_a_slow_remote_storage_is_no_gap() -> None:
    log = Log((0, 10), (10, 10), end=20)
    log.local_start = 10
    log.faults = [lambda: log.found(b"")] * 10  # remote.fetch.max.wait.ms was too short each time
    with log.served() as cluster:
        assert read(cluster, 0, 20) == list(range(20))
    assert not log.faults


def test_a_remote_storage_that_does_not_respond_is_a_loss() -> None:
    log = Log(end=20)
    log.local_start = 20
    with log.served() as cluster, pytest.raises(DataLossError, match="remote storage"):
        read(cluster, 0, 20)


def test_a_log_that_ends_before_the_range_does_is_a_loss_not_a_gap() -> None:
    log = Log((0, 10), end=20)
    with log.served() as cluster:
        with pytest.raises(DataLossError, match="range ends at 30"):
            read(cluster, 0, 30)
        assert read(cluster, 0, 30, fail_on_data_loss=False) == list(range(10))


def test_time_that_the_query_spends_on_rows_is_not_taken_for_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "STALLED_S", 0.5)
    log = Log((0, 10), (10, 10), end=20)
    log.faults = [lambda: log.found(log.batches[0][1]), lambda: log.found(b"")]
    with log.served() as cluster:
        reader = RangeReader(cluster, Range(TOPIC, 0, 0, 20), read_committed=True, fail_on_data_loss=True)
        rows = 0
        for table in reader.tables(headers=False):
            rows += table.num_rows
            time.sleep(1.0)  # longer than the limit
    assert rows == 20
    assert not log.faults


# --- responses that pass ---


@pytest.mark.parametrize("fail_on_data_loss", [True, False])
@pytest.mark.parametrize("code", [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.NOT_LEADER_OR_FOLLOWER])
def test_a_retriable_error_code_loses_nothing_of_the_range(code: ErrorCode, fail_on_data_loss: bool) -> None:
    log = Log((0, 10), (10, 10), end=20)
    log.faults = [lambda: failed(code), lambda: log.found(log.batches[0][1]), lambda: failed(code)]
    with log.served() as cluster:
        assert read(cluster, 0, 20, fail_on_data_loss=fail_on_data_loss) == list(range(20))
    assert not log.faults


def test_a_throttled_response_without_partitions_is_asked_for_again() -> None:
    log = Log((0, 10), end=10)
    log.faults = [lambda: FetchResponse(throttle_time_ms=1)]
    with log.served() as cluster:
        assert read(cluster, 0, 10) == list(range(10))
    assert not log.faults


def test_retries_pause_between_each_other() -> None:
    log = Log((0, 10), end=10)
    log.exists = False
    with log.served() as cluster, pytest.raises(DataLossError):
        read(cluster, 0, 10)
    assert log.fetches < 300


def test_a_topic_that_stays_away_is_a_loss(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(cluster_calls, "FIRST_S", 0.0)
    log = Log((0, 10), end=10)
    log.exists = False
    with log.served() as cluster:
        with pytest.raises(DataLossError, match="failOnDataLoss=false"):
            read(cluster, 0, 10)
        assert "UNKNOWN_TOPIC_OR_PARTITION" in caplog.text  # said before the timeout passes
        assert read(cluster, 0, 10, fail_on_data_loss=False) == []


# --- a topic that was created anew ---


def read_by_id(cluster: Cluster, *, fail_on_data_loss: bool) -> list[int]:
    wanted = Range(TOPIC, 0, 0, 20, str(uuid.UUID(bytes=FIRST_ID)))
    reader = RangeReader(cluster, wanted, read_committed=True, fail_on_data_loss=fail_on_data_loss)
    return [offset for table in reader.tables(headers=False) for offset in table.column("offset").to_pylist()]


def test_a_range_of_a_topic_that_was_created_anew_is_a_loss() -> None:
    log = Log((0, 10), (10, 10), end=20)
    log.topic_id = SECOND_ID
    with log.served() as cluster:
        with pytest.raises(DataLossError, match="created anew"):
            read_by_id(cluster, fail_on_data_loss=True)
        assert read_by_id(cluster, fail_on_data_loss=False) == []


def test_a_topic_id_that_the_leader_does_not_know_yet_is_asked_for_again() -> None:
    log = Log((0, 10), (10, 10), end=20)
    log.faults = [lambda: failed(ErrorCode.UNKNOWN_TOPIC_ID)]
    with log.served() as cluster:
        assert read_by_id(cluster, fail_on_data_loss=True) == list(range(20))
    assert not log.faults
