"""The harness behind `semel bench`: turns, medians, ratios, and output that a script can read."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from benchmarks import harness
from semel.cli import main
from semel.local.checkout import ROOT

KEYS = ["bench", "case", "unit", "semel", "peer", "peer_value", "ratio", "runs", "spread"]


def test_contestants_take_turns_and_every_second_round_goes_backwards() -> None:
    order: list[str] = []

    def contestant(name: str):
        return lambda: order.append(name) or float(len(order))

    values = harness.interleave({"a": contestant("a"), "b": contestant("b")}, runs=4, warmup=1)
    assert order == ["b", "a", "a", "b", "b", "a", "a", "b", "b", "a"]
    assert {name: len(measured) for name, measured in values.items()} == {"a": 4, "b": 4}


def test_warm_up_values_are_dropped() -> None:
    answers = iter([1000.0, 1.0, 2.0])
    assert harness.interleave({"only": lambda: next(answers)}, runs=2, warmup=1) == {"only": [1.0, 2.0]}


def test_median_and_spread() -> None:
    assert harness.median([1, 100, 3]) == 3
    assert harness.spread([9, 10, 12]) == pytest.approx(0.3)


@pytest.mark.parametrize(("better", "ratio"), [("higher", 2.0), ("lower", 0.5)])
def test_a_ratio_above_one_means_that_semel_is_better(better: harness.Better, ratio: float) -> None:
    rows: list[dict] = []
    harness.compare(
        lambda **row: rows.append(row),
        bench="codec",
        case="encode 100 B",
        unit="records/s",
        values={"semel": [10, 20, 30], "other": [10, 10, 10], "third": [20, 20, 20]},
        better=better,
    )
    assert [row["peer"] for row in rows] == ["other", "third"]
    assert rows[0]["ratio"] == pytest.approx(ratio)
    assert rows[1]["ratio"] == pytest.approx(1.0)
    assert rows[0]["spread"] == pytest.approx(1.0)
    assert list(rows[0]) == KEYS


def test_rate_and_seconds_measure_the_call() -> None:
    calls: list[int] = []
    assert harness.seconds(lambda: calls.append(1)) >= 0
    assert harness.rate(lambda: calls.append(1), amount=1000) > 0
    assert calls == [1, 1]


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A benchmark that compares two fixed values, in place of the codec benchmark."""
    module = types.ModuleType("benchmarks.codec")

    def run(report: harness.Report, quick: bool = False) -> None:
        values = {"semel": [2e6, 2e6], "kafka-python": [1e5, 1e5]}
        harness.compare(report, bench="codec", case=f"quick={quick}", unit="records/s", values=values)

    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "benchmarks.codec", module)
    monkeypatch.setattr(harness, "available", lambda: ["codec"])
    return module


@pytest.mark.usefixtures("benchmark_module")
def test_json_output_is_one_object_per_line_with_the_documented_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "codec", "--json", "--quick"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    row = json.loads(line)
    assert list(row) == KEYS
    assert (row["case"], row["semel"], row["peer"], row["ratio"], row["runs"]) == (
        "quick=True",
        2e6,
        "kafka-python",
        20,
        2,
    )


@pytest.mark.usefixtures("benchmark_module")
def test_plain_output_is_an_aligned_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "codec"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split()[:5] == ["bench", "case", "unit", "semel", "peer"]
    assert "2,000,000" in row
    assert "20.00x" in row
    assert head.index("semel") + len("semel") == row.index("2,000,000") + len("2,000,000")


def test_every_benchmark_can_be_named() -> None:
    files = (ROOT / "benchmarks").glob("*.py")
    assert {path.stem for path in files if "\ndef run(report: Report" in path.read_text()} == set(harness.NAMES)


@pytest.mark.usefixtures("benchmark_module")
def test_an_unknown_benchmark_is_refused_with_the_names_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "warp"]) == 2
    assert capsys.readouterr().err == "semel: there is no benchmark 'warp'; there are: codec, all\n"


@pytest.mark.parametrize("arguments", [["codec"], ["all", "--quick"]])
def test_without_a_checkout_one_line_says_where_benchmarks_are(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("semel.local.checkout.ROOT", tmp_path)
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "not installed with semel" in error
    assert "checkout" in error


def test_one_failed_benchmark_does_not_stop_the_others(
    benchmark_module: types.ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = types.ModuleType("benchmarks.broker")

    def run(report: harness.Report, quick: bool = False) -> None:
        raise RuntimeError("no Apache Kafka here")

    broken.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "benchmarks.broker", broken)
    assert harness.run_benchmarks(["broker", "codec"], as_json=True, quick=False) == 1
    answer = capsys.readouterr()
    assert json.loads(answer.out)["bench"] == "codec"
    assert "no Apache Kafka here" in answer.err


def test_a_comparison_with_missing_or_extra_keys_is_refused() -> None:
    with pytest.raises(TypeError, match="exactly the keys"):
        harness.checked({"bench": "codec"})
