"""The process that Spark's local Python workers are forked from, and the one that it starts for a source."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.waiting import PATIENCE_S


def run(program: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON_DAEMON_KILL_WORKER_ON_FLUSH_FAILURE": "1"}  # as Spark sets it
    words = [sys.executable, "-c", program]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_it_has_semel_and_one_thread() -> None:
    look = "print(len(os.listdir('/proc/self/task')), 'semel.spark.writing' in sys.modules)"
    assert run(f"import os, sys, semel.spark.daemon; {look}").stdout.split() == ["1", "True"]


def test_the_process_of_a_source_has_neither_producer_nor_consumer_nor_admin() -> None:
    """Every query waits for its start."""
    found = run("import sys, semel.spark.source; print(*sys.modules)").stdout.split()
    assert "semel.spark.source" in found
    unwanted = ("semel.client.producer", "semel.client.consumer", "semel.client.admin")
    assert [name for name in found if name.startswith(unwanted)] == []


def test_a_worker_whose_task_spark_has_ended_ends_without_a_traceback() -> None:
    """Spark closes the connection of a task that it does not need any more."""
    done = run("""
import os, socket, sys
import pyspark.daemon, pyspark.worker, semel.spark.daemon

spark, worker = socket.socketpair()

def task(infile, outfile):
    outfile.write(b"rows")
    spark.close()

pyspark.worker.main = task
print(pyspark.daemon.worker(worker, True), flush=True)
os._exit(0)
""")
    assert (done.stdout, done.stderr) == ("1\n", "")
