"""Work that starts at once and becomes a task only if it has to wait.

With fsync=os, or when a group commit just passed, a write to the log of a coordinator does not wait at all. Then a
task, and a round of the event loop for it, would be most of what a small transaction costs. Until it first waits, the
work has no task: it must not use the current one, as asyncio.timeout() does.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")


class DoneAtOnce(NamedTuple, Generic[T]):
    """The result of work that did not have to wait."""

    value: T


def start_now(
    work: Coroutine[Any, Any, T], spawn: Callable[[Coroutine[Any, Any, T]], asyncio.Task[T]]
) -> DoneAtOnce[T] | asyncio.Task[T]:
    """Runs a coroutine up to where it first waits: its result if it never does, otherwise a task that goes on."""
    try:
        waits_for = work.send(None)
    except StopIteration as ended:
        return DoneAtOnce(ended.value)
    return spawn(_rest(work, waits_for))


async def _rest(work: Coroutine[Any, Any, T], waits_for: Any) -> T:
    return await _go_on(work, waits_for)


@types.coroutine
def _go_on(work: Coroutine[Any, Any, T], waits_for: Any) -> Generator[Any, Any, T]:
    """What is left of a coroutine that already waits for something."""
    while True:
        value, error = None, None
        try:
            value = yield waits_for
        except GeneratorExit:  # it is thrown away
            work.close()
            raise
        except BaseException as thrown:  # a cancellation, say: it belongs to the work
            error = thrown
        try:
            waits_for = work.send(value) if error is None else work.throw(error)
        except StopIteration as ended:
            result: T = ended.value
            return result
