"""Work of a handler in pieces: other connections are served in between.

What a request asks for may be a hundred thousand things. A handler that goes through them in turns is a coroutine that
waits only if it takes long; until then it costs no task (see `eager`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

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
