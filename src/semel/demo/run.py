"""`semel demo` from the first line to the last."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from semel.demo.program import EXACTLY_ONCE, FAULTS, DemoFault, Screen

if TYPE_CHECKING:
    from semel.demo.testbed import DemoTestbed, RunHistory
    from semel.demo.workloads import Outcome

NO_JAVA = (
    "Spark needs Java 17 or newer, and there is none; on Debian and Ubuntu: apt-get install openjdk-17-jre-headless"
)
NO_SPARK = "PySpark is not installed: pip install 'semel[spark]'"
INSTEAD = "Without it the demo runs as a processing loop (semel.process)."


class DemoError(Exception):
    """The demo cannot run as asked; the message says what to do."""


@dataclass(frozen=True)
class DemoOptions:
    workload: str
    engine: str  # auto, spark, process
    seed: int
    report: Path
    per_s: float = 100.0
    picture: Path | None = None
    as_json: bool = False
    keep: bool = False
    faults: tuple[DemoFault, ...] = FAULTS


def missing_for_spark() -> str | None:
    """What to tell the user, if Spark cannot run here."""
    if find_spec("pyspark") is None:
        return NO_SPARK
    home = os.environ.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else shutil.which("java")
    try:
        words = [java or "", "-version"]
        found = java is not None and subprocess.run(words, capture_output=True, check=False).returncode == 0
    except OSError:
        found = False
    return None if found else NO_JAVA


def run(options: DemoOptions) -> int:
    """The exit code: 0 if exactly once was exact and every fault hit all three pipelines."""
    screen = Screen(silent=options.as_json)
    logging.getLogger("semel.client").setLevel(logging.ERROR)  # the demo kills its broker, and says so itself
    screen.line("semel demo: one program, three guarantees, the same faults")
    missing = missing_for_spark() if options.engine != "process" else None
    if missing and options.engine == "spark":
        raise DemoError(missing)
    if missing:
        screen.line(f"  {missing}. {INSTEAD}")
    engine = "process" if missing or options.engine == "process" else "spark"
    return _on_testbed(options, engine, screen)


def _on_testbed(options: DemoOptions, engine: str, screen: Screen) -> int:
    from semel.demo.testbed import DemoTestbed
    from semel.demo.workloads import WORKLOADS

    workload = WORKLOADS[options.workload]
    screen.line(f"  {workload.title}; examples/{workload.file} on {'Spark' if engine == 'spark' else 'semel.process'}")
    screen.line(f"  seed {options.seed}; Ctrl-C stops everything\n")
    testbed = DemoTestbed(workload, engine, options.seed, options.per_s, keep=options.keep)
    left = f"{testbed.folder} is left behind" if options.keep else "nothing is left behind"
    try:
        with testbed:
            code = _run_and_count(options, testbed, screen)
    except KeyboardInterrupt:
        screen.erase()
        screen.line(f"stopped: broker, producer and program have ended; {left}")
        raise
    if options.keep:
        screen.line(f"kept: {testbed.folder} (the broker's data and the checkpoints)")
    return code


def _run_and_count(options: DemoOptions, testbed: DemoTestbed, screen: Screen) -> int:
    from semel.demo.testbed import DemoRun, count, reader_name

    history = DemoRun(testbed, screen, options.faults).run()
    screen.moment(f"counting, through {reader_name()}")
    outcomes = count(testbed)
    screen.erase()
    _tell(options, testbed, screen, history, outcomes)
    exact = next(outcome for outcome in outcomes if outcome.guarantee == EXACTLY_ONCE)
    return 0 if exact.is_exact else 1


def _tell(
    options: DemoOptions, testbed: DemoTestbed, screen: Screen, history: RunHistory, outcomes: list[Outcome]
) -> None:
    from semel.demo import report

    facts = report.Facts(testbed.workload, testbed.engine, options.seed, outcomes, history)
    page = report.write(options.report, facts)
    if options.picture is not None:
        options.picture.write_text(report.picture(facts))
    if options.as_json:
        result = report.as_json(facts)
        kept = {"kept": str(testbed.folder)} if options.keep else {}
        print(json.dumps({**result, "report": str(page), **kept}), flush=True)
    screen.line(f"\n{report.text_table(facts)}\n")
    screen.line(f"report: {page}")
