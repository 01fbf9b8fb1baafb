"""The long run of all workloads, with fresh seeds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 3_600


@pytest.mark.full
@pytest.mark.timeout(2 * SECONDS)
def test_an_hour_of_fresh_seeds_breaks_no_promise() -> None:
    command = [sys.executable, "-m", "tests.simulation", "--seconds", str(SECONDS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-10_000:]
