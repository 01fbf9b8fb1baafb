"""Drivers and tasks of the Spark sink, and a broker, in simulated worlds."""

from __future__ import annotations

from pathlib import Path

from tests.simulation.sink_workload import sink

SEEDS = range(3)  # fresh ones are in test_g5


def test_each_batch_is_written_once_and_the_ledger_agrees(tmp_path: Path) -> None:
    faults = 0
    for seed in SEEDS:
        print(f'make simulate ARGS="--workload sink --seed {seed}"')
        faults += sink(seed, tmp_path / str(seed)).faults
    assert faults > 100
