"""Consumer groups on both brokers: sharing, rebalancing, static members, and groups of mixed clients."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer as ConfluentConsumer

from semel.client.admin import Admin
from semel.client.consumer import Consumer
from semel.client.errors import AbortableError, FencedError
from semel.client.producer import Producer
from semel.client.types import CommitFailedError, RebalanceError, TopicPartition
from semel.local.apache_kafka import start_tool
from semel.local.brokers import SemelBroker
from semel.protocol.api import Api
from semel.protocol.messages.groups import HEARTBEAT, JOIN_GROUP, SYNC_GROUP
from semel.prove.proxy import Effect, Proxy, Rule
from tests.support.broker import Cluster
from tests.support.group_members import (
    PARTITIONS,
    Diary,
    commits_before_partitions_move,
    fill,
    is_shared,
    owned_by_java,
    read_once_across_a_rebalance,
    share_with_confluent,
)
from tests.support.reading import create_topic
from tests.support.waiting import PATIENCE_S, eventually, until

BEFORE_A_SESSION_ENDS_S = 30.0  # of 45 s: its end would also take from a member what it did not give back


@pytest.fixture
def topic(cluster: Cluster) -> str:
    return create_topic(cluster.bootstrap, cluster.unique("grouped"), partitions=PARTITIONS)


@pytest.fixture
def group(cluster: Cluster) -> str:
    return cluster.unique("group")


@pytest.fixture
def brisk_broker(tmp_path: Path) -> Iterator[SemelBroker]:
    """A broker that lets sessions be short, so that their ends can be waited for."""
    with SemelBroker(tmp_path / "brisk", "--set", "group.min.session.timeout.ms=100") as broker:
        yield broker


def member_of(cluster: Cluster, group: str, **options: object) -> Consumer:
    defaults = {"auto_offset_reset": "earliest", "heartbeat_interval_ms": 300, "enable_auto_commit": False}
    return Consumer(bootstrap_servers=cluster.bootstrap, group_id=group, **{**defaults, **options})


def settle(*consumers: Consumer, total: int = PARTITIONS) -> None:
    """Polls everyone until all partitions are given out and everyone has some."""

    def polled() -> list[set[TopicPartition]]:
        for consumer in consumers:
            consumer.poll(100)
        return [consumer.assignment() for consumer in consumers]

    def is_agreement(shares: list[set[TopicPartition]]) -> bool:
        return sum(map(len, shares)) == total == len(set().union(*shares)) and all(shares)

    eventually(polled, is_agreement, BEFORE_A_SESSION_ENDS_S, "no agreement")


# --- sharing ---


@pytest.mark.parametrize("strategy", ["range", "roundrobin", "sticky", "cooperative-sticky"])
def test_members_share_all_partitions_and_take_over_what_a_leaver_had(
    cluster: Cluster, topic: str, group: str, strategy: str
) -> None:
    options = {"partition_assignment_strategy": strategy}
    with ExitStack() as stack:
        members = [stack.enter_context(member_of(cluster, group, **options)) for _ in range(3)]
        for member in members:
            member.subscribe([topic])
        settle(*members)
        assert [len(member.assignment()) for member in members] == [2, 2, 2]
        had = [member.assignment() for member in members[1:]]
        members[0].close()
        settle(*members[1:])
        assert [len(member.assignment()) for member in members[1:]] == [3, 3]
        if strategy == "sticky":  # its members are all in one generation here
            assert all(before < member.assignment() for before, member in zip(had, members[1:], strict=True))
        members[1].unsubscribe()
        settle(members[2])


def test_group_reads_every_record_once_across_rebalances(cluster: Cluster, topic: str, group: str) -> None:
    fill(cluster, topic, 3000)
    with member_of(cluster, group) as first, member_of(cluster, group) as second:
        read_once_across_a_rebalance(topic, first, second, max_records=100)


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
def test_automatic_commit_comes_before_partitions_move(cluster: Cluster, topic: str, group: str, strategy: str) -> None:
    options = {
        "partition_assignment_strategy": strategy,
        "enable_auto_commit": True,
        "auto_commit_interval_ms": 3_600_000,
    }
    with member_of(cluster, group, **options) as first, member_of(cluster, group, **options) as second:
        moved = commits_before_partitions_move(cluster, topic, group, first, second, settle)
        assert all(moved[partition].offset == second.position(partition) for partition in second.assignment())


def test_eager_members_give_everything_back_cooperative_ones_only_what_moves(
    cluster: Cluster, topic: str, group: str
) -> None:
    for strategy in ("range", "cooperative-sticky"):
        diary = Diary()
        options = {"partition_assignment_strategy": strategy}
        name = f"{group}-{strategy}"
        with member_of(cluster, name, **options) as first, member_of(cluster, name, **options) as second:
            first.subscribe([topic], diary)
            settle(first)
            second.subscribe([topic])
            settle(first, second)
        kinds = [kind for kind, _ in diary.events]
        revoked = [len(partitions) for kind, partitions in diary.events if kind == "revoked"]
        assert kinds[0] == "assigned"
        assert "lost" not in kinds
        assert revoked[0] == (PARTITIONS if strategy == "range" else PARTITIONS // 2)


def test_cooperative_member_keeps_reading_while_others_join(cluster: Cluster, topic: str, group: str) -> None:
    fill(cluster, topic, 600)
    options = {"partition_assignment_strategy": "cooperative-sticky"}
    with member_of(cluster, group, **options) as first, member_of(cluster, group, **options) as second:
        diary = Diary()
        first.subscribe([topic], diary)
        settle(first)
        kept_positions = {part: first.position(part) for part in first.assignment()}
        second.subscribe([topic])
        settle(first, second)
        for partition in first.assignment():
            assert first.position(partition) >= kept_positions[partition]


def test_pattern_subscription_finds_topics_that_come_later(cluster: Cluster, group: str) -> None:
    stem = cluster.unique("matched")
    first = create_topic(cluster.bootstrap, f"{stem}.a")
    with member_of(cluster, group, metadata_max_age_ms=300) as consumer:
        consumer.subscribe(re.compile(re.escape(stem) + r"\..*"))
        settle(consumer, total=1)
        assert consumer.subscription() == {first}
        second = create_topic(cluster.bootstrap, f"{stem}.b")
        settle(consumer, total=2)
        assert consumer.subscription() == {first, second}


def test_pattern_subscription_drops_topics_that_were_deleted(cluster: Cluster, group: str) -> None:
    """Each member drops them, also those of which it reads nothing, and nobody's look-up creates them again."""
    stem = cluster.unique("dropped")
    topics = [create_topic(cluster.bootstrap, f"{stem}.{letter}", partitions=2) for letter in "abc"]
    with (
        member_of(cluster, group, metadata_max_age_ms=300) as first,
        member_of(cluster, group, metadata_max_age_ms=300) as second,
        Admin(bootstrap_servers=cluster.bootstrap) as admin,
    ):
        members = (first, second)
        for member in members:
            member.subscribe(re.compile(re.escape(stem) + r"\..*"))
        settle(*members, total=6)

        def has_dropped_down_to(left: set[str]) -> bool:
            for member in members:
                member.poll(100)
            owned = {partition.topic for member in members for partition in member.assignment()}
            return owned == left and all(member.subscription() == left for member in members)

        admin.delete_topics(topics[:1])
        until(lambda: has_dropped_down_to(set(topics[1:])), "the deleted topic is still subscribed to")
        admin.delete_topics(topics[1:])
        until(lambda: has_dropped_down_to(set()), "the last topics are still subscribed to")
        assert not [name for name in admin.list_topics() if name.startswith(stem)]
        again = create_topic(cluster.bootstrap, f"{stem}.d", partitions=2)
        settle(*members, total=2)
        assert first.subscription() == {again}


def test_added_partitions_are_shared_out(cluster: Cluster, group: str) -> None:
    topic = create_topic(cluster.bootstrap, cluster.unique("growing"))
    with (
        member_of(cluster, group, metadata_max_age_ms=300) as consumer,
        Admin(bootstrap_servers=cluster.bootstrap) as admin,
    ):
        consumer.subscribe([topic])
        settle(consumer, total=1)
        admin.create_partitions(topic, 3)
        settle(consumer, total=3)


def test_subscription_changed_during_a_rebalance_is_heard(cluster: Cluster, topic: str, group: str) -> None:
    other = create_topic(cluster.bootstrap, cluster.unique("changed"))
    with member_of(cluster, group) as consumer:
        consumer.subscribe([topic])
        until(lambda: (consumer.poll(0), consumer._engine.member.is_rebalancing)[1])  # type: ignore[union-attr]
        consumer.subscribe([other])
        until(lambda: (consumer.poll(100), consumer.assignment() == {(other, 0)})[1])


def test_topic_created_after_the_subscription_is_read(cluster: Cluster, group: str) -> None:
    topic = cluster.unique("late")
    with member_of(cluster, group, allow_auto_create_topics=False) as consumer:
        consumer.subscribe([topic])
        with pytest.raises(RebalanceError, match="not in a generation"):
            consumer.group_metadata()
        assert consumer.poll(500) == []
        create_topic(cluster.bootstrap, topic)
        fill(cluster, topic, 1)
        settle(consumer, total=1)


# --- members that come back, stay away, or are slow ---


def test_static_member_comes_back_without_a_rebalance(cluster: Cluster, topic: str, group: str) -> None:
    with member_of(cluster, group, group_instance_id="one") as other:
        first = member_of(cluster, group, group_instance_id="two")
        other.subscribe([topic])
        first.subscribe([topic])
        settle(other, first)
        before, generation = first.assignment(), other.group_metadata().generation_id
        first.close()
        with member_of(cluster, group, group_instance_id="two") as again:
            again.subscribe([topic])
            settle(other, again)
            assert again.assignment() == before
            assert other.group_metadata().generation_id == generation


def test_second_holder_of_an_instance_id_fences_the_first(cluster: Cluster, topic: str, group: str) -> None:
    with (
        member_of(cluster, group, group_instance_id="same") as first,
        member_of(cluster, group, group_instance_id="same") as second,
    ):
        first.subscribe([topic])
        settle(first)
        second.subscribe([topic])
        settle(second)
        with pytest.raises(FencedError, match=r"group\.instance\.id took over"):
            until(lambda: first.poll(200), "the first holder was not fenced")
        with pytest.raises(FencedError):
            first.poll(200)


def test_heartbeats_keep_a_slow_program_in_the_group(brisk_broker: SemelBroker) -> None:
    """It works longer than its session lasts, but not longer than max.poll.interval.ms."""
    cluster = Cluster("semel", brisk_broker)
    topic = create_topic(cluster.bootstrap, "slow", partitions=PARTITIONS)
    options = {"session_timeout_ms": 5_000, "heartbeat_interval_ms": 100}  # heartbeats are late on a busy machine
    with member_of(cluster, "g", **options) as consumer:
        diary = Diary()
        consumer.subscribe([topic], diary)
        settle(consumer)
        generation = consumer.group_metadata()
        time.sleep(6.5)  # the work: nothing can be awaited here, the point is that poll() is not called
        consumer.poll(200)
        assert consumer.group_metadata() == generation
        assert [kind for kind, _ in diary.events] == ["assigned"]


def test_program_slower_than_the_poll_interval_loses_its_partitions(brisk_broker: SemelBroker) -> None:
    cluster = Cluster("semel", brisk_broker)
    topic = create_topic(cluster.bootstrap, "too-slow", partitions=PARTITIONS)
    fill(cluster, topic, 10)
    options = {"session_timeout_ms": 6_000, "heartbeat_interval_ms": 100, "max_poll_interval_ms": 3_000}
    with member_of(cluster, "g", **options) as slow, member_of(cluster, "g", **options) as quick:
        diary = Diary()
        slow.subscribe([topic], diary)
        settle(slow)
        quick.subscribe([topic])
        until(
            lambda: (quick.poll(100), len(quick.assignment()) == PARTITIONS)[1],
            "the slow member kept its partitions",
        )
        with pytest.raises(CommitFailedError, match=r"max\.poll\.interval\.ms"):
            slow.commit({(topic, 0): 1})
        with Producer(bootstrap_servers=cluster.bootstrap, transactional_id="t") as producer:
            producer.init_transactions()
            producer.begin_transaction()
            with pytest.raises(AbortableError, match="UNKNOWN_MEMBER_ID"):
                producer.send_offsets_to_transaction({(topic, 0): 1}, slow.group_metadata())
        slow.poll(200)
        assert "lost" in [kind for kind, _ in diary.events]
        settle(slow, quick)


def test_program_that_does_not_poll_leaves_the_group_by_itself(brisk_broker: SemelBroker) -> None:
    """Alone: nobody's rebalance would show that it is gone, and its heartbeats go on. Its next poll joins again."""
    cluster = Cluster("semel", brisk_broker)
    topic = create_topic(cluster.bootstrap, "alone", partitions=PARTITIONS)
    diary = Diary()
    with (
        member_of(cluster, "g", heartbeat_interval_ms=100, max_poll_interval_ms=3_000) as consumer,
        Admin(bootstrap_servers=cluster.bootstrap) as admin,
    ):
        consumer.subscribe([topic], diary)
        settle(consumer)
        until(lambda: not admin.describe_group("g").members, "it is still a member", BEFORE_A_SESSION_ENDS_S)
        settle(consumer)
        assert [kind for kind, _ in diary.events] == ["assigned", "lost", "assigned"]


def test_transaction_of_a_member_that_lost_its_place_is_refused(brisk_broker: SemelBroker) -> None:
    """D2: the group's generation fences, whatever the transactional id is."""
    cluster = Cluster("semel", brisk_broker)
    topic = create_topic(cluster.bootstrap, "fenced", partitions=PARTITIONS)
    with (
        member_of(cluster, "g") as first,
        member_of(cluster, "g") as second,
        Producer(bootstrap_servers=cluster.bootstrap, transactional_id="t") as producer,
    ):
        producer.init_transactions()
        first.subscribe([topic])
        settle(first)
        stale = first.group_metadata()
        second.subscribe([topic])
        settle(first, second)
        producer.begin_transaction()
        with pytest.raises(AbortableError, match="ILLEGAL_GENERATION"):
            producer.send_offsets_to_transaction({(topic, 0): 5}, stale)
        producer.abort_transaction()
        assert first.committed([(topic, 0)]) == {}


@pytest.mark.parametrize("api", [JOIN_GROUP, SYNC_GROUP, HEARTBEAT], ids=lambda api: api.name)
@pytest.mark.parametrize("effect", [Effect.DROP_REQUEST, Effect.DROP_RESPONSE])
def test_lost_connections_to_the_coordinator_are_mended(cluster: Cluster, topic: str, group: str, api, effect) -> None:
    with Proxy(cluster.bootstrap) as proxy:
        injected = proxy.add(Rule(api, effect))
        with Consumer(
            bootstrap_servers=proxy.bootstrap, group_id=group, heartbeat_interval_ms=200, session_timeout_ms=6000
        ) as consumer:
            consumer.subscribe([topic])
            settle(consumer)
            assert injected.fired.wait(PATIENCE_S)
            consumer.poll(500)
            settle(consumer)
        injected.assert_fired()


def test_idle_connection_that_the_broker_closed_keeps_no_core_busy(
    cluster: Cluster, topic: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As connections.max.idle.ms does to the one for JoinGroup: a descriptor that is readable for good."""
    with Proxy(cluster.bootstrap) as proxy, Consumer(bootstrap_servers=proxy.bootstrap, group_id=group) as consumer:
        consumer.subscribe([topic])
        settle(consumer)
        engine, turns = consumer._engine, 0
        real_turn = engine.turn

        async def turn() -> None:
            nonlocal turns
            turns += 1
            await real_turn()

        assert proxy.cut_all()
        consumer.poll(1000)
        monkeypatch.setattr(engine, "turn", turn)
        for _ in range(4):
            consumer.poll(500)
        assert turns < 200
        consumer.unsubscribe()
        consumer.subscribe([topic])
        settle(consumer)


@pytest.mark.parametrize(
    ("api", "nth"),
    [(JOIN_GROUP, 1), (JOIN_GROUP, 2), (SYNC_GROUP, 1)],
    ids=["JoinGroup", "second JoinGroup", "SyncGroup"],
)
def test_answer_of_the_coordinator_that_never_comes_is_asked_for_again(
    cluster: Cluster, topic: str, group: str, api: Api[Any, Any], nth: int
) -> None:
    """After request.timeout.ms; not after the time that a rebalance may take, in which a lonely member stands still."""
    with Proxy(cluster.bootstrap) as proxy:
        injected = proxy.add(Rule(api, Effect.SILENCE_RESPONSE, nth=nth))
        with Consumer(
            bootstrap_servers=proxy.bootstrap,
            group_id=group,
            heartbeat_interval_ms=200,
            session_timeout_ms=6000,
            request_timeout_ms=1000,
        ) as consumer:
            consumer.subscribe([topic])
            settle(consumer)
        injected.assert_fired()


def test_rebalance_that_takes_longer_than_a_request_may_is_waited_for(cluster: Cluster, topic: str, group: str) -> None:
    """The other member is busy: the new one asks again and again, and is let in when the other comes back."""
    options = {"bootstrap_servers": cluster.bootstrap, "group_id": group, "heartbeat_interval_ms": 200}
    with Consumer(**options) as busy, Consumer(**options, request_timeout_ms=500) as new:
        busy.subscribe([topic])
        settle(busy)
        new.subscribe([topic])
        asked_until_s = time.monotonic() + 4
        while time.monotonic() < asked_until_s:
            assert new.poll(100) == []
        assert new.assignment() == set()
        settle(busy, new)


# --- together with other clients ---


@pytest.mark.parametrize("strategy", ["range", "roundrobin", "cooperative-sticky"])
def test_mixed_group_with_confluent_shares_all_partitions(
    cluster: Cluster, topic: str, group: str, strategy: str
) -> None:
    """Whoever leads: once semel joins first, once confluent."""
    for semel_first in (True, False):
        name = f"{group}-{semel_first}"
        foreign = ConfluentConsumer(
            {
                "bootstrap.servers": cluster.bootstrap,
                "group.id": name,
                "partition.assignment.strategy": strategy,
                "heartbeat.interval.ms": 300,
                "log_level": 0,
            }
        )
        with member_of(cluster, name, partition_assignment_strategy=strategy) as own:
            share_with_confluent(topic, own, foreign, settle, semel_first=semel_first)


@pytest.mark.parametrize(
    ("strategy", "java_class"),
    [
        ("range", "RangeAssignor"),
        pytest.param("sticky", "StickyAssignor", marks=pytest.mark.full),
        ("cooperative-sticky", "CooperativeStickyAssignor"),
    ],
)
def test_mixed_group_with_java_shares_all_partitions(
    cluster: Cluster, topic: str, group: str, strategy: str, java_class: str
) -> None:
    """First semel leads and Java joins, then semel leaves and comes back to a group that Java leads."""
    options = {"partition_assignment_strategy": strategy}
    with member_of(cluster, group, **options) as own:
        own.subscribe([topic])
        settle(own)
        with start_tool(
            "VerifiableConsumer",
            *("--bootstrap-server", cluster.bootstrap, "--topic", topic, "--group-id", group),
            *("--assignment-strategy", f"org.apache.kafka.clients.consumer.{java_class}"),
        ) as java:
            until(lambda: (own.poll(100), _shared_with(java.output, own, topic))[1], "the partitions were not shared")
            own.unsubscribe()
            until(
                lambda: len(owned_by_java(java.output, topic)) == PARTITIONS,
                "Java did not take over",
                timeout_s=BEFORE_A_SESSION_ENDS_S,
            )
            own.subscribe([topic])
            until(lambda: (own.poll(100), _shared_with(java.output, own, topic))[1], "the partitions were not shared")
        own.poll(0)


def _shared_with(output: str, own: Consumer, topic: str) -> bool:
    return is_shared(own.assignment(), owned_by_java(output, topic))
