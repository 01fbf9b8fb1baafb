"""The documentation as a site: it builds without a warning, works offline, and its examples run as pasted."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import semel
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
    assert len(commands) == 8
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

        for command in commands[:4]:
            shell(command)
        for _ in range(2):  # the second one adds nothing
            run_query()
            assert sorted(shell(commands[4]).splitlines()) == ['DE {"id":1,"euros":12.5}', 'FR {"id":2,"euros":3.0}']
            assert shell(commands[5]) == "not JSON\n"
        assert "sales-app" in shell(commands[6])
        assert "5.3" in shell(commands[7])


@pytest.mark.full
@pytest.mark.timeout(400)
def test_the_recipes_of_the_cookbook_write_what_they_say(tmp_path: Path) -> None:
    try:
        java()
    except KafkaMissing as missing:
        skip_loudly(str(missing))
    (tmp_path / "cookbook.py").write_text("\n".join(python_blocks("cookbook.md")))
    with SemelBroker(tmp_path / "broker") as broker:
        with semel.Admin(bootstrap_servers=broker.bootstrap) as admin:
            for topic in (
                "orders",
                "clicks",
                "customers",
                "booked",
                "counted",
                "unique",
                "joined",
                "large",
                "small",
                "dead",
            ):
                admin.create_topic(topic, partitions=2)
        with semel.Producer(bootstrap_servers=broker.bootstrap) as producer:
            for key, value in (
                (b"a", b'{"customer":"a","amount":70}'),
                (b"b", b'{"customer":"b","amount":7}'),
                (b"c", b"?"),
            ):
                producer.send("orders", value, key)
            producer.send("customers", b"Ann", b"a")
            for at_s, value in ((0, b"x"), (1, b"x"), (2, b"y"), (600, b"z")):
                producer.send("clicks", value, b"k", timestamp=1_700_000_000_000 + at_s * 1000)
        environment = {**os.environ, "SEMEL_BROKERS": broker.bootstrap}
        done = subprocess.run(
            [sys.executable, "cookbook.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]

        def values(topic: str) -> list[bytes]:
            table = semel.read_table(topic, bootstrap_servers=broker.bootstrap)
            return sorted(table.column("value").to_pylist())

        assert values("booked") == [b'{"customer":"a","cents":7000}', b'{"customer":"b","cents":700}']
        assert values("unique") == [b"x", b"y", b"z"]
        assert values("joined") == [b'Ann {"customer":"a","amount":70}']
        assert values("large") == [b'{"customer":"a","amount":70}']
        assert values("small") == [b'{"customer":"b","amount":7}']
        assert values("dead") == [b"?"]
        assert any(b'"count":3' in value for value in values("counted"))
