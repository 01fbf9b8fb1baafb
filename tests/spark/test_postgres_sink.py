"""The PostgreSQL sink in a query of an ordinary user: JSON files, every column type, bad rows, and what Spark shows."""

from __future__ import annotations

import contextlib
import io
import json
import logging
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pytest

import semel
from tests.support.sinks import execute

TYPED = (
    "id bigint PRIMARY KEY, who text, amount numeric(12, 2), at timestamptz, day date, ok boolean, raw bytea, "
    "tags text[], doc jsonb, code uuid, ratio double precision, small smallint, big numeric"
)
SELECTED = [
    "id",
    "who",
    "cast(id * 1.25 AS DECIMAL(10,2)) AS amount",
    "timestamp_seconds(id) AS at",
    "date'2024-02-29' AS day",
    "id % 2 = 0 AS ok",
    "cast(who AS BINARY) AS raw",
    "array(who, NULL) AS tags",
    "to_json(struct(id)) AS doc",
    "'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11' AS code",
    "cast(id AS DOUBLE) / 4 AS ratio",
    "cast(id AS SMALLINT) AS small",
    "cast(id AS DECIMAL(38,5)) AS big",
]


class Query:
    """A folder of JSON files that a query copies into table `out`."""

    def __init__(self, session: Any, dsn: str, folder: Path) -> None:
        self.session, self.dsn, self.folder = session, dsn, folder
        (folder / "in").mkdir()

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        return execute(self.dsn, statement)

    def add(self, name: str, *rows: dict[str, Any]) -> None:
        (self.folder / "in" / name).write_text("\n".join(json.dumps(row) for row in rows))

    def run(self, columns: list[str], change: Callable[[Any], Any] = lambda rows: rows, **options: Any) -> Any:
        """To its end; returns the sink."""
        sink = semel.postgres_sink(self.dsn, application_id="app", table="out", **options)
        read = self.session.readStream.schema("id BIGINT, who STRING, op STRING").option("maxFilesPerTrigger", 1)
        rows = change(read.json(str(self.folder / "in"))).selectExpr(*columns)
        written = rows.writeStream.foreachBatch(sink).option("checkpointLocation", str(self.folder / "checkpoint"))
        self.query = written.trigger(availableNow=True).start()
        self.query.awaitTermination()
        return sink


@pytest.fixture
def query(session: Any, dsn: str, tmp_path: Path) -> Query:
    return Query(session, dsn, tmp_path)


def test_every_type_files_as_source_and_no_password_in_what_spark_shows(
    query: Query, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    query.sql(f"CREATE TABLE out ({TYPED})")
    query.add("1.json", {"id": 1, "who": "a"}, {"id": 2})
    query.add("2.json", {"id": 3, "who": "c"})
    sink = query.run(SELECTED)
    assert [report.rows for report in sink.reports] == [2, 1]
    assert query.sql("SELECT * FROM out WHERE id = 1")[0] == (
        1,
        "a",
        Decimal("1.25"),
        datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC),
        date(2024, 2, 29),
        False,
        b"a",
        ["a", None],
        {"id": 1},
        __import__("uuid").UUID("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
        0.25,
        1,
        Decimal("1.00000"),
    )
    assert query.sql("SELECT who, raw, tags FROM out WHERE id = 2") == [(None, None, [None, None])]

    password = psycopg.conninfo.conninfo_to_dict(query.dsn)["password"]
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        query.query.explain(extended=True)
    executions = query.session._jsparkSession.sharedState().statusStore().executionsList()
    plans = [executions.apply(i).physicalPlanDescription() for i in range(executions.size())]
    assert any("MapInArrow" in plan for plan in plans), "the job that writes is among what the UI shows"
    texts = [shown.getvalue(), *plans, caplog.text, repr(sink.options), str(query.query.lastProgress)]
    assert not [text for text in texts if str(password) in text]


def test_bad_rows_are_set_aside_in_the_same_transaction_and_stop_the_query_otherwise(query: Query) -> None:
    query.sql("CREATE TABLE out (id bigint PRIMARY KEY, who varchar(3) NOT NULL)")
    query.add("1.json", {"id": 1, "who": "a"}, {"id": 2, "who": "too long"}, {"id": 3}, {"id": 4, "who": "n\0l"})
    with pytest.raises(Exception, match="which PostgreSQL cannot hold"):
        query.run(["id", "who"])
    assert query.sql("SELECT * FROM out") == []
    sink = query.run(["id", "who"], on_error="dead_letter")
    assert [(report.rows, report.dead_letters) for report in sink.reports] == [(4, 3)]
    assert query.sql("SELECT * FROM out") == [(1, "a")]
    dead = query.sql("SELECT row_data->>'id', sqlstate, reason FROM semel.dead_rows ORDER BY 1")
    assert [(number, state) for number, state, _ in dead] == [("2", "22001"), ("3", "23502"), ("4", "22000")]
    assert "NUL" in dead[2][2]


def test_a_mismatch_is_found_on_the_driver_before_any_task_and_a_change_stream_is_applied(query: Query) -> None:
    query.sql("CREATE TABLE out (id bigint PRIMARY KEY, who text)")
    query.add("1.json", *[{"id": n, "who": str(n), "op": "c"} for n in range(4)])
    with pytest.raises(Exception, match="'who' is binary in the rows and text in the table; cast it to a string"):
        query.run(["id", "cast(who AS BINARY) AS who"])
    assert query.sql("SELECT * FROM semel.staging") == [], "no task has started"
    query.add("2.json", {"id": 1, "op": "d"}, {"id": 2, "who": "new", "op": "u"}, {"id": 9, "who": "9", "op": "c"})
    # one batch of both files: the rows of the second are later
    columns = ["id", "who", "op", "cast(regexp_extract(input_file_name(), '(\\\\d+).json', 1) AS INT) AS n"]
    query.run(columns, mode="upsert", operation_column="op", order_by=["n"])
    assert query.sql("SELECT * FROM out ORDER BY id") == [(0, "0"), (2, "new"), (3, "3"), (9, "9")]
