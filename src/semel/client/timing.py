"""Deadlines and back-off, with a clock that tests can move."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

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


class Backoff:
    """Waits that double from `first_ms` up to `max_ms`, each shortened or stretched by up to a fifth."""

    __slots__ = ("_factor", "_first_s", "_max_s", "_random")

    def __init__(self, first_ms: float, max_ms: float, rand: Callable[[], float] = random.random) -> None:
        self._first_s = first_ms / 1000
        self._max_s = max(max_ms, first_ms) / 1000
        self._factor = 1.0
        self._random = rand

    def next_s(self) -> float:
        wait_s = min(self._first_s * self._factor, self._max_s)
        self._factor = min(self._factor * 2, 1 << 20)
        return wait_s * (0.8 + 0.4 * self._random())

    def reset(self) -> None:
        self._factor = 1.0
