"""An event loop with virtual time for one simulated process. Nothing in it waits: the world moves its time, and a
process that is killed is one whose loop is not run again."""

from __future__ import annotations

import asyncio
import heapq
import threading
from collections.abc import Callable
from typing import Any

NEVER_S = float("inf")


class SimulatedLoop(asyncio.BaseEventLoop):
    """Runs what is ready, one handle after the other; work for threads is done in the loop."""

    def __init__(self, now_s: float) -> None:
        super().__init__()
        self._now_s = now_s

    def time(self) -> float:
        return self._now_s

    def next_event_s(self) -> float:
        """When there is something to run; the time of the loop if that is now."""
        if self._ready:  # type: ignore[attr-defined]
            return self._now_s
        scheduled = self._scheduled  # type: ignore[attr-defined]
        while scheduled and scheduled[0].cancelled():
            heapq.heappop(scheduled)._scheduled = False
        return scheduled[0].when() if scheduled else NEVER_S

    def advance(self, now_s: float, at_most: int = 1_000_000) -> int:
        """Moves the time and runs what is due, at most so many handles; how many."""
        self._now_s = now_s
        ready, scheduled, count = self._ready, self._scheduled, 0  # type: ignore[attr-defined]
        asyncio._set_running_loop(self)
        self._thread_id = threading.get_ident()
        try:
            while count < at_most:
                while scheduled and (scheduled[0].cancelled() or scheduled[0].when() <= now_s):
                    handle = heapq.heappop(scheduled)
                    handle._scheduled = False
                    ready.append(handle)
                if not ready:
                    break
                handle = ready.popleft()
                if not handle.cancelled():
                    handle._run()
                    count += 1
        finally:
            self._thread_id = None
            asyncio._set_running_loop(None)
        return count

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = self.create_future()

        def work() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)

        self.call_soon(work)
        return future

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)
