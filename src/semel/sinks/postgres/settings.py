"""What a program says about a database that records go to: `semel.Postgres`, and the rows that its function returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from semel.client.errors import ConfigError
from semel.sinks.postgres.database import Database
from semel.sinks.postgres.tables import table_name

WriteMode = Literal["insert", "upsert", "delete"]
WRITE_MODES = ("insert", "upsert", "delete")
WHEN_BEHIND = ("refuse", "reprocess", "skip")
DAY_MS = 86_400_000


class TableRow(NamedTuple):
    """A row to write: values by column. What is not given is the sink's. `delete` needs the key's columns only."""

    values: Mapping[str, Any]
    table: str | None = None
    mode: WriteMode | None = None
    key: str | Sequence[str] | None = None


class Statement(NamedTuple):
    """SQL to execute, with %s for each parameter, such as UPDATE accounts SET balance = balance + %s WHERE id = %s."""

    sql: str
    parameters: Sequence[Any] = ()


class Postgres:
    """A database as the sink of `semel.process`: rows and offsets in one database transaction.

    dsn                 postgresql://user:password@host:port/database, or libpq's key=value form
    table               where rows go that name no table: table or schema.table, as it is written (case matters)
    mode                insert, upsert (by key: insert, or update the other columns) or delete (by key)
    key                 the key's column or columns; by default the table's primary key
    dead_letters        whether records that the function or the database refuses are kept in <schema>.dead_letters, in
                        the same transaction. Otherwise the loop ends with a `RecordError`, unless on_error says more
    event_id            makes it an inbox: the name of the header with the event's id, or a function of the record that
                        returns it. An event whose id has a receipt changes nothing, whichever partition or topic it
                        comes from
    receipts_retention_ms  how long receipts are kept: a duplicate that comes later is applied again
    when_behind         what to do if the group's committed offsets are beyond the table's, as after a restore from a
                        backup: refuse, reprocess (from the table's offsets) or skip (to the group's)
    with_topics         whether the function may also return `Output(..., topic=...)`: then rows, offsets and records
                        are one decision, which the database makes
    schema              the schema of semel's own tables
    connect_timeout_ms  for one attempt to connect
    lock_timeout_ms     how long a statement may wait for a lock that another session holds
    """

    def __init__(
        self,
        dsn: str,
        *,
        table: str | None = None,
        mode: WriteMode = "insert",
        key: str | Sequence[str] | None = None,
        dead_letters: bool = False,
        event_id: str | Callable[[Any], Any] | None = None,
        receipts_retention_ms: int = 7 * DAY_MS,
        when_behind: Literal["refuse", "reprocess", "skip"] = "refuse",
        with_topics: bool = False,
        schema: str = "semel",
        connect_timeout_ms: int = 10_000,
        lock_timeout_ms: int = 30_000,
    ) -> None:
        if mode not in WRITE_MODES:
            raise ConfigError(f"mode is {mode!r}; it must be one of {', '.join(WRITE_MODES)}")
        if when_behind not in WHEN_BEHIND:
            raise ConfigError(f"when_behind is {when_behind!r}; it must be one of {', '.join(WHEN_BEHIND)}")
        if event_id is not None and not (callable(event_id) or (isinstance(event_id, str) and event_id)):
            raise ConfigError(f"event_id is {event_id!r}; expected the name of a header, or a function of the record")
        if with_topics and event_id is not None:
            raise ConfigError(
                "with_topics and event_id do not go together: whether an event is a duplicate is known when its output "
                "is in the topics already. Apply the events in one loop, and write topics in the next"
            )
        if receipts_retention_ms < 1:
            raise ConfigError("receipts_retention_ms must be at least 1")
        if table is not None:
            table_name(table)
        self.database = Database(
            dsn, schema=schema, connect_timeout_ms=connect_timeout_ms, lock_timeout_ms=lock_timeout_ms
        )
        self.table, self.mode, self.key = table, mode, key_columns(key)
        self.dead_letters = dead_letters
        self.event_id = event_id
        self.receipts_retention_ms = receipts_retention_ms
        self.when_behind = when_behind
        self.with_topics = with_topics

    def __repr__(self) -> str:
        return f"Postgres({self.database.where!r}, table={self.table!r}, mode={self.mode!r})"


def key_columns(key: str | Sequence[str] | None) -> tuple[str, ...] | None:
    if key is None:
        return None
    columns = (key,) if isinstance(key, str) else tuple(key)
    if not columns or not all(isinstance(column, str) and column for column in columns):
        raise ConfigError(f"key is {key!r}; expected a column, or several")
    return columns


def effects_of(returned: Any) -> list[TableRow | Statement]:
    """What a function returned for a record, as rows and statements."""
    if returned is None:
        return []
    if isinstance(returned, TableRow | Statement):
        return [returned]
    if isinstance(returned, Mapping):
        return [TableRow(returned)]
    if isinstance(returned, Iterable) and not isinstance(returned, str | bytes | bytearray | memoryview):
        return [effect for part in returned for effect in effects_of(part)]
    raise ConfigError(
        f"the function returned {type(returned).__name__}; expected None, a dict of columns, TableRow, Statement, or "
        "several of them in a list or generator"
    )
