"""Tests that take their process with them: each fails once, and all others run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
SCHEDULER = """
from tests.support.turns import Turns

def pytest_xdist_make_scheduler(config, log):
    return Turns(config, log)
"""
TESTS = """
import os

def test_before():
    pass

def test_that_crashes():
    os._exit(1)

def test_after():
    pass
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_a_crash_fails_one_test_and_the_others_of_its_file_still_run(tmp_path: Path, processes: int) -> None:
    (tmp_path / "conftest.py").write_text(SCHEDULER)
    for number in range(3):
        (tmp_path / f"test_fine_{number}.py").write_text("def test_that_passes():\n    pass\n")
    for name in ("test_one.py", "test_two.py"):
        (tmp_path / name).write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(processes), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert "2 failed, 7 passed" in done.stdout, done.stdout
