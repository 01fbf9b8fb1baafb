"""Rows and tables as the content of files: Parquet and JSON lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, BinaryIO, NamedTuple, Protocol
from urllib.parse import quote

import msgspec

from semel.client.errors import ConfigError
from semel.sinks.files.errors import FolderError, UnfitRowError
from semel.sinks.files.settings import Files

LONGEST_NAME = 255  # bytes
NULL_FOLDER = "__HIVE_DEFAULT_PARTITION__"


class FileChunk(NamedTuple):
    """Rows for one subfolder: a table, or bytes."""

    subfolder: str
    content: Any
    rows: int


class ContentWriter(Protocol):
    suffix: str

    def write(self, file: BinaryIO, parts: Sequence[Any]) -> None:
        """The contents of several chunks as one file."""
        ...


class FileFormat(ContentWriter, Protocol):
    def of_rows(self, rows: Sequence[Mapping[str, Any]]) -> list[FileChunk]:
        """Raises `UnfitRowError` if one of them cannot be written."""
        ...

    def of_table(self, table: Any) -> list[FileChunk]: ...


def rows_of(returned: Any) -> list[Mapping[str, Any]]:
    """What a function returned for a record, as rows."""
    if returned is None:
        return []
    if isinstance(returned, Mapping):
        return [returned]
    if isinstance(returned, Iterable) and not isinstance(returned, str | bytes | bytearray | memoryview):
        return [row for part in returned for row in rows_of(part)]
    raise ConfigError(
        f"the function returned {type(returned).__name__}; expected None, a dict of columns, or several of them"
    )


def subfolder_of(names: Sequence[str], values: Iterable[Any]) -> str:
    parts = []
    for name, value in zip(names, values, strict=True):
        try:
            part = f"{quote(name, safe='')}={NULL_FOLDER if value is None else quote(str(value), safe=' ')}"
        except UnicodeEncodeError as error:
            raise UnfitRowError(f"the value of {name!r} cannot be the name of a folder: {error}") from error
        if len(part) > LONGEST_NAME:
            raise UnfitRowError(
                f"the value of {name!r}, which partition_by names, makes a folder's name of {len(part)} bytes; file "
                f"systems take {LONGEST_NAME}"
            )
        parts.append(part)
    return "/".join(parts)


def _refuse_fractions(name: str, kind: Any, values: Iterable[Any]) -> None:
    """Arrow cuts them off where a column is of integers: 19.99 would become 19."""
    import pyarrow as pa

    if pa.types.is_integer(kind):
        for value in values:
            if isinstance(value, float | Decimal) and value != int(value):
                raise UnfitRowError(f"the column {name!r} is {kind}, and {value!r} is no integer")
    elif pa.types.is_map(kind):
        pairs = [pair for value in values for pair in (value.items() if isinstance(value, Mapping) else value or ())]
        _refuse_fractions(name, kind.key_type, (key for key, _ in pairs))
        _refuse_fractions(name, kind.item_type, (item for _, item in pairs))
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        _refuse_fractions(name, kind.value_type, (item for value in values for item in value or ()))
    elif pa.types.is_struct(kind):
        rows = [value for value in values if isinstance(value, Mapping)]
        for field in kind:
            _refuse_fractions(f"{name}.{field.name}", field.type, (row.get(field.name) for row in rows))


class JsonLines:
    suffix = ".jsonl"

    def __init__(self, partition_by: Sequence[str] = ()) -> None:
        self._by = partition_by

    def of_rows(self, rows: Sequence[Mapping[str, Any]]) -> list[FileChunk]:
        lines: dict[str, list[bytes]] = {}
        for row in rows:
            missing = [name for name in self._by if name not in row]
            if missing:
                raise UnfitRowError(f"the row has no {missing[0]!r}, which partition_by names")
            try:
                line = msgspec.json.encode(row)
            except (TypeError, ValueError, RecursionError) as error:
                raise UnfitRowError(f"the row is no JSON: {error}") from error
            lines.setdefault(subfolder_of(self._by, [row[name] for name in self._by]), []).append(line)
        return [FileChunk(place, b"\n".join(part) + b"\n", len(part)) for place, part in lines.items()]

    def of_table(self, table: Any) -> list[FileChunk]:
        return self.of_rows(table.to_pylist())

    def write(self, file: BinaryIO, parts: Sequence[Any]) -> None:
        for part in parts:
            file.write(part)


class Parquet:
    suffix = ".parquet"

    def __init__(self, schema: Any = None, partition_by: Sequence[str] = (), compression: str = "zstd") -> None:
        self._schema = schema
        self._by = partition_by
        self._compression = compression

    def of_rows(self, rows: Sequence[Mapping[str, Any]]) -> list[FileChunk]:
        import pyarrow as pa

        if self._schema is None:  # rows beside tables: what on_error makes of a record
            return self._unknown(rows)
        known = set(self._schema.names)
        for row in rows:
            if not known.issuperset(row):
                raise UnfitRowError(
                    f"the row has {min(set(row) - known)!r}; the schema has {', '.join(self._schema.names)}"
                )
        try:
            chunks = self.of_table(pa.Table.from_pylist(list(rows), schema=self._schema))
            for field in self._schema:
                _refuse_fractions(field.name, field.type, (row.get(field.name) for row in rows))
            return chunks
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise UnfitRowError(f"the row does not fit the schema: {error}") from error

    def _unknown(self, rows: Sequence[Mapping[str, Any]]) -> list[FileChunk]:
        import pyarrow as pa

        try:
            return self.of_table(pa.Table.from_pylist(list(rows))) if rows else []
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise UnfitRowError(f"the row has no types that Parquet knows: {error}") from error

    def of_table(self, table: Any) -> list[FileChunk]:
        import pyarrow as pa

        if self._schema is not None and table.schema != self._schema:
            try:
                table = table.select(self._schema.names).cast(self._schema)
            except (pa.ArrowException, KeyError, ValueError) as error:
                raise UnfitRowError(f"the table does not fit the schema: {error}") from error
        for field in table.schema:
            if not field.nullable and table.column(field.name).null_count:
                raise UnfitRowError(f"the column {field.name!r} has no value, and the schema says that it must")
        return [FileChunk(place, part, part.num_rows) for place, part in self._split(table) if part.num_rows]

    def _split(self, table: Any) -> list[tuple[str, Any]]:
        """By the values of the columns of `partition_by`."""
        import pyarrow.compute as pc

        if not self._by:
            return [("", table)]
        self._check_partitioning(table.schema)
        parts = []
        for row in table.select(self._by).group_by(list(self._by)).aggregate([]).to_pylist():
            mask: Any = True
            for name in self._by:
                column, value = table.column(name), row[name]
                same = pc.is_null(column) if value is None else pc.fill_null(pc.equal(column, value), False)
                mask = same if mask is True else pc.and_(mask, same)
            parts.append((subfolder_of(self._by, [row[name] for name in self._by]), table.filter(mask)))
        if sum(part.num_rows for _, part in parts) != table.num_rows:
            raise UnfitRowError("the rows cannot be told apart by the values of partition_by")
        return parts

    def _check_partitioning(self, schema: Any) -> None:
        import pyarrow as pa

        for name in self._by:
            if name not in schema.names:
                raise UnfitRowError(f"the table has no column {name!r}, which partition_by names")
            if pa.types.is_floating(schema.field(name).type):
                raise UnfitRowError(f"partition_by names {name!r}, a floating-point number: not equal to itself if NaN")

    def write(self, file: BinaryIO, parts: Sequence[Any]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            table = pa.concat_tables(parts, promote_options="permissive")
            pq.write_table(table, file, compression=self._compression)
        except pa.ArrowException as error:
            if isinstance(error, OSError):
                raise
            raise FolderError(
                f"the tables of one unit of work cannot be one Parquet file: {error}; give Files a schema, or return "
                "tables whose columns always have the same types"
            ) from error


def format_of(settings: Files) -> FileFormat:
    if settings.format == "jsonl":
        return JsonLines(settings.partition_by)
    return Parquet(settings.schema, settings.partition_by, settings.compression)


DEAD_LETTERS = JsonLines()
