"""What it costs to write topics and PostgreSQL in one decision, beside each half alone, in the same loop.

    semel bench decisions

    rows       `semel.process` into a table: rows and offsets in one database transaction
    records    `semel.process` into a topic: records and offsets in one transaction of Kafka
    both       rows and records in one decision

On semel's broker with two-phase commit, and without, where the database keeps a copy of the output. Both sides write to
the disk (fsync=commit; the database as it is installed). Time runs from the first record to the end of the loop.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psycopg

import semel
from benchmarks.harness import Report, compare, interleave
from semel.local.brokers import Broker
from semel.local.postgres import PostgresServer

BENCH = "decisions"
RECORDS = 100_000
VALUE_BYTES = 100
PARTITIONS = 2
ROWS, RECORDS_ONLY, BOTH = "rows alone", "records alone", "both"
_numbers = itertools.count(1)


def run(report: Report, quick: bool = False) -> None:
    for two_phase in (True, False):
        settings = {"transaction.two.phase.commit.enable": two_phase, "group.initial.rebalance.delay.ms": 0}
        with Broker(settings=settings) as broker, PostgresServer(durable=True) as server:
            source = _filled(broker.bootstrap, 10_000 if quick else RECORDS)
            values = interleave(_contestants(broker.bootstrap, server, source), runs=2 if quick else 5)
        case = "two-phase commit" if two_phase else "with a copy"
        compare(report, bench=BENCH, case=case, unit="records/s", values=values, subject=BOTH)


def _contestants(bootstrap: str, server: PostgresServer, source: tuple[str, int]) -> dict[str, Callable[[], float]]:
    names = (BOTH, ROWS, RECORDS_ONLY)
    return {name: partial(_turn, name, bootstrap, server, source) for name in names}


def _turn(name: str, bootstrap: str, server: PostgresServer, source: tuple[str, int]) -> float:
    return _rate(name, bootstrap, server.create_database(), source)


def _filled(bootstrap: str, records: int) -> tuple[str, int]:
    with semel.Admin(bootstrap_servers=bootstrap) as admin:
        admin.create_topic("source", partitions=PARTITIONS)
    with semel.Producer(bootstrap_servers=bootstrap) as producer:
        for number in range(records):
            producer.send("source", b"%0*d" % (VALUE_BYTES, number), partition=number % PARTITIONS)
    return "source", records


def _rate(name: str, bootstrap: str, dsn: str, source: tuple[str, int]) -> float:
    topic, records = source
    number = next(_numbers)
    output = f"output-{number}"
    with semel.Admin(bootstrap_servers=bootstrap) as admin:
        admin.create_topic(output, partitions=PARTITIONS)
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE entries (number bigint, value bytea)")
    began_s: list[float] = []

    def timed(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(record: Any) -> Any:
            if not began_s:
                began_s.append(time.perf_counter())
            return function(record)

        return call

    def row(record: Any) -> Any:
        return {"number": record.offset, "value": record.value}

    def outgoing(record: Any) -> Any:
        return semel.Output(record.value, topic=output)

    functions: dict[str, tuple[Any, Callable[[Any], Any]]] = {
        ROWS: (semel.Postgres(dsn, table="entries"), row),
        RECORDS_ONLY: (output, outgoing),
        BOTH: (semel.Postgres(dsn, table="entries", with_topics=True), lambda record: [row(record), outgoing(record)]),
    }
    sink, function = functions[name]
    stats = semel.process(
        topic, sink, timed(function), application_id=f"app-{number}", bootstrap_servers=bootstrap, stop_at_end=True
    )
    seconds = time.perf_counter() - began_s[0]
    if stats.records_in != records:
        raise AssertionError(f"{name} read {stats.records_in} of {records} records")
    return records / seconds
