"""semel's own tables, and the names of everybody's: created on first use, versioned, always quoted."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from semel.client.errors import ConfigError
from semel.sinks.postgres.errors import DatabaseFatalError, FencedInDatabaseError

if TYPE_CHECKING:
    from psycopg import Connection
    from psycopg.sql import Composed, Identifier

_PART = re.compile(r'(?:"((?:[^"]|"")+)"|([^".]+))')
VERSIONS = "CREATE TABLE IF NOT EXISTS {schema}.versions (component text PRIMARY KEY, version integer NOT NULL)"


class Component(NamedTuple):
    """Tables that belong together. `migrations[n]` brings them from version n to n + 1; {schema} is filled in."""

    name: str
    migrations: tuple[str, ...]


def install(connection: Connection[Any], schema: str, component: Component) -> None:
    """Brings a component's tables to this version, in a transaction of its own. Needs no right to create anything
    where they are there already. Two that start at once wait for each other."""
    with connection.transaction():
        if _version(connection, schema, component) == len(component.migrations):
            return
        _lock(connection, schema)
        if not connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", [schema]).fetchone():
            connection.execute(filled("CREATE SCHEMA {schema}", schema))
        connection.execute(filled(VERSIONS, schema))
        for migration in component.migrations[_version(connection, schema, component) :]:
            connection.execute(filled(migration, schema))
        connection.execute(
            filled(
                "INSERT INTO {schema}.versions VALUES (%s, %s) "
                "ON CONFLICT (component) DO UPDATE SET version = excluded.version",
                schema,
            ),
            [component.name, len(component.migrations)],
        )


def _lock(connection: Connection[Any], schema: str) -> None:
    """IF NOT EXISTS alone is no protection: of two transactions at once, one fails with a duplicate key."""
    connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", [f"semel tables in {schema}"])


def _version(connection: Connection[Any], schema: str, component: Component) -> int:
    found = connection.execute(
        "SELECT 1 FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "WHERE n.nspname = %s AND c.relname = 'versions'",
        [schema],
    ).fetchone()
    if found is None:
        return 0
    row = connection.execute(
        filled("SELECT version FROM {schema}.versions WHERE component = %s", schema), [component.name]
    ).fetchone()
    version = 0 if row is None else int(row[0])
    if version > len(component.migrations):
        raise DatabaseFatalError(
            f"the tables of {component.name} in schema {schema!r} have version {version}, this semel knows "
            f"{len(component.migrations)}: upgrade semel, or give another schema"
        )
    return version


def filled(statement: str, schema: str, **names: Identifier | Composed) -> Composed:
    """A statement with its schema and other names, quoted. The text must be semel's own."""
    from psycopg.sql import SQL, Identifier

    return SQL(statement).format(schema=Identifier(schema), **names)


def table_name(name: str) -> tuple[str, ...]:
    """`accounts`, `bank.accounts` or `"bank"."my.table"` as its parts. Names are taken as they are written."""
    parts, rest = [], name
    while rest:
        found = _PART.match(rest)
        if found is None or (found.end() < len(rest) and rest[found.end()] != "."):
            break
        parts.append(found[1].replace('""', '"') if found[1] else found[2])
        rest = rest[found.end() + 1 :]
        if not rest and name.endswith("."):
            break
    else:
        if 1 <= len(parts) <= 2 and "\0" not in name:
            return tuple(parts)
    raise ConfigError(f"invalid table name {name!r}: expected table, schema.table, or quoted parts")


def identifier(name: str) -> Identifier:
    """A table's name for a statement."""
    from psycopg.sql import Identifier

    return Identifier(*table_name(name))


# --- Owner rows: a name belongs to one generation at a time ---
#
# `claim` takes a name, whoever has it. `hold` stands at the beginning of each transaction of an owner: it locks the
# row until the transaction ends and refuses an owner that was replaced. So whatever a replaced owner still sends is
# rolled back, and a new owner waits for the end of a transaction that its predecessor has open.


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
