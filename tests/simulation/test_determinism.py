"""A seed decides everything: the same one gives the same trace, whatever Python's hashes are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE_S

TRACES = """
import hashlib, logging, sys
from pathlib import Path
from tests.simulation.campaign import WORKLOADS
logging.disable()
for word in sys.argv[2:]:
    name, seed = word.split(":")
    world = WORKLOADS[name](int(seed), Path(sys.argv[1], word))
    print(word, len(world.trace), hashlib.sha256("\\n".join(world.trace).encode()).hexdigest())
"""
WORLDS = [
    "producer:7",
    "consumers:6",  # classic groups
    "consumers:2",  # those of the new protocol
    "processing:3",
    "processing:2",
    "sink:3",
    "clients:3",
]
LONG_S = 10 * PATIENCE_S


@pytest.mark.timeout(3 * LONG_S)
def test_a_seed_gives_the_same_trace_whatever_pythons_hashes_are_and_whatever_ran_before(tmp_path: Path) -> None:
    def traces(hash_seed: str, worlds: list[str]) -> list[str]:
        words = [sys.executable, "-c", TRACES, str(tmp_path / hash_seed), *worlds]
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=LONG_S, check=True)
        return sorted(done.stdout.splitlines())

    first = traces("1", WORLDS)
    assert len(first) == len(WORLDS)
    assert all(int(line.split()[1]) > 50 for line in first)
    assert traces("2", WORLDS[::-1]) == first
