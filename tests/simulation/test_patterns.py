"""Versioned entities and sagas in simulated worlds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from semel.patterns.entities import Decide, EntityState
from semel.patterns.entity_writer import EntityAppend, EntityWriter
from semel.patterns.state import State
from tests.simulation.pattern_workload import entities, sagas
from tests.simulation.world import World

Workload = Callable[..., World]
MUTANT_SEEDS = range(60)


@pytest.mark.parametrize("workload", [entities, sagas])
def test_what_calls_return_holds_whoever_is_killed_or_frozen(tmp_path: Path, workload: Workload) -> None:
    assert workload(1, tmp_path / "broker").faults > 3  # fresh seeds are in test_g5


def apply_a_command_again(patch: pytest.MonkeyPatch) -> None:
    """Without receipts a retry looks like a conflict with somebody else."""
    known_reply = Decide._known_reply

    def forgetful(self: Decide, command: EntityAppend, known: EntityState) -> Any:
        return known_reply(self, command, EntityState(known.version, [], known.value))

    patch.setattr(Decide, "_known_reply", forgetful)


def ignore_the_expected_version(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Decide, "_known_reply", lambda self, command, known: None)


def keep_what_a_failed_step_did(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(State, "roll_back", lambda self: None)


def take_the_reply_of_another_sending(patch: pytest.MonkeyPatch) -> None:
    """Of a command that was sent before."""
    deliver = EntityWriter._deliver

    def any_reply(self: EntityWriter, record: Any) -> None:
        for pending in list(self._waiting.values()):
            if pending.command.id.encode() != record.key:
                record = record._replace(
                    value=record.value.replace(record.value[12:44], pending.command.attempt.encode())
                )
        deliver(self, record)

    patch.setattr(EntityWriter, "_deliver", any_reply)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("workload", "mutant"),
    [
        (entities, apply_a_command_again),
        (entities, ignore_the_expected_version),
        (entities, take_the_reply_of_another_sending),
        (sagas, keep_what_a_failed_step_did),
    ],
)
def test_deliberate_bugs_are_found(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    workload: Workload,
    mutant: Callable[[pytest.MonkeyPatch], None],
) -> None:
    mutant(monkeypatch)
    for seed in MUTANT_SEEDS:
        try:
            workload(seed, tmp_path / str(seed))
        except AssertionError as error:
            print(f"found with seed {seed}: {error}")
            return
    raise AssertionError(f"{mutant.__name__} was not found")


@pytest.mark.full
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("workload", [entities, sagas])
def test_many_worlds(tmp_path: Path, workload: Workload) -> None:
    faults = sum(workload(seed, tmp_path / str(seed)).faults for seed in range(100, 150))
    assert faults > 1_000
