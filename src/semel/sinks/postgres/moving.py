"""Rows from staging tables into their table, inside the caller's transaction.

    insert   every row is added
    upsert   a row replaces the one with its key; with an operation column it may also delete it
    delete   rows of the table whose key columns equal those of a row are deleted

A row that breaks a constraint fails the transaction, or becomes a dead letter. To find those, rows are tried a thousand
at a time and, where a thousand fails, one by one; all of that in the server, in time that grows with the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from semel.sinks.postgres.staging import REASON, Staged
from semel.sinks.postgres.tables import Component, filled
from semel.sinks.postgres.target import TargetTable, WrittenColumn

if TYPE_CHECKING:
    from psycopg import Connection
    from psycopg.sql import Composable, Composed

DEAD_ROWS = Component(
    "dead_rows",
    (
        """CREATE TABLE {schema}.dead_rows (
            id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
            application_id text NOT NULL,
            sequence bigint NOT NULL,
            table_name text NOT NULL,
            row_data jsonb NOT NULL,
            sqlstate text NOT NULL,
            constraint_name text,
            reason text NOT NULL,
            created_at timestamptz NOT NULL DEFAULT now()
        );
        CREATE INDEX ON {schema}.dead_rows (application_id, sequence)""",
    ),
)
INSERT, UPSERT, DELETE = "insert", "upsert", "delete"
MODES = (INSERT, UPSERT, DELETE)
DELETES = ("d", "delete")
UPSERTS = ("c", "create", "i", "insert", "r", "read", "u", "update", "upsert")
TRIED_AT_ONCE = 1_000
CANDIDATES, NUMBER = "semel_candidates", "semel_number"
# What says that a row is bad: constraints, data exceptions, limits (of an index, of JSON), and what triggers raise.
ROW_ERRORS = (
    "data_exception",
    "integrity_constraint_violation",
    "with_check_option_violation",
    "program_limit_exceeded",
    "plpgsql_error",
)
BAD_ROW_STATE = "22000"  # of rows that semel itself finds


class UnevenStagingError(RuntimeError):
    """A staging table does not hold what its task reported: the server crashed in between. The batch runs again."""


class SameKeyError(ValueError):
    """Several rows of a batch have one key, and nothing says which of them counts."""


@dataclass(frozen=True)
class Move:
    """How rows get into a table."""

    schema: str
    table: TargetTable
    columns: Sequence[WrittenColumn]  # of the rows, also those that the table does not have
    mode: str
    key: tuple[str, ...] = ()
    order_by: tuple[str, ...] = ()
    operation: str | None = None
    with_reasons: bool = False  # bad rows become dead letters

    # --- the rows ---
    def _names(self) -> list[str]:
        return [column.name for column in self.columns] + ([REASON] if self.with_reasons else [])

    def _all(self, staged: Sequence[Staged]) -> Composed:
        from psycopg.sql import SQL, Identifier

        names = SQL(", ").join(Identifier(name) for name in self._names())
        return SQL(" UNION ALL ").join(
            SQL("SELECT {} FROM {}").format(names, Identifier(self.schema, one.table)) for one in staged
        )

    def _bad(self) -> list[tuple[Composable, Composable]]:
        """(which rows, why) of rows that cannot be written whatever the table says."""
        from psycopg.sql import SQL, Identifier, Literal

        found: list[tuple[Composable, Composable]] = []
        if self.with_reasons:
            found.append((SQL("u.{} IS NOT NULL").format(Identifier(REASON)), SQL("u.{}").format(Identifier(REASON))))
        keys = self.key if self.mode != INSERT else ()
        found += [(SQL("u.{} IS NULL").format(Identifier(k)), Literal(f"key column {k!r} is null")) for k in keys]
        if self.operation is not None and not self._operation_is_flag:
            known = SQL(", ").join(Literal(word) for word in (*DELETES, *UPSERTS))
            operation = SQL("u.{}").format(Identifier(self.operation))
            unknown = SQL("coalesce(lower({}) NOT IN ({}), true)").format(operation, known)
            found.append((unknown, SQL("concat('unknown operation ', quote_nullable({}))").format(operation)))
        elif self.operation is not None:
            operation = SQL("u.{} IS NULL").format(Identifier(self.operation))
            found.append((operation, Literal(f"operation column {self.operation!r} is null")))
        return found

    @property
    def _operation_is_flag(self) -> bool:
        return any(column.name == self.operation and column.wire.name == "boolean" for column in self.columns)

    def good(self, staged: Sequence[Staged]) -> Composed:
        """The rows to be written; of several with one key the last one, where there is an order."""
        from psycopg.sql import SQL, Identifier

        names = SQL(", ").join(Identifier(name) for name in self._names())
        bad = SQL(" OR ").join(which for which, _ in self._bad()) if self._bad() else SQL("false")
        rows = SQL("SELECT {} FROM ({}) u WHERE NOT ({})").format(names, self._all(staged), bad)
        if not self.order_by:
            return rows
        keys = self._compared(self.key, "o")
        order = SQL(", ").join(SQL("{} DESC NULLS LAST").format(each) for each in self._compared(self.order_by, "o"))
        keys_text = SQL(", ").join(keys)
        return SQL("SELECT DISTINCT ON ({}) {} FROM ({}) o ORDER BY {}, {}").format(
            keys_text, names, rows, keys_text, order
        )

    def _compared(self, names: Sequence[str], alias: str) -> list[Composable]:
        columns = {column.name: column for column in self.columns}
        return [columns[name].compared(alias) for name in names]

    # --- the statement ---
    def statement(self, rows: Composable) -> Composed:
        """Writes the rows of a query."""
        from psycopg.sql import SQL

        source = SQL("({}) s").format(rows)
        if self.mode == DELETE:
            return SQL("DELETE FROM {} t USING {} WHERE {}").format(self.table.identifier, source, self._same_key())
        if self.operation is None:
            return self._insert(source, SQL(""))
        # Both halves see the table as it was before, and no key is in both.
        return SQL(
            "WITH s AS MATERIALIZED ({rows}), gone AS (DELETE FROM {table} t USING s WHERE {is_delete} AND {same}) "
            "{insert}"
        ).format(
            rows=rows,
            table=self.table.identifier,
            is_delete=self._is_delete(),
            same=self._same_key(),
            insert=self._insert(SQL("s"), SQL(" WHERE NOT {}").format(self._is_delete())),
        )

    def _insert(self, source: Composable, where: Composable) -> Composed:
        from psycopg.sql import SQL, Identifier

        written = [column for column in self.columns if column.name in self.table.columns]
        return SQL("INSERT INTO {} ({}) SELECT {} FROM {}{}{}").format(
            self.table.identifier,
            SQL(", ").join(Identifier(column.name) for column in written),
            SQL(", ").join(column.read() for column in written),
            source,
            where,
            self._on_conflict() if self.mode == UPSERT else SQL(""),
        )

    def _changed(self) -> list[str]:
        """Columns that an upsert changes. Where there are none, it does not matter which row of a key counts."""
        names = [column.name for column in self.columns]
        return [name for name in names if name in self.table.columns and name not in self.key]

    def _on_conflict(self) -> Composable:
        from psycopg.sql import SQL, Identifier

        keys = SQL(", ").join(Identifier(name) for name in self.key)
        changed = self._changed()
        if not changed:
            return SQL(" ON CONFLICT ({}) DO NOTHING").format(keys)
        values = SQL(", ").join(SQL("{0} = excluded.{0}").format(Identifier(name)) for name in changed)
        return SQL(" ON CONFLICT ({}) DO UPDATE SET {}").format(keys, values)

    def _same_key(self) -> Composed:
        from psycopg.sql import SQL, Identifier

        columns = {column.name: column for column in self.columns}
        return SQL(" AND ").join(
            SQL("{} = {}").format(Identifier("t", name), columns[name].read()) for name in self.key
        )

    def _is_delete(self) -> Composable:
        from psycopg.sql import SQL, Identifier, Literal

        assert self.operation is not None
        operation = Identifier("s", self.operation)
        if self._operation_is_flag:
            return operation
        return SQL("(lower({}) IN ({}))").format(operation, SQL(", ").join(Literal(word) for word in DELETES))

    # --- in a transaction ---
    def __call__(self, connection: Connection[Any], staged: Sequence[Staged], application: str, sequence: int) -> int:
        """Moves the rows; returns how many of them became dead letters."""
        if not staged:
            return 0
        connection.execute("SET CONSTRAINTS ALL IMMEDIATE")  # the end of the transaction would be too late
        compare_counts(connection, self.schema, staged)
        letters = _Letters(self.schema, application, sequence, self.table.text)
        dead = self._move_bad(connection, staged, letters) if self._bad() else 0
        rows = self.good(staged)
        try:
            with connection.transaction():
                connection.execute(self.statement(rows))
        except _errors().CardinalityViolation as error:
            raise self._same_keys() from error
        except _row_errors():
            if not self.with_reasons:
                raise
            dead += self._try_each(connection, rows, letters)
        return dead

    def _same_keys(self) -> SameKeyError:
        return SameKeyError(
            f"several rows of the batch have the same key ({', '.join(self.key)}) for table {self.table.text!r}, "
            "and nothing says which of them is the last. Name a column that does, with order_by=... (the offset, "
            "a version, a time); or aggregate them before"
        )

    def _move_bad(self, connection: Connection[Any], staged: Sequence[Staged], letters: _Letters) -> int:
        from psycopg.sql import SQL

        cases = SQL(" ").join(SQL("WHEN {} THEN {}").format(*one) for one in self._bad())
        bad = SQL(
            "SELECT * FROM (SELECT u.*, CASE {} END AS semel_why FROM ({}) u) b WHERE semel_why IS NOT NULL"
        ).format(cases, self._all(staged))
        if self.with_reasons:
            return letters.add(connection, bad)
        row = connection.execute(SQL("SELECT semel_why FROM ({}) c LIMIT 1").format(bad)).fetchone()
        if row is not None:
            raise BadStagedRowError(
                f"a row for table {self.table.text!r} cannot be written: {row[0]}. Correct it in the query, or set "
                'such rows aside with on_error="dead_letter"'
            )
        return 0

    def _try_each(self, connection: Connection[Any], rows: Composable, letters: _Letters) -> int:
        """Every row that can be written is written, each of the others becomes a dead letter."""
        from psycopg.sql import SQL, Identifier, Literal

        candidates, number = Identifier(CANDIDATES), Identifier(NUMBER)
        connection.execute(
            SQL("CREATE TEMP TABLE {} ON COMMIT DROP AS SELECT row_number() OVER () AS {}, g.* FROM ({}) g").format(
                candidates, number, rows
            )
        )
        if self.mode == UPSERT and not self.order_by and self._changed():  # each would be written, by its own statement
            keys = SQL(", ").join(self._compared(self.key, "c"))
            several = SQL("SELECT FROM {} c GROUP BY {} HAVING count(*) > 1 LIMIT 1").format(candidates, keys)
            if connection.execute(several).rowcount:
                raise self._same_keys()
        connection.execute(SQL("CREATE UNIQUE INDEX ON {} ({})").format(candidates, number))
        connection.execute(SQL("ANALYZE {}").format(candidates))
        some = SQL("SELECT * FROM {} c WHERE c.{} BETWEEN semel_first AND semel_last").format(candidates, number)
        program = SQL(_TRY_EACH).format(
            candidates=candidates,
            number=number,
            at_once=Literal(TRIED_AT_ONCE),
            row_errors=SQL(" OR ".join(ROW_ERRORS)),
            write=self.statement(some),
            set_aside=letters.insert(
                SQL("SELECT c.* FROM {} c WHERE c.{} = semel_first").format(candidates, number),
                SQL("semel_state, semel_broken, semel_message"),
            ),
        )
        before = letters.count(connection)
        connection.execute(SQL("DO {}").format(Literal(program.as_string(connection))))
        return letters.count(connection) - before


def compare_counts(connection: Connection[Any], schema: str, staged: Sequence[Staged]) -> None:
    """Raises if a staging table does not hold what its task reported."""
    from psycopg.sql import SQL, Identifier

    counts = SQL(" UNION ALL ").join(
        SQL("SELECT {}, count(*) FROM {}").format(number, Identifier(schema, one.table))
        for number, one in enumerate(staged)
    )
    for number, rows in connection.execute(counts):
        if rows != staged[number].rows:
            raise UnevenStagingError(
                f"staging table {staged[number].table} has {rows} rows, its task reported {staged[number].rows}; the "
                "database server restarted meanwhile. The batch runs again"
            )


class BadStagedRowError(ValueError):
    """A row without a key, or with an unknown operation."""


_TRY_EACH = """
DECLARE
    semel_first bigint; semel_last bigint; semel_edge bigint := 1; semel_total bigint;
    semel_state text; semel_broken text; semel_message text;
BEGIN
    SELECT coalesce(max({number}), 0) INTO semel_total FROM {candidates};
    WHILE semel_edge <= semel_total LOOP
        BEGIN
            semel_first := semel_edge; semel_last := semel_edge + {at_once} - 1;
            {write};
        EXCEPTION WHEN {row_errors} THEN
            FOR semel_place IN semel_edge .. least(semel_edge + {at_once} - 1, semel_total) LOOP
                BEGIN
                    semel_first := semel_place; semel_last := semel_place;
                    {write};
                EXCEPTION WHEN {row_errors} THEN
                    GET STACKED DIAGNOSTICS semel_state = RETURNED_SQLSTATE, semel_broken = CONSTRAINT_NAME,
                        semel_message = MESSAGE_TEXT;
                    {set_aside};
                END;
            END LOOP;
        END;
        semel_edge := semel_edge + {at_once};
    END LOOP;
END
"""


@dataclass(frozen=True)
class _Letters:
    """The dead letters of one batch."""

    schema: str
    application_id: str
    sequence: int
    table: str

    def insert(self, rows: Composable, why: Composable) -> Composed:
        """`why` is SQLSTATE, constraint and message."""
        from psycopg.sql import SQL, Literal

        return filled(
            "INSERT INTO {schema}.dead_rows (application_id, sequence, table_name, row_data, sqlstate, "
            "constraint_name, reason) SELECT {application}, {sequence}, {table}, to_jsonb(r) - {own}::text[], {why} "
            "FROM ({rows}) r",
            self.schema,
            application=Literal(self.application_id),  # type: ignore[arg-type]
            sequence=Literal(self.sequence),  # type: ignore[arg-type]
            table=Literal(self.table),  # type: ignore[arg-type]
            own=Literal([NUMBER, REASON, "semel_why"]),  # type: ignore[arg-type]
            why=SQL("{}").format(why),
            rows=SQL("{}").format(rows),
        )

    def add(self, connection: Connection[Any], rows: Composable) -> int:
        from psycopg.sql import SQL, Literal

        why = SQL("{}, NULL::text, r.semel_why").format(Literal(BAD_ROW_STATE))
        return int(connection.execute(self.insert(rows, why)).rowcount)

    def count(self, connection: Connection[Any]) -> int:
        row = connection.execute(
            filled("SELECT count(*) FROM {schema}.dead_rows WHERE application_id = %s AND sequence = %s", self.schema),
            [self.application_id, self.sequence],
        ).fetchone()
        return 0 if row is None else int(row[0])


def _errors() -> Any:
    from psycopg import errors

    return errors


def _row_errors() -> tuple[type[Exception], ...]:
    """`ROW_ERRORS` as psycopg's classes."""
    from psycopg import errors

    return (
        errors.DataError,
        errors.IntegrityError,
        errors.WithCheckOptionViolation,
        errors.ProgramLimitExceeded,
        errors.StatementTooComplex,
        errors.PlpgsqlError,
        errors.RaiseException,
        errors.NoDataFound,
        errors.TooManyRows,
        errors.AssertFailure,
    )
