"""`docs/simulation.md` names mutants that are there, with the workload that finds them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.simulation import (
    test_consumers_and_broker,
    test_core_mutants,
    test_mutants,
    test_producer_and_broker,
)
from tests.simulation.campaign import WORKLOADS
from tests.simulation.shrink import Workload

PAGE = Path(__file__).resolve().parents[2] / "docs" / "simulation.md"
ROW = re.compile(r"^\| .* \| `(\w+)` \| (`\w+`(?:, `\w+`)*) \|$", re.MULTILINE)


def hunted() -> Iterator[tuple[str, str]]:
    """Mutant and workload of every test that must find one."""
    names = {workload: name for name, workload in WORKLOADS.items()}

    def name_of(workload: Workload) -> str:
        return names[getattr(workload, "func", workload)]

    for hunt in (*test_mutants.HUNTS, *test_core_mutants.HUNTS):
        yield hunt.mutant.__name__, name_of(hunt.workload)
    fixed: list[tuple[str, list[Callable[..., Any]]]] = [
        ("producer", test_producer_and_broker.BUGS),
        ("transactions", test_producer_and_broker.TRANSACTION_BUGS),
        ("consumers", [*test_consumers_and_broker.BUGS, *test_consumers_and_broker.PROTOCOL_BUGS]),
    ]
    for workload, bugs in fixed:
        yield from ((bug.__name__, workload) for bug in bugs)


def test_every_bug_in_the_table_has_a_test_that_finds_it() -> None:
    there = set(hunted())
    named = [
        (mutant, workload)
        for mutant, workloads in ROW.findall(PAGE.read_text(encoding="utf-8"))
        for workload in re.findall(r"\w+", workloads)
    ]
    assert len(named) >= 20
    assert [pair for pair in named if pair not in there] == []


def test_every_workload_is_described() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in WORKLOADS if f"| `{name}` |" not in text] == []
