"""Runs a test's coroutine in an event loop of its own, and fails if it leaves anything behind."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings
from collections.abc import Coroutine
from typing import Any, TypeVar

from tests.support.waiting import PATIENCE_S

Value = TypeVar("Value")


def in_loop(coroutine: Coroutine[Any, Any, Value], timeout_s: float = PATIENCE_S) -> Value:
    """The result; an error that no task got, a task that is left or a warning about one fails the test."""
    strays: list[dict[str, Any]] = []

    async def watched() -> Value:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: strays.append(context))
        async with asyncio.timeout(timeout_s):
            value = await coroutine
        await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks are left: {left}"
        return value

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        value = asyncio.run(watched())
        gc.collect()
    assert not strays, strays
    return value


def in_other_thread(coroutine: Coroutine[Any, Any, Value]) -> Value:
    """The result of a coroutine in an event loop of another thread."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(asyncio.run(coroutine))
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(PATIENCE_S)
    if isinstance(results[0], BaseException):
        raise results[0]
    value: Value = results[0]
    return value
