"""Time that a test moves."""

from __future__ import annotations

from semel.broker.clock import Clock


class ManualClock(Clock):
    """A clock that stands still until it is moved."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms
        self._set_by_ms = 0

    def now_ms(self) -> int:
        return self._now_ms + self._set_by_ms

    def monotonic_s(self) -> float:
        return self._now_ms / 1000

    def advance_ms(self, delta_ms: int) -> None:
        self._now_ms += delta_ms

    def set_wall_ms(self, delta_ms: int) -> None:
        """Sets the wall clock alone."""
        self._set_by_ms += delta_ms
