"""The database of a campaign: a server of its own, with a proxy in front of it that cuts connections at COMMIT."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Literal

import psycopg

from semel.local.postgres import PostgresMissing, PostgresServer
from semel.prove.testbed import TestbedError

# --- A proxy in front of PostgreSQL that cuts connections at COMMIT, where the client cannot know the outcome ---
#
# before    COMMIT does not reach the server: the transaction is rolled back
# after     the server has committed, and its response does not reach the client
# held      COMMIT waits here; `release` sends it on when the client is gone


COMMIT = b"COMMIT\0"
CHUNK = 1 << 16
Cut = Literal["before", "after", "held"]


class PostgresProxy:
    """Listens on a free port of 127.0.0.1. Use it as a context manager."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._armed: tuple[Cut, int] | None = None
        self._released = threading.Event()
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._closed = False
        self.cuts = 0  # how many were carried out
        self.cut = threading.Event()
        threading.Thread(target=self._accept, name="postgres proxy", daemon=True).start()

    def arm(self, kind: Cut, *, skip: int = 0) -> None:
        """The next COMMIT but `skip`, on whichever connection, is cut."""
        with self._lock:
            self._armed = (kind, skip)
        self._released.clear()
        self.cut.clear()

    def disarm(self) -> None:
        with self._lock:
            self._armed = None

    def release(self) -> None:
        """Lets a held COMMIT through, although its client is gone."""
        self._released.set()

    def cut_all(self) -> None:
        """Ends every connection at once."""
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            _shut(*pair)

    def close(self) -> None:
        self._closed = True
        self._released.set()
        _shut(self._listener)
        self._listener.close()
        self.cut_all()

    def __enter__(self) -> PostgresProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------------------------------------
    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target, 10)
                server.settimeout(None)
            except OSError:  # the server is down: so is the proxy
                client.close()
                continue
            with self._lock:
                self._pairs.add((client, server))
            threading.Thread(target=self._to_server, args=(client, server), daemon=True).start()
            threading.Thread(target=self._to_client, args=(client, server), daemon=True).start()

    def _to_server(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(CHUNK):
                kind = self._take() if data.endswith(COMMIT) else None
                if kind is None:
                    server.sendall(data)
                    continue
                self._carry_out(kind, data, client, server)
                return
        _shut(client, server)

    def _carry_out(self, kind: Cut, data: bytes, client: socket.socket, server: socket.socket) -> None:
        if kind == "after":
            with self._lock:
                self._pairs.discard((client, server))  # its response goes nowhere
            server.sendall(data)
        _shut(client)
        if kind == "held":
            self.cuts += 1
            self.cut.set()
            self._released.wait()
            with contextlib.suppress(OSError):
                server.sendall(data)
            return
        if kind == "before":
            _shut(server)
        self.cuts += 1
        self.cut.set()

    def _to_client(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(CHUNK):
                with self._lock:
                    is_known = (client, server) in self._pairs
                if is_known:
                    client.sendall(data)
                else:
                    break  # the response to a COMMIT: it has happened
        with self._lock:
            self._pairs.discard((client, server))
        _shut(client, server)
        client.close()
        server.close()

    def _take(self) -> Cut | None:
        with self._lock:
            if self._armed is None:
                return None
            kind, skip = self._armed
            self._armed = (kind, skip - 1) if skip else None
            return None if skip else kind


def _shut(*sockets: socket.socket) -> None:
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


class TestbedDatabase:
    """`dsn` goes through the proxy, `direct` does not. Has a table with one column, `value`."""

    def __init__(self, table: str) -> None:
        try:
            self._server = PostgresServer().start()
        except PostgresMissing as missing:
            raise TestbedError(str(missing)) from missing
        self.proxy = PostgresProxy(self._server.host, self._server.port)
        self.direct = self._server.create_database("prove")
        self.dsn = self._server.dsn("prove", port=self.proxy.port)
        with psycopg.connect(self.direct) as connection:
            connection.execute(f"CREATE TABLE {table} (value text)")

    def restart(self, *, with_kill: bool) -> None:
        """kill -9 of the server, or an immediate shutdown; and a start."""
        self._server.kill() if with_kill else self._server.stop("immediate")
        self._server.start()

    def kill_a_backend(self) -> None:
        """kill -9 of one that serves the pipeline; the server ends all others, and recovers."""
        with psycopg.connect(self.direct) as connection:
            row = connection.execute(
                "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'semel %' ORDER BY state LIMIT 1"
            ).fetchone()
        if row is not None:
            before = self._server.line_count
            self._server.kill_backend(row[0])
            self._server.await_recovery(before)

    def close(self) -> None:
        self.proxy.close()
        self._server.close()
