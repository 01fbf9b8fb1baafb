"""Rows that are written at most once: a task that Spark runs again would not know that it ran before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from semel.spark.in_place import tasks_without_shuffle
from semel.spark.write_job import settled

pytestmark = pytest.mark.timeout(300)
TASKS, MAPS, ROWS, ROW_BYTES = 2, 4, 400, 20_000  # more than the buffers on the way to a Python worker


@pytest.fixture
def rows(session: Any) -> Any:
    """They cross a shuffle, and reach a task from several of its files, one after the other."""
    before = {"spark.sql.adaptive.enabled": "false", "spark.sql.execution.arrow.maxRecordsPerBatch": "1"}
    found = {name: session.conf.get(name) for name in before}
    for name, value in before.items():
        session.conf.set(name, value)
    made = session.range(0, ROWS, 1, MAPS).selectExpr("id", f"repeat('x', {ROW_BYTES}) AS value")
    yield made.repartition(TASKS, "id")
    for name, value in found.items():
        session.conf.set(name, value)


def task_that_loses_shuffle_files(session: Any, folder: Path) -> Callable[..., Iterator[Any]]:
    """Notes every run of a task with its attempt number; the first one deletes the files that it has yet to read."""
    local = session.sparkContext._conf.get("spark.local.dir")

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        number = f"{context.partitionId()}-{context.attemptNumber()}"
        for index, batch in enumerate(batches):
            if index == 0:
                (folder / "runs" / f"{number}-{context.taskAttemptId()}").touch()
                lose_once()
            yield batch.slice(0, 0)

    def lose_once() -> None:
        try:
            lost = (folder / "lost").open("x")
        except FileExistsError:
            return
        with lost:
            for path in Path(local).rglob("shuffle_*.data"):
                path.unlink()
                lost.write(f"{path}\n")

    return run


def runs(rows: Any, folder: Path) -> list[str]:
    """The task and attempt number of every run of a task of one job."""
    (folder / "runs").mkdir()
    rows.mapInArrow(task_that_loses_shuffle_files(rows.sparkSession, folder), rows.schema).collect()
    assert (folder / "lost").read_text(), "there was nothing to delete"
    return sorted(path.name.rpartition("-")[0] for path in (folder / "runs").iterdir())


def test_a_task_behind_a_shuffle_may_run_twice_as_its_first_attempt(rows: Any, tmp_path: Path) -> None:
    """The fault: without it the next test would show nothing."""
    found = runs(rows, tmp_path)
    assert set(found) == {"0-0", "1-0"}
    assert len(found) > TASKS


def test_rows_that_are_settled_are_seen_once_though_shuffle_files_are_lost(
    session: Any, rows: Any, tmp_path: Path
) -> None:
    kept = session.sparkContext._jsc.getPersistentRDDs().size()
    with settled(rows) as calm:
        assert tasks_without_shuffle(calm) == TASKS
        assert runs(calm, tmp_path) == ["0-0", "1-0"]
        assert calm.count() == ROWS
    assert session.sparkContext._jsc.getPersistentRDDs().size() == kept


def test_rows_that_cross_no_shuffle_are_left_as_they_are(session: Any, rows: Any) -> None:
    with settled(rows) as calm, settled(calm.selectExpr("value")) as same:
        assert tasks_without_shuffle(same) == TASKS
        assert "Project" in same._jdf.queryExecution().analyzed().getClass().getSimpleName()
