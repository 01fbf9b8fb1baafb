"""Reads topics for the count: through confluent-kafka where it is installed, else through semel's own consumer."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

from semel.demo.workloads import Record


class _Own(NamedTuple):
    timestamp_ms: int
    value: bytes | None


def reader_name() -> str:
    """Who counts."""
    if find_spec("confluent_kafka") is None:
        return "semel's own consumer (an independent one needs `pip install semel[prove]`)"
    import confluent_kafka

    return f"confluent-kafka {confluent_kafka.__version__}"


def read(brokers: str, topic: str) -> Sequence[Record]:
    """Every committed record."""
    if find_spec("confluent_kafka") is None:
        return _read_own(brokers, topic)
    from semel.prove.checker import read as read_independently

    return read_independently(brokers, [topic])


def _read_own(brokers: str, topic: str) -> Sequence[Record]:
    from semel.client.consumer import Consumer
    from semel.client.consumer_types import TopicPartition

    with Consumer(bootstrap_servers=brokers, isolation_level="read_committed") as consumer:
        places = [TopicPartition(topic, number) for number in consumer.partitions_for(topic)]
        consumer.assign(places)
        consumer.seek_to_beginning(*places)
        ends = consumer.end_offsets(places)
        found: list[Record] = []
        while any(consumer.position(place) < ends[place] for place in places):
            found += [_Own(record.timestamp, record.value) for record in consumer.poll(timeout_ms=500)]
        return found
