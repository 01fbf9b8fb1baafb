"""`semel.read_table`: a topic up to its end offsets as one Arrow table."""

from __future__ import annotations

import socket
import time
from datetime import UTC, datetime, timedelta

import pytest

import semel
from semel.client import Producer
from semel.client.consumer.decode import Form, output_schema
from tests.support.broker import Cluster
from tests.support.reading import create_topic

AT = datetime(2024, 2, 29, 12, tzinfo=UTC)
AT_MS = 1_709_208_000_000


@pytest.fixture
def topic(cluster: Cluster) -> str:
    return create_topic(cluster.bootstrap, cluster.unique("table"), partitions=3)


def fill(cluster: Cluster, topic: str, count: int, first: int = 0) -> None:
    with Producer(bootstrap_servers=cluster.bootstrap) as producer:
        for number in range(first, first + count):
            producer.send(
                topic,
                b"%d" % number,
                key=None if number % 2 else b"k",
                partition=number % 3,
                timestamp=AT_MS + number * 1000,
                headers=[("h", b"%d" % number)] if number % 4 == 0 else None,
            )


def values(table: object) -> list[int]:
    return [int(value) for value in table.column("value").to_pylist()]  # type: ignore[attr-defined]


def test_all_records_are_in_the_table_by_partition_and_offset(cluster: Cluster, topic: str) -> None:
    fill(cluster, topic, 1000)
    table = semel.read_table(topic, bootstrap_servers=cluster.bootstrap)
    assert table.column_names == ["topic", "partition", "offset", "timestamp", "key", "value", "headers"]
    assert values(table) == [*range(0, 1000, 3), *range(1, 1000, 3), *range(2, 1000, 3)]
    places = list(zip(table.column("partition").to_pylist(), table.column("offset").to_pylist(), strict=True))
    assert places == sorted(set(places))
    row = table.slice(0, 1).to_pylist()[0]
    assert row == {
        "topic": topic, "partition": 0, "offset": 0, "timestamp": AT_MS,
        "key": b"k", "value": b"0", "headers": [{"key": "h", "value": b"0"}],
    }  # fmt: skip
    frame = table.to_pandas()
    assert frame["value"].map(int).sum() == sum(range(1000))
    assert set(frame["topic"]) == {topic}


def test_an_empty_topic_is_an_empty_table_with_the_schema(cluster: Cluster, topic: str) -> None:
    table = semel.read_table(topic, bootstrap_servers=cluster.bootstrap)
    assert table.num_rows == 0
    assert table.schema == output_schema(Form(headers=True))


def test_an_unknown_topic_or_partition_is_an_error_and_creates_none(cluster: Cluster, topic: str) -> None:
    unknown = cluster.unique("nowhere")
    with pytest.raises(semel.UnknownPartitionError, match=unknown):
        semel.read_table(unknown, bootstrap_servers=cluster.bootstrap)
    with semel.Admin(bootstrap_servers=cluster.bootstrap) as admin:
        assert unknown not in admin.list_topics()
    with pytest.raises(semel.UnknownPartitionError, match="no partition 7; it has 0 to 2"):
        semel.read_table(topic, bootstrap_servers=cluster.bootstrap, partitions=[0, 7])


def test_a_broker_that_is_down_is_no_missing_topic() -> None:
    with pytest.raises(semel.TimedOutError, match=r"cannot connect to 127\.0\.0\.1:1"):
        semel.read_table("t", bootstrap_servers="127.0.0.1:1")


def test_partitions_and_start_say_what_is_read(cluster: Cluster, topic: str) -> None:
    fill(cluster, topic, 30)
    brokers = cluster.bootstrap
    assert values(semel.read_table(topic, bootstrap_servers=brokers, partitions=[1])) == list(range(1, 30, 3))
    assert values(semel.read_table(topic, bootstrap_servers=brokers, partitions=[0, 1], start={1: 8})) == [
        *range(0, 30, 3), 25, 28,
    ]  # fmt: skip
    late = semel.read_table(topic, bootstrap_servers=brokers, start=AT + timedelta(seconds=27))
    assert values(late) == [27, 28, 29]
    assert semel.read_table(topic, bootstrap_servers=brokers, start=AT + timedelta(days=1)).num_rows == 0
    assert semel.read_table(topic, bootstrap_servers=brokers, start={0: 10, 1: 10, 2: 10}).num_rows == 0
    with pytest.raises(semel.OffsetOutOfRangeError, match=r"offset 99.*ends at 10"):
        semel.read_table(topic, bootstrap_servers=brokers, start={0: 99})
    with semel.Admin(bootstrap_servers=brokers) as admin:
        admin.delete_records({(topic, 0): 5})
    with pytest.raises(semel.OffsetOutOfRangeError):
        semel.read_table(topic, bootstrap_servers=brokers, start={0: 2})
    assert values(semel.read_table(topic, bootstrap_servers=brokers, partitions=[0])) == [15, 18, 21, 24, 27]
    with pytest.raises(semel.ConfigError, match="partition 2, which is not read"):
        semel.read_table(topic, bootstrap_servers=brokers, partitions=[0], start={2: 1})
    with pytest.raises(semel.ConfigError, match="start is 5"):
        semel.read_table(topic, bootstrap_servers=brokers, start=5)  # type: ignore[arg-type]


def test_a_table_that_is_read_in_the_name_of_a_group_moves_none_of_its_offsets(cluster: Cluster, topic: str) -> None:
    """As when the options of the group's own consumer are given: what it has not processed would be skipped."""
    fill(cluster, topic, 9)
    group = {"bootstrap_servers": cluster.bootstrap, "group_id": cluster.unique("group")}
    with semel.Consumer(**group) as consumer:
        consumer.commit({(topic, 0): 1})
    assert len(values(semel.read_table(topic, **group))) == 9
    with semel.Admin(bootstrap_servers=cluster.bootstrap) as admin:
        assert {place: at.offset for place, at in admin.group_offsets(group["group_id"]).items()} == {(topic, 0): 1}


def test_a_table_of_no_partitions_is_empty(cluster: Cluster, topic: str) -> None:
    assert semel.read_table(topic, bootstrap_servers=cluster.bootstrap, partitions=[]).num_rows == 0
    with pytest.raises(semel.ConfigError, match="start names partition 0, which is not read"):
        semel.read_table(topic, bootstrap_servers=cluster.bootstrap, partitions=[], start={0: 1})


def test_a_table_ends_before_open_transactions_and_passes_aborted_ones(cluster: Cluster, topic: str) -> None:
    options = {"bootstrap_servers": cluster.bootstrap, "transactional_id": cluster.unique("txn")}
    with Producer(**options) as producer:
        producer.init_transactions()
        for commit in (True, False):
            producer.begin_transaction()
            producer.send(topic, b"1" if commit else b"2", partition=0).result()
            producer.commit_transaction() if commit else producer.abort_transaction()
        started_s = time.monotonic()
        assert values(semel.read_table(topic, bootstrap_servers=cluster.bootstrap)) == [1], "markers stand at the end"
        assert time.monotonic() - started_s < 30
        producer.begin_transaction()
        producer.send(topic, b"3", partition=0).result()
        assert values(semel.read_table(topic, bootstrap_servers=cluster.bootstrap)) == [1]
        seen = semel.read_table(topic, bootstrap_servers=cluster.bootstrap, isolation_level="read_uncommitted")
        assert values(seen) == [1, 2, 3]
        producer.abort_transaction()


def test_a_table_larger_than_its_limit_is_an_error(cluster: Cluster, topic: str) -> None:
    fill(cluster, topic, 1000)
    with pytest.raises(semel.TableTooLargeError, match=r"limit_bytes \(5000\)"):
        semel.read_table(topic, bootstrap_servers=cluster.bootstrap, limit_bytes=5000)


def test_brokers_that_do_not_respond_are_not_taken_for_a_missing_topic(monkeypatch) -> None:
    monkeypatch.setattr("semel.client.read_table.LOOKUP_MS", 500)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(semel.KafkaError, match="did not respond") as raised:
            semel.read_table("t", bootstrap_servers=address)
    assert not isinstance(raised.value, semel.UnknownPartitionError)


def test_records_that_come_after_the_call_are_left_out(cluster: Cluster, topic: str, monkeypatch) -> None:
    from semel.client.consumer import Consumer

    fill(cluster, topic, 30)
    ends = Consumer.settled_ends
    written: list[int] = []

    def and_more_come(consumer, partitions):
        found = ends(consumer, partitions)
        fill(cluster, topic, 30, 30)
        written.append(30)
        return found

    monkeypatch.setattr(Consumer, "settled_ends", and_more_come)
    assert sorted(values(semel.read_table(topic, bootstrap_servers=cluster.bootstrap))) == list(range(30))
    assert written == [30]
