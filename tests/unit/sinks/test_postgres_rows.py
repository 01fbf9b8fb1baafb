"""Rows on their way to PostgreSQL: what is refused is raised, and nothing else is said about it."""

from __future__ import annotations

import logging

import psycopg
import pytest
from psycopg.types.json import Jsonb

from semel.sinks.postgres.errors import RowRefusedError, sorted_error
from semel.sinks.postgres.rows import RowWriter
from semel.sinks.postgres.settings import Postgres, Statement, TableRow

ADD = "INSERT INTO numbers VALUES (%s)"
DOUBLE = "UPDATE numbers SET n = n * 2 WHERE n = %s"
MANY = [Statement(ADD, [number]) for number in (1, 2, 3)]


@pytest.fixture
def connection(dsn: str):  # type: ignore[no-untyped-def]
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE numbers (n integer CHECK (n < 10))")
        connection.commit()
        yield connection


@pytest.mark.parametrize(
    "statements",
    [
        [Statement(ADD, [10])],
        [Statement(ADD, [1]), Statement(ADD, [10])],
        [Statement(ADD, [1]), Statement(DOUBLE, [1]), Statement(ADD, [10]), Statement(DOUBLE, [1])],
        [*MANY, Statement(DOUBLE, [1]), *MANY, Statement(ADD, [10]), *MANY],
        [Statement(ADD, [10]), *MANY * 100],
        [Statement(ADD, [10]), *[Statement(ADD, [1]), Statement(DOUBLE, [1])] * 100],
    ],
)
def test_a_refused_row_is_raised_and_not_logged(
    dsn: str, connection: psycopg.Connection, statements: list[Statement], caplog: pytest.LogCaptureFixture
) -> None:
    """psycopg warned once more for each, of the pipeline that it aborted: hundreds of lines beside dead letters."""
    with caplog.at_level(logging.DEBUG, "psycopg"), pytest.raises(psycopg.errors.CheckViolation):
        RowWriter(Postgres(dsn)).write(connection, statements)
    assert caplog.messages == []
    connection.rollback()
    assert RowWriter(Postgres(dsn)).write(connection, [*MANY, Statement(DOUBLE, [3])]) == 4
    assert connection.execute("SELECT sum(n) FROM numbers").fetchone() == (9,)


def test_a_value_that_cannot_be_sent_leaves_the_connection_usable(dsn: str, connection: psycopg.Connection) -> None:
    with pytest.raises(RowRefusedError, match="a value cannot be sent"):
        RowWriter(Postgres(dsn)).write(connection, [*MANY, Statement(DOUBLE, [Jsonb({"no": object()})])])
    connection.rollback()
    assert connection.execute("SELECT count(*) FROM numbers").fetchone() == (0,)


def test_a_list_is_json_where_the_column_is_and_else_an_array(dsn: str, connection: psycopg.Connection) -> None:
    """An empty one was an object: psycopg knows no columns, and sends {}."""
    connection.execute(
        'CREATE DOMAIN document AS jsonb; CREATE TABLE "a % b" (n int, doc jsonb, old json, own document, tags text[])'
    )
    lists: list[list[object]] = [[], ["x"], [1, None], [[1], []], [{"a": 1}, 2]]
    rows = [
        TableRow({"n": number, "doc": each, "old": each, "own": each, "tags": ["x"][number:]})
        for number, each in enumerate(lists)
    ]
    assert RowWriter(Postgres(dsn, table='"a % b"')).write(connection, rows) == 5
    found = connection.execute('SELECT doc, old, own, tags FROM "a % b" ORDER BY n').fetchall()
    assert found == [(each, each, each, ["x"][number:]) for number, each in enumerate(lists)]


def test_a_column_may_become_json_while_the_program_runs(dsn: str, connection: psycopg.Connection) -> None:
    """Columns were looked up once: an empty list was an object from then on."""
    connection.execute("CREATE TABLE notes (n int, tags text[])")
    writer = RowWriter(Postgres(dsn, table="notes"))
    writer.write(connection, [TableRow({"n": 1, "tags": []})])
    connection.execute("ALTER TABLE notes ALTER tags TYPE jsonb USING to_jsonb(tags)")
    writer.write(connection, [TableRow({"n": 2, "tags": []}), TableRow({"n": 3, "tags": ["x"]})])
    assert connection.execute("SELECT tags FROM notes ORDER BY n").fetchall() == [([],), ([],), (["x"],)]


def test_a_statement_is_one_command(dsn: str, connection: psycopg.Connection) -> None:
    """Alone in its transaction it could be several, also a COMMIT without its offsets; beside others it could not."""
    several = Statement("INSERT INTO numbers VALUES (1); COMMIT; BEGIN")
    for statements in ([several], [several, several]):
        with pytest.raises(psycopg.errors.SyntaxError) as refused:
            RowWriter(Postgres(dsn)).write(connection, statements)
        assert "return several Statements" in str(sorted_error("writing", refused.value))
        connection.rollback()
    assert connection.execute("SELECT count(*) FROM numbers").fetchone() == (0,)
