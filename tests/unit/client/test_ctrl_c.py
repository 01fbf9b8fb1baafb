"""Ctrl-C in a call that waits for a broker: the call ends with KeyboardInterrupt, and the client works on."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

import semel
from semel.client import Consumer, Producer
from semel.local.brokers import SemelBroker
from tests.support.reading import create_topic, read_topic
from tests.support.waiting import PATIENCE_S, until

PATIENCE_MS = PATIENCE_S * 1000
WAITS = {"wait", "_wait_for_io", "wait_ready"}  # where a thread stands while it waits


@pytest.fixture(scope="module")
def broker() -> Iterator[SemelBroker]:
    with SemelBroker() as broker:
        yield broker


def interrupt(call: Callable[[], object]) -> None:
    """Calls it, and sends SIGINT once the main thread waits in it."""
    assert threading.current_thread() is threading.main_thread()
    main, inside = threading.get_ident(), threading.Event()

    def is_waiting() -> bool:
        frame = sys._current_frames().get(main)
        return inside.is_set() and frame is not None and frame.f_code.co_name in WAITS

    def ctrl_c() -> None:
        until(is_waiting, "the call does not wait")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=ctrl_c, daemon=True)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            thread.start()
            inside.set()
            call()
            thread.join(PATIENCE_S)  # so that a signal that comes too late is seen here
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_producer_works_on_after_ctrl_c_and_stores_each_record_once(broker: SemelBroker) -> None:
    topic = create_topic(broker.bootstrap, "ctrl-c-producer")
    options = {"buffer_memory": 1000, "batch_size": 100, "max_block_ms": int(PATIENCE_MS)}
    with Producer(bootstrap_servers=broker.bootstrap, **options) as producer:
        producer.send(topic, b"0").result(timeout_ms=PATIENCE_MS)
        broker.pause()
        try:
            delivery = producer.send(topic, b"1")
            interrupt(delivery.result)
            interrupt(producer.flush)
            sent = 2

            def fill() -> None:
                nonlocal sent
                while True:
                    producer.send(topic, b"%d" % sent)
                    sent += 1

            interrupt(fill)
        finally:
            broker.resume()
        assert delivery.result(timeout_ms=PATIENCE_MS).offset == 1
        producer.send(topic, b"last").result(timeout_ms=PATIENCE_MS)
        producer.flush(timeout_ms=PATIENCE_MS)
        assert producer.metrics().record_error_total == 0
    stored = [row.value for row in read_topic(broker.bootstrap, topic)]
    assert stored == [b"%d" % number for number in range(sent)] + [b"last"], (
        "the one that waited for space was not sent"
    )


def test_a_consumer_works_on_after_ctrl_c(broker: SemelBroker) -> None:
    topic = create_topic(broker.bootstrap, "ctrl-c-consumer")
    options = {"auto_offset_reset": "earliest", "group_id": "ctrl-c", "enable_auto_commit": False}
    with Consumer(bootstrap_servers=broker.bootstrap, **options) as consumer:
        consumer.assign([(topic, 0)])
        with Producer(bootstrap_servers=broker.bootstrap) as producer:
            producer.send(topic, b"1")
        assert [record.value for record in consumer.poll(PATIENCE_MS)] == [b"1"]
        interrupt(lambda: consumer.poll(PATIENCE_MS))
        interrupt(lambda: next(iter(consumer)))
        broker.pause()
        try:
            interrupt(consumer.commit)
            interrupt(lambda: consumer.end_offsets([(topic, 0)]))
            interrupt(consumer.committed)
        finally:
            broker.resume()
        with Producer(bootstrap_servers=broker.bootstrap) as producer:
            producer.send(topic, b"2")
        assert [record.value for record in consumer.poll(PATIENCE_MS)] == [b"2"]
        consumer.commit(timeout_ms=PATIENCE_MS)
        assert [at.offset for at in consumer.committed(timeout_ms=PATIENCE_MS).values()] == [2]
        assert list(consumer.end_offsets([(topic, 0)]).values()) == [2]


def test_an_admin_works_on_after_ctrl_c(broker: SemelBroker) -> None:
    with semel.Admin(bootstrap_servers=broker.bootstrap) as admin:
        admin.list_topics()
        broker.pause()
        try:
            interrupt(admin.list_topics)
            interrupt(admin.list_groups)
        finally:
            broker.resume()
        create_topic(broker.bootstrap, "ctrl-c-admin")
        assert "ctrl-c-admin" in admin.list_topics(timeout_ms=PATIENCE_MS)
