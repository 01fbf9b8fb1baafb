"""What the drivers of a consumer need, in an event loop: tasks instead of threads, a future instead of poll(2)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from semel.aio.cluster import AsyncCluster
from semel.aio.connection import AsyncConnection
from semel.aio.loop_guard import LoopGuard
from semel.aio.sender import forgettable
from semel.client.aside import Aside
from semel.client.network import Background, Network, Reading
from semel.client.settings import ClientSettings
from semel.client.wire import Pending
from semel.protocol.api import Api


class AsyncNetwork(Network[AsyncConnection]):
    """Connections read and write by themselves, and watch the deadlines of their requests."""

    def __init__(self, settings: ClientSettings) -> None:
        self.guard = LoopGuard("AsyncConsumer")
        self.calls: AsyncCluster = AsyncCluster(settings, self.guard)
        self._wakeups = Wakeups()
        self.aside = Aside(self.spawn, self._wakeups.wake)
        self._tasks: set[asyncio.Task[None]] = set()

    def send(
        self,
        connection: AsyncConnection,
        api: Api[Any, Any],
        request: Any,
        *,
        version: int | None = None,
        timeout_s: float | None = None,
        may_be_large: bool = False,
    ) -> Pending:
        return connection.send(api, request, self._wakeups.done, version=version, timeout_s=timeout_s)

    def receive(self, connections: Iterable[AsyncConnection]) -> None: ...

    def next_deadline_s(self, connections: Iterable[AsyncConnection]) -> float:
        return float("inf")

    def notice_closing(self, connection: AsyncConnection) -> None: ...

    # --- waiting ---
    async def wait(
        self,
        connections: Iterable[AsyncConnection],
        until_s: float,
        reading: Reading[AsyncConnection] | None = None,
    ) -> None:
        await self._wakeups.wait(self.guard.loop, until_s, is_poll=reading is not None)

    async def give_way(self) -> None:
        """A program that finds records at every poll must not keep the loop from fetching more, and from heartbeats."""
        await asyncio.sleep(0)

    def wake(self) -> None:
        self.guard.call_soon(self._wakeups.wake)

    # --- work aside ---
    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = self.guard.loop.create_task(work(), name="semel-aside")
        forgettable(task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def background(self, name: str, work: Callable[[Background], Coroutine[Any, Any, None]]) -> Background:
        return BackgroundTask(self.guard.loop, name, work)

    # --- end ---
    def check_owner(self) -> None:
        self.guard.check()

    @property
    def is_over(self) -> bool:
        return self.guard.is_over

    def close(self) -> None:
        if not self.guard.is_over:
            for task in self._tasks:
                task.cancel()
        self.calls.close()


class Wakeups:
    """Who waits for the network. It holds no reference to the consumer, so that connections do not keep it alive."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()
        self._is_woken = False  # since the last wait of a poll

    def wake(self) -> None:
        self._is_woken = True
        for waiter in self._waiters:
            _fill(waiter)

    def done(self, _: Pending) -> None:
        self.wake()

    async def wait(self, loop: asyncio.AbstractEventLoop, until_s: float, is_poll: bool) -> None:
        """A turn of a poll may stand still in the program's listener: what came meanwhile ends its wait at once. Other
        turns do not."""
        if is_poll and self._is_woken:
            self._is_woken = False
            return
        woken: asyncio.Future[None] = loop.create_future()
        alarm = None
        if until_s != float("inf"):
            alarm = loop.call_later(max(0.0, until_s - time.monotonic()), _fill, woken)
        self._waiters.add(woken)
        try:
            await woken
        finally:
            self._waiters.discard(woken)
            if alarm is not None:
                alarm.cancel()
            if is_poll:
                self._is_woken = False


class BackgroundTask:
    """Work in a task of its own."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, name: str, work: Callable[[Background], Coroutine[Any, Any, None]]
    ) -> None:
        self._stopped = asyncio.Event()
        self._task = loop.create_task(work(self), name=name)
        forgettable(self._task)

    @property
    def is_stopped(self) -> bool:
        return self._stopped.is_set()

    async def pause(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._stopped.wait()
        except TimeoutError:
            return False
        return True

    async def stop(self, timeout_s: float) -> None:
        self._stopped.set()
        self._task.cancel()
        await asyncio.wait([self._task], timeout=timeout_s)


def _fill(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
