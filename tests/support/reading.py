"""What is in a topic, read by confluent-kafka: a client that shares no code with the one under test."""

from __future__ import annotations

import time
from typing import NamedTuple

from confluent_kafka import Consumer, KafkaError, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from benchmarks.peers.raw_client import RawClient
from semel.protocol.messages.transactions import ListTransactionsRequest
from tests.support.waiting import PATIENCE_S, eventually

LOST = (KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN)  # a connection; librdkafka opens another one


class Seen(NamedTuple):
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]


def create_topic(bootstrap: str, name: str, partitions: int = 1, **config: str) -> str:
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    topic = NewTopic(name, partitions, 1, config={key.replace("_", "."): value for key, value in config.items()})
    for future in admin.create_topics([topic]).values():
        future.result(PATIENCE_S)
    return name


def settle(bootstrap: str) -> None:
    """Returns when no markers are on their way: a commit is answered before they are written, as on Kafka."""
    prepared = ListTransactionsRequest(["PrepareCommit", "PrepareAbort"])
    with RawClient(bootstrap) as client:
        eventually(lambda: client.call(66, 1, prepared).transaction_states, lambda busy: not busy)


def read_values(bootstrap: str, topic: str, isolation: str = "read_committed") -> list[tuple[int, int, bytes | None]]:
    """(partition, offset, value) of what `read_topic` finds."""
    return [(seen.partition, seen.offset, seen.value) for seen in read_topic(bootstrap, topic, isolation)]


def read_topic(
    bootstrap: str, topic: str, isolation: str = "read_committed", timeout_s: float = PATIENCE_S
) -> list[Seen]:
    """All records up to the end of each partition at this moment (the last stable offset, if committed).

    What was committed before is there: see `settle`."""
    settle(bootstrap)
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "independent-reader",
            "isolation.level": isolation,
            "enable.partition.eof": True,
            "enable.auto.commit": False,
            "check.crcs": True,
            "log_level": 0,
        }
    )
    try:
        metadata = consumer.list_topics(topic, timeout_s)
        partitions = list(metadata.topics[topic].partitions)
        consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
        return _read_to_the_end(consumer, len(partitions), time.monotonic() + timeout_s)
    finally:
        consumer.close()


def _read_to_the_end(consumer: Consumer, partitions: int, deadline_s: float) -> list[Seen]:
    seen: list[Seen] = []
    ended: set[int] = set()
    while len(ended) < partitions:
        assert time.monotonic() < deadline_s, f"the end was not reached in time; {len(seen)} records so far"
        for message in consumer.consume(1000, 0.2):
            if message.error():
                if message.error().code() == KafkaError._PARTITION_EOF:
                    ended.add(message.partition())
                else:
                    assert message.error().retriable() or message.error().code() in LOST, message.error()
                continue
            seen.append(
                Seen(
                    message.partition(),
                    message.offset(),
                    message.timestamp()[1],
                    message.key(),
                    message.value(),
                    message.headers() or [],
                )
            )
    return sorted(seen)


def committed_offset(bootstrap: str, group: str, topic: str, partition: int = 0) -> int:
    """A group's position; negative if it has none."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group, "log_level": 0})
    try:
        (found,) = consumer.committed([TopicPartition(topic, partition)], timeout=PATIENCE_S)
        assert found.error is None, found.error
        return int(found.offset)
    finally:
        consumer.close()
