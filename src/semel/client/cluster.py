"""A cluster as its clients see it: leaders, coordinators, connections, and one call that finds the right broker.

    cluster = Cluster(ClientSettings.of({"bootstrap.servers": "localhost:9092"}))
    response = cluster.call(Leader("orders", 0), LIST_OFFSETS, request, timeout_s=10)

`call` finds the broker, connects, retries what is transient with back-off, and never takes longer than its timeout: see
`cluster_calls.py`, which this is the blocking driver of. Threads may share a cluster. Calls on one connection take
turns, so work that waits for long (a group join, say) uses a lane, a set of connections, of its own. A forked child
starts with no connections.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from semel.client.cluster_calls import (
    ClusterCalls,
    ConnectionKey,
    Outages,
    Request,
    Response,
    Result,
    Target,
    checking,
)
from semel.client.connection import BrokerConnection
from semel.client.errors import ClosedError, ConnectionFailedError
from semel.client.immediate import Closing, blocking, run
from semel.client.metadata import Metadata
from semel.client.settings import ClientSettings
from semel.client.timing import Backoff, Deadline
from semel.client.waiting import Flag
from semel.protocol.api import Api
from semel.protocol.errors import ErrorCode


class Cluster(Closing):
    """Connections and metadata of one client."""

    def __init__(self, settings: ClientSettings) -> None:
        self.calls = BlockingCalls(settings)

    call = blocking(ClusterCalls.call)
    connect = blocking(ClusterCalls[BrokerConnection].connect)
    locate = blocking(ClusterCalls.locate)
    topic = blocking(ClusterCalls.topic)
    partition = blocking(ClusterCalls.partition)
    partitions = blocking(ClusterCalls.partitions)
    refresh = blocking(ClusterCalls.refresh)
    feature = blocking(ClusterCalls.feature)
    pause = blocking(ClusterCalls.pause)

    def retry(
        self,
        attempt: Callable[[], Result],
        what: str,
        deadline: Deadline,
        target: Target | None = None,
        resend: bool = True,
        first_wait_ms: float | None = None,
    ) -> Result:
        """Runs an attempt until it succeeds, fails for good or the deadline passes. Forgets the target in between."""

        async def attempted() -> Result:
            return attempt()

        return run(self.calls.retry(attempted, what, deadline, target, resend, first_wait_ms))

    def forget(self, target: Target) -> None:
        """What was known about the target is in doubt; it is looked up again."""
        self.calls.forget(target)

    def deadline(self, timeout_s: float | None = None) -> Deadline:
        return self.calls.deadline(timeout_s)

    def backoff(self, first_wait_ms: float | None = None) -> Backoff:
        return self.calls.backoff(first_wait_ms)

    def connections(self, lane: str) -> list[BrokerConnection]:
        """The open connections of a lane, for `semel.client.connection.poll`."""
        return self.calls.open_connections(lane)

    def close(self) -> None:
        """Closes every connection. Calls that wait in other threads fail."""
        self.calls.close()

    # --- what is known ---
    @property
    def settings(self) -> ClientSettings:
        return self.calls.settings

    @settings.setter
    def settings(self, settings: ClientSettings) -> None:
        self.calls.settings = settings

    @property
    def metadata(self) -> Metadata:
        return self.calls.metadata

    @property
    def closed(self) -> bool:
        return self.calls.closed

    @property
    def outages(self) -> Outages:
        return self.calls.outages

    @property
    def was_reached(self) -> bool:
        return self.calls.was_reached


class BlockingCalls(ClusterCalls[BrokerConnection]):
    """Connects, sends and waits in the caller's thread: when one of its coroutines returns, it has happened."""

    def __init__(self, settings: ClientSettings) -> None:
        super().__init__(settings)
        self._end = Flag()  # wakes those that pause before a retry
        self.lock: threading.RLock = threading.RLock()  # guards the connections and the metadata
        self._openings: dict[ConnectionKey, threading.RLock] = {}
        self._owner_pid = os.getpid()

    async def sleep(self, seconds: float) -> None:
        self._end.wait(seconds)

    async def request(
        self,
        connection: BrokerConnection,
        api: Api[Request, Response],
        request: Request,
        timeout_s: float,
        version: int | None = None,
    ) -> Response:
        with checking(connection, api):
            return connection.call(api, request, max(timeout_s, 0.001), version)

    async def connect_to(self, host: str, port: int, deadline: Deadline, lane: str) -> BrokerConnection:
        self.check_open()
        key = (lane, host, port)
        with self._opening(key, deadline):
            with self.lock:
                connection = self.connections.get(key)
            if connection is not None and not connection.in_flight:
                connection.notice_closing()
            if connection is not None and not connection.closed:
                if not connection.retiring or connection.in_flight:
                    return connection
                connection.close()
            with self.attempt_to_reach(host, port, deadline):
                connection = BrokerConnection.open(host, port, self.settings, deadline.remaining_s())
            with self.lock:
                if self.closed:
                    connection.close()
                    self.check_open()
                self.connections[key] = connection
            return connection

    def open_connections(self, lane: str) -> list[BrokerConnection]:
        with self.lock:
            return [c for (its_lane, _, _), c in self.connections.items() if its_lane == lane and not c.closed]

    @contextmanager
    def _opening(self, key: ConnectionKey, deadline: Deadline) -> Iterator[None]:
        """One thread at a time opens a connection; those that want the same one wait for it, up to their deadline."""
        with self.lock:
            lock: Any = self._openings.setdefault(key, threading.RLock())
        try:
            if not lock.acquire(timeout=min(deadline.remaining_s(), threading.TIMEOUT_MAX)):
                raise ConnectionFailedError(
                    f"another thread has been connecting to {key[1]}:{key[2]} for longer than {deadline.total_s:.3g} s",
                    ErrorCode.NETWORK_EXCEPTION,
                )
            yield
        finally:  # Ctrl-C may come before this thread knows that it has the lock, and while it gives it back
            try:
                _give_back(lock)
            finally:
                _give_back(lock)

    def close(self) -> None:
        if os.getpid() != self._owner_pid:
            self.closed = True  # the connections are the parent's, and a thread of it may have had the lock at the fork
            return
        with self.lock:
            self.closed = True
            connections = list(self.connections.values())
            self.connections.clear()
        self._end.set()
        for connection in connections:
            connection.close()

    def check_open(self) -> None:
        if self.closed:
            raise ClosedError("this client is closed; make a new one")
        if os.getpid() != self._owner_pid:
            self.lock = threading.RLock()  # another thread of the parent may have held it at the fork
            self._openings = {}
            self.connections = {}  # the parent's sockets; using them would mix both processes' requests
            self.outages = Outages()
            self._owner_pid = os.getpid()


def _give_back(lock: Any) -> None:
    if lock._is_owned():
        lock.release()
