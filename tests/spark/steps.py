"""What a query does to its rows in tests: functions for mapInArrow that make trouble in the way that a test needs.

Each returns (function, columns). Files in a folder tell the test, and the other attempts, how far an attempt is.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Step = tuple[Callable[[Iterator[Any]], Iterator[Any]], str]
PATIENCE_S = 60.0


def attempt_of() -> tuple[int, int]:
    """(task, attempt)"""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    return context.partitionId(), context.attemptNumber()


def texts(table: Any) -> Any:
    """For the fast lane to a table: keys and values as they are."""
    import pyarrow as pa

    return pa.table({name: table[name].cast(pa.string()) for name in ("key", "value")})


def random_keys() -> Step:
    """Every run gives every row another key, as a query does that makes keys by chance."""

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        for batch in batches:
            keys = pa.array([os.urandom(8) for _ in range(batch.num_rows)], pa.binary())
            yield pa.RecordBatch.from_arrays([keys, batch.column("value")], names=["key", "value"])

    return run, "key BINARY, value BINARY"


def two_attempts(folder: str, rows: int, size_bytes: int, patience_s: float) -> Step:
    """The first attempt at a task stops in the middle until a copy of it has begun, and then for a while.

    Both give the same rows, each in an order of its own, as after a shuffle. The copy has no rows before the test
    tells, by the file `written`, that those of the first attempt are in the log.
    """

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        task, attempt = attempt_of()
        if not sum(batch.num_rows for batch in batches):
            return
        order = list(range(rows))
        random.Random(attempt).shuffle(order)
        _tell(folder, f"begun-{task}-{attempt}")
        if attempt > 0:
            _await(Path(folder) / "written", PATIENCE_S)
        yield from _numbered(order[: rows // 2], size_bytes)
        if attempt == 0:
            _await(Path(folder) / f"begun-{task}-1", PATIENCE_S)
            _await(Path(folder) / "written", PATIENCE_S)
            time.sleep(patience_s)  # the copy writes meanwhile, or tries to; if it is done, this attempt is killed
        yield from _numbered(order[rows // 2 :], size_bytes)

    return run, "value BINARY"


def changing_topic(folder: str, rows: int, size_bytes: int, topics: list[str], written: str) -> Step:
    """The first attempt at a task gives its rows to one topic and dies when some are written; the next gives them to
    another."""

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        _, attempt = attempt_of()
        if not sum(batch.num_rows for batch in batches):
            return
        first = not _exists(folder, "died")
        name = topics[0] if first else topics[1]
        for batch in _numbered(list(range(rows)), size_bytes):
            yield pa.RecordBatch.from_arrays(
                [batch.column(0), pa.array([name] * batch.num_rows)], names=["value", "topic"]
            )
        if first:
            _await(Path(written), PATIENCE_S)
            _tell(folder, "died")
            raise RuntimeError(f"attempt {attempt} dies, as planned")

    return run, "value BINARY, topic STRING"


def late_topic(folder: str, topics: list[str]) -> Step:
    """The first attempt at a task gives its rows to one topic, but not before the test tells it to; the next attempt
    gives them to another."""

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        _, attempt = attempt_of()
        for batch in batches:
            if attempt == 0 and not _exists(folder, "begun"):
                _tell(folder, "begun")
                _await(Path(folder) / "go", 3 * PATIENCE_S)
                name = topics[0]
            else:
                name = topics[1]
            yield pa.RecordBatch.from_arrays(
                [batch.column("value"), pa.array([name] * batch.num_rows)], names=["value", "topic"]
            )

    return run, "value BINARY, topic STRING"


def _numbered(numbers: list[int], size_bytes: int) -> Iterator[Any]:
    """Rows with a number and something to fill them up, in batches of a few megabytes."""
    import pyarrow as pa

    per_batch = max(1, 4_000_000 // size_bytes)
    for start in range(0, len(numbers), per_batch):
        values = [b"%09d" % number + b"." * (size_bytes - 9) for number in numbers[start : start + per_batch]]
        yield pa.RecordBatch.from_arrays([pa.array(values, pa.binary())], names=["value"])


def _exists(folder: str, name: str) -> bool:
    return (Path(folder) / name).exists()


def _tell(folder: str, name: str) -> None:
    (Path(folder) / name).write_text(str(os.getpid()))


def _await(file: Path, patience_s: float) -> None:
    deadline_s = time.monotonic() + patience_s
    while not file.exists() and time.monotonic() < deadline_s:
        time.sleep(0.02)
