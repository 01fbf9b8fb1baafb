"""Programs that use the blocking client, and a broker, in simulated worlds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.simulation.client_workload import clients

SEEDS = range(3)  # fresh ones are in test_campaign

TRACE = """
import hashlib, logging, sys
from pathlib import Path
from tests.simulation.client_workload import clients
logging.disable()
world = clients(3, Path(sys.argv[1]))
print(len(world.trace), hashlib.sha256("\\n".join(world.trace).encode()).hexdigest())
"""


def test_calls_keep_their_promises_and_their_timeouts(tmp_path: Path) -> None:
    faults = 0
    for seed in SEEDS:
        print(f'make simulate ARGS="--workload clients --seed {seed}"')
        faults += clients(seed, tmp_path / str(seed)).faults
    assert faults > 100


def test_a_seed_of_clients_gives_the_same_trace_whatever_pythons_hashes_are(tmp_path: Path) -> None:
    def trace(hash_seed: str) -> str:
        words = [sys.executable, "-c", TRACE, str(tmp_path / hash_seed)]
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        return subprocess.run(words, env=env, capture_output=True, text=True, timeout=500, check=True).stdout

    first = trace("1")
    assert int(first.split()[0]) > 50
    assert trace("2") == first
