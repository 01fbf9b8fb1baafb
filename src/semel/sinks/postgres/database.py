"""Where a database is: a DSN whose password no repr, log, plan or error shows, and connections to it."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

from semel.client.errors import ConfigError
from semel.sinks.postgres.errors import sorted_errors

if TYPE_CHECKING:
    from psycopg import Connection

HIDDEN = "***"
SECRETS = ("password", "sslpassword")
LONGEST_SCHEMA = 63  # PostgreSQL cuts longer names off

# A peer that vanished is noticed within about half a minute, also by the server: it must not hold locks for hours.
KEEPALIVE = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 30_000}
SERVER_KEEPALIVE = {"tcp_keepalives_idle": 10, "tcp_keepalives_interval": 5, "tcp_keepalives_count": 3}
LEAST_IDLE_MS = 5_000  # inside a transaction


class PsycopgMissingError(ConfigError):
    """psycopg is not installed."""


def psycopg_module() -> Any:
    """psycopg 3, loaded when it is needed first."""
    try:
        import psycopg
    except ImportError as missing:
        raise PsycopgMissingError(
            f"PostgreSQL needs psycopg 3 ({missing}); install it with: pip install 'semel[postgres]'"
        ) from missing
    return psycopg


class Database:
    """How to reach a database: a value that can be pickled and shown.

    dsn                 postgresql://user:password@host:port/database, or libpq's key=value form
    schema              the schema of semel's own tables
    connect_timeout_ms  for one attempt to connect
    lock_timeout_ms     how long a statement may wait for a lock that another session holds. The server ends a session
                        of semel's that does nothing inside a transaction for two thirds of that (5 s at least): a
                        process that is frozen there would keep the next owner out
    """

    def __init__(
        self, dsn: str, *, schema: str = "semel", connect_timeout_ms: int = 10_000, lock_timeout_ms: int = 30_000
    ) -> None:
        if not schema or len(schema.encode()) > LONGEST_SCHEMA or "\0" in schema or "%" in schema:
            raise ConfigError(f"schema {schema!r} cannot be used: expected 1 to {LONGEST_SCHEMA} bytes without a %")
        if connect_timeout_ms < 1 or lock_timeout_ms < 1:
            raise ConfigError("connect_timeout_ms and lock_timeout_ms must be at least 1")
        self._parameters = _parse(dsn)
        self.schema = schema
        self.connect_timeout_ms = connect_timeout_ms
        self.lock_timeout_ms = lock_timeout_ms

    @property
    def where(self) -> str:
        """The address for messages: no password."""
        part = self._parameters.get
        host = part("host") or part("hostaddr") or "local socket"
        port = f":{part('port')}" if part("port") else ""
        user = f"{part('user')}@" if part("user") else ""
        return f"postgresql://{user}{host}{port}/{part('dbname') or ''}"

    def __repr__(self) -> str:
        return f"Database({self.where!r}, schema={self.schema!r})"

    def hide(self, text: str) -> str:
        """A text without the secrets of the DSN."""
        for name in SECRETS:
            secret = self._parameters.get(name)
            if secret:
                text = text.replace(str(secret), HIDDEN)
        return text

    def connect(self, purpose: str, *, autocommit: bool = False) -> Connection[Any]:
        """A new connection. `purpose` is seen in pg_stat_activity, beside host and process."""
        psycopg = psycopg_module()
        options = {
            "connect_timeout": max(2, round(self.connect_timeout_ms / 1000)),  # libpq takes whole seconds, at least 2
            "application_name": f"semel {purpose} {socket.gethostname()}/{os.getpid()}"[:LONGEST_SCHEMA],
            **KEEPALIVE,
            **self._parameters,
        }
        with sorted_errors(f"connecting to {self.where}", self.hide):
            connection: Connection[Any] = psycopg.connect(**options, autocommit=True)
            try:
                self._prepare(connection)
                connection.autocommit = autocommit
            except BaseException:
                connection.close()
                raise
        return connection

    def _prepare(self, connection: Connection[Any]) -> None:
        idle_ms = max(LEAST_IDLE_MS, self.lock_timeout_ms * 2 // 3)
        settings = {
            "lock_timeout": f"{self.lock_timeout_ms}ms",
            "idle_in_transaction_session_timeout": f"{idle_ms}ms",
            **SERVER_KEEPALIVE,
        }
        # Everything that semel writes is read by semel; the user's own SQL names its schemas or relies on search_path.
        values = ", ".join("set_config(%s, %s, false)" for _ in settings)
        connection.execute(f"SELECT {values}", [word for pair in settings.items() for word in (pair[0], str(pair[1]))])
        # What is committed here is acted upon elsewhere: in topics, and by the group's offsets.
        connection.execute(
            "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
        )


def _parse(dsn: str) -> dict[str, Any]:
    psycopg = psycopg_module()
    if not isinstance(dsn, str) or not dsn.strip():
        raise ConfigError("the DSN is empty; expected postgresql://user:password@host:port/database")
    try:
        parameters = dict(psycopg.conninfo.conninfo_to_dict(dsn))
    except psycopg.Error:
        parameters = {}
    ports = str(parameters.get("port") or "").replace(",", "")
    # A password with a / ends the address early: its pieces are then the port and the name of the database. One with an
    # @ goes on in the host (where an @ may only be the first character: of a socket in Linux's abstract namespace).
    hosts = str(parameters.get("host") or "").split(",")
    is_cut = "@" in str(parameters.get("dbname") or "") or any("@" in host[1:] for host in hosts)
    if not parameters or not (ports.isdigit() or not ports) or is_cut:
        # Neither the DSN nor libpq's message, which quotes pieces of it: a password may be in there.
        raise ConfigError(
            "the DSN cannot be read; expected postgresql://user:password@host:port/database (special characters of "
            "the password as %XX), or host=... user=... password='...' dbname=..."
        )
    return parameters
