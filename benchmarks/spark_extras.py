"""What `semel bench spark` looks at beside speed: where the time goes, how long a commit takes, and whether a batch
costs more when many ran before it, or when the topics are large."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import Report, compare, median
from benchmarks.spark_contestants import Contestant, Job, run_job, semel_fast, semel_frame
from benchmarks.spark_topics import Input, filled, fresh_topic, removed
from semel.spark.stages import VARIABLE, summed

COMMIT_GOAL_MS = 50.0
SMALL_BATCH = 2_000  # records
COMPARED_BATCHES = 20
WARM_BATCHES = 3
TITLES = {
    ("encode", "wait for rows from Spark"): "wait for rows (JVM)",
    ("write", "wait for rows from Spark"): "wait for rows (the source, the JVM, a shuffle)",
    ("source", "hand rows to Spark"): "hand rows over (JVM)",
    ("encode", "hand rows to Spark"): "hand batches to the shuffle",
}


def show_stages(bootstrap: str, source: Input, batches: int) -> None:
    """One traced run of each way, warm, to stderr."""
    for make in (semel_frame, semel_fast):
        folder = Path(tempfile.mkdtemp(prefix="semel-bench-stages-"))
        contestant = make({VARIABLE: str(folder)})
        try:
            run_job(contestant, Job(bootstrap, source, batches), check=False)
            for path in folder.glob("*"):
                path.unlink()
            details = run_job(contestant, Job(bootstrap, source, batches), check=False).details
            assert details is not None
            _print_stages(f"{source.size}, {batches} batches: {contestant.name}", details, summed(folder))
        finally:
            contestant.close()
            shutil.rmtree(folder, ignore_errors=True)


def _print_stages(title: str, details: dict[str, Any], tasks: dict[str, dict[str, float]]) -> None:
    triggers = sum(batch["triggerExecution"] for batch in details["batches"]) / 1000
    adds = sum(batch["addBatch"] for batch in details["batches"]) / 1000
    commits = sum(report["commit_ms"] for report in details["reports"]) / 1000
    writes = sum(report["write_ms"] for report in details["reports"]) / 1000
    wall = {
        "start and end of the query": details["seconds"] - triggers,
        "offsets, planning, Spark's logs": triggers - adds,
        "the job": writes,
        "commit": commits,
        "the rest of foreachBatch": adds - writes - commits,
    }
    lines = [f"{title}: {details['seconds']:.2f} s of wall time"]
    lines += [f"    {name:32}{seconds:8.2f} s" for name, seconds in wall.items()]
    for kind, spent in tasks.items():
        count = int(spent.pop("tasks"))
        parts = ", ".join(f"{TITLES.get((kind, n), n)} {s:.2f}" for n, s in sorted(spent.items(), key=lambda i: -i[1]))
        lines.append(f"    {count} {kind} tasks, seconds in all: {parts}")
    cpu = ", ".join(f"{kind} {seconds:.2f}" for kind, seconds in sorted(details["cpu_seconds"].items()))
    lines.append(f"    processor seconds: {cpu}")
    print("\n".join(lines), file=sys.stderr, flush=True)


def report_commits(report: Report, case: str, commits_ms: list[float]) -> None:
    values = {"semel": [median(commits_ms)], "the goal": [COMMIT_GOAL_MS]}
    compare(report, bench="spark", case=f"{case}: commit, p50", unit="ms", values=values, better="lower")


def report_growth(report: Report, bootstrap: str, contestant: Contestant, large: Input, batches: int) -> None:
    """Small batches, early and late in a query, and on small and large topics."""
    small = filled(bootstrap, large.size, 100, SMALL_BATCH * batches)
    times = _batch_times(contestant, Job(bootstrap, small, batches))
    early, late = times[:COMPARED_BATCHES], times[-COMPARED_BATCHES:]
    values = {"semel": [median(late)], "the first": [median(early)]}
    case = f"{contestant.name}: {COMPARED_BATCHES} batches of {SMALL_BATCH:,} after {len(times) - COMPARED_BATCHES}"
    compare(report, bench="spark", case=case, unit="ms", values=values, better="lower")

    few = COMPARED_BATCHES + WARM_BATCHES
    target = fresh_topic(bootstrap, "bench-large")
    try:
        contestant.copy(Job(bootstrap, large, 3), target)
        job = Job(bootstrap, large, few, last_offsets=SMALL_BATCH * few)
        values = {"semel": [median(_times(contestant.copy(job, target).details))], "small topics": [median(early)]}
    finally:
        removed(bootstrap, target)
    case = f"{contestant.name}: batches of {SMALL_BATCH:,}, topics of {large.record_count:,}"
    compare(report, bench="spark", case=case, unit="ms", values=values, better="lower")


def _batch_times(contestant: Contestant, job: Job) -> list[float]:
    return _times(run_job(contestant, job, check=True).details)


def _times(details: dict[str, Any] | None) -> list[float]:
    """Milliseconds of each batch but the first few, which pay for the start."""
    assert details is not None
    return [float(batch["triggerExecution"]) for batch in details["batches"]][WARM_BATCHES:]
