"""How long a record takes through Spark, from its production until a reader of committed data has it: triggers from 0
to 1 s, one Apache Kafka node.

Records leave at a steady rate, whatever the query does. Each carries the time at which it was due; the reader, in the
same process, subtracts. semel commits each batch in one transaction; Spark's own sink is at-least-once, so a record is
there before its batch is done. Between measurements of one contestant the other one's query is not running.

Afterwards: what a batch consists of, by the query's own progress.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.harness import Collected, Report, compare, interleave, table
from benchmarks.spark_contestants import Contestant, Job, SparkProgram, peers_there, semel_frame, spark_own, spark_same
from benchmarks.spark_topics import PARTITIONS, Input, fresh_topic, removed
from semel.local.apache_kafka import ApacheKafka

BENCH = "spark_latency"
TRIGGERS_MS = (0, 100, 250, 500, 1_000)
CONTESTANTS: dict[str, Callable[[], Contestant]] = {"semel": semel_frame, "spark": spark_own, "same": spark_same}
PERCENTILES = (50, 99)
STEPS = ("latestOffset", "queryPlanning", "walCommit", "addBatch", "commitOffsets", "triggerExecution")


class Plan(NamedTuple):
    """What to run. The default is everything."""

    triggers_ms: Sequence[int] = TRIGGERS_MS
    names: Sequence[str] = tuple(CONTESTANTS)
    work: str = "new key"  # or copy, or another one of `peers/spark_jobs.py` that passes the values on
    runs: int = 5
    per_s: int = 200
    warmup_s: float = 5.0
    measured_s: float = 10.0


def run(report: Report, quick: bool = False) -> None:
    run_plan(report, Plan(triggers_ms=(0,), runs=2, warmup_s=2, measured_s=4) if quick else Plan())


def run_plan(report: Report, plan: Plan) -> None:
    with ApacheKafka() as kafka, contextlib.ExitStack() as stack:
        programs = peers_there(BENCH, {name: CONTESTANTS[name] for name in plan.names}, stack)
        for trigger_ms in plan.triggers_ms:
            _measure(report, kafka.bootstrap, programs, trigger_ms, plan)


def _measure(report: Report, bootstrap: str, programs: Mapping[str, Contestant], trigger_ms: int, plan: Plan) -> None:
    found: dict[str, list[list[float]]] = {programs[name].name: [] for name in programs}
    details: dict[str, list[dict[str, Any]]] = {programs[name].name: [] for name in programs}

    def once(program: Any) -> float:
        latencies_ms, detail = _one_run(bootstrap, program, trigger_ms, plan)
        found[program.name].append(latencies_ms)
        details[program.name].append(detail)
        return statistics.median(latencies_ms)

    interleave({name: lambda name=name: once(programs[name]) for name in programs}, runs=plan.runs)  # type: ignore[misc]
    for percent in PERCENTILES:
        values = {name: [percentile(each, percent) for each in runs[-plan.runs :]] for name, runs in found.items()}
        case = f"{plan.work}, trigger {trigger_ms} ms, {plan.per_s} records/s: p{percent}"
        compare(report, bench=BENCH, case=case, unit="ms", values=values, better="lower")
    for name, runs in details.items():
        print(f"trigger {trigger_ms} ms, {name}: {_steps(runs[-plan.runs :])}", file=sys.stderr, flush=True)


def _one_run(bootstrap: str, program: SparkProgram, trigger_ms: int, plan: Plan) -> tuple[list[float], dict[str, Any]]:
    """Latencies in ms of the records that were due in the measured time, and what the query reports."""
    source, target = (fresh_topic(bootstrap, f"bench-latency-{end}") for end in ("in", "out"))
    job = Job(bootstrap, Input(source, "", 0, 0, {}), work=plan.work)
    try:
        with program.streaming(job, target, trigger_ms) as answer, _Reader(bootstrap, target) as reader:
            total = int((plan.warmup_s + plan.measured_s) * plan.per_s)
            _produce(bootstrap, source, total, plan.per_s)
            reader.wait_for(total)
        return reader.latencies_ms[int(plan.warmup_s * plan.per_s) :], answer
    finally:
        removed(bootstrap, source)
        removed(bootstrap, target)


def _produce(bootstrap: str, topic: str, total: int, per_s: int) -> None:
    from semel.client.producer import Producer

    with Producer(bootstrap_servers=bootstrap) as producer:
        started_s = time.perf_counter()
        for number in range(total):
            due_s = started_s + number / per_s
            time.sleep(max(0.0, due_s - time.perf_counter()))
            producer.send(topic, value=b"%.6f" % due_s, key=b"%d" % number)


class _Reader:
    """Reads what is committed, in a thread, and notes when; records are in the order of their times at the end."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._bootstrap, self._topic = bootstrap, topic
        self._found: dict[bytes, float] = {}  # by the time at which it was due; a second copy is not the first
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._is_over = False

    def __enter__(self) -> _Reader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join(30)

    def _read(self) -> None:
        from semel.client.consumer import Consumer

        with Consumer(
            bootstrap_servers=self._bootstrap,
            isolation_level="read_committed",
            auto_offset_reset="earliest",
            fetch_max_wait_ms=20,
        ) as consumer:
            consumer.assign([(self._topic, p) for p in range(PARTITIONS)])
            while not self._is_over:
                records = consumer.poll_table(timeout_ms=100)
                now_s = time.perf_counter()
                if records is not None:
                    for value in records.column("value").to_pylist():
                        self._found.setdefault(value, now_s)

    def wait_for(self, total: int, timeout_s: float = 60.0) -> None:
        ends_s = time.monotonic() + timeout_s
        while len(self._found) < total:
            if time.monotonic() > ends_s:
                raise RuntimeError(f"{len(self._found)} of {total} records came through within {timeout_s:.0f} s")
            time.sleep(0.05)

    @property
    def latencies_ms(self) -> list[float]:
        return [(seen_s - float(due)) * 1000 for due, seen_s in sorted(self._found.items(), key=lambda i: float(i[0]))]


def percentile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def _steps(runs: Sequence[dict[str, Any]]) -> str:
    """Medians over the batches with rows, in ms."""
    batches = [batch for run in runs for batch in run["batches"] if "addBatch" in batch]
    parts = [f"{step} {statistics.median(batch.get(step, 0) for batch in batches):.0f}" for step in STEPS]
    reports = [report for run in runs for report in run["reports"]]
    own = ("write_ms", "commit_ms") if reports else ()
    parts += [f"{step} {statistics.median(report[step] for report in reports):.0f}" for step in own]
    return f"{len(batches)} batches; ms in the middle: {', '.join(parts)}"


def main() -> None:
    """Some of it: python -m benchmarks.spark_latency --triggers 0,1000 --names semel,spark --runs 3"""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triggers", default=",".join(map(str, TRIGGERS_MS)), help="milliseconds")
    parser.add_argument("--names", default=",".join(CONTESTANTS))
    parser.add_argument("--work", default=Plan().work, help="what the query does: 'new key' or copy")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    collected = Collected(args.json)
    triggers_ms = [int(each) for each in args.triggers.split(",")]
    plan = Plan(triggers_ms, args.names.split(","), args.work, args.runs, measured_s=args.seconds)
    run_plan(collected, plan)
    if not args.json:
        print(table(collected.rows))


if __name__ == "__main__":
    main()
