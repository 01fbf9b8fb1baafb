"""Programs that use the blocking client, and a broker, in simulated worlds."""

from __future__ import annotations

from pathlib import Path

from tests.simulation.client_workload import clients

SEEDS = range(3)  # fresh ones are in test_g5


def test_calls_keep_their_promises_and_their_timeouts(tmp_path: Path) -> None:
    faults = 0
    for seed in SEEDS:
        print(f'make simulate ARGS="--workload clients --seed {seed}"')
        faults += clients(seed, tmp_path / str(seed)).faults
    assert faults > 100
