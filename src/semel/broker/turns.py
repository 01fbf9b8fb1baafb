"""Work of a handler in pieces: other connections are served in between.

A request may name a hundred thousand things. A handler that goes through them in turns is a coroutine that
waits only if it takes long; until then it costs no task (see `eager`).
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator, Iterable
from functools import partial
from time import perf_counter
from typing import Any, Generic, NamedTuple, TypeVar

TURN_S = 0.01  # how long one handler has the event loop
MANY = 500  # entries: fewer are done in one turn

T = TypeVar("T")
R = TypeVar("R")
S = TypeVar("S")


class Turns:
    """The turns of one request."""

    __slots__ = ("_until_s",)

    def __init__(self) -> None:
        self._until_s = perf_counter() + TURN_S

    async def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """What the function returns for each. What the broker knows may change from one item to the next."""
        results: list[R] = []
        for item in items:
            results.append(function(item))
            if perf_counter() > self._until_s:
                await self.next()
        return results

    async def map_topics(
        self,
        make: Callable[[str, list[R]], S],
        each: Callable[[str, T], R],
        topics: Iterable[tuple[str, Iterable[T]]],
    ) -> list[S]:
        """Of each topic (name, partitions): what `make` makes of its name and of what `each` returns for partitions."""
        return [make(name, await self.map(partial(each, name), partitions)) for name, partitions in topics]

    async def run(self, steps: Generator[None, Any, R]) -> R:
        """What a generator returns. It yields where others may run."""
        while True:
            try:
                next(steps)
            except StopIteration as ended:
                result: R = ended.value
                return result
            if perf_counter() > self._until_s:
                await self.next()

    async def next(self) -> None:
        """Lets others run, if this one had its turn."""
        if perf_counter() > self._until_s:
            await asyncio.sleep(0)
            self._until_s = perf_counter() + TURN_S


def at_once(steps: Generator[None, Any, R]) -> R:
    """What a generator returns, for callers that do not wait."""
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            result: R = ended.value
            return result


# --- Work that starts at once and becomes a task only if it has to wait ---
#
# With fsync=os, or when a group commit just passed, a write to the log of a coordinator does not wait at all. Then a
# task, and a round of the event loop for it, would be most of what a small transaction costs. Until it first waits,
# the work has no task: it must not use the current one, as asyncio.timeout() does.


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
