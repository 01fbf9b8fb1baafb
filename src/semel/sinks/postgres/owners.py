"""Owner rows: a name belongs to one generation at a time.

`claim` takes a name, whoever has it. `hold` stands at the beginning of each transaction of an owner: it locks the row
until the transaction ends and refuses an owner that was replaced. So whatever a replaced owner still sends is rolled
back, and a new owner waits for the end of a transaction that its predecessor has open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from semel.sinks.postgres.errors import FencedInDatabaseError
from semel.sinks.postgres.tables import Component, filled

if TYPE_CHECKING:
    from psycopg import Connection

OWNERS = Component(
    "owners",
    (
        """CREATE TABLE {schema}.owners (
            name text PRIMARY KEY,
            generation bigint NOT NULL,
            holder text NOT NULL,
            since timestamptz NOT NULL DEFAULT now()
        )""",
    ),
)


def claim(connection: Connection[Any], schema: str, name: str, holder: str) -> int:
    """Makes the caller the owner of a name; its generation. Counts from the commit of the caller's transaction on."""
    statement = (
        "INSERT INTO {schema}.owners AS o (name, generation, holder) VALUES (%s, 1, %s) ON CONFLICT (name) "
        "DO UPDATE SET generation = o.generation + 1, holder = excluded.holder, since = now() RETURNING generation"
    )
    row = connection.execute(filled(statement, schema), [name, holder]).fetchone()
    assert row is not None
    return int(row[0])


def hold(connection: Connection[Any], schema: str, name: str, generation: int) -> None:
    """Locks the name until the transaction ends; raises if another generation owns it."""
    statement = "SELECT generation, holder, since FROM {schema}.owners WHERE name = %s FOR UPDATE"
    row = connection.execute(filled(statement, schema), [name]).fetchone()
    if row is None:
        raise FencedInDatabaseError(
            f"the owner row of {name!r} is gone from schema {schema!r} (expected generation {generation}): the "
            "database was restored or its tables were dropped; start again"
        )
    if row[0] != generation:
        raise FencedInDatabaseError(
            f"{name!r} belongs to generation {row[0]} now ({row[1]}, since {row[2]:%Y-%m-%d %H:%M:%S%z}), this "
            f"instance has generation {generation}: another instance took over; stop this one"
        )
