"""Waiting for what gives no sign of its own, such as files, processes and answers that mean "not yet"."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from benchmarks.peers.raw_client import eventually as eventually

T = TypeVar("T")
PATIENCE_S = 120.0  # how long a test waits for what must come; a busy machine may stall for many seconds
STALL_S = 25.0  # a test that says "not later than" allows for this; what it excludes takes twice as long, or longer


def until(ask: Callable[[], T], otherwise: str = "it did not come true", timeout_s: float = PATIENCE_S) -> T:
    """Calls until the result is true, and returns it. `otherwise` says what is wrong if it never is."""
    return eventually(ask, bool, timeout_s, otherwise)
