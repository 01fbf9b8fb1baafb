"""Arrow tables to PostgreSQL: COPY into a temporary table, then one statement, inside the caller's transaction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from semel.client.errors import ConfigError
from semel.sinks.postgres.binary_copy import HEADER, TRAILER, WireType, bad_times, encoded, wire_type
from semel.sinks.postgres.errors import RowRefusedError
from semel.sinks.postgres.moving import DELETE, UPSERT, Move
from semel.sinks.postgres.settings import Postgres
from semel.sinks.postgres.staging import Staged
from semel.sinks.postgres.target import (
    FITS,
    RowColumn,
    TargetColumn,
    TargetTable,
    WrittenColumn,
    delete_key,
    describe,
    fitting,
    upsert_key,
)

if TYPE_CHECKING:
    from psycopg import Connection

TEMPORARY = "pg_temp"  # the schema of temporary tables, in any session
STAGE = "semel_rows"
PLACE = "semel_place"  # of several rows of one key, the last one counts


class TableForTable(NamedTuple):
    """Rows as columns, and the table that they go to."""

    name: str
    rows: Any


def tables_of(returned: Any, table: str | None) -> list[TableForTable]:
    """What a function returned for a table: None, a table for the sink's own, or several by name."""
    import pyarrow as pa

    if returned is None:
        return []
    found = []
    for name, rows in returned.items() if isinstance(returned, Mapping) else [(table, returned)]:
        if not isinstance(rows, pa.Table | pa.RecordBatch):
            raise ConfigError(
                f"the function returned {type(rows).__name__}; with tables=True expected None, a pyarrow.Table, or "
                "several by the name of their table: {name: table}"
            )
        if name is None:
            raise ConfigError("there is no table: give Postgres(table=...), or return {name: table}")
        found.append(TableForTable(name, rows if isinstance(rows, pa.Table) else pa.Table.from_batches([rows])))
    return [each for each in found if each.rows.num_rows]


class TableWriter:
    """Writes what functions return. Knows the tables that it has needed so far."""

    def __init__(self, settings: Postgres) -> None:
        self._settings = settings
        self._targets: dict[str, TargetTable] = {}

    def write(self, connection: Connection[Any], made: Iterable[TableForTable]) -> int:
        """All of it in its order; the number of rows."""
        try:
            return sum(self._write(connection, name, rows) for name, rows in _joined(made))
        except BaseException:
            self._targets.clear()  # a table may have been altered
            raise

    def _write(self, connection: Connection[Any], name: str, rows: Any) -> int:
        if name not in self._targets:
            self._targets[name] = describe(connection, name)
        target, mode = self._targets[name], self._settings.mode
        key = self._key(target, name)
        missing = [column for column in key if column not in rows.column_names]
        if missing or not rows.num_columns:
            raise ConfigError(
                f"the rows for table {target.text!r} lack {', '.join(missing) or 'all columns'}; they have "
                f"{', '.join(rows.column_names) or 'none'}"
            )
        rows = plain(rows.select(key) if mode == DELETE else rows, target)
        _refuse_bad_values(rows, key)
        fields = [RowColumn(field.name, str(field.type), field.type) for field in rows.schema]
        columns = fitting(target, fields, stores=mode != DELETE)
        order: tuple[str, ...] = ()
        if mode == UPSERT:
            rows, order = _numbered(rows), (PLACE,)
            columns = [*columns, WrittenColumn(PLACE, WireType("bigint", 20))]
        staged = _stage(connection, columns, rows)
        move = Move(TEMPORARY, target, columns, mode, key, order)
        connection.execute(move.statement(move.good([staged])))  # what is refused, the caller finds
        connection.execute(f"DROP TABLE {TEMPORARY}.{STAGE}")
        return staged.rows

    def _key(self, target: TargetTable, name: str) -> tuple[str, ...]:
        given = (self._settings.key or ()) if name == self._settings.table else ()
        if self._settings.mode == UPSERT:
            return upsert_key(target, given)
        if self._settings.mode != DELETE:
            return ()
        key = given or target.primary_key
        delete_key(target, key)
        if not key:
            raise ConfigError(f"table {target.text!r} has no primary key; name the key's columns with key=...")
        return key


def _joined(made: Iterable[TableForTable]) -> Iterable[TableForTable]:
    """Neighbours for one table, with the same columns, go together."""
    import pyarrow as pa

    run: list[TableForTable] = []
    for each in made:
        if run and (run[0].name, run[0].rows.schema) != (each.name, each.rows.schema):
            yield TableForTable(run[0].name, pa.concat_tables([one.rows for one in run]))
            run = []
        run.append(each)
    if run:
        yield TableForTable(run[0].name, pa.concat_tables([one.rows for one in run]))


def plain(rows: Any, target: TargetTable) -> Any:
    """In types that PostgreSQL has a counterpart of. A column of nothing but nulls, or of empty lists, has no type in
    Arrow: it gets that of the table."""
    import pyarrow as pa

    for number, field in enumerate(rows.schema):
        kind, column = _counterpart(field.type), target.columns.get(field.name)
        is_empty = pa.types.is_list(kind) and pa.types.is_null(kind.value_type)
        if column is not None and (pa.types.is_null(kind) or (is_empty and column.is_array)):
            kind = _kind_of(column)
        if kind != field.type:
            rows = rows.set_column(number, field.name, _cast(rows.column(number), field.name, kind))
    return rows


def _counterpart(kind: Any) -> Any:
    """The type that values of a type of Arrow are sent in, where nothing is lost by it."""
    import pyarrow as pa

    wider = {
        pa.uint8(): pa.int16(),
        pa.uint16(): pa.int32(),
        pa.uint32(): pa.int64(),
        pa.float16(): pa.float32(),
        pa.date64(): pa.date32(),
        pa.string_view(): pa.string(),
        pa.binary_view(): pa.binary(),
    }
    if pa.types.is_dictionary(kind):
        return _counterpart(kind.value_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(_counterpart(kind.value_type))
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    if pa.types.is_decimal(kind) and kind.scale < 0 and kind.precision - kind.scale <= 38:
        return pa.decimal128(kind.precision - kind.scale, 0)
    return wider.get(kind, kind)


def _cast(column: Any, name: str, kind: Any) -> Any:
    import pyarrow as pa

    try:
        return column.cast(kind)
    except pa.ArrowInvalid as error:
        raise RowRefusedError(f"column {name!r} is {column.type}, and PostgreSQL has {kind}: {error}") from error


def _refuse_bad_values(rows: Any, key: Iterable[str]) -> None:
    """What the database would not refuse, or only with all other rows."""
    for name in key:
        if rows.column(name).null_count:
            raise RowRefusedError(f"key column {name!r} is null")
    for batch in rows.to_batches():
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            for why in bad_times(column).values():
                raise RowRefusedError(f"column {name!r} {why}, which PostgreSQL cannot hold")


def _kind_of(column: TargetColumn) -> Any:
    import pyarrow as pa

    kinds = [pa.bool_(), pa.int64(), pa.float32(), pa.float64(), pa.binary(), pa.date32()]
    kinds += [pa.timestamp("us"), pa.timestamp("us", "UTC")]
    wires = [(kind, wire_type(kind)) for kind in kinds]
    kind = next((kind for kind, wire in wires if wire is not None and column.base in FITS[wire.name]), pa.string())
    return pa.list_(kind) if column.is_array else kind


def _numbered(rows: Any) -> Any:
    import pyarrow as pa

    return rows.append_column(PLACE, pa.array(range(rows.num_rows), pa.int64()))


def _stage(connection: Connection[Any], columns: list[WrittenColumn], rows: Any) -> Staged:
    from psycopg.sql import SQL, Identifier

    connection.execute("SET LOCAL client_encoding TO 'UTF8'")  # of the texts that follow, whatever the database has
    types = [SQL("{} {}").format(Identifier(column.name), SQL(column.wire.name)) for column in columns]
    create = SQL("CREATE TEMPORARY TABLE {} ({}) ON COMMIT DROP")
    connection.execute(create.format(Identifier(STAGE), SQL(", ").join(types)))
    with connection.cursor() as cursor, cursor.copy(f"COPY {TEMPORARY}.{STAGE} FROM STDIN (FORMAT BINARY)") as copy:
        copy.write(HEADER)
        for batch in rows.to_batches():
            for piece in encoded(batch):
                copy.write(piece)
        copy.write(TRAILER)
    return Staged(STAGE, rows.num_rows)
