"""Texts and times that PostgreSQL cannot hold are found in every type that Spark has for them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from semel.sinks.postgres.binary_copy import DAYS, HEADER, MICROSECONDS, TRAILER, encoded, wire_type
from semel.sinks.postgres.database import Database
from semel.sinks.postgres.staging import REASON
from semel.spark.encoding import BadRowError
from semel.spark.postgres_tasks import checked_values


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.list_(pa.string()), pa.list_(pa.large_string())])
def test_a_text_with_nul_is_set_aside_or_named(kind: Any) -> None:
    """Large types come with spark.sql.execution.arrow.useLargeVarTypes."""
    texts: list[Any] = ["a\0b", "c"]
    values = [[text] for text in texts] if pa.types.is_list(kind) else texts
    batch = pa.RecordBatch.from_arrays([pa.array(values, kind)], names=["x"])
    assert checked_values(batch, True).column(REASON).to_pylist() == ["column 'x' holds the character NUL", None]
    with pytest.raises(BadRowError, match="column 'x' of a row holds the character NUL"):
        checked_values(batch, False)


DAY, MICROSECOND = (pa.date32(), "days"), (pa.timestamp("us", "UTC"), "microseconds")


@pytest.mark.parametrize(
    ("kind", "unit", "number"),
    [(*DAY, -2_440_589), (*DAY, 2_145_042_906), (*MICROSECOND, -(2**63)), (*MICROSECOND, -210_866_803_200_000_001)],
)
@pytest.mark.parametrize("is_list", [False, True])
def test_a_time_that_postgresql_cannot_hold_is_set_aside_or_named(
    kind: pa.DataType, unit: str, number: int, is_list: bool
) -> None:
    """COPY would refuse all rows, or take the time for another: the earliest one for one in the year 294247."""
    column = pa.array([number, 0, None], pa.int32() if unit == "days" else pa.int64()).cast(kind)
    if is_list:
        column = pa.ListArray.from_arrays(pa.array([0, 0, 1, 3], pa.int32()), column).slice(1)
    batch = pa.RecordBatch.from_arrays([column], names=["x"])
    found = checked_values(batch, True)
    assert found.column(REASON).to_pylist()[0] == f"column 'x' is {number} {unit} from 1970"
    assert found.column(REASON).null_count == len(batch) - 1
    assert found.column("x").null_count == (1 if is_list else 2)
    with pytest.raises(BadRowError, match=f"column 'x' of a row is {number} {unit} from 1970"):
        checked_values(batch, False)


@pytest.mark.parametrize(("kind", "numbers"), [(pa.date32(), DAYS), (pa.timestamp("us"), MICROSECONDS)])
def test_times_up_to_the_edge_are_stored(dsn: str, kind: pa.DataType, numbers: tuple[int, int]) -> None:
    batch = pa.RecordBatch.from_arrays([pa.array(numbers, pa.int64()).cast(_whole(kind)).cast(kind)], names=["x"])
    assert checked_values(batch, False).column(0) == batch.column(0)
    connection = Database(dsn).connect("test")
    wire = wire_type(kind)
    assert wire is not None
    connection.execute(f"CREATE TEMP TABLE t (x {wire.name})")
    with connection.cursor() as cursor, cursor.copy("COPY t FROM STDIN (FORMAT BINARY)") as copy:
        for piece in (HEADER, *encoded(batch), TRAILER):
            copy.write(piece)
    (first,), _ = connection.execute("SELECT x::text FROM t").fetchall()
    assert (first[:10], first[-2:]) == ("4714-11-24", "BC")
    connection.close()


def _whole(kind: pa.DataType) -> pa.DataType:
    return pa.int32() if pa.types.is_date(kind) else pa.int64()
