"""Time as the broker sees it, so that tests can move it."""

from __future__ import annotations

import time

from semel import faults


class Clock:
    def now_ms(self) -> int:
        """Wall time, as record timestamps and retention use it."""
        return time.time_ns() // 1_000_000

    def monotonic_s(self) -> float:
        """Time that only goes forward, for timeouts."""
        return time.monotonic()


class SteppedClock(Clock):
    """Wall time that an injector can step, forward and backward. Monotonic time is not affected."""

    def now_ms(self) -> int:
        return super().now_ms() + faults.clock_offset_ms()


def system_clock() -> Clock:
    """The system's clock, or one that an injector can step."""
    return SteppedClock() if faults.armed else Clock()
