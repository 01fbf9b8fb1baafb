"""Background jobs run as often as their settings say, and not more often."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from semel.broker import runner
from semel.broker.runner import Maintenance
from tests.support.clock import ManualClock
from tests.support.waiting import PATIENCE_S
from tests.unit.storage.helpers import START_MS, Folder, append

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


def test_logs_that_cannot_be_opened_do_not_keep_the_others_from_their_retention(tmp_path: Path) -> None:
    """Only some of those that nobody used since the start are opened in each round."""
    folder = Folder(tmp_path / "data")
    logs = [folder.log(f"t{number:02}") for number in range(runner.LOGS_OPENED_PER_ROUND + 1)]
    for log in logs:
        append(log)
    folder.restart(clean=True)
    data_dir = folder.data_dir
    *broken, sound = data_dir.logs.values()
    for log in broken:
        shutil.rmtree(log.folder)
        Path(log.folder).touch()
    work = Maintenance(SimpleNamespace(data_dir=data_dir, clock=ManualClock(START_MS)), SimpleNamespace())
    for _ in range(2):
        asyncio.run(work.keep_up_storage())
    assert all(log.error is not None for log in broken)
    assert sound.is_open
    data_dir.crash()
