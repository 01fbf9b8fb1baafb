"""What a function returns for tables and topics, and the copy of its output."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

import semel
from semel.patterns.process_decisions import Settler, packed, split, unpacked
from semel.sinks.postgres.decisions import Decision, DecisionsTable

OUTPUT = semel.Output(b"v", topic="t")
ROW, STATEMENT = semel.TableRow({"a": 1}), semel.Statement("SELECT 1")


def test_rows_and_records_are_told_apart_however_they_are_nested() -> None:
    assert split(None) == ([None], [])
    assert split(OUTPUT) == ([], [OUTPUT])
    assert split({"a": 1}) == ([{"a": 1}], [])
    assert split(ROW) == ([ROW], [])
    assert split([OUTPUT, [{"a": 1}, (STATEMENT, OUTPUT)]]) == ([{"a": 1}, STATEMENT], [OUTPUT, OUTPUT])
    assert split(part for part in (ROW, OUTPUT)) == ([ROW], [OUTPUT])
    assert split(7) == ([7], [])  # refused later, as what it is


def test_a_copy_has_everything_of_a_record() -> None:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    outputs = [
        semel.Output("text", key="k", topic="a", partition=3, timestamp=5, headers=[("h", b"x"), ("n", None)]),
        semel.Output(None, key=b"\xff", topic="b", timestamp=at),
        semel.Output(b"", topic="c"),
    ]
    assert unpacked(packed(outputs, 77)) == [
        ("a", 3, b"k", b"text", 5, [("h", b"x"), ("n", None)]),
        ("b", None, b"\xff", None, int(at.timestamp() * 1000), []),
        ("c", None, None, b"", 77, []),
    ]


def test_a_lost_decision_is_reported_with_the_table_that_it_is_in() -> None:
    nobody: Any = None
    settler = Settler(nobody, DecisionsTable("bank", "app", "me"), nobody)
    with pytest.raises(semel.DecisionLostError, match=r"in bank\.loop_decisions"):
        settler._write_copy(nobody, "app-1", 7, Decision(5, 2, 2, {("booked", 0): 9}, None))
