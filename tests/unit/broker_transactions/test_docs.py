"""The page about transactions shows the table that the broker runs on, and every fault point."""

from __future__ import annotations

from pathlib import Path

from semel.broker.transactions.states import diagram, grid
from semel.prove.injection import BROKER_POINTS

PAGE = (Path(__file__).parents[3] / "docs" / "transactions.md").read_text()


def test_the_diagram_and_the_table_are_generated_from_the_code():
    part = PAGE.split("<!-- generated", 1)[1].split("<!-- end of generated part -->", 1)[0]
    assert f"```mermaid\n{diagram()}\n```" in part
    assert grid() in part


def test_every_fault_point_is_listed():
    for name in BROKER_POINTS:
        listed = f"<API>.{name.partition('.')[2]}" if name.endswith("_response") else name
        assert f"`{listed}`" in PAGE
