"""Clients that we did not write run transactions and read committed records: confluent-kafka, kafka-python, aiokafka,
and Kafka's own Java client (TV2), the last one as a group of two with a rebalance in the middle."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from benchmarks.peers.raw_client import RawClient
from semel.local.apache_kafka import start_tool
from semel.local.brokers import SemelBroker
from tests.support.broker import Cluster
from tests.support.reading import create_topic, read_topic
from tests.support.transactional import transactional, write
from tests.support.waiting import PATIENCE_S

COPIER = "org.apache.kafka.tools.TransactionalMessageCopier"


@pytest.fixture
def cluster(shared_semel_broker: SemelBroker) -> Cluster:
    return Cluster("semel", shared_semel_broker)


def values(cluster: Cluster, topic: str) -> list[bytes | None]:
    return [seen.value for seen in read_topic(cluster.bootstrap, topic)]


def position(cluster: Cluster, group: str, topic: str) -> int:
    reader = Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": group, "isolation.level": "read_committed"})
    (found,) = reader.committed([TopicPartition(topic, 0)], 20)
    reader.close()
    return int(found.offset)


def test_confluent_kafka_commits_aborts_and_sends_offsets(cluster: Cluster) -> None:
    topic, group = create_topic(cluster.bootstrap, cluster.unique("txn")), cluster.unique("group")
    reader = Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": group})
    producer = transactional(cluster.bootstrap, cluster.unique("id"))
    for number in range(6):
        producer.begin_transaction()
        write(producer, [b"%d" % number], topic)
        producer.send_offsets_to_transaction(
            [TopicPartition(topic, 0, number + 1)], reader.consumer_group_metadata(), 30
        )
        producer.abort_transaction(30) if number % 3 == 1 else producer.commit_transaction(30)
    reader.close()
    assert values(cluster, topic) == [b"0", b"2", b"3", b"5"]
    assert position(cluster, group, topic) == 6


def test_kafka_python_commits_aborts_and_sends_offsets(cluster: Cluster) -> None:
    import kafka
    from kafka.structs import OffsetAndMetadata

    topic, group = create_topic(cluster.bootstrap, cluster.unique("txn")), cluster.unique("group")
    producer: Any = kafka.KafkaProducer(bootstrap_servers=cluster.bootstrap, transactional_id=cluster.unique("id"))
    producer.init_transactions()
    for number in range(6):
        producer.begin_transaction()
        producer.send(topic, b"%d" % number).get(PATIENCE_S)
        offsets = {kafka.TopicPartition(topic, 0): OffsetAndMetadata(number + 1, "", -1)}
        producer.send_offsets_to_transaction(offsets, group)
        producer.abort_transaction() if number % 3 == 1 else producer.commit_transaction()
    producer.close()
    assert values(cluster, topic) == [b"0", b"2", b"3", b"5"]
    assert position(cluster, group, topic) == 6


def test_aiokafka_commits_aborts_and_sends_offsets(cluster: Cluster) -> None:
    from aiokafka import AIOKafkaProducer
    from aiokafka import TopicPartition as Partition

    topic, group = create_topic(cluster.bootstrap, cluster.unique("txn")), cluster.unique("group")

    async def work() -> None:
        producer: Any = AIOKafkaProducer(bootstrap_servers=cluster.bootstrap, transactional_id=cluster.unique("id"))
        await producer.start()
        for number in range(6):
            await producer.begin_transaction()
            await producer.send_and_wait(topic, b"%d" % number)
            await producer.send_offsets_to_transaction({Partition(topic, 0): number + 1}, group)
            await (producer.abort_transaction() if number % 3 == 1 else producer.commit_transaction())
        await producer.stop()

    asyncio.run(asyncio.wait_for(work(), 60))
    assert values(cluster, topic) == [b"0", b"2", b"3", b"5"]
    assert position(cluster, group, topic) == 6


@pytest.mark.kafka
@pytest.mark.timeout(600)
def test_two_java_members_copy_every_record_once_with_a_rebalance_in_the_middle(
    cluster: Cluster, kafka_installation: Path
) -> None:
    """KIP-447: both members of the group write under ids of their own; the second joins while the first is at work."""
    count, bootstrap = 200, cluster.bootstrap
    source, target = cluster.unique("in"), cluster.unique("out")
    create_topic(bootstrap, source, 2)
    create_topic(bootstrap, target, 2)
    plain = Producer({"bootstrap.servers": bootstrap})
    expected = [b"%05d" % number for number in range(count)]
    for number, value in enumerate(expected):
        plain.produce(source, value, partition=number % 2)
    assert plain.flush(30) == 0
    group = cluster.unique("copiers")

    def member(name: str) -> Any:
        return start_tool(
            COPIER,
            "--broker-list", bootstrap, "--input-topic", source, "--input-partition", "-1", "--output-topic", target,
            "--consumer-group", group, "--transactional-id", f"{group}-{name}", "--transaction-size", "1",
            "--group-mode", "--use-group-metadata", "--enable-random-aborts",
        )  # fmt: skip

    with member("a") as first:
        first.wait_for_line(r'"totalProcessed":[1-9]', 90)
        first.pause()  # so that it cannot finish before the other one has started
        with member("b") as second:
            second.wait_for_line("ProcessLoop", 60)
            first.resume()
            first.wait_for_line(r'"remaining":0\b', 240)
            second.wait_for_line(r'"totalProcessed":[1-9]', 120)  # there was a rebalance while the first was at work
            second.wait_for_line(r'"remaining":0\b', 240)
            seen = sorted(value or b"" for value in values(cluster, target))
    assert seen == expected
    with RawClient(bootstrap) as client:
        epochs = [client.settled(f"{group}-{name}").producer_epoch for name in ("a", "b")]
    assert max(epochs) >= 10, f"TV2: every end took an epoch, {epochs}"


@pytest.mark.kafka
def test_kafkas_own_tool_lists_describes_and_aborts(cluster: Cluster, kafka_installation: Path) -> None:
    from semel.local.apache_kafka import java_tool

    topic, id_ = create_topic(cluster.bootstrap, cluster.unique("txn")), cluster.unique("hanging")
    producer = transactional(cluster.bootstrap, id_)
    producer.begin_transaction()
    write(producer, [b"value"], topic)
    where = ("--bootstrap-server", cluster.bootstrap)
    listed = java_tool("TransactionsCommand", *where, "list").stdout
    assert any(line.split()[0] == id_ and "Ongoing" in line for line in listed.splitlines() if line.strip())
    described = java_tool("TransactionsCommand", *where, "describe", "--transactional-id", id_).stdout
    assert f"{topic}-0" in described
    found = java_tool("TransactionsCommand", *where, "describe-producers", "--topic", topic, "--partition", "0").stdout
    assert len([line for line in found.splitlines() if line.strip()]) == 2, found
    java_tool(
        "TransactionsCommand", *where, "abort", "--topic", topic, "--partition", "0", "--start-offset", "0"
    )  # a marker by hand, as for a transaction that its coordinator has forgotten
    with RawClient(cluster.bootstrap) as client:
        fetched = client.fetch((topic, 0))
        assert (fetched.values, fetched.last_stable_offset) == ([], fetched.high_watermark)
    assert values(cluster, topic) == []
