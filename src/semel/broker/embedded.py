"""A broker inside a program: a real `semel broker` process that lives as long as the program wants, and no longer.

with semel.Broker() as broker:
    producer = confluent_kafka.Producer({"bootstrap.servers": broker.bootstrap})
"""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

_READY = re.compile(rb"^semel broker ready on (\S+):(\d+) ")
_STOP_TIMEOUT_S = 20.0


class BrokerFailedError(Exception):
    """The broker process did not come up, or went away; the message has its last words."""


class Broker:
    """A broker process of its own. It ends with the `with` block, and with this program whatever kills it.

    data       the folder for its data, kept; by default a temporary one that is removed
    port       0 takes a free one; it stays the same over `restart`
    fsync      "commit" (what is acknowledged is on the disk) or "os" (faster)
    settings   Kafka's names, e.g. {"num.partitions": 4}
    """

    def __init__(
        self,
        data: str | Path | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        fsync: str = "commit",
        settings: Mapping[str, object] | None = None,
        log_level: str = "warning",
        start_timeout_s: float = 30.0,
    ) -> None:
        self.data = Path(data) if data is not None else None
        self.host, self.port = host, port
        self.fsync = fsync
        self.settings = dict(settings or {})
        self._log_level = log_level
        self._start_timeout_s = start_timeout_s
        self._temporary: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as this object)

    @property
    def bootstrap(self) -> str:
        """HOST:PORT, as clients want it for bootstrap.servers."""
        if not self.port:
            raise BrokerFailedError("the broker was not started yet; use `with semel.Broker() as broker` or start()")
        return f"{self.host}:{self.port}"

    @property
    def process_id(self) -> int:
        if self._process is None:
            raise BrokerFailedError("the broker is not running")
        return self._process.pid

    def start(self) -> Broker:
        """Returns when the broker takes requests."""
        if self._process is not None:
            return self
        if self.data is None:
            self._temporary = self.data = Path(tempfile.mkdtemp(prefix="semel-broker-"))
        try:
            self._process = subprocess.Popen(
                self._command(self.data), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log
            )
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise
        return self

    def stop(self) -> None:
        """A clean end: requests under way are answered, logs are flushed."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """kill -9, to see what survives."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Starts again on the same port and data, after a clean end unless it was killed before."""
        self.stop()
        self.start()

    def close(self) -> None:
        """Ends the broker and removes its data if the folder was temporary."""
        self._end(signal.SIGTERM)
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = self.data = None

    def __enter__(self) -> Broker:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _command(self, data: Path) -> list[str]:
        listen = ["--data", str(data), "--listen", f"{self.host}:{self.port}", "--fsync", self.fsync]
        settings = [word for name, value in self.settings.items() for word in ("--set", f"{name}={_text(value)}")]
        quiet = ["--log-level", self._log_level, "--end-with-stdin"]
        return [sys.executable, "-m", "semel", "broker", *listen, *settings, *quiet]

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        deadline_s = time.monotonic() + self._start_timeout_s
        line = b""
        while not line.endswith(b"\n"):
            left_s = deadline_s - time.monotonic()
            readable, _, _ = select.select([self._process.stdout], [], [], max(0.0, left_s))
            if not readable:
                raise BrokerFailedError(f"the broker was not ready within {self._start_timeout_s} s")
            chunk = os.read(self._process.stdout.fileno(), 4096)
            if not chunk:
                raise BrokerFailedError(f"the broker did not start: {self._last_words()}")
            line += chunk
        ready = _READY.match(line)
        if ready is None:
            raise BrokerFailedError(f"the broker said {line!r} instead of being ready")
        self.port = int(ready[2])

    def logs(self) -> str:
        """What the broker logged so far."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def _last_words(self) -> str:
        assert self._process is not None
        code = self._process.wait(_STOP_TIMEOUT_S)
        return self.logs().strip()[-2000:] or f"exit code {code}"

    def _end(self, number: int) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
