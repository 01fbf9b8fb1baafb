"""The table that rows go to: what it looks like, and whether columns of Arrow fit into it. Checked first.

Rows travel in types of their own (`binary_copy.wire_type`) and are converted where they are moved into the table, so a
value that does not fit is an error of its row. What is here is about types: which may become which.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from semel.client.errors import ConfigError
from semel.sinks.postgres.binary_copy import WireType, wire_type
from semel.sinks.postgres.tables import table_name

if TYPE_CHECKING:
    from psycopg import Connection
    from psycopg.sql import Composable, Identifier

_INTEGERS = ("int2", "int4", "int8", "numeric")
_STRINGS = ("text", "varchar", "bpchar", "citext")
_FROM_TEXT = ("uuid", "json", "jsonb", "inet", "cidr", "macaddr", "xml", "interval", "time")  # read by PostgreSQL
# Type on the wire -> types of columns that it may go to without losing anything.
FITS: dict[str, tuple[str, ...]] = {
    "smallint": _INTEGERS,
    "integer": _INTEGERS,
    "bigint": _INTEGERS,
    "real": ("float4", "float8"),
    "double precision": ("float8",),
    "boolean": ("bool",),
    "text": (*_STRINGS, *_FROM_TEXT),
    "bytea": ("bytea",),
    "date": ("date",),
    "timestamptz": ("timestamptz",),
    "timestamp": ("timestamp",),
    "numeric": ("numeric",),
}
_HINTS = {
    ("bytea", "text"): "cast it to a string",
    ("timestamptz", "timestamp"): "cast it to timestamp_ntz, or make the column timestamptz",
    ("timestamp", "timestamptz"): "cast it to timestamp, or make the column a timestamp without time zone",
    ("double precision", "numeric"): "cast it to a decimal",
    ("real", "numeric"): "cast it to a decimal",
    ("double precision", "float4"): "cast it to float, or make the column double precision",
}


class TableMismatchError(ConfigError):
    """The table and the rows do not fit together."""


class TargetColumn(NamedTuple):
    name: str
    type_text: str  # as people write it
    base: str  # its type's name in pg_type, without domains; of an array that of its elements
    plain: str  # the same as a cast names it: without a length, with a schema where that is needed
    is_array: bool
    is_enum: bool
    scale: int | None  # of a numeric with a declared scale
    is_required: bool  # it has no default and must not be null
    is_generated: bool


class TargetTable(NamedTuple):
    name: tuple[str, ...]
    columns: dict[str, TargetColumn]
    primary_key: tuple[str, ...]
    unique: tuple[frozenset[str], ...]  # columns that an upsert may name

    @property
    def text(self) -> str:
        return ".".join(self.name)

    @property
    def identifier(self) -> Identifier:
        from psycopg.sql import Identifier

        return Identifier(*self.name)


class RowColumn(NamedTuple):
    """A column of the rows, with its type for people and as Arrow has it; None where Arrow's does not matter."""

    name: str
    type_text: str
    kind: Any


class WrittenColumn(NamedTuple):
    """A column of the rows: how it travels, and how it is read where it is moved."""

    name: str
    wire: WireType
    cast_to: str | None = None  # the type that it is read as
    always_reads: bool = False  # whether every value on the wire can be read as that

    def read(self, alias: str = "s") -> Composable:
        from psycopg.sql import SQL, Identifier

        column = Identifier(alias, self.name)
        return column if self.cast_to is None else SQL("{}::{}").format(column, SQL(self.cast_to))

    def compared(self, alias: str) -> Composable:
        """To find rows with one key, or the last one: as the table compares values, where none can fail to be read."""
        from psycopg.sql import Identifier

        return self.read(alias) if self.always_reads else Identifier(alias, self.name)


_COLUMNS = """
WITH RECURSIVE base AS (
    SELECT t.oid AS first, t.oid, t.typtype, t.typbasetype, t.typname, t.typelem, t.typcategory, t.typtypmod, 0 AS depth
    FROM pg_type t
    UNION ALL
    SELECT b.first, t.oid, t.typtype, t.typbasetype, t.typname, t.typelem, t.typcategory,
        CASE WHEN b.typtypmod >= 0 THEN b.typtypmod ELSE t.typtypmod END, b.depth + 1
    FROM base b JOIN pg_type t ON t.oid = b.typbasetype WHERE b.typtype = 'd'
)
SELECT a.attname, format_type(a.atttypid, a.atttypmod), b.typname, b.typcategory = 'A' AND b.typelem <> 0,
    coalesce(e.typname, b.typname), format_type(coalesce(e.oid, b.oid), -1), coalesce(e.typtype, b.typtype) = 'e',
    CASE WHEN a.atttypmod >= 0 THEN a.atttypmod ELSE b.typtypmod END,
    a.attnotnull AND NOT a.atthasdef AND a.attidentity = '', a.attgenerated <> '' OR a.attidentity = 'a'
FROM pg_attribute a
JOIN base b ON b.first = a.atttypid AND b.typtype <> 'd'
LEFT JOIN pg_type e ON e.oid = b.typelem AND b.typcategory = 'A'
WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attnum
"""
_KEYS = """
SELECT i.indisprimary, array_agg(a.attname::text ORDER BY k.place)
FROM pg_index i
CROSS JOIN LATERAL unnest(i.indkey::int[]) WITH ORDINALITY AS k (number, place)
JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.number
WHERE i.indrelid = %s AND i.indisunique AND i.indisvalid AND i.indimmediate AND i.indpred IS NULL
    AND i.indexprs IS NULL AND k.place <= i.indnkeyatts
GROUP BY i.indexrelid, i.indisprimary
"""
_KINDS = {"r": "table", "p": "partitioned table", "f": "foreign table", "v": "view"}


def describe(connection: Connection[Any], name: str) -> TargetTable:
    """What the database says about a table."""
    parts = table_name(name)
    quoted = ".".join('"' + part.replace('"', '""') + '"' for part in parts)
    row = connection.execute(
        "SELECT c.oid, c.relkind::text FROM pg_class c WHERE c.oid = to_regclass(%s)", [quoted]
    ).fetchone()
    if row is None:
        raise TableMismatchError(
            f"table {name!r} is not there (search path {_search_path(connection)}); create it, or correct its name: "
            "schema.table, as it is written in the catalog"
        )
    if row[1] not in _KINDS:
        raise TableMismatchError(f"{name!r} is not a table that rows can be written to (relkind {row[1]!r})")
    columns = {found[0]: _column(*found) for found in connection.execute(_COLUMNS, [row[0]])}
    keys = connection.execute(_KEYS, [row[0]]).fetchall()
    primary = next((tuple(names) for is_primary, names in keys if is_primary), ())
    return TargetTable(parts, columns, primary, tuple(frozenset(names) for _, names in keys))


def _search_path(connection: Connection[Any]) -> str:
    row = connection.execute("SELECT current_setting('search_path')").fetchone()
    return "" if row is None else str(row[0])


def _column(
    name: str,
    text: str,
    _type: str,
    is_array: bool,
    base: str,
    plain: str,
    is_enum: bool,
    typmod: int,
    is_required: bool,
    is_generated: bool,
) -> TargetColumn:
    scale = None if base != "numeric" or typmod < 4 else _scale(typmod)
    return TargetColumn(name, text, base, plain, is_array, is_enum, scale, is_required, is_generated)


def _scale(typmod: int) -> int:
    """The scale of numeric(precision, scale): 11 bits of the modifier, with a sign."""
    return ((typmod - 4) & 0x7FF ^ 1024) - 1024


# --- do the rows fit? ---
def fitting(
    table: TargetTable, rows: Sequence[RowColumn], aside: Collection[str] = (), *, stores: bool = True
) -> list[WrittenColumn]:
    """How the columns of the rows are written. `aside` names columns that the table need not have; `stores` is False
    where the rows only say which ones are deleted.

    Everything that is wrong is in one error, with both sides."""
    wrong = _missing(table, [field.name for field in rows], stores)
    written = []
    for field in rows:
        wire = None if field.kind is None else wire_type(field.kind)
        column = table.columns.get(field.name)
        if column is None and field.name not in aside:
            wrong.append(_unknown(table, field))
        elif wire is None:
            wrong.append(_no_wire(field))
        elif column is not None and (problem := _misfit(field, wire, column, stores)):
            wrong.append(problem)
        else:
            written.append(WrittenColumn(field.name, wire, *_cast(field, wire, column)))
    if wrong:
        raise TableMismatchError(f"the rows do not fit table {table.text!r}: {'; '.join(wrong)}. Nothing was written")
    return written


def _missing(table: TargetTable, names: Sequence[str], stores: bool) -> list[str]:
    doubled = sorted({name for name in names if names.count(name) > 1})
    required = [column for column in table.columns.values() if stores and column.is_required]
    absent = [column for column in required if column.name not in names]
    return [f"the rows have several columns {name!r}" for name in doubled] + [
        f"column {column.name!r} ({column.type_text}) of the table is NOT NULL without a default, and the rows do not "
        "have it"
        for column in absent
    ]


def _unknown(table: TargetTable, field: RowColumn) -> str:
    near = next((found for found in table.columns if found.lower() == field.name.lower()), None)
    hint = f"it has {near!r}, and names are case-sensitive" if near else f"it has {', '.join(table.columns)}"
    return f"the rows have a column {field.name!r} ({field.type_text}), the table has not: {hint}"


def _no_wire(field: RowColumn) -> str:
    return (
        f"column {field.name!r} of the rows is {field.type_text}, which has no counterpart; write structs, maps and "
        "nested arrays as JSON, with to_json(...), and others as a string"
    )


def _misfit(field: RowColumn, wire: WireType, column: TargetColumn, stores: bool) -> str:
    """Why a column cannot go where it should; "" if it can."""
    if column.is_generated and stores:
        return f"column {field.name!r} of the table is generated always; leave it out of the rows"
    is_array, inside = wire.name.endswith("[]"), wire.name.removesuffix("[]")
    scale = _scale_of(field.kind)
    inside = inside if scale is None else "numeric"  # long ones travel as text
    fits = is_array == column.is_array and (column.base in FITS[inside] or (column.is_enum and inside == "text"))
    if not fits:
        hint = _HINTS.get((inside, column.base), "cast it, or change the column")
        return f"column {field.name!r} is {field.type_text} in the rows and {column.type_text} in the table; {hint}"
    if scale is not None and column.scale is not None and scale > column.scale:
        return (
            f"column {field.name!r} has {scale} decimal places in the rows and {column.scale} in the table "
            f"({column.type_text}), so values would be rounded; cast it"
        )
    return ""


def _scale_of(kind: Any) -> int | None:
    import pyarrow as pa

    inside = kind.value_type if pa.types.is_list(kind) else kind
    return inside.scale if pa.types.is_decimal(inside) else None


def _cast(field: RowColumn, wire: WireType, column: TargetColumn | None) -> tuple[str | None, bool]:
    """The type that values are read as, and whether all of them can be. Without a length: an explicit cast to
    varchar(5) would cut values off, an assignment refuses them."""
    brackets = "[]" if wire.name.endswith("[]") else ""
    if _scale_of(field.kind) is not None:
        return f"numeric{brackets}", True  # long ones travel as text, where 9 is above 10
    if column is None or column.base in ("text", "varchar"):
        return None, False
    if column.base in ("timestamp", "timestamptz") and "(" in column.type_text:
        return column.type_text, True  # rounded as the table does it
    if not wire.name.startswith("text"):
        return None, False
    return f"{column.plain}{brackets}", column.base in _STRINGS


# --- keys ---
def upsert_key(table: TargetTable, given: Sequence[str]) -> tuple[str, ...]:
    """The key columns of an upsert: those that are given, or the primary key."""
    key = tuple(given) or table.primary_key
    if not key:
        raise TableMismatchError(f"table {table.text!r} has no primary key; name the key columns with key=[...]")
    if frozenset(key) not in table.unique:
        known = "; ".join(", ".join(sorted(names)) for names in table.unique) or "none"
        raise TableMismatchError(
            f"table {table.text!r} has no primary key and no unique index on exactly the columns {', '.join(key)}, "
            f"which an upsert needs (partial and deferrable ones do not count; it has: {known}). Create one: CREATE "
            f"UNIQUE INDEX ON {table.text} ({', '.join(key)})"
        )
    return key


def delete_key(table: TargetTable, key: Sequence[str]) -> None:
    """Refuses columns to delete by that the table does not have."""
    missing = [name for name in key if name not in table.columns]
    if missing:
        raise TableMismatchError(
            f"table {table.text!r} has no column {missing[0]!r}; it has {', '.join(table.columns)}"
        )
