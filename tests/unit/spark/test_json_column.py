"""The source's column `json`: what Python's own JSON reads with the schema's types, and null for everything else."""

from __future__ import annotations

import json
import random
from datetime import UTC, date, datetime

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    ByteType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from semel.spark.options import OptionError, SourceOptions, schema_of
from semel.spark.source import json_parser, read_as

BASE = {"kafka.bootstrap.servers": "h:1", "subscribe": "a"}


def parsed(values, **fields):
    kind = StructType([StructField(name, chosen) for name, chosen in fields.items()])
    return json_parser(kind)(pa.chunked_array([pa.array(values, pa.binary())])).to_pylist()


def test_fields_are_read_in_the_types_of_the_schema_and_others_are_skipped():
    value = (
        b'{"id": 7, "name": "\\u00e4", "sum": 2, "ok": true, "more": {"x": 1}, "at": "2026-01-01T02:00:00+02:00", '
        b'"local": "2026-01-01T02:00:00.5", "day": "2026-01-02", "list": [1, null], "map": {"a": "b"}, '
        b'"deep": {"id": 3}}'
    )
    [found] = parsed(
        [value],
        id=LongType(),
        name=StringType(),
        sum=DoubleType(),
        ok=BooleanType(),
        at=TimestampType(),
        local=TimestampNTZType(),
        day=DateType(),
        list=ArrayType(IntegerType()),
        map=MapType(StringType(), StringType()),
        deep=StructType([StructField("id", ByteType())]),
        absent=StringType(),
    )
    assert found == {
        "id": 7,
        "name": "ä",
        "sum": 2.0,
        "ok": True,
        "at": datetime(2026, 1, 1, tzinfo=UTC),
        "local": datetime(2026, 1, 1, 2, 0, 0, 500_000),
        "day": date(2026, 1, 2),
        "list": [1, None],
        "map": [("a", "b")],
        "deep": {"id": 3},
        "absent": None,
    }


UNREADABLE = [
    None,
    b"",
    b"  ",
    b"not JSON",
    b"null",
    b"[1]",
    b'{"id": 1',
    b"}",
    b'{"id": 1} {"id": 2}',
    b'{"id": 1}\n{"id": 2}',
    b'{"id": "1"}',
    b'{"id": 1.5}',
    b'{"id": 2147483648}',
    b'{"id": 1, "name": "\xff"}',
    b'{"id": 1, "name": "\\ud800"}',
    b'{"id": 1, "at": "2026-01-01T00:00:00"}',
    b'{"deep": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
]


def test_a_value_that_cannot_be_read_is_null_and_its_neighbours_are_not():
    values = [each for bad in UNREADABLE for each in (bad, b'{"id": %d}' % len(bad or b""))]
    found = parsed(values, id=IntegerType(), name=StringType(), at=TimestampType())
    assert found[::2] == [None] * len(UNREADABLE)
    assert [row["id"] for row in found[1::2]] == [len(bad or b"") for bad in UNREADABLE]


def test_damaged_values_are_read_as_pythons_json_reads_them():
    """A row in its place, whatever its neighbours hold. Only what is the same in both is compared."""
    rng = random.Random(19)
    values = []
    for number in range(3_000):
        text = json.dumps({"id": number, "name": rng.choice(["x", "\n", '"', "ü"]) * rng.randint(0, 5), "z": [{}]})
        damaged = bytearray(text.encode())
        if number % 2:
            damaged[rng.randrange(len(damaged))] = rng.choice(b'{}[]",: \n0a')
        values.append(bytes(damaged))
    found = parsed(values, id=LongType(), name=StringType())
    assert [row and (row["id"], row["name"]) for row in found] == [reference(value) for value in values]
    assert 500 < found.count(None) < 1_500


def reference(value):
    try:
        read = json.loads(value.decode())
    except ValueError:
        return None
    if not isinstance(read, dict):
        return None
    wanted = {"id": int, "name": str}
    if any(name in read and type(read[name]) is not kind for name, kind in wanted.items()):
        return None
    return read.get("id"), read.get("name")


@pytest.mark.parametrize("kind", [DecimalType(10, 2), MapType(IntegerType(), StringType())])
def test_types_that_cannot_be_read_are_refused_with_the_remedy(kind):
    with pytest.raises(OptionError, match="from_json in the query"):
        read_as(StructType([StructField("inner", ArrayType(kind))]))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ([StructField("id", LongType(), nullable=False)], "field 'id' is NOT NULL"),
        ([StructField("id", LongType()), StructField("id", StringType())], "the field 'id' twice"),
    ],
)
def test_schemas_that_no_column_can_have_are_refused_before_anything_is_read(fields, why):
    for kind in (StructType(fields), StructType([StructField("deep", ArrayType(StructType(fields)))])):
        with pytest.raises(OptionError, match=why):
            read_as(kind)


def test_a_number_beyond_a_float_is_out_of_range():
    values = [b"1e39", b"-1e39", b"3.4028235677973366e38", b"3.40282356e38", b"-3.4028235e38", b"1e-60", b"7"]
    found = parsed([b'{"ratio": %s}' % value for value in values], ratio=FloatType())
    largest = 2.0**128 - 2.0**104
    assert [row and row["ratio"] for row in found] == [None, None, None, largest, -largest, 0.0, 7.0]


def test_the_column_is_there_with_its_option_only():
    assert "json" not in SourceOptions.parse(BASE, True).columns
    options = SourceOptions.parse({**BASE, "JSONSCHEMA": "id long", "columns": "JSON,key"}, True)
    assert options.columns == ("json", "key")
    assert schema_of(options.columns, "id long") == "json STRUCT<id long>, key BINARY"
    with pytest.raises(OptionError, match="expected names out of"):
        SourceOptions.parse({**BASE, "columns": "json"}, True)
    with pytest.raises(OptionError, match="jsonSchema is empty"):
        SourceOptions.parse({**BASE, "jsonSchema": " "}, True)
