"""The admin client on both brokers, compared with what Kafka's own tools and confluent-kafka say."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import pytest
from confluent_kafka import Producer as ConfluentProducer
from confluent_kafka.admin import AdminClient

from semel.client.admin import EARLIEST, LATEST, TO_THE_END, Admin, NewTopic
from semel.client.consumer import Consumer
from semel.client.errors import ConfigError, FencedError, KafkaError, TimedOutError
from semel.client.producer import Producer
from semel.client.types import TopicPartition
from semel.protocol.errors import ErrorCode
from tests.support.broker import Cluster
from tests.support.waiting import PATIENCE_S, STALL_S, until


@pytest.fixture
def admin(cluster: Cluster) -> Iterator[Admin]:
    with Admin(bootstrap_servers=cluster.bootstrap) as admin:
        yield admin


@pytest.fixture
def topic(cluster: Cluster, admin: Admin) -> str:
    name = cluster.unique("administered")
    admin.create_topic(name, partitions=2)
    return name


def fill(cluster: Cluster, topic: str, count: int) -> None:
    producer = ConfluentProducer({"bootstrap.servers": cluster.bootstrap, "log_level": 0})
    for number in range(count):
        producer.produce(topic, value=b"%d" % number, partition=0)
    assert producer.flush(30) == 0


def test_created_topics_are_what_was_asked_for(cluster: Cluster, admin: Admin) -> None:
    name = cluster.unique("created")
    admin.create_topics([NewTopic(name, 3, 1, {"retention.ms": "1234567"}), NewTopic(f"{name}.other")])
    (described,) = admin.describe_topics([name], offsets=True)
    assert [part.partition for part in described.partitions] == [0, 1, 2]
    assert all((part.earliest_offset, part.latest_offset) == (0, 0) for part in described.partitions)
    seen = AdminClient({"bootstrap.servers": cluster.bootstrap}).list_topics(timeout=PATIENCE_S).topics
    assert len(seen[name].partitions) == 3
    assert admin.describe_configs(topic=name)["retention.ms"].value == "1234567"
    assert {name, f"{name}.other"} <= set(admin.list_topics())
    msgspec.json.encode(described)


def test_topic_that_is_there_is_an_error_unless_told_otherwise(admin: Admin, topic: str) -> None:
    with pytest.raises(KafkaError, match="TOPIC_ALREADY_EXISTS"):
        admin.create_topic(topic)
    assert admin.create_topic(topic, if_not_exists=True) is False


def test_impossible_topics_are_refused_with_the_reason(admin: Admin) -> None:
    with pytest.raises(KafkaError, match="INVALID_TOPIC_EXCEPTION"):
        admin.create_topic("no spaces")
    with pytest.raises(KafkaError, match="INVALID_REPLICATION_FACTOR"):
        admin.create_topic("too-many-replicas", replication_factor=9)
    with pytest.raises(KafkaError, match="INVALID_CONFIG"):
        admin.create_topic("bad-config", configs={"retention.ms": "soon"})


def test_deleted_topics_are_gone(admin: Admin, topic: str) -> None:
    admin.delete_topics([topic])
    until(lambda: topic not in admin.list_topics(), "the topic is still listed")
    with pytest.raises(KafkaError, match="no topic"):
        admin.describe_topics([topic])
    with pytest.raises(KafkaError, match="UNKNOWN_TOPIC_OR_PARTITION"):
        admin.delete_topics([topic])


def test_one_topic_may_be_named_without_a_list(admin: Admin, topic: str) -> None:
    assert [found.name for found in admin.describe_topics(topic)] == [topic]
    admin.delete_topics(topic)
    until(lambda: topic not in admin.list_topics(), "the topic is still listed")


def test_partitions_can_be_added_not_taken_away(admin: Admin, topic: str) -> None:
    admin.create_partitions(topic, 5)
    assert len(admin.describe_topics([topic])[0].partitions) == 5
    with pytest.raises(KafkaError, match="INVALID_PARTITIONS"):
        admin.create_partitions(topic, 2)


def test_configurations_are_set_and_taken_back(admin: Admin, topic: str) -> None:
    default = admin.describe_configs(topic=topic)["retention.ms"]
    assert default.is_default
    admin.alter_configs({"retention.ms": "5000", "cleanup.policy": "compact"}, topic=topic)

    def retention(expected: str | None) -> bool:
        """Kafka's brokers learn a moment later what its controller has acknowledged."""
        found = admin.describe_configs(topic=topic)
        return (found["retention.ms"].value, found["cleanup.policy"].value) == (expected, "compact")

    until(lambda: retention("5000"), "the settings were not changed")
    assert not admin.describe_configs(topic=topic)["retention.ms"].is_default
    admin.alter_configs({"retention.ms": None}, topic=topic)
    until(lambda: retention(default.value), "the setting was not taken back")
    with pytest.raises(ConfigError, match="either"):
        admin.describe_configs()
    broker = admin.describe_cluster().brokers[0].node_id
    assert admin.describe_configs(broker=broker)


def test_offsets_are_found_and_records_deleted(cluster: Cluster, admin: Admin, topic: str) -> None:
    fill(cluster, topic, 10)
    place = TopicPartition(topic, 0)
    assert admin.list_offsets({place: EARLIEST})[place].offset == 0
    assert admin.list_offsets({(topic, 0): LATEST})[place].offset == 10
    assert admin.delete_records({place: 4}) == {place: 4}
    assert admin.list_offsets({place: EARLIEST})[place].offset == 4
    assert admin.delete_records({place: TO_THE_END}) == {place: 10}
    with pytest.raises(KafkaError, match="OFFSET_OUT_OF_RANGE"):
        admin.delete_records({place: 99})


def test_group_with_a_member_is_described_with_its_lag(cluster: Cluster, admin: Admin, topic: str) -> None:
    fill(cluster, topic, 10)
    group = cluster.unique("described")
    with Consumer(
        bootstrap_servers=cluster.bootstrap, group_id=group, client_id="me", auto_offset_reset="earliest"
    ) as consumer:
        consumer.subscribe([topic])
        assert len(consumer.poll(10_000, max_records=6)) == 6
        consumer.commit()
        described = admin.describe_group(group)
        assert described.state == "Stable"
        (member,) = described.members
        assert member.client_id == "me"
        assert set(member.partitions) == {(topic, 0), (topic, 1)}
        at = {position.partition: position for position in admin.group_lag(group)}
        assert (at[0].committed, at[0].end, at[0].lag, at[0].client_id) == (6, 10, 4, "me")
        assert group in {listing.group_id for listing in admin.list_groups()}
        with pytest.raises(KafkaError, match="has members"):
            admin.delete_groups([group])
        with pytest.raises(KafkaError, match="has members"):
            admin.alter_group_offsets(group, {(topic, 0): 0})
    admin.alter_group_offsets(group, {(topic, 0): 1})
    assert admin.group_offsets(group)[TopicPartition(topic, 0)].offset == 1
    admin.delete_group_offsets(group, [(topic, 0)])
    assert TopicPartition(topic, 0) not in admin.group_offsets(group)
    admin.delete_groups([group])
    with pytest.raises(KafkaError, match="no group"):
        admin.delete_groups([group])


def test_open_transaction_is_seen_and_aborted_and_its_owner_fenced(cluster: Cluster, admin: Admin, topic: str) -> None:
    name, place = cluster.unique("hanging"), TopicPartition(topic, 0)
    with Producer(bootstrap_servers=cluster.bootstrap, transactional_id=name) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(topic, b"x", partition=0).result()
        assert name in {listing.transactional_id for listing in admin.list_transactions(["Ongoing"])}
        described = admin.describe_transaction(name)
        assert (described.state, described.partitions) == ("Ongoing", [place])
        (owner,) = admin.describe_producers(place)
        assert (owner.producer_id, owner.transaction_start) == (described.producer_id, 0)
        with pytest.raises(KafkaError, match="is alive"):
            admin.abort_hanging_transaction(place, 0)
        admin.abort_transaction(name)
        assert admin.describe_transaction(name).state in ("Empty", "CompleteAbort")
        with pytest.raises(FencedError):
            producer.commit_transaction()
    with pytest.raises(KafkaError, match="no open transaction"):
        admin.abort_hanging_transaction(place, 0)
    with pytest.raises(KafkaError, match="no transactional id"):
        admin.abort_transaction("nobody's")
    with pytest.raises(KafkaError, match="no transaction state"):
        admin.list_transactions(["Sleeping"])


def test_cluster_is_described(cluster: Cluster, admin: Admin) -> None:
    described = admin.describe_cluster()
    assert f"{described.brokers[0].host}:{described.brokers[0].port}" == cluster.bootstrap
    assert described.cluster_id
    assert described.features.get("transaction.version") == 2


def test_unreachable_cluster_is_an_error_within_the_timeout() -> None:
    started_s = time.monotonic()
    with Admin(bootstrap_servers="127.0.0.1:1") as admin, pytest.raises(TimedOutError, match="is a broker running"):
        admin.list_topics(timeout_ms=700)
    assert time.monotonic() - started_s < STALL_S
    with pytest.raises(KafkaError, match="closed") as caught:
        admin.list_topics()
    assert caught.value.code in (None, ErrorCode.NONE)
