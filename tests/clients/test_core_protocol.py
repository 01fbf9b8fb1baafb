"""Produce, fetch, offsets, topics and settings over the bare protocol: what Apache Kafka answers, semel answers."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from semel.protocol.batch import HEADER_SIZE, LOG_OVERHEAD, iter_headers, seal_crc
from semel.protocol.compression import Compression
from semel.protocol.errors import ErrorCode as E
from semel.protocol.messages.cluster import (
    API_VERSIONS,
    DESCRIBE_TOPIC_PARTITIONS,
    METADATA,
    ApiVersionsRequest,
    Cursor,
    DescribeTopicPartitionsRequest,
    MetadataRequest,
    MetadataRequestTopic,
    TopicRequest,
)
from semel.protocol.messages.configs import (
    DESCRIBE_CONFIGS,
    INCREMENTAL_ALTER_CONFIGS,
    DescribeConfigsRequest,
    DescribeConfigsResource,
    IncrementalAlterConfigsRequest,
    IncrementalConfig,
    IncrementalConfigsResource,
)
from semel.protocol.messages.records import (
    DELETE_RECORDS,
    FETCH,
    LIST_OFFSETS,
    OFFSET_FOR_LEADER_EPOCH,
    PRODUCE,
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsTopic,
    FetchPartition,
    FetchRequest,
    FetchTopic,
    ForgottenTopic,
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsTopic,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderPartition,
    OffsetForLeaderTopic,
    PartitionProduceData,
    ProduceRequest,
    TopicProduceData,
)
from semel.protocol.messages.topics import (
    CREATE_PARTITIONS,
    CREATE_TOPICS,
    DELETE_TOPICS,
    CreatableReplicaAssignment,
    CreatableTopic,
    CreatableTopicConfig,
    CreatePartitionsAssignment,
    CreatePartitionsRequest,
    CreatePartitionsTopic,
    CreateTopicsRequest,
    DeleteTopicsRequest,
    DeleteTopicState,
)
from semel.protocol.messages.transactions import DESCRIBE_PRODUCERS, DescribeProducersRequest, ProducersTopic
from semel.protocol.rows import Record, encode_batch
from semel.protocol.schema import NO_UUID
from tests.support.broker import Cluster
from tests.support.direct import DirectClient
from tests.support.waiting import STALL_S, eventually

TOPIC, BROKER = 2, 4
SET, DELETE, APPEND, SUBTRACT = 0, 1, 2, 3


@pytest.fixture
def client(cluster: Cluster) -> Iterator[DirectClient]:
    with DirectClient(cluster.bootstrap) as client:
        yield client


@pytest.fixture
def topic(cluster: Cluster, client: DirectClient) -> str:
    name = cluster.unique("core")
    client.create_topic(name, 2)
    wait_for_topic(client, name)
    return name


def wait_for_topic(client: DirectClient, name: str) -> bytes:
    """Kafka's brokers learn of a topic a moment after its creation was answered."""

    def is_there(found: Any) -> bool:
        indexes = [part.partition_index for part in found.partitions]
        codes = [list_offset(client, name, -1, partition=index).error_code for index in indexes]
        return found.error_code == 0 and bool(codes) and not any(codes)

    topic_id: bytes = eventually(lambda: metadata(client, name, create=False), is_there).topic_id
    return topic_id


def metadata(client: DirectClient, name: str | None, *, create: bool, topic_id: bytes = NO_UUID) -> Any:
    request = MetadataRequest([MetadataRequestTopic(topic_id, name)], allow_auto_topic_creation=create)
    return client.call(METADATA, request, 12).topics[0]


def batch(*values: bytes, at_ms: int | None = None, **options: Any) -> bytes:
    at_ms = int(time.time() * 1000) if at_ms is None else at_ms
    return bytes(encode_batch([Record(i, at_ms + i, None, value) for i, value in enumerate(values)], **options))


def produce(
    client: DirectClient,
    name: str,
    records: bytes | None,
    *,
    version: int = 9,
    acks: int = -1,
    partition: int = 0,
    topic_id: bytes = NO_UUID,
) -> Any:
    data = TopicProduceData(name, topic_id, [PartitionProduceData(partition, records)])
    answer = client.call(PRODUCE, ProduceRequest(None, acks, 5000, [data]), version)
    return answer.responses[0].partition_responses[0]


def fetch_request(
    name: str,
    offset: int = 0,
    *,
    partition: int = 0,
    topic_id: bytes = NO_UUID,
    max_wait_ms: int = 100,
    min_bytes: int = 1,
    max_bytes: int = 1 << 20,
    epoch: int = -1,
    session: tuple[int, int] = (0, -1),
) -> FetchRequest:
    ask = FetchPartition(partition, epoch, offset, partition_max_bytes=max_bytes)
    return FetchRequest(
        max_wait_ms=max_wait_ms,
        min_bytes=min_bytes,
        session_id=session[0],
        session_epoch=session[1],
        topics=[FetchTopic(name, topic_id, [ask])],
    )


def fetch(client: DirectClient, name: str, offset: int = 0, *, version: int = 12, **options: Any) -> Any:
    return client.call(FETCH, fetch_request(name, offset, **options), version).responses[0].partitions[0]


# -- produce -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("version", range(3, 13))
def test_produce_gives_offsets_in_every_version(client: DirectClient, topic: str, version: int) -> None:
    assert produce(client, topic, batch(b"a", b"b"), version=version).base_offset == 0
    second = produce(client, topic, batch(b"c"), version=version)
    assert (second.error_code, second.base_offset, second.log_append_time_ms) == (0, 2, -1)


def test_produce_by_topic_id(client: DirectClient, topic: str) -> None:
    topic_id = wait_for_topic(client, topic)
    assert produce(client, "", batch(b"a"), version=13, topic_id=topic_id).error_code == E.NONE
    assert produce(client, "", batch(b"a"), version=13, topic_id=b"9" * 16).error_code == E.UNKNOWN_TOPIC_ID


def test_produce_refuses_what_kafka_refuses(client: DirectClient, topic: str) -> None:
    whole = batch(b"a")
    bad_crc = bytearray(whole)
    bad_crc[-1] ^= 1
    old_format = bytearray(whole)
    old_format[16] = 1
    far_future = int(time.time() * 1000) + 10**8
    assert produce(client, topic, bytes(bad_crc)).error_code == E.CORRUPT_MESSAGE
    assert produce(client, topic, bytes(old_format)).error_code == E.INVALID_RECORD
    assert produce(client, topic, whole * 2).error_code == E.INVALID_RECORD
    assert produce(client, topic, b"").error_code == E.INVALID_RECORD
    assert produce(client, topic, whole[:-3]).error_code == E.INVALID_RECORD
    assert produce(client, topic, b"abc").error_code == E.INVALID_RECORD
    assert produce(client, topic, batch(b"a", control=True)).error_code == E.INVALID_RECORD
    assert produce(client, topic, batch(b"a", at_ms=far_future)).error_code == E.INVALID_TIMESTAMP
    assert produce(client, topic, batch(b"a" * 1_100_000)).error_code == E.MESSAGE_TOO_LARGE
    assert produce(client, topic, whole, acks=5).error_code == E.INVALID_REQUIRED_ACKS
    assert produce(client, topic, whole, partition=9).error_code == E.UNKNOWN_TOPIC_OR_PARTITION
    assert produce(client, topic + "-not", whole).error_code == E.UNKNOWN_TOPIC_OR_PARTITION
    transactional = batch(b"a", transactional=True, producer_id=1, producer_epoch=0, base_sequence=0)
    assert produce(client, topic, transactional).error_code == E.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    assert produce(client, topic, whole).base_offset == 0, "a refused batch left something behind"


def test_records_that_are_not_there_are_not_stored(client: DirectClient, topic: str) -> None:
    """The number of records in a header is a claim: a batch of 69 bytes must not take 2^31 offsets."""
    for count, body in ((2**31 - 1, bytes(8)), (1000, bytes(range(32))), (2, None), (1000, None)):
        claim = bytearray(batch(b"a"))
        if body is not None:
            claim[HEADER_SIZE:] = body
        struct.pack_into(">i", claim, 8, len(claim) - LOG_OVERHEAD)
        struct.pack_into(">i", claim, 23, count - 1)
        struct.pack_into(">i", claim, 57, count)
        seal_crc(claim)
        assert produce(client, topic, bytes(claim)).error_code == E.INVALID_RECORD, count
    assert list_offset(client, topic, -1).offset == 0


def test_a_batch_that_takes_long_to_check_keeps_its_place(client: DirectClient, topic: str) -> None:
    """Pipelined requests of one producer: the second must not be appended before the first, whatever that one holds."""
    _, producer_id, epoch = client.init_producer_id()
    now_ms = int(time.time() * 1000)
    records = [Record(number, now_ms, None, bytes(50_000)) for number in range(100)]
    first = encode_batch(records, producer_id=producer_id, producer_epoch=epoch, base_sequence=0, compression=4)
    rest = [
        batch(b"x", producer_id=producer_id, producer_epoch=epoch, base_sequence=100 + number) for number in range(4)
    ]
    for data in (bytes(first), *rest):
        sent = TopicProduceData(topic, NO_UUID, [PartitionProduceData(0, data)])
        client.send(PRODUCE, ProduceRequest(None, -1, 5000, [sent]), 9)
    found = [client.receive(PRODUCE, 9).responses[0].partition_responses[0] for _ in range(5)]
    assert [(each.error_code, each.base_offset) for each in found] == [(0, 0), (0, 100), (0, 101), (0, 102), (0, 103)]


def test_settings_without_effect_are_accepted_kept_and_shown(
    cluster: Cluster, client: DirectClient, topic: str
) -> None:
    node = "1"
    wanted = {(4, node, "background.threads"): "12", (4, node, "sasl.kerberos.min.time.before.relogin"): "61000"}
    wanted[2, topic, "preallocate"] = "true"
    for (kind, name, setting), value in wanted.items():
        change = IncrementalConfigsResource(kind, name, [IncrementalConfig(setting, 0, value)])
        request = IncrementalAlterConfigsRequest(resources=[change])
        assert client.call(INCREMENTAL_ALTER_CONFIGS, request, 1).responses[0].error_code == E.NONE, setting

        def shown(kind: int = kind, name: str = name, setting: str = setting) -> str | None:
            asked = DescribeConfigsRequest([DescribeConfigsResource(kind, name, [setting])])
            (found,) = client.call(DESCRIBE_CONFIGS, asked, 4).results[0].configs
            return found.value

        eventually(shown, lambda text, value=value: text == value)
        undo = IncrementalConfigsResource(kind, name, [IncrementalConfig(setting, 1, None)])
        client.call(INCREMENTAL_ALTER_CONFIGS, IncrementalAlterConfigsRequest(resources=[undo]), 1)


def test_batches_are_stored_in_the_compression_of_the_topic(cluster: Cluster, client: DirectClient) -> None:
    for wanted, stored in (("zstd", 4), ("uncompressed", 0)):
        name = cluster.unique(wanted)
        client.create_topic(name, 1, compression_type=wanted)
        wait_for_topic(client, name)
        now_ms = int(time.time() * 1000)
        records = [Record(number, now_ms, None, bytes(1000)) for number in range(200)]
        for compression in (0, 1, 4):
            assert produce(client, name, bytes(encode_batch(records, compression=compression))).error_code == E.NONE
        headers = [header for _, header in iter_headers(bytes(client.fetch(name).records or b""))]
        assert [(each.compression, each.base_offset) for each in headers] == [(stored, 0), (stored, 200), (stored, 400)]


@pytest.mark.parametrize("acks", [1, -1])
def test_what_was_acknowledged_is_visible_at_once(client: DirectClient, topic: str, acks: int) -> None:
    for number in range(20):
        assert produce(client, topic, batch(b"a"), acks=acks).base_offset == number
        assert list_offset(client, topic, -1).offset == number + 1


def test_records_without_key_are_named_one_by_one_by_a_compacted_topic(cluster: Cluster, client: DirectClient) -> None:
    name = cluster.unique("compacted")
    client.create_topic(name, 1, cleanup_policy="compact")
    wait_for_topic(client, name)
    now_ms = int(time.time() * 1000)
    records = [Record(0, now_ms, None, b"v"), Record(1, now_ms, b"k", b"v"), Record(2, now_ms, None, b"v")]
    refused = produce(client, name, bytes(encode_batch(records)))
    assert refused.error_code == E.INVALID_RECORD
    message = f"Compacted topic cannot accept message without key in topic partition {name}-0"
    found = [(error.batch_index, error.batch_index_error_message) for error in refused.record_errors]
    assert found == [(0, message), (2, message)]


def test_records_out_of_the_range_of_time_are_named_one_by_one(cluster: Cluster, client: DirectClient) -> None:
    """Also where another record of the batch has no timestamp, or an error of another kind."""
    name = cluster.unique("timed")
    client.create_topic(name, 1, cleanup_policy="compact", message_timestamp_before_max_ms="60000")
    wait_for_topic(client, name)
    now_ms, old_ms, new_ms = (int(time.time() * 1000) + offset_ms for offset_ms in (0, -600_000, 36_000_000))
    wanted = [(now_ms, b"k"), (old_ms, b"k"), (-1, b"k"), (old_ms, None), (new_ms, b"k"), (now_ms, b"k")]

    def errors_of(rows: list[int]) -> tuple[int, list[tuple[int, str]]]:
        records = [Record(number, wanted[row][0], wanted[row][1], b"v") for number, row in enumerate(rows)]
        refused = produce(client, name, bytes(encode_batch(records)))
        return refused.error_code, [
            (each.batch_index, each.batch_index_error_message) for each in refused.record_errors
        ]

    code, errors = errors_of([0, 1, 2, 3, 4, 5])
    assert code == E.INVALID_TIMESTAMP
    assert [number for number, _ in errors] == [1, 3, 4]
    assert errors[0][1].startswith(f"Timestamp {old_ms} of message with offset 1 is out of range. The timestamp should")
    assert errors[1][1] == f"Compacted topic cannot accept message without key in topic partition {name}-0"
    assert errors[2][1].startswith(f"Timestamp {new_ms} of message with offset 4 is out of range.")
    code, errors = errors_of([2, 1, 0])
    assert (code, [number for number, _ in errors]) == (E.INVALID_TIMESTAMP, [1])
    assert errors_of([3]) == (
        E.INVALID_RECORD,
        [(0, f"Compacted topic cannot accept message without key in topic partition {name}-0")],
    )
    assert errors_of([2, 0]) == (E.NONE, [])


def test_produce_without_acks_is_not_answered_and_the_next_answer_is_the_next_requests(
    client: DirectClient, topic: str
) -> None:
    data = TopicProduceData(topic, NO_UUID, [PartitionProduceData(0, batch(b"silent"))])
    client.send(PRODUCE, ProduceRequest(None, 0, 5000, [data]), 9)
    assert produce(client, topic, batch(b"loud")).base_offset == 1


def test_pipelined_requests_are_answered_in_order(client: DirectClient, topic: str) -> None:
    for number in range(20):
        data = TopicProduceData(topic, NO_UUID, [PartitionProduceData(0, batch(b"%d" % number))])
        client.send(PRODUCE, ProduceRequest(None, -1, 5000, [data]), 9)
    client.send(METADATA, MetadataRequest([MetadataRequestTopic(name=topic)]), 9)
    client.send(FETCH, fetch_request(topic), 12)
    offsets = [client.receive(PRODUCE, 9).responses[0].partition_responses[0].base_offset for _ in range(20)]
    assert offsets == list(range(20))
    assert client.receive(METADATA, 9).topics[0].name == topic
    assert client.receive(FETCH, 12).responses[0].partitions[0].high_watermark == 20


# -- fetch -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("version", range(4, 13))
def test_fetch_returns_what_was_produced_in_every_version(client: DirectClient, topic: str, version: int) -> None:
    sent = batch(b"a", b"b")
    produce(client, topic, sent)
    found = fetch(client, topic, version=version)
    assert (found.error_code, found.high_watermark, found.last_stable_offset) == (0, 2, 2)
    # the broker fills in the offset and the leader epoch; the rest is the producer's, byte for byte
    assert bytes(found.records)[16:] == sent[16:]


@pytest.mark.parametrize("version", range(13, 19))
def test_fetch_by_topic_id(client: DirectClient, topic: str, version: int) -> None:
    produce(client, topic, batch(b"a"))
    found = fetch(client, "", version=version, topic_id=wait_for_topic(client, topic))
    assert (found.error_code, found.high_watermark) == (0, 1)
    assert fetch(client, "", version=version, topic_id=b"8" * 16).error_code == E.UNKNOWN_TOPIC_ID


def test_fetch_starts_with_the_batch_that_holds_the_offset(client: DirectClient, topic: str) -> None:
    produce(client, topic, batch(b"a", b"b"))
    produce(client, topic, batch(b"c", b"d"))
    found = fetch(client, topic, 3)
    assert [header.base_offset for _, header in iter_headers(found.records)] == [2]


def test_fetch_gives_at_least_one_batch_however_small_the_limit(client: DirectClient, topic: str) -> None:
    produce(client, topic, batch(b"a" * 1000))
    produce(client, topic, batch(b"b" * 1000))
    found = fetch(client, topic, max_bytes=1)
    assert [header.base_offset for _, header in iter_headers(found.records)] == [0]


def test_fetch_at_the_end_is_empty_and_beyond_it_is_out_of_range(client: DirectClient, topic: str) -> None:
    produce(client, topic, batch(b"a"))
    at_end = fetch(client, topic, 1)
    assert (at_end.error_code, bytes(at_end.records), at_end.high_watermark) == (0, b"", 1)
    assert fetch(client, topic, 2).error_code == E.OFFSET_OUT_OF_RANGE
    assert fetch(client, topic, -1).error_code == E.OFFSET_OUT_OF_RANGE


def test_fetch_refuses_unknown_partitions_and_wrong_epochs(client: DirectClient, topic: str) -> None:
    assert fetch(client, topic + "-not").error_code == E.UNKNOWN_TOPIC_OR_PARTITION
    assert fetch(client, topic, partition=9).error_code == E.UNKNOWN_TOPIC_OR_PARTITION
    assert fetch(client, topic, epoch=0).error_code == E.NONE
    assert fetch(client, topic, epoch=5).error_code == E.UNKNOWN_LEADER_EPOCH


def test_fetch_waits_for_records_and_wakes_when_they_come(cluster: Cluster, client: DirectClient, topic: str) -> None:
    client.send(FETCH, fetch_request(topic, max_wait_ms=60_000), 12)
    with DirectClient(cluster.bootstrap) as writer:
        started_s = time.monotonic()
        produce(writer, topic, batch(b"late"))
    found = client.receive(FETCH, 12).responses[0].partitions[0]
    assert len(found.records) > 0
    assert time.monotonic() - started_s < STALL_S, "only the timeout ended the wait"


def test_a_fetch_that_comes_while_its_records_are_on_their_way_to_the_disk_is_woken(
    cluster: Cluster, client: DirectClient, topic: str
) -> None:
    """Ping pong: each round a record is written and asked for at the same moment."""
    with DirectClient(cluster.bootstrap) as writer:
        for offset in range(50):
            data = TopicProduceData(topic, NO_UUID, [PartitionProduceData(0, batch(b"ping"))])
            writer.send(PRODUCE, ProduceRequest(None, -1, 5000, [data]), 9)
            started_s = time.monotonic()
            found = fetch(client, topic, offset, max_wait_ms=60_000)
            assert time.monotonic() - started_s < STALL_S, "nobody woke it"
            assert [header.base_offset for _, header in iter_headers(found.records)] == [offset]
            writer.receive(PRODUCE, 9)


def test_fetch_waits_until_there_is_enough(cluster: Cluster, client: DirectClient, topic: str) -> None:
    client.send(FETCH, fetch_request(topic, max_wait_ms=60_000, min_bytes=3000), 12)
    with DirectClient(cluster.bootstrap) as writer:
        for _ in range(4):
            produce(writer, topic, batch(b"x" * 1000))
    found = client.receive(FETCH, 12).responses[0].partitions[0]
    assert len(found.records) >= 3000


@pytest.mark.parametrize(
    "limit",
    [
        pytest.param({"response_bytes": 20_000}, id="larger than a response"),
        pytest.param({"response_bytes": 50 << 20}, id="larger than a segment"),
    ],
)
def test_fetch_waits_for_no_more_than_a_response_can_take(
    cluster: Cluster, client: DirectClient, limit: dict[str, int]
) -> None:
    """Both are far below `min_bytes`, and there is as much as that."""
    topic = cluster.unique("t")
    client.create_topic(topic, 1, segment_bytes=str(1 << 20))
    wait_for_topic(client, topic)
    for _ in range(5):
        assert produce(client, topic, batch(os.urandom(500_000))).error_code == E.NONE
    request = fetch_request(topic, max_wait_ms=60_000, min_bytes=2 << 20, max_bytes=50 << 20)
    request.max_bytes = limit["response_bytes"]
    started_s = time.monotonic()
    found = client.call(FETCH, request, 12).responses[0].partitions[0]
    assert found.records
    assert time.monotonic() - started_s < STALL_S, "only the timeout ended the wait"


def test_fetch_that_waits_is_answered_when_its_topic_is_deleted(
    cluster: Cluster, client: DirectClient, topic: str
) -> None:
    client.send(FETCH, fetch_request(topic, max_wait_ms=60_000), 12)
    started_s = time.monotonic()
    with DirectClient(cluster.bootstrap) as other:
        other.call(DELETE_TOPICS, DeleteTopicsRequest([DeleteTopicState(topic)], timeout_ms=5000), 6)
    code = client.receive(FETCH, 12).responses[0].partitions[0].error_code
    assert code in (E.UNKNOWN_TOPIC_OR_PARTITION, E.NOT_LEADER_OR_FOLLOWER)
    assert time.monotonic() - started_s < STALL_S, "only the timeout ended the wait"


def test_fetch_answers_when_its_time_is_over(client: DirectClient, topic: str) -> None:
    started_s = time.monotonic()
    assert fetch(client, topic, max_wait_ms=300, min_bytes=1).error_code == E.NONE
    assert 0.25 <= time.monotonic() - started_s < STALL_S


# -- fetch sessions (KIP-227) ------------------------------------------------------------------------------------------
def test_a_session_tells_only_what_changed(client: DirectClient, topic: str) -> None:
    produce(client, topic, batch(b"a"))
    first = client.call(FETCH, fetch_request(topic, session=(0, 0)), 12)
    session_id = first.session_id
    assert session_id > 0
    assert first.responses[0].partitions[0].high_watermark == 1
    move = fetch_request(topic, 1, session=(session_id, 1))
    assert client.call(FETCH, move, 12).responses == [], "nothing changed"
    produce(client, topic, batch(b"b"))
    nothing_new = FetchRequest(max_wait_ms=100, min_bytes=1, session_id=session_id, session_epoch=2)
    changed = client.call(FETCH, nothing_new, 12)
    assert [h.base_offset for _, h in iter_headers(changed.responses[0].partitions[0].records)] == [1]
    assert changed.session_id == session_id


def test_a_session_out_of_step_or_unknown_is_refused(client: DirectClient, topic: str) -> None:
    session_id = client.call(FETCH, fetch_request(topic, session=(0, 0)), 12).session_id
    wrong_epoch = client.call(FETCH, fetch_request(topic, session=(session_id, 7)), 12)
    assert (wrong_epoch.error_code, wrong_epoch.session_id) == (E.INVALID_FETCH_SESSION_EPOCH, 0)
    unknown = client.call(FETCH, fetch_request(topic, session=(session_id ^ 1, 1)), 12)
    assert unknown.error_code == E.FETCH_SESSION_ID_NOT_FOUND
    assert client.call(FETCH, fetch_request(topic, session=(session_id, 1)), 12).error_code == E.NONE


def test_a_session_forgets_partitions_and_ends_with_the_last(client: DirectClient, topic: str) -> None:
    session_id = client.call(FETCH, fetch_request(topic, session=(0, 0)), 12).session_id
    empty = FetchRequest(
        max_wait_ms=0,
        session_id=session_id,
        session_epoch=1,
        forgotten_topics_data=[ForgottenTopic(topic, NO_UUID, [0])],
    )
    assert client.call(FETCH, empty, 12).session_id == 0
    again = client.call(FETCH, fetch_request(topic, session=(session_id, 2)), 12)
    assert again.error_code == E.FETCH_SESSION_ID_NOT_FOUND


def test_a_closed_session_is_gone(client: DirectClient, topic: str) -> None:
    session_id = client.call(FETCH, fetch_request(topic, session=(0, 0)), 12).session_id
    assert client.call(FETCH, fetch_request(topic, session=(session_id, -1)), 12).session_id == 0
    again = client.call(FETCH, fetch_request(topic, session=(session_id, 1)), 12)
    assert again.error_code == E.FETCH_SESSION_ID_NOT_FOUND


def test_errors_are_in_every_response_of_a_session(client: DirectClient, topic: str) -> None:
    session_id = client.call(FETCH, fetch_request(topic, 99, session=(0, 0)), 12).session_id
    for epoch in (1, 2):
        answer = client.call(FETCH, FetchRequest(max_wait_ms=0, session_id=session_id, session_epoch=epoch), 12)
        assert answer.responses[0].partitions[0].error_code == E.OFFSET_OUT_OF_RANGE


def test_a_session_misses_a_topic_that_it_read_by_its_name(cluster: Cluster, client: DirectClient, topic: str) -> None:
    """Also where the session has the topic by its id. A topic that comes again under the name is another one."""
    topic_id = wait_for_topic(client, topic)
    wanted = [FetchPartition(partition=0, partition_max_bytes=1 << 20)]
    epoch = 0

    def codes(session_id: int, *topics: FetchTopic) -> tuple[int, set[int]]:
        nonlocal epoch
        request = FetchRequest(max_wait_ms=0, session_id=session_id, session_epoch=epoch, topics=list(topics))
        answer = client.call(FETCH, request, 17)
        epoch += 1
        assert answer.error_code == E.NONE
        return answer.session_id, {part.error_code for each in answer.responses for part in each.partitions}

    never = FetchTopic(topic_id=uuid4().bytes, partitions=wanted)
    session_id, found = codes(0, FetchTopic(topic_id=topic_id, partitions=wanted), never)
    assert found == {E.NONE, E.UNKNOWN_TOPIC_ID}
    client.call(DELETE_TOPICS, DeleteTopicsRequest([DeleteTopicState(topic)], timeout_ms=5000), 6)
    eventually(lambda: codes(session_id)[1], lambda found: found == {E.UNKNOWN_TOPIC_OR_PARTITION, E.UNKNOWN_TOPIC_ID})
    client.create_topic(topic)
    eventually(lambda: codes(session_id)[1], lambda found: found == {E.INCONSISTENT_TOPIC_ID, E.UNKNOWN_TOPIC_ID})


# -- offsets -----------------------------------------------------------------------------------------------------------
def list_offset(client: DirectClient, name: str, timestamp_ms: int, *, version: int = 11, **options: Any) -> Any:
    ask = ListOffsetsPartition(options.get("partition", 0), options.get("epoch", -1), timestamp_ms)
    request = ListOffsetsRequest(-1, options.get("isolation", 0), [ListOffsetsTopic(name, [ask])])
    return client.call(LIST_OFFSETS, request, version).topics[0].partitions[0]


@pytest.mark.parametrize("compression", [Compression.NONE, Compression.LZ4], ids=lambda each: each.name.lower())
@pytest.mark.parametrize("count", [3, 40], ids=["few", "many"])
@pytest.mark.parametrize("claimed", ["last", "none", "zero"])
def test_highest_timestamp_of_a_batch_is_that_of_its_records(
    client: DirectClient, topic: str, compression: Compression, count: int, claimed: str
) -> None:
    """KafkaJS writes the last one's into the header. Searches by time and retention rely on it."""
    now_ms = int(time.time() * 1000)
    times = [now_ms - 1000 * (count - number) for number in range(count)]
    times[-1], times[1] = times[1], now_ms
    data = encode_batch([Record(n, at_ms, None, b"v") for n, at_ms in enumerate(times)], compression=compression)
    struct.pack_into(">q", data, 35, {"last": times[-1], "none": -1, "zero": 0}[claimed])
    seal_crc(data)
    assert produce(client, topic, bytes(data)).error_code == E.NONE
    (header,) = (header for _, header in iter_headers(fetch(client, topic).records))
    assert header.max_timestamp == now_ms
    for wanted in (now_ms - 500, -3):
        found = list_offset(client, topic, wanted)
        assert (found.error_code, found.offset, found.timestamp) == (E.NONE, 1, now_ms)


def test_offsets_of_every_kind(client: DirectClient, topic: str) -> None:
    now_ms = int(time.time() * 1000) - 10_000
    produce(client, topic, batch(b"a", b"b", at_ms=now_ms))
    produce(client, topic, batch(b"c", b"d", at_ms=now_ms + 500))
    produce(client, topic, batch(b"e", at_ms=now_ms + 100))
    assert list_offset(client, topic, -1).offset == 5
    assert list_offset(client, topic, -1, isolation=1).offset == 5
    assert list_offset(client, topic, -2).offset == 0
    newest = list_offset(client, topic, -3)
    assert (newest.offset, newest.timestamp) == (3, now_ms + 501)
    assert list_offset(client, topic, -4).offset == 0
    assert list_offset(client, topic, -5).offset == -1
    by_time = list_offset(client, topic, now_ms + 1)
    assert (by_time.offset, by_time.timestamp) == (1, now_ms + 1)
    assert list_offset(client, topic, now_ms + 400).offset == 2
    nothing = list_offset(client, topic, now_ms + 5000)
    assert (nothing.error_code, nothing.offset, nothing.timestamp) == (E.NONE, -1, -1)


@pytest.mark.parametrize("version", range(1, 12))
def test_first_and_last_offset_in_every_version(client: DirectClient, topic: str, version: int) -> None:
    produce(client, topic, batch(b"a"))
    assert list_offset(client, topic, -1, version=version).offset == 1
    assert list_offset(client, topic, -2, version=version).offset == 0


def test_first_offset_of_an_empty_partition_has_the_leaders_epoch(client: DirectClient, topic: str) -> None:
    for timestamp in (-1, -2, -4):
        found = list_offset(client, topic, timestamp, version=8)
        assert (found.offset, found.leader_epoch) == (0, 0)


def test_offsets_refuse_unknown_partitions_versions_and_epochs(client: DirectClient, topic: str) -> None:
    assert list_offset(client, topic + "-not", -1).error_code == E.UNKNOWN_TOPIC_OR_PARTITION
    assert list_offset(client, topic, -1, partition=9).error_code == E.UNKNOWN_TOPIC_OR_PARTITION
    assert list_offset(client, topic, -1, epoch=5).error_code == E.UNKNOWN_LEADER_EPOCH
    assert list_offset(client, topic, -3, version=6).error_code == E.UNSUPPORTED_VERSION


def test_deleted_records_are_out_of_reach(client: DirectClient, topic: str) -> None:
    produce(client, topic, batch(b"a", b"b", b"c"))

    def delete(offset: int) -> Any:
        ask = DeleteRecordsTopic(topic, [DeleteRecordsPartition(0, offset)])
        return client.call(DELETE_RECORDS, DeleteRecordsRequest([ask], 5000), 2).topics[0].partitions[0]

    assert delete(9).error_code == E.OFFSET_OUT_OF_RANGE
    assert (delete(2).error_code, delete(2).low_watermark) == (E.NONE, 2)
    assert list_offset(client, topic, -2).offset == 2
    assert fetch(client, topic, 1).error_code == E.OFFSET_OUT_OF_RANGE
    assert fetch(client, topic, 2).log_start_offset == 2
    assert delete(-1).low_watermark == 3


def test_where_an_epoch_ended(client: DirectClient, topic: str) -> None:
    produce(client, topic, batch(b"a", b"b"))

    def end_of(epoch: int, current: int = -1) -> tuple[int, int, int]:
        ask = OffsetForLeaderTopic(topic, [OffsetForLeaderPartition(0, current, epoch)])
        found = client.call(OFFSET_FOR_LEADER_EPOCH, OffsetForLeaderEpochRequest(-1, [ask]), 4)
        result = found.topics[0].partitions[0]
        return result.error_code, result.leader_epoch, result.end_offset

    assert end_of(0) == (0, 0, 2)
    assert end_of(5) == (0, -1, -1)
    assert end_of(0, current=3)[0] == E.UNKNOWN_LEADER_EPOCH
    assert end_of(0, current=-2)[0] == E.FENCED_LEADER_EPOCH


def test_producers_of_a_partition_are_described(client: DirectClient, topic: str) -> None:
    produce(client, topic, batch(b"a", b"b", producer_id=4711, producer_epoch=3, base_sequence=0))
    request = DescribeProducersRequest([ProducersTopic(topic, [0, 1])])
    first, second = client.call(DESCRIBE_PRODUCERS, request, 0).topics[0].partitions
    (producer,) = first.active_producers
    assert (producer.producer_id, producer.producer_epoch, producer.last_sequence) == (4711, 3, 1)
    assert producer.current_txn_start_offset == -1
    assert second.active_producers == []


# -- topics ------------------------------------------------------------------------------------------------------------
def test_metadata_creates_a_topic_only_if_asked_to(cluster: Cluster, client: DirectClient) -> None:
    name = cluster.unique("auto")
    assert metadata(client, name, create=False).error_code == E.UNKNOWN_TOPIC_OR_PARTITION
    assert metadata(client, name, create=True).error_code == E.UNKNOWN_TOPIC_OR_PARTITION  # at first, as in Kafka
    wait_for_topic(client, name)


def test_metadata_of_wrong_names_and_ids(client: DirectClient, topic: str) -> None:
    assert metadata(client, "no spaces", create=True).error_code == E.INVALID_TOPIC_EXCEPTION
    assert metadata(client, None, create=True, topic_id=b"7" * 16).error_code == E.UNKNOWN_TOPIC_ID
    assert metadata(client, None, create=True, topic_id=wait_for_topic(client, topic)).name == topic
    for _ in range(2):  # the log of Kafka's controllers is no topic, and no client makes it one
        assert metadata(client, "__cluster_metadata", create=True).error_code == E.UNKNOWN_TOPIC_OR_PARTITION


@pytest.mark.parametrize("version", [10, 11])
def test_metadata_by_id_is_refused_in_versions_whose_response_needs_a_name(
    client: DirectClient, topic: str, version: int
) -> None:
    known = wait_for_topic(client, topic)
    for topic_id, name in ((known, None), (NO_UUID, None), (known, topic), (b"7" * 16, topic)):
        asked = MetadataRequestTopic(topic_id, name)
        (answer,) = client.call(METADATA, MetadataRequest([asked]), version).topics
        assert (answer.error_code, answer.name) == (E.INVALID_REQUEST, name or "")


@pytest.mark.parametrize("version", range(14))
def test_metadata_in_every_version(client: DirectClient, topic: str, version: int) -> None:
    answer = client.call(METADATA, MetadataRequest([MetadataRequestTopic(name=topic)]), version)
    (found,) = answer.topics
    assert sorted(part.partition_index for part in found.partitions) == [0, 1]
    assert len(answer.brokers) == 1


def create(client: DirectClient, *topics: CreatableTopic, validate_only: bool = False) -> list[tuple[str, int]]:
    request = CreateTopicsRequest(list(topics), 5000, validate_only)
    return [(topic.name, topic.error_code) for topic in client.call(CREATE_TOPICS, request, 7).topics]


def test_topics_that_may_not_be_created(cluster: Cluster, client: DirectClient, topic: str) -> None:
    name = cluster.unique("refused")

    def code(asked: CreatableTopic) -> int:
        return create(client, asked)[0][1]

    def manual(*replicas: list[int], count: int = -1, factor: int = -1) -> int:
        assignments = [CreatableReplicaAssignment(index, nodes) for index, nodes in enumerate(replicas)]
        return code(CreatableTopic(name, count, factor, assignments))

    def with_config(setting: str, value: str | None) -> int:
        return code(CreatableTopic(name, 1, 1, configs=[CreatableTopicConfig(setting, value)]))

    assert code(CreatableTopic(topic, 1, 1)) == E.TOPIC_ALREADY_EXISTS
    assert code(CreatableTopic("no spaces", 1, 1)) == E.INVALID_TOPIC_EXCEPTION
    assert code(CreatableTopic("", 1, 1)) == E.INVALID_TOPIC_EXCEPTION
    assert code(CreatableTopic("x" * 250, 1, 1)) == E.INVALID_TOPIC_EXCEPTION
    assert code(CreatableTopic("__cluster_metadata", 1, 1)) == E.INVALID_REQUEST
    assert code(CreatableTopic(name, 0, 1)) == E.INVALID_PARTITIONS
    assert code(CreatableTopic(name, 10_001, 1)) == E.POLICY_VIOLATION
    assert code(CreatableTopic(name, 1, 0)) == E.INVALID_REPLICATION_FACTOR
    assert code(CreatableTopic(name, 1, 3)) == E.INVALID_REPLICATION_FACTOR
    assert manual([7]) == E.INVALID_REPLICA_ASSIGNMENT
    assert manual([1, 1]) == E.INVALID_REPLICA_ASSIGNMENT
    assert manual([]) == E.INVALID_REPLICA_ASSIGNMENT
    assert manual([1], count=1) == E.INVALID_REQUEST
    assert manual([1], factor=1) == E.INVALID_REQUEST
    assert with_config("no.such.setting", "1") == E.INVALID_CONFIG
    assert with_config("retention.ms", "soon") == E.INVALID_CONFIG
    assert with_config("cleanup.policy", "burn") == E.INVALID_CONFIG
    assert with_config("retention.ms", None) == E.INVALID_CONFIG
    twice = CreatableTopic(name, 1, 1)
    assert create(client, twice, twice) == [(name, E.INVALID_REQUEST)]
    assert create(client, CreatableTopic(name, 1, 1), validate_only=True) == [(name, E.NONE)]
    assert metadata(client, name, create=False).error_code == E.UNKNOWN_TOPIC_OR_PARTITION


def test_names_that_differ_only_in_dots_and_underscores_collide(cluster: Cluster, client: DirectClient) -> None:
    name = cluster.unique("a.b")
    assert create(client, CreatableTopic(name, 1, 1)) == [(name, E.NONE)]
    twin = name.replace(".", "_")
    assert create(client, CreatableTopic(twin, 1, 1)) == [(twin, E.INVALID_TOPIC_EXCEPTION)]


def test_defaults_of_a_new_topic(cluster: Cluster, client: DirectClient) -> None:
    name = cluster.unique("defaults")
    request = CreateTopicsRequest([CreatableTopic(name, -1, -1)], 5000)
    (created,) = client.call(CREATE_TOPICS, request, 7).topics
    assert (created.num_partitions, created.replication_factor) == (1, 1)
    assert created.topic_id != NO_UUID
    configs = {config.name: config.value for config in created.configs}
    assert configs["cleanup.policy"] == "delete"
    assert configs["retention.ms"] == "604800000"


def test_topics_are_deleted_by_name_and_by_id(cluster: Cluster, client: DirectClient) -> None:
    names = [cluster.unique("doomed") for _ in range(2)]
    create(client, *(CreatableTopic(name, 1, 1) for name in names))
    topic_id = wait_for_topic(client, names[1])

    def delete(*states: DeleteTopicState) -> list[int]:
        answer = client.call(DELETE_TOPICS, DeleteTopicsRequest(list(states), timeout_ms=5000), 6)
        return [result.error_code for result in answer.responses]

    assert delete(DeleteTopicState(names[0]), DeleteTopicState(None, topic_id)) == [E.NONE, E.NONE]
    assert delete(DeleteTopicState(names[0])) == [E.UNKNOWN_TOPIC_OR_PARTITION]
    assert delete(DeleteTopicState(None, topic_id)) == [E.UNKNOWN_TOPIC_ID]
    assert delete(DeleteTopicState(names[0], topic_id)) == [E.INVALID_REQUEST]
    assert delete(DeleteTopicState(None)) == [E.INVALID_REQUEST]


def test_a_topic_created_again_is_another_topic(cluster: Cluster, client: DirectClient) -> None:
    name = cluster.unique("phoenix")
    client.create_topic(name)
    old_id = wait_for_topic(client, name)
    produce(client, name, batch(b"old"))
    client.call(DELETE_TOPICS, DeleteTopicsRequest([DeleteTopicState(name)], timeout_ms=5000), 6)
    eventually(lambda: create(client, CreatableTopic(name, 1, 1))[0][1], lambda code: code != E.TOPIC_ALREADY_EXISTS)
    new_id = wait_for_topic(client, name)
    assert new_id != old_id
    assert list_offset(client, name, -1).offset == 0


def test_partitions_are_added_but_never_taken_away(client: DirectClient, topic: str) -> None:
    def grow(count: int, assignments: list[CreatePartitionsAssignment] | None = None) -> int:
        request = CreatePartitionsRequest([CreatePartitionsTopic(topic, count, assignments)], 5000)
        code: int = client.call(CREATE_PARTITIONS, request, 3).results[0].error_code
        return code

    assert grow(2) == E.INVALID_PARTITIONS
    assert grow(1) == E.INVALID_PARTITIONS
    assert grow(4, [CreatePartitionsAssignment([1])]) == E.INVALID_REPLICA_ASSIGNMENT
    assert grow(3, [CreatePartitionsAssignment([9])]) == E.INVALID_REPLICA_ASSIGNMENT
    assert grow(4) == E.NONE
    eventually(lambda: len(metadata(client, topic, create=False).partitions), lambda count: count == 4)


def test_topics_are_described_in_pages(cluster: Cluster, client: DirectClient) -> None:
    names = sorted(cluster.unique("page") for _ in range(2))
    create(client, *(CreatableTopic(name, 3, 1) for name in names))
    for name in names:
        wait_for_topic(client, name)
    asked = [TopicRequest(name) for name in names]
    seen: list[tuple[str, int]] = []
    cursor: Cursor | None = None
    for _ in range(10):
        answer = client.call(DESCRIBE_TOPIC_PARTITIONS, DescribeTopicPartitionsRequest(asked, 2, cursor), 0)
        seen += [(topic.name, part.partition_index) for topic in answer.topics for part in topic.partitions]
        if answer.next_cursor is None:
            break
        cursor = Cursor(answer.next_cursor.topic_name, answer.next_cursor.partition_index)
    assert seen == [(name, index) for name in names for index in range(3)]


def test_page_after_a_topic_that_was_deleted_meanwhile_begins_with_the_next_topic(
    cluster: Cluster, client: DirectClient
) -> None:
    deleted, topic = cluster.unique("page-1"), cluster.unique("page-2")
    client.create_topic(topic, 3)
    wait_for_topic(client, topic)
    request = DescribeTopicPartitionsRequest([TopicRequest(deleted), TopicRequest(topic)], 10, Cursor(deleted, 2))
    found = {topic.name: topic for topic in client.call(DESCRIBE_TOPIC_PARTITIONS, request, 0).topics}
    assert found[deleted].error_code == E.UNKNOWN_TOPIC_OR_PARTITION
    assert [part.partition_index for part in found[topic].partitions] == [0, 1, 2]
    request = DescribeTopicPartitionsRequest([TopicRequest(topic)], 10, Cursor(deleted, 2))
    (refused,) = client.call(DESCRIBE_TOPIC_PARTITIONS, request, 0).topics
    assert refused.error_code == E.INVALID_REQUEST, "the cursor must be one of the requested topics"


# -- settings ----------------------------------------------------------------------------------------------------------
def describe(client: DirectClient, kind: int, name: str, *keys: str) -> dict[str, tuple[str, int]]:
    request = DescribeConfigsRequest([DescribeConfigsResource(kind, name, list(keys) or None)], True, True)
    (result,) = client.call(DESCRIBE_CONFIGS, request, 4).results
    assert result.error_code == E.NONE, result
    return {config.name: (config.value, config.config_source) for config in result.configs}


def alter(client: DirectClient, kind: int, name: str, *changes: IncrementalConfig, validate_only: bool = False) -> int:
    request = IncrementalAlterConfigsRequest([IncrementalConfigsResource(kind, name, list(changes))], validate_only)
    code: int = client.call(INCREMENTAL_ALTER_CONFIGS, request, 1).responses[0].error_code
    return code


def wait_for_setting(client: DirectClient, name: str, setting: str, expected: tuple[str, int]) -> None:
    eventually(lambda: describe(client, TOPIC, name, setting)[setting], lambda found: found == expected)


def test_settings_of_a_topic_are_set_appended_subtracted_and_deleted(client: DirectClient, topic: str) -> None:
    assert alter(client, TOPIC, topic, IncrementalConfig("retention.ms", SET, "777")) == E.NONE
    wait_for_setting(client, topic, "retention.ms", ("777", 1))
    assert alter(client, TOPIC, topic, IncrementalConfig("cleanup.policy", APPEND, "compact")) == E.NONE
    wait_for_setting(client, topic, "cleanup.policy", ("delete,compact", 1))
    assert alter(client, TOPIC, topic, IncrementalConfig("cleanup.policy", SUBTRACT, "delete")) == E.NONE
    wait_for_setting(client, topic, "cleanup.policy", ("compact", 1))
    assert alter(client, TOPIC, topic, IncrementalConfig("retention.ms", DELETE, None)) == E.NONE
    wait_for_setting(client, topic, "retention.ms", ("604800000", 5))


def test_settings_that_are_refused(client: DirectClient, topic: str) -> None:
    assert alter(client, TOPIC, topic, IncrementalConfig("retention.ms", SET, "soon")) == E.INVALID_CONFIG
    assert alter(client, TOPIC, topic, IncrementalConfig("no.such", SET, "1")) == E.INVALID_CONFIG
    assert alter(client, TOPIC, topic, IncrementalConfig("retention.ms", SET, None)) == E.INVALID_REQUEST
    assert alter(client, TOPIC, topic, IncrementalConfig("retention.ms", APPEND, "1")) == E.INVALID_CONFIG
    twice = IncrementalConfig("retention.ms", SET, "1")
    assert alter(client, TOPIC, topic, twice, twice) == E.INVALID_REQUEST
    assert alter(client, TOPIC, topic, twice, IncrementalConfig("retention.ms", DELETE, None)) == E.INVALID_REQUEST
    assert alter(client, TOPIC, "", twice) == E.INVALID_REQUEST
    assert alter(client, TOPIC, topic + "-not", twice) == E.UNKNOWN_TOPIC_OR_PARTITION
    assert alter(client, BROKER, "1", IncrementalConfig("node.id", SET, "5")) == E.INVALID_REQUEST
    for name in ("1", ""):
        for setting, value in (("message.max.bytes", "-5"), ("log.cleaner.threads", "x")):
            code = alter(client, BROKER, name, IncrementalConfig(setting, SET, value), validate_only=True)
            assert code == E.INVALID_REQUEST, (name, setting)


@pytest.mark.parametrize("side", ["leader", "follower"])
def test_moves_of_replicas_can_be_throttled_although_there_are_none(
    client: DirectClient, topic: str, side: str
) -> None:
    """As kafka-reassign-partitions does with --throttle, before it moves anything."""
    rate, replicas = f"{side}.replication.throttled.rate", f"{side}.replication.throttled.replicas"
    assert rate not in describe(client, BROKER, "1")
    for value in ("x", "-1"):
        assert alter(client, BROKER, "1", IncrementalConfig(rate, SET, value)) == E.INVALID_REQUEST
    assert alter(client, BROKER, "1", IncrementalConfig(rate, SET, "1000")) == E.NONE
    eventually(lambda: describe(client, BROKER, "1", rate), lambda found: found == {rate: ("1000", 2)})
    assert alter(client, BROKER, "1", IncrementalConfig(rate, DELETE, None)) == E.NONE
    eventually(lambda: describe(client, BROKER, "1", rate), lambda found: not found)
    for value, code in (("0:1,1:1", E.NONE), ("*", E.NONE), ("0", E.INVALID_CONFIG), ("0:1,*", E.INVALID_CONFIG)):
        assert alter(client, TOPIC, topic, IncrementalConfig(replicas, SET, value)) == code, value
    assert alter(client, TOPIC, topic, IncrementalConfig(replicas, APPEND, "2")) == E.INVALID_CONFIG
    assert alter(client, TOPIC, topic, IncrementalConfig("retention.ms", SET, "5"), validate_only=True) == E.NONE
    assert describe(client, TOPIC, topic, "retention.ms") == {"retention.ms": ("604800000", 5)}


def test_max_message_bytes_of_a_topic_is_obeyed_at_once(cluster: Cluster, client: DirectClient, topic: str) -> None:
    assert alter(client, TOPIC, topic, IncrementalConfig("max.message.bytes", SET, "500")) == E.NONE
    if cluster.name == "apache_kafka":  # describes the setting before its log has it
        eventually(lambda: produce(client, topic, batch(b"x" * 1000)).error_code, lambda code: code != E.NONE)
    assert produce(client, topic, batch(b"x" * 1000)).error_code == E.MESSAGE_TOO_LARGE
    assert produce(client, topic, batch(b"x" * 100)).error_code == E.NONE


def test_log_append_time_is_the_brokers(cluster: Cluster, client: DirectClient) -> None:
    name = cluster.unique("stamped")
    client.create_topic(name, 1, message_timestamp_type="LogAppendTime")
    wait_for_topic(client, name)
    before_ms = int(time.time() * 1000)
    stamp_ms = produce(client, name, batch(b"a", at_ms=1000)).log_append_time_ms
    assert before_ms <= stamp_ms <= int(time.time() * 1000)
    ((_, header),) = iter_headers(fetch(client, name).records)
    assert header.is_log_append_time
    assert header.max_timestamp == stamp_ms


def test_one_replica_is_enough_whatever_min_insync_replicas_says(cluster: Cluster, client: DirectClient) -> None:
    name = cluster.unique("isr")
    client.create_topic(name, 1, min_insync_replicas="2")
    wait_for_topic(client, name)
    assert produce(client, name, batch(b"a"), acks=-1).error_code == E.NONE


# -- versions ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("version", range(5))
def test_versions_are_returned_in_every_version(client: DirectClient, version: int) -> None:
    answer = client.call(API_VERSIONS, ApiVersionsRequest("test", "1.0"), version)
    served = {api.api_key: (api.min_version, api.max_version) for api in answer.api_keys}
    assert served[0] == (0, 13)
    assert served[1] == (4, 18)
    assert served[18] == (0, 4)
    if version >= 3:
        final = {feature.name: feature.max_version_level for feature in answer.finalized_features}
        assert final["transaction.version"] == 2
        assert answer.finalized_features_epoch > -1
