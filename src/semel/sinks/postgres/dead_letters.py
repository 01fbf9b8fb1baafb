"""Records that could not be applied, in a table, in the transaction that passes over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from semel.client.dead_letters import REASON_CHARACTERS
from semel.client.types import ConsumerRecord
from semel.sinks.postgres.tables import Component, filled

if TYPE_CHECKING:
    from psycopg import Connection

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
