"""wakeup(): no call is lost, whenever it comes. What else may end a poll from outside."""

from __future__ import annotations

import signal
import time

import pytest

from semel.client.consumer import Consumer
from semel.client.errors import ClosedError
from semel.local.brokers import SemelBroker
from tests.support.reading import create_topic

LONG_MS = 60_000


def unreachable() -> Consumer:
    consumer = Consumer(bootstrap_servers="127.0.0.1:1", default_api_timeout_ms=LONG_MS)
    consumer.assign([("t", 0)])
    return consumer


def test_wakeup_before_poll_ends_the_next_poll_and_no_other() -> None:
    with unreachable() as consumer:
        consumer.wakeup()
        started_s = time.monotonic()
        assert consumer.poll(LONG_MS) == []
        consumer.wakeup()
        assert consumer.poll_table(LONG_MS).num_rows == 0
        assert time.monotonic() - started_s < LONG_MS / 2000
        assert not consumer._woken


def test_wakeup_before_a_loop_ends_the_loop() -> None:
    with unreachable() as consumer:
        consumer.wakeup()
        assert list(consumer) == []


def test_a_signal_handler_that_closes_the_consumer_ends_its_poll(shared_semel_broker: SemelBroker) -> None:
    consumer = Consumer(bootstrap_servers=shared_semel_broker.bootstrap)
    consumer.assign([(create_topic(shared_semel_broker.bootstrap, "closed-by-a-signal"), 0)])
    assert consumer.poll(100) == []
    before = signal.signal(signal.SIGALRM, lambda *_: consumer.close())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(ClosedError):
            consumer.poll(LONG_MS)
    finally:
        signal.signal(signal.SIGALRM, before)
