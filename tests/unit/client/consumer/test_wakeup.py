"""wakeup(): no call is lost, whenever it comes. No broker is needed: nothing is to be read."""

from __future__ import annotations

import time

from semel.client.consumer import Consumer

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
