"""Alarms ring once, at the time they were last set to."""

from __future__ import annotations

import asyncio

from semel.broker.clock import Alarm, LoopTimers
from tests.support.waiting import PATIENCE_S
from tests.unit.broker_groups.world import ManualTimers


def ring(timers: ManualTimers, until_ms: float) -> None:
    for action in timers.due(until_ms):
        action()
    timers.now_ms = until_ms


def test_alarm_rings_at_its_time_and_once() -> None:
    timers, rings = ManualTimers(), []
    Alarm(timers, lambda: rings.append(timers.now_ms)).set(100)
    ring(timers, 99)
    assert rings == []
    ring(timers, 1000)
    assert rings == [100]


def test_alarm_that_is_put_off_rings_at_the_later_time_with_a_single_timer() -> None:
    timers, rings = ManualTimers(), []
    alarm = Alarm(timers, lambda: rings.append(timers.now_ms))
    for now in range(0, 1000, 10):
        ring(timers, now)
        alarm.set(100)
        assert timers.waiting == 1
    ring(timers, 5000)
    assert rings == [1090]


def test_alarm_can_be_brought_forward() -> None:
    timers, rings = ManualTimers(), []
    alarm = Alarm(timers, lambda: rings.append(timers.now_ms))
    alarm.set(1000)
    alarm.set(10)
    ring(timers, 5000)
    assert rings == [10]


def test_cancelled_alarm_does_not_ring_and_can_be_set_again() -> None:
    timers, rings = ManualTimers(), []
    alarm = Alarm(timers, lambda: rings.append(timers.now_ms))
    alarm.set(10)
    alarm.cancel()
    assert not alarm.is_set
    ring(timers, 100)
    alarm.set(10)
    ring(timers, 200)
    assert rings == [110]


def test_alarm_on_the_event_loop_rings() -> None:
    async def play() -> None:
        rang = asyncio.Event()
        Alarm(LoopTimers(), rang.set).set(1)
        await asyncio.wait_for(rang.wait(), PATIENCE_S)

    asyncio.run(play())
