"""A PostgreSQL server of its own, in a temporary folder: for tests, proofs and benchmarks, which stop and kill it.

with PostgresServer() as server:
    dsn = server.create_database()
    server.kill()           # kill -9 of the postmaster; also stop("immediate"), kill_backend(pid)
    server.start()          # the same data on the same port

PostgreSQL refuses to run as root; started by root, it runs as `postgres` (or `nobody`). Over TCP it wants a password,
over its Unix socket it does not.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from semel.local.processes import Process, ProcessFailed, free_ports

USER = "semel"
PROGRAMS = ("initdb", "postgres")
DEBIAN = Path("/usr/lib/postgresql")  # one folder per version; not on the PATH
READY = "database system is ready to accept connections"
IN_USE = "is still in use"  # backends of a killed postmaster end a moment later
OWNERS = ("postgres", "nobody")  # who may run it for root
SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}

# Without fsync a kill -9 of every process loses nothing: what was written is the kernel's. Power cuts are not tried.
QUICK = {
    "fsync": "off",
    "full_page_writes": "off",
    "shared_buffers": "32MB",
    "max_connections": "60",
    "autovacuum_naptime": "10min",
    "deadlock_timeout": "200ms",
}
_AS_USER = """
import os, sys
user, group, program = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
os.setgroups([])
os.setgid(group)
os.setuid(user)
os.execv(program[0], program)
"""


class PostgresMissing(Exception):
    """PostgreSQL's programs are not there; the message says how to get them."""


def programs() -> Path:
    """The folder with initdb and postgres: SEMEL_POSTGRES, the PATH, or where Debian puts them."""
    named = os.environ.get("SEMEL_POSTGRES")
    on_path = shutil.which("initdb")
    versions = sorted(DEBIAN.glob("*/bin"), key=lambda path: [int(part) for part in path.parent.name.split(".")])
    candidates = [Path(named)] if named else [*reversed(versions), *([Path(on_path).parent] if on_path else [])]
    for folder in candidates:
        if all((folder / name).exists() for name in PROGRAMS):
            return folder
    raise PostgresMissing(
        f"PostgreSQL (initdb, postgres) is not {'in SEMEL_POSTGRES=' + named if named else 'installed'}; Debian and "
        "Ubuntu: apt-get install postgresql; macOS: brew install postgresql@16; or name its bin folder: SEMEL_POSTGRES"
    )


class PostgresServer:
    """One server on 127.0.0.1. Data and port stay over restarts. Use it as a context manager.

    `durable`: with fsync, for measurements."""

    timeout_s = 60.0

    def __init__(self, settings: Mapping[str, str] | None = None, *, durable: bool = False) -> None:
        self._bin = programs()
        self._settings = {**({} if durable else QUICK), **(settings or {})}
        self._as_user = _as_user()
        self._temporary: Path | None = None
        self._numbers = itertools.count(1)
        self._logged: list[str] = []
        self.password = f"pw-{secrets.token_hex(12)}"
        self.host, self.port = "127.0.0.1", 0
        self.process: Process | None = None

    # -- addresses -----------------------------------------------------------------------------------------------------
    def dsn(self, database: str = "postgres", *, port: int | None = None) -> str:
        """Over TCP, with the password; `port`: of a proxy in front of it."""
        return f"postgresql://{USER}:{self.password}@{self.host}:{port or self.port}/{database}"

    def socket_dsn(self, database: str = "postgres") -> str:
        """Over the Unix socket, without a password."""
        return f"postgresql://{USER}@/{database}?host={self._folder}&port={self.port}"

    def create_database(self, name: str | None = None) -> str:
        """The DSN of a new, empty database."""
        import psycopg

        name = name or f"db{os.getpid()}_{next(self._numbers)}"
        with psycopg.connect(self.dsn(), autocommit=True) as connection:
            # Not by way of a checkpoint (the default copies files), which would take longer than the test.
            connection.execute(f'CREATE DATABASE "{name}" STRATEGY = wal_log')
        return self.dsn(name)

    # -- life ----------------------------------------------------------------------------------------------------------
    def start(self) -> Self:
        """Returns when it takes connections; at once if it is running."""
        if self.process is not None and self.process.running:
            return self
        if self._temporary is None:
            self._initialize()
        deadline_s = time.monotonic() + self.timeout_s
        while True:
            self._remember()
            self.process = Process(self._command(), cwd=Path("/"))
            try:
                self.process.wait_for_line(READY, max(1.0, deadline_s - time.monotonic()))
                return self
            except ProcessFailed as failure:
                self.process.kill()
                if IN_USE not in self.process.output or time.monotonic() > deadline_s:
                    raise ProcessFailed(f"PostgreSQL did not start: {failure}") from None
                time.sleep(0.05)

    def stop(self, mode: str = "fast") -> None:
        """An end by request: smart, fast (rolls back), immediate (as a crash: recovery at the next start)."""
        process = self._running
        process.resume()
        os.kill(process.pid, SIGNALS[mode])
        process.wait(self.timeout_s)

    def kill(self) -> None:
        """kill -9 of the postmaster. Its backends notice, and end."""
        self._running.kill()

    def kill_backend(self, pid: int) -> None:
        """kill -9 of one backend: the server ends all others and recovers; wait for it with `await_recovery`."""
        os.kill(pid, signal.SIGKILL)

    def restart(self, mode: str = "fast") -> None:
        self.stop(mode)
        self.start()

    @property
    def line_count(self) -> int:
        return self._running.line_count

    def await_recovery(self, after: int) -> None:
        """Returns when it takes connections again; `after`: `line_count` before the crash."""
        self._running.wait_for_line(READY, self.timeout_s, after=after)

    def close(self) -> None:
        """Ends it at once and removes its data."""
        if self.process is not None and self.process.running:
            with contextlib.suppress(ProcessFailed):
                self.stop("immediate")
        if self.process is not None:
            self.process.kill()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None

    def logs(self) -> str:
        self._remember()
        return "\n".join(self._logged)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------------------------------------
    @property
    def _folder(self) -> Path:
        assert self._temporary is not None, "the server was not started"
        return self._temporary

    @property
    def _running(self) -> Process:
        assert self.process is not None, "the server was not started"
        return self.process

    def _remember(self) -> None:
        if self.process is not None:
            self._logged.append(self.process.output)

    def _initialize(self) -> None:
        # A folder of its own under the system's: pytest's are closed to other users, and socket paths must be short.
        self._temporary = Path(tempfile.mkdtemp(prefix="semel-pg-"))
        password = self._temporary / "password"
        password.write_text(self.password)
        if self._as_user:
            uid, gid = int(self._as_user[-2]), int(self._as_user[-1])
            for path in (self._temporary, password):
                os.chown(path, uid, gid)
        command = [
            *self._as_user, self._bin / "initdb", "-D", self._temporary / "data", "-U", USER, "-E", "UTF8",
            "--locale=C", "--no-sync", "--auth-local=trust", "--auth-host=scram-sha-256", f"--pwfile={password}",
        ]  # fmt: skip
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, cwd="/", check=False)
        password.unlink()
        if done.returncode:
            self.close()
            raise ProcessFailed(f"initdb failed: {done.stdout}{done.stderr}")
        (self.port,) = free_ports(1)

    def _command(self) -> list[str | Path]:
        settings = {
            "listen_addresses": self.host,
            "port": str(self.port),
            "unix_socket_directories": str(self._folder),
            "lc_messages": "C",
            "log_line_prefix": "%p ",
            **self._settings,
        }
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        return [*self._as_user, self._bin / "postgres", "-D", self._folder / "data", *options]


def _as_user() -> list[str]:
    """A prefix for commands that must not run as root."""
    if os.geteuid() != 0:
        return []
    for name in OWNERS:
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return [sys.executable, "-S", "-E", "-c", _AS_USER, str(entry.pw_uid), str(entry.pw_gid)]
    raise PostgresMissing(f"PostgreSQL refuses to run as root, and there is no user {' or '.join(OWNERS)}")
