"""Clients that we did not write produce, consume and administer: confluent-kafka, kafka-python, aiokafka."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiokafka
import confluent_kafka
import kafka
import pytest
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from semel.local.brokers import SemelBroker
from tests.support.broker import Cluster
from tests.support.reading import create_topic
from tests.support.waiting import PATIENCE_S

COUNT = 300
COMPRESSIONS = ["none", "gzip", "snappy", "lz4", "zstd"]


@pytest.fixture
def cluster(shared_semel_broker: SemelBroker) -> Cluster:
    return Cluster("semel", shared_semel_broker)


def values(count: int = COUNT) -> list[bytes]:
    return [b"value-%d" % number for number in range(count)]


# -- confluent-kafka ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("idempotence", [False, True])
def test_confluent_kafka_writes_and_reads(cluster: Cluster, compression: str, idempotence: bool) -> None:
    topic = cluster.unique("confluent")
    confluent_produce(cluster, topic, **{"compression.type": compression, "enable.idempotence": idempotence})
    assert confluent_consume(cluster, topic) == values()


@pytest.mark.parametrize("acks", ["0", "1", "all"])
def test_confluent_kafka_writes_with_every_kind_of_acks(cluster: Cluster, acks: str) -> None:
    topic = cluster.unique("acks")
    confluent_produce(cluster, topic, acks=acks)
    assert confluent_consume(cluster, topic) == values()


def confluent_produce(cluster: Cluster, topic: str, **settings: Any) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": cluster.bootstrap, "linger.ms": 1, **settings})
    failures: list[Any] = []
    for value in values():
        producer.produce(topic, value, on_delivery=lambda error, _: failures.append(error) if error else None)
    assert producer.flush(30) == 0
    assert failures == []


def confluent_consume(cluster: Cluster, topic: str, count: int = COUNT) -> list[bytes | None]:
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": cluster.bootstrap, "group.id": "unused", "enable.auto.commit": False}
    )
    consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
    found: list[bytes | None] = []
    deadline_s = time.monotonic() + PATIENCE_S
    while len(found) < count and time.monotonic() < deadline_s:
        for message in consumer.consume(500, 0.5):
            assert message.error() is None, message.error()
            found.append(message.value())
    consumer.close()
    return found


def test_confluent_kafka_keeps_keys_headers_and_timestamps(cluster: Cluster) -> None:
    topic = create_topic(cluster.bootstrap, cluster.unique("fields"))
    producer = confluent_kafka.Producer({"bootstrap.servers": cluster.bootstrap})
    producer.produce(topic, None, key=b"k", headers=[("h", b"1"), ("h", None)], timestamp=1_700_000_000_123)
    producer.flush(PATIENCE_S)
    consumer = confluent_kafka.Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": "unused"})
    consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
    message = consumer.poll(PATIENCE_S)
    assert message is not None
    assert (message.key(), message.value(), message.headers()) == (b"k", None, [("h", b"1"), ("h", None)])
    assert message.timestamp() == (confluent_kafka.TIMESTAMP_CREATE_TIME, 1_700_000_000_123)
    times = [confluent_kafka.TopicPartition(topic, 0, 1_700_000_000_000)]
    assert consumer.offsets_for_times(times, timeout=PATIENCE_S)[0].offset == 0
    consumer.close()


def test_confluent_kafka_administers(cluster: Cluster) -> None:
    topic = cluster.unique("administered")
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    admin.create_topics([NewTopic(topic, 2, 1, config={"retention.ms": "60000"})])[topic].result(PATIENCE_S)
    with pytest.raises(confluent_kafka.KafkaException, match="already exists"):
        admin.create_topics([NewTopic(topic, 2, 1)])[topic].result(PATIENCE_S)
    admin.create_partitions([NewPartitions(topic, 5)])[topic].result(PATIENCE_S)
    assert len(admin.list_topics(topic, PATIENCE_S).topics[topic].partitions) == 5

    resource = ConfigResource(ResourceType.TOPIC, topic)
    assert admin.describe_configs([resource])[resource].result(PATIENCE_S)["retention.ms"].value == "60000"
    change = ConfigEntry("retention.ms", "70000", incremental_operation=AlterConfigOpType.SET)
    changed = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[change])
    admin.incremental_alter_configs([changed])[changed].result(PATIENCE_S)
    assert admin.describe_configs([resource])[resource].result(PATIENCE_S)["retention.ms"].value == "70000"

    confluent_produce(cluster, topic, partitioner="consistent")
    partitions = [confluent_kafka.TopicPartition(topic, index) for index in range(5)]
    latest = admin.list_offsets({partition: OffsetSpec.latest() for partition in partitions})
    assert sum(future.result(PATIENCE_S).offset for future in latest.values()) == COUNT
    assert admin.describe_cluster().result(PATIENCE_S).cluster_id
    admin.delete_topics([topic])[topic].result(PATIENCE_S)
    assert topic not in admin.list_topics(timeout=PATIENCE_S).topics


# -- kafka-python ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("compression", [None, "gzip", "snappy", "lz4", "zstd"])
def test_kafka_python_writes_and_reads(cluster: Cluster, compression: str | None) -> None:
    topic = cluster.unique("kafka-python")
    producer = kafka.KafkaProducer(bootstrap_servers=cluster.bootstrap, compression_type=compression)
    futures = [producer.send(topic, value) for value in values()]
    producer.flush(30)
    assert [future.get(PATIENCE_S).offset for future in futures] == list(range(COUNT))
    producer.close()
    consumer = kafka.KafkaConsumer(
        bootstrap_servers=cluster.bootstrap, auto_offset_reset="earliest", consumer_timeout_ms=20_000
    )
    partition = kafka.TopicPartition(topic, 0)
    consumer.assign([partition])
    assert [next(consumer).value for _ in range(COUNT)] == values()
    assert consumer.end_offsets([partition]) == {partition: COUNT}
    assert consumer.beginning_offsets([partition]) == {partition: 0}
    consumer.close()


def test_kafka_python_administers(cluster: Cluster) -> None:
    topic = cluster.unique("kafka-python-admin")
    admin = kafka.KafkaAdminClient(bootstrap_servers=cluster.bootstrap)
    admin.create_topics([kafka.admin.NewTopic(topic, 3, 1)])
    assert topic in admin.list_topics()
    admin.delete_topics([topic])
    assert topic not in admin.list_topics()
    admin.close()


# -- aiokafka ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("compression", [None, "gzip", "snappy", "lz4", "zstd"])
def test_aiokafka_writes_and_reads(cluster: Cluster, compression: str | None) -> None:
    topic = cluster.unique("aiokafka")

    async def go() -> list[bytes | None]:
        producer = aiokafka.AIOKafkaProducer(bootstrap_servers=cluster.bootstrap, compression_type=compression)
        await producer.start()
        try:
            futures = [await producer.send(topic, value) for value in values()]
            assert [(await future).offset for future in futures] == list(range(COUNT))
        finally:
            await producer.stop()
        consumer = aiokafka.AIOKafkaConsumer(
            topic, bootstrap_servers=cluster.bootstrap, auto_offset_reset="earliest", enable_auto_commit=False
        )
        await consumer.start()
        try:
            return [(await asyncio.wait_for(consumer.getone(), PATIENCE_S)).value for _ in range(COUNT)]
        finally:
            await consumer.stop()

    assert asyncio.run(go()) == values()
