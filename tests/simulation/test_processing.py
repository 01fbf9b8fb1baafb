"""Instances of `semel.process` and a broker in simulated worlds, with the client's own threads."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from semel.client.errors import KafkaError
from semel.patterns.process_modes import AtLeastOnce, AtMostOnce, ExactlyOnce, Mode
from tests.simulation.processing_workload import processing

SEEDS = range(6)
FRESH = 2
HUNTED = 60  # seeds, in which each deliberate bug must be found

TRACE = """
import hashlib, logging, sys
from pathlib import Path
from tests.simulation.processing_workload import processing
logging.disable()
world = processing(int(sys.argv[1]), Path(sys.argv[2]))
print(len(world.trace), hashlib.sha256("\\n".join(world.trace).encode()).hexdigest())
"""


def test_offsets_and_output_agree_whoever_is_killed_or_frozen(tmp_path: Path) -> None:
    faults = 0
    for seed in [*SEEDS, *(random.SystemRandom().randrange(2**32) for _ in range(FRESH))]:
        print(f'make simulate ARGS="--workload processing --seed {seed}"')
        faults += processing(seed, tmp_path / str(seed)).faults
    assert faults > 100


def test_a_seed_of_processing_gives_the_same_trace_whatever_pythons_hashes_are(tmp_path: Path) -> None:
    def trace(hash_seed: str) -> str:
        words = [sys.executable, "-c", TRACE, "3", str(tmp_path / hash_seed)]
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        return subprocess.run(words, env=env, capture_output=True, text=True, timeout=500, check=True).stdout

    first = trace("1")
    assert int(first.split()[0]) > 100
    assert trace("2") == first


# --- deliberate bugs ---


def go_back_to_where_the_unit_began(patch: pytest.MonkeyPatch) -> None:
    """Also when the commit that was in doubt has happened."""

    def rewind(mode: Mode) -> None:
        for partition, began in mode.begun.items():
            if partition in mode.consumer.assignment():
                mode.consumer.seek(partition, began)
        mode.begun = {}

    patch.setattr(Mode, "_rewind", rewind)


def go_on_where_the_unit_ended(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Mode, "_rewind", lambda mode: setattr(mode, "begun", {}))


def commit_offsets_beside_the_transaction(patch: pytest.MonkeyPatch) -> None:
    def settle(mode: ExactlyOnce) -> None:
        if mode.is_working:
            progress = mode._progress()
            mode._commit()
            mode.consumer.commit(progress)
            mode._is_open = False
            mode.begun = {}

    patch.setattr(ExactlyOnce, "settle", settle)


def commit_before_delivery(patch: pytest.MonkeyPatch) -> None:
    def settle(mode: AtLeastOnce) -> None:
        if mode.is_working:
            mode.consumer.commit(mode._progress())
            mode._deliveries, mode.begun = [], {}

    patch.setattr(AtLeastOnce, "settle", settle)


def commit_after_the_output(patch: pytest.MonkeyPatch) -> None:
    def take(mode: AtMostOnce, batch: Any, firsts: Any) -> None:
        mode._begin(firsts)
        for delivery in mode._emit(batch):
            delivery.result()
        mode.consumer.commit(mode._progress())
        mode.begun = {}

    patch.setattr(AtMostOnce, "take", take)
    patch.setattr(AtMostOnce, "drop", lambda mode: None)


def take_a_commit_in_doubt_for_done(patch: pytest.MonkeyPatch) -> None:
    def commit(mode: ExactlyOnce) -> None:
        try:
            mode.producer.commit_transaction()
        except KafkaError as error:
            if "unknown" not in str(error):
                raise
            mode.producer.close(timeout_ms=0)
            mode.producer = mode.make_producer()
            mode.producer.init_transactions()

    patch.setattr(ExactlyOnce, "_commit", commit)


BUGS: list[Callable[[pytest.MonkeyPatch], None]] = [
    go_back_to_where_the_unit_began,
    go_on_where_the_unit_ended,
    commit_offsets_beside_the_transaction,
    commit_before_delivery,
    commit_after_the_output,
    take_a_commit_in_doubt_for_done,
]


@pytest.mark.full
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_deliberate_bug_in_processing_is_found(
    bug: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    for seed in range(HUNTED):
        try:
            processing(seed, tmp_path / str(seed))
        except AssertionError as error:
            print(seed, error)
            return
    pytest.fail(f"not found in {HUNTED} seeds")
