"""D3: a consumer that takes over waits for the pending positions (require_stable)."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from semel.local.brokers import SEMEL, SemelBroker
from tests.support.broker import Cluster, faulty_semel
from tests.support.waiting import PATIENCE_S, until

OLD, NEW = 3, 8


def create_topic(bootstrap: str, name: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(name, 1, 1)])[name].result(PATIENCE_S)


def consumer(bootstrap: str, group: str, isolation: str = "read_committed") -> Any:
    return Consumer({"bootstrap.servers": bootstrap, "group.id": group, "isolation.level": isolation, "log_level": 0})


def owner_commits_old(bootstrap: str, group: str, topic: str) -> Any:
    owner = consumer(bootstrap, group)
    owner.commit(offsets=[TopicPartition(topic, 0, OLD)], asynchronous=False)
    return owner


def open_transaction(bootstrap: str, group: str, topic: str, owner: Any) -> Any:
    """A producer whose transaction holds the position NEW and is not ended yet."""
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": f"{group}-id", "log_level": 0})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, b"output")
    producer.send_offsets_to_transaction([TopicPartition(topic, 0, NEW)], owner.consumer_group_metadata(), 30)
    return producer


def committed(bootstrap: str, group: str, topic: str, isolation: str = "read_committed", timeout_s: float = 20) -> int:
    """What a new consumer gets. KafkaException if that does not come in time."""
    reader = consumer(bootstrap, group, isolation)
    try:
        (position,) = reader.committed([TopicPartition(topic, 0)], timeout_s)
        assert position.error is None, position.error
        return int(position.offset)
    finally:
        reader.close()


@pytest.mark.parametrize("commit", [True, False])
def test_new_owner_gets_no_offset_until_the_transaction_ends(cluster: Cluster, commit: bool) -> None:
    group, topic = cluster.unique("d3-group"), cluster.unique("d3")
    create_topic(cluster.bootstrap, topic)
    owner = owner_commits_old(cluster.bootstrap, group, topic)
    producer = open_transaction(cluster.bootstrap, group, topic, owner)
    with pytest.raises(KafkaException):
        committed(cluster.bootstrap, group, topic, timeout_s=1)
    assert committed(cluster.bootstrap, group, topic, "read_uncommitted") == OLD
    producer.commit_transaction(30) if commit else producer.abort_transaction(30)
    assert committed(cluster.bootstrap, group, topic) == (NEW if commit else OLD)
    owner.close()


def test_new_owner_starts_reading_at_the_offset_that_it_waited_for(cluster: Cluster) -> None:
    group, topic = cluster.unique("d3-group"), cluster.unique("d3")
    create_topic(cluster.bootstrap, topic)
    plain = Producer({"bootstrap.servers": cluster.bootstrap})
    for number in range(20):
        plain.produce(topic, b"%d" % number)
    assert plain.flush(PATIENCE_S) == 0
    owner = owner_commits_old(cluster.bootstrap, group, topic)
    producer = open_transaction(cluster.bootstrap, group, topic, owner)
    owner.close()
    new_owner = consumer(cluster.bootstrap, group)
    new_owner.subscribe([topic])

    def has_the_partition() -> bool:
        assert new_owner.poll(0.1) is None
        return bool(new_owner.assignment())

    until(has_the_partition, "the new owner did not get the partition")
    assert new_owner.poll(1) is None, "the new owner has the partition and waits"
    producer.commit_transaction(30)
    first = new_owner.poll(PATIENCE_S)
    assert first is not None
    assert (first.error(), first.offset()) == (None, NEW)
    new_owner.close()


def test_pending_offsets_survive_kill_9_and_are_still_waited_for(semel_broker: SemelBroker) -> None:
    bootstrap = semel_broker.bootstrap
    create_topic(bootstrap, "t")
    owner = owner_commits_old(bootstrap, "g", "t")
    producer = open_transaction(bootstrap, "g", "t", owner)
    semel_broker.kill()
    semel_broker.start()
    with pytest.raises(KafkaException):
        committed(bootstrap, "g", "t", timeout_s=1)
    producer.commit_transaction(30)
    assert committed(bootstrap, "g", "t") == NEW
    owner.close()


BEFORE_THE_DECISION = "prepare_commit.before_log"
POINTS = [
    (BEFORE_THE_DECISION, True),
    ("marker.after", True),
    ("prepare_abort.after_log", False),
]
MORE = [  # B4 reads the committed offset after a death at each of them
    ("prepare_commit.after_log", True),
    ("marker.before", True),
    ("markers.durable", True),
    ("complete_commit.before_log", True),
    ("complete_commit.after_log", True),
    ("marker.after", False),
    ("complete_abort.after_log", False),
]


@pytest.mark.parametrize(
    ("point", "commit"), [*POINTS, *(pytest.param(*each, marks=pytest.mark.full) for each in MORE)]
)
def test_decision_holds_for_offsets_when_the_broker_dies_at(tmp_path: Path, point: str, commit: bool) -> None:
    with SemelBroker(tmp_path / "broker", semel=faulty_semel(f"{point}:kill")) as broker:
        create_topic(broker.bootstrap, "t")
        owner = owner_commits_old(broker.bootstrap, "g", "t")
        producer = open_transaction(broker.bootstrap, "g", "t", owner)
        end = producer.commit_transaction if commit else producer.abort_transaction
        process = broker.process
        assert process is not None

        def ends_the_broker() -> bool:
            with contextlib.suppress(KafkaException):  # the answer may be lost, or may have been given before the end
                end(1)
            return not process.running

        until(ends_the_broker, "the broker did not die")
        process.wait_for_line(f"fault fired: {point}$", PATIENCE_S)
        broker.semel = SEMEL
        broker.start()
        if point == BEFORE_THE_DECISION:
            end(30)  # nothing was decided: the transaction is open and its producer ends it
        assert committed(broker.bootstrap, "g", "t") == (NEW if commit else OLD)
        owner.close()
