"""Each kind of violation is planted in a real topic, and the checker catches it and names it."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from semel.local.brokers import SemelBroker
from semel.prove.checker.check import CheckResult, Expectation, OffsetsRule, ViolationKind, check
from semel.prove.checker.reading import Observation, Watcher, create_topics
from tests.support.broker import Cluster
from tests.support.waiting import PATIENCE_S, until

PARTITIONS = 2


def numbered(record: Any) -> tuple[str, int]:
    return (record.key or b"").decode(), int(record.value)


class Topic:
    """A topic of its own for each test, written to by confluent-kafka."""

    def __init__(self, cluster: Cluster) -> None:
        self.brokers = cluster.bootstrap
        self.name = cluster.unique("checked")
        create_topics(self.brokers, {self.name: PARTITIONS})

    def write(self, *values: str, partition: int = 0, key: str = "k") -> None:
        producer = Producer({"bootstrap.servers": self.brokers})
        for value in values:
            producer.produce(self.name, value, key, partition=partition)
        assert producer.flush(PATIENCE_S) == 0

    def transaction(self, commit: bool | None, *values: str, partition: int = 0, tag: str = "") -> Producer:
        """commit=None leaves it open; keep the producer, or it is aborted."""
        producer = Producer({"bootstrap.servers": self.brokers, "transactional.id": f"{self.name}-{time.time_ns()}"})
        producer.init_transactions(PATIENCE_S)
        producer.begin_transaction()
        for value in values:
            producer.produce(self.name, value, "k", partition=partition, headers=[("txn", tag)])
        assert producer.flush(PATIENCE_S) == 0
        if commit is not None:
            producer.commit_transaction(PATIENCE_S) if commit else producer.abort_transaction(PATIENCE_S)
        return producer

    def check(self, observation: Observation | None = None, **expected: Any) -> CheckResult:
        return check(Expectation((self.name,), **expected), self.brokers, observation, settle_s=1)


@pytest.fixture
def topic(cluster: Cluster) -> Topic:
    return Topic(cluster)


def ids(*names: str) -> dict[str, int]:
    return dict.fromkeys(names, 1)


def only(verdict: CheckResult, kind: ViolationKind) -> Any:
    """The one violation that there is."""
    assert [violation.kind for violation in verdict.violations] == [kind], "\n".join(map(str, verdict.violations))
    return verdict.violations[0]


def kinds(verdict: CheckResult) -> Counter[ViolationKind]:
    return Counter(violation.kind for violation in verdict.violations)


def test_nothing_is_found_where_nothing_is_wrong(topic: Topic) -> None:
    topic.transaction(True, "1", "2", tag="first")
    topic.transaction(False, "3", tag="second")
    topic.write("4")
    with Watcher(topic.brokers, [topic.name]) as watcher:
        until(lambda: len(watcher.observation.records) >= 3)
    verdict = topic.check(
        watcher.observation,
        ids=ids("1", "2", "4"),
        order=numbered,
        forbidden=frozenset("3"),
        transaction=lambda seen: (seen.header("txn") or b"").decode() or None,
        transactions={"first": frozenset("12"), "second": frozenset("3")},
        one_epoch_each=True,
    )
    assert verdict.violations == []
    assert verdict.records_read == 3


def test_lost_record_is_named_with_the_aborted_transaction_that_had_it(topic: Topic) -> None:
    topic.write("1")
    topic.transaction(False, "2")
    lost = only(topic.check(ids=ids("1", "2")), ViolationKind.LOST)
    assert (lost.record, lost.partition, lost.offset) == ("2", 0, 1)
    assert lost.transaction.startswith("producer ")
    assert "aborted" in lost.detail
    assert only(topic.check(ids=ids("1", "5")), ViolationKind.LOST).offset == -1


def test_duplicated_record_is_named_with_both_places(topic: Topic) -> None:
    topic.transaction(True, "1")
    topic.transaction(True, "1", partition=1)
    twice = only(topic.check(ids=ids("1")), ViolationKind.DUPLICATED)
    assert (twice.record, twice.partition, twice.offset) == ("1", 1, 0)
    assert f"{topic.name}-0 offset 0" in twice.detail
    assert "producer" in twice.transaction


def test_record_that_nobody_expected_is_named(topic: Topic) -> None:
    topic.write("1", "stranger")
    assert only(topic.check(ids=ids("1")), ViolationKind.UNEXPECTED).record == "stranger"


def test_reordered_records_are_named(topic: Topic) -> None:
    topic.write("1", "3", "2")
    late = only(topic.check(ids=ids("1", "2", "3"), order=numbered), ViolationKind.REORDERED)
    assert (late.record, late.offset) == ("2", 2)
    assert "after 3 at offset 1" in late.detail


def test_total_that_is_too_low_is_lost_and_too_high_is_twice(topic: Topic) -> None:
    topic.write("1", "2", key="a")
    assert only(topic.check(totals={"a": 3}, total_of=numbered), ViolationKind.LOST).record == "a"
    assert only(topic.check(totals={"a": 1}, total_of=numbered), ViolationKind.DUPLICATED).record == "a"
    assert topic.check(totals={"a": 2}, total_of=numbered).violations == []


def test_aborted_record_that_a_reader_got_is_named_with_its_transaction(topic: Topic) -> None:
    """The plant: a reader that does not care for transactions."""
    topic.transaction(False, "1", "2")
    with Watcher(topic.brokers, [topic.name], committed=False) as watcher:
        until(lambda: len(watcher.observation.records) >= 2)
    verdict = topic.check(watcher.observation, ids={})
    assert kinds(verdict) == {ViolationKind.ABORTED_READ: 2}
    assert verdict.violations[0].record == "1"
    assert verdict.violations[0].transaction.startswith("producer ")


def test_record_that_the_workload_aborted_is_named_when_it_is_visible(topic: Topic) -> None:
    topic.transaction(True, "1")
    assert only(topic.check(ids={}, forbidden=frozenset("1")), ViolationKind.ABORTED_READ).record == "1"


def test_record_of_an_open_transaction_that_a_reader_got_is_named(topic: Topic) -> None:
    producer = topic.transaction(None, "1")
    with Watcher(topic.brokers, [topic.name], committed=False) as watcher:
        until(lambda: len(watcher.observation.records) >= 1)
    verdict = topic.check(watcher.observation, ids={})
    assert kinds(verdict) == {ViolationKind.ABORTED_READ: 1, ViolationKind.UNDECIDED: 1}
    producer.abort_transaction(PATIENCE_S)


def test_transaction_with_two_endings_is_named(topic: Topic) -> None:
    topic.transaction(True, "1", tag="transfer-7")
    topic.transaction(False, "2", partition=1, tag="transfer-7")
    verdict = topic.check(ids=ids("1"), transaction=lambda seen: (seen.header("txn") or b"").decode())
    partial = only(verdict, ViolationKind.PARTIAL)
    assert (partial.record, partial.partition) == ("2", 1)
    assert partial.transaction.startswith("transfer-7 (producer ")


def test_transaction_with_a_missing_part_is_named(topic: Topic) -> None:
    topic.write("1", "2")
    verdict = topic.check(transactions={"transfer": frozenset("123")})
    partial = only(verdict, ViolationKind.PARTIAL)
    assert "2 of 3 records of transfer" in partial.detail


def test_part_of_a_transaction_that_the_running_reader_did_not_get_is_named(topic: Topic) -> None:
    topic.transaction(True, "1", "2", "3")
    with Watcher(topic.brokers, [topic.name]) as watcher:
        until(lambda: len(watcher.observation.records) >= 3)
    del watcher.observation.records[1]  # the plant: the reader was not given the middle
    partial = only(topic.check(watcher.observation, ids=ids("1", "2", "3")), ViolationKind.PARTIAL)
    assert (partial.record, partial.offset) == ("2", 1)


@pytest.mark.parametrize(("offset", "input_offset", "where"), [(1, 1, "is in the output"), (3, 2, "is not")])
def test_offsets_that_disagree_with_the_output_are_named(
    cluster: Cluster, topic: Topic, offset: int, input_offset: int, where: str
) -> None:
    source, group = Topic(cluster), cluster.unique("checked-group")
    source.write("1", "2", "3")
    topic.write("1", "2")
    consumer = Consumer({"bootstrap.servers": topic.brokers, "group.id": group})
    consumer.commit(offsets=[TopicPartition(source.name, 0, offset)], asynchronous=False)
    consumer.close()
    rule = OffsetsRule(group, source.name, lambda seen: [(seen.value or b"").decode()])
    wrong = only(topic.check(offsets=(rule,)), ViolationKind.OFFSETS)
    assert (wrong.topic, wrong.offset) == (source.name, input_offset)
    assert where in wrong.detail


def recreate(topic: Topic) -> None:
    admin = AdminClient({"bootstrap.servers": topic.brokers})
    for future in admin.delete_topics([topic.name]).values():
        future.result(PATIENCE_S)
    until(lambda: topic.name not in admin.list_topics(timeout=PATIENCE_S).topics, "the topic was not deleted")
    create_topics(topic.brokers, {topic.name: PARTITIONS})


@pytest.mark.parametrize(
    ("later", "said"),
    [
        (("1", "other"), "now there is other at this offset"),
        (("1",), "now it is gone"),
    ],
)
def test_record_that_changed_or_went_between_two_reads_is_named(topic: Topic, later: tuple[str], said: str) -> None:
    """The plant: the topic is deleted and made anew with other records."""
    topic.write("1", "2")
    with Watcher(topic.brokers, [topic.name]) as watcher:
        until(lambda: len(watcher.observation.records) >= 2)
    observation = watcher.stop()
    recreate(topic)
    topic.write(*later)
    wrong = only(topic.check(observation, ids=ids(*later)), ViolationKind.NON_MONOTONIC)
    assert (wrong.record, wrong.offset) == ("2", 1)
    assert said in wrong.detail


def test_ends_that_went_back_and_a_reader_that_was_ahead_are_named(semel_broker: SemelBroker) -> None:
    """The plant: the broker loses its disk while a reader runs."""
    name = "shrinks"
    create_topics(semel_broker.bootstrap, {name: 1})
    producer = Producer({"bootstrap.servers": semel_broker.bootstrap})
    for number in range(5):
        producer.produce(name, b"%d" % number)
    assert producer.flush(PATIENCE_S) == 0
    with Watcher(semel_broker.bootstrap, [name]) as watcher:
        until(lambda: len(watcher.observation.records) >= 5)
        until(lambda: both_ends_seen(watcher, (name, 0), 5))
        semel_broker.kill()
        (semel_broker.directory / f"{name}-0" / "00000000000000000000.log").write_bytes(b"")
        semel_broker.start()
        until(lambda: both_ends_seen(watcher, (name, 0), 0))
    verdict = check(Expectation((name,)), semel_broker.bootstrap, watcher.observation)
    assert set(kinds(verdict)) == {ViolationKind.NON_MONOTONIC}
    details = " / ".join(violation.detail for violation in verdict.violations)
    assert "high watermark went back from 5" in details
    assert "last stable offset went back from 5" in details


def both_ends_seen(watcher: Watcher, place: tuple[str, int], offset: int) -> bool:
    """The high watermark and the last stable offset."""
    return {stable for _, stable, found in watcher.observation.ends if found.get(place) == offset} == {True, False}
