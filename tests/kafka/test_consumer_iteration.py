"""Iterating a consumer: automatic commits never cover a record that was not yielded, or whose processing failed."""

from __future__ import annotations

from collections import deque
from itertools import islice

import pytest

from semel.client.admin import Admin
from semel.client.consumer import Consumer
from semel.client.producer import Producer
from semel.client.types import ConsumerRecord
from tests.support.broker import Cluster
from tests.support.reading import create_topic

COUNT = 100


@pytest.fixture
def topic(cluster: Cluster) -> str:
    name = create_topic(cluster.bootstrap, cluster.unique("iterated"), partitions=2)
    with Producer(bootstrap_servers=cluster.bootstrap) as producer:
        for number in range(COUNT):
            producer.send(name, b"%d" % number, partition=number % 2)
    return name


def consumer_of(cluster: Cluster, group: str, topic: str, **options: object) -> Consumer:
    consumer = Consumer(bootstrap_servers=cluster.bootstrap, group_id=group, auto_offset_reset="earliest", **options)
    consumer.assign([(topic, 0), (topic, 1)])
    return consumer


def committed(cluster: Cluster, group: str, topic: str) -> dict[int, int]:
    with Admin(bootstrap_servers=cluster.bootstrap) as admin:
        return {part.partition: at.offset for part, at in admin.group_offsets(group).items() if part.topic == topic}


def places(records: list[ConsumerRecord]) -> set[tuple[int, int]]:
    return {(record.partition, record.offset) for record in records}


def test_automatic_commit_never_covers_a_record_whose_processing_failed(cluster: Cluster, topic: str) -> None:
    """The exception leaves the loop at the third record of a hundred; the next consumer starts with that record."""
    group = cluster.unique("g")
    seen: list[ConsumerRecord] = []

    def process(record: ConsumerRecord) -> None:
        seen.append(record)
        if len(seen) == 3:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), consumer_of(cluster, group, topic) as consumer:
        deque(map(process, consumer))
    assert sum(committed(cluster, group, topic).values()) == 2
    with consumer_of(cluster, group, topic) as new_owner:
        again = list(islice(new_owner, COUNT - 2))
    assert places(again) | places(seen[:2]) == {(part, at) for part in (0, 1) for at in range(COUNT // 2)}
    assert not places(again) & places(seen[:2])


def test_commit_in_the_loop_covers_the_records_up_to_the_current_one(cluster: Cluster, topic: str) -> None:
    group = cluster.unique("g")
    with consumer_of(cluster, group, topic, enable_auto_commit=False) as consumer:
        for number, record in enumerate(consumer, 1):
            consumer.commit()
            assert sum(committed(cluster, group, topic).values()) == number
            assert consumer.position((topic, record.partition)) == record.offset + 1
            if number == 3:
                break


def test_records_that_a_loop_left_behind_are_returned_by_the_next_poll(cluster: Cluster, topic: str) -> None:
    with consumer_of(cluster, cluster.unique("g"), topic) as consumer:
        seen = list(islice(consumer, 3))
        seen.append(next(iter(consumer)))
        while len(seen) < COUNT:
            records = consumer.poll(30_000)
            assert records
            seen += records
    assert len(places(seen)) == len(seen) == COUNT


def test_loop_yields_nothing_from_before_a_seek(cluster: Cluster, topic: str) -> None:
    with consumer_of(cluster, cluster.unique("g"), topic) as consumer:
        records = iter(consumer)
        here = next(records).partition
        consumer.seek((topic, here), 40)
        seen = list(islice(records, 60))
        assert [record.offset for record in seen if record.partition == here] == list(range(40, 50))
        assert [record.offset for record in seen if record.partition != here] == list(range(50))


def test_loop_yields_nothing_of_a_paused_partition(cluster: Cluster, topic: str) -> None:
    with consumer_of(cluster, cluster.unique("g"), topic) as consumer:
        records = iter(consumer)
        here = next(records).partition
        consumer.pause((topic, here))
        assert [record.offset for record in islice(records, 50) if record.partition != here] == list(range(50))
        consumer.resume((topic, here))
        assert [(record.partition, record.offset) for record in islice(records, 49)] == [
            (here, n) for n in range(1, 50)
        ]


def test_loop_ends_with_the_consumer(cluster: Cluster, topic: str) -> None:
    consumer = consumer_of(cluster, cluster.unique("g"), topic)
    seen = 0
    for _ in consumer:
        seen += 1
        consumer.close()
    assert seen == 1
