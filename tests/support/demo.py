"""`semel demo` for tests: run as a process of its own, its result as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from semel.demo.run import missing_for_spark
from semel.local.brokers import semel_command
from semel.local.processes import Process
from tests.support.missing import skip_loudly


def run_demo(folder: Path, *words: str, timeout_s: float = 300) -> dict[str, Any]:
    """What the demo says at its end; `kept` is the folder with the broker's data."""
    missing = missing_for_spark()
    if missing is not None and "spark" in words:
        skip_loudly(missing)
    command = semel_command("demo", *words, "--json", "--keep")
    with Process(command, cwd=folder, env={"TMPDIR": str(folder)}) as process:
        assert process.wait(timeout_s) == 0, process.output
        result: dict[str, Any] = json.loads(process.output.splitlines()[0])
    return result
