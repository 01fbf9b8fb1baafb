"""What several viewers ask for at the same time is read from the cluster once, and again when it is old."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

MOST_KEYS = 500
LARGE_SHARE = 0.01  # of the time, at most, is spent on reading something large
MOST_LARGE_AGE_S = 30.0  # however slow one reading was: a busy moment must not hide a new topic for minutes


class Cached:
    """Results by key. Callers that ask while a result is being read wait for the same reading."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._found: dict[Any, tuple[float, asyncio.Task[Any]]] = {}
        self._took_s: dict[Any, float] = {}

    async def get(
        self,
        key: Any,
        max_age_s: float,
        read: Callable[[], Awaitable[Any]],
        *,
        old_is_better_than_late: bool = False,
        is_large: bool = False,
    ) -> Any:
        """`old_is_better_than_late`: a result that is too old is returned once more, while it is read again.
        `is_large`: it may become older than `max_age_s` (unless that is 0), so that it keeps no cluster busy."""
        known = self._found.get(key)
        if is_large and max_age_s:
            max_age_s = max(max_age_s, min(self._took_s.get(key, 0.0) / LARGE_SHARE, MOST_LARGE_AGE_S))
        if known is None or self._is_stale(known, max_age_s):
            old = None if known is None or _failed(known[1]) else known[1]
            if len(self._found) >= MOST_KEYS:
                del self._found[next(iter(self._found))]
            task = asyncio.ensure_future(self._timed(key, read))
            self._found.pop(key, None)
            known = self._found[key] = (self._clock(), task)
            task.add_done_callback(_failed)  # callers may have left; the next one reads again
            if old_is_better_than_late and old is not None:
                return old.result()
        return await asyncio.shield(known[1])

    async def _timed(self, key: Any, read: Callable[[], Awaitable[Any]]) -> Any:
        started_s = self._clock()
        found = await read()
        if len(self._took_s) >= MOST_KEYS:
            self._took_s.clear()
        self._took_s[key] = self._clock() - started_s
        return found

    def _is_stale(self, known: tuple[float, asyncio.Task[Any]], max_age_s: float) -> bool:
        since_s, task = known
        if not task.done():
            return False
        return _failed(task) or self._clock() - since_s > max_age_s

    def forget(self) -> None:
        """After a change: what was read before counts no more."""
        self._found = {key: known for key, known in self._found.items() if not known[1].done()}


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
