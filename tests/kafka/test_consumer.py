"""The consumer on both brokers: what it reads, where it stands, what it commits, and what it says when it cannot."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from confluent_kafka import Producer as ConfluentProducer

from semel.client.admin import Admin
from semel.client.consumer import Consumer
from semel.client.errors import ClosedError, ConfigError, IllegalStateError, KafkaError, TimedOutError
from semel.client.producer import Producer
from semel.client.types import (
    CorruptRecordError,
    NoOffsetError,
    OffsetAndMetadata,
    OffsetOutOfRangeError,
    TopicPartition,
    UnknownPartitionError,
)
from semel.local.apache_kafka import java_tool
from semel.local.brokers import SemelBroker
from semel.protocol.batch import read_header
from semel.protocol.messages.cluster import METADATA
from semel.protocol.messages.offsets import OFFSET_COMMIT, OFFSET_FETCH
from semel.protocol.messages.records import FETCH, LIST_OFFSETS
from semel.prove.proxy import Effect, Proxy, Rule
from tests.support.broker import Cluster
from tests.support.reading import create_topic
from tests.support.waiting import PATIENCE_S, STALL_S, eventually, until

COMPRESSIONS = ["none", "gzip", "snappy", "lz4", "zstd"]


@pytest.fixture
def topic(cluster: Cluster) -> str:
    return create_topic(cluster.bootstrap, cluster.unique("consumed"), partitions=3)


@pytest.fixture
def single(cluster: Cluster) -> str:
    return create_topic(cluster.bootstrap, cluster.unique("consumed-single"))


@pytest.fixture
def admin(cluster: Cluster) -> Iterator[Admin]:
    with Admin(bootstrap_servers=cluster.bootstrap) as admin:
        yield admin


def consumer_for(cluster: Cluster, **options: object) -> Consumer:
    return Consumer(bootstrap_servers=cluster.bootstrap, **{"auto_offset_reset": "earliest", **options})


def fill(cluster: Cluster, topic: str, count: int, start: int = 0, **options: object) -> None:
    producer = ConfluentProducer({"bootstrap.servers": cluster.bootstrap, "linger.ms": 5, "log_level": 0, **options})
    for number in range(start, start + count):
        producer.produce(topic, value=b"v%d" % number, key=b"k%d" % number)
    assert producer.flush(30) == 0


def read(consumer: Consumer, count: int, timeout_s: float = PATIENCE_S, **limits: int) -> list:
    """That many records, or what came within the timeout; then makes sure that nothing more comes at once."""
    records, deadline_s = [], time.monotonic() + timeout_s
    while len(records) < count and time.monotonic() < deadline_s:
        records += consumer.poll(500, **limits)
    return records


def partitions_of(topic: str, count: int = 3) -> list[TopicPartition]:
    return [TopicPartition(topic, number) for number in range(count)]


# --- what is read is what was written ---


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_everything_that_confluent_wrote_is_read(cluster: Cluster, single: str, compression: str) -> None:
    producer = ConfluentProducer({"bootstrap.servers": cluster.bootstrap, "compression.type": compression})
    now_ms = int(time.time() * 1000)
    rows = [
        (b"key", b"value", [("h", b"1"), ("h", None), ("", b"")], now_ms),
        (None, b"no key", [], now_ms - 86_400_000),
        (b"no value", None, [], now_ms + 1000),
        (b"", b"", [("é", b"\x00\xff")], now_ms - 1),
        (b"x", b"y" * 100_000, [], 1),
    ]
    for key, value, headers, timestamp in rows:
        producer.produce(single, value=value, key=key, headers=headers, timestamp=timestamp)
    assert producer.flush(30) == 0
    with consumer_for(cluster) as consumer:
        consumer.assign([(single, 0)])
        records = read(consumer, len(rows))
    assert [(r.key, r.value, list(r.headers), r.timestamp) for r in records] == rows
    assert [r.offset for r in records] == list(range(len(rows)))
    assert {(r.topic, r.partition) for r in records} == {(single, 0)}


@pytest.mark.parametrize("views", [False, True])
def test_tables_hold_what_rows_hold(cluster: Cluster, topic: str, views: bool) -> None:
    fill(cluster, topic, 3000)
    with consumer_for(cluster) as consumer:
        consumer.assign(partitions_of(topic))
        rows = read(consumer, 3000)
        consumer.seek_to_beginning()
        tables = []
        while sum(table.num_rows for table in tables) < 3000:
            tables.append(consumer.poll_table(5000, headers=True, views=views))
    table = pa.concat_tables(tables)
    assert table.schema.field("value").type == (pa.binary_view() if views else pa.binary())
    assert table.column_names == ["topic", "partition", "offset", "timestamp", "key", "value", "headers"]
    columns = [table.column(name).to_pylist() for name in ("topic", "partition", "offset", "timestamp", "key", "value")]
    assert sorted(zip(*columns, strict=True)) == sorted(tuple(record)[:6] for record in rows)


def test_any_sequence_of_limits_reads_every_record_once_and_in_order(cluster: Cluster, topic: str) -> None:
    fill(cluster, topic, 4000, **{"batch.num.messages": 37})
    rng = random.Random(7)
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    with consumer_for(cluster, max_partition_fetch_bytes=20_000, prefetch_bytes=30_000) as consumer:
        consumer.assign(partitions_of(topic))
        deadline_s = time.monotonic() + PATIENCE_S
        while sum(map(len, seen.values())) < 4000:
            assert time.monotonic() < deadline_s
            if rng.random() < 0.5:
                limit = rng.randint(1, 90)
                records = consumer.poll(2000, max_records=limit)
                assert len(records) <= limit
                places = [(record.partition, record.offset) for record in records]
            else:
                headers, views = rng.random() < 0.5, rng.random() < 0.5
                table = consumer.poll_table(2000, max_bytes=rng.randint(1, 5000), headers=headers, views=views)
                places = list(
                    zip(table.column("partition").to_pylist(), table.column("offset").to_pylist(), strict=True)
                )
            for partition, offset in places:
                seen[partition].append(offset)
            last = dict(places)
            for partition, offset in last.items():
                assert consumer.position((topic, partition)) == offset + 1
    assert all(offsets == list(range(len(offsets))) for offsets in seen.values())


def test_read_committed_never_shows_open_or_aborted_transactions(cluster: Cluster, single: str) -> None:
    fill(cluster, single, 2)
    with Producer(bootstrap_servers=cluster.bootstrap, transactional_id=cluster.unique("txn")) as producer:
        producer.init_transactions()
        with producer.transaction() as txn:
            txn.send(single, b"committed")
        producer.begin_transaction()
        producer.send(single, b"aborted").result()
        producer.abort_transaction()
        producer.begin_transaction()
        producer.send(single, b"open").result()
        with consumer_for(cluster) as committed, consumer_for(cluster, isolation_level="read_uncommitted") as all_:
            committed.assign([(single, 0)])
            all_.assign([(single, 0)])
            assert [r.value for r in read(committed, 3)] == [b"v0", b"v1", b"committed"]
            assert [r.value for r in read(all_, 5)] == [b"v0", b"v1", b"committed", b"aborted", b"open"]
            assert committed.poll(700) == []
            assert committed.lag() == {(single, 0): 0}
            place = TopicPartition(single, 0)
            assert all_.end_offsets([place])[place] > committed.end_offsets([place])[place]
            producer.commit_transaction()
            assert [r.value for r in read(committed, 1)] == [b"open"]


def test_records_that_arrive_while_waiting_are_returned_at_once(cluster: Cluster, single: str) -> None:
    with consumer_for(cluster, fetch_max_wait_ms=60_000) as consumer:
        consumer.assign([(single, 0)])
        assert consumer.poll(300) == []
        fill(cluster, single, 1)
        started_s = time.monotonic()
        assert len(consumer.poll(60_000)) == 1
        assert time.monotonic() - started_s < STALL_S


# --- positions ---


def test_seeking_goes_where_it_says(cluster: Cluster, single: str) -> None:
    fill(cluster, single, 10)
    place = TopicPartition(single, 0)
    with consumer_for(cluster) as consumer:
        consumer.assign([place])
        assert consumer.position(place) == 0
        consumer.seek(place, 7)
        assert [r.offset for r in read(consumer, 3)] == [7, 8, 9]
        consumer.seek_to_beginning(place)
        assert read(consumer, 10)[0].offset == 0
        consumer.seek_to_end()
        assert consumer.position(place) == 10
        consumer.seek(place, 4)
        assert consumer.lag() == {place: 6}
        assert consumer.beginning_offsets([place]) == {place: 0}
        assert consumer.end_offsets([place]) == {place: 10}


def test_times_are_found(cluster: Cluster) -> None:
    single = create_topic(cluster.bootstrap, cluster.unique("times"))
    producer = ConfluentProducer({"bootstrap.servers": cluster.bootstrap})
    for number in range(5):
        producer.produce(single, value=b"x", timestamp=1_000_000 + number * 100)
    producer.flush(30)
    place = TopicPartition(single, 0)
    with consumer_for(cluster) as consumer:
        assert consumer.offsets_for_times({place: 1_000_150})[place] == (2, 1_000_200)
        assert consumer.offsets_for_times({place: 0})[place] == (0, 1_000_000)
        assert consumer.offsets_for_times({(single, 0): 2_000_000})[place] is None


def test_times_are_datetimes_as_well(cluster: Cluster, single: str, admin: Admin) -> None:
    at = datetime(2024, 2, 29, 12, tzinfo=UTC)
    place = TopicPartition(single, 0)
    with Producer(bootstrap_servers=cluster.bootstrap) as producer:
        for minute in range(3):
            producer.send(single, b"x", timestamp=at + timedelta(minutes=minute))
        with pytest.raises(ConfigError, match="time zone"):
            producer.send(single, b"x", timestamp=at.replace(tzinfo=None))
    with consumer_for(cluster) as consumer:
        found = consumer.offsets_for_times({place: at + timedelta(seconds=30)})[place]
        assert found is not None
        assert found.offset == 1
        assert admin.list_offsets({place: at + timedelta(seconds=90)})[place].offset == 2
        with pytest.raises(ConfigError, match="time zone"):
            consumer.offsets_for_times({place: at.replace(tzinfo=None)})
        consumer.assign([place])
        assert [record.datetime for record in read(consumer, 3)] == [at + timedelta(minutes=n) for n in range(3)]


def test_paused_partitions_stay_silent_and_lose_nothing(cluster: Cluster, topic: str) -> None:
    fill(cluster, topic, 300)
    with consumer_for(cluster) as consumer:
        consumer.assign(partitions_of(topic))
        first = consumer.poll(5000, max_records=10)
        consumer.pause((topic, 0), (topic, 1))
        rest = read(consumer, 1) + read(consumer, 1000, timeout_s=1.5)
        assert {r.partition for r in rest} == {2}
        assert consumer.paused() == {(topic, 0), (topic, 1)}
        consumer.resume()
        rest += read(consumer, 300 - len(first) - len(rest))
    assert len({(r.partition, r.offset) for r in first + rest}) == 300
    for partition in range(3):
        offsets = [r.offset for r in first + rest if r.partition == partition]
        assert offsets == sorted(offsets)


def test_position_outside_the_log_follows_the_reset_policy(cluster: Cluster, single: str, admin: Admin) -> None:
    fill(cluster, single, 10)
    admin.delete_records({(single, 0): 4})
    place = TopicPartition(single, 0)
    for policy, expected in (("earliest", 4), ("latest", 10)):
        with consumer_for(cluster, auto_offset_reset=policy) as consumer:
            consumer.assign([place])
            consumer.seek(place, 1)
            consumer.poll(500)
            eventually(
                lambda consumer=consumer: (consumer.poll(200), consumer.position(place))[1],
                lambda position, expected=expected: position >= expected,
            )
            if policy == "earliest":
                consumer.seek(place, 1)
                assert read(consumer, 6)[0].offset == 4
    with consumer_for(cluster, auto_offset_reset="none") as consumer:
        consumer.assign([place])
        for offset in (1, 99):
            consumer.seek(place, offset)
            with pytest.raises(OffsetOutOfRangeError, match=f"no offset {offset}") as caught:
                read(consumer, 1)
            assert (caught.value.partition, caught.value.offset) == (place, offset)
        consumer.seek(place, 4)
        assert len(read(consumer, 6)) == 6


def test_no_committed_offset_and_no_policy_is_an_error(cluster: Cluster, single: str) -> None:
    with consumer_for(cluster, auto_offset_reset="none", group_id=cluster.unique("g")) as consumer:
        consumer.assign([(single, 0)])
        with pytest.raises(NoOffsetError, match="no committed offset"):
            consumer.poll(5000)


# --- commits ---


def test_next_consumer_of_the_group_goes_on_where_the_last_one_committed(cluster: Cluster, single: str) -> None:
    fill(cluster, single, 10)
    group, place = cluster.unique("g"), TopicPartition(single, 0)
    options = {"group_id": group, "enable_auto_commit": False}
    with consumer_for(cluster, **options) as consumer:
        consumer.assign([place])
        assert consumer.committed([place]) == {}
        read(consumer, 4, max_records=4)
        consumer.commit()
        assert consumer.committed()[place].offset == 4
        read(consumer, 2, max_records=2)
    with consumer_for(cluster, **options) as consumer:
        consumer.assign([place])
        assert read(consumer, 6)[0].offset == 4
        consumer.commit({place: OffsetAndMetadata(9, "a note")})
        assert consumer.committed([place])[place][:2] == (9, "a note")
        consumer.commit({(single, 0): 2})
        consumer.seek_to_committed()
        assert consumer.position(place) == 2


def test_asynchronous_commits_call_back(cluster: Cluster, single: str) -> None:
    fill(cluster, single, 3)
    place, told = TopicPartition(single, 0), []
    with consumer_for(cluster, group_id=cluster.unique("g"), enable_auto_commit=False) as consumer:
        consumer.assign([place])
        read(consumer, 3)
        consumer.commit_async(callback=lambda offsets, error: told.append((dict(offsets), error)))
        until(lambda: (consumer.poll(100), told)[1], "the commit did not call back")
        assert told[0][0][place].offset == 3
        assert told[0][1] is None
        assert consumer.committed()[place].offset == 3


def test_automatic_commits_cover_what_was_returned(cluster: Cluster, single: str, admin: Admin) -> None:
    """Exactly that: not what was fetched, and not less when the interval has passed or the consumer is closed."""
    fill(cluster, single, 10)
    group, place = cluster.unique("g"), TopicPartition(single, 0)

    def committed() -> int:
        return admin.group_offsets(group)[place].offset if place in admin.group_offsets(group) else 0

    with consumer_for(cluster, group_id=group, auto_commit_interval_ms=50) as consumer:
        consumer.assign([place])
        assert [record.offset for record in read(consumer, 6, max_records=1)] == list(range(6))
        consumer.pause(place)
        eventually(lambda: (consumer.poll(50), committed())[1], lambda offset: offset >= 6)
        assert committed() == 6
        consumer.resume(place)
        assert len(read(consumer, 4, max_records=1)) == 4
    assert committed() == 10


def test_committed_waits_for_a_transaction_with_newer_offsets(cluster: Cluster, single: str) -> None:
    """D3: require_stable, asked for under read_committed."""
    group, place = cluster.unique("g"), TopicPartition(single, 0)
    with (
        Producer(bootstrap_servers=cluster.bootstrap, transactional_id=cluster.unique("t")) as producer,
        consumer_for(cluster, group_id=group) as consumer,
        consumer_for(cluster, group_id=group, isolation_level="read_uncommitted") as careless,
    ):
        producer.init_transactions()
        producer.begin_transaction()
        producer.send_offsets_to_transaction({place: 5}, group)
        with pytest.raises(TimedOutError, match="UNSTABLE_OFFSET_COMMIT"):
            consumer.committed([place], timeout_ms=700)
        assert careless.committed([place]) == {}
        producer.commit_transaction()
        assert consumer.committed([place])[place].offset == 5


def test_java_sees_the_group_and_its_offsets(cluster: Cluster, single: str) -> None:
    fill(cluster, single, 8)
    group = cluster.unique("g")
    with consumer_for(cluster, group_id=group) as consumer:
        consumer.assign([(single, 0)])
        read(consumer, 5, max_records=5)
        consumer.commit({(single, 0): 5})
    told = java_tool("ConsumerGroupCommand", "--bootstrap-server", cluster.bootstrap, "--describe", "--group", group)
    (line,) = [line.split() for line in told.stdout.splitlines() if single in line]
    assert line[line.index(single) + 1 : line.index(single) + 5] == ["0", "8", "8", "0"] or line[3:6] == ["5", "8", "3"]


def test_records_of_the_java_producer_are_read(cluster: Cluster, single: str) -> None:
    java_tool(
        "ConsoleProducer",
        "--bootstrap-server",
        cluster.bootstrap,
        "--topic",
        single,
        "--property",
        "parse.key=true",
        "--property",
        "key.separator=:",
        stdin="a:1\nb:2\n",
    )
    with consumer_for(cluster) as consumer:
        consumer.assign([(single, 0)])
        assert [(r.key, r.value) for r in read(consumer, 2)] == [(b"a", b"1"), (b"b", b"2")]


# --- the network ---


@pytest.mark.parametrize("effect", [Effect.DROP_REQUEST, Effect.DROP_RESPONSE, Effect.TRUNCATE_RESPONSE])
@pytest.mark.parametrize("api", [FETCH, LIST_OFFSETS, OFFSET_FETCH, METADATA], ids=lambda api: api.name)
def test_a_cut_connection_loses_and_doubles_nothing(cluster: Cluster, topic: str, effect, api) -> None:
    fill(cluster, topic, 2000)
    with Proxy(cluster.bootstrap) as proxy:
        injected = proxy.add(Rule(api, effect, times=2))
        options = {"group_id": cluster.unique("g"), "max_partition_fetch_bytes": 4_000, "auto_offset_reset": "earliest"}
        with Consumer(bootstrap_servers=proxy.bootstrap, **options) as consumer:
            consumer.assign(partitions_of(topic))
            records = read(consumer, 2000)
            assert consumer.poll(200) == []
        injected.assert_fired()
    assert len(records) == 2000
    assert len({(r.partition, r.offset) for r in records}) == 2000


def test_a_silent_broker_costs_only_the_request_timeout(cluster: Cluster, single: str) -> None:
    fill(cluster, single, 5)
    with Proxy(cluster.bootstrap) as proxy:
        injected = proxy.add(Rule(FETCH, Effect.SILENCE_RESPONSE))
        with Consumer(
            bootstrap_servers=proxy.bootstrap,
            auto_offset_reset="earliest",
            request_timeout_ms=700,
            fetch_max_wait_ms=100,
        ) as consumer:
            consumer.assign([(single, 0)])
            assert len(read(consumer, 5, timeout_s=STALL_S)) == 5
        injected.assert_fired()


def test_a_lost_response_to_a_commit_is_asked_for_again(cluster: Cluster, single: str) -> None:
    fill(cluster, single, 5)
    with Proxy(cluster.bootstrap) as proxy:
        injected = proxy.add(Rule(OFFSET_COMMIT, Effect.DROP_RESPONSE))
        with Consumer(
            bootstrap_servers=proxy.bootstrap, group_id=cluster.unique("g"), auto_offset_reset="earliest"
        ) as consumer:
            consumer.assign([(single, 0)])
            read(consumer, 5)
            consumer.commit()
            assert consumer.committed()[TopicPartition(single, 0)].offset == 5
        injected.assert_fired()


def test_broker_restart_interrupts_nothing(semel_broker: SemelBroker) -> None:
    topic = create_topic(semel_broker.bootstrap, "restarted")
    cluster = Cluster("semel", semel_broker)
    fill(cluster, topic, 100)
    with consumer_for(cluster, group_id="g", enable_auto_commit=False, session_timeout_ms=30_000) as consumer:
        consumer.subscribe([topic])
        assert len(read(consumer, 100)) == 100
        consumer.commit()
        semel_broker.kill()
        assert consumer.poll(300) == []
        semel_broker.start()
        fill(cluster, topic, 50, start=100)
        assert [r.value for r in read(consumer, 50)] == [b"v%d" % number for number in range(100, 150)]
        consumer.commit()


# --- what goes wrong is said ---


def test_unreachable_broker_is_named_when_the_timeout_ends() -> None:
    consumer = Consumer(bootstrap_servers="127.0.0.1:1", group_id="g", default_api_timeout_ms=1000)
    consumer.subscribe(["t"])
    started_s = time.monotonic()
    with pytest.raises(TimedOutError, match=r"127\.0\.0\.1:1.*is a broker running there"):
        consumer.poll(800)
    with pytest.raises(TimedOutError, match=r"127\.0\.0\.1:1"):
        consumer.end_offsets([("t", 0)])
    assert time.monotonic() - started_s < STALL_S
    consumer.close()
    assert time.monotonic() - started_s < 2 * STALL_S


def test_wrong_order_and_wrong_arguments_are_refused_with_a_remedy(cluster: Cluster, single: str) -> None:
    with consumer_for(cluster) as consumer:
        with pytest.raises(IllegalStateError, match="subscribe"):
            consumer.poll(10)
        with pytest.raises(ConfigError, match=r"group\.id"):
            consumer.subscribe([single])
        with pytest.raises(ConfigError, match=r"group\.id"):
            consumer.commit({(single, 0): 1})
        with pytest.raises(IllegalStateError, match="not assigned"):
            consumer.seek((single, 0), 1)
        with pytest.raises(IllegalStateError, match="pairs"):
            consumer.assign([5])  # type: ignore[list-item]
        consumer.assign([(single, 0)])
        with pytest.raises(ConfigError, match="offset -1"):
            consumer.seek((single, 0), -1)
        with pytest.raises(ConfigError, match="max_records"):
            consumer.poll(10, max_records=0)
        for limit in ({"max_records": 0}, {"max_bytes": 0}, {"max_bytes": -1}):
            with pytest.raises(ConfigError, match=next(iter(limit))):
                consumer.poll_table(10, **limit)
    with pytest.raises(ClosedError):
        consumer.poll(10)
    with pytest.raises(ClosedError):
        consumer.commit()
    consumer.close()


def test_subscribe_and_assign_do_not_mix(cluster: Cluster, single: str) -> None:
    with consumer_for(cluster, group_id=cluster.unique("g")) as consumer:
        with pytest.raises(ConfigError, match="a topic is named by text"):
            consumer.subscribe([single, 5])  # type: ignore[list-item]
        for offset in ("x", 1.5, None, -1, 2**63, ()):
            with pytest.raises(ConfigError, match="a committed offset is"):
                consumer.commit({(single, 0): offset})  # type: ignore[dict-item]
        consumer.subscribe([single])
        with pytest.raises(IllegalStateError, match="unsubscribe"):
            consumer.assign([(single, 0)])
        consumer.unsubscribe()
        consumer.assign([(single, 0)])
        with pytest.raises(IllegalStateError, match="unsubscribe"):
            consumer.subscribe([single])


def test_deleted_topic_is_reported_not_waited_for(cluster: Cluster, single: str, admin: Admin) -> None:
    fill(cluster, single, 3)
    with consumer_for(cluster, default_api_timeout_ms=2000, allow_auto_create_topics=False) as consumer:
        consumer.assign([(single, 0)])
        read(consumer, 3)
        admin.delete_topics([single])
        with pytest.raises(UnknownPartitionError, match="does not exist"):
            read(consumer, 1, timeout_s=PATIENCE_S)


def test_missing_partition_is_an_error_within_the_timeout(cluster: Cluster, single: str) -> None:
    with consumer_for(cluster, default_api_timeout_ms=1000) as consumer:
        with pytest.raises(KafkaError, match="UNKNOWN_TOPIC_OR_PARTITION"):
            consumer.end_offsets([(single, 77)])
        consumer.assign([(single, 77)])
        with pytest.raises(UnknownPartitionError):
            read(consumer, 1, timeout_s=PATIENCE_S)


def test_damaged_batch_is_named_and_can_be_passed_over(semel_broker: SemelBroker) -> None:
    topic = create_topic(semel_broker.bootstrap, "damaged")
    cluster = Cluster("semel", semel_broker)
    for number in range(3):
        fill(cluster, topic, 4, start=4 * number)
    (log,) = [path for path in semel_broker.directory.rglob("*.log") if path.parent.name == f"{topic}-0"]
    data = bytearray(log.read_bytes())
    at = data.index(b"v5")
    with log.open("r+b") as file:
        file.seek(at)
        file.write(b"!!")
    with consumer_for(cluster) as consumer:
        consumer.assign([(topic, 0)])
        assert [r.offset for r in read(consumer, 4)] == [0, 1, 2, 3]
        for _ in range(2):
            with pytest.raises(CorruptRecordError, match=r"offset 4 is damaged.*CRC") as caught:
                read(consumer, 1)
            assert (caught.value.partition, caught.value.offset) == ((topic, 0), 4)
        consumer.seek((topic, 0), 8)
        assert [r.offset for r in read(consumer, 4)] == [8, 9, 10, 11]


def test_damaged_partition_does_not_keep_back_the_others(semel_broker: SemelBroker) -> None:
    topic = create_topic(semel_broker.bootstrap, "damaged-one", partitions=3)
    cluster = Cluster("semel", semel_broker)
    fill(cluster, topic, 100)
    (log,) = [path for path in semel_broker.directory.rglob("*.log") if path.parent.name == f"{topic}-1"]
    with log.open("r+b") as file:
        file.seek(read_header(log.read_bytes()).size - 4)  # of the first batch: there may be several
        file.write(b"!!")
    with consumer_for(cluster) as consumer:
        consumer.assign(partitions_of(topic))
        ends = consumer.end_offsets(partitions_of(topic))
        seen, damaged = [], []
        while len(seen) < ends[topic, 0] + ends[topic, 2]:
            try:
                seen += consumer.poll_table(10_000)["partition"].to_pylist()
            except CorruptRecordError as error:
                damaged.append(error.partition)
                consumer.pause((topic, 1))
        assert sorted(seen) == [0] * ends[topic, 0] + [2] * ends[topic, 2]
        consumer.resume((topic, 1))
        with pytest.raises(CorruptRecordError, match="damaged"):
            consumer.poll_table(10_000)
        assert set(damaged) <= {(topic, 1)}


def test_forked_child_is_told_to_make_its_own_consumer(cluster: Cluster, single: str) -> None:
    with consumer_for(cluster, group_id=cluster.unique("g")) as consumer:
        consumer.subscribe([single])
        consumer.poll(3000)
        pid = os.fork()
        if pid == 0:
            try:
                consumer.poll(10)
            except IllegalStateError as error:
                consumer.close()
                os._exit(0 if re.search("fork", str(error)) else 2)
            os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        fill(cluster, single, 1)
        assert len(read(consumer, 1)) == 1


def test_wakeup_ends_a_waiting_poll(cluster: Cluster, single: str) -> None:
    import threading

    with consumer_for(cluster) as consumer:
        consumer.assign([(single, 0)])
        consumer.poll(100)
        threading.Timer(0.3, consumer.wakeup).start()
        started_s = time.monotonic()
        assert consumer.poll(60_000) == []
        assert time.monotonic() - started_s < STALL_S


@pytest.mark.parametrize("is_noticed", [False, True])
@pytest.mark.parametrize("in_group", [False, True])
def test_a_topic_that_was_created_again_is_read_from_its_begin(
    cluster: Cluster, admin: Admin, single: str, in_group: bool, is_noticed: bool
) -> None:
    """The new topic has more records than were read of the old one: the old offset would skip the first of them."""
    fill(cluster, single, 10)
    options = {"group_id": cluster.unique("g"), "auto_commit_interval_ms": 50, "allow_auto_create_topics": False}
    with consumer_for(cluster, **options) as consumer:
        if in_group:
            consumer.subscribe([single])
        else:
            consumer.assign([(single, 0)])
        assert len(read(consumer, 10)) == 10
        consumer.commit()
        state = consumer._engine.assigned.of(TopicPartition(single, 0))
        admin.delete_topics([single])
        if is_noticed:
            until(lambda: consumer.poll(50) == [] and state.is_gone, "the consumer does not see that the topic is gone")
        eventually(lambda: single in admin.list_topics(), lambda is_there: not is_there)
        create_topic(cluster.bootstrap, single)
        fill(cluster, single, 25, start=100)
        found = [int(record.value[1:]) for record in read(consumer, 25)]
    assert found == list(range(100, 125))
