"""What the tests of both group protocols share: members that note what happens to them, and groups of mixed clients."""

from __future__ import annotations

import json
from collections.abc import Callable

from confluent_kafka import Consumer as ConfluentConsumer

from semel.client.admin import Admin
from semel.client.consumer import Consumer
from semel.client.consumer.core import RebalanceListener
from semel.client.producer import Producer
from semel.client.types import OffsetAndMetadata, TopicPartition
from tests.support.broker import Cluster
from tests.support.waiting import eventually, until

PARTITIONS = 6


class Diary(RebalanceListener):
    """Notes what happened, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, list[TopicPartition]]] = []

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]

    def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
        self.events.append(("assigned", partitions))

    def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
        self.events.append(("revoked", partitions))

    def on_partitions_lost(self, partitions: list[TopicPartition]) -> None:
        self.events.append(("lost", partitions))


class Committer(RebalanceListener):
    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer

    def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
        self._consumer.commit()


def fill(cluster: Cluster, topic: str, count: int) -> None:
    with Producer(bootstrap_servers=cluster.bootstrap) as producer:
        for number in range(count):
            producer.send(topic, value=b"%d" % number, key=b"%d" % number)


def read_once_across_a_rebalance(topic: str, first: Consumer, second: Consumer, max_records: int) -> None:
    """The topic holds 3,000 records."""
    first.subscribe([topic], Committer(first))
    seen = [record.value for record in first.poll(10_000, max_records=500)]
    second.subscribe([topic], Committer(second))

    def read_on() -> int:
        for member in (first, second):
            seen.extend(record.value for record in member.poll(100, max_records=max_records))
        return len(seen)

    eventually(read_on, lambda count: count >= 3000)
    assert first.assignment()
    assert second.assignment()
    assert sorted(seen, key=int) == [b"%d" % number for number in range(3000)]


def commits_before_partitions_move(
    cluster: Cluster, topic: str, group: str, first: Consumer, second: Consumer, settle: Callable[..., None]
) -> dict[TopicPartition, OffsetAndMetadata]:
    """With an interval that never passes: what the new owner knows was committed because partitions were given back."""
    fill(cluster, topic, 600)
    with Admin(bootstrap_servers=cluster.bootstrap) as admin:
        first.subscribe([topic])
        seen = []
        until(lambda: (seen.extend(first.poll(100)), len(seen) == 600)[1], "not everything was read")
        assert admin.group_offsets(group) == {}
        second.subscribe([topic])
        settle(first, second)
        moved = admin.group_offsets(group)
        ends = first.end_offsets(second.assignment())
        assert {partition: moved[partition].offset for partition in ends} == ends
        return moved


def share_with_confluent(
    topic: str, own: Consumer, foreign: ConfluentConsumer, settle: Callable[..., None], *, semel_first: bool
) -> None:
    if semel_first:
        own.subscribe([topic])
        settle(own)
    foreign.subscribe([topic])
    if not semel_first:
        until(lambda: (foreign.poll(0.1), len(foreign.assignment()) == PARTITIONS)[1])
        own.subscribe([topic])

    def is_done() -> bool:
        own.poll(100)
        foreign.poll(0.1)
        theirs = {TopicPartition(part.topic, part.partition) for part in foreign.assignment()}
        return is_shared(own.assignment(), theirs)

    until(is_done, "the partitions were not shared")
    foreign.close()
    settle(own)


def is_shared(mine: set[TopicPartition], theirs: set[TopicPartition]) -> bool:
    return len(theirs) == len(mine) == PARTITIONS // 2 and not theirs & mine


def owned_by_java(output: str, topic: str) -> set[TopicPartition]:
    """What VerifiableConsumer has now, from the events that it prints."""
    owned: set[TopicPartition] = set()
    for line in output.splitlines():
        event = json.loads(line) if line.startswith("{") else {}
        named = {TopicPartition(entry["topic"], entry["partition"]) for entry in event.get("partitions") or []}
        if event.get("name") == "partitions_assigned":
            owned |= named
        elif event.get("name") == "partitions_revoked":
            owned -= named
    return {partition for partition in owned if partition.topic == topic}
