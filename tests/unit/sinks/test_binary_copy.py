"""Columns that go through binary COPY come back as they were; psycopg, which reads them, shares no code with it."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from semel.sinks.postgres.binary_copy import HEADER, TRAILER, encoded, wire_type

UTC = dt.UTC
COLUMNS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "flag": (pa.bool_(), [True, False, None, True]),
    "tiny": (pa.int8(), [-128, 127, None, 0]),
    "small": (pa.int16(), [-32768, 32767, None, 0]),
    "whole": (pa.int32(), [-(2**31), 2**31 - 1, None, 0]),
    "big": (pa.int64(), [-(2**63), 2**63 - 1, None, 0]),
    "single": (pa.float32(), [1.5, float("inf"), None, -0.0]),
    "double": (pa.float64(), [1e308, float("-inf"), None, 5e-324]),
    "words": (pa.string(), ["", "größer als \N{SNOWMAN}", None, "x" * 10_000]),
    "bytes": (pa.binary(), [b"", b"\x00\xff", None, bytes(range(256))]),
    "day": (pa.date32(), [dt.date(1, 1, 1), dt.date(9999, 12, 31), None, dt.date(2000, 1, 1)]),
    "instant": (
        pa.timestamp("us", "Europe/Berlin"),
        [dt.datetime(1, 1, 2, tzinfo=UTC), dt.datetime(9999, 12, 30, 23, 59, 59, 999_999, tzinfo=UTC), None]
        + [dt.datetime(1999, 12, 31, 23, 59, 59, 1, tzinfo=UTC)],
    ),
    "local_time": (
        pa.timestamp("us"),
        [dt.datetime(1, 1, 1), dt.datetime(9999, 12, 31), None, dt.datetime(2000, 1, 1)],
    ),
    "cents": (pa.decimal128(12, 2), [Decimal("-9999999999.99"), Decimal("0.01"), None, Decimal("1000000.00")]),
    "tiny_parts": (pa.decimal128(18, 18), [Decimal("0.000000000000000001"), Decimal("-0.9"), None, Decimal(0)]),
    "no_parts": (pa.decimal128(18, 0), [Decimal(10**18 - 1), Decimal(-(10**18) + 1), None, Decimal(10_000)]),
    "three_parts": (pa.decimal128(9, 3), [Decimal("1.001"), Decimal("-10000.010"), None, Decimal("99.999")]),
    "long": (pa.decimal128(38, 10), [Decimal("1234567890123456789012345678.0123456789"), Decimal("-1E-10"), None, 0]),
    "numbers": (pa.list_(pa.int32()), [[1, None, -3], [], None, [7]]),
    "texts": (pa.list_(pa.string()), [["a", ""], [None], None, []]),
    "moneys": (pa.list_(pa.decimal128(9, 2)), [[Decimal("1.10")], [], None, [None, Decimal("-2.00")]]),
    "flags": (pa.list_(pa.bool_()), [[True, False], [], None, [None]]),
}


def through(connection: psycopg.Connection[Any], batch: pa.RecordBatch, chunk_bytes: int = 1 << 20) -> list[tuple]:
    """The rows as psycopg reads them from a table of the types on the wire."""
    wires = [wire_type(kind) for kind in batch.schema.types]
    columns = ", ".join(f'"{name}" {wire.name}' for name, wire in zip(batch.schema.names, wires, strict=True) if wire)
    connection.execute(f"CREATE TEMP TABLE sample ({columns})")
    with connection.cursor() as cursor, cursor.copy("COPY sample FROM STDIN (FORMAT BINARY)") as copy:
        copy.write(HEADER)
        for piece in encoded(batch, chunk_bytes):
            copy.write(piece)
        copy.write(TRAILER)
    texts = [
        name for name, kind in zip(batch.schema.names, batch.schema.types, strict=True) if pa.types.is_decimal(kind)
    ]
    read = ", ".join(f'"{name}"::numeric' if name in texts else f'"{name}"' for name in batch.schema.names)
    found = connection.execute(f"SELECT {read} FROM sample").fetchall()
    connection.execute("DROP TABLE sample")
    return found


@pytest.fixture
def connection(dsn: str) -> Any:
    with psycopg.connect(dsn, autocommit=True) as found:
        yield found


def test_every_type_comes_back_as_it_was(connection: psycopg.Connection[Any]) -> None:
    arrays = {name: pa.array(values, kind) for name, (kind, values) in COLUMNS.items()}
    batch = pa.RecordBatch.from_pydict(arrays)
    rows = [tuple(values[row] for _, values in COLUMNS.values()) for row in range(4)]
    assert through(connection, batch) == rows
    assert through(connection, batch, chunk_bytes=1) == rows, "row by row"
    assert through(connection, batch.slice(1, 2)) == rows[1:3], "a slice of a batch"
    assert through(connection, batch.slice(0, 2)) == rows[:2], "without a null, all values have their place"
    assert through(connection, batch.slice(2, 1)) == rows[2:3], "nothing but nulls"
    assert through(connection, batch.slice(0, 0)) == []


def test_a_list_that_is_null_may_cover_values(connection: psycopg.Connection[Any]) -> None:
    """As after a filter: the values of a null list are in the buffer, and not in the stream."""
    lists = pa.ListArray.from_arrays(
        pa.array([0, 2, 4, 5]), pa.array([1, 2, 3, 4, 5]), mask=pa.array([False, True, False])
    )
    assert through(connection, pa.RecordBatch.from_pydict({"numbers": lists})) == [([1, 2],), (None,), ([5],)]


@pytest.mark.parametrize(
    "kind",
    [pa.struct([("a", pa.int32())]), pa.map_(pa.string(), pa.int32()), pa.list_(pa.list_(pa.int32())), pa.null()],
)
def test_types_without_a_counterpart_are_known(kind: pa.DataType) -> None:
    assert wire_type(kind) is None


def test_a_large_batch_is_encoded_in_pieces_of_a_bounded_size() -> None:
    batch = pa.RecordBatch.from_pydict({"wide": pa.array([b"x" * 100_000] * 100)})
    sizes = [len(piece) for piece in encoded(batch, chunk_bytes=1 << 20)]
    assert sum(sizes) == 100 * (100_000 + 2 + 4)
    assert max(sizes) <= 1 << 20
