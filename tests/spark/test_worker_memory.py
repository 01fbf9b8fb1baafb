"""The memory of a Python worker has a bound, whatever the size of a partition: 256 MB more than an idle worker."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.spark_contestants import Job, SparkProgram, run_job, semel_fast, semel_frame
from benchmarks.spark_topics import filled
from semel.local.brokers import SemelBroker

MB = 1_000_000
BOUND_BYTES = 256 * MB
PARTITION_BYTES = 700 * MB


@pytest.fixture
def broker() -> Iterator[SemelBroker]:
    with SemelBroker(None, "--fsync", "os") as started:
        yield started


def peaks_bytes(ancestor: int) -> dict[int, int]:
    """Of every Python worker below a process: the most memory that it ever had."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = {}
    for pid in parents:
        above = pid
        while above not in (ancestor, 0):
            above = parents.get(above, 0)
        if above == ancestor and b".daemon" in Path(f"/proc/{pid}/cmdline").read_bytes():
            status = Path(f"/proc/{pid}/status").read_text()
            found[pid] = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    return found


@pytest.mark.full
@pytest.mark.timeout(420)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("value_bytes", [1_000, 200_000])
@pytest.mark.parametrize("make", [semel_frame, semel_fast])
def test_a_worker_stays_small_on_a_partition_much_larger_than_its_bound(
    broker: SemelBroker, make: Callable[[], SparkProgram], value_bytes: int
) -> None:
    few = filled(broker.bootstrap, "few", value_bytes, 100, partitions=1)
    many = filled(broker.bootstrap, "many", value_bytes, PARTITION_BYTES // value_bytes, partitions=1)
    program = make()
    try:
        run_job(program, Job(broker.bootstrap, few), check=True)
        idle = max(peaks_bytes(program.pid).values())
        run_job(program, Job(broker.bootstrap, many), check=True)
        peak = max(peaks_bytes(program.pid).values())
    finally:
        program.close()
    assert many.value_bytes > 2 * BOUND_BYTES
    print(f"idle {idle / MB:.0f} MB, peak {peak / MB:.0f} MB")
    assert peak - idle < BOUND_BYTES
