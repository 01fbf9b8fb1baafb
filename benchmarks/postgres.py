"""Kafka -> Spark -> PostgreSQL: semel's sink, exactly once, beside Spark's JDBC writer, at-least-once.

Both read the same topic by semel's source, in the same warm session on two cores, parse JSON into five columns and fill
an empty table with a primary key, in three micro-batches, on a server with fsync. The JDBC writer has what makes it
fast: reWriteBatchedInserts, batchsize 10,000, one connection per task. The value is rows per second of wall time, from
the making of the query to its end.

    JDBC, append                Spark's writer, one transaction per task: a batch that runs again is there twice
    JDBC to staging, then move  the same into a table of its own, and one INSERT ... SELECT; still at-least-once

Then what it costs to write the rows to the table and as records to a topic with one decision, beside each alone.

`scripts/bench-peers` fetches the driver's jar.
"""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

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
_numbers = itertools.count(1)


class JarMissing(Exception):
    """PostgreSQL's JDBC driver is not on this machine."""


def run(report: Report, quick: bool = False) -> None:
    jars = sorted(JARS.glob("*.jar"))
    if not jars:
        raise JarMissing("PostgreSQL's JDBC driver is missing; scripts/bench-peers fetches it")
    rows = QUICK_ROWS if quick else ROWS
    folder = Path(tempfile.mkdtemp(prefix="semel-bench-"))
    try:
        with SemelBroker(folder / "broker") as broker, PostgresServer(durable=True) as server:
            _fill(broker.bootstrap, rows)
            _measure(report, broker.bootstrap, server, jars, folder, rows, 2 if quick else 5)
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
    report: Report, bootstrap: str, server: PostgresServer, jars: list[Path], folder: Path, rows: int, runs: int
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
    writers: dict[str, Callable[[str], Any]] = {
        "semel": lambda table: semel.postgres_sink(dsn, application_id=table, table=table),
        "JDBC, append": lambda table: _jdbc(server, dsn, table),
        "JDBC to staging, then move": lambda table: _jdbc_staged(server, dsn, table),
    }
    halves: dict[str, Callable[[str], Any]] = {
        "semel": lambda table: _both(bootstrap, dsn, table),
        "the table alone": writers["semel"],
        "the topic alone": lambda table: _topic(bootstrap, table),
    }

    def once(name: str, made: Callable[[str], Any]) -> float:
        table = f"t{next(_numbers)}"
        _execute(dsn, f"CREATE TABLE {table} ({COLUMNS})")
        with semel.Admin(bootstrap_servers=bootstrap) as admin:
            admin.create_topic(table, PARTITIONS)
        copy = rate(lambda: _copy(spark, bootstrap, made(table), folder / table, rows), rows)
        [(found,)] = _execute(dsn, f"SELECT count(*) FROM {table}")
        assert found == (0 if name == "the topic alone" else rows), f"{table} has {found} rows of {rows}"
        _execute(dsn, f"DROP TABLE {table}")
        _execute(dsn, "CHECKPOINT")  # what one leaves to be written is not charged to the next
        with semel.Admin(bootstrap_servers=bootstrap) as admin:
            admin.delete_topics(table)
        return copy

    for case, contestants in (("", writers), (", table and topic", halves)):
        values = interleave({name: partial(once, name, made) for name, made in contestants.items()}, runs)
        compare(report, bench=BENCH, case=f"{rows:,} rows, {BATCHES} batches{case}", unit="rows/s", values=values)
    spark.stop()


def _records(df: Any) -> Any:
    return df.selectExpr("account AS key", "to_json(struct(*)) AS value")


def _both(bootstrap: str, dsn: str, name: str) -> Any:
    topics = semel.SinkTopics(bootstrap, topic=name, records=_records)
    return semel.postgres_sink(dsn, application_id=name, table=name, topics=topics)


def _topic(bootstrap: str, name: str) -> Callable[[Any, int], None]:
    sink = semel.sink(bootstrap, application_id=name, topic=name)
    return lambda df, batch_id: sink(_records(df), batch_id)


def _copy(spark: Any, bootstrap: str, write: Any, checkpoint: Path, rows: int) -> None:
    from pyspark.sql import functions as f

    options = {
        "kafka.bootstrap.servers": bootstrap,
        "subscribe": TOPIC,
        "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": str(rows // BATCHES + 4 * PARTITIONS),
        "columns": "value",
    }
    read = spark.readStream.format("semel").options(**options).load()
    parsed = read.select(f.from_json(read["value"].cast("string"), PARSED).alias("row")).select("row.*")
    writer = parsed.writeStream.foreachBatch(write).option("checkpointLocation", str(checkpoint))
    writer.trigger(availableNow=True).start().awaitTermination()


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
