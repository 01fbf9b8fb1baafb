"""Staging tables: where one attempt at a task puts its rows, until the driver moves them, or nobody wants them.

An attempt creates its table, fills it and enters it into the register in one database transaction, so there is none
without an entry, and what an attempt left that was killed is rolled back. The table is unlogged: after a crash of the
server it is empty, which the counts tell when its rows are moved.

A table is dropped only if the register says whose it is and that the owner is past it (`sweep`), and if it carries the
mark that the register has: never because of its name.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from semel.sinks.postgres.binary_copy import HEADER, TRAILER, encoded
from semel.sinks.postgres.errors import FencedInDatabaseError
from semel.sinks.postgres.tables import Component, filled
from semel.sinks.postgres.target import WrittenColumn

if TYPE_CHECKING:
    from psycopg import Connection
    from psycopg.sql import Composed

STAGING = Component(
    "staging",
    (
        """CREATE TABLE {schema}.staging (
            table_name text PRIMARY KEY,
            owner text NOT NULL,
            generation bigint NOT NULL,
            round bigint NOT NULL,
            mark text NOT NULL,
            created_at timestamptz NOT NULL DEFAULT now()
        );
        CREATE INDEX ON {schema}.staging (owner, generation, round)""",
    ),
)
REASON = "semel_reason"  # a column of staging tables: why a row cannot be written


class StagingRound(NamedTuple):
    """The rounds of one owner: each attempt at a batch is one. Sent to tasks."""

    schema: str
    owner: str
    generation: int
    round: int

    def table_of(self, attempt: int) -> str:
        """Told apart by the register alone; the name is for people."""
        owner = hashlib.sha256(self.owner.encode()).hexdigest()[:12]
        return f"stage_{owner}_{self.generation}_{self.round}_{attempt}"


class Staged(NamedTuple):
    table: str
    rows: int


def fill(
    connection: Connection[Any],
    stage: StagingRound,
    attempt: int,
    columns: Sequence[WrittenColumn],
    batches: Iterable[Any],
    *,
    with_reasons: bool = False,
) -> Staged:
    """Writes Arrow batches, whose columns are in this order, into a new staging table. The caller commits."""
    table, mark = stage.table_of(attempt), f"semel staging {uuid.uuid4()}"
    connection.execute("SET LOCAL client_encoding TO 'UTF8'")  # of the texts that follow, whatever the database has
    _refuse_fenced(connection, stage)
    connection.execute(_create(stage.schema, table, columns, with_reasons))
    connection.execute(filled("COMMENT ON TABLE {schema}.{table} IS {mark}", stage.schema, **_names(table, mark)))
    connection.execute(
        filled("INSERT INTO {schema}.staging VALUES (%s, %s, %s, %s, %s)", stage.schema),
        [table, stage.owner, stage.generation, stage.round, mark],
    )
    rows = 0
    with connection.cursor() as cursor, cursor.copy(_copy(stage.schema, table)) as copy:
        copy.write(HEADER)
        for batch in batches:
            rows += batch.num_rows
            for piece in encoded(batch):
                copy.write(piece)
        copy.write(TRAILER)
    return Staged(table, rows)


def _refuse_fenced(connection: Connection[Any], stage: StagingRound) -> None:
    """No protection, which is where rows are moved: it spares the work."""
    row = connection.execute(
        filled("SELECT generation FROM {schema}.owners WHERE name = %s", stage.schema), [stage.owner]
    ).fetchone()
    if row is None or row[0] != stage.generation:
        raise FencedInDatabaseError(
            f"{stage.owner!r} belongs to generation {None if row is None else row[0]} now, this task has generation "
            f"{stage.generation}: another driver took over"
        )


def _create(schema: str, table: str, columns: Sequence[WrittenColumn], with_reasons: bool) -> Composed:
    from psycopg.sql import SQL, Identifier

    texts = [SQL("{} {}").format(Identifier(column.name), SQL(column.wire.name)) for column in columns]
    if with_reasons:
        texts.append(SQL("{} text").format(Identifier(REASON)))
    return filled(
        "CREATE UNLOGGED TABLE {schema}.{table} ({columns}) WITH (autovacuum_enabled = off)",
        schema,
        table=Identifier(table),
        columns=SQL(", ").join(texts),
    )


def _copy(schema: str, table: str) -> Composed:
    return filled("COPY {schema}.{table} FROM STDIN (FORMAT BINARY)", schema, **_names(table))


def _names(table: str, mark: str = "") -> dict[str, Any]:
    from psycopg.sql import Identifier, Literal

    return {"table": Identifier(table), **({"mark": Literal(mark)} if mark else {})}


def drop(connection: Connection[Any], schema: str, tables: Sequence[str]) -> None:
    """Drops tables of the caller's own round, in the transaction that moved their rows."""
    from psycopg.sql import SQL, Identifier

    if tables:
        names = SQL(", ").join(Identifier(schema, table) for table in tables)
        connection.execute(SQL("DROP TABLE {}").format(names))
        connection.execute(filled("DELETE FROM {schema}.staging WHERE table_name = ANY(%s)", schema), [list(tables)])


def leftovers(connection: Connection[Any], stage: StagingRound) -> Iterator[tuple[str, str, bool]]:
    """(table, mark, whether it is there and carries the mark) of what attempts left in rounds before this one."""
    statement = filled(
        "SELECT s.table_name, s.mark, coalesce(obj_description(c.oid, 'pg_class') = s.mark, false) "
        "FROM {schema}.staging s LEFT JOIN pg_namespace n ON n.nspname = %s "
        "LEFT JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = s.table_name "
        "WHERE s.owner = %s AND (s.generation, s.round) < (%s, %s) ORDER BY s.table_name",
        stage.schema,
    )
    yield from connection.execute(statement, [stage.schema, stage.owner, stage.generation, stage.round]).fetchall()


def sweep(connection: Connection[Any], stage: StagingRound) -> list[str]:
    """Drops what attempts left in rounds before this one; returns the names. One that is in use (a task that was given
    up and lives on) stays for the next time. The caller holds the owner row, and commits."""
    from psycopg.errors import LockNotAvailable

    dropped = []
    for table, mark, is_ours in leftovers(connection, stage):
        try:
            with connection.transaction():
                if is_ours:
                    names = _names(table)
                    connection.execute(
                        filled("LOCK TABLE {schema}.{table} IN ACCESS EXCLUSIVE MODE NOWAIT", stage.schema, **names)
                    )
                    connection.execute(filled("DROP TABLE {schema}.{table}", stage.schema, **names))
                    dropped.append(table)
                connection.execute(
                    filled("DELETE FROM {schema}.staging WHERE table_name = %s AND mark = %s", stage.schema),
                    [table, mark],
                )
        except LockNotAvailable:
            continue
    return dropped
