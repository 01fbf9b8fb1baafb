"""Rows to SQL: insert, upsert and delete by key, batched and pipelined."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from semel.client.dead_letters import REASON_CHARACTERS
from semel.client.errors import ConfigError
from semel.client.types import ConsumerRecord
from semel.sinks.postgres.database import psycopg_module
from semel.sinks.postgres.errors import DatabaseFatalError, RowRefusedError
from semel.sinks.postgres.settings import Postgres, Statement, TableRow, WriteMode, key_columns
from semel.sinks.postgres.tables import Component, filled, identifier, table_name

if TYPE_CHECKING:
    from psycopg import Connection
    from psycopg.sql import Composed

Plan = tuple[str, WriteMode, tuple[str, ...], tuple[str, ...]]  # table, mode, key, columns

_PRIMARY_KEY = """
SELECT array_agg(a.attname::text ORDER BY k.place) FROM pg_index i
CROSS JOIN LATERAL unnest(i.indkey::int[]) WITH ORDINALITY AS k (number, place)
JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.number
WHERE i.indrelid = to_regclass(%s) AND i.indisprimary AND k.place <= i.indnkeyatts -- without INCLUDE
"""
_JSON_COLUMNS = """
SELECT a.attname::text FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
WHERE a.attrelid = to_regclass(%s) AND a.attnum > 0 AND NOT a.attisdropped
AND coalesce(nullif(t.typbasetype, 0), t.oid) IN ('json'::regtype, 'jsonb'::regtype) -- also by a domain
"""
_LINE_END = re.compile(r"[\r\n]")
_ENDS = re.compile(r"(?:begin|start\s+transaction|commit|end|rollback|abort|prepare\s+transaction)\b", re.IGNORECASE)


def command_of(sql: str) -> str:
    """Without what may stand before a command: spaces, semicolons, and comments, which nest."""
    depth = at = 0
    while at < len(sql):
        if sql.startswith("/*", at):
            depth, at = depth + 1, at + 2
        elif depth and sql.startswith("*/", at):
            depth, at = depth - 1, at + 2
        elif depth or sql[at].isspace() or sql[at] == ";":
            at += 1
        elif sql.startswith("--", at):
            found = _LINE_END.search(sql, at)
            at = found.end() if found else len(sql)
        else:
            break
    return sql[at:]


_NO_ENDS = "semel begins and ends the transaction: leave COMMIT, ROLLBACK and BEGIN out"


class RowWriter:
    """Writes what functions return. Knows the statements and keys that it has needed so far."""

    def __init__(self, settings: Postgres) -> None:
        self._settings = settings
        self._statements: dict[Plan, str] = {}
        self._keys: dict[str, tuple[str, ...]] = {}
        self._json: dict[str, set[str]] = {}  # columns of tables that got a list

    def write(self, connection: Connection[Any], effects: Iterable[TableRow | Statement]) -> int:
        """Sends everything in its order, many statements on their way at a time; the number of rows and statements."""
        self._json.clear()  # a column may have been altered since
        runs = list(self._runs(connection, effects))
        if len(runs) == 1 and len(runs[0][1]) == 1 and runs[0][1][0]:  # without parameters, psycopg takes many commands
            self._execute(connection, *runs[0])
        elif runs:
            self._execute_all(connection, runs)
        if runs and connection.info.transaction_status is psycopg_module().pq.TransactionStatus.IDLE:
            raise DatabaseFatalError(f"a Statement has ended the transaction that rows and offsets share; {_NO_ENDS}")
        return sum(len(rows) for _, rows in runs)

    def _execute_all(self, connection: Connection[Any], runs: Iterable[tuple[str, list[Sequence[Any]]]]) -> None:
        """In one pipeline, which ends without an error in its block: psycopg would log that the statements behind the
        refused one were aborted, once for each."""
        failure: Exception | None = None
        try:
            with connection.pipeline():
                try:
                    for sql, rows in runs:
                        self._execute(connection, sql, rows)
                except Exception as error:
                    failure = error
        except psycopg_module().Error:
            if failure is None:
                raise
        if failure is not None:
            raise failure

    def _execute(self, connection: Connection[Any], sql: str, rows: list[Sequence[Any]]) -> None:
        try:
            with connection.cursor() as cursor:
                if len(rows) == 1:
                    cursor.execute(sql, rows[0])
                else:
                    cursor.executemany(sql, rows)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:  # of a value's conversion
            raise RowRefusedError(f"a value cannot be sent to the database: {type(error).__name__}: {error}") from error

    def _runs(
        self, connection: Connection[Any], effects: Iterable[TableRow | Statement]
    ) -> Iterator[tuple[str, list[Sequence[Any]]]]:
        """Neighbours with the same statement go together."""
        current: str | None = None
        rows: list[Sequence[Any]] = []
        for effect in effects:
            sql, values = self._statement(connection, effect)
            if sql != current and rows:
                yield current or "", rows
                rows = []
            current = sql
            rows.append(values)
        if rows:
            yield current or "", rows

    def _statement(self, connection: Connection[Any], effect: TableRow | Statement) -> tuple[str, Sequence[Any]]:
        if isinstance(effect, Statement):
            if _ENDS.match(command_of(effect.sql)):
                raise DatabaseFatalError(f"the function returned the Statement {effect.sql!r}; {_NO_ENDS}")
            return effect.sql, effect.parameters
        table = effect.table or self._settings.table
        if table is None:
            raise ConfigError("a row names no table: give Postgres(table=...), or return TableRow(..., table=...)")
        mode = effect.mode or self._settings.mode
        key = self._key(connection, effect, table) if mode != "insert" else ()
        missing = [column for column in key if column not in effect.values]
        if missing or not effect.values:
            raise RowRefusedError(
                f"a row for table {table!r} lacks {', '.join(missing) or 'all columns'}; it has "
                f"{', '.join(map(str, effect.values)) or 'none'}"
            )
        columns = key if mode == "delete" else tuple(effect.values)
        plan = (table, mode, key, columns)
        sql = self._statements.get(plan)
        if sql is None:
            sql = self._statements[plan] = statement(*plan).as_string(connection)
        return sql, [
            self._adapted_list(connection, table, column, value) if isinstance(value, list) else adapted(value)
            for column, value in ((column, effect.values[column]) for column in columns)
        ]

    def _adapted_list(self, connection: Connection[Any], table: str, column: str, value: list[Any]) -> Any:
        """JSON where the column is, else an array. psycopg sends an empty one as {}, which is an object in JSON."""
        if table not in self._json:
            name = identifier(table).as_string(connection)
            self._json[table] = {column for (column,) in connection.execute(_JSON_COLUMNS, [name])}
        return as_json(value) if column in self._json[table] else adapted(value)

    def _key(self, connection: Connection[Any], row: TableRow, table: str) -> tuple[str, ...]:
        given = key_columns(row.key) or (self._settings.key if table == self._settings.table else None)
        if given is not None:
            return given
        if table not in self._keys:
            name = identifier(table).as_string(connection)
            found = connection.execute(_PRIMARY_KEY, [name]).fetchone()
            if found is None or not found[0]:
                raise ConfigError(
                    f"table {table!r} does not exist or has no primary key; name the key's columns with key=..."
                )
            self._keys[table] = tuple(found[0])
        return self._keys[table]


def statement(table: str, mode: WriteMode, key: tuple[str, ...], columns: tuple[str, ...]) -> Composed:
    """To be executed with parameters: a % in a name is doubled, since it would count as a placeholder."""
    from psycopg.sql import SQL, Identifier, Placeholder

    place = Identifier(*(part.replace("%", "%%") for part in table_name(table)))
    names = {column: Identifier(column.replace("%", "%%")) for column in (*columns, *key)}
    if mode == "delete":
        equal = SQL(" AND ").join(SQL("{} = {}").format(names[column], Placeholder()) for column in columns)
        return SQL("DELETE FROM {} WHERE {}").format(place, equal)
    insert = SQL("INSERT INTO {} ({}) VALUES ({})").format(
        place,
        SQL(", ").join(names[column] for column in columns),
        SQL(", ").join(Placeholder() for _ in columns),
    )
    if mode == "insert":
        return insert
    changed = [SQL("{0} = excluded.{0}").format(names[column]) for column in columns if column not in key]
    return SQL("{} ON CONFLICT ({}) DO {}").format(
        insert,
        SQL(", ").join(names[column] for column in key),
        SQL("UPDATE SET {}").format(SQL(", ").join(changed)) if changed else SQL("NOTHING"),
    )


def adapted(value: Any) -> Any:
    """A dict is JSON for PostgreSQL, and so is a list of them: no array could have them as elements."""
    is_json = isinstance(value, dict) or (isinstance(value, list) and any(isinstance(each, dict) for each in value))
    return as_json(value) if is_json else value


def as_json(value: Any) -> Any:
    from psycopg.types.json import Jsonb

    return Jsonb(value)


# --- The inbox's receipts: the id of every event that was applied, in the transaction that applied it ---
#
# Of two instances that get copies of one event at the same time, the second waits until the first has committed, and
# then finds its receipt. Receipts are removed after their retention, so a copy that comes later counts as a new
# event.


RECEIPTS = Component(
    "receipts",
    (
        """CREATE TABLE {schema}.receipts (
            application_id text,
            event_id text,
            received_at timestamptz NOT NULL DEFAULT now(),
            PRIMARY KEY (application_id, event_id)
        );
        CREATE INDEX ON {schema}.receipts (application_id, received_at)""",
    ),
)
LONGEST_ID = 256  # longer ones are kept as their hash
REMOVED_AT_ONCE = 10_000


class NoEventIdError(ValueError):
    """A record has no event id."""


def event_id_of(setting: str | Callable[[Any], Any]) -> Callable[[Any], str]:
    """The function that gives a record's event id as text."""
    find = setting if callable(setting) else lambda record: _header(record, setting)

    def event_id(record: Any) -> str:
        found = find(record)
        if found is None or found in ("", b""):
            where = "event_id returned nothing" if callable(setting) else f"it has no header {setting!r}"
            raise NoEventIdError(f"the record has no event id: {where}")
        text = found.decode(errors="backslashreplace") if isinstance(found, bytes) else str(found)
        text = text.encode(errors="backslashreplace").decode().replace("\0", "\\x00")  # half characters of JSON
        return text if len(text) <= LONGEST_ID else f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"

    return event_id


def _header(record: Any, name: str) -> bytes | None:
    return next((value for key, value in record.headers or () if key == name), None)


def receive(connection: Connection[Any], schema: str, application_id: str, ids: Iterable[str]) -> set[str]:
    """Writes receipts; returns the ids that had none. In one order for all, so that two instances cannot wait for each
    other."""
    rows = connection.execute(
        filled(
            "INSERT INTO {schema}.receipts (application_id, event_id) SELECT %s, id FROM unnest(%s::text[]) AS u (id) "
            "ON CONFLICT DO NOTHING RETURNING event_id",
            schema,
        ),
        [application_id, sorted(set(ids))],
    )
    return {event_id for (event_id,) in rows}


def give_back(connection: Connection[Any], schema: str, application_id: str, ids: Iterable[str]) -> None:
    """Removes receipts of this transaction: their events were set aside, not applied."""
    connection.execute(
        filled("DELETE FROM {schema}.receipts WHERE application_id = %s AND event_id = ANY(%s)", schema),
        [application_id, list(ids)],
    )


def remove_old(connection: Connection[Any], schema: str, application_id: str, retention_ms: int) -> int:
    """Removes some of the receipts whose retention is over, without waiting for anybody; how many."""
    found = connection.execute(
        filled(
            "DELETE FROM {schema}.receipts WHERE (application_id, event_id) IN (SELECT application_id, event_id "
            "FROM {schema}.receipts WHERE application_id = %s AND received_at < now() - %s * interval '1 millisecond' "
            "ORDER BY received_at LIMIT %s FOR UPDATE SKIP LOCKED)",
            schema,
        ),
        [application_id, retention_ms, REMOVED_AT_ONCE],
    )
    return found.rowcount


# --- Records that could not be applied, in a table, in the transaction that passes over them ---


DEAD_LETTERS = Component(
    "dead_letters",
    (
        """CREATE TABLE {schema}.dead_letters (
            application_id text NOT NULL,
            topic text NOT NULL,
            partition integer NOT NULL,
            record_offset bigint NOT NULL,
            timestamp_ms bigint NOT NULL,
            key bytea,
            value bytea,
            header_names text[] NOT NULL,
            header_values bytea[] NOT NULL,
            reason text NOT NULL,
            written_at timestamptz NOT NULL DEFAULT now(),
            PRIMARY KEY (application_id, topic, partition, record_offset)
        )""",
    ),
)


def add(
    connection: Connection[Any], schema: str, application_id: str, letters: Sequence[tuple[ConsumerRecord, str]]
) -> None:
    """Each with its reason. One that is there already (the topic is processed again) is replaced."""
    columns = "application_id topic partition record_offset timestamp_ms key value header_names header_values reason"
    names = columns.split()
    with connection.cursor() as cursor:
        cursor.executemany(
            filled(
                f"INSERT INTO {{schema}}.dead_letters ({', '.join(names)}) VALUES ({', '.join(['%s'] * len(names))}) "
                "ON CONFLICT (application_id, topic, partition, record_offset) DO UPDATE SET "
                + ", ".join(f"{name} = excluded.{name}" for name in [*names[4:], "written_at"]),
                schema,
            ),
            [_values(application_id, record, reason) for record, reason in letters],
        )


def _values(application_id: str, record: ConsumerRecord, reason: str) -> list[Any]:
    headers = list(record.headers or ())
    return [
        application_id,
        record.topic,
        record.partition,
        record.offset,
        record.timestamp,
        record.key,
        record.value,
        [name.replace("\0", "\\x00") for name, _ in headers],
        [value for _, value in headers],
        reason[:REASON_CHARACTERS].replace("\0", "\\x00"),
    ]
