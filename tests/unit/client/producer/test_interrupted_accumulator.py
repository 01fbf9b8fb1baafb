"""Ctrl-C while records are added or batches closed: each batch is in one place, and says what it holds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from semel.client.producer.accumulator import Accumulator
from semel.client.producer.batches import ProducerBatch, Row
from semel.client.producer.tables import TablePart
from semel.client.settings import ProducerSettings

ROW: Row = (None, b"value", 0, ())
SIZE = 30
PART = TablePart(None, None, 0, 2, SIZE)


def accumulator() -> Accumulator:
    made = Accumulator(ProducerSettings.of({"bootstrap_servers": "localhost:9092"}))
    made.append_new("rows", 0, ROW, SIZE, 0.0)
    made.append_new_table("tables", 0, PART, 0.0)
    return made


def add_row(given: Accumulator) -> None:
    assert given.append("rows", 0, ROW, SIZE)


def open_for_row(given: Accumulator) -> None:
    given.append_new("rows", 0, ROW, SIZE, 0.0)


def add_part(given: Accumulator) -> None:
    assert given.append_table("tables", 0, PART)


def open_for_part(given: Accumulator) -> None:
    given.append_new_table("tables", 0, PART, 0.0)


def add_batch(given: Accumulator) -> None:
    batch = given.new_batch("rows", 0, 0.0)
    batch.data, batch.count, batch.size_bytes = b"records", 1, 7
    given.add(batch)


def close_all(given: Accumulator) -> None:
    given.close_all()


def interrupted(work: Callable[[], object], at: int) -> bool:
    """Ctrl-C comes at the beginning of a function, or where a call has ended, for the n-th time; whether it did."""
    left = at

    def look(frame: FrameType, event: str, _: Any) -> None:
        nonlocal left
        if event in ("call", "c_return"):
            left -= 1
            if left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def rows_of(batch: ProducerBatch) -> int:
    if batch.rows is not None:
        return len(batch.rows)
    return 1 if batch.tables is None else sum(part.row_count for part in batch.tables)


@pytest.mark.parametrize("change", [add_row, open_for_row, add_part, open_for_part, add_batch, close_all])
def test_an_interrupted_change_happened_or_did_not(change: Callable[[Accumulator], None]) -> None:
    """A batch was left open and queued: it was sent twice, with a sequence for each time, and never done. Or it had one
    row more than it counted, and the places of later ones were wrong."""
    at = 1
    while True:
        given = accumulator()
        was_interrupted = interrupted(lambda given=given: change(given), at)  # type: ignore[misc]
        batches = list(given.batches())
        assert len(set(map(id, batches))) == len(batches), f"one batch is in two places after {at}"
        assert [rows_of(batch) for batch in batches] == [batch.count for batch in batches], at
        assert all(batch.count for batch in batches)
        assert given.used_bytes == sum(batch.size_bytes for batch in batches), at
        if not was_interrupted:
            break
        at += 1
    assert at > 1
