"""One thread at a time opens a connection to a broker."""

from __future__ import annotations

import random
import signal
import threading
import time
from types import FrameType

from semel.client.cluster import BlockingCalls
from semel.client.settings import ClientSettings
from semel.client.timing import Deadline
from tests.support.waiting import PATIENCE_S

SIGNALS = 200
PAUSE_S = 0.02
KEY = ("main", "localhost", 9092)


def interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_does_not_keep_other_threads_from_connecting() -> None:
    calls = BlockingCalls(ClientSettings.of({"bootstrap_servers": "localhost:9092"}))
    came = 0
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(SIGNALS):
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0001, 0.001))
                until_s = time.monotonic() + PAUSE_S
                while time.monotonic() < until_s:
                    with calls._opening(KEY, Deadline(1.0)):
                        pass
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                came += 1
    finally:
        signal.signal(signal.SIGALRM, before)
    assert came > SIGNALS / 2, "the others came where Python drops them, as in a callback of the garbage collector"
    opened: list[bool] = []

    def open_in_another_thread() -> None:
        with calls._opening(KEY, Deadline(1.0)):
            opened.append(True)

    thread = threading.Thread(target=open_in_another_thread)
    thread.start()
    thread.join(PATIENCE_S)
    assert opened
