"""Deliberate bugs, and how long a workload takes to find them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.simulation.shrink import Workload

MINUTE_S = 60.0  # of CPU time


class Hunt(NamedTuple):
    mutant: Callable[[pytest.MonkeyPatch], None]
    workload: Workload


def hunt_within_a_minute(hunt: Hunt, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Runs one seed after the other with the bug in the code; fails if none of them breaks a promise."""
    hunt.mutant(patch)
    seed, began_s = 0, time.process_time()
    while time.process_time() - began_s < MINUTE_S:
        try:
            hunt.workload(seed, folder / str(seed), lambda _: None)
        except AssertionError as error:
            print(f"seed {seed}, {time.process_time() - began_s:.1f} s: {error}")
            return
        seed += 1
    pytest.fail(f"not found in {seed} seeds")
