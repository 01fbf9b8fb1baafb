"""semel's broker as a real process: what users start with `semel broker`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from semel.local.node import Node
from semel.local.processes import Process

READY = r"^semel broker ready on (?P<host>\S+):(?P<port>\d+)"


SEMEL = (sys.executable, "-m", "semel")  # `semel` with the Python that runs now


def semel_command(*arguments: str | Path, semel: Sequence[str] = SEMEL) -> list[str]:
    """The command line of `semel ...`."""
    return [*semel, *(str(argument) for argument in arguments)]


class SemelBroker(Node):
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
