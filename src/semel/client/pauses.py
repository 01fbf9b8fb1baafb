"""How long to wait between attempts. Pure: the random numbers come from the caller."""

from __future__ import annotations

from collections.abc import Callable


class Pauses:
    """Waits that double from `first_ms` up to `max_ms`, each shortened or stretched by up to a fifth."""

    __slots__ = ("_factor", "_first_s", "_max_s", "_random")

    def __init__(self, first_ms: float, max_ms: float, random: Callable[[], float]) -> None:
        self._first_s = first_ms / 1000
        self._max_s = max(max_ms, first_ms) / 1000
        self._factor = 1.0
        self._random = random

    def next_s(self) -> float:
        wait_s = min(self._first_s * self._factor, self._max_s)
        self._factor = min(self._factor * 2, 1 << 20)
        return wait_s * (0.8 + 0.4 * self._random())

    def reset(self) -> None:
        self._factor = 1.0
