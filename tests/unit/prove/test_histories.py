"""Each way in which appends and sagas can be wrong is planted, and the checker names it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from semel.prove.checker.histories import AppendCall, check_appends, check_sagas, last_values, read_calls, statuses
from semel.prove.checker.reading import Seen


def event(offset: int, version: int, command: str, entity: str = "e", partition: int = 0) -> Seen:
    headers = (("version", b"%d" % version), ("command", command.encode()))
    return Seen("t", partition, offset, 0, entity.encode(), b"x", headers)


def call(command: str, expected: int, began_s: float, ended_s: float | None, outcome: str, version: int) -> AppendCall:
    return AppendCall(command, "e", expected, began_s, ended_s, outcome, version)


LOG = [event(0, 1, "a"), event(1, 2, "b")]
CALLS = [
    call("a", 0, 1.0, 2.0, "appended", 1),
    call("b", 1, 2.5, 4.0, "appended", 2),
    call("c", 0, 1.5, 3.0, "conflict", 1),
    call("d", 1, 3.0, None, "", 0),
]


def test_a_right_history_passes() -> None:
    assert check_appends("t", CALLS, LOG) == []
    assert check_appends("t", [*CALLS, call("e", 2, 5.0, None, "", 0)], [*LOG, event(2, 3, "e")]) == []


@pytest.mark.parametrize(
    ("calls", "log", "found"),
    [
        (CALLS, LOG[:1], "acknowledged as version 2 of e; the topic has None"),
        (CALLS, [LOG[0], LOG[0]._replace(offset=1), LOG[1]._replace(offset=2)], "it has version 1, expected 2"),
        (CALLS, [LOG[1]._replace(offset=0), LOG[0]._replace(offset=1)], "it has version 2, expected 1"),
        (CALLS, [*LOG, event(0, 3, "z", partition=1)], r"is in partitions \[0, 1\]"),
        (CALLS, [*LOG, event(2, 3, "c")], "returned a conflict with version 1, and it is version 3"),
        ([*CALLS, call("x", 0, 9.0, None, "", 0)], [*LOG, event(2, 3, "x")], "version 3, expected to follow 0"),
        ([*CALLS, call("x", 5, 9.0, 9.5, "conflict", 1)], LOG, "version 1, begun after a call returned version 2"),
        ([*CALLS, call("x", 5, 1.0, 1.2, "conflict", 2)], LOG, "before the append of that version began"),
    ],
)
def test_what_is_wrong_is_named(calls: list[AppendCall], log: list[Seen], found: str) -> None:
    violations = check_appends("t", calls, log)
    assert violations
    assert any(re.search(found, str(violation)) for violation in violations), violations


def test_a_history_is_read_although_its_writer_was_killed(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"command": "a", "entity": "e", "expected": 0, "at_s": 1.0},
        {"command": "a", "entity": "e", "expected": 0, "at_s": 5.0},
        {"command": "a", "outcome": "appended", "version": 1, "at_s": 6.0},
        {"command": "b", "entity": "e", "expected": 1, "at_s": 7.0},
    ]
    path = tmp_path / "history"
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"command": "b", "outc\n')
    assert read_calls(path) == [
        call("a", 0, 1.0, 6.0, "appended", 1),
        call("b", 1, 7.0, None, "", 0),
    ]
    assert read_calls(tmp_path / "none") == []


def effects(saga: str) -> dict[str, int]:
    return {"from": -int(saga), "to": int(saga)}


WANTED = {"3": ("done", "compensated"), "5": ("compensated",)}
ENDS = {"3": "done", "5": "compensated"}


@pytest.mark.parametrize(
    ("ends", "totals", "found"),
    [
        (ENDS, {"from": -3, "to": 3}, ""),
        ({**ENDS, "3": "running"}, {}, "it is running, expected done or compensated"),
        ({"5": "compensated"}, {}, "it is None"),
        ({**ENDS, "5": "done"}, {"from": -8, "to": 8}, "it is done, expected compensated"),
        ({**ENDS, "7": "done"}, {"from": -10, "to": 10}, "nobody started it"),
        (ENDS, {"from": -3}, "it is 0, the sagas that are done make it 3"),
        (ENDS, {"from": -8, "to": 3}, "it is -8, the sagas that are done make it -3"),
        (ENDS, {"from": -6, "to": 6}, "it is 6"),
    ],
)
def test_sagas_that_are_not_whole_are_named(ends: dict[str, str], totals: dict[str, int], found: str) -> None:
    violations = check_sagas("log", ends, WANTED, totals, effects)
    assert bool(violations) == bool(found)
    assert not found or found in "\n".join(map(str, violations))


def test_the_last_state_of_a_saga_counts() -> None:
    rows = [
        (b"1", b'{"status": "running"}'),
        (b"2", b'{"status": "done"}'),
        (b"1", b'{"status": "done"}'),
        (b"2", None),
    ]
    log = [Seen("log", 0, offset, 0, key, value, ()) for offset, (key, value) in enumerate(rows)]
    assert statuses(log) == {"1": "done"}
    assert last_values(log) == {b"1": b'{"status": "done"}'}
