"""F7: the limits are written down and shown: docs/limits.md runs from top to bottom.

The faults are in its programs: a unit of work that fails after its side effects, a copier and a subscriber that die
before their commit, an owner of a transaction that is gone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/limits.md"


@pytest.fixture(params=["semel_broker", pytest.param("apache_kafka", marks=[pytest.mark.kafka, pytest.mark.full])])
def bootstrap(request: pytest.FixtureRequest) -> str:
    """The topics of the page have plain names, so it has a broker of its own."""
    return str(request.getfixturevalue(request.param).bootstrap)


def test_the_programs_of_the_page_run_from_top_to_bottom(bootstrap: str, caplog: pytest.LogCaptureFixture) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        code = block.replace("localhost:9092", bootstrap)
        exec(compile(code, str(PAGE), "exec"), names)
    assert caplog.text.count("gone for a moment") == 3, "the mail, the print-out and the files were tried twice"
    names["gone"].close(timeout_ms=0)  # type: ignore[attr-defined]


def test_every_limit_has_a_program_or_a_test_and_a_way_out() -> None:
    chapters = PAGE.read_text().split("\n## ")[1:-2]
    assert len(chapters) == 10
    for chapter in chapters:
        assert "**Instead:**" in chapter
        assert "```python" in chapter or "/tests/guarantees/" in chapter
