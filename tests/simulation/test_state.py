"""Instances of `semel.process` that keep state, in simulated worlds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from semel.patterns.process_state import StatefulExactlyOnce, Stores
from tests.simulation.state_workload import counting

SEEDS = range(2)  # fresh ones are in test_g5
MUTANT_SEEDS = range(40)


def test_counts_are_those_of_a_replay_whoever_is_killed_or_frozen(tmp_path: Path) -> None:
    faults = 0
    for seed in SEEDS:
        print(f'make simulate ARGS="--workload state --seed {seed}"')
        faults += counting(seed, tmp_path / str(seed)).faults
    assert faults > 30


def advance_before_the_commit(patch: pytest.MonkeyPatch) -> None:
    send = Stores.send

    def sent(self: Stores, *args: Any) -> Any:
        delivery, changes = send(self, *args)
        for number, values in changes.items():
            self._open[number].advance(values, self._open[number].offset)
        return delivery, changes

    patch.setattr(Stores, "send", sent)


def keep_pending_values_after_an_abort(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Stores, "doubt", lambda self: self._current.clear())


def trust_the_local_store_after_an_abort(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Stores, "doubt", lambda self: self._state.discard())


def write_the_changelog_beside_the_transaction(patch: pytest.MonkeyPatch) -> None:
    """Local stores move, the changelog does not."""
    settle = StatefulExactlyOnce.settle

    def settled(self: StatefulExactlyOnce) -> None:
        if self._stores is not None:
            for changes in self._state._pending.values():
                for key in [key for key in changes if key == b"k1"]:
                    del changes[key]
        settle(self)

    patch.setattr(StatefulExactlyOnce, "settle", settled)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "mutant",
    [
        advance_before_the_commit,
        keep_pending_values_after_an_abort,
        trust_the_local_store_after_an_abort,
        write_the_changelog_beside_the_transaction,
    ],
)
def test_deliberate_bugs_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    mutant(monkeypatch)
    for seed in MUTANT_SEEDS:
        try:
            counting(seed, tmp_path / str(seed))
        except AssertionError as error:
            print(f"found with seed {seed}: {error}")
            return
    raise AssertionError(f"{mutant.__name__} was not found")


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_many_worlds_with_state(tmp_path: Path) -> None:
    faults = sum(counting(seed, tmp_path / str(seed)).faults for seed in range(100, 160))
    assert faults > 1_500
