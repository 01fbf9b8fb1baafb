"""semel's broker as a real process: what users start with `semel broker`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Self

from semel.local.node import Node
from semel.local.processes import Process

READY = r"^semel broker ready on (?P<host>\S+):(?P<port>\d+)"


def semel_command(*arguments: str | Path) -> list[str]:
    """The command line of `semel ...` with the Python that runs now."""
    return [sys.executable, "-m", "semel", *(str(argument) for argument in arguments)]


class SemelBroker(Node):
    """One broker process. Data and port stay over restarts; `options` go to `semel broker` as they are."""

    def __init__(self, directory: Path | None = None, *options: str, env: dict[str, str] | None = None) -> None:
        super().__init__(directory, "semel-broker-")
        self.options = options
        self.env = env or {}
        self.port = 0  # the first start takes any free port

    @property
    def bootstrap(self) -> str:
        assert self.port, "the broker was not started"
        return f"127.0.0.1:{self.port}"

    def start(self, timeout_s: float | None = None) -> Self:
        """Returns when the broker takes requests."""
        address = f"127.0.0.1:{self.port}"
        command = semel_command("broker", "--data", self.directory, "--listen", address, *self.options)
        self.port = int(self._begin(Process(command, env=self.env), READY, timeout_s)["port"])
        return self
