"""A log with what became of each record: held against what an independent reader of committed data gets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from confluent_kafka import Consumer
from confluent_kafka import TopicPartition as ConfluentPartition

from semel.client import Producer
from semel.client.admin import Admin
from semel.client.immediate import run
from semel.client.log_view import ABORTED, COMMITTED, HELD, OPEN, LogView, view_log
from tests.support.broker import Cluster
from tests.support.waiting import PATIENCE_S, until


@pytest.fixture
def admin(cluster: Cluster) -> Iterator[Admin]:
    with Admin(bootstrap_servers=cluster.bootstrap) as made:
        yield made


def view(admin: Admin, topic: str, offset: int = 0, most: int = 1000) -> LogView:
    calls = admin.calls.cluster
    return run(view_log(calls, (topic, 0), offset, calls.deadline(PATIENCE_S), most=most))


def states(seen: LogView) -> dict[bytes | None, str]:
    return {record.value: record.state for record in seen.records if not record.marker}


def committed_by_another_client(bootstrap: str, topic: str, end: int) -> list[bytes | None]:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "look", "enable.partition.eof": True})
    consumer.assign([ConfluentPartition(topic, 0, 0)])
    found = []
    try:
        while (message := consumer.poll(PATIENCE_S)) is not None and not message.error():
            found.append(message.value())
    finally:
        consumer.close()
    return found


def test_each_record_has_the_state_that_readers_see(cluster: Cluster, admin: Admin) -> None:
    topic = cluster.unique("seen")
    admin.create_topic(topic, partitions=1)
    with ExitStack() as stack:
        a, b, c = (
            stack.enter_context(
                Producer(bootstrap_servers=cluster.bootstrap, transactional_id=cluster.unique("viewer"))
            )
            for _ in range(3)
        )
        plain = stack.enter_context(Producer(bootstrap_servers=cluster.bootstrap))
        for producer in (a, b, c):
            producer.init_transactions()
            producer.begin_transaction()
        a.send(topic, b"a1").result()
        b.send(topic, b"b1").result()
        a.send(topic, b"a2").result()
        plain.send(topic, b"plain").result()
        a.commit_transaction()
        b.send(topic, b"b2").result()
        b.abort_transaction()
        c.send(topic, b"c1").result()  # stays open
        a.begin_transaction()
        a.send(topic, b"behind").result()
        a.commit_transaction()
        plain.send(topic, b"plain behind").result()
        b.begin_transaction()
        b.send(topic, b"gone behind").result()
        b.abort_transaction()
        expected = {
            b"a1": COMMITTED, b"a2": COMMITTED, b"plain": COMMITTED, b"b1": ABORTED, b"b2": ABORTED, b"c1": OPEN,
            b"behind": COMMITTED, b"plain behind": COMMITTED, b"gone behind": ABORTED,
        }  # fmt: skip
        # Markers follow the response to the end of a transaction. Those that are there decide what lies beyond.
        until(lambda: states(view(admin, topic)) == expected, "the states are wrong")
        seen = view(admin, topic)
        first_open = next(record.offset for record in seen.records if record.state == OPEN)
        assert seen.stable == first_open < seen.high_watermark
        visible = [
            record.value
            for record in seen.records
            if record.state == COMMITTED and not record.marker and record.offset < seen.stable
        ]
        assert visible == committed_by_another_client(cluster.bootstrap, topic, seen.stable)
        assert [record.marker for record in seen.records if record.marker] == ["COMMIT", "ABORT", "COMMIT", "ABORT"]
        # A piece that ends before the marker does not know how it ended: it says that it is held back.
        at = next(record.offset for record in seen.records if record.value == b"behind")
        assert states(view(admin, topic, at, most=1))[b"behind"] in (COMMITTED, HELD)
        # Page by page it is the same.
        paged: dict[bytes | None, str] = {}
        offset = 0
        while offset < seen.high_watermark:
            piece = view(admin, topic, offset, most=2)
            paged |= states(piece)
            assert piece.next_offset > offset
            offset = piece.next_offset
        assert paged == expected
        c.abort_transaction()
