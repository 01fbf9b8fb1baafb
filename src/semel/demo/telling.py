"""How the program under test talks with whoever started it: events as lines of JSON, commands as lines of words."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from semel.demo.gate import Gate

_telling = threading.Lock()


def tell(event: str, **facts: Any) -> None:
    """One line on stdout."""
    with _telling:
        print(json.dumps({"event": event, "at_s": time.time(), **facts}), flush=True)


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
