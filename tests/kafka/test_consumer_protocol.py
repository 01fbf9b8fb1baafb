"""Groups under group.protocol=consumer (KIP-848) on both brokers: sharing, giving back, members that die, freeze and
come back, transactions, and groups of mixed clients."""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from confluent_kafka import Consumer as ConfluentConsumer

import semel
from semel.aio import AsyncConsumer, AsyncProducer
from semel.client.admin import Admin
from semel.client.admin.groups import GroupListing
from semel.client.consumer import Consumer
from semel.client.consumer.core import RebalanceListener
from semel.client.errors import AbortableError, FatalError, UnsupportedByBrokerError
from semel.client.producer import Producer
from semel.client.types import CommitFailedError, TopicPartition
from semel.local.apache_kafka import ApacheKafka, quick_jvm, start_tool
from semel.local.brokers import SemelBroker
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.groups import CONSUMER_GROUP_HEARTBEAT
from semel.protocol.messages.transactions import TXN_OFFSET_COMMIT
from semel.prove.proxy import Effect, Proxy, Rule
from tests.support.broker import KAFKA_IN_FULL, Cluster
from tests.support.direct import await_coordinators
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
from tests.support.process_campaign import run_campaign
from tests.support.reading import create_topic, read_topic
from tests.support.waiting import PATIENCE_S, eventually, until

SESSION_MS = 6_000
# Members notice changes soon, and the end of a session can be waited for.
BRISK = {
    "group.consumer.min.heartbeat.interval.ms": "100",
    "group.consumer.heartbeat.interval.ms": "300",
    "group.consumer.min.session.timeout.ms": "1000",
    "group.consumer.session.timeout.ms": str(SESSION_MS),
}


@pytest.fixture(scope="module", params=["semel", pytest.param("apache_kafka", marks=pytest.mark.kafka)])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("brisk") / request.param
    if request.param == "semel":
        with SemelBroker(folder, *(f"--set={name}={value}" for name, value in BRISK.items())) as broker:
            yield Cluster("semel", broker)
        return
    request.getfixturevalue("kafka_installation")
    with ApacheKafka(folder, jvm=quick_jvm(), properties=BRISK) as kafka:
        await_coordinators(kafka.bootstrap)
        yield Cluster("apache_kafka", kafka)


@pytest.fixture
def topic(cluster: Cluster) -> str:
    return create_topic(cluster.bootstrap, cluster.unique("grouped"), partitions=PARTITIONS)


@pytest.fixture
def group(cluster: Cluster) -> str:
    return cluster.unique("group")


def member_of(bootstrap: str, group: str, **options: object) -> Consumer:
    defaults = {"auto_offset_reset": "earliest", "enable_auto_commit": False, "group_protocol": "consumer"}
    return Consumer(bootstrap_servers=bootstrap, group_id=group, **{**defaults, **options})


def settle(*consumers: Consumer, total: int = PARTITIONS) -> None:
    """Polls everyone until all partitions are given out and everyone has a fair share."""

    def polled() -> list[set[TopicPartition]]:
        for consumer in consumers:
            consumer.poll(100)
        return [consumer.assignment() for consumer in consumers]

    def is_agreement(shares: list[set[TopicPartition]]) -> bool:
        sizes = [len(share) for share in shares]
        return sum(sizes) == total == len(set().union(*shares)) and max(sizes) - min(sizes) <= 1

    eventually(polled, is_agreement, otherwise="no agreement")


def _read_by(consumer: Consumer) -> int:
    return sum(to.offset for to in consumer.consumed().values())


def numbered(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


# --- sharing ---


def test_members_share_all_partitions_and_take_over_what_a_leaver_had(cluster: Cluster, topic: str, group: str) -> None:
    with ExitStack() as stack:
        members = [stack.enter_context(member_of(cluster.bootstrap, group)) for _ in range(3)]
        for member in members:
            member.subscribe([topic])
        settle(*members)
        members[0].close()
        settle(*members[1:])
        members[1].unsubscribe()
        settle(members[2])
        members[1].subscribe([topic])
        settle(*members[1:])


def test_group_reads_every_record_once_across_rebalances(cluster: Cluster, topic: str, group: str) -> None:
    fill(cluster, topic, 3000)
    with member_of(cluster.bootstrap, group) as first, member_of(cluster.bootstrap, group) as second:
        read_once_across_a_rebalance(topic, first, second, max_records=20)


def test_automatic_commit_comes_before_partitions_move(cluster: Cluster, topic: str, group: str) -> None:
    options = {"enable_auto_commit": True, "auto_commit_interval_ms": 3_600_000}
    with (
        member_of(cluster.bootstrap, group, **options) as first,
        member_of(cluster.bootstrap, group, **options) as second,
    ):
        commits_before_partitions_move(cluster, topic, group, first, second, settle)


def test_only_what_moves_is_given_back(cluster: Cluster, topic: str, group: str) -> None:
    diary = Diary()
    with member_of(cluster.bootstrap, group) as first, member_of(cluster.bootstrap, group) as second:
        first.subscribe([topic], diary)
        settle(first)
        second.subscribe([topic])
        settle(first, second)
    revoked = [len(partitions) for kind, partitions in diary.events if kind == "revoked"]
    assert revoked[0] == PARTITIONS // 2
    assert "lost" not in diary.kinds


def test_partitions_wait_for_a_member_that_is_slow_to_give_them_back(cluster: Cluster, topic: str, group: str) -> None:
    """They move when its listener has returned, and not before."""
    entered, may_go = threading.Event(), threading.Event()

    class Slow(RebalanceListener):
        def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
            entered.set()
            assert may_go.wait(PATIENCE_S)

    with member_of(cluster.bootstrap, group) as first, member_of(cluster.bootstrap, group) as second:
        first.subscribe([topic], Slow())
        settle(first)
        second.subscribe([topic])
        poller = threading.Thread(target=lambda: until(lambda: (first.poll(100), may_go.is_set())[1]))
        poller.start()
        try:
            until(lambda: (second.poll(100), entered.is_set())[1], "the listener was not called")
            for _ in range(10):  # several heartbeats
                second.poll(100)
                assert second.assignment() == set()
        finally:
            may_go.set()
            poller.join()
        settle(first, second)


def test_subscription_and_pattern_follow_the_topics(cluster: Cluster, group: str) -> None:
    stem = cluster.unique("matched")
    first, other = (create_topic(cluster.bootstrap, f"{stem}.{name}") for name in "ab")
    with member_of(cluster.bootstrap, group, metadata_max_age_ms=300) as consumer:
        consumer.subscribe([first])
        settle(consumer, total=1)
        consumer.subscribe([other])
        until(lambda: (consumer.poll(100), consumer.assignment() == {(other, 0)})[1], "the new topic is not read")
        consumer.subscribe(re.compile(re.escape(stem) + r"\..*"))
        settle(consumer, total=2)
        third = create_topic(cluster.bootstrap, f"{stem}.c", partitions=2)
        settle(consumer, total=4)
        assert consumer.subscription() == {first, other, third}


def test_topic_created_again_is_read_from_its_begin(cluster: Cluster, group: str) -> None:
    topic = create_topic(cluster.bootstrap, cluster.unique("again"))
    fill(cluster, topic, 5)
    with (
        member_of(cluster.bootstrap, group, metadata_max_age_ms=300, allow_auto_create_topics=False) as consumer,
        Admin(bootstrap_servers=cluster.bootstrap) as admin,
    ):
        consumer.subscribe([topic])
        seen: list[bytes] = []
        until(lambda: (seen.extend(r.value for r in consumer.poll(100)), len(seen) == 5)[1])
        consumer.commit()
        admin.delete_topics([topic])
        until(lambda: (consumer.poll(100), not consumer.assignment())[1], "the deleted topic is still assigned")
        create_topic(cluster.bootstrap, topic)
        fill(cluster, topic, 3)
        until(lambda: (seen.extend(r.value for r in consumer.poll(100)), len(seen) == 8)[1], f"only {seen} was read")


# --- members that come back, stay away, or are slow ---


def test_static_member_comes_back_to_its_partitions(cluster: Cluster, topic: str, group: str) -> None:
    with member_of(cluster.bootstrap, group, group_instance_id="one") as other:
        first = member_of(cluster.bootstrap, group, group_instance_id="two")
        other.subscribe([topic])
        first.subscribe([topic])
        settle(other, first)
        before, kept = first.assignment(), other.assignment()
        first.close()
        with member_of(cluster.bootstrap, group, group_instance_id="two") as again:
            again.subscribe([topic])
            settle(other, again)
            assert (again.assignment(), other.assignment()) == (before, kept)


def test_second_holder_of_an_instance_id_is_refused_while_the_first_is_there(
    cluster: Cluster, topic: str, group: str
) -> None:
    first = member_of(cluster.bootstrap, group, group_instance_id="same")
    with first, member_of(cluster.bootstrap, group, group_instance_id="same") as second:
        first.subscribe([topic])
        settle(first)
        second.subscribe([topic])
        with pytest.raises(FatalError, match=r"UNRELEASED_INSTANCE_ID.*group\.instance\.id") as refused:
            until(lambda: second.poll(200), "the second holder was not refused")
        assert refused.value.code is ErrorCode.UNRELEASED_INSTANCE_ID
        first.poll(200)
        first.close()
        settle(second)


def test_frozen_member_comes_back_as_a_zombie_and_is_refused(cluster: Cluster, topic: str, group: str) -> None:
    """Nothing of it arrives for longer than its session: another has its partitions. Then it goes on with what it
    had: neither its commit nor its transaction counts, and its next poll joins again."""
    fill(cluster, topic, 60)
    diary = Diary()
    with (
        Proxy(cluster.bootstrap) as proxy,
        member_of(proxy.bootstrap, group, request_timeout_ms=2_000) as frozen,
        member_of(cluster.bootstrap, group) as new_owner,
        Producer(bootstrap_servers=cluster.bootstrap, transactional_id=cluster.unique("zombie")) as producer,
    ):
        producer.init_transactions()
        frozen.subscribe([topic], diary)
        settle(frozen)
        until(lambda: (frozen.poll(100), _read_by(frozen) == 60)[1])
        stale, offsets = frozen.group_metadata(), frozen.consumed()
        lost = proxy.add(Rule(CONSUMER_GROUP_HEARTBEAT, Effect.DROP_REQUEST, times=1_000_000))
        new_owner.subscribe([topic])
        settle(new_owner)
        lost.assert_fired()
        with pytest.raises(CommitFailedError, match="went on without this consumer"):
            frozen.commit()
        producer.begin_transaction()
        with pytest.raises(AbortableError):
            producer.send_offsets_to_transaction(offsets, stale)
        producer.abort_transaction()
        assert new_owner.committed() == {}
        proxy.remove(lost)
        settle(frozen, new_owner)
        lost_at = diary.kinds.index("lost")
        assert set(diary.kinds[:lost_at]) == {"assigned"}, (
            "in several steps where a coordinator is slow to see the topic"
        )
        assert diary.kinds[lost_at + 1 : lost_at + 2] == ["assigned"]


def test_program_that_does_not_poll_leaves_by_itself_and_joins_again(cluster: Cluster, topic: str, group: str) -> None:
    diary = Diary()
    with (
        member_of(cluster.bootstrap, group, max_poll_interval_ms=700) as slow,
        member_of(cluster.bootstrap, group) as quick,
    ):
        slow.subscribe([topic], diary)
        settle(slow)
        quick.subscribe([topic])
        settle(quick)
        with pytest.raises(CommitFailedError, match=r"max\.poll\.interval\.ms"):
            slow.commit({(topic, 0): 1})
        settle(slow, quick)
        assert "lost" in diary.kinds


def test_offsets_of_a_partition_that_moved_are_refused_in_a_transaction(
    cluster: Cluster, topic: str, group: str
) -> None:
    """D2: the member epoch fences, whatever the transactional id is."""
    with (
        member_of(cluster.bootstrap, group) as first,
        member_of(cluster.bootstrap, group) as second,
        Producer(bootstrap_servers=cluster.bootstrap, transactional_id=cluster.unique("moved")) as producer,
    ):
        producer.init_transactions()
        first.subscribe([topic])
        settle(first)
        stale = first.group_metadata()
        second.subscribe([topic])
        settle(first, second)
        moved = min(second.assignment())
        producer.begin_transaction()
        with pytest.raises(AbortableError, match="ILLEGAL_GENERATION"):
            producer.send_offsets_to_transaction({moved: 5}, stale)
        producer.abort_transaction()
        producer.begin_transaction()
        producer.send_offsets_to_transaction({moved: 7}, second.group_metadata())
        producer.commit_transaction()
        eventually(lambda: second.committed([moved]), lambda found: moved in found and found[moved].offset == 7)


@pytest.mark.parametrize("nth", [1, 2, 3], ids=["join", "acknowledgement", "heartbeat"])
@pytest.mark.parametrize("effect", [Effect.DROP_REQUEST, Effect.DROP_RESPONSE, Effect.SILENCE_RESPONSE])
def test_lost_heartbeats_are_mended(cluster: Cluster, topic: str, group: str, nth: int, effect: Effect) -> None:
    diary = Diary()
    with Proxy(cluster.bootstrap) as proxy:
        injected = proxy.add(Rule(CONSUMER_GROUP_HEARTBEAT, effect, nth=nth))
        with member_of(proxy.bootstrap, group, request_timeout_ms=1_000) as consumer:
            consumer.subscribe([topic], diary)
            settle(consumer)
            until(lambda: (consumer.poll(100), injected.fired.is_set())[1], "not exercised")
            settle(consumer)
            with member_of(cluster.bootstrap, group) as other:
                other.subscribe([topic])
                settle(consumer, other)
        assert "lost" not in diary.kinds


def test_commit_waits_for_the_epoch_that_is_on_its_way(cluster: Cluster, topic: str, group: str) -> None:
    """The coordinator's epoch is ahead of the member's while the response that has it is held back."""
    fill(cluster, topic, 60)
    with (
        Proxy(cluster.bootstrap) as proxy,
        member_of(proxy.bootstrap, group) as first,
        member_of(cluster.bootstrap, group) as second,
        Admin(bootstrap_servers=cluster.bootstrap) as admin,
    ):
        second.subscribe([topic])
        first.subscribe([topic])
        settle(first, second)
        epoch = first.group_metadata().generation_id
        until(lambda: (first.poll(100), second.poll(100), _read_by(first) + _read_by(second) == 60)[2])
        held = proxy.add(Rule(CONSUMER_GROUP_HEARTBEAT, Effect.DELAY_RESPONSE, delay_ms=1_000, times=2))
        second.close()
        assert held.fired.wait(PATIENCE_S)
        wanted = first.consumed()
        first.commit()
        committed = admin.group_offsets(group)
        assert {at: committed[at].offset for at in wanted} == {at: to.offset for at, to in wanted.items()}
        settle(first)
        assert first.group_metadata().generation_id > epoch


# --- settings and brokers ---


@pytest.mark.parametrize("assignor", ["uniform", "range"])
def test_group_remote_assignor_is_the_coordinators_choice(
    cluster: Cluster, topic: str, group: str, assignor: str
) -> None:
    with member_of(cluster.bootstrap, group, group_remote_assignor=assignor) as consumer:
        consumer.subscribe([topic])
        settle(consumer)


def test_unknown_assignor_is_refused(cluster: Cluster, topic: str, group: str) -> None:
    with member_of(cluster.bootstrap, group, group_remote_assignor="nobody") as consumer:
        consumer.subscribe([topic])
        with pytest.raises(FatalError, match=r"UNSUPPORTED_ASSIGNOR.*group\.remote\.assignor") as refused:
            until(lambda: consumer.poll(200), "not refused")
        assert refused.value.code is ErrorCode.UNSUPPORTED_ASSIGNOR


def test_broker_without_the_protocol_is_named_with_the_setting(tmp_path: Path) -> None:
    with SemelBroker(tmp_path / "old", "--set", "group.coordinator.rebalance.protocols=classic") as broker:
        create_topic(broker.bootstrap, "t")
        with member_of(broker.bootstrap, "g") as consumer:
            consumer.subscribe(["t"])
            with pytest.raises(UnsupportedByBrokerError, match=r"group\.protocol=consumer needs.*protocol=classic"):
                until(lambda: consumer.poll(200), "not refused")


def test_admin_shows_members_and_lag(cluster: Cluster, topic: str, group: str) -> None:
    fill(cluster, topic, 60)
    with (
        member_of(cluster.bootstrap, group, client_id="shown") as consumer,
        Admin(bootstrap_servers=cluster.bootstrap) as admin,
    ):
        assert admin.describe_group(group).state == "Dead"
        consumer.subscribe([topic])
        until(lambda: (consumer.poll(100), _read_by(consumer) == 60)[1])
        consumer.commit()
        described = eventually(lambda: admin.describe_group(group), lambda found: found.state == "Stable")
        (member,) = described.members
        assert (described.protocol_type, described.assignor, member.client_id) == ("consumer", "uniform", "shown")
        assert (member.member_id, set(member.partitions)) == (
            consumer.group_metadata().member_id,
            consumer.assignment(),
        )
        lags = admin.group_lag(group)
        assert {(each.lag, each.member_id) for each in lags} == {(0, member.member_id)}
        assert sum(each.committed or 0 for each in lags) == 60
    assert "consumer" in {listing.type.lower() for listing in _listed(cluster, group)}


def _listed(cluster: Cluster, group: str) -> list[GroupListing]:
    with Admin(bootstrap_servers=cluster.bootstrap) as admin:
        return [listing for listing in admin.list_groups() if listing.group_id == group]


def test_members_keep_their_partitions_over_kill_9_of_the_broker(tmp_path: Path) -> None:
    with SemelBroker(tmp_path / "killed", *(f"--set={name}={value}" for name, value in BRISK.items())) as broker:
        create_topic(broker.bootstrap, "t", partitions=PARTITIONS)
        cluster, diary = Cluster("semel", broker), Diary()
        with member_of(broker.bootstrap, "g") as first, member_of(broker.bootstrap, "g") as second:
            first.subscribe(["t"], diary)
            second.subscribe(["t"])
            settle(first, second)
            before, events = (first.assignment(), second.assignment()), len(diary.events)
            broker.kill()
            broker.start()
            fill(cluster, "t", 60)
            until(lambda: (first.poll(100), second.poll(100), _read_by(first) + _read_by(second) == 60)[2])
            first.commit()
            second.commit()
            assert (first.assignment(), second.assignment()) == before
            assert diary.events[events:] == []


def test_group_changes_to_the_consumer_protocol_member_by_member(cluster: Cluster, topic: str, group: str) -> None:
    fill(cluster, topic, 60)
    classic = {"group_protocol": "classic", "heartbeat_interval_ms": 300}
    with (
        member_of(cluster.bootstrap, group, **classic) as first,
        member_of(cluster.bootstrap, group, **classic) as second,
        member_of(cluster.bootstrap, group) as new,
        member_of(cluster.bootstrap, group) as newer,
    ):
        first.subscribe([topic])
        second.subscribe([topic])
        settle(first, second)
        second.close()
        settle(first)
        new.subscribe([topic])
        settle(first, new)
        newer.subscribe([topic])
        first.commit()
        first.close()
        settle(new, newer)


def test_group_with_classic_members_is_named_where_the_broker_may_not_convert_it(tmp_path: Path) -> None:
    with (
        SemelBroker(tmp_path, "--set", "group.consumer.migration.policy=disabled") as broker,
        member_of(broker.bootstrap, "g", group_protocol="classic") as old,
        member_of(broker.bootstrap, "g") as new,
    ):
        create_topic(broker.bootstrap, "t")
        old.subscribe(["t"])
        settle(old, total=1)
        new.subscribe(["t"])
        with pytest.raises(FatalError, match=r"members with group\.protocol=classic"):
            until(lambda: new.poll(200), "not refused")


def test_consumer_for_asyncio_shares_with_the_blocking_one(cluster: Cluster, topic: str, group: str) -> None:
    """And commits what it read in a transaction, under its member epoch."""
    fill(cluster, topic, 60)

    async def play() -> None:
        address = {"bootstrap_servers": cluster.bootstrap}
        options = {"group_id": group, "group_protocol": "consumer", "auto_offset_reset": "earliest"}
        async with (
            AsyncConsumer(**address, **options, enable_auto_commit=False) as consumer,
            AsyncProducer(**address, transactional_id=cluster.unique("async")) as producer,
        ):
            consumer.subscribe([topic])
            found: list[bytes] = []
            while len(found) < 60:
                found += [record.value for record in await consumer.poll(1_000)]
            await producer.init_transactions()
            await producer.begin_transaction()
            await producer.send_offsets_to_transaction(consumer.consumed(), consumer.group_metadata())
            await producer.commit_transaction()
            assert sorted(found, key=int) == numbered(60)
            with member_of(cluster.bootstrap, group) as blocking:
                blocking.subscribe([topic])
                while not is_shared(consumer.assignment(), blocking.assignment()):
                    await consumer.poll(100)
                    await asyncio.to_thread(blocking.poll, 100)
                eventually(lambda: _committed_by(blocking), lambda offset: offset == 60)

    asyncio.run(asyncio.wait_for(play(), PATIENCE_S))


def _committed_by(consumer: Consumer) -> int:
    places = [(topic, number) for topic in consumer.subscription() for number in range(PARTITIONS)]
    return sum(to.offset for to in consumer.committed(places).values())


# --- together with other clients ---


@pytest.mark.parametrize("semel_first", [True, False])
def test_mixed_group_with_confluent_shares_all_partitions(
    cluster: Cluster, topic: str, group: str, semel_first: bool
) -> None:
    foreign = ConfluentConsumer(
        {
            "bootstrap.servers": cluster.bootstrap,
            "group.id": group,
            "group.protocol": "consumer",
            "log_level": 0,
        }
    )
    with member_of(cluster.bootstrap, group) as own:
        share_with_confluent(topic, own, foreign, settle, semel_first=semel_first)


def test_mixed_group_with_java_shares_all_partitions(
    cluster: Cluster, topic: str, group: str, kafka_installation: Path
) -> None:
    with member_of(cluster.bootstrap, group) as own:
        own.subscribe([topic])
        settle(own)
        with start_tool(
            "VerifiableConsumer",
            *("--bootstrap-server", cluster.bootstrap, "--topic", topic, "--group-id", group),
            *("--group-protocol", "consumer"),
        ) as java:
            until(
                lambda: (own.poll(100), is_shared(own.assignment(), owned_by_java(java.output, topic)))[1],
                "the partitions were not shared",
            )
        settle(own)


# --- the processing loop ---

CONSUMER_PROTOCOL = {"group_protocol": "consumer"}


@pytest.mark.parametrize("api", [CONSUMER_GROUP_HEARTBEAT, TXN_OFFSET_COMMIT], ids=lambda api: api.name)
def test_processing_loop_writes_every_record_once_over_lost_responses(cluster: Cluster, topic: str, api) -> None:
    fill(cluster, topic, 500)
    sink = create_topic(cluster.bootstrap, f"{topic}.out")
    with Proxy(cluster.bootstrap) as proxy:
        injected = proxy.add(Rule(api, Effect.DROP_RESPONSE, times=2))
        stats = semel.process(
            topic,
            sink,
            lambda record: record,
            application_id=cluster.unique("app"),
            bootstrap_servers=proxy.bootstrap,
            commit_interval_ms=50,
            max_records=60,
            stop_at_end=True,
            consumer=CONSUMER_PROTOCOL,
        )
        injected.assert_fired()
    assert stats.commits > 1
    assert Counter(seen.value for seen in read_topic(cluster.bootstrap, sink)) == Counter(numbered(500))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("cluster", ["semel", KAFKA_IN_FULL], indirect=True)
def test_exactly_once_through_kills_and_zombies(cluster: Cluster) -> None:
    """Instances are killed, and frozen for longer than their session and transaction last."""
    outcome = run_campaign(cluster, 10, seed=848, guarantees=("exactly_once",), consumer=CONSUMER_PROTOCOL)
    (result,) = outcome.values()
    assert (result.lost, result.duplicates) == (0, 0)
    assert result.kills
    assert result.freezes
    assert result.sent > 1000
