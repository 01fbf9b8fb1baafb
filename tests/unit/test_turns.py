"""Tests that take their process with them: each fails once, and all others run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.turns import Turns
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


class Worker:
    """What xdist's scheduler calls of a process that runs tests."""

    shutting_down = False

    def __init__(self) -> None:
        self.is_dead = False
        self.given: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        if self.is_dead:
            raise OSError("cannot send (already closed?)")
        self.given += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def test_work_for_a_process_that_died_unnoticed_goes_to_its_successor() -> None:
    """A report may be read when the process that sent it is gone: neither the run nor its next tests are lost."""
    collection = [f"tests/unit/test_{name}.py::test" for name in "abcde"]
    config: Any = SimpleNamespace(getvalue=lambda name: ["popen"], option=SimpleNamespace())  # one process
    scheduler = Turns(config, None)
    first: Any = Worker()
    second: Any = Worker()
    scheduler.add_node(first)
    scheduler.add_node_collection(first, collection)
    scheduler.schedule()
    assert first.given == [0, 1]

    first.is_dead = True
    scheduler.mark_test_complete(first, 0)
    assert scheduler.remove_node(first) == collection[1]
    scheduler.add_node(second)
    scheduler.add_node_collection(second, collection)
    scheduler.schedule()
    for index in second.given:  # grows while tests end
        scheduler.mark_test_complete(second, index)
    assert sorted(second.given) == [2, 3, 4]
    assert scheduler.tests_finished
