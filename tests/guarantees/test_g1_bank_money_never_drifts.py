"""G1: deposits and transfers are produced, validated and summed up; the total never drifts by a cent under kills."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from semel.audit import audit
from semel.demo.program import FAULTS, GUARANTEES
from semel.local.brokers import Broker
from semel.prove.checker.reading import read
from tests.support.demo import run_demo

OUTPUT = "demo-bank.exactly_once"


@contextmanager
def topics_of(result: dict[str, Any]) -> Iterator[str]:
    """The broker once more, on what the demo left."""
    with Broker(Path(result["kept"]) / "broker") as broker:
        yield broker.bootstrap


def _checked(result: dict[str, Any], faults: list[str]) -> None:
    """Every fault hit all three pipelines where it should; each guarantee did what its name says."""
    held = sorted((held["fault"], held["guarantee"]) for held in result["held"])
    assert held == sorted((fault, guarantee) for fault in faults for guarantee in GUARANTEES)
    assert len(result["faults"]) == len(faults)
    exact, least, most = (result["guarantees"][name] for name in ("exactly_once", "at_least_once", "at_most_once"))
    assert (exact["lost"], exact["duplicated"], exact["wrong_accounts"]) == (0, 0, 0)
    assert exact["counted"] == exact["records_in"] > 300
    assert exact["total_after"] == exact["total_before"] > 0
    assert exact["rejected"] > 0
    assert least["duplicated"] > 0
    assert least["lost"] == 0
    assert most["lost"] > 0
    assert most["duplicated"] == 0


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "faults", [["half-way"], [fault.name for fault in FAULTS]], ids=["driver", "driver-broker-driver"]
)
def test_money_is_the_same_before_and_after_kills_in_the_middle_of_a_commit(tmp_path: Path, faults: list[str]) -> None:
    result = run_demo(tmp_path, "bank", "--engine", "spark", "--faults", ",".join(faults))
    _checked(result, faults)
    with topics_of(result) as brokers:
        balances: Counter[str] = Counter()
        for record in read(brokers, [f"{OUTPUT}.out"]):  # every statement follows from the one before it
            line = json.loads(record.value or b"")
            balances[line["account"]] += line["cents"]
            assert line["balance"] == balances[line["account"]], record
        found = audit(brokers, OUTPUT)
        assert found.clean, found.findings
        assert found.counted == sum(entry.rows for entry in found.entries) > 300
        assert sum(found.lag.values()) == 0


@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", [2, *(pytest.param(seed, marks=pytest.mark.full) for seed in (3, 4))])
def test_money_is_the_same_for_other_seeds_without_spark(tmp_path: Path, seed: int) -> None:
    _checked(run_demo(tmp_path, "bank", "--engine", "process", "--seed", str(seed)), [fault.name for fault in FAULTS])
