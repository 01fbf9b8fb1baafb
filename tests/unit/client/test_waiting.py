"""A flag that threads wait for: whatever a signal interrupts, it can be set."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from semel.client.cluster import BlockingCalls
from semel.client.immediate import run
from semel.client.settings import ClientSettings
from semel.client.waiting import Flag
from semel.patterns.outbox import Outbox
from semel.patterns.process import Processor
from semel.patterns.stopping import stop_on_signals
from tests.support.waiting import PATIENCE_S, until

SIGNALS = 1_000
PAUSE_S = 0.02


@pytest.fixture
def alarm() -> Iterator[Callable[[], None]]:
    """A signal within a millisecond, at a moment of its own."""
    before = signal.getsignal(signal.SIGALRM)
    yield lambda: signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0001, 0.001)) and None
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def test_a_signal_handler_may_set_what_its_thread_waits_for(alarm: Callable[[], None]) -> None:
    flag, seen = Flag(), 0
    came: list[int] = []

    def stop() -> None:
        flag.set()
        came.append(1)

    def waits() -> None:
        """In the main thread, as a loop whose broker is away."""
        nonlocal seen
        for seen in range(1, SIGNALS + 1):
            alarm()
            while len(came) < seen:
                flag.clear()
                flag.wait(0.00001)

    with stop_on_signals(stop):
        signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGTERM))
        waits()
    assert seen == SIGNALS


def test_ctrl_c_in_a_pause_keeps_no_client_from_closing(alarm: Callable[[], None]) -> None:
    calls = BlockingCalls(ClientSettings.of({"bootstrap_servers": "localhost:9092"}))
    signal.signal(signal.SIGALRM, interrupt)
    came = 0
    for _ in range(SIGNALS):
        try:
            alarm()
            until_s = time.monotonic() + PAUSE_S
            while time.monotonic() < until_s:
                run(calls.sleep(0.00001))
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            came += 1
    assert came > SIGNALS / 2, "the others came where Python drops them, as in a callback of the garbage collector"
    closing = threading.Thread(target=calls.close, daemon=True)
    closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()


def test_loops_stop_by_such_a_flag() -> None:
    loop = Processor("in", "out", lambda record: None, application_id="app")
    assert isinstance(loop._stopping, Flag)
    assert isinstance(Outbox("postgresql://nowhere", "app")._stopping, Flag)


def test_all_that_wait_go_on_when_it_is_set() -> None:
    flag = Flag()
    seen: list[bool] = []
    threads = [threading.Thread(target=lambda: seen.append(flag.wait(PATIENCE_S))) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: len(flag._sleepers) == len(threads))
    assert not flag.wait(0)
    flag.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert seen == [True] * 3
    assert flag.wait()
    assert not flag._sleepers
    flag.clear()
    assert not flag.is_set()
    assert not flag.wait(0.001)
