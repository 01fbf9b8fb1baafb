"""docs/guarantees.md names every guarantee test, and names no test that is not there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/guarantees.md").read_text()


def test_every_link_leads_to_a_test():
    links = re.findall(r"\]\(\.\./(\S+?\.py)\)", PAGE)
    assert len(links) > 20
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_guarantee_test_is_on_the_page():
    files = [path.name for path in (ROOT / "tests/guarantees").glob("test_*.py")]
    assert [name for name in sorted(files) if name not in PAGE] == []


def test_every_promise_has_a_test_among_the_guarantees():
    rows = re.findall(r"^\| ([A-H]\d+) \|(.*)$", PAGE, re.MULTILINE)
    assert len(rows) > 45
    assert [promise for promise, row in rows if "](../tests/guarantees/test_" not in row] == []
