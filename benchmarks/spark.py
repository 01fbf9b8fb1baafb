"""Kafka -> Spark -> Kafka on one Apache Kafka node: semel exactly once, beside Spark's own connector and two others.

Everybody copies the same topic of four partitions, with keys, headers on every eighth record, records of varying
length, and aborted transactions in between, on two cores. The value is records per second of wall time, for Spark
programs from the making of a query to its end, in a session that is warm. Beside Kafka Streams and Quix Streams,
which are timed from their first record, semel is timed from its first batch ("started").

    semel             semel's source and sink, rows to the partition of their key
    semel, fast lane  semel.table_pipeline
    Spark's own       format("kafka") on both sides, at-least-once (the newest version whose connector can be had)
    Kafka Streams     exactly_once_v2, two threads, commits every 100 ms
    Quix Streams      exactly-once, one process, commits every second; on a tenth of the records

Afterwards: where semel's time goes, how long a commit takes, and whether a batch costs more when many ran before it or
when the topics are large. `scripts/bench-peers` fetches the peers; those that are missing are skipped, loudly.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from benchmarks.harness import Collected, Report, compare, interleave, table
from benchmarks.spark_contestants import (
    Contestant,
    Job,
    KafkaStreams,
    QuixStreams,
    peers_there,
    run_job,
    semel_fast,
    semel_frame,
    spark_own,
)
from benchmarks.spark_extras import report_commits, report_growth, show_stages
from benchmarks.spark_topics import Input, filled
from semel.local.apache_kafka import ApacheKafka

BENCH = "spark"
UNIT = "records/s"
FRAME, FAST = "semel", "semel, fast lane"
SIZES = {"100 B": 100, "1 KB": 1000}
RECORDS = {"100 B": 3_000_000, "1 KB": 600_000}
BATCHES = (3, 20)
JOINING = {KafkaStreams.name, QuixStreams.name}  # timed from their first record, see `spark_contestants`
SLOW_SHARE = 10  # Quix Streams gets a tenth
CONTESTANTS: dict[str, Callable[[], Contestant]] = {
    "semel": semel_frame,
    "fast": semel_fast,
    "spark": spark_own,
    "streams": KafkaStreams,
    "quix": QuixStreams,
}


class Plan(NamedTuple):
    """What to run. The default is everything."""

    sizes: Sequence[str] = tuple(SIZES)
    batches: Sequence[int] = BATCHES
    names: Sequence[str] = tuple(CONTESTANTS)
    runs: int = 5
    share: float = 1.0  # of the records
    long_batches: int = 120  # of the query that shows whether batches get slower; 0: do not look at anything but speed


def run(report: Report, quick: bool = False) -> None:
    run_plan(report, Plan(runs=2, share=0.1, long_batches=50) if quick else Plan())


def run_plan(report: Report, plan: Plan) -> None:
    with ApacheKafka() as kafka, contextlib.ExitStack() as stack:
        contestants = peers_there(BENCH, {name: CONTESTANTS[name] for name in plan.names}, stack)
        for size in plan.sizes:
            count = int(RECORDS[size] * plan.share)
            whole = filled(kafka.bootstrap, size, SIZES[size], count)
            part = filled(kafka.bootstrap, size, SIZES[size], count // SLOW_SHARE) if "quix" in contestants else whole
            for batches in plan.batches:
                _measure(report, kafka.bootstrap, {"whole": whole, "part": part}, contestants, batches, plan)
            if plan.long_batches:
                show_stages(kafka.bootstrap, whole, plan.batches[0])
        for name in (name for name in ("semel", "fast") if plan.long_batches and name in contestants):
            report_growth(report, kafka.bootstrap, contestants[name], whole, plan.long_batches)


def _measure(
    report: Report,
    bootstrap: str,
    inputs: Mapping[str, Input],
    contestants: Mapping[str, Contestant],
    batches: int,
    plan: Plan,
) -> None:
    """One case, all contestants in turns. Those that know no batches take part in the first case of a size only."""
    unchecked = set(contestants)
    commits_ms: list[float] = []
    running: dict[str, list[float]] = {}  # rates without the start of a query

    def once(name: str) -> float:
        contestant, source = contestants[name], inputs["part" if name == "quix" else "whole"]
        result = run_job(contestant, Job(bootstrap, source, batches), check=name in unchecked)
        unchecked.discard(name)
        commits_ms.extend(r["commit_ms"] for r in (result.details or {}).get("reports", []))
        running.setdefault(contestant.name, []).append(source.record_count / result.running_seconds)
        return source.record_count / result.seconds

    taking_part = [n for n in contestants if n in ("semel", "fast", "spark") or batches == plan.batches[0]]
    values = interleave({name: lambda name=name: once(name) for name in taking_part}, runs=plan.runs)  # type: ignore[misc]
    by_title = {contestants[name].name: found for name, found in values.items()}
    case = f"{inputs['whole'].size}, {batches} batches"
    batch_peers = by_title.keys() - {FRAME, FAST} - JOINING
    for subject in (title for title in (FRAME, FAST) if title in by_title):
        for label, found, peers in (("", by_title, batch_peers), (", started", running, JOINING)):
            rates = {title: found[title][-plan.runs :] for title in by_title if title == subject or title in peers}
            compare(report, bench=BENCH, case=f"{case}: {subject}{label}", unit=UNIT, values=rates, subject=subject)
    if commits_ms:
        report_commits(report, case, commits_ms)


def main() -> None:
    """Some of it: python -m benchmarks.spark --sizes "100 B" --batches 3 --names semel,spark --runs 3"""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--names", default=",".join(CONTESTANTS))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--share", type=float, default=1.0, help="of the records")
    parser.add_argument("--long", type=int, default=0, help="also: stages, and a query of so many batches")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    collected = Collected(args.json)
    batches = [int(number) for number in args.batches.split(",")]
    plan = Plan(args.sizes.split(","), batches, args.names.split(","), args.runs, args.share, args.long)
    run_plan(collected, plan)
    if not args.json:
        print(table(collected.rows))


if __name__ == "__main__":
    main()
