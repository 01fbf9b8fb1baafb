"""F8: inbox: a topic is applied to a database idempotently, by event id: copies of an event change nothing, whichever
partition or topic they come from. Tables are read through psycopg, events are sent by confluent-kafka."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from confluent_kafka import Producer

import semel
from semel.local.brokers import SemelBroker
from semel.local.postgres import PostgresServer
from semel.prove.database import PostgresProxy
from tests.support.broker import Cluster
from tests.support.reading import create_topic
from tests.support.sinks import execute
from tests.support.waiting import PATIENCE_S

EVENTS = 60
PARTITIONS = 2


class Inbox:
    """Events add 1 to a counter; each has an id in a header."""

    def __init__(self, cluster: Cluster, dsn: str) -> None:
        self.bootstrap, self.dsn = cluster.bootstrap, dsn
        self.application_id = cluster.unique("inbox")
        self.topics = [create_topic(self.bootstrap, cluster.unique("events"), PARTITIONS) for _ in range(2)]
        self.execute("CREATE TABLE counter (n int CHECK (n < 1000)); INSERT INTO counter VALUES (0)")

    def send(self, ids: Any, topic: int = 0, shift: int = 0, header: str = "event-id", value: bytes = b"1") -> None:
        producer = Producer({"bootstrap.servers": self.bootstrap})
        for number in ids:
            headers: list[tuple[str, Any]] = [(header, b"event %d" % number)]
            partition = (number + shift) % PARTITIONS
            producer.produce(self.topics[topic], value, partition=partition, headers=headers)
        assert producer.flush(PATIENCE_S) == 0

    def execute(self, statement: str) -> list[Any]:
        return execute(self.dsn, statement)

    def run(self, *, dsn: str | None = None, process: Any = None, **settings: Any) -> Any:
        sink = semel.Postgres(dsn or self.dsn, **{"event_id": "event-id", **settings})
        options = {"max_records": 25, **(process or {})}
        return semel.process(
            self.topics,
            sink,
            lambda record: semel.Statement("UPDATE counter SET n = n + %s", [int(record.value)]),
            application_id=self.application_id,
            bootstrap_servers=self.bootstrap,
            stop_at_end=True,
            **options,
        )

    def count(self) -> int:
        return self.execute("SELECT n FROM counter")[0][0]


@pytest.fixture
def inbox(shared_semel_broker: SemelBroker, dsn: str) -> Inbox:
    return Inbox(Cluster("semel", shared_semel_broker), dsn)


def test_an_event_that_was_produced_twice_is_applied_once(inbox: Inbox) -> None:
    """In one transaction, in a later one and after a restart; in the same partition, another one, another topic."""
    inbox.send([*range(EVENTS), *range(EVENTS)])
    inbox.send(range(EVENTS), shift=1)
    stats = inbox.run()
    assert (inbox.count(), stats.duplicates) == (EVENTS, 2 * EVENTS)
    inbox.send(range(EVENTS + 5), topic=1)
    stats = inbox.run()
    assert (inbox.count(), stats.duplicates) == (EVENTS + 5, EVENTS)
    assert inbox.execute("SELECT count(*) FROM semel.receipts") == [(EVENTS + 5,)]


def test_two_instances_that_get_copies_of_an_event_at_the_same_time_apply_one(inbox: Inbox) -> None:
    inbox.send(range(EVENTS))
    inbox.send(range(EVENTS), shift=1)
    inbox.send(reversed(range(EVENTS)), topic=1)
    failures: list[Exception] = []

    def run() -> None:
        try:
            inbox.run(process={"max_records": 7})
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert (failures, inbox.count()) == ([], EVENTS)


@pytest.mark.parametrize("kind", ["before", "after"])
def test_a_connection_that_breaks_during_commit_applies_no_event_twice(
    inbox: Inbox, postgres: PostgresServer, kind: Any
) -> None:
    inbox.send([*range(EVENTS), *range(EVENTS)])
    with PostgresProxy(postgres.host, postgres.port) as proxy:

        def settled(stats: Any) -> None:
            if stats.commits == 1 and not proxy.cuts:
                proxy.arm(kind)

        through = inbox.dsn.replace(f":{postgres.port}/", f":{proxy.port}/")
        inbox.run(dsn=through, process={"max_records": 25, "on_settled": settled})
        assert proxy.cuts == 1
    assert inbox.count() == EVENTS


def test_a_receipt_is_kept_for_its_retention_and_then_removed(inbox: Inbox) -> None:
    inbox.send(range(EVENTS))
    inbox.run(receipts_retention_ms=3_600_000)
    inbox.execute("UPDATE semel.receipts SET received_at = received_at - interval '30 minutes'")
    inbox.send([0])
    assert inbox.run(receipts_retention_ms=3_600_000).duplicates == 1
    inbox.execute("UPDATE semel.receipts SET received_at = received_at - interval '31 minutes' WHERE event_id <> 'x'")
    inbox.send([EVENTS])
    inbox.run(receipts_retention_ms=3_600_000)
    assert inbox.execute("SELECT event_id FROM semel.receipts") == [(f"event {EVENTS}",)], "the window is over"
    inbox.send([0])
    assert inbox.run(receipts_retention_ms=3_600_000).duplicates == 0
    assert inbox.count() == EVENTS + 2, "outside of the window a copy counts as a new event, as the docs say"


def test_an_event_without_an_id_or_one_that_is_refused_is_a_dead_letter_without_a_receipt(inbox: Inbox) -> None:
    inbox.send([1, 2])
    inbox.send([3], header="other")
    inbox.send([4], value=b"1000")  # the counter must stay below
    stats = inbox.run(dead_letters=True)
    assert (inbox.count(), stats.dead_letters) == (2, 2)
    reasons = sorted(reason for (reason,) in inbox.execute("SELECT reason FROM semel.dead_letters"))
    assert "no header 'event-id'" in reasons[0]
    assert "counter_n_check" in reasons[1]
    inbox.send([4])  # corrected, under its id
    inbox.run(dead_letters=True)
    assert inbox.count() == 3


def test_a_refused_event_that_comes_again_in_the_same_transaction_is_no_duplicate(inbox: Inbox) -> None:
    """Corrected, under its id, and then once more."""
    for value in (b"1000", b"1", b"1"):
        inbox.send([4], value=value)
    stats = inbox.run(dead_letters=True)
    assert (inbox.count(), stats.dead_letters, stats.duplicates) == (1, 1, 1)
    assert inbox.execute("SELECT event_id FROM semel.receipts") == [("event 4",)]


def test_the_id_may_come_from_a_function(inbox: Inbox) -> None:
    inbox.send(range(EVENTS), header="other")
    inbox.run(event_id=lambda record: record.headers[0][1][:7] + b"x" * 3_000)  # ten different ones, very long
    assert inbox.count() == 10
