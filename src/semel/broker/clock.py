"""Time as the broker sees it, so that tests can move it."""

from __future__ import annotations

import time

from semel import control


class Clock:
    """The system's clocks."""

    def now_ms(self) -> int:
        """Wall time, as record timestamps and retention use it."""
        return time.time_ns() // 1_000_000

    def monotonic_s(self) -> float:
        """Time that only goes forward, for timeouts."""
        return time.monotonic()


class ManualClock(Clock):
    """A clock that stands still until it is moved."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms

    def now_ms(self) -> int:
        return self._now_ms

    def monotonic_s(self) -> float:
        return self._now_ms / 1000

    def advance_ms(self, delta_ms: int) -> None:
        self._now_ms += delta_ms


class SteppedClock(Clock):
    """Wall time that `semel prove` can step, forward and backward. Monotonic time is not affected."""

    def __init__(self, steps: control.Control) -> None:
        self._steps = steps

    def now_ms(self) -> int:
        return super().now_ms() + self._steps.clock_offset_ms


def clock_of_the_environment() -> Clock:
    """The system's clock, or the one that `semel prove` steps."""
    steps = control.from_environment()
    return Clock() if steps is None else SteppedClock(steps)
