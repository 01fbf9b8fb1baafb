"""The inbox's receipts: the id of every event that was applied, in the transaction that applied it.

Of two instances that get copies of one event at the same time, the second waits until the first has committed, and then
finds its receipt. Receipts are removed after their retention, so a copy that comes later counts as a new event.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from semel.sinks.postgres.tables import Component, filled

if TYPE_CHECKING:
    from psycopg import Connection

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


def give_back(connection: Connection[Any], schema: str, application_id: str, event_id: str) -> None:
    """Removes a receipt of this transaction: its event was set aside, not applied."""
    connection.execute(
        filled("DELETE FROM {schema}.receipts WHERE application_id = %s AND event_id = %s", schema),
        [application_id, event_id],
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
