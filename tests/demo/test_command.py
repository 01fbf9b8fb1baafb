"""`semel demo` as users call it. Spark is in the tests of G1 and G2; here it runs as a processing loop."""

from __future__ import annotations

import json
from pathlib import Path

from semel.local.brokers import semel_command
from semel.local.processes import Process
from tests.support.waiting import PATIENCE_S


def demo(folder: Path, *words: str, env: dict[str, str] | None = None) -> Process:
    return Process(semel_command("demo", *words), cwd=folder, env={"TMPDIR": str(folder), **(env or {})})


def test_the_demo_ends_with_a_table_that_shows_each_guarantee(tmp_path: Path) -> None:
    with demo(tmp_path, "--engine", "process") as process:
        assert process.wait(120) == 0, process.output
        output = process.output
    rows = {line.split()[0]: line.split()[1:] for line in output.splitlines() if "_once" in line and "..." not in line}
    records, counted, lost, duplicated, money_in, money_out = rows["exactly_once"]
    assert (records, lost, duplicated, money_in) == (counted, "0", "0", money_out)
    assert rows["at_most_once"][2] != "0"
    assert rows["at_least_once"][3] != "0"
    assert output.count("kill -9") == 3
    assert (tmp_path / "semel-demo-bank.html").read_text().startswith("<!doctype html>")
    assert [path.name for path in tmp_path.iterdir()] == ["semel-demo-bank.html"]  # nothing else is left


def test_it_shows_something_at_once_and_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    with demo(tmp_path, "ads", "--engine", "process") as process:
        process.wait_for_line("semel demo:", PATIENCE_S)
        process.wait_for_line("program is up", PATIENCE_S)
        assert process.interrupt(30) == 130
        assert "nothing is left behind" in process.output
        assert "Traceback" not in process.output
    assert list(tmp_path.iterdir()) == []


def test_kept_data_is_named_and_json_is_one_object(tmp_path: Path) -> None:
    with demo(tmp_path, "ads", "--engine", "process", "--json", "--keep", "--seed", "3") as process:
        assert process.wait(120) == 0, process.output
        result = json.loads(next(line for line in process.output.splitlines() if line.startswith("{")))
    assert result["seed"] == 3
    assert len(result["held"]) == 9
    assert Path(result["kept"]).is_dir()
    assert Path(result["report"]).exists()


def test_without_java_it_says_what_to_do_and_runs_without_spark(tmp_path: Path) -> None:
    empty = tmp_path / "bin"
    empty.mkdir()
    with demo(tmp_path, env={"PATH": str(empty), "JAVA_HOME": ""}) as process:
        process.wait_for_line("apt-get install openjdk-17-jre-headless", PATIENCE_S)
        process.wait_for_line("program is up", 60)
        process.interrupt(30)
    with demo(tmp_path, "--engine", "spark", env={"PATH": str(empty), "JAVA_HOME": ""}) as process:
        assert process.wait(PATIENCE_S) == 1
        assert "Spark needs Java 17" in process.output


def test_wrong_words_are_explained(tmp_path: Path) -> None:
    with demo(tmp_path, "casino") as process:
        assert process.wait(PATIENCE_S) == 2
        assert "bank" in process.output


def test_a_report_that_cannot_be_written_is_said_before_the_work(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with demo(tmp_path, "--engine", "process", "--report", str(blocked / "page.html")) as process:
        assert process.wait(PATIENCE_S) == 2
        assert "--report" in process.output
