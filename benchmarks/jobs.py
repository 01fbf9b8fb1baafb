"""Ordinary jobs, Kafka -> Spark -> Kafka on one Apache Kafka node: JSON in, JSON out, exactly once, beside Spark's own
connector (at-least-once), Kafka Streams (exactly_once_v2) and Quix Streams (exactly-once).

    filter and re-key   JSON is read, filtered, gets another key, and is written as JSON
    windowed count      orders of each user and minute, every change of a count is written (state)
    static join         each order with the name of its product
    several topics      one topic for each currency, one for what cannot be read

Everybody reads the same topic of four partitions, with aborted transactions in between, on two cores. All Spark
programs run the same queries (`peers/spark_jobs.py`). The value is input records per second of wall time, from the
making of a query to its end in a warm session; beside Kafka Streams and Quix Streams (on a tenth of the records), which
are timed from their first record, from the first batch ("started"). What the Spark programs have written is compared.

    semel                             the query with from_json
    semel, jsonSchema                 the same with JSON that semel's source has read
    Spark's own                       as it comes
    Spark's own with semel's settings those of semel.spark_session()
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.harness import Collected, Report, compare, interleave, table
from benchmarks.spark_contestants import (
    Contestant,
    Job,
    KafkaStreamsJobs,
    QuixJobs,
    Result,
    peers_there,
    semel_frame,
    semel_json,
    spark_own,
    spark_same,
)
from benchmarks.spark_topics import Input, count_committed, filled, fresh_topic, in_hour, orders, removed
from semel.local.apache_kafka import ApacheKafka

BENCH = "jobs"
UNIT = "records/s"
WORKS = ("filter and re-key", "windowed count", "static join", "several topics")
TARGETS = 4  # of "several topics"
SIZES = {"100 B": 110, "1 KB": 1_000, "100 KB": 100_000}
RECORDS = {"100 B": 1_000_000, "1 KB": 300_000, "100 KB": 3_000}
BATCHES = 6
SUBJECTS = ("semel", "semel, jsonSchema")
CONTESTANTS: dict[str, Callable[[], Contestant]] = {
    "semel": semel_frame,
    "json": semel_json,
    "spark": spark_own,
    "same": spark_same,
    "streams": KafkaStreamsJobs,
    "quix": QuixJobs,
}
JOINING = (KafkaStreamsJobs.name, QuixJobs.name)  # timed from their first record, see `spark_contestants`
SLOW_SHARE = 10  # Quix Streams gets a tenth


class Plan(NamedTuple):
    """What to run. The default is everything."""

    sizes: Sequence[str] = tuple(SIZES)
    works: Sequence[str] = WORKS
    names: Sequence[str] = tuple(CONTESTANTS)
    runs: int = 5
    share: float = 1.0  # of the records
    sink: dict[str, Any] | None = None  # options of semel's sink


def run(report: Report, quick: bool = False) -> None:
    run_plan(report, Plan(sizes=("100 B",), runs=2, share=0.1) if quick else Plan())


def run_plan(report: Report, plan: Plan, show: Callable[[str, Result], None] = lambda name, result: None) -> None:
    with ApacheKafka() as kafka, contextlib.ExitStack() as stack:
        contestants = peers_there(BENCH, {name: CONTESTANTS[name] for name in plan.names}, stack)
        for size in plan.sizes:
            count = int(RECORDS[size] * plan.share)
            source = filled(kafka.bootstrap, size, SIZES[size], count, make=orders, later=in_hour)
            part = filled(kafka.bootstrap, size, SIZES[size], count // SLOW_SHARE, make=orders, later=in_hour)
            for work in plan.works:
                job = Job(kafka.bootstrap, source, BATCHES, work=work, sink=plan.sink)
                _measure(report, job, part, contestants, plan, show)


def _measure(
    report: Report,
    job: Job,
    part: Input,  # for those that are much slower
    contestants: Mapping[str, Contestant],
    plan: Plan,
    show: Callable[[str, Result], None],
) -> None:
    written: dict[str, tuple[int, int]] = {}
    started: dict[str, list[float]] = {}  # rates without the start of a query

    def once(name: str) -> float:
        source = part if name == "quix" else job.source
        result, written[name] = _run(contestants[name], job._replace(source=source))
        if not written[name][0]:
            raise RuntimeError(f"{job.work}: {contestants[name].name} wrote nothing")
        show(name, result)
        started.setdefault(contestants[name].name, []).append(source.record_count / result.running_seconds)
        return source.record_count / result.seconds

    values = interleave({name: lambda name=name: once(name) for name in contestants}, runs=plan.runs)  # type: ignore[misc]
    _compare_written(job, written)
    by_title = {contestants[name].name: found for name, found in values.items()}
    case = f"{job.work}, {job.source.size}"
    peers = [title for title in by_title if title not in SUBJECTS]
    for subject in (title for title in SUBJECTS if title in by_title):
        queries = {title: by_title[title] for title in (subject, *peers) if title not in JOINING}
        where = case if subject == "semel" else f"{case}: {subject}"
        compare(report, bench=BENCH, case=where, unit=UNIT, values=queries, subject=subject)
        rates = {title: started[title][-plan.runs :] for title in (subject, *JOINING) if title in by_title}
        if len(rates) > 1:
            compare(report, bench=BENCH, case=f"{where}, started", unit=UNIT, values=rates, subject=subject)


def _run(contestant: Contestant, job: Job) -> tuple[Result, tuple[int, int]]:
    """Into fresh topics, which are deleted afterwards; (records, bytes) that were written."""
    count = TARGETS if job.work == "several topics" else 1
    targets = [fresh_topic(job.bootstrap, "bench-out") for _ in range(count)]
    try:
        result = contestant.copy(job._replace(targets=tuple(targets) if count > 1 else ()), targets[0])
        found = [count_committed(job.bootstrap, target) for target in targets]
        return result, (sum(records for records, _ in found), sum(size for _, size in found))
    finally:
        for target in targets:
            removed(job.bootstrap, target)


def _compare_written(job: Job, written: Mapping[str, tuple[int, int]]) -> None:
    """All Spark programs ran the same query over the same batches."""
    found = {name: what for name, what in written.items() if name not in ("streams", "quix")}
    if len(set(found.values())) > 1:
        raise RuntimeError(f"{job.work}: not everybody wrote the same (records, bytes of values): {found}")


def main() -> None:
    """Some of it: python -m benchmarks.jobs --sizes "100 B" --works "static join" --names semel,spark --runs 3"""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--works", default=",".join(WORKS))
    parser.add_argument("--names", default=",".join(CONTESTANTS))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--share", type=float, default=1.0, help="of the records")
    parser.add_argument("--sink", action="append", default=[], metavar="NAME=VALUE", help="an option of semel's sink")
    parser.add_argument("--show", action="store_true", help="also: processor seconds and batch times of every run")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    collected = Collected(args.json)
    sink = dict(option.split("=", 1) for option in args.sink)
    plan = Plan(args.sizes.split(","), args.works.split(","), args.names.split(","), args.runs, args.share, sink)
    run_plan(collected, plan, _show if args.show else lambda name, result: None)
    if not args.json:
        print(table(collected.rows))


def _show(name: str, result: Result) -> None:
    details = result.details or {}
    cpu = ", ".join(f"{kind} {seconds:.1f}" for kind, seconds in sorted(details.get("cpu_seconds", {}).items()))
    batches = [batch.get("addBatch") for batch in details.get("batches", [])]
    attempts = [report.get("attempts") for report in details.get("reports", [])]
    print(
        f"{name:8} {result.seconds:6.2f} s wall; processor: {cpu}; batches ms {batches}; attempts {attempts}",
        flush=True,
    )


if __name__ == "__main__":
    main()
