"""The outbox as a table: which of its rows may be sent, in which order, and what happens to them then.

Rows become visible when their transaction commits, not when they get their id. So a row is released only if
    its transaction is below the snapshot's xmin: every transaction that began before it has ended, none of them can
    still bring a row with a lower id; and
    its id is below that of every visible row whose transaction is not: else a row that was inserted later would pass
    one that was inserted earlier and waits.
A transaction at or above the snapshot's xmax can have no visible rows of its own: they were copied from another server,
by a dump or by logical replication, whose transactions have ended. They wait for nobody.
All rows of a transaction are released together. Transactions are sent in the order of their last row: of two that
insert rows of one key under the application's lock, the second gets its row after the first has committed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from semel.sinks.postgres.tables import Component, filled

if TYPE_CHECKING:
    from psycopg import Connection

CHANNEL = "semel_outbox"
WINDOW_BYTES = 32 << 20  # of keys, values and headers
_TIMESTAMP_MS = (
    "CASE WHEN created_at >= to_timestamp(0) AND isfinite(created_at) "
    "THEN (extract(epoch FROM created_at) * 1000)::bigint END"
)
_COLUMNS = "topic, partition, key, value, header_names, header_values, created_at"

OUTBOX = Component(
    "outbox",
    (
        """CREATE TABLE {schema}.outbox (
            id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
            transaction_id xid8 NOT NULL DEFAULT pg_current_xact_id(),
            topic text NOT NULL,
            partition integer,
            key bytea,
            value bytea,
            header_names text[],
            header_values bytea[],
            created_at timestamptz NOT NULL DEFAULT now(),
            CHECK (coalesce(cardinality(header_names), 0) = coalesce(cardinality(header_values), 0))
        );
        CREATE INDEX ON {schema}.outbox (transaction_id);
        CREATE TABLE {schema}.outbox_set_aside (LIKE {schema}.outbox, reason text NOT NULL,
            set_aside_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (id));
        CREATE TABLE {schema}.outbox_progress (
            one boolean PRIMARY KEY DEFAULT true CHECK (one),
            application_id text NOT NULL,
            chunk bigint NOT NULL,
            sent_rows bigint NOT NULL DEFAULT 0,
            updated_at timestamptz NOT NULL DEFAULT now()
        );
        CREATE FUNCTION {schema}.outbox_notify() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN PERFORM pg_notify('semel_outbox', TG_TABLE_SCHEMA); RETURN NULL; END $$;
        CREATE TRIGGER outbox_notify AFTER INSERT ON {schema}.outbox
            FOR EACH STATEMENT EXECUTE FUNCTION {schema}.outbox_notify();
        CREATE FUNCTION {schema}.outbox_send(topic text, key text, value text, headers jsonb DEFAULT NULL)
            RETURNS bigint LANGUAGE sql AS $$
            INSERT INTO {schema}.outbox (topic, key, value, header_names, header_values)
            SELECT $1, convert_to($2, 'UTF8'), convert_to($3, 'UTF8'),
                (SELECT array_agg(h.key ORDER BY h.key) FROM jsonb_each_text($4) AS h),
                (SELECT array_agg(convert_to(h.value, 'UTF8') ORDER BY h.key) FROM jsonb_each_text($4) AS h)
            RETURNING id $$""",
    ),
)


class OutboxRow(NamedTuple):
    id: int
    transaction_id: int
    topic: str
    partition: int | None
    key: bytes | None
    value: bytes | None
    header_names: list[str] | None
    header_values: list[bytes | None] | None
    timestamp_ms: int | None  # None: created_at is no time that Kafka can hold

    @property
    def headers(self) -> list[tuple[str, bytes | None]]:
        return list(zip(self.header_names or (), self.header_values or (), strict=True))


class Window(NamedTuple):
    """The first rows of the table, and the snapshot's xmin and xmax. `is_cut`: there may be more behind them."""

    rows: list[OutboxRow]
    xmin: int
    is_cut: bool
    xmax: int = 1 << 64

    def is_unfinished(self, transaction_id: int) -> bool:
        return self.xmin <= transaction_id < self.xmax


class Release(NamedTuple):
    rows: list[OutboxRow]  # in the order in which they are sent
    held: int  # rows of the window that must wait


def read_window(connection: Connection[Any], schema: str, limit: int, limit_bytes: int) -> Window:
    """One statement, so one snapshot. At least one row, if there are any, however large it is."""
    statement = (
        # The lowest of the others: the relay's own transaction may read after it has written, and inserts no rows.
        "SELECT coalesce((SELECT min(x::text::bigint) FROM pg_snapshot_xip(pg_current_snapshot()) AS x), "
        "pg_snapshot_xmax(pg_current_snapshot())::text::bigint), "
        "pg_snapshot_xmax(pg_current_snapshot())::text::bigint, id, transaction_id::text::bigint, topic, "
        f"partition, key, value, header_names, header_values, {_TIMESTAMP_MS}, count "
        # Sizes are known without reading the values.
        "FROM (SELECT *, count(*) OVER (), sum(coalesce(octet_length(key), 0) + coalesce(octet_length(value), 0) + "
        "coalesce(pg_column_size(header_values), 0)) OVER (ORDER BY id ROWS BETWEEN UNBOUNDED PRECEDING AND "
        "1 PRECEDING) AS bytes_before FROM (SELECT * FROM {schema}.outbox ORDER BY id LIMIT %s) AS first) AS sized "
        "WHERE coalesce(bytes_before, 0) < %s ORDER BY id"
    )
    with connection.cursor(binary=True) as cursor:
        found = cursor.execute(filled(statement, schema), [limit, limit_bytes]).fetchall()
    xmin, xmax = found[0][:2] if found else (0, 0)
    is_cut = bool(found) and (found[0][-1] == limit or found[0][-1] > len(found))
    return Window([OutboxRow(*row[2:-1]) for row in found], xmin, is_cut, xmax)


def continued(connection: Connection[Any], schema: str, transactions: Sequence[int], after_id: int) -> set[int]:
    """Those of the transactions that have rows behind an id."""
    rows = connection.execute(
        filled(
            "SELECT DISTINCT transaction_id::text::bigint FROM {schema}.outbox "
            "WHERE transaction_id = ANY(%s::text[]::xid8[]) AND id > %s",
            schema,
        ),
        [[str(each) for each in transactions], after_id],
    )
    return {each for (each,) in rows}


def released(window: Window, unfinished: Iterable[int] = ()) -> Release:
    """What may be sent. `unfinished`: transactions of the window with rows behind it."""
    barrier = next((row.id for row in window.rows if window.is_unfinished(row.transaction_id)), None)
    last_ids: dict[int, int] = {}
    for row in window.rows:
        last_ids[row.transaction_id] = row.id
    waiting = set(unfinished)
    waiting |= {
        each
        for each, last_id in last_ids.items()
        if window.is_unfinished(each) or (barrier is not None and last_id > barrier)
    }
    rows = [row for row in window.rows if row.transaction_id not in waiting]
    rows.sort(key=lambda row: (last_ids[row.transaction_id], row.id))
    return Release(rows, len(window.rows) - len(rows))


def ready(connection: Connection[Any], schema: str, limit: int) -> Release:
    """What may be sent now: about as many rows as the limit, or as WINDOW_BYTES has space for; more where a single
    transaction has more."""
    limit_bytes = WINDOW_BYTES
    while True:
        window = read_window(connection, schema, limit, limit_bytes)
        if not window.is_cut:
            return released(window)
        first = released(window)
        touched = sorted({row.transaction_id for row in first.rows})
        release = released(window, continued(connection, schema, touched, window.rows[-1].id)) if touched else first
        if release.rows or not touched:
            return release
        limit, limit_bytes = limit * 4, limit_bytes * 4


# -- bookkeeping -------------------------------------------------------------------------------------------------------
class RelayProgress(NamedTuple):
    application_id: str
    chunk: int


def read_progress(connection: Connection[Any], schema: str) -> RelayProgress | None:
    row = connection.execute(filled("SELECT application_id, chunk FROM {schema}.outbox_progress", schema)).fetchone()
    return None if row is None else RelayProgress(*row)


def adopt(connection: Connection[Any], schema: str, application_id: str, chunk: int) -> None:
    connection.execute(
        filled(
            "INSERT INTO {schema}.outbox_progress (application_id, chunk) VALUES (%s, %s) ON CONFLICT (one) DO UPDATE "
            "SET application_id = excluded.application_id, chunk = excluded.chunk, updated_at = now()",
            schema,
        ),
        [application_id, chunk],
    )


def times_of(connection: Connection[Any], schema: str, ids: Sequence[int]) -> list[tuple[int, int | None]]:
    """Ids, and times in milliseconds, of those that are in the table."""
    statement = f"SELECT id, {_TIMESTAMP_MS} FROM {{schema}}.outbox WHERE id = ANY(%s) ORDER BY id"
    return connection.execute(filled(statement, schema), [list(ids)]).fetchall()


def note_sent(connection: Connection[Any], schema: str, chunk: int, ids: Sequence[int]) -> int:
    """Removes rows that are in their topics, and notes the chunk; how many there were."""
    deleted = connection.execute(filled("DELETE FROM {schema}.outbox WHERE id = ANY(%s)", schema), [list(ids)])
    connection.execute(
        filled(
            "UPDATE {schema}.outbox_progress SET chunk = %s, sent_rows = sent_rows + %s, updated_at = now()", schema
        ),
        [chunk, deleted.rowcount],
    )
    return deleted.rowcount


def set_aside(connection: Connection[Any], schema: str, reasons: dict[int, str]) -> None:
    """Moves rows that cannot be sent."""
    names = f"id, transaction_id, {_COLUMNS}"
    connection.execute(
        filled(
            f"WITH gone AS (DELETE FROM {{schema}}.outbox o USING unnest(%s::bigint[], %s::text[]) AS u (id, reason) "
            f"WHERE o.id = u.id RETURNING o.*, u.reason) INSERT INTO {{schema}}.outbox_set_aside ({names}, reason) "
            f"SELECT {names}, reason FROM gone",
            schema,
        ),
        [list(reasons), [reason.replace("\0", "\\x00") for reason in reasons.values()]],
    )


class OutboxStatus(NamedTuple):
    application_id: str | None
    sent_rows: int
    waiting_rows: int
    oldest_ms: int  # how long the oldest row waits
    held_by: str | None  # the oldest transaction that rows wait for
    set_aside_rows: int


def read_status(connection: Connection[Any], schema: str) -> OutboxStatus:
    row = connection.execute(
        filled(
            "SELECT (SELECT application_id FROM {schema}.outbox_progress), "
            "coalesce((SELECT sent_rows FROM {schema}.outbox_progress), 0), count(*), "
            "coalesce((extract(epoch FROM clock_timestamp() - min(created_at)) * 1000)::bigint, 0), "
            "(SELECT who FROM (SELECT backend_xid AS xid, "
            "format('process %%s (%%s) in database %%s since %%s', pid, application_name, datname, xact_start) AS who "
            "FROM pg_stat_activity WHERE backend_xid IS NOT NULL AND pid <> pg_backend_pid() UNION ALL "
            "SELECT transaction, format('prepared transaction %%L of %%s in database %%s since %%s', gid, owner, "
            "database, prepared) FROM pg_prepared_xacts) AS open ORDER BY age(xid) DESC LIMIT 1), "
            "(SELECT count(*) FROM {schema}.outbox_set_aside) FROM {schema}.outbox",
            schema,
        ),
        [],
    ).fetchone()
    assert row is not None
    return OutboxStatus(*row)
