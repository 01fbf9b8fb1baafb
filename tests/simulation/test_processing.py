"""Instances of `semel.process` and a broker in simulated worlds, with the client's own threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.processing_workload import processing

SEEDS = range(3)  # fresh ones are in test_campaign

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
    for seed in SEEDS:
        print(f'make simulate ARGS="--workload processing --seed {seed}"')
        faults += processing(seed, tmp_path / str(seed)).faults
    assert faults > 100


@pytest.mark.parametrize("seed", ["3", "2"], ids=["classic", "consumer"])
def test_a_seed_of_processing_gives_the_same_trace_whatever_pythons_hashes_are(tmp_path: Path, seed: str) -> None:
    def trace(hash_seed: str) -> str:
        words = [sys.executable, "-c", TRACE, seed, str(tmp_path / hash_seed)]
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        return subprocess.run(words, env=env, capture_output=True, text=True, timeout=500, check=True).stdout

    first = trace("1")
    assert int(first.split()[0]) > 100
    assert trace("2") == first
