"""The numbers in docs/operations.md are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

from semel.broker import connection
from semel.broker.handlers import fetch
from semel.broker.settings import TABLE

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")


def limit(row: str) -> int:
    found = re.search(rf"^\| {row} \|\D*(\d+)", PAGE, re.MULTILINE)
    assert found, f"there is no row {row!r}"
    return int(found[1])


def test_limits_are_those_of_the_code() -> None:
    assert limit("request") == TABLE["socket.request.max.bytes"].default >> 20
    assert limit("response to a fetch") == fetch._RESPONSE_LIMIT_BYTES >> 20
    assert limit("requests of a connection without a response") == connection.MAX_PENDING
    assert limit("clients that do not read their responses") == connection.UNSENT_BUDGET_BYTES >> 20


def test_settings_named_there_exist() -> None:
    section = PAGE.split("### Settings")[1].split("### Durability")[0]
    named = {name for name in re.findall(r"`([a-z]+(?:\.[a-z]+)+)`", section) if name != "server.properties"}
    topic_settings = {row.topic for row in TABLE.values() if row.topic}
    assert named
    assert named <= TABLE.keys() | topic_settings
    assert TABLE["group.initial.rebalance.delay.ms"].default == 0
    assert TABLE["fsync"].default == "commit"
