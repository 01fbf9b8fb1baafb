"""Kafka -> Spark -> PostgreSQL: semel's sink, exactly once, beside Spark's JDBC writer, at-least-once.

Both read the same topic by semel's source, in the same warm session on two cores, parse JSON into five columns and fill
an empty table with a primary key, in three micro-batches, on a server with fsync. The JDBC writer has what makes it
fast: reWriteBatchedInserts, batchsize 10,000, one connection per task. The value is rows per second of wall time, from
the making of the query to its end.

    semel, fast lane            semel.table_pipeline: JSON is parsed by the task that fetches it, in Python
    JDBC, append                Spark's writer, one transaction per task: a batch that runs again is there twice
    JDBC to staging, then move  the same into a table of its own, and one INSERT ... SELECT; still at-least-once

Then what it costs to write the rows to the table and as records to a topic with one decision, beside each alone: on a
broker that keeps a prepared transaction (KIP-939), and on one that may abort it, where the database keeps a copy.

`scripts/bench-peers` fetches the driver's jar.
"""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

import semel
from benchmarks.harness import Report, compare, interleave, rate
from semel.local.brokers import SemelBroker
from semel.local.checkout import ROOT
from semel.local.postgres import PostgresServer

BENCH = "postgres"
TOPIC, PARTITIONS, BATCHES = "payments", 4, 3
ROWS, QUICK_ROWS = 1_000_000, 120_000
JARS = ROOT / ".cache" / "bench-peers" / "postgresql-jars"
COLUMNS = "id bigint PRIMARY KEY, account text, amount numeric(12, 2), at timestamptz, note text"
PARSED = "id BIGINT, account STRING, amount DECIMAL(12,2), at TIMESTAMP, note STRING"
JDBC_OPTIONS = {"driver": "org.postgresql.Driver", "batchsize": "10000", "isolationLevel": "READ_COMMITTED"}
FRAME, FAST = "semel", "semel, fast lane"
PREPARED, COPIED = "semel, prepared", "semel, with a copy"
_numbers = itertools.count(1)


class Brokers(NamedTuple):
    """Addresses, by whether the broker keeps a prepared transaction (KIP-939)."""

    plain: str
    two_phase: str


class JarMissing(Exception):
    """PostgreSQL's JDBC driver is not on this machine."""


def run(report: Report, quick: bool = False) -> None:
    jars = sorted(JARS.glob("*.jar"))
    if not jars:
        raise JarMissing("PostgreSQL's JDBC driver is missing; scripts/bench-peers fetches it")
    rows = QUICK_ROWS if quick else ROWS
    folder = Path(tempfile.mkdtemp(prefix="semel-bench-"))
    two_phase = ("--set=transaction.two.phase.commit.enable=true",)
    try:
        with (
            SemelBroker(folder / "broker") as broker,
            SemelBroker(folder / "two-phase", *two_phase) as preparing,
            PostgresServer(durable=True) as server,
        ):
            brokers = Brokers(broker.bootstrap, preparing.bootstrap)
            for bootstrap in brokers:
                _fill(bootstrap, rows)
            _measure(report, brokers, server, jars, folder, rows, 2 if quick else 5)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _fill(bootstrap: str, rows: int) -> None:
    import pyarrow as pa

    with semel.Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.create_topic(TOPIC, PARTITIONS)
    with semel.Producer({"bootstrap.servers": bootstrap}) as producer:
        for start in range(0, rows, 20_000):
            numbers = range(start, min(rows, start + 20_000))
            keys = pa.array([b"%d" % n for n in numbers])
            producer.send_table(TOPIC, pa.table({"key": keys, "value": pa.array([_value(n) for n in numbers])}))
        producer.flush()


def _value(number: int) -> bytes:
    row = {
        "id": number,
        "account": f"account-{number % 10_000}",
        "amount": number % 100_000 / 100,
        "at": f"2024-01-01T00:{number % 60:02}:00Z",
        "note": "x" * (number % 40),
    }
    return json.dumps(row).encode()


def _measure(
    report: Report, brokers: Brokers, server: PostgresServer, jars: list[Path], folder: Path, rows: int, runs: int
) -> None:
    spark = semel.spark_session(
        "bench",
        master="local[2]",
        spark__ui__enabled="false",
        spark__jars=",".join(map(str, jars)),
        spark__driver__memory="2g",
    )
    spark.sparkContext.setLogLevel("ERROR")
    dsn = server.create_database()

    def to_table(table: str) -> Any:
        return semel.postgres_sink(dsn, application_id=table, table=table)

    # Name -> where its topics are, and what starts its query.
    writers: dict[str, tuple[str, Callable[[str], Any]]] = {
        FRAME: (brokers.plain, lambda table: _frame(spark, brokers.plain, rows).foreachBatch(to_table(table))),
        FAST: (brokers.plain, lambda table: _fast(spark, brokers.plain, rows, to_table(table))),
        "JDBC, append": (
            brokers.plain,
            lambda table: _frame(spark, brokers.plain, rows).foreachBatch(_jdbc(server, dsn, table)),
        ),
        "JDBC to staging, then move": (
            brokers.plain,
            lambda table: _frame(spark, brokers.plain, rows).foreachBatch(_jdbc_staged(server, dsn, table)),
        ),
    }
    halves: dict[str, tuple[str, Callable[[str], Any]]] = {
        PREPARED: (
            brokers.two_phase,
            lambda table: _frame(spark, brokers.two_phase, rows).foreachBatch(_both(brokers.two_phase, dsn, table)),
        ),
        COPIED: (
            brokers.plain,
            lambda table: _frame(spark, brokers.plain, rows).foreachBatch(_both(brokers.plain, dsn, table)),
        ),
        "the table alone": writers[FRAME],
        "the topic alone": (
            brokers.plain,
            lambda table: _frame(spark, brokers.plain, rows).foreachBatch(_topic(brokers.plain, table)),
        ),
    }

    def once(name: str, bootstrap: str, started: Callable[[str], Any]) -> float:
        table = f"t{next(_numbers)}"
        _execute(dsn, f"CREATE TABLE {table} ({COLUMNS})")
        with semel.Admin(bootstrap_servers=bootstrap) as admin:
            admin.create_topic(table, PARTITIONS)
        copy = rate(lambda: _run(started(table), folder / table), rows)
        [(found,)] = _execute(dsn, f"SELECT count(*) FROM {table}")
        assert found == (0 if name == "the topic alone" else rows), f"{table} has {found} rows of {rows}"
        _execute(dsn, f"DROP TABLE {table}")
        _execute(dsn, "CHECKPOINT")  # what one leaves to be written is not charged to the next
        with semel.Admin(bootstrap_servers=bootstrap) as admin:
            admin.delete_topics(table)
        return copy

    for case, contestants, subjects in (
        ("", writers, (FRAME, FAST)),
        (", table and topic", halves, (PREPARED, COPIED)),
    ):
        values = interleave({name: partial(once, name, *made) for name, made in contestants.items()}, runs)
        peers = {name: found for name, found in values.items() if name not in subjects}
        for subject in subjects:
            label = f"{rows:,} rows, {BATCHES} batches{case}: {subject}"
            taking_part = {subject: values[subject], **peers}
            compare(report, bench=BENCH, case=label, unit="rows/s", values=taking_part, subject=subject)
    spark.stop()


def _records(df: Any) -> Any:
    return df.selectExpr("account AS key", "to_json(struct(*)) AS value")


def _both(bootstrap: str, dsn: str, name: str) -> Any:
    topics = semel.SinkTopics(bootstrap, topic=name, records=_records)
    return semel.postgres_sink(dsn, application_id=name, table=name, topics=topics)


def _topic(bootstrap: str, name: str) -> Callable[[Any, int], None]:
    sink = semel.sink(bootstrap, application_id=name, topic=name)
    return lambda df, batch_id: sink(_records(df), batch_id)


def _source(bootstrap: str, rows: int) -> dict[str, str]:
    return {
        "kafka.bootstrap.servers": bootstrap,
        "subscribe": TOPIC,
        "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": str(rows // BATCHES + 4 * PARTITIONS),
    }


def _frame(spark: Any, bootstrap: str, rows: int) -> Any:
    from pyspark.sql import functions as f

    read = spark.readStream.format("semel").options(**_source(bootstrap, rows), columns="value").load()
    return read.select(f.from_json(read["value"].cast("string"), PARSED).alias("row")).select("row.*").writeStream


def _fast(spark: Any, bootstrap: str, rows: int, sink: Any) -> Any:
    return semel.table_pipeline(spark, source=_source(bootstrap, rows), sink=sink, function=parsed)


def parsed(table: Any) -> Any:
    """Records as rows, each value read by itself."""
    import pyarrow as pa

    read = [_decoder().decode(value) for value in table["value"].to_pylist()]
    columns = {
        "id": pa.int64(),
        "account": pa.string(),
        "amount": pa.decimal128(12, 2),
        "at": pa.timestamp("us", "UTC"),
        "note": pa.string(),
    }
    return pa.table({name: pa.array([getattr(row, name) for row in read], kind) for name, kind in columns.items()})


class Payment(msgspec.Struct, gc=False):
    id: int
    account: str
    amount: Decimal
    at: datetime
    note: str


@cache
def _decoder() -> msgspec.json.Decoder[Payment]:
    return msgspec.json.Decoder(Payment)


def _run(writer: Any, checkpoint: Path) -> None:
    writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start().awaitTermination()


def _append(server: PostgresServer, dsn: str, table: str, df: Any) -> None:
    url = f"jdbc:postgresql://{server.host}:{server.port}/{dsn.rpartition('/')[2]}?reWriteBatchedInserts=true"
    writer = df.write.format("jdbc").options(**JDBC_OPTIONS, url=url, dbtable=table, user="semel")
    writer.option("password", server.password).mode("append").save()


def _jdbc(server: PostgresServer, dsn: str, table: str) -> Callable[[Any, int], None]:
    return lambda df, _: _append(server, dsn, table, df)


def _jdbc_staged(server: PostgresServer, dsn: str, table: str) -> Callable[[Any, int], None]:
    def write(df: Any, _: int) -> None:
        _execute(dsn, f"CREATE UNLOGGED TABLE {table}_new (LIKE {table})")
        _append(server, dsn, f"{table}_new", df)
        _execute(dsn, f"INSERT INTO {table} SELECT * FROM {table}_new")
        _execute(dsn, f"DROP TABLE {table}_new")

    return write


def _execute(dsn: str, statement: str) -> list[Any]:
    import psycopg

    with psycopg.connect(dsn, autocommit=True) as connection:
        cursor = connection.execute(statement)
        return cursor.fetchall() if cursor.description else []
