"""How the program under test talks with whoever started it: events as lines of JSON, commands as lines of words."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from semel.demo.gate import Gate

_telling = threading.Lock()


def tell(event: str, **facts: Any) -> None:
    """One line on stdout."""
    with _telling:
        print(json.dumps({"event": event, "at_s": time.time(), **facts}), flush=True)


class Program(Protocol):
    """What is under test: three pipelines."""

    gate: Gate

    def pipelines(self) -> list[Callable[[], None]]:
        """What runs side by side until everything is read."""

    def finish(self) -> None:
        """No more input will come: end when everything is read."""


def play(program: Program) -> None:
    """Runs the program to its end, and obeys meanwhile."""
    tell("started")
    threading.Thread(target=obey, args=(program.gate, program.finish), daemon=True).start()
    threads = [threading.Thread(target=pipeline) for pipeline in program.pipelines()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tell("finished")
    sys.stdout.flush()
    os._exit(0)  # Spark's own good-bye takes seconds, and nothing is left to lose


def obey(gate: Gate, finish: Callable[[], None]) -> None:
    """Commands from stdin: `arm FAULT NTH`, `open`, `finish`. When stdin ends, so does the program."""
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "arm":
            gate.arm(rest[0], int(rest[1]))
        elif word == "open":
            gate.open()
        elif word == "finish":
            finish()
    os._exit(0)
