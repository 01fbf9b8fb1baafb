"""In which order and company tests run when several run at once.

Two cores: what takes long begins, so that the end of a run is not one long test. Tests of one file stay together, as
they share what they set up; tests on Spark stay together too, since one Spark keeps both cores busy and takes
seconds to start; and tests marked `alone` go to whoever is free.
"""

from __future__ import annotations

import pytest

GROUP_SIGN = "@group:"  # xdist writes "name of the test@name of the group"
ON_SPARK = {  # with drivers of their own
    "spark/test_bad_input",
    "spark/test_batch_write",
    "spark/test_connect",
    "guarantees/test_d6_state_and_output_agree",
    "spark/test_declarative",
    "spark/test_modes",
    "spark/test_stream_writer",
    "spark/test_worker_memory",
}
FIRST = ("spark", "demo", "guarantees", "prove", "audit", "kafka", "clients")  # folders; all others later


def turn(item: pytest.Item) -> int:
    folder = item.path.parent.name
    return FIRST.index(folder) if folder in FIRST else len(FIRST)


def company(item: pytest.Item) -> str:
    """The name of the group that runs in one process."""
    fixtures: list[str] = getattr(item, "fixturenames", [])
    if item.get_closest_marker("alone"):
        return f"group:{item.nodeid}"
    if (
        {"shared_spark", "session"} & {*fixtures}
        or f"{item.path.parent.name}/{item.path.stem}" in ON_SPARK
        or "[spark" in item.name
    ):
        return "group:spark"
    return "group:" + item.nodeid.partition("::")[0]
