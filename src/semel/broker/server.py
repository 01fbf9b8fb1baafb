"""The listening socket and its connections: limits, idle time, slow readers, a graceful end."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter

from semel.broker.broker import BrokerNode
from semel.broker.connection import Connection
from semel.broker.dispatch import Dispatcher
from semel.broker.receive_buffer import SharedBuffer

log = logging.getLogger(__name__)

UNSENT_BUDGET_BYTES = 256 << 20  # what clients that do not read may hold in memory, all together
STOP_GRACE_S = 5.0


class Server:
    """All connections of the broker."""

    def __init__(self, broker: BrokerNode) -> None:
        settings = broker.settings
        self.broker = broker
        self.loop = asyncio.get_running_loop()
        self.dispatcher = Dispatcher(broker.settings.__getitem__)
        self.max_request_bytes: int = settings["socket.request.max.bytes"]
        self.read_buffer = SharedBuffer()
        self.is_stopping = False
        self.bytes_in = self.bytes_out = 0
        self.connections: set[Connection] = set()
        self._per_host: Counter[str] = Counter()
        self._stuck: dict[Connection, int] = {}
        self._listener: asyncio.Server | None = None
        self._sockets = (settings["socket.send.buffer.bytes"], settings["socket.receive.buffer.bytes"])

    async def listen(self, sock: socket.socket) -> None:
        """Accepts connections from now on."""
        self._listener = await self.loop.create_server(lambda: Connection(self), sock=sock)

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Takes no more requests, answers those under way, closes."""
        self.is_stopping = True
        if self._listener is not None:
            self._listener.close()
        self.broker.fetches.answer_all()
        for connection in tuple(self.connections):
            connection.finish()
        deadline_s = self.loop.time() + grace_s
        while self.connections and self.loop.time() < deadline_s:
            await asyncio.sleep(0.005)
        for connection in tuple(self.connections):
            connection.close("the broker stops")

    # -- connections ---------------------------------------------------------------------------------------------------
    def tune(self, sock: socket.socket) -> None:
        send_bytes, receive_bytes = self._sockets
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if send_bytes > 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
        if receive_bytes > 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)

    def admit(self, connection: Connection) -> bool:
        """Counts a new connection in. False: there are too many."""
        settings = self.broker.settings
        self.connections.add(connection)
        self._per_host[connection.client_host] += 1
        if self.is_stopping or len(self.connections) > settings["max.connections"]:
            return False
        limit: int = settings["max.connections.per.ip"]
        return self._per_host[connection.client_host] <= limit

    def forget(self, connection: Connection) -> None:
        if connection in self.connections:
            self.connections.discard(connection)
            self._per_host[connection.client_host] -= 1
            if not self._per_host[connection.client_host]:
                del self._per_host[connection.client_host]
        self._stuck.pop(connection, None)

    def on_stuck(self, connection: Connection) -> None:
        """A client does not read as fast as it asks. Together they may hold so much memory; the longest stuck goes."""
        self._stuck[connection] = connection.unsent_bytes
        while sum(self._stuck.values()) > UNSENT_BUDGET_BYTES:
            longest = next(iter(self._stuck))
            del self._stuck[longest]
            longest.close("it does not read its answers", level=logging.WARNING)

    def on_unstuck(self, connection: Connection) -> None:
        self._stuck.pop(connection, None)

    def close_idle(self) -> int:
        """Ends connections without traffic for connections.max.idle.ms. Returns how many."""
        limit_ms: int = self.broker.settings["connections.max.idle.ms"]
        if limit_ms < 0:
            return 0
        oldest_s = self.loop.time() - limit_ms / 1000
        idle = [c for c in self.connections if c.last_active_s < oldest_s and (c.is_idle or c.stuck_since_s)]
        for connection in idle:
            connection.close("idle")
        return len(idle)
