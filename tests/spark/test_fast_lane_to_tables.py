"""The fast lane to PostgreSQL: Arrow tables of the user's function become rows, in one transaction for each batch."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import semel
from semel.spark.options import OptionError
from tests.spark.queries import Query
from tests.support.broker import Cluster

ROWS = 300
pytestmark = [pytest.mark.timeout(300), pytest.mark.parametrize("cluster", ["semel"], indirect=True)]
OUT = "CREATE TABLE out (id bigint PRIMARY KEY, name varchar(4) NOT NULL, at timestamptz, made text DEFAULT 'here')"


def run(session: Any, query: Query, dsn: str, function: Callable[[pa.Table], Any], **options: Any) -> Any:
    """To its end; returns the sink."""
    sink = semel.postgres_sink(dsn, application_id=query.application_id, table="out", **options)
    source = {
        "kafka.bootstrap.servers": query.bootstrap,
        "subscribe": query.source,
        "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": 100,
    }
    writer = semel.table_pipeline(session, source=source, sink=sink, function=function)
    running = writer.option("checkpointLocation", str(query.checkpoint)).trigger(availableNow=True).start()
    try:
        assert running.awaitTermination(120)
    finally:
        sink.close()
    return sink


def sql(dsn: str, statement: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn) as connection:
        cursor = connection.execute(statement)
        return cursor.fetchall() if cursor.description else []


def numbered(table: pa.Table) -> pa.Table:
    texts = pc.cast(table["value"], pa.string())
    times = pc.cast(table["timestamp"], pa.timestamp("ms", "UTC"))
    return pa.table({"id": pc.cast(texts, pa.uint32()), "name": texts.dictionary_encode(), "at": times})


def last_digits(table: pa.Table) -> pa.Table:
    """Several rows of one key."""
    made = numbered(table)
    digits = [number % 10 for number in made["id"].to_pylist()]
    return made.set_column(0, "id", pa.array(digits)).append_column("offset", table["offset"])


def test_every_record_is_a_row_once_although_a_worker_dies(
    session: Any, cluster: Cluster, tmp_path: Path, dsn: str
) -> None:
    query = Query(cluster, tmp_path, "fast", ROWS)
    sql(dsn, OUT)

    def dies_once(table: pa.Table) -> pa.Table:
        """The first worker with records of the second batch dies."""
        made = numbered(table)
        if pc.max(made["id"]).as_py() > ROWS // 2:
            try:
                (tmp_path / "died").mkdir()
            except FileExistsError:
                return made
            os.kill(os.getpid(), signal.SIGKILL)
        return made

    sink = run(session, query, dsn, dies_once)
    assert (tmp_path / "died").exists()
    assert max(report.attempts for report in sink.reports) == 2
    assert sum(report.rows for report in sink.reports) == ROWS
    query.fill(50)
    run(session, query, dsn, last_digits, mode="upsert", order_by="offset")  # goes on where the table ends
    found = sql(dsn, "SELECT id, name, made, at IS NOT NULL FROM out ORDER BY id")
    kept = [(n, str(n), "here", True) for n in range(10, ROWS)]
    assert found == [(digit, str(ROWS + 40 + digit), "here", True) for digit in range(10)] + kept
    assert sql(dsn, "SELECT * FROM semel.staging") == []


def with_bad_rows(table: pa.Table) -> pa.Table:
    """Of ten records one has a text that is too long, and one that PostgreSQL cannot hold."""
    made = numbered(table)
    names = {3: "too long", 7: "n\0l"}
    texts = [names.get(number % 10, str(number)) for number in made["id"].to_pylist()]
    return made.set_column(1, "name", pa.array(texts))


@pytest.mark.full
def test_bad_rows_and_functions_stop_the_query_or_are_set_aside(
    session: Any, cluster: Cluster, tmp_path: Path, dsn: str
) -> None:
    query = Query(cluster, tmp_path, "fast", 20)
    sql(dsn, OUT)
    cases: dict[str, Callable[[pa.Table], Any]] = {
        "holds the character NUL, which PostgreSQL cannot hold": with_bad_rows,
        "'id' is string in the rows and bigint in the table": lambda table: numbered(table).set_column(
            0, "id", pc.cast(table["value"], pa.string())
        ),
        "the rows have a column 'value'": lambda table: table,
        "function .* failed on .*returned list, expected a pyarrow.Table": lambda table: [1],
        "different columns or types": lambda table: (
            numbered(table).append_column("made", pa.array(table["value"].to_pylist(), pa.string()))
            if pc.min(numbered(table)["id"]).as_py() == 0
            else numbered(table)
        ),
    }
    for said, function in cases.items():
        with pytest.raises(Exception, match=said):
            run(session, query, dsn, function, max_attempts=1)
    assert sql(dsn, "SELECT * FROM out") == []
    sink = run(session, query, dsn, with_bad_rows, on_error="dead_letter")
    assert [(report.rows, report.dead_letters) for report in sink.reports] == [(20, 4)]
    assert sql(dsn, "SELECT count(*) FROM out") == [(16,)]
    dead = sql(dsn, "SELECT row_data->>'id', sqlstate FROM semel.dead_rows ORDER BY id")
    assert sorted(dead) == [("13", "22001"), ("17", "22000"), ("3", "22001"), ("7", "22000")]


def test_a_table_needs_a_function_brokers_and_no_partitions(
    session: Any, cluster: Cluster, tmp_path: Path, dsn: str
) -> None:
    query = Query(cluster, tmp_path, "fast")
    sql(dsn, OUT)
    source = {"subscribe": "in", "kafka.bootstrap.servers": cluster.bootstrap}
    topics = semel.SinkTopics(cluster.bootstrap, records=lambda df: df, topic=query.output)
    both = semel.postgres_sink(dsn, application_id=query.application_id, table="out", topics=topics)
    with pytest.raises(OptionError, match="to topics or to a table"):
        semel.table_pipeline(session, source=source, sink=both, function=numbered)
    both.close()
    sink = semel.postgres_sink(dsn, application_id="app", table="out")
    with pytest.raises(OptionError, match="needs a function"):
        semel.table_pipeline(session, source=source, sink=sink)
    with pytest.raises(OptionError, match="by_key"):
        semel.table_pipeline(session, source=source, sink=sink, function=numbered, by_key=True)
    with pytest.raises(OptionError, match=r"lacks kafka\.bootstrap\.servers"):
        semel.table_pipeline(session, source={"subscribe": "in"}, sink=sink, function=numbered)
    sink.close()
