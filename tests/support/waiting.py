"""Waiting for what gives no sign of its own, such as files, processes and answers that mean "not yet"."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE_S = 120.0  # how long a test waits for what must come; a busy machine may stall for many seconds
STALL_S = 25.0  # a test that says "not later than" allows for this; what it excludes takes twice as long, or longer


def until(ask: Callable[[], T], otherwise: str = "it did not come true", timeout_s: float = PATIENCE_S) -> T:
    """Asks until the answer is true, and returns it. `otherwise` says what is wrong if it never is."""
    return eventually(ask, bool, timeout_s, otherwise)


def eventually(
    call: Callable[[], T],
    done: Callable[[T], object],
    timeout_s: float = PATIENCE_S,
    otherwise: str = "it did not come to that",
) -> T:
    """Asks again until the answer is as wanted: for codes that mean "not yet", such as CONCURRENT_TRANSACTIONS."""
    deadline_s = time.monotonic() + timeout_s
    while not done(answer := call()):
        assert time.monotonic() < deadline_s, f"{otherwise}: still {answer!r} after {timeout_s:g} s"
        time.sleep(0.01)
    return answer
