"""Brokers as child processes: their end, their freezing and their new start; and semel's own, as users start it."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from semel.local.processes import Process


class BrokerProcess(ABC):
    """One broker process on 127.0.0.1. Data and port stay over restarts. Use it as a context manager."""

    patience_s: float = 30  # with a start and with an orderly end

    def __init__(self, directory: Path | None, prefix: str) -> None:
        self._temporary = directory is None
        self.directory = directory or Path(tempfile.mkdtemp(prefix=prefix))
        self.process: Process | None = None

    @abstractmethod
    def start(self, timeout_s: float | None = None) -> Self:
        """Returns when it takes requests."""

    def _begin(self, process: Process, ready: str, timeout_s: float | None) -> re.Match[str]:
        """Waits for the line that says that it is ready."""
        self.process = process
        try:
            return process.wait_for_line(ready, timeout_s or self.patience_s)
        except BaseException:
            process.kill()
            raise

    def stop(self, timeout_s: float | None = None) -> int:
        """An orderly end, as SIGTERM gives; the exit code."""
        return self._running.terminate(timeout_s or self.patience_s)

    def kill(self) -> None:
        """kill -9."""
        self._running.kill()

    def pause(self) -> None:
        """Freezes the process (SIGSTOP)."""
        self._running.pause()

    def resume(self) -> None:
        self._running.resume()

    def restart(self, timeout_s: float | None = None) -> None:
        """Starts again on the same port and data, after `stop` or `kill` (or stops first)."""
        if self._running.running:
            self.stop(timeout_s)
        self.start(timeout_s)

    def close(self) -> None:
        """Ends it at once and removes its data, if the folder was its own."""
        if self.process is not None:
            self.process.kill()
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self if self.process is not None else self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _running(self) -> Process:
        assert self.process is not None, "the broker was not started"
        return self.process


# --- semel's own ---


READY = r"^semel broker ready on (?P<host>\S+):(?P<port>\d+)"


SEMEL = (sys.executable, "-m", "semel")  # `semel` with the Python that runs now


def semel_command(*arguments: str | Path, semel: Sequence[str] = SEMEL) -> list[str]:
    """The command line of `semel ...`."""
    return [*semel, *(str(argument) for argument in arguments)]


class SemelBroker(BrokerProcess):
    """One broker process. Data and port stay over restarts; `options` go to `semel broker` as they are.

    `semel`: the command that is started, such as one with faults (`semel.prove.injection`). It counts from the next
    start on."""

    def __init__(self, directory: Path | None = None, *options: str, semel: Sequence[str] = SEMEL) -> None:
        super().__init__(directory, "semel-broker-")
        self.options = options
        self.semel = semel
        self.port = 0  # the first start takes any free port

    @property
    def bootstrap(self) -> str:
        assert self.port, "the broker was not started"
        return f"127.0.0.1:{self.port}"

    def start(self, timeout_s: float | None = None) -> Self:
        """Returns when the broker takes requests."""
        address = f"127.0.0.1:{self.port}"
        words: tuple[str | Path, ...] = ("broker", "--data", self.directory, "--listen", address, *self.options)
        self.port = int(self._begin(Process(semel_command(*words, semel=self.semel)), READY, timeout_s)["port"])
        return self
