"""Time as the broker sees it, so that tests can move it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

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


# --- Alarms that can be put off cheaply, on timers that tests can move by hand ---


class Cancellable(Protocol):
    def cancel(self) -> None: ...


class Timers(Protocol):
    """Who calls back later. Time here only goes forward and has nothing to do with the wall clock."""

    def monotonic_ms(self) -> float: ...

    def call_later(self, delay_ms: float, action: Callable[[], None]) -> Cancellable: ...


class LoopTimers:
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def monotonic_ms(self) -> float:
        return self._loop.time() * 1000

    def call_later(self, delay_ms: float, action: Callable[[], None]) -> Cancellable:
        return self._loop.call_later(delay_ms / 1000, action)


class Alarm:
    """Rings once, at the time it was last set to. Putting it off costs a number, not a timer.

    A member's session is put off with every heartbeat, so the timer that runs is kept and looks again when it fires.
    """

    __slots__ = ("_action", "_due_ms", "_fires_ms", "_timer", "_timers")

    def __init__(self, timers: Timers, action: Callable[[], None]) -> None:
        self._timers = timers
        self._action = action
        self._timer: Cancellable | None = None
        self._due_ms = 0.0
        self._fires_ms = 0.0

    @property
    def is_set(self) -> bool:
        return self._timer is not None

    def set(self, delay_ms: float) -> None:
        self._due_ms = self._timers.monotonic_ms() + delay_ms
        if self._timer is not None and self._fires_ms <= self._due_ms:
            return
        self.cancel()
        self._start(delay_ms)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start(self, delay_ms: float) -> None:
        self._fires_ms = self._timers.monotonic_ms() + delay_ms
        self._timer = self._timers.call_later(delay_ms, self._fire)

    def _fire(self) -> None:
        self._timer = None
        left_ms = self._due_ms - self._timers.monotonic_ms()
        if left_ms > 0.5:  # loops may fire a moment early; what is left of half a millisecond is not worth a turn
            self._start(left_ms)
        else:
            self._action()


def cancel_all(*alarms: Alarm | None) -> None:
    for alarm in alarms:
        if alarm is not None:
            alarm.cancel()
