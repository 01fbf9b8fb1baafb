"""Commits of one consumer: they keep their order, and find their coordinator again."""

from __future__ import annotations

import pytest

from semel.client.admin import Admin
from semel.client.cluster import BlockingCalls
from semel.client.cluster_calls import group_coordinator
from semel.client.consumer import Consumer
from semel.client.errors import KafkaError, TimedOutError
from semel.client.metadata import BrokerAddress
from semel.client.types import TopicPartition
from semel.protocol.messages.offsets import OFFSET_COMMIT
from semel.prove.proxy import Effect, Proxy, Rule
from tests.support.broker import Cluster
from tests.support.reading import create_topic
from tests.support.waiting import until

LATE_S = 1.0
NOWHERE = BrokerAddress(99, "127.0.0.1", 1)


@pytest.fixture
def place(cluster: Cluster) -> TopicPartition:
    return TopicPartition(create_topic(cluster.bootstrap, cluster.unique("committed")), 0)


def consumer_of(bootstrap: str, group: str, place: TopicPartition, **options: object) -> Consumer:
    consumer = Consumer(bootstrap_servers=bootstrap, group_id=group, enable_auto_commit=False, **options)
    consumer.assign([place])
    return consumer


def test_later_commit_is_what_stays_although_an_earlier_one_is_late(cluster: Cluster, place: TopicPartition) -> None:
    """The request of commit_async() is held up on its way; commit() must not overtake it."""
    told: list[KafkaError | None] = []
    with Proxy(cluster.bootstrap) as proxy:
        held_up = proxy.add(Rule(OFFSET_COMMIT, Effect.DELAY_REQUEST, delay_ms=int(1_000 * LATE_S)))
        with consumer_of(proxy.bootstrap, cluster.unique("g"), place) as consumer:
            consumer.commit_async({place: 3}, lambda _, error: told.append(error))
            consumer.commit({place: 9})
            until(lambda: (consumer.poll(50), told)[1], "commit_async() did not call back")
            assert consumer.committed()[place].offset == 9
        held_up.assert_fired()
    assert told == [None]


def test_commits_in_a_row_call_back_in_their_order(cluster: Cluster, place: TopicPartition) -> None:
    told: list[int] = []
    with consumer_of(cluster.bootstrap, cluster.unique("g"), place) as consumer:
        for offset in range(20):
            consumer.commit_async({place: offset}, lambda offsets, error: told.append(offsets[place].offset))
        consumer.commit({place: 20})
        assert told == list(range(20))
        assert consumer.committed()[place].offset == 20


def test_commit_that_is_tried_again_is_not_followed_by_a_later_one(cluster: Cluster, place: TopicPartition) -> None:
    """The response to the first attempt is lost; a callback commits more in the meantime."""
    with Proxy(cluster.bootstrap) as proxy:
        lost = proxy.add(Rule(OFFSET_COMMIT, Effect.DROP_RESPONSE, nth=2))
        with consumer_of(proxy.bootstrap, cluster.unique("g"), place) as consumer:
            consumer.commit_async({place: 1}, lambda *_: consumer.commit_async({place: 3}))
            consumer.commit({place: 2})
            until(lambda: (consumer.poll(50), consumer.committed()[place].offset == 3)[1], "3 was not committed")
        lost.assert_fired()


def test_commit_finds_a_coordinator_that_moved(cluster: Cluster, place: TopicPartition) -> None:
    """What the consumer knows of its coordinator leads to nobody: an assign() consumer looks for it again."""
    group = cluster.unique("g")
    with consumer_of(cluster.bootstrap, group, place, auto_offset_reset="earliest") as consumer:
        calls = consumer._engine.calls
        assert isinstance(calls, BlockingCalls)
        coordinators = calls.coordinators
        coordinators[group_coordinator(group)] = NOWHERE
        consumer.commit({place: 5})
        coordinators[group_coordinator(group)] = NOWHERE
        for connection in list(calls.connections.values()):
            connection.close()
        consumer.commit({place: 7})
        coordinators[group_coordinator(group)] = NOWHERE
        assert consumer.committed()[place].offset == 7
        coordinators[group_coordinator(group)] = NOWHERE
        consumer.seek_to_committed()
        assert consumer.position(place) == 7
    with Admin(bootstrap_servers=cluster.bootstrap) as admin:
        admin._cluster.calls.coordinators[group_coordinator(group)] = NOWHERE
        assert admin.group_offsets(group)[place].offset == 7


def test_commit_keeps_its_timeout_behind_one_without_response(cluster: Cluster, place: TopicPartition) -> None:
    """The error says what was waited for; the consumer commits again as soon as the broker responds."""
    told: list[KafkaError | None] = []
    with Proxy(cluster.bootstrap) as proxy:
        silent = proxy.add(Rule(OFFSET_COMMIT, Effect.SILENCE_RESPONSE))
        with consumer_of(proxy.bootstrap, cluster.unique("g"), place, request_timeout_ms=3000) as consumer:
            consumer.commit_async({place: 3}, lambda _, error: told.append(error))
            with pytest.raises(TimedOutError, match=r"within 0\.3 s"):
                consumer.commit({place: 4}, timeout_ms=300)
            assert told == []
            consumer.commit({place: 5})
            assert isinstance(told[0], TimeoutError)
            assert consumer.committed()[place].offset == 5
        silent.assert_fired()
