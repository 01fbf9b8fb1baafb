"""A seed decides everything: the same one gives the same trace, whatever Python's hashes are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE_S

TRACE = """
import hashlib, logging, sys
from pathlib import Path
from tests.simulation.campaign import WORKLOADS
logging.disable()
world = WORKLOADS[sys.argv[1]](int(sys.argv[2]), Path(sys.argv[3]))
print(len(world.trace), hashlib.sha256("\\n".join(world.trace).encode()).hexdigest())
"""
LONG_S = 4 * PATIENCE_S
SEEDS = [
    pytest.param("producer", 7),
    pytest.param("consumers", 6, id="consumers-classic"),
    pytest.param("consumers", 2, id="consumers-consumer"),
    pytest.param("processing", 3, id="processing-classic"),
    pytest.param("processing", 2, id="processing-consumer"),
    pytest.param("sink", 3),
    pytest.param("clients", 3),
]


@pytest.mark.timeout(3 * LONG_S)
@pytest.mark.parametrize(("workload", "seed"), SEEDS)
def test_a_seed_gives_the_same_trace_whatever_pythons_hashes_are(tmp_path: Path, workload: str, seed: int) -> None:
    def trace(hash_seed: str) -> str:
        words = [sys.executable, "-c", TRACE, workload, str(seed), str(tmp_path / hash_seed)]
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        return subprocess.run(words, env=env, capture_output=True, text=True, timeout=LONG_S, check=True).stdout

    first = trace("1")
    assert int(first.split()[0]) > 50
    assert trace("2") == first
