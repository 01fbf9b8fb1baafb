"""Linux syncs files without a thread, and says which of them failed."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from semel.storage import sync as sync_module
from semel.storage.sync import SLOTS, KernelSync
from tests.support.waiting import PATIENCE_S
from tests.unit.storage.helpers import Folder, append

Outcome = tuple[Any, OSError | None]


async def opened(done: list[Outcome]) -> KernelSync:
    kernel = KernelSync.open(asyncio.get_running_loop(), lambda key, error: done.append((key, error)))
    if kernel is None:
        pytest.skip("this system has no io_submit")
    return kernel


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


def test_each_file_is_reported_once_also_when_there_are_more_than_slots(tmp_path: Path) -> None:
    async def scenario() -> None:
        done: list[Outcome] = []
        kernel = await opened(done)
        files = [os.open(tmp_path / str(number), os.O_RDWR | os.O_CREAT) for number in range(SLOTS + 10)]
        for fd in files:
            os.pwrite(fd, b"x" * 1000, 0)
        left = [(fd, fd) for fd in files]
        assert kernel.submit(left) == SLOTS
        left = left[SLOTS:]
        await until(lambda: len(done) == SLOTS)
        assert kernel.submit(left) == len(left)
        await until(lambda: len(done) == len(files))
        assert sorted(done) == [(fd, None) for fd in files]
        kernel.close()
        for fd in files:
            os.close(fd)

    asyncio.run(scenario())


def test_a_file_that_cannot_be_synced_is_reported_with_its_error(tmp_path: Path) -> None:
    async def scenario() -> None:
        done: list[Outcome] = []
        kernel = await opened(done)
        good, (pipe_out, pipe_in) = os.open(tmp_path / "good", os.O_RDWR | os.O_CREAT), os.pipe()
        taken = kernel.submit([(good, "good"), (pipe_in, "pipe")])
        await until(lambda: len(done) == taken)
        assert ("good", None) in done
        assert taken == 1 or [error for key, error in done if key == "pipe"] != [None]  # refused at once, or failed
        kernel.close()
        for fd in (good, pipe_out, pipe_in):
            os.close(fd)

    asyncio.run(scenario())


def everything_becomes_durable(folder: Folder) -> None:
    async def scenario() -> None:
        logs = [folder.log(f"topic{number}") for number in range(100)]
        sync = folder.data_dir._sync
        for _ in range(3):
            await asyncio.gather(*(sync.wait(log, append(log).last_offset + 1) for log in logs))
        assert all(log.high_watermark == 3 for log in logs)
        await sync.close()

    asyncio.run(scenario())


def test_logs_are_synced_by_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    original = KernelSync.submit

    def counted(self: KernelSync, wanted: list[tuple[int, Any]]) -> int:
        taken.append(original(self, wanted))
        return taken[-1]

    async def is_there() -> None:
        (await opened([])).close()

    asyncio.run(is_there())
    monkeypatch.setattr(KernelSync, "submit", counted)
    everything_becomes_durable(Folder(tmp_path / "data", fsync="commit"))
    assert sum(taken) >= 200  # the first sync of a log has folders to sync, too: that is for a thread


def test_logs_are_synced_by_threads_where_the_kernel_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_module.KernelSync, "open", lambda *_: None)
    everything_becomes_durable(Folder(tmp_path / "data", fsync="commit"))
