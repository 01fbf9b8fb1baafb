"""Drivers and tasks of the Spark sink, and a broker, in simulated worlds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.simulation.sink_workload import sink

SEEDS = range(3)  # fresh ones are in test_campaign

TRACE = """
import hashlib, logging, sys
from pathlib import Path
from tests.simulation.sink_workload import sink
logging.disable()
world = sink(int(sys.argv[1]), Path(sys.argv[2]))
print(len(world.trace), hashlib.sha256("\\n".join(world.trace).encode()).hexdigest())
"""


def test_each_batch_is_written_once_and_the_ledger_agrees(tmp_path: Path) -> None:
    faults = 0
    for seed in SEEDS:
        print(f'make simulate ARGS="--workload sink --seed {seed}"')
        faults += sink(seed, tmp_path / str(seed)).faults
    assert faults > 100


def test_a_seed_of_the_sink_gives_the_same_trace_whatever_pythons_hashes_are(tmp_path: Path) -> None:
    def trace(hash_seed: str) -> str:
        words = [sys.executable, "-c", TRACE, "3", str(tmp_path / hash_seed)]
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        return subprocess.run(words, env=env, capture_output=True, text=True, timeout=500, check=True).stdout

    first = trace("1")
    assert int(first.split()[0]) > 50
    assert trace("2") == first
