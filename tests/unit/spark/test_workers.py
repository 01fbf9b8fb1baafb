"""What a worker sets aside from the garbage collection that Spark runs after every task."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from semel.spark import workers

MANY = 20_000


@pytest.fixture(autouse=True)
def thawed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(workers, "_tasks_to_settle", workers.SETTLING_TASKS)
    yield
    gc.unfreeze()


def test_what_the_first_tasks_leave_behind_is_not_looked_at_again() -> None:
    kept = []
    for _ in range(3):  # tasks, and what each of them imports and makes
        workers.settle_worker()
        kept.append([[] for _ in range(MANY)])
    workers.settle_worker()
    assert sum(type(thing) is list for thing in gc.get_objects()) < 2 * MANY  # the third task's only
    assert gc.get_freeze_count() > 2 * MANY


def test_what_later_tasks_make_is_given_back() -> None:
    for _ in range(workers.SETTLING_TASKS):
        workers.settle_worker()
    kept = [[] for _ in range(MANY)]
    frozen = gc.get_freeze_count()
    workers.settle_worker()
    assert gc.get_freeze_count() <= frozen
    assert len(kept) == MANY
