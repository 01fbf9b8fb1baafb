"""What the drivers of a consumer need from the one who runs them: requests, work aside, waits.

Fetching, commits and the group member work in turns that never wait. What a turn cannot do at once is a coroutine over
`ClusterCalls`, which is run aside; between two turns the consumer waits. `BlockingNetwork` does that with threads and
poll(2), `semel.aio` with tasks of an event loop. The drivers are the same.
"""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Generic, Protocol

from semel.client.cluster import BlockingCalls
from semel.client.cluster_calls import ClusterCalls, Connection
from semel.client.connection import BrokerConnection
from semel.client.errors import IllegalStateError
from semel.client.immediate import run
from semel.client.settings import ClientSettings
from semel.client.waiting import Aside, Flag, Waker, in_thread
from semel.client.wire import Pending
from semel.protocol.api import Api


class Reading(Protocol[Connection]):
    """Who waits for large responses, of which a part may come at a time."""

    def connections(self) -> list[Connection]: ...
    def has_response(self) -> bool: ...


class Background(Protocol):
    """Work that goes on until it is stopped."""

    @property
    def is_stopped(self) -> bool: ...

    async def pause(self, seconds: float) -> bool:
        """Waits so long; at once True if it is stopped."""

    async def stop(self, timeout_s: float) -> None:
        """Ends it, and waits for its end up to the timeout."""


class Network(Generic[Connection]):
    """The connections of one consumer. `aside` runs what a turn cannot do at once."""

    calls: ClusterCalls[Connection]
    aside: Aside

    def send(
        self,
        connection: Connection,
        api: Api[Any, Any],
        request: Any,
        *,
        version: int | None = None,
        timeout_s: float | None = None,
        may_be_large: bool = False,
    ) -> Pending:
        """Sends a request behind those in flight and returns at once. Raises only for what can never be sent; once it
        is done, the next wait ends. `may_be_large`: of the response."""
        raise NotImplementedError

    def receive(self, connections: Iterable[Connection]) -> None:
        """Takes the responses that have come, and fails the requests that have waited too long."""
        raise NotImplementedError

    def next_deadline_s(self, connections: Iterable[Connection]) -> float:
        """On time.monotonic(): when `receive` has something to do without an event."""
        raise NotImplementedError

    def notice_closing(self, connection: Connection) -> None:
        """Finds out, without waiting, whether the broker has closed a connection that was idle for a while."""
        raise NotImplementedError

    async def wait(
        self, connections: Iterable[Connection], until_s: float, reading: Reading[Connection] | None = None
    ) -> None:
        """Until a request on one of the connections is done, `wake` is called, or `until_s` on time.monotonic()."""
        raise NotImplementedError

    async def give_way(self) -> None:
        """Before a turn: lets others run that share the thread with the consumer."""
        raise NotImplementedError

    def wake(self) -> None:
        """Ends a wait, or else the next one; any thread may call it."""
        raise NotImplementedError

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs it aside, without an outcome."""
        raise NotImplementedError

    def background(self, name: str, work: Callable[[Background], Coroutine[Any, Any, None]]) -> Background:
        """Starts work that goes on while the consumer is not called."""
        raise NotImplementedError

    def check_owner(self) -> None:
        """Raises where the connections are not the caller's: in a forked child, say."""
        raise NotImplementedError

    @property
    def is_over(self) -> bool:
        """Whether nothing can be sent any more from here."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class BlockingNetwork(Network[BrokerConnection]):
    """Threads, sockets and poll(2)."""

    def __init__(self, settings: ClientSettings) -> None:
        self.calls: BlockingCalls = BlockingCalls(settings)
        self._waker = Waker()
        self.aside = Aside(_spawn, self._waker.wake)
        self._close_waker = weakref.finalize(self, self._waker.close)
        self._owner_pid = os.getpid()

    def send(
        self,
        connection: BrokerConnection,
        api: Api[Any, Any],
        request: Any,
        *,
        version: int | None = None,
        timeout_s: float | None = None,
        may_be_large: bool = False,
    ) -> Pending:
        pending = connection.send(api, request, version=version, timeout_s=timeout_s)
        if may_be_large:
            connection.read_ahead()
        return pending

    def receive(self, connections: Iterable[BrokerConnection]) -> None:
        for connection in connections:
            connection.progress()
            connection.check_deadlines()

    def next_deadline_s(self, connections: Iterable[BrokerConnection]) -> float:
        return min((connection.next_deadline_s() for connection in connections), default=float("inf"))

    def notice_closing(self, connection: BrokerConnection) -> None:
        connection.notice_closing()

    async def wait(
        self,
        connections: Iterable[BrokerConnection],
        until_s: float,
        reading: Reading[BrokerConnection] | None = None,
    ) -> None:
        watched, wakeup = list(connections), self._waker.fd
        ready = wait_ready(watched, until_s, wakeup)
        while reading is not None and _read_on(reading, ready):
            ready = wait_ready(watched, until_s, wakeup)
        if wakeup in ready:
            self._waker.drain()

    async def give_way(self) -> None: ...

    def wake(self) -> None:
        self._waker.wake()

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        _spawn(work)

    def background(self, name: str, work: Callable[[Background], Coroutine[Any, Any, None]]) -> Background:
        return BackgroundThread(name, work)

    def check_owner(self) -> None:
        if self.is_over:
            raise IllegalStateError(
                "this consumer was made before a fork; its connections and its place in the group belong to the parent "
                "process: make a consumer in each process"
            )

    @property
    def is_over(self) -> bool:
        return os.getpid() != self._owner_pid

    def close(self) -> None:
        self.calls.close()
        self._close_waker()


class BackgroundThread:
    """Work in a thread of its own."""

    def __init__(self, name: str, work: Callable[[Background], Coroutine[Any, Any, None]]) -> None:
        self._stopped = Flag()
        self._thread = threading.Thread(target=lambda: run(work(self)), name=name, daemon=True)
        self._thread.start()

    @property
    def is_stopped(self) -> bool:
        return self._stopped.is_set()

    async def pause(self, seconds: float) -> bool:
        return self._stopped.wait(seconds)

    async def stop(self, timeout_s: float) -> None:
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)


def _spawn(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    in_thread(lambda: run(work()))


def _read_on(reading: Reading[BrokerConnection], ready: set[int]) -> bool:
    """Reads what has come; whether that was only a part of a response, so that all there is to do is wait on."""
    theirs = {fd: connection for connection in reading.connections() for fd in connection.waits_for()}
    if not ready or not ready <= theirs.keys():
        return False
    for fd in ready:
        theirs[fd].progress()
    return not reading.has_response()


def wait_ready(connections: Iterable[BrokerConnection], until_s: float, wakeup: int) -> set[int]:
    """Waits until a connection can go on or `wakeup` is readable; the file descriptors that are ready."""
    poller = select.poll()
    for connection in connections:
        for fd, events in connection.waits_for().items():
            poller.register(fd, events)
    poller.register(wakeup, select.POLLIN)
    return {fd for fd, _ in poller.poll(max(0.0, min(until_s - time.monotonic(), 3600.0)) * 1000)}
