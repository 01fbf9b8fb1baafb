"""A broker that accepts connections and responds to nothing costs a consumer's calls no more than their timeouts.

The limits are far above the timeouts, as a busy machine may stall, and far below what waiting for a broker would take.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from semel.client.consumer import Consumer
from semel.client.errors import TimedOutError
from semel.client.producer import Producer
from semel.client.types import TopicPartition
from semel.local.brokers import SemelBroker
from tests.support.reading import create_topic
from tests.support.waiting import until

TIMES = 12
SHORT_MS = 100
LIMIT_S = 20.0
PLACE = TopicPartition("t", 0)


@pytest.fixture
def silent() -> Iterator[str]:
    """An address at which nobody ever responds."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def frozen(broker: SemelBroker) -> Iterator[None]:
    assert broker.process is not None
    os.kill(broker.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(broker.process.pid, signal.SIGCONT)


@contextmanager
def within(limit_s: float) -> Iterator[None]:
    started_s = time.monotonic()
    yield
    assert time.monotonic() - started_s < limit_s


@pytest.mark.parametrize("subscribes", [False, True], ids=["assign", "subscribe"])
def test_poll_keeps_its_timeout_before_a_broker_has_responded(silent: str, subscribes: bool) -> None:
    consumer = Consumer(bootstrap_servers=silent, group_id="g")
    consumer.subscribe(["t"]) if subscribes else consumer.assign([PLACE])
    with within(LIMIT_S):
        for _ in range(TIMES):
            assert consumer.poll(SHORT_MS) == []
        consumer.close(timeout_ms=SHORT_MS)


CALLS: dict[str, Callable[[Consumer], object]] = {
    "position": lambda consumer: consumer.position(PLACE, timeout_ms=SHORT_MS),
    "commit": lambda consumer: consumer.commit({PLACE: 1}, timeout_ms=SHORT_MS),
    "committed": lambda consumer: consumer.committed(timeout_ms=SHORT_MS),
    "end_offsets": lambda consumer: consumer.end_offsets([PLACE], timeout_ms=SHORT_MS),
    "offsets_for_times": lambda consumer: consumer.offsets_for_times({PLACE: 0}, timeout_ms=SHORT_MS),
    "partitions_for": lambda consumer: consumer.partitions_for("t", timeout_ms=SHORT_MS),
    "lag": lambda consumer: consumer.lag(timeout_ms=SHORT_MS),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_call_keeps_its_timeout(silent: str, name: str) -> None:
    """Also while a poll's look-up waits for the same broker."""
    with Consumer(bootstrap_servers=silent, group_id="g", enable_auto_commit=False) as consumer:
        consumer.assign([PLACE])
        consumer.poll(SHORT_MS)
        with within(LIMIT_S):
            for _ in range(TIMES):
                with pytest.raises(TimedOutError):
                    CALLS[name](consumer)


def test_member_of_a_group_keeps_its_timeouts_when_the_broker_freezes(semel_broker: SemelBroker) -> None:
    """Automatic commits are due at every poll, one of them before partitions are given back."""
    create_topic(semel_broker.bootstrap, "t")
    with Producer(bootstrap_servers=semel_broker.bootstrap) as producer:
        producer.send("t", b"v").result()
    options = {"group_id": "g", "auto_offset_reset": "earliest", "auto_commit_interval_ms": 1}
    consumers = [Consumer(bootstrap_servers=semel_broker.bootstrap, **options) for _ in range(3)]
    for consumer in consumers:
        consumer.subscribe(["t"])
    until(lambda: [consumer.poll(SHORT_MS) for consumer in consumers if consumer.poll(SHORT_MS)], "nothing was read")
    owner = next(consumer for consumer in consumers if consumer.assignment())
    with frozen(semel_broker), within(LIMIT_S):
        owner.subscribe(["t", "u"])  # a rebalance: it has offsets to commit first
        for _ in range(TIMES):
            assert owner.poll(SHORT_MS) == []
        for consumer in consumers:
            consumer.close(timeout_ms=SHORT_MS)


def test_reader_goes_on_when_the_broker_does(semel_broker: SemelBroker) -> None:
    create_topic(semel_broker.bootstrap, "t")
    address = semel_broker.bootstrap
    with (
        Producer(bootstrap_servers=address) as producer,
        Consumer(bootstrap_servers=address, auto_offset_reset="earliest") as consumer,
    ):
        consumer.assign([PLACE])
        with frozen(semel_broker), within(LIMIT_S):
            for _ in range(TIMES):
                assert consumer.poll(SHORT_MS) == []
        producer.send("t", b"v").result()
        assert until(lambda: consumer.poll(SHORT_MS))[0].value == b"v"
