"""Checksums of a batch's rows: the same for the same rows in any order, others for other rows."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pyarrow as pa
import pytest

from semel.spark import checksums
from semel.spark.checksums import Observed, Summed, disagree, hashed_columns, of_rows, why_state_differs
from semel.spark.sink_options import ColumnError, SinkOptions

ROWS = [(b"k1", b"v1"), (b"k2", b"v2"), (None, b"v3"), (b"k1", b"v1")]


def batch(rows):
    keys, values = zip(*rows, strict=True) if rows else ((), ())
    return pa.RecordBatch.from_pydict({"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())})


def checksum(*batches):
    summed = Summed()
    assert list(summed.passed(iter(batches))) == list(batches)
    return summed.checksum()


def test_order_batches_and_tasks_do_not_count():
    whole = checksum(batch(ROWS))
    assert checksum(batch(ROWS[::-1])) == whole
    assert checksum(batch(ROWS[:1]), batch([]), batch(ROWS[1:])) == whole
    one, other = Summed(), Summed()
    list(one.passed(iter([batch(ROWS[:2])])))
    list(other.passed(iter([batch(ROWS[2:])])))
    one.add(other)
    assert one.checksum() == whole


@pytest.mark.parametrize(
    "rows",
    [
        ROWS[:3],
        [*ROWS, (b"k1", b"v1")],
        [(b"k1", b"v2"), (b"k2", b"v1"), *ROWS[2:]],  # values exchanged
        [(b"k2", b"v2"), (b"k2", b"v2"), *ROWS[1:3]],  # as many pairs
        [*ROWS[:3], (b"v1", b"k1")],
    ],
)
def test_other_rows_have_another_checksum(rows):
    assert checksum(batch(rows)) != checksum(batch(ROWS))


def test_only_what_can_be_compared_disagrees():
    assert disagree("spark:1:2:3", "spark:1:2:4")
    assert not disagree("spark:1:2:3", "spark:1:2:3")
    assert not disagree("", "spark:1:2:3")
    assert not disagree("arrow:1:2:3", "spark:1:2:4")
    assert "10 rows then, 9 now" in why_state_differs(4, "spark:10:2:3", "spark:9:2:4")
    assert why_state_differs(4, "spark:10:2:3", "spark:10:2:3") == ""


def test_sums_that_spark_never_delivers_do_not_hold_the_batch_up(monkeypatch, caplog):
    never = threading.Event()

    class Observation:
        get = property(lambda self: never.wait(60))

    observed = Observed.__new__(Observed)
    observed._observation = Observation()
    monkeypatch.setattr(checksums, "EVENTS_S", 0.1)
    assert observed.checksum() == ""
    assert "not compared" in caplog.text
    never.set()


def test_a_frame_that_cannot_be_written_is_refused_before_spark_is_asked_for_a_hash():
    options = SinkOptions("localhost:1", "app", topic="out")
    windows = SimpleNamespace(dtypes=[("window", "struct<start:timestamp,end:timestamp>"), ("count", "bigint")])
    with pytest.raises(ColumnError, match=r"no column 'value' \(it has window, count\)"):
        hashed_columns(windows, options)
    with pytest.raises(ColumnError, match="'value' is map<string,int>, expected binary or string; make JSON of it"):
        hashed_columns(SimpleNamespace(dtypes=[("value", "map<string,int>")]), options)


@pytest.mark.parametrize(("checksum", "kept"), [("spark:5:7:9", True), ("arrow:6:7:9", False), ("", False)])
def test_a_checksum_of_other_rows_than_were_written_is_not_kept(checksum: str, kept: bool) -> None:
    assert of_rows(checksum, 5) == (checksum if kept else "")
