"""The condition of a producer's deliveries: whatever interrupts a thread, its lock is not left taken."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from semel.client.producer.deliveries import DeliveryCondition
from tests.support.waiting import PATIENCE_S, until

SIGNALS = 300
PAUSE_S = 0.02


@pytest.fixture
def interrupts() -> Iterator[Callable[[], None]]:
    """Sets an alarm: Ctrl-C comes within a millisecond, at a moment of its own."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield lambda: signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0001, 0.001)) and None
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def look(condition: DeliveryCondition) -> None:
    with condition:
        pass


def wait(condition: DeliveryCondition) -> None:
    with condition:
        condition.wait_for(lambda: False, 0.00001)


@pytest.mark.parametrize("use", [look, wait])
def test_ctrl_c_does_not_leave_the_lock_taken(
    interrupts: Callable[[], None], use: Callable[[DeliveryCondition], None]
) -> None:
    condition = DeliveryCondition()
    came = 0
    for _ in range(SIGNALS):
        try:
            interrupts()
            until_s = time.monotonic() + PAUSE_S
            while time.monotonic() < until_s:
                use(condition)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            came += 1
        assert not condition._is_owned()
    assert came > SIGNALS / 2, "the others came where Python drops them, as in a callback of the garbage collector"


def test_a_waiting_thread_gives_the_lock_back_and_is_notified() -> None:
    condition = DeliveryCondition()
    news: list[int] = []
    seen: list[bool] = []

    def wait_for_news() -> None:
        with condition:
            seen.append(condition.wait_for(lambda: bool(news), PATIENCE_S))

    threads = [threading.Thread(target=wait_for_news) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: len(condition._sleepers) == len(threads))
    with condition:
        news.append(1)
        condition.notify_all()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert seen == [True] * 3
    assert not condition.wait_for(lambda: False, 0)
