"""The calls of a cluster in an event loop: connections by broker and lane, opened when they are needed.

A lane is a set of connections: work that waits for long has one of its own. Requests on one connection are answered in
their order, so a call waits for those that were sent before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import weakref
from collections.abc import AsyncIterator
from typing import Any

from semel.aio.connection import AsyncConnection
from semel.aio.loop_guard import LoopGuard
from semel.client.cluster import Outages
from semel.client.cluster_calls import ClusterCalls, ReconnectBackoff, Request, Response
from semel.client.errors import ClosedError, ConnectionFailedError, KafkaError
from semel.client.settings import ClientSettings
from semel.client.timing import Deadline
from semel.protocol.api import Api
from semel.protocol.errors import DecodeError, ErrorCode

Key = tuple[str, str, int]  # lane, host, port


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
        self.outages: Outages = Outages()
        self._connections: dict[Key, AsyncConnection] = {}
        self._openings: dict[Key, asyncio.Lock] = {}
        self._reconnects = ReconnectBackoff(settings)
        self._end = asyncio.Event()  # wakes those that pause before a retry

    def now_s(self) -> float:
        return time.monotonic()

    def shuffle(self, addresses: list[tuple[str, int]]) -> None:
        random.shuffle(addresses)

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
        try:
            return await connection.call(api, request, max(timeout_s, 0.001), version)
        except DecodeError as error:
            connection.close()
            raise ConnectionFailedError(
                f"{connection.address} sent a malformed response to {api.name}: {error}", maybe_sent=True
            ) from error

    # --- connections ---
    def open_connection(self, lane: str) -> AsyncConnection | None:
        for (its_lane, _, _), connection in self._connections.items():
            if its_lane == lane and not connection.closed and not connection.retiring:
                return connection
        return None

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
            connection = await self._open(host, port, deadline)
            if self.closed:
                connection.close()
            self.check_open()
            self._connections[key] = connection
            return connection

    def _usable(self, key: Key) -> AsyncConnection | None:
        connection = self._connections.get(key)
        if connection is None or connection.closed:
            return None
        if not connection.retiring or connection.in_flight:
            return connection
        connection.close()
        return None

    async def _open(self, host: str, port: int, deadline: Deadline) -> AsyncConnection:
        """Logs a broker that cannot be reached before the timeout passes, wherever the call is retried."""
        address = f"{host}:{port}"
        try:
            self._reconnects.check(host, port, time.monotonic())
            connection = await AsyncConnection.open(host, port, self.settings, deadline.remaining_s())
        except ConnectionFailedError as error:
            if not error.retry_after_s and not deadline.expired:  # else the caller's short timeout may be the cause
                self._reconnects.failed(host, port, error, time.monotonic())
            self.outages.failed(address, error)
            raise
        self._reconnects.opened(host, port)
        self.outages.over(address)
        self.was_reached = True
        return connection

    def _opening(self, key: Key, deadline: Deadline) -> contextlib.AbstractAsyncContextManager[None]:
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
        connections = list(self._connections.values())
        self._connections.clear()
        if self.guard.is_forked:
            return  # the connections are the parent's, and so is the selector of its loop
        for connection in connections:
            connection.close()
        if not self.guard.is_over:
            self._end.set()
