"""The database of a campaign: a server of its own, with a proxy in front of it that cuts connections at COMMIT."""

from __future__ import annotations

import psycopg

from semel.local.postgres import PostgresMissing, PostgresServer
from semel.prove.postgres_proxy import PostgresProxy
from semel.prove.stage import StageError


class StageDatabase:
    """`dsn` goes through the proxy, `direct` does not. Has a table with one column, `value`."""

    def __init__(self, table: str) -> None:
        try:
            self._server = PostgresServer().start()
        except PostgresMissing as missing:
            raise StageError(str(missing)) from missing
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
