"""Tests that take their process with them: each fails once, and all others run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.turns import COMPUTING_AT_ONCE, Turns
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
SCHEDULER = """
from tests.support.turns import COMPUTING_AT_ONCE, Turns

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
    gateway = SimpleNamespace(id="gw")

    def __init__(self) -> None:
        self.is_dead = False
        self.given: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        if self.is_dead:
            raise OSError("cannot send (already closed?)")
        self.given += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def scheduler_of(processes: int, collection: list[str]) -> tuple[Turns, list[Any]]:
    config: Any = SimpleNamespace(getvalue=lambda name: ["popen"] * processes, option=SimpleNamespace())
    scheduler = Turns(config, None)
    workers: list[Any] = [Worker() for _ in range(processes)]
    for worker in workers:
        scheduler.add_node(worker)
        scheduler.add_node_collection(worker, collection)
    return scheduler, workers


def test_only_some_of_the_tests_that_compute_run_at_once() -> None:
    computing = [f"tests/simulation/test_{number}.py::test_{part}" for number in range(9) for part in range(4)]
    waiting = [f"tests/clients/test_{number}.py::test_{part}" for number in range(9) for part in range(4)]
    collection = computing + waiting
    scheduler, workers = scheduler_of(5, collection)
    scheduler.schedule()
    first = [collection[worker.given[0]].split("/")[1] for worker in workers]
    assert sorted(first) == ["clients"] * (5 - COMPUTING_AT_ONCE) + ["simulation"] * COMPUTING_AT_ONCE
    for worker in workers:
        for index in worker.given:  # grows while tests end
            scheduler.mark_test_complete(worker, index)
    assert sorted(index for worker in workers for index in worker.given) == list(range(len(collection)))


def test_work_for_a_process_that_died_unnoticed_goes_to_the_next_one() -> None:
    """A report may be read when the process that sent it is gone: neither the run nor its next tests are lost."""
    collection = [f"tests/unit/test_{name}.py::test" for name in "abcde"]
    scheduler, (first,) = scheduler_of(1, collection)
    second: Any = Worker()
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
