"""A consumer that its listener closes, and callbacks that raise: its place in the group is given up all the same."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from semel.client.admin import Admin
from semel.client.consumer import Consumer
from semel.client.consumer.core import RebalanceListener
from semel.client.errors import ClosedError
from semel.client.types import TopicPartition
from semel.local.brokers import SemelBroker
from tests.support.reading import create_topic


class Surprise(Exception):
    pass


def surprise(*_: object) -> None:
    raise Surprise("of the callback")


class Closing(RebalanceListener):
    """Closes its consumer, at every call."""

    def __init__(self, consumer: Consumer, at: str) -> None:
        self._consumer, self._at = consumer, at
        self.calls: list[str] = []

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name == self._at:
            self._consumer.close()

    def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
        self._called("assigned")

    def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
        self._called("revoked")


@pytest.fixture
def bootstrap(shared_semel_broker: SemelBroker) -> str:
    return shared_semel_broker.bootstrap


def member(bootstrap: str, group: str, **options: Any) -> Consumer:
    return Consumer(bootstrap_servers=bootstrap, group_id=group, auto_offset_reset="earliest", **options)


def members_of(bootstrap: str, group: str) -> int:
    with Admin(bootstrap_servers=bootstrap) as admin:
        return len(admin.describe_group(group).members)


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
@pytest.mark.parametrize("at", ["assigned", "revoked"])
def test_listener_may_close_its_consumer(bootstrap: str, protocol: str, at: str) -> None:
    topic = group = create_topic(bootstrap, f"closed-when-{at}-{protocol}")
    consumer = member(bootstrap, group, group_protocol=protocol)
    listener = Closing(consumer, at)
    consumer.subscribe([topic], listener)
    with contextlib.suppress(ClosedError):
        while not consumer.assignment():
            consumer.poll(100)
        consumer.unsubscribe()
    assert listener.calls == ["assigned", "revoked"]
    assert members_of(bootstrap, group) == 0
    with pytest.raises(ClosedError):
        consumer.poll(0)


def test_loop_over_a_consumer_ends_when_its_listener_closes_it(bootstrap: str) -> None:
    topic = group = create_topic(bootstrap, "closed-in-a-loop")
    consumer = member(bootstrap, group)
    consumer.subscribe([topic], Closing(consumer, "assigned"))
    assert list(consumer) == []


def test_callback_that_raises_keeps_no_commit_and_no_place_in_the_group(bootstrap: str) -> None:
    topic = group = create_topic(bootstrap, "raising-callback")
    place = TopicPartition(topic, 0)
    consumer = member(bootstrap, group)
    consumer.subscribe([topic])
    while not consumer.assignment():
        consumer.poll(100)
    consumer.commit_async({place: 1}, surprise)
    with pytest.raises(Surprise):
        consumer.commit({place: 2})
    assert consumer.committed()[place].offset == 2
    consumer.seek(place, 5)  # what close() is to commit
    consumer.commit_async({place: 3}, surprise)
    with pytest.raises(Surprise):
        consumer.close()
    assert members_of(bootstrap, group) == 0
    with Admin(bootstrap_servers=bootstrap) as admin:
        assert admin.group_offsets(group)[place].offset == 5
