"""Old records go and old values give way to new ones while the broker runs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import confluent_kafka
import confluent_kafka.admin
import pytest

from semel.local.brokers import SemelBroker
from semel.protocol.batch import iter_headers
from semel.protocol.messages.records import (
    LIST_OFFSETS,
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsTopic,
)
from tests.support.direct import DirectClient, batch_of
from tests.support.waiting import PATIENCE_S, until

EAGER = ("log.retention.check.interval.ms=50", "log.cleaner.backoff.ms=50", "log.segment.delete.delay.ms=0")


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[SemelBroker]:
    options = [word for setting in EAGER for word in ("--set", setting)]
    with SemelBroker(tmp_path / "broker", "--fsync", "os", *options) as broker:
        yield broker


def first_offset(client: DirectClient, topic: str) -> int:
    ask = ListOffsetsTopic(topic, [ListOffsetsPartition(0, -1, -2)])
    answer = client.call(LIST_OFFSETS, ListOffsetsRequest(-1, 0, [ask]), 7)
    offset: int = answer.topics[0].partitions[0].offset
    return offset


def test_retention_by_size_takes_the_oldest_segments(broker: SemelBroker) -> None:
    with DirectClient(broker.bootstrap) as client:
        client.create_topic("t", segment_bytes="1048576", retention_bytes="2000000")
        for _ in range(10):
            client.produce("t", batch_of([os.urandom(500_000)]))
        until(lambda: first_offset(client, "t") >= 4, "the oldest segments are still there")
        assert first_offset(client, "t") <= 6, "about 2 MB and the active segment stay"
        assert client.fetch("t", 9).error_code == 0


def test_retention_by_time_takes_what_is_old(broker: SemelBroker) -> None:
    with DirectClient(broker.bootstrap) as client:
        client.create_topic("t", segment_bytes="1048576", retention_ms="300")
        client.produce("t", batch_of([b"x"] * 10))
        until(lambda: first_offset(client, "t") == 10, "the old records are still there")
        assert client.produce("t", batch_of([b"y"]))[1] == 10, "offsets go on"


def test_compaction_keeps_the_last_value_of_every_key(broker: SemelBroker) -> None:
    with DirectClient(broker.bootstrap) as client:
        client.create_topic("t", cleanup_policy="compact", segment_bytes="1048576", min_cleanable_dirty_ratio="0.01")
    producer = confluent_kafka.Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 5})
    for number in range(3000):
        producer.produce("t", os.urandom(1000) + b"%d" % number, key=b"key-%d" % (number % 10))
        producer.poll(0)
    assert producer.flush(30) == 0

    def records_below_the_active_segment() -> int:
        with DirectClient(broker.bootstrap) as client:
            return sum(header.record_count for _, header in iter_headers(client.fetch("t").records or b""))

    until(lambda: records_below_the_active_segment() < 1500, "nothing was compacted")
    last: dict[bytes, bytes] = {}
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": broker.bootstrap, "group.id": "g", "enable.partition.eof": True}
    )
    consumer.assign([confluent_kafka.TopicPartition("t", 0, 0)])
    while (message := consumer.poll(PATIENCE_S)) is not None and message.error() is None:
        last[message.key()] = message.value()[1000:]
    consumer.close()
    assert last == {b"key-%d" % index: b"%d" % (2990 + index) for index in range(10)}


def test_settings_that_are_altered_take_effect_at_once(broker: SemelBroker) -> None:
    admin = confluent_kafka.admin.AdminClient({"bootstrap.servers": broker.bootstrap})
    with DirectClient(broker.bootstrap) as client:
        client.create_topic("t")
        client.produce("t", batch_of([b"x"] * 5))
        time.sleep(0.3)
        assert first_offset(client, "t") == 0
        entry = confluent_kafka.admin.ConfigEntry(
            "retention.ms", "1", incremental_operation=confluent_kafka.admin.AlterConfigOpType.SET
        )
        resource = confluent_kafka.admin.ConfigResource("topic", "t", incremental_configs=[entry])
        admin.incremental_alter_configs([resource])[resource].result(PATIENCE_S)
        until(lambda: first_offset(client, "t") == 5, "the records are still there")
