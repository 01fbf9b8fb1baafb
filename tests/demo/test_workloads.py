"""The comparison of a demo sees each kind of damage, in the right column."""

from __future__ import annotations

import json
import random
from itertools import islice
from typing import NamedTuple

import pytest

from semel.demo.workloads import WORKLOADS, DemoWorkload, Outcome

PER_S = 200.0


class Stored(NamedTuple):
    timestamp_ms: int
    value: bytes | None


class Run:
    """A pipeline that did everything right, to be damaged."""

    def __init__(self, workload: DemoWorkload) -> None:
        self.workload = workload
        events = list(islice(workload.events(random.Random(7), 1_700_000_000_000, PER_S), 600))
        events += workload.closing(1_700_000_000_000, 600, PER_S)
        self.source = [Stored(1_700_000_000_000 + number, event.value) for number, event in enumerate(events)]
        self.output: list[Stored] = []
        self.rejected: list[Stored] = []
        for record in self.source:
            made = workload.step(record.value or b"")
            self.rejected += [record] if made is None else []
            self.output += [Stored(record.timestamp_ms + 50, event.value) for event in made or ()]

    def compare(self) -> Outcome:
        return self.workload.compare("exactly_once", self.source, self.output, self.rejected)


@pytest.fixture(params=sorted(WORKLOADS))
def run(request: pytest.FixtureRequest) -> Run:
    return Run(WORKLOADS[request.param])


def test_a_whole_output_is_exact(run: Run) -> None:
    outcome = run.compare()
    assert outcome.is_exact
    assert outcome.counted == outcome.records_in >= 600
    assert outcome.rejected == len(run.rejected) > 10
    assert outcome.wrong_parts == 0
    assert outcome.total_before > 0


def test_a_lost_row_is_lost(run: Run) -> None:
    del run.output[25]
    outcome = run.compare()
    assert (outcome.lost, outcome.duplicated) == (1, 0)
    assert outcome.counted == outcome.records_in - 1
    assert not outcome.is_exact
    assert outcome.wrong_parts == 1


def test_a_row_that_is_there_twice_is_duplicated(run: Run) -> None:
    run.output.append(run.output[3])
    outcome = run.compare()
    assert (outcome.lost, outcome.duplicated) == (0, 1)
    assert outcome.total_after > outcome.total_before


def test_dead_letters_are_counted_too(run: Run) -> None:
    lost = run.rejected.pop()
    assert run.compare().lost == 1
    run.rejected += [lost, lost]
    assert run.compare().duplicated == 1


def test_the_same_seed_gives_the_same_records(run: Run) -> None:
    assert Run(run.workload).source == run.source


def test_ids_are_never_used_twice(run: Run) -> None:
    values = [record.value for record in run.source]
    assert len(set(values)) == len(values)


def test_money_moves_between_accounts_and_only_deposits_make_more_of_it() -> None:
    run = Run(WORKLOADS["bank"])
    valid = [json.loads(record.value or b"") for record in run.source if record not in run.rejected]
    deposits = sum(transfer["cents"] for transfer in valid if transfer["kind"] == "deposit")
    assert run.compare().total_before == deposits


def test_views_come_out_of_order_but_never_later_than_the_pipeline_waits() -> None:
    run = Run(WORKLOADS["ads"])
    times = [json.loads(r.value or b"")["seen_at"] for r in run.source if (r.value or b"").startswith(b"{")]
    assert times != sorted(times)
