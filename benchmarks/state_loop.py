"""semel's side of the benchmark of state: a loop that counts the records of each key, as a program."""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

import semel
from semel.patterns.process import Processor
from semel.patterns.process_state import Stores


class Program:
    def __init__(self) -> None:
        self._has_begun = False

    def begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            print("first", flush=True)

    def count(self, record: Any, state: Any) -> bytes:
        if not self._has_begun:
            self.begin()
        total = state.get(record.key, 0) + 1
        state.put(record.key, total)
        return b"%d" % total

    def count_table(self, table: pa.Table, state: Any) -> pa.Table:
        self.begin()
        found = table.group_by("key", use_threads=False).aggregate([([], "count_all")])
        keys = found["key"].combine_chunks()
        totals = pc.add(found["count_all"], pc.fill_null(state.get_many(keys), 0))
        state.put_many(keys, totals)
        return pa.table({"key": keys, "value": pc.cast(totals, pa.string())})


def timed_restore() -> None:
    """Prints how long the state took, over all partitions, and ends the program."""
    bring_up = Stores.bring_up

    def timed(self: Stores, numbers: Any, is_stopping: Any) -> None:
        wanted = set(numbers) - self._current
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        bring_up(self, numbers, is_stopping)
        if wanted:
            took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
            keys = sum(len(self._open[number].scan(b"u", b"v")) for number in wanted)
            peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 // 1_000_000
            print(f"restored {keys} keys in {took_s:.3f} s, {peak_mb} MB, {cpu_s:.3f} s of CPU", flush=True)

    Stores.bring_up = timed  # type: ignore[method-assign]


def main(job: dict[str, Any]) -> None:
    program = Program()
    if job.get("restore"):
        timed_restore()
    is_table = job["face"] == "tables"
    Processor(
        job["source"],
        job["target"],
        program.count_table if is_table else program.count,
        application_id=job["id"],
        bootstrap_servers=job["brokers"],
        tables=is_table,
        state=semel.KeyedState("totals", format="int64"),
    ).run()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
