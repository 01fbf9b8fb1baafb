"""Where the time of a task goes: seconds by stage, for `semel bench spark`.

A clock runs for one stage at a time, so the stages of a task add up to its time. That costs a microsecond for each
fetch or record batch, never for a record. The sums are written only if SEMEL_SPARK_STAGES names a folder: each process
appends one line of JSON for each task to a file of its own.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TypeVar

VARIABLE = "SEMEL_SPARK_STAGES"
FETCH, DECODE, ENCODE, PRODUCE = "fetch", "decode", "encode", "produce"
FROM_SPARK, TO_SPARK = "wait for rows from Spark", "hand rows to Spark"
FUNCTION, OTHER = "function", "other"

Item = TypeVar("Item")


class StageClock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._stage = OTHER
        self._since_s = time.perf_counter()

    def switch(self, stage: str) -> str:
        """From now on it is this stage; returns the one before."""
        now_s, before = time.perf_counter(), self._stage
        self.seconds[before] = self.seconds.get(before, 0.0) + now_s - self._since_s
        self._stage, self._since_s = stage, now_s
        return before

    def reset(self) -> None:
        self.seconds = {}
        self._stage, self._since_s = OTHER, time.perf_counter()


clock = StageClock()  # of this process: a Python worker runs one task at a time


class stage:
    """with stage(FETCH): ..."""

    __slots__ = ("_before", "_name")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._before = clock.switch(self._name)

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        clock.switch(self._before)


def pulled(items: Iterator[Item], name: str) -> Iterator[Item]:
    """The items; the time until each is there counts for a stage."""
    while True:
        with stage(name):
            item = next(items, None)
        if item is None:
            return
        yield item
        del item  # or it is held while the next is made


def task(kind: str, output: Iterator[Item]) -> Iterator[Item]:
    """What a task gives to Spark; the time that Spark takes for it is a stage of its own."""
    clock.reset()
    try:
        for item in output:
            before = clock.switch(TO_SPARK)
            yield item
            clock.switch(before)
    finally:
        clock.switch(OTHER)
        _write(kind)


def _write(kind: str) -> None:
    folder = os.environ.get(VARIABLE)
    if folder:
        with (Path(folder) / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps({"task": kind, "cpu": time.process_time(), **clock.seconds}) + "\n")


def summed(folder: Path) -> dict[str, dict[str, float]]:
    """By kind of task: seconds of each stage over all tasks, and how many tasks there were."""
    found: dict[str, dict[str, float]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            spent = json.loads(line)
            total = found.setdefault(spent.pop("task"), {"tasks": 0})
            spent.pop("cpu")
            total["tasks"] += 1
            for name, seconds in spent.items():
                total[name] = total.get(name, 0.0) + seconds
    return found
