"""Deadlines and back-off, with a clock that tests can move."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from semel.client.pauses import Pauses

Clock = Callable[[], float]


class Deadline:
    """A moment until which something may take; all waits inside a call share one."""

    __slots__ = ("_at_s", "_clock", "total_s")

    def __init__(self, seconds: float, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self.total_s = seconds
        self._at_s = clock() + seconds

    def remaining_s(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self._at_s - self._clock())

    @property
    def expired(self) -> bool:
        return self._clock() >= self._at_s


class Backoff(Pauses):
    """Pauses of random length."""

    __slots__ = ()

    def __init__(self, first_ms: float, max_ms: float, rand: Callable[[], float] = random.random) -> None:
        super().__init__(first_ms, max_ms, rand)
