"""The producer on both brokers, read back by confluent-kafka and by the Java console consumer."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from itertools import pairwise

import pyarrow as pa
import pytest
from confluent_kafka import Producer as ConfluentProducer

from semel.client.admin import Admin
from semel.client.cluster import Cluster as Connections
from semel.client.errors import (
    BufferFullError,
    ClosedError,
    ConfigError,
    DeliveryTimedOutError,
    IllegalStateError,
    KafkaError,
    RecordTooLargeError,
    TimedOutError,
)
from semel.client.log_reading import header_at
from semel.client.producer import Producer
from semel.client.producer.batches import Identity
from semel.client.settings import ClientSettings
from semel.local.apache_kafka import java_tool
from semel.protocol.messages.records import PRODUCE
from semel.protocol.messages.transactions import INIT_PRODUCER_ID
from semel.prove.proxy import Effect, Proxy, Rule
from tests.support.broker import Cluster
from tests.support.reading import create_topic, read_topic
from tests.support.waiting import PATIENCE_S, STALL_S, until

COMPRESSIONS = ["none", "gzip", "snappy", "lz4", "zstd"]
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


@pytest.fixture
def topic(cluster: Cluster) -> str:
    return create_topic(cluster.bootstrap, cluster.unique("produced"))


@pytest.fixture
def wide_topic(cluster: Cluster) -> str:
    return create_topic(cluster.bootstrap, cluster.unique("produced-wide"), partitions=7)


def producer_for(cluster: Cluster, **options: object) -> Producer:
    return Producer(bootstrap_servers=cluster.bootstrap, **options)


# --- what is written is what was given ---


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_rows_keep_keys_values_headers_nulls_and_timestamps(cluster: Cluster, topic: str, compression: str) -> None:
    now_ms = int(time.time() * 1000)
    rows = [
        (b"key", b"value", now_ms, [("a", b"1"), ("a", None), ("ü", b"")]),
        (None, b"no key", now_ms - 86_400_000, []),
        (b"tombstone", None, now_ms + 5, []),
        (b"", b"", now_ms, []),
    ]
    rows += [(b"%d" % i, bytes([i % 251]) * i, now_ms + i, []) for i in range(300)]
    with producer_for(cluster, compression_type=compression) as producer:
        deliveries = [
            producer.send(topic, value, key=key, timestamp=timestamp, headers=headers)
            for key, value, timestamp, headers in rows
        ]
        offsets = [delivery.result(timeout_ms=PATIENCE_S * 1000).offset for delivery in deliveries]
    assert offsets == list(range(len(rows)))
    seen = read_topic(cluster.bootstrap, topic)
    assert [(row.key, row.value, row.timestamp, row.headers) for row in seen] == rows


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_tables_keep_every_column(cluster: Cluster, wide_topic: str, compression: str) -> None:
    now_ms = int(time.time() * 1000)
    count = 5000
    table = pa.table(
        {
            "key": pa.array([None if i % 5 == 0 else b"key-%d" % (i % 97) for i in range(count)], pa.binary()),
            "value": pa.array([None if i % 11 == 0 else b"value-%d" % i for i in range(count)], pa.binary()),
            "headers": pa.array([[("n", b"%d" % i), ("null", None)] if i % 3 else [] for i in range(count)], HEADERS),
            "timestamp": pa.array([now_ms + i for i in range(count)], pa.timestamp("ms")),
        }
    )
    with producer_for(cluster, compression_type=compression, batch_size=20_000) as producer:
        partitions, offsets = producer.send_table(wide_topic, table).places(timeout_ms=PATIENCE_S * 1000)
    seen = {(row.partition, row.offset): row for row in read_topic(cluster.bootstrap, wide_topic)}
    assert len(seen) == count
    for i, expected in enumerate(table.to_pylist()):
        row = seen[partitions[i], offsets[i]]
        headers = [(header["key"], header["value"]) for header in expected["headers"]]
        assert (row.key, row.value, row.timestamp, row.headers) == (
            expected["key"],
            expected["value"],
            now_ms + i,
            headers,
        )


def test_the_java_console_consumer_reads_rows_tables_and_transactions(cluster: Cluster, topic: str) -> None:
    with producer_for(cluster, compression_type="lz4") as producer:
        producer.send(topic, "one", key="k", timestamp=1_700_000_000_000, headers={"h": "1"}).result(
            timeout_ms=PATIENCE_S * 1000
        )
        producer.send_table(topic, pa.table({"key": ["a", None], "value": ["two", None]})).result(
            timeout_ms=PATIENCE_S * 1000
        )
    with producer_for(cluster, transactional_id=cluster.unique("console"), compression_type="zstd") as producer:
        producer.init_transactions()
        with producer.transaction() as txn:
            txn.send(topic, "three", key="t")
        producer.begin_transaction()
        producer.send(topic, "never").result(timeout_ms=PATIENCE_S * 1000)
        producer.abort_transaction()
        with producer.transaction() as txn:
            txn.send(topic, "four", key="t")
    said = java_tool(
        "ConsoleConsumer",
        "--bootstrap-server",
        cluster.bootstrap,
        "--topic",
        topic,
        "--from-beginning",
        "--isolation-level",
        "read_committed",
        "--max-messages",
        "5",
        *[
            word
            for setting in ("print.key=true", "print.headers=true", "print.timestamp=true", "print.offset=true")
            for word in ("--formatter-property", setting)
        ],
        timeout_s=180,
    ).stdout
    lines = [line.split("\t") for line in said.splitlines() if line.startswith("CreateTime")]
    assert [(line[-2], line[-1]) for line in lines] == [
        ("k", "one"),
        ("a", "two"),
        ("null", "null"),
        ("t", "three"),
        ("t", "four"),
    ]
    assert lines[0][0] == "CreateTime:1700000000000"
    assert "h:1" in lines[0]


def test_keys_land_where_the_java_partitioner_puts_them(cluster: Cluster, wide_topic: str) -> None:
    twin = create_topic(cluster.bootstrap, cluster.unique("produced-twin"), partitions=7)
    rng = random.Random(7)
    keys = [rng.randbytes(rng.randrange(0, 40)) for _ in range(500)]
    other = ConfluentProducer({"bootstrap.servers": cluster.bootstrap, "partitioner": "murmur2_random", "log_level": 0})
    for key in keys:
        other.produce(twin, key, key=key)
    assert other.flush(PATIENCE_S) == 0
    with producer_for(cluster) as producer:
        for key in keys[:250]:
            producer.send(wide_topic, key, key=key)
        producer.send_table(wide_topic, pa.table({"key": keys[250:], "value": keys[250:]}))
        producer.flush(timeout_ms=PATIENCE_S * 1000)
    expected = {(row.partition, row.value) for row in read_topic(cluster.bootstrap, twin)}
    assert {(row.partition, row.value) for row in read_topic(cluster.bootstrap, wide_topic)} == expected


def test_rows_without_a_key_fill_a_batch_and_move_on(cluster: Cluster, wide_topic: str) -> None:
    with producer_for(cluster, batch_size=2_000) as producer:
        places = [producer.send(wide_topic, b"x" * 100) for _ in range(600)]
        partitions = [place.result(timeout_ms=PATIENCE_S * 1000).partition for place in places]
        table = pa.table({"value": [b"x" * 100] * 600})
        table_partitions, _ = producer.send_table(wide_topic, table).places(timeout_ms=PATIENCE_S * 1000)
    changes = sum(a != b for a, b in pairwise(partitions))
    assert 20 <= changes <= 60, "a partition is kept for about 17 rows of 2,000 bytes"
    assert len(set(partitions)) > 1
    assert len(set(table_partitions.tolist())) > 1


def test_a_partition_can_be_chosen_by_row_and_by_column(cluster: Cluster, wide_topic: str) -> None:
    with producer_for(cluster) as producer:
        assert (
            producer.send(wide_topic, b"row", key=b"k", partition=6).result(timeout_ms=PATIENCE_S * 1000).partition == 6
        )
        table = pa.table({"value": [b"a", b"b", b"c"], "key": [b"k"] * 3, "partition": [5, 0, 5]})
        partitions, _ = producer.send_table(wide_topic, table).places(timeout_ms=PATIENCE_S * 1000)
        assert partitions.tolist() == [5, 0, 5]
        for wrong in (7, -1):
            with pytest.raises(ConfigError, match="has 0 to 6"):
                producer.send(wide_topic, b"row", partition=wrong)
            with pytest.raises(ConfigError, match="0 to 6"):
                producer.send_table(wide_topic, pa.table({"value": [b"a"], "partition": [wrong]}))


# --- delivery ---


def test_records_leave_on_their_own_while_the_program_does_nothing(cluster: Cluster, topic: str) -> None:
    arrived = threading.Event()
    with producer_for(cluster, linger_ms=20) as producer:
        producer.send(topic, b"alone").add_done_callback(lambda _: arrived.set())
        assert arrived.wait(PATIENCE_S)
    assert [row.value for row in read_topic(cluster.bootstrap, topic)] == [b"alone"]


def test_every_delivery_tells_its_own_offset_and_order_is_kept(cluster: Cluster, topic: str) -> None:
    with producer_for(cluster, batch_size=500, linger_ms=0) as producer:
        deliveries = [producer.send(topic, b"%d" % i) for i in range(2000)]
        table = pa.table({"value": [b"%d" % i for i in range(2000, 4000)]})
        places = producer.send_table(topic, table).places(timeout_ms=PATIENCE_S * 1000)
        assert [delivery.result(timeout_ms=PATIENCE_S * 1000).offset for delivery in deliveries] == list(range(2000))
        assert places[1].tolist() == list(range(2000, 4000))
    assert [row.value for row in read_topic(cluster.bootstrap, topic)] == [b"%d" % i for i in range(4000)]


@pytest.mark.parametrize(("acks", "offset"), [("0", -1), ("1", 0), ("all", 0)])
def test_acks_decide_how_much_is_known(cluster: Cluster, topic: str, acks: str, offset: int) -> None:
    with producer_for(cluster, acks=acks) as producer:
        assert producer.settings.is_idempotent == (acks == "all")
        assert producer.send(topic, b"x").result(timeout_ms=PATIENCE_S * 1000).offset == offset
    until(lambda: read_topic(cluster.bootstrap, topic))  # acks=0 is answered before the broker has it


def test_a_batch_that_the_topic_finds_too_large_is_split(cluster: Cluster) -> None:
    narrow = create_topic(cluster.bootstrap, cluster.unique("narrow"), max_message_bytes="5000")
    with producer_for(cluster, batch_size=100_000) as producer:
        table = pa.table({"value": [b"%04d" % i + b"x" * 96 for i in range(500)]})
        delivery = producer.send_table(narrow, table)
        producer.send(narrow, b"after").result(timeout_ms=PATIENCE_S * 1000)
        assert sum(batch.record_count for batch in delivery.result(timeout_ms=PATIENCE_S * 1000)) == 500
        assert delivery.places()[1].tolist() == list(range(500))
        with pytest.raises(RecordTooLargeError, match=r"max\.message\.bytes"):
            producer.send(narrow, b"x" * 6000).result(timeout_ms=PATIENCE_S * 1000)
        assert producer.send(narrow, b"goes on").result(timeout_ms=PATIENCE_S * 1000).offset == 501
    values = [row.value for row in read_topic(cluster.bootstrap, narrow)]
    assert values == [*table["value"].to_pylist(), b"after", b"goes on"]


# --- the network ---

EFFECTS = [Effect.DROP_REQUEST, Effect.DROP_RESPONSE, Effect.TRUNCATE_REQUEST, Effect.TRUNCATE_RESPONSE]


@pytest.mark.parametrize("effect", EFFECTS)
def test_a_fault_while_writing_loses_nothing_and_doubles_nothing(cluster: Cluster, topic: str, effect: Effect) -> None:
    with Proxy(cluster.bootstrap) as proxy:
        faults = [proxy.add(Rule(PRODUCE, effect, nth=nth)) for nth in (1, 5, 4, 8)]
        with Producer(bootstrap_servers=proxy.bootstrap, batch_size=300, linger_ms=0, retry_backoff_ms=5) as producer:
            deliveries = [producer.send(topic, b"%d" % i) for i in range(1000)]
            offsets = [delivery.result(timeout_ms=30_000).offset for delivery in deliveries]
        for fault in faults:
            fault.assert_fired()
    assert offsets == list(range(1000))
    assert [row.value for row in read_topic(cluster.bootstrap, topic)] == [b"%d" % i for i in range(1000)]


def test_tables_and_rows_on_many_partitions_survive_random_faults(cluster: Cluster, wide_topic: str) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    with Proxy(cluster.bootstrap) as proxy:
        faults = [proxy.add(Rule(PRODUCE, rng.choice(EFFECTS), nth=rng.randrange(2, 10))) for _ in range(12)]
        faults.append(proxy.add(Rule(PRODUCE, Effect.DELAY_RESPONSE, delay_ms=50, times=3)))
        options = {"batch_size": 3000, "linger_ms": 1, "retry_backoff_ms": 5}
        with Producer(bootstrap_servers=proxy.bootstrap, **options) as producer:
            sent = []
            for block in range(20):
                keys = [b"%d" % (i % 23) for i in range(300)]
                values = [b"%d-%d" % (block, i) for i in range(300)]
                if block % 2:
                    sent.append(producer.send_table(wide_topic, pa.table({"key": keys, "value": values})))
                else:
                    sent += [producer.send(wide_topic, value, key=key) for key, value in zip(keys, values, strict=True)]
            for delivery in sent:
                assert delivery.exception(timeout_ms=60_000) is None
        assert sum(fault.hits for fault in faults) >= 10
    by_key: dict[bytes, list[bytes]] = {}
    for row in read_topic(cluster.bootstrap, wide_topic):
        by_key.setdefault(row.key, []).append(row.value)
    for key, values in by_key.items():
        assert values == [b"%d-%d" % (b, i) for b in range(20) for i in range(300) if b"%d" % (i % 23) == key]


def test_an_expired_delivery_is_reported_and_the_next_write_starts_a_new_epoch(cluster: Cluster, topic: str) -> None:
    with Proxy(cluster.bootstrap) as proxy:
        options = {"delivery_timeout_ms": 5_000, "request_timeout_ms": 1_000, "linger_ms": 0, "retry_backoff_ms": 20}
        with Producer(bootstrap_servers=proxy.bootstrap, **options) as producer:
            producer.send(topic, b"first").result(timeout_ms=PATIENCE_S * 1000)
            fault = proxy.add(Rule(PRODUCE, Effect.DROP_REQUEST, times=10_000))
            with pytest.raises(DeliveryTimedOutError, match=r"delivery\.timeout\.ms"):
                producer.send(topic, b"lost").result(timeout_ms=PATIENCE_S * 1000)
            fault.assert_fired(2)
            proxy.clear()
            last = producer.send(topic, b"second").result(timeout_ms=PATIENCE_S * 1000)
            assert last.offset == 1
    assert [row.value for row in read_topic(cluster.bootstrap, topic)] == [b"first", b"second"]
    with Connections(ClientSettings.of(bootstrap_servers=cluster.bootstrap)) as connections:
        first = header_at(connections, (topic, 0), 0, PATIENCE_S)
        second = header_at(connections, (topic, 0), 1, PATIENCE_S)
    assert (second.producer_id, second.producer_epoch) == Identity(first.producer_id, first.producer_epoch + 1)
    assert second.base_sequence == 0


def test_an_answer_lost_at_the_delivery_timeout_is_not_written_again(cluster: Cluster, topic: str) -> None:
    """Its fate is unknown to the client; the broker has it once, and what follows is in order."""
    with Proxy(cluster.bootstrap) as proxy:
        options = {"delivery_timeout_ms": 5_000, "request_timeout_ms": 2_000, "linger_ms": 0, "retry_backoff_ms": 20}
        with Producer(bootstrap_servers=proxy.bootstrap, **options) as producer:
            producer.send(topic, b"first").result(timeout_ms=PATIENCE_S * 1000)
            fault = proxy.add(Rule(PRODUCE, Effect.DROP_RESPONSE, times=10_000))
            with pytest.raises(DeliveryTimedOutError, match="unknown whether they were stored"):
                producer.send(topic, b"unknown").result(timeout_ms=PATIENCE_S * 1000)
            fault.assert_fired()
            proxy.clear()
            producer.send(topic, b"second").result(timeout_ms=PATIENCE_S * 1000)
    assert [row.value for row in read_topic(cluster.bootstrap, topic)] == [b"first", b"unknown", b"second"]


def test_full_memory_blocks_and_says_so_in_time(cluster: Cluster, topic: str) -> None:
    with Proxy(cluster.bootstrap) as proxy:
        options = {"buffer_memory": 20_000, "batch_size": 5_000, "max_block_ms": 400, "request_timeout_ms": 60_000}
        producer = Producer(bootstrap_servers=proxy.bootstrap, **options)
        producer.partitions_for(topic, timeout_ms=PATIENCE_S * 1000)  # not within max.block.ms
        producer.send(topic, b"first").result(timeout_ms=PATIENCE_S * 1000)
        fault = proxy.add(Rule(PRODUCE, Effect.SILENCE_RESPONSE, times=10_000))
        started_s = time.monotonic()
        with pytest.raises(BufferFullError, match=r"buffer\.memory"):
            _fill(producer, topic)
        assert time.monotonic() - started_s < STALL_S
        fault.assert_fired()
        with pytest.raises(BufferFullError):
            producer.send_table(topic, pa.table({"value": [b"x" * 1000] * 100}))
        producer.close(timeout_ms=200)


def _fill(producer: Producer, topic: str) -> None:
    for _ in range(100):
        producer.send(topic, b"x" * 1000)


def test_memory_is_given_back(cluster: Cluster, topic: str) -> None:
    with producer_for(cluster, buffer_memory=50_000, batch_size=5_000) as producer:
        for _ in range(3):
            for _ in range(200):
                producer.send(topic, b"x" * 1000)
            producer.send_table(topic, pa.table({"value": [b"x" * 1000] * 200}))
        producer.flush(timeout_ms=30_000)
        assert producer._sender.used_bytes == 0


# --- bad input ---


def test_wrong_calls_say_what_to_do(cluster: Cluster, topic: str) -> None:
    producer = producer_for(cluster, max_request_size=10_000)
    with pytest.raises(RecordTooLargeError, match=r"max\.request\.size"):
        producer.send(topic, b"x" * 10_000)
    with pytest.raises(RecordTooLargeError, match=r"max\.request\.size"):
        producer.send_table(topic, pa.table({"value": [b"x", b"x" * 10_000]}))
    with pytest.raises(ConfigError, match="encode it first"):
        producer.send(topic, {"a": 1})  # type: ignore[arg-type]
    for name in (None, 5):
        with pytest.raises(ConfigError, match="a topic is named by text"):
            producer.send(name, b"x")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="milliseconds"):
        producer.send(topic, b"x", timestamp=1.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="does not know the columns"):
        producer.send_table(topic, pa.table({"value": [b"x"], "topic": ["t"]}))
    with pytest.raises(ConfigError, match="cast it first"):
        producer.send_table(topic, pa.table({"value": [1]}))
    with pytest.raises(IllegalStateError, match=r"transactional\.id"):
        producer.begin_transaction()
    producer.close()
    producer.close()
    with pytest.raises(ClosedError):
        producer.send(topic, b"x")
    with pytest.raises(ClosedError):
        producer.flush()


def test_a_topic_that_is_not_there_is_named_within_the_timeout(cluster: Cluster) -> None:
    options = {"allow_auto_create_topics": False, "max_block_ms": 500}
    with producer_for(cluster, **options) as producer:
        started_s = time.monotonic()
        with pytest.raises(TimedOutError, match=r"no-such-topic.*create the topic"):
            producer.send("no-such-topic", b"x")
        assert time.monotonic() - started_s < STALL_S
        with pytest.raises(KafkaError, match="characters"):
            producer.send("not a topic name!", b"x")


def test_an_identity_that_cannot_be_had_ends_in_a_clear_error(cluster: Cluster, topic: str) -> None:
    with Proxy(cluster.bootstrap) as proxy:
        fault = proxy.add(Rule(INIT_PRODUCER_ID, Effect.DROP_REQUEST, times=10_000))
        options = {"delivery_timeout_ms": 5_000, "request_timeout_ms": 1_000}  # the request must have been sent
        with Producer(bootstrap_servers=proxy.bootstrap, **options) as producer:
            with pytest.raises(DeliveryTimedOutError, match="they were not sent"):
                producer.send(topic, b"x").result(timeout_ms=PATIENCE_S * 1000)
            fault.assert_fired()


def test_a_forked_child_is_refused_and_the_parent_goes_on(cluster: Cluster, topic: str) -> None:
    with producer_for(cluster) as producer:
        producer.send(topic, b"parent").result(timeout_ms=PATIENCE_S * 1000)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                producer.send(topic, b"child")
                os.write(writer, b"sent")
            except IllegalStateError:
                os.write(writer, b"refused")
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert os.read(reader, 100) == b"refused"
        os.close(reader)
        os.close(writer)
        producer.send(topic, b"parent again").result(timeout_ms=PATIENCE_S * 1000)


def test_a_forgotten_producer_ends_its_thread(cluster: Cluster, topic: str) -> None:
    script = f"""
import gc, threading, json
from semel.client import Producer
producer = Producer(bootstrap_servers={cluster.bootstrap!r})
producer.send({topic!r}, b"x").result(timeout_ms={PATIENCE_S * 1000})
before = sorted(thread.name for thread in threading.enumerate())
(thread,) = [thread for thread in threading.enumerate() if thread.name == "semel-producer"]
del producer
gc.collect()
thread.join({PATIENCE_S})
print(json.dumps([before, sorted(thread.name for thread in threading.enumerate())]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == [["MainThread", "semel-producer"], ["MainThread"]]


def test_a_topic_that_was_created_again_with_fewer_partitions_is_written_where_it_has_some(
    cluster: Cluster, wide_topic: str
) -> None:
    with Admin(bootstrap_servers=cluster.bootstrap) as admin:
        producer = producer_for(cluster, linger_ms=0)
        producer.send(wide_topic, b"first", partition=6).result(timeout_ms=PATIENCE_S * 1000)
        admin.delete_topics([wide_topic])
        until(lambda: wide_topic not in admin.list_topics())
        create_topic(cluster.bootstrap, wide_topic, partitions=1)
        producer.send(wide_topic, b"to a partition that is gone", partition=6)

        def is_refused() -> bool:
            try:
                producer.send(wide_topic, b"to a partition that is gone", partition=6)
            except ConfigError as error:
                return "has 0 to 0" in str(error)
            return False

        until(is_refused, "the producer goes on with the partitions of the deleted topic")
        deliveries = [producer.send(wide_topic, b"x", key=b"key %d" % number) for number in range(20)]
        assert {delivery.result(timeout_ms=PATIENCE_S * 1000).partition for delivery in deliveries} == {0}
        producer.close(timeout_ms=0)
