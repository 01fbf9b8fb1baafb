"""B1: init, begin, send, send offsets, commit, abort, over many topics and partitions: readers see all or nothing."""

from __future__ import annotations

import random
import threading
from functools import partial
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition

from semel.local.brokers import SemelBroker
from tests.support.crashes import MortalBroker
from tests.support.reading import create_topic, read_topic
from tests.support.transactional import persist, transactional, write

TOPICS = ("left", "middle", "right")


def values(bootstrap: str, topic: str) -> list[bytes | None]:
    return [seen.value for seen in read_topic(bootstrap, topic)]


@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
def test_all_topics_show_a_transaction_or_none_when_the_broker_dies_between_two_markers(tmp_path: Path, commit: bool):
    with MortalBroker(tmp_path / "broker") as broker:
        for topic in TOPICS:
            create_topic(broker.bootstrap, topic, 2)
        broker.arm("marker.after:kill:3")  # of 6
        producer = transactional(broker.bootstrap, "id")
        producer.begin_transaction()
        for partition in (0, 1):
            write(producer, [b"%d" % partition], *TOPICS, partition=partition)
        end = producer.commit_transaction if commit else producer.abort_transaction
        ending = threading.Thread(target=persist, args=(lambda: end(30),))
        ending.start()
        broker.die_and_return("marker.after")
        ending.join(60)
        assert not ending.is_alive()
        expected = [b"0", b"1"] if commit else []
        assert [sorted(values(broker.bootstrap, topic)) for topic in TOPICS] == [expected] * 3


def test_topics_and_offsets_never_disagree_through_kills_at_random_moments(semel_broker: SemelBroker):
    rng = random.Random(7)
    bootstrap = semel_broker.bootstrap
    for topic in (*TOPICS, "source"):
        create_topic(bootstrap, topic)
    reader = Consumer({"bootstrap.servers": bootstrap, "group.id": "g", "log_level": 0})
    producer = transactional(bootstrap, "id")
    committed: list[bytes] = []
    kills = {12, 25, 40}
    for number in range(50):
        value = b"%02d" % number
        producer.begin_transaction()
        write(producer, [value], *TOPICS)
        position = [TopicPartition("source", 0, number + 1)]
        persist(partial(producer.send_offsets_to_transaction, position, reader.consumer_group_metadata(), 30))
        killer = threading.Timer(rng.random() * 0.01, semel_broker.kill)
        if number in kills:
            killer.start()
        commit = rng.random() < 0.7
        end = producer.commit_transaction if commit else producer.abort_transaction
        if number in kills:
            killer.join()
            semel_broker.start()
        persist(partial(end, 30))
        committed += [value] if commit else []
        if number in kills:  # librdkafka's next send_offsets_to_transaction would hang, here as on Apache Kafka
            producer = transactional(bootstrap, "id")
    assert [values(bootstrap, topic) for topic in TOPICS] == [committed] * 3
    (position,) = reader.committed([TopicPartition("source", 0)], 20)
    reader.close()
    assert position.offset == int(committed[-1]) + 1
