"""The ledger as a table: one row per committed batch, written in the database transaction that writes the batch's rows.

The same entries as in a ledger topic; the last `KEPT_BATCHES` of an application are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from semel.sinks.postgres.tables import Component, filled
from semel.spark.ledger import KEPT_BATCHES, LedgerEntry, decode

if TYPE_CHECKING:
    from psycopg import Connection

LEDGER = Component(
    "spark_ledger",
    (
        """CREATE TABLE {schema}.spark_ledger (
            application_id text NOT NULL,
            sequence bigint NOT NULL,
            entry json NOT NULL,
            committed_at timestamptz NOT NULL DEFAULT now(),
            PRIMARY KEY (application_id, sequence)
        )""",
    ),
)


def last_row(connection: Connection[Any], schema: str, application_id: str) -> LedgerEntry | None:
    row = connection.execute(
        filled(
            "SELECT entry::text FROM {schema}.spark_ledger WHERE application_id = %s ORDER BY sequence DESC LIMIT 1",
            schema,
        ),
        [application_id],
    ).fetchone()
    return None if row is None else decode(row[0].encode())


def add_row(connection: Connection[Any], schema: str, application_id: str, entry: LedgerEntry) -> None:
    connection.execute(
        filled("INSERT INTO {schema}.spark_ledger (application_id, sequence, entry) VALUES (%s, %s, %s)", schema),
        [application_id, entry.sequence, entry.encode().decode()],
    )
    connection.execute(
        filled("DELETE FROM {schema}.spark_ledger WHERE application_id = %s AND sequence <= %s", schema),
        [application_id, entry.sequence - KEPT_BATCHES],
    )
