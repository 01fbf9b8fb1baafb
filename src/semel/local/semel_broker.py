"""semel's broker as a real process: what users start with `semel broker`."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from semel.local.processes import Process

READY = r"^semel broker ready on (?P<host>\S+):(?P<port>\d+)"


def semel_command(*arguments: str | Path) -> list[str]:
    """The command line of `semel ...` with the Python that runs now."""
    return [sys.executable, "-m", "semel", *(str(argument) for argument in arguments)]


class SemelBroker:
    """One broker process. Data and port stay over restarts; `options` go to `semel broker` as they are."""

    def __init__(self, directory: Path | None = None, *options: str, env: dict[str, str] | None = None) -> None:
        self._temporary = directory is None
        self.directory = directory or Path(tempfile.mkdtemp(prefix="semel-broker-"))
        self.options = options
        self.env = env or {}
        self.port = 0  # the first start takes any free port
        self.process: Process | None = None

    @property
    def bootstrap(self) -> str:
        assert self.port, "the broker was not started"
        return f"127.0.0.1:{self.port}"

    def start(self, timeout_s: float = 30) -> SemelBroker:
        """Returns when the broker takes requests."""
        address = f"127.0.0.1:{self.port}"
        command = semel_command("broker", "--data", self.directory, "--listen", address, *self.options)
        self.process = Process(command, env=self.env)
        try:
            ready = self.process.wait_for_line(READY, timeout_s)
        except BaseException:
            self.process.kill()
            raise
        self.port = int(ready["port"])
        return self

    def stop(self, timeout_s: float = 30) -> int:
        """An orderly end, as SIGTERM gives; the exit code."""
        return self._running.terminate(timeout_s)

    def kill(self) -> None:
        """kill -9."""
        self._running.kill()

    def pause(self) -> None:
        """Freezes the process (SIGSTOP)."""
        self._running.pause()

    def resume(self) -> None:
        self._running.resume()

    def restart(self, timeout_s: float = 30) -> None:
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

    def __enter__(self) -> SemelBroker:
        return self if self.process is not None else self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _running(self) -> Process:
        assert self.process is not None, "the broker was not started"
        return self.process
