"""C3: a consumer sees plain records and committed transactional records in offset order, and never a control record."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise
from typing import Any

import pytest
from confluent_kafka import Producer

from semel.local.brokers import SemelBroker
from tests.support.reading import create_topic, read_topic
from tests.support.transactional import transactional, write

ROUNDS = 40


def by_confluent(bootstrap: str, count: int) -> list[tuple[int, bytes]]:
    return [(seen.offset, seen.value or b"") for seen in read_topic(bootstrap, "t")]


def by_kafka_python(bootstrap: str, count: int) -> list[tuple[int, bytes]]:
    from kafka import KafkaConsumer, TopicPartition

    consumer: Any = KafkaConsumer(
        bootstrap_servers=bootstrap, isolation_level="read_committed", auto_offset_reset="earliest", check_crcs=True
    )
    consumer.assign([TopicPartition("t", 0)])
    seen: list[tuple[int, bytes]] = []
    for _ in range(60):
        for records in consumer.poll(timeout_ms=500).values():
            seen += [(record.offset, record.value) for record in records]
        if len(seen) >= count:
            break
    consumer.close()
    return seen


def by_aiokafka(bootstrap: str, count: int) -> list[tuple[int, bytes]]:
    from aiokafka import AIOKafkaConsumer, TopicPartition

    async def read() -> list[tuple[int, bytes]]:
        consumer: Any = AIOKafkaConsumer(
            bootstrap_servers=bootstrap, isolation_level="read_committed", auto_offset_reset="earliest"
        )
        await consumer.start()
        try:
            consumer.assign([TopicPartition("t", 0)])
            seen: list[tuple[int, bytes]] = []
            for _ in range(60):
                for records in (await consumer.getmany(timeout_ms=500)).values():
                    seen += [(record.offset, record.value) for record in records]
                if len(seen) >= count:
                    break
            return seen
        finally:
            await consumer.stop()

    return asyncio.run(read())


@pytest.mark.parametrize("read", [by_confluent, by_kafka_python, by_aiokafka])
def test_reader_sees_committed_and_plain_records_in_order(semel_broker: SemelBroker, read: Any):
    bootstrap = semel_broker.bootstrap
    create_topic(bootstrap, "t")
    rng = random.Random(3)
    plain = Producer({"bootstrap.servers": bootstrap, "log_level": 0})
    producer = transactional(bootstrap, "id")
    expected: list[bytes] = []
    for number in range(ROUNDS):
        kind = rng.choice(["plain", "commit", "commit", "abort"])
        value = b"%s-%d" % (kind.encode(), number)
        if kind == "plain":
            write(plain, [value], "t")
        else:
            producer.begin_transaction()
            write(producer, [value], "t")
            if number in (11, 23):
                semel_broker.kill()
                semel_broker.start()
            producer.commit_transaction(30) if kind == "commit" else producer.abort_transaction(30)
        expected += [] if kind == "abort" else [value]
    seen = read(bootstrap, len(expected))
    assert [value for _, value in seen] == expected
    assert all(a < b for (a, _), (b, _) in pairwise(seen))
    assert seen[-1][0] >= ROUNDS, "markers and aborted records took offsets and were not shown"
