"""A consumer belongs to one thread at a time; a second one gets an error at once, and does no harm."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import semel
from semel.client.consumer import Consumer
from tests.support.waiting import PATIENCE_S, until

LONG_MS = 600_000
OPEN_TO_ALL = {"wakeup", "metrics", "end_calls"}
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "subscribe": (["t"],),
    "assign": ([("t", 0)],),
    "position": (("t", 0),),
    "seek": (("t", 0), 0),
    "current_lag": (("t", 0),),
    "beginning_offsets": ([("t", 0)],),
    "end_offsets": ([("t", 0)],),
    "settled_ends": ([("t", 0)],),
    "offsets_for_times": ({("t", 0): 0},),
    "partitions_for": ("t",),
}
CALLS = [name for name, _ in inspect.getmembers(Consumer, inspect.isfunction) if not name.startswith("_")]


@contextmanager
def polling() -> Iterator[Consumer]:
    """A consumer in whose poll a thread waits."""
    consumer = Consumer(bootstrap_servers="127.0.0.1:1", group_id="g", default_api_timeout_ms=LONG_MS)
    consumer.assign([("t", 0)])
    thread = threading.Thread(target=lambda: consumer.poll(LONG_MS), name="the poller", daemon=True)
    thread.start()
    until(lambda: "poll" in consumer._guard._user, "poll was not entered")
    try:
        yield consumer
    finally:
        consumer.wakeup()
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "wakeup() ends the poll"
        consumer.close()


def test_every_call_of_a_second_thread_is_refused_and_names_the_first() -> None:
    assert len(CALLS) > 20
    with polling() as consumer:
        for name in sorted(set(CALLS) - OPEN_TO_ALL):
            with pytest.raises(
                semel.ConcurrentUseError, match=rf"{name}\(\) in thread .*poll\(\) in thread 'the poller'"
            ):
                getattr(consumer, name)(*ARGUMENTS.get(name, ()))
        with pytest.raises(semel.ConcurrentUseError, match="one consumer per thread"):
            next(iter(consumer))
        assert consumer.metrics().records_consumed_total == 0


def test_threads_may_take_turns_and_listeners_may_call_back() -> None:
    with polling() as consumer:
        pass
    consumer = Consumer(bootstrap_servers="127.0.0.1:1")
    consumer.assign([("t", 0)])
    seen: list[set[semel.client.TopicPartition]] = []
    thread = threading.Thread(target=lambda: seen.append(consumer.assignment()))
    thread.start()
    thread.join(PATIENCE_S)
    assert seen == [{("t", 0)}]
    consumer._guard.enter("poll")
    assert consumer.assignment(), "from a callback in the same thread"
    consumer._guard.leave()
    consumer.close()
