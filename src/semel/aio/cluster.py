"""The calls of a cluster in an event loop: connections by broker and lane, opened when they are needed.

A lane is a set of connections: work that waits for long has one of its own. Requests on one connection are answered in
their order, so a call waits for those that were sent before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

from semel.aio.connection import AsyncConnection
from semel.client.cluster_calls import ClusterCalls, ConnectionKey, Request, Response, checking
from semel.client.errors import ClosedError, ConnectionFailedError, IllegalStateError, KafkaError
from semel.client.settings import ClientSettings
from semel.client.timing import Deadline
from semel.protocol.api import Api
from semel.protocol.errors import ErrorCode

# --- A client of `semel.aio` belongs to one event loop: the first in which it is used ---


class _Forks:
    """How many forks led to this process: a look at it costs less than a call to the kernel for the process id."""

    count = 0


def _forked() -> None:
    _Forks.count += 1


os.register_at_fork(after_in_child=_forked)


class LoopGuard:
    """Refuses other event loops, which run in other threads or after the first one, and forked children."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._loop: asyncio.AbstractEventLoop | None = None
        self._forks = _Forks.count

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop of this client, in which the caller runs."""
        self.check()
        assert self._loop is not None
        return self._loop

    def call_soon(self, call: Callable[[], None]) -> None:
        """Calls it in the loop of this client, if that is still there. Any thread may do that, and a signal handler."""
        if self._loop is not None and not self.is_forked:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(call)

    @property
    def is_forked(self) -> bool:
        return _Forks.count != self._forks

    @property
    def is_over(self) -> bool:
        """Whether nothing can be sent any more: the loop is closed, or this is a forked child."""
        return self.is_forked or (self._loop is not None and self._loop.is_closed())

    def check(self) -> None:
        if self._forks != _Forks.count:
            raise IllegalStateError(
                f"this {self._what} was made before the process was forked; make one in each process"
            )
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            raise IllegalStateError(f"this {self._what} must be used in a coroutine, inside its event loop") from None
        if self._loop is None:
            self._loop = running
        elif running is not self._loop:
            state = "is closed" if self._loop.is_closed() else "runs elsewhere"
            raise IllegalStateError(
                f"this {self._what} belongs to another event loop, which {state}; make one {self._what} per loop, or "
                "use asyncio.run_coroutine_threadsafe() with the loop that it belongs to"
            )


@contextlib.asynccontextmanager
async def held(lock: asyncio.Lock, deadline: Deadline, too_late: KafkaError) -> AsyncIterator[None]:
    """With a lock that others may have for long: raises if it is not free by the deadline."""
    try:
        async with asyncio.timeout(deadline.remaining_s()):
            await lock.acquire()
    except TimeoutError:
        raise too_late from None
    try:
        yield
    finally:
        lock.release()


class AsyncCluster(ClusterCalls[AsyncConnection]):
    """Connections and metadata of one client. All of it is for the event loop of the guard."""

    def __init__(self, settings: ClientSettings, guard: LoopGuard) -> None:
        super().__init__(settings)
        self.guard = guard
        self.lock: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()  # one loop, one thread
        self._openings: dict[ConnectionKey, asyncio.Lock] = {}
        self._end = asyncio.Event()  # wakes those that pause before a retry

    def check_open(self) -> None:
        if self.closed:
            raise ClosedError("this client is closed; make a new one")
        self.guard.check()

    async def sleep(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._end.wait()

    async def request(
        self,
        connection: AsyncConnection,
        api: Api[Request, Response],
        request: Request,
        timeout_s: float,
        version: int | None = None,
    ) -> Response:
        with checking(connection, api):
            return await connection.call(api, request, max(timeout_s, 0.001), version)

    # --- connections ---
    async def connect_to(self, host: str, port: int, deadline: Deadline, lane: str) -> AsyncConnection:
        self.check_open()
        key = (lane, host, port)
        connection = self._usable(key)
        if connection is not None:
            return connection
        async with self._opening(key, deadline):
            connection = self._usable(key)  # another task may have opened it meanwhile
            if connection is not None:
                return connection
            with self.attempt_to_reach(host, port, deadline):
                connection = await AsyncConnection.open(host, port, self.settings, deadline.remaining_s())
            if self.closed:
                connection.close()
            self.check_open()
            self.connections[key] = connection
            return connection

    def _usable(self, key: ConnectionKey) -> AsyncConnection | None:
        connection = self.connections.get(key)
        if connection is None or connection.closed:
            return None
        if not connection.retiring or connection.in_flight:
            return connection
        connection.close()
        return None

    def _opening(self, key: ConnectionKey, deadline: Deadline) -> contextlib.AbstractAsyncContextManager[None]:
        """One task at a time opens a connection; those that want the same one wait for it, up to their deadline."""
        too_late = ConnectionFailedError(
            f"another task has been connecting to {key[1]}:{key[2]} for longer than {deadline.total_s:.3g} s",
            ErrorCode.NETWORK_EXCEPTION,
        )
        return held(self._openings.setdefault(key, asyncio.Lock()), deadline, too_late)

    def close_with(self, owner: object) -> weakref.finalize[Any, Any]:
        """Closes the connections once nobody holds the owner any more, who did not close it."""
        closing = weakref.finalize(owner, self.guard.call_soon, self.close)
        closing.atexit = False
        return closing

    def close(self) -> None:
        """Closes every connection. Calls that wait fail."""
        self.closed = True
        connections = list(self.connections.values())
        self.connections.clear()
        if self.guard.is_forked:
            return  # the connections are the parent's, and so is the selector of its loop
        for connection in connections:
            connection.close()
        if not self.guard.is_over:
            self._end.set()
