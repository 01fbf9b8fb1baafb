"""Instances of `semel.process` and a broker in simulated worlds, with the client's own threads."""

from __future__ import annotations

from pathlib import Path

from tests.simulation.processing_workload import processing

SEEDS = range(3)  # fresh ones are in test_g5


def test_offsets_and_output_agree_whoever_is_killed_or_frozen(tmp_path: Path) -> None:
    faults = 0
    for seed in SEEDS:
        print(f'make simulate ARGS="--workload processing --seed {seed}"')
        faults += processing(seed, tmp_path / str(seed)).faults
    assert faults > 100
