"""G5: the real client and broker run in a deterministic simulator; a failing seed replays exactly.

Faults: kills, freezes, power cuts, failing fsyncs, full disks, clocks that jump, lost and doubled messages, in every
workload with fresh seeds (a minute each time, an hour with `make test-full`); and a bug that is put into the client.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MINUTE_S, HOUR_S = 60, 3_600


WITH_A_BUG = """
import hashlib, logging, sys
from pathlib import Path
from semel.client.producer.core import ProducerCore
from tests.simulation.workloads import producer_and_broker
logging.disable()
ProducerCore.lost = lambda core, sendings, *_: core.written(sendings) or []  # a lost response counts as written
for seed in range(int(sys.argv[1]), 60):
    worlds = []
    try:
        producer_and_broker(seed, Path(sys.argv[2]) / str(seed), worlds.append)
    except AssertionError as error:
        trace = worlds[0].trace
        print(seed, worlds[0].faults, len(trace), hashlib.sha256(repr(trace).encode()).hexdigest(), repr(str(error)))
        break
"""


def test_a_seed_that_fails_fails_again_in_the_same_way(tmp_path: Path) -> None:
    def failure(first_seed: str, hash_seed: str) -> str:
        words = [sys.executable, "-c", WITH_A_BUG, first_seed, str(tmp_path / hash_seed)]
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        return subprocess.run(words, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout

    found = failure("0", "1")
    seed, faults, *_ = found.split()
    assert int(faults) > 0, "the bug shows under a fault only"
    assert failure(seed, "2") == found, "another process with other hashes: the same faults, trace and violation"


def run_fresh_seeds(*arguments: str) -> str:
    """What was printed: every seed, and at the end the number of faults."""
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-10_000:]
    return done.stdout


@pytest.mark.timeout(20 * MINUTE_S)
def test_a_minute_of_fresh_seeds_breaks_no_promise() -> None:
    assert "no promise was broken" in run_fresh_seeds("--seconds", str(MINUTE_S))


def test_a_campaign_ends_when_so_many_faults_have_happened() -> None:
    printed = run_fresh_seeds("--workload", "producer", "--faults", "300", "--processes", "2").splitlines()
    seeds = [line for line in printed if line.startswith("producer ") and line.split()[1:2] and len(line.split()) == 2]
    (total,) = [line for line in printed if " faults in " in line and not line.startswith("producer")]
    assert len(seeds) >= 2
    assert int(total.split()[0]) >= 300


def test_a_campaign_that_is_stopped_says_how_far_it_came() -> None:
    command = [sys.executable, "-m", "tests.simulation", "--workload", "producer", "--seconds", str(HOUR_S)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(3):  # two of them have ended
            assert process.stdout.readline().startswith("producer ")
        process.terminate()
        printed = process.stdout.read().splitlines()
    assert process.returncode == 0
    assert printed[-2:] == ["stopped before its end", "no promise was broken"]
    (total,) = [line.split() for line in printed if " runs, " in line]
    assert int(total[1]) >= 3
    assert int(total[3]) > 0


@pytest.mark.full
@pytest.mark.timeout(2 * HOUR_S)
def test_an_hour_of_fresh_seeds_breaks_no_promise() -> None:
    assert "no promise was broken" in run_fresh_seeds("--seconds", str(HOUR_S))
