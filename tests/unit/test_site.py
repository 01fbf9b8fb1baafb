"""The documentation as a site: it builds without a warning, works offline, and its examples run as pasted."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from semel.local.apache_kafka import KafkaMissing, java
from semel.local.brokers import SemelBroker, semel_command
from tests.support.missing import skip_loudly

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def python_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    words = [Path(sys.executable).with_name("mkdocs"), "build", "--quiet", "--strict", "--site-dir", tmp_path / "site"]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # an advertisement
    done = subprocess.run(list(map(str, words)), cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="?(https?:)?//', page.read_text(encoding="utf-8"))
        assert loaded == [], page
    assert "last stable offset" in (tmp_path / "site" / "search" / "search_index.json").read_text(encoding="utf-8")
    named = {path.name for path in DOCS.glob("*.md")}
    assert {path.with_suffix(".md").name for path in (tmp_path / "site").glob("*.html")} - {"404.md"} == named


def test_the_examples_for_tests_pass_as_pasted(tmp_path: Path) -> None:
    for number, block in enumerate(python_blocks("testing.md")):
        (tmp_path / f"test_{number}.py").write_text(block)
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_first_ten_minutes_work_as_written(tmp_path: Path) -> None:
    """All commands of the first page, in their order, and the query twice."""
    try:
        java()
    except KafkaMissing as missing:
        skip_loudly(str(missing))
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    commands = re.findall(r"^    (.*semel (?:topic|produce|consume|group|trace) .*)$", text, re.MULTILINE)
    assert len(commands) == 6
    (query,) = python_blocks("index.md")
    (tmp_path / "query.py").write_text(query)
    with SemelBroker(tmp_path / "broker") as broker:
        environment = {**os.environ, "SEMEL_BROKERS": broker.bootstrap}

        def shell(line: str) -> str:
            line = re.sub(r"\bsemel ", shlex.join(semel_command()) + " ", line, count=1)
            done = subprocess.run(
                ["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
            return done.stdout

        def run_query() -> None:
            done = subprocess.run(
                [sys.executable, "query.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr

        for command in commands[:3]:
            shell(command)
        for _ in range(2):  # the second one adds nothing
            run_query()
            assert sorted(shell(commands[3]).split()) == ["alice=17", "bob=5"]
        assert "totals-app" in shell(commands[4])
        assert "5.3" in shell(commands[5])
