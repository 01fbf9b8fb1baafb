"""Clients in a forked child: a clear error or connections of its own, no wait, and nothing happens to the parent."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import count

import pytest

import semel
from semel.client import Consumer, Producer
from semel.local.brokers import SemelBroker
from tests.support.reading import create_topic
from tests.support.waiting import PATIENCE_S

PATIENCE_MS = PATIENCE_S * 1000
_numbers = count(1)

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture
def topic(shared_semel_broker: SemelBroker) -> str:
    return create_topic(shared_semel_broker.bootstrap, f"forked-{next(_numbers)}")


def in_a_child(work: Callable[[], object]) -> str:
    """What work returns, or the error it raises, as text; the child is killed if it hangs."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            said = str(work())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
            if not isinstance(error, semel.KafkaError):
                said += traceback.format_exc()
        os.write(writer, said.encode()[:60_000])
        os._exit(0)
    os.close(writer)
    deadline_s = time.monotonic() + PATIENCE_S
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline_s:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(reader)
            raise AssertionError("the child hangs")
        time.sleep(0.01)
    with os.fdopen(reader) as said_by_child:
        return said_by_child.read()


@pytest.fixture
def producer(shared_semel_broker: SemelBroker, topic: str) -> Iterator[Producer]:
    with Producer(bootstrap_servers=shared_semel_broker.bootstrap, transactional_id=topic) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(topic, b"before").result(timeout_ms=PATIENCE_MS)
        yield producer


PRODUCER_CALLS: dict[str, Callable[[Producer, str], object]] = {
    "send": lambda producer, topic: producer.send(topic, b"x"),
    "flush": lambda producer, _: producer.flush(),
    "partitions_for": lambda producer, topic: producer.partitions_for(topic),
    "init_transactions": lambda producer, _: producer.init_transactions(),
    "begin_transaction": lambda producer, _: producer.begin_transaction(),
    "commit_transaction": lambda producer, _: producer.commit_transaction(),
    "abort_transaction": lambda producer, _: producer.abort_transaction(),
    "metrics": lambda producer, _: producer.metrics(),
}


def test_a_producer_is_refused_in_the_child_and_works_on_in_the_parent(producer: Producer, topic: str) -> None:
    for name, call in PRODUCER_CALLS.items():
        said = in_a_child(lambda call=call: call(producer, topic))  # type: ignore[misc]
        assert said.startswith("IllegalStateError: this producer was made before the process was forked"), (name, said)
        assert "make one in each process" in said
    assert in_a_child(lambda: producer.close()) == "None", "which ends nothing of the parent's"
    producer.send(topic, b"after").result(timeout_ms=PATIENCE_MS)
    producer.commit_transaction()


def test_a_child_does_not_wait_for_a_result_that_only_the_parent_gets(
    shared_semel_broker: SemelBroker, topic: str
) -> None:
    with Producer(bootstrap_servers=shared_semel_broker.bootstrap, linger_ms=PATIENCE_MS / 2) as producer:
        delivery = producer.send(topic, b"x")
        for call in (delivery.result, delivery.exception, lambda: delivery.add_done_callback(print)):
            said = in_a_child(call)
            assert said.startswith("IllegalStateError: this delivery was made before the process was forked"), said
        producer.flush(timeout_ms=PATIENCE_MS)
        assert in_a_child(lambda: delivery.result().offset) == "0", "one that is done has its result everywhere"


def test_a_lock_that_another_thread_has_at_the_fork_blocks_no_child(producer: Producer, topic: str) -> None:
    with producer._sender.lock:
        for call in PRODUCER_CALLS.values():
            assert in_a_child(lambda call=call: call(producer, topic)).startswith("IllegalStateError")  # type: ignore[misc]
        assert in_a_child(producer.close) == "None"


def test_a_consumer_is_refused_in_the_child_and_works_on_in_the_parent(
    shared_semel_broker: SemelBroker, topic: str
) -> None:
    options = {"group_id": topic, "auto_offset_reset": "earliest", "enable_auto_commit": False}
    with Producer(bootstrap_servers=shared_semel_broker.bootstrap) as producer:
        producer.send(topic, b"1")
    with Consumer(bootstrap_servers=shared_semel_broker.bootstrap, **options) as consumer:
        consumer.subscribe([topic])
        records: list[object] = []
        while not records:
            records += consumer.poll(1000)
        calls: dict[str, Callable[[], object]] = {
            "poll": consumer.poll,
            "poll_table": consumer.poll_table,
            "iteration": lambda: next(iter(consumer)),
            "commit": consumer.commit,
            "commit_async": consumer.commit_async,
            "committed": consumer.committed,
            "assignment": consumer.assignment,
            "consumed": consumer.consumed,
            "end_offsets": lambda: consumer.end_offsets([(topic, 0)]),
            "unsubscribe": consumer.unsubscribe,
        }
        for name, call in calls.items():
            said = in_a_child(call)
            assert said.startswith("IllegalStateError: this consumer was made before a fork"), (name, said)
            assert "make a consumer in each process" in said
        assert in_a_child(consumer.close) == "None", "the parent's place in the group is kept"
        consumer.commit()
        assert consumer.committed()[semel.client.TopicPartition(topic, 0)].offset == 1
        assert consumer.metrics().rebalance_total == 1


def test_an_admin_opens_connections_of_its_own_in_the_child(shared_semel_broker: SemelBroker, topic: str) -> None:
    with semel.Admin(bootstrap_servers=shared_semel_broker.bootstrap) as admin:
        assert topic in admin.list_topics()
        assert in_a_child(lambda: topic in admin.list_topics()) == "True"
        assert in_a_child(admin.close) == "None"
        with admin._cluster.calls.lock:  # as another thread may have it at the fork
            assert in_a_child(admin.close) == "None"
        assert topic in admin.list_topics(), "the parent's connection still works"


def test_a_thread_that_wakes_the_consumer_at_the_fork_does_not_stop_the_child(
    shared_semel_broker: SemelBroker, topic: str
) -> None:
    with Consumer(bootstrap_servers=shared_semel_broker.bootstrap) as consumer:
        consumer.assign([(topic, 0)])
        waker = consumer._engine.network._waker  # type: ignore[attr-defined]
        held, may_go_on = threading.Event(), threading.Event()

        def hold() -> None:
            with waker._lock:
                held.set()
                may_go_on.wait(PATIENCE_S)

        def end() -> str:
            consumer.wakeup()
            consumer.close()
            return "closed"

        thread = threading.Thread(target=hold)
        thread.start()
        try:
            assert held.wait(PATIENCE_S)
            assert in_a_child(end) == "closed"
        finally:
            may_go_on.set()
            thread.join(PATIENCE_S)
        consumer.wakeup()
        assert consumer.poll(PATIENCE_MS) == [], "the parent's pipe is as it was"
