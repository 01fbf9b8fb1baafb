"""Serializers and deserializers: a record that one of them cannot take is named, and no record is lost by it."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

import semel
from semel.client import Consumer, Producer, TopicPartition
from semel.serializers import from_json, from_text, to_json, to_text
from tests.support.broker import Cluster
from tests.support.polling import read, reader
from tests.support.reading import create_topic

PATIENCE_MS = 60_000


@pytest.fixture
def topic(cluster: Cluster) -> str:
    return create_topic(cluster.bootstrap, cluster.unique("serialized"), partitions=2)


def test_what_goes_in_comes_out_and_none_stays_a_tombstone(cluster: Cluster, topic: str) -> None:
    seen: list[Any] = []

    def noted(value: Any) -> bytes:
        seen.append(value)
        return json.dumps(value).encode()

    with Producer(bootstrap_servers=cluster.bootstrap, key_serializer=to_text, value_serializer=noted) as producer:
        producer.send(topic, {"n": 1}, key="a", partition=0)
        producer.send(topic, None, key="a", partition=0)
        producer.send(topic, [2], partition=0)
    assert seen == [{"n": 1}, [2]], "a tombstone is not serialized"
    with reader(cluster, topic, key_deserializer=from_text, value_deserializer=from_json) as consumer:
        assert [(r.key, r.value) for r in read(consumer, 3)] == [("a", {"n": 1}), ("a", None), (None, [2])]


def test_a_value_that_cannot_be_serialized_names_topic_and_key_and_nothing_is_sent(
    cluster: Cluster, topic: str
) -> None:
    with Producer(bootstrap_servers=cluster.bootstrap, value_serializer=to_json) as producer:
        with pytest.raises(
            semel.SerializationError, match=rf"{topic}.*b'the key'.*value cannot be serialized"
        ) as caught:
            producer.send(topic, object(), key=b"the key")
        assert (caught.value.topic, caught.value.key) == (topic, b"the key")
        assert caught.value.__cause__ is not None
        assert pickle.loads(pickle.dumps(caught.value)).key == b"the key"
        producer.send(topic, {"good": 1}, partition=0)
    with reader(cluster, topic) as consumer:
        assert [record.value for record in read(consumer, 1)] == [b'{"good":1}']


def test_a_serializer_cannot_make_a_tombstone_by_accident(cluster: Cluster, topic: str) -> None:
    with (
        Producer(bootstrap_servers=cluster.bootstrap, value_serializer=lambda _: None) as producer,
        pytest.raises(semel.SerializationError, match="tombstone"),
    ):
        producer.send(topic, "x")


def send_lines(cluster: Cluster, topic: str, partition: int, values: list[bytes]) -> None:
    with Producer(bootstrap_servers=cluster.bootstrap) as producer:
        for value in values:
            producer.send(topic, value, partition=partition)


def test_a_bad_record_is_named_after_all_before_it_and_can_be_retried_or_skipped(cluster: Cluster, topic: str) -> None:
    send_lines(cluster, topic, 0, [b"1", b"2", b"not json", b"4"])
    with reader(cluster, topic, value_deserializer=from_json) as consumer:
        assert [record.value for record in consumer.poll(PATIENCE_MS)] == [1, 2]
        for _ in range(2):
            with pytest.raises(semel.DeserializationError, match=rf"{topic}-0: the value at offset 2") as caught:
                consumer.poll(PATIENCE_MS)
            assert (caught.value.partition, caught.value.offset) == (TopicPartition(topic, 0), 2)
            assert caught.value.record is not None
            assert caught.value.record.value == b"not json"
            assert consumer.position((topic, 0)) == 2
        assert pickle.loads(pickle.dumps(caught.value)).record == caught.value.record
        consumer.seek((topic, 0), 3)
        assert [record.value for record in consumer.poll(PATIENCE_MS)] == [4]


def test_a_bad_record_loses_nothing_of_other_partitions(cluster: Cluster, topic: str) -> None:
    send_lines(cluster, topic, 0, [b"1", b"bad", b"3"])
    send_lines(cluster, topic, 1, [b"11", b"12", b"13"])
    found: list[int] = []
    errors = 0
    with reader(cluster, topic, 0, 1, value_deserializer=from_json) as consumer:
        while len(found) < 5:
            try:
                batch = consumer.poll(PATIENCE_MS)
                assert batch
                found += [record.value for record in batch]
            except semel.DeserializationError as error:
                errors += 1
                consumer.seek(error.partition or (topic, -1), error.offset + 1)
    assert sorted(found) == [1, 3, 11, 12, 13]
    assert errors == 1


def test_a_loop_yields_what_stands_before_a_bad_record_and_then_raises(cluster: Cluster, topic: str) -> None:
    send_lines(cluster, topic, 0, [b"1", b"2", b"bad", b"4"])
    found: list[int] = []
    with reader(cluster, topic, value_deserializer=from_json) as consumer:
        with pytest.raises(semel.DeserializationError, match="offset 2"):
            found.extend(record.value for record in consumer)
        assert found == [1, 2]
        consumer.seek((topic, 0), 3)
        assert next(iter(consumer)).value == 4


def test_ctrl_c_in_a_deserializer_loses_nothing(cluster: Cluster, topic: str) -> None:
    send_lines(cluster, topic, 0, [b"1", b"2", b"3"])
    interrupted: list[bytes] = []

    def interrupts_once(data: bytes) -> int:
        if data == b"2" and not interrupted:
            interrupted.append(data)
            raise KeyboardInterrupt
        return int(data)

    with reader(cluster, topic, value_deserializer=interrupts_once) as consumer:
        with pytest.raises(KeyboardInterrupt):
            consumer.poll(PATIENCE_MS)
        assert interrupted
        assert [record.value for record in read(consumer, 3)] == [1, 2, 3]


def test_tables_hold_bytes_whatever_the_serializers(cluster: Cluster, topic: str) -> None:
    import pyarrow as pa

    with Producer(bootstrap_servers=cluster.bootstrap, value_serializer=to_json) as producer:
        producer.send_table(topic, pa.table({"value": [b"raw"], "partition": pa.array([0], pa.int32())}))
    with reader(cluster, topic, value_deserializer=from_json) as consumer:
        assert consumer.poll_table(PATIENCE_MS).column("value").to_pylist() == [b"raw"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Producer, "key_serializer"),
        (Producer, "value_serializer"),
        (Consumer, "key_deserializer"),
        (Consumer, "value_deserializer"),
    ],
)
def test_a_name_of_a_java_class_is_refused(kind: Any, name: str) -> None:
    with pytest.raises(semel.ConfigError, match=rf"{name}.*must be a function"):
        kind(bootstrap_servers="localhost:1", **{name: "org.apache.kafka.common.serialization.StringSerializer"})
