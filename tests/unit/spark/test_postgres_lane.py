"""What the tasks of the fast lane to a table share out, and what the driver takes from them."""

from __future__ import annotations

import msgspec
import pyarrow as pa
import pytest

from semel.sinks.postgres.binary_copy import WireType
from semel.sinks.postgres.target import WrittenColumn
from semel.spark.offsets import Range
from semel.spark.postgres_lane import columns_of, dealt_out, one_schema
from semel.spark.range_tasks import FunctionError
from semel.spark.writing import Report

COLUMNS = [WrittenColumn("id", WireType("bigint", 20)), WrittenColumn("doc", WireType("text", 25), "jsonb", False)]


def report(columns: list[WrittenColumn]) -> Report:
    return Report(0, 1, 0, -1, -1, 0, 7, message=msgspec.json.encode(columns).decode())


def test_every_range_is_dealt_out_once_and_evenly() -> None:
    ranges = [Range("in", number, 0, size, None) for number, size in enumerate([5, 100, 60, 30, 10])]
    dealt = dealt_out(ranges, 2)
    assert sorted(one for given in dealt for one in given) == ranges
    assert [sum(one.size for one in given) for given in dealt] == [105, 100]
    assert dealt_out(ranges[:1], 4) == [ranges[:1]]


def test_the_driver_takes_the_columns_that_all_tasks_report() -> None:
    assert columns_of([]) == ()
    assert columns_of([report(COLUMNS), report(COLUMNS)]) == COLUMNS
    with pytest.raises(FunctionError, match=r"different columns .*: id bigint; id bigint, doc text\."):
        columns_of([report(COLUMNS), report(COLUMNS[:1])])


def test_a_task_takes_tables_of_one_schema() -> None:
    first, same = pa.table({"id": [1, 2]}), pa.table({"id": [3]})
    assert [batch["id"].to_pylist() for batch in one_schema(first, iter([same]))] == [[1, 2], [3]]
    with pytest.raises(FunctionError, match=r"\(id int64\), then \(id double\)"):
        list(one_schema(first, iter([pa.table({"id": [0.5]})])))
