"""In which order and company tests run when several run at once.

Two cores: what takes long begins, so that the end of a run is not one long test. Tests of one file stay together, as
they share what they set up; all tests on one Spark stay together, since it takes seconds to start; and tests marked
`alone` go to whoever is free.
"""

from __future__ import annotations

import pytest

GROUP_SIGN = "@group:"  # xdist writes "name of the test@name of the group"
FIRST = ("spark", "demo", "guarantees", "prove", "audit", "kafka", "clients")  # folders; all others later


def turn(item: pytest.Item) -> int:
    folder = item.path.parent.name
    return FIRST.index(folder) if folder in FIRST else len(FIRST)


def company(item: pytest.Item) -> str:
    """The name of the group that runs in one process."""
    fixtures: list[str] = getattr(item, "fixturenames", [])
    if item.get_closest_marker("alone"):
        return f"group:{item.nodeid}"
    if "shared_spark" in fixtures:
        return "group:spark cluster"
    if "session" in fixtures:
        return "group:spark session"
    return "group:" + item.nodeid.partition("::")[0]
