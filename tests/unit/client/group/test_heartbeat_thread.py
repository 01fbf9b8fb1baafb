"""The heartbeat thread: it beats, survives surprises, and ends with its consumer."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

from semel.client.group.member import Heartbeats
from semel.client.immediate import run
from semel.client.network import BackgroundThread
from tests.support.waiting import PATIENCE_S


class Member:
    """Notes what the thread does."""

    group_id = "g"
    awaits_response = False

    def __init__(self, fail_first: bool = False) -> None:
        self.beats = 0
        self.is_stopped = False
        self.late_beats = 0
        self.served = threading.Event()
        self.beaten_twice = threading.Event()
        self._fail_first = fail_first

    async def beat(self) -> None:
        self.beats += 1
        self.late_beats += self.is_stopped
        if self.beats >= 2:
            self.beaten_twice.set()
        if self._fail_first and self.beats == 1:
            raise RuntimeError("a surprise")

    def next_event_s(self) -> float:
        return time.monotonic() + 0.01

    def service(self) -> None:
        self.served.set()


def started(member: Any) -> BackgroundThread:
    return BackgroundThread("semel-heartbeat", Heartbeats(member).run)


def test_it_beats_until_it_is_stopped() -> None:
    member = Member()
    thread = started(member)
    assert member.beaten_twice.wait(PATIENCE_S)
    run(thread.stop(PATIENCE_S))
    member.is_stopped = True
    thread._thread.join(PATIENCE_S)
    assert not thread._thread.is_alive()
    assert member.late_beats == 0


def test_a_surprise_does_not_end_the_heartbeats() -> None:
    member = Member(fail_first=True)
    thread = started(member)
    assert member.beaten_twice.wait(PATIENCE_S)
    run(thread.stop(PATIENCE_S))


def test_it_takes_answers_while_a_rebalance_is_under_way() -> None:
    member = Member()
    member.awaits_response = True
    thread = started(member)
    assert member.served.wait(PATIENCE_S)
    assert member.beats == 0
    run(thread.stop(PATIENCE_S))


def test_it_ends_when_its_consumer_was_dropped_without_close() -> None:
    member = Member()
    thread = started(member)
    assert member.beaten_twice.wait(PATIENCE_S)
    del member
    gc.collect()
    thread._thread.join(PATIENCE_S)
    assert not thread._thread.is_alive()
