"""A broker as a child process, whoever made it: its end, its freezing and its new start."""

from __future__ import annotations

import re
import shutil
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Self

from semel.local.processes import Process


class Node(ABC):
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
