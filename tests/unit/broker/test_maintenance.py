"""Background jobs run as often as their settings say, and not more often."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from semel.broker import runner
from semel.broker.runner import Maintenance
from tests.support.waiting import PATIENCE_S

SETTING = "log.retention.check.interval.ms"


class Looked(dict):
    """Settings that say when they were looked at so many times."""

    def __init__(self, interval_ms: int, times: int) -> None:
        super().__init__({SETTING: interval_ms})
        self.left, self.enough = times, asyncio.Event()

    def __getitem__(self, name: str) -> int:
        self.left -= 1
        if not self.left:
            self.enough.set()
        return super().__getitem__(name)


def test_a_long_interval_is_kept_and_an_altered_one_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LONGEST_SLEEP_S", 0.001)

    async def run() -> None:
        settings, runs = Looked(86_400_000, times=20), asyncio.Event()

        async def job() -> None:
            runs.set()

        work = Maintenance(SimpleNamespace(settings=settings), SimpleNamespace())
        work._every(SETTING, job)
        await asyncio.wait_for(settings.enough.wait(), PATIENCE_S)
        assert not runs.is_set(), "the job ran a day too early"
        settings[SETTING] = 1
        await asyncio.wait_for(runs.wait(), PATIENCE_S)
        await work.stop()

    asyncio.run(run())
