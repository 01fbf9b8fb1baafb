"""Columns between numpy and Arrow are what pyarrow's own functions give, and nobody imports pandas for them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.protocol.arrow_numbers import binaries, column, filled, scalar, to_arrow, to_numpy, valid

KINDS = {pa.int8(): 7, pa.int32(): 31, pa.int64(): 63}


@st.composite
def columns(draw: st.DrawFn) -> pa.Array:
    """Slices, with and without nulls."""
    kind = draw(st.sampled_from([*KINDS, pa.bool_()]))
    values = st.booleans() if kind == pa.bool_() else st.integers(-(2 ** KINDS[kind]), 2 ** KINDS[kind] - 1)
    made = pa.array(draw(st.lists(st.none() | values, max_size=30)), kind)
    return made.slice(draw(st.integers(0, len(made))), draw(st.integers(0, 30)))


@given(columns())
def test_values_and_nulls_of_a_column(found: pa.Array) -> None:
    expected = found.to_pylist()
    assert valid(found).tolist() == [each is not None for each in expected]
    without = found.drop_null()
    assert to_numpy(without).tolist() == without.to_pylist()
    assert to_arrow(to_numpy(without)).equals(without)
    if found.type != pa.bool_():
        assert filled(found, 3).tolist() == [3 if each is None else each for each in expected]


@given(st.lists(columns().filter(lambda each: each.type == pa.int32()), max_size=3))
def test_chunks_are_put_together(chunks: list[pa.Array]) -> None:
    whole = pa.chunked_array(chunks, pa.int32())
    assert filled(whole, -1).tolist() == [-1 if each is None else each for each in whole.to_pylist()]


@given(st.lists(st.none() | st.binary(max_size=8)))
def test_bytes(values: list[bytes | None]) -> None:
    made = binaries(values)
    made.validate(full=True)
    assert made.equals(pa.array(values, pa.binary()))


@pytest.mark.parametrize("values", [[], ["", "ä", "text"]])
def test_texts(values: list[str]) -> None:
    assert column(values, pa.string()).equals(pa.array(values, pa.string()))


@pytest.mark.parametrize("kind", [pa.int64(), pa.int32(), pa.timestamp("ms")])
def test_one_number(kind: Any) -> None:
    assert scalar(5, kind).equals(pa.scalar(5, kind))


def test_strided_numbers_are_copied() -> None:
    assert to_arrow(np.arange(10)[::3]).to_pylist() == [0, 3, 6, 9]


WITHOUT_PANDAS = """
import sys
import pyarrow as pa
from semel.client.consumer.decode import rows
from semel.client.producer.tables import encode_row_columns
from semel.client.types import TopicPartition
from semel.protocol.arrow_numbers import binaries
from semel.protocol.columns_decode import decode_record_set
from semel.spark.encoding import Encoder, Routing, Targets
from semel.spark.offsets import Range
from semel.spark.options import TYPES, spark_columns
from semel.spark.source import range_row
from semel.spark.writing import Report, report_batches, to_batches

encoded = encode_row_columns([(b"key", b"value", 5, []), (None, b"other", 6, [])] * 100, 0)
table = decode_record_set(encoded, headers=True).table
assert rows(TopicPartition("topic", 0), table)[1].value == b"other"
assert spark_columns(table, Range("topic", 0, 0, 200), list(TYPES)).num_rows == 200
routing = Routing(Targets({"out": 3}), "out", None, "murmur2", 0, 1, 1000, 1000, 0, frozenset({"out"}))
part = pa.record_batch({"key": binaries([b"k", None]), "value": binaries([b"v", b"w"])})
assert len(list(to_batches(Encoder(routing, 0).blobs(iter([part]))))) >= 1
assert next(report_batches([Report(0, 1, 0, 0, 0, 0, 0)])).num_rows == 1
assert range_row(Range("topic", 0, 0, 2)).num_rows == 1
print("pandas" in sys.modules)
"""


def test_rows_and_tables_come_and_go_without_pandas() -> None:
    pytest.importorskip("pandas")
    done = subprocess.run([sys.executable, "-c", WITHOUT_PANDAS], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr
