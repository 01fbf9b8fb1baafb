"""Work that starts at once: done without a task if it never waits, finished by one if it does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from semel.broker.turns import DoneAtOnce, start_now
from tests.support.waiting import PATIENCE_S


def spawn(work: Any) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(work)


def test_work_that_does_not_wait_is_done_at_once():
    async def work() -> int:
        return 7

    async def test() -> None:
        assert start_now(work(), spawn) == DoneAtOnce(7)

    asyncio.run(test())


def test_work_that_waits_has_begun_and_goes_on_as_a_task():
    async def test() -> None:
        begun, gates = [], [asyncio.Event(), asyncio.Event()]

        async def work() -> str:
            begun.append(True)
            for gate in gates:
                await gate.wait()
                await asyncio.sleep(0)
            return "done"

        task = start_now(work(), spawn)
        assert begun
        assert isinstance(task, asyncio.Task)
        for gate in gates:
            await asyncio.sleep(0)
            assert not task.done()
            gate.set()
        assert await asyncio.wait_for(task, PATIENCE_S) == "done"

    asyncio.run(test())


def test_errors_arrive_where_they_belong():
    async def fails(waits: bool) -> None:
        if waits:
            await asyncio.sleep(0)
        raise ValueError("no")

    async def test() -> None:
        with pytest.raises(ValueError, match="no"):
            start_now(fails(False), spawn)
        task = start_now(fails(True), spawn)
        assert isinstance(task, asyncio.Task)
        with pytest.raises(ValueError, match="no"):
            await task

    asyncio.run(test())


def test_a_cancelled_task_lets_the_work_clean_up():
    async def test() -> None:
        cleaned = []

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cleaned.append(True)

        task = start_now(work(), spawn)
        assert isinstance(task, asyncio.Task)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert cleaned

    asyncio.run(test())
