"""A6: two producers, or a restarted one without a transactional id, may both write the same row: shown, not hidden."""

from __future__ import annotations

from confluent_kafka import Producer

from tests.support.broker import Cluster
from tests.support.direct import DirectClient
from tests.support.reading import read_values


def write(bootstrap: str, topic: str, value: bytes) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "log_level": 0})
    producer.produce(topic, value, partition=0)
    assert producer.flush(30) == 0


def test_a_restarted_idempotent_producer_writes_the_row_again(cluster: Cluster) -> None:
    topic = cluster.unique("a6")
    with DirectClient(cluster.bootstrap) as client:
        client.create_topic(topic)
        write(cluster.bootstrap, topic, b"payment 1")
        write(cluster.bootstrap, topic, b"payment 1")  # the "restart": it cannot know what its predecessor sent
        owners = {header.producer_id for header in client.headers(topic)}
    assert len(owners) == 2
    assert [value for _, _, value in read_values(cluster.bootstrap, topic)] == [b"payment 1", b"payment 1"]
