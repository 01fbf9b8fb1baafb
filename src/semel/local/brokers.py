"""Brokers as child processes that end with the program that started them: `semel.Broker`, and what other brokers share.

with semel.Broker() as broker:
    producer = confluent_kafka.Producer({"bootstrap.servers": broker.bootstrap})
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from semel.client.timing import timeout_in_ms
from semel.local.processes import Process, ProcessFailed, free_ports


class BrokerFailedError(ProcessFailed):
    """The broker process did not come up, or is not running; the message has the end of its output."""


class BrokerProcess(ABC):
    """One broker process on 127.0.0.1. Data and port stay over restarts. Use it as a context manager."""

    timeout_ms: float = 60_000  # of a start and of an orderly end

    def __init__(self, directory: Path | None, prefix: str) -> None:
        self._prefix = prefix
        self._given = directory
        self._temporary: Path | None = None
        self._logged: list[str] = []  # by earlier processes of this broker
        self.process: Process | None = None

    @property
    def directory(self) -> Path:
        """Its data: the given folder, or a temporary one that `close` removes."""
        if self._given is not None:
            return self._given
        if self._temporary is None:
            self._temporary = Path(tempfile.mkdtemp(prefix=self._prefix))
        return self._temporary

    @abstractmethod
    def start(self, *, timeout_ms: float | None = None) -> Self:
        """Returns when it takes requests; at once if it is running."""

    def _begin(self, process: Process, ready: str, timeout_ms: float | None) -> re.Match[str]:
        """Waits for the line that says that it is ready."""
        self._launch(process)
        return self._await_ready(ready, timeout_ms)

    def _launch(self, process: Process) -> None:
        self._is_first = self.process is None
        if self.process is not None:
            self._logged.append(self.process.output)
        self.process = process

    def _await_ready(self, ready: str, timeout_ms: float | None) -> re.Match[str]:
        process = self._running
        try:
            return process.wait_for_line(ready, (timeout_ms or self.timeout_ms) / 1000)
        except BaseException as failure:
            process.kill()
            if self._is_first:
                self.close()  # nothing is in its folder that was acknowledged
            if isinstance(failure, ProcessFailed):
                raise BrokerFailedError(f"the broker did not start: {failure}") from None
            raise

    @timeout_in_ms
    def stop(self, *, timeout_ms: float | None = None) -> int:
        """An orderly end, as SIGTERM gives; the exit code."""
        return self._running.terminate((timeout_ms or self.timeout_ms) / 1000)

    def kill(self) -> None:
        """kill -9, to see what survives."""
        self._running.kill()

    def pause(self) -> None:
        """Freezes the process (SIGSTOP)."""
        self._running.pause()

    def resume(self) -> None:
        self._running.resume()

    @timeout_in_ms
    def restart(self, *, timeout_ms: float | None = None) -> None:
        """Starts again on the same port and data, after `stop` or `kill` (or stops first)."""
        if self._running.running:
            self.stop(timeout_ms=timeout_ms)
        self.start(timeout_ms=timeout_ms)

    def close(self) -> None:
        """Ends it at once and removes its data, if the folder was its own."""
        if self.process is not None:
            self.process.kill()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None

    def logs(self) -> str:
        """What it logged so far, over all its starts."""
        return "\n".join([*self._logged, *([] if self.process is None else [self.process.output])])

    def __enter__(self) -> Self:
        return self if self.process is not None else self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _running(self) -> Process:
        if self.process is None:
            raise BrokerFailedError("the broker was not started; use it as a context manager or call start()")
        return self.process


# --- semel's own ---
READY = r"^semel broker ready on (?P<host>\S+):(?P<port>\d+)"


LOOPBACK = "127.0.0.1"
SEMEL = (sys.executable, "-m", "semel")  # `semel` with the Python that runs now


def semel_command(*arguments: str | Path, semel: Sequence[str] = SEMEL) -> list[str]:
    return [*semel, *(str(argument) for argument in arguments)]


class SemelBroker(BrokerProcess):
    """One broker process. Data and port stay over restarts; `options` go to `semel broker` as they are.

    `semel`: the command that is started, such as one with faults (`semel.prove.injection`). It counts from the next
    start on."""

    def __init__(
        self,
        directory: Path | None = None,
        *options: str,
        port: int = 0,
        host: str = LOOPBACK,
        semel: Sequence[str] = SEMEL,
    ) -> None:
        super().__init__(directory, "semel-broker-")
        self.options = options
        self.semel = semel
        self.host, self.port = host, port  # port 0: the first start takes any free one

    @property
    def bootstrap(self) -> str:
        """HOST:PORT, as clients want it for bootstrap.servers."""
        if not self.port:
            raise BrokerFailedError("the broker was not started; use it as a context manager or call start()")
        return f"{self.host}:{self.port}"

    @timeout_in_ms
    def start(self, *, timeout_ms: float | None = None) -> Self:
        """Returns when the broker takes requests; at once if it is running."""
        if self.process is not None and self.process.running:
            return self
        if not self.port and self.host == LOOPBACK:
            (self.port,) = free_ports(1)
        address = f"{self.host}:{self.port}"
        words: tuple[str | Path, ...] = ("broker", "--data", self.directory, "--listen", address, *self.options)
        self.port = int(self._begin(Process(semel_command(*words, semel=self.semel)), READY, timeout_ms)["port"])
        return self


class Broker(SemelBroker):
    """A broker process of its own. It ends with the `with` block, and with this program whatever kills it.

    data       the folder for its data, kept; by default a temporary one that is removed
    port       0 takes a free one; it stays the same over `restart`
    fsync      "commit" (what is acknowledged is on the disk) or "os" (faster)
    settings   Kafka's names, e.g. {"num.partitions": 4}
    """

    @timeout_in_ms
    def __init__(
        self,
        data: str | Path | None = None,
        *,
        host: str = LOOPBACK,
        port: int = 0,
        fsync: str = "commit",
        settings: Mapping[str, object] | None = None,
        log_level: str = "warning",
        start_timeout_ms: float = 60_000,
    ) -> None:
        self.fsync, self.settings = fsync, dict(settings or {})
        words = [word for name, value in self.settings.items() for word in ("--set", f"{name}={_text(value)}")]
        folder = None if data is None else Path(data)
        super().__init__(folder, "--fsync", fsync, *words, "--log-level", log_level, host=host, port=port)
        self.timeout_ms = start_timeout_ms

    @property
    def data(self) -> Path:
        return self.directory

    @property
    def process_id(self) -> int:
        return self._running.pid

    def close(self) -> None:
        """Ends the broker in order and removes its data if the folder was temporary."""
        if self.process is not None and self.process.running:
            self.stop()
        super().close()


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
