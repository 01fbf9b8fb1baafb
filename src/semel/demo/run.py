"""`semel demo` from the first line to the last."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from semel.demo.plan import EXACTLY_ONCE
from semel.demo.screen import Screen

NO_JAVA = (
    "Spark needs Java 17 or newer, and there is none: the demo runs as a processing loop (semel.process) instead. "
    "On Debian and Ubuntu: apt-get install openjdk-17-jre-headless"
)
NO_SPARK = (
    "PySpark is not installed: the demo runs as a processing loop (semel.process) instead. "
    "To see it on Spark: pip install semel[spark]"
)


@dataclass(frozen=True)
class Options:
    workload: str = "bank"
    engine: str = "auto"  # spark, process
    seed: int = 1
    per_s: float = 200.0
    report: Path | None = None
    as_json: bool = False
    keep: bool = False


def missing_for_spark() -> str | None:
    """What to tell the user, if Spark cannot run here."""
    if find_spec("pyspark") is None:
        return NO_SPARK
    java = shutil.which("java")
    try:
        found = (
            java is not None and subprocess.run([java, "-version"], capture_output=True, check=False).returncode == 0
        )
    except OSError:
        found = False
    return None if found else NO_JAVA


def run(options: Options) -> int:
    """The exit code: 0 if exactly once was exact and every fault hit."""
    screen = Screen(silent=options.as_json)
    screen.line("semel demo: one program, three guarantees, the same faults")
    missing = missing_for_spark() if options.engine != "process" else None
    engine = {"auto": "process" if missing else "spark"}.get(options.engine, options.engine)
    if missing and options.engine == "spark":
        raise RuntimeError(missing)
    if missing:
        screen.line(f"  {missing}")
    return _on_stage(options, engine, screen)


def _on_stage(options: Options, engine: str, screen: Screen) -> int:
    from semel.demo.stage import Stage
    from semel.demo.workloads import WORKLOADS

    workload = WORKLOADS[options.workload]
    screen.line(f"  {workload.title}; examples/{workload.file} on {'Spark' if engine == 'spark' else 'semel.process'}")
    screen.line(f"  seed {options.seed}; Ctrl-C stops everything\n")
    stage = Stage(workload, engine, options.seed, options.per_s)
    stage.kept = options.keep
    try:
        with stage:
            code = _play(options, stage, screen)
    except KeyboardInterrupt:
        screen.close()
        screen.line("stopped: broker, producer and program have ended" + _left(stage))
        raise
    if options.keep:
        screen.line(f"kept: {stage.folder} (broker's data and checkpoints)")
    return code


def _left(stage: object) -> str:
    from semel.demo.stage import Stage

    assert isinstance(stage, Stage)
    return f"; {stage.folder} is left behind (--keep)" if stage.kept else "; nothing is left behind"


def _play(options: Options, stage: object, screen: Screen) -> int:
    from semel.demo import tables
    from semel.demo.play import Play, judge
    from semel.demo.reading import reader_name
    from semel.demo.report import write
    from semel.demo.stage import Stage

    assert isinstance(stage, Stage)
    story = Play(stage, screen).run()
    screen.moment(f"counting through {reader_name()}")
    outcomes = judge(stage)
    screen.close()
    page = write(options.report or default_report(stage.workload.name), stage, outcomes, story, options.seed)
    if options.as_json:
        result = tables.as_json(stage.workload, outcomes, story, options.seed, stage.engine)
        print(json.dumps({**result, "report": str(page)}))
    screen.line(f"\n{tables.text(stage.workload, outcomes)}\n")
    screen.line(f"report: {page}")
    exact = next(outcome for outcome in outcomes if outcome.guarantee == EXACTLY_ONCE)
    return 0 if exact.is_exact else 1


def default_report(name: str) -> Path:
    return Path.cwd() / f"semel-demo-{name}.html"
