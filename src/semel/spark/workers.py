"""What every Python worker does in its first tasks, and what it keeps from one task to the next."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from semel.client.cluster import Cluster
from semel.client.settings import ClientSettings
from semel.spark.offsets import Range
from semel.spark.options import SourceOptions
from semel.spark.reading import RangeReader

SETTLING_TASKS = 3  # until a worker has imported and compiled all that it keeps
KEPT_CLUSTERS = 8  # a worker serves all queries of its executor

_tasks_to_settle = SETTLING_TASKS
_clusters: dict[ClientSettings, Cluster] = {}  # not in use now; the oldest first


def settle_worker() -> None:
    """At the start of a task. PySpark's daemon collects garbage after every task, which costs more than a small batch.
    What imports and first calls leave behind never becomes garbage, so it need not be looked at again. The first task
    imports, calls and compiles; one more is for what only a second one does. Later on nothing is set aside any more:
    it could be what a query made, and would never be given back."""
    global _tasks_to_settle
    if _tasks_to_settle == SETTLING_TASKS:
        end_quietly_when_idle()
    if _tasks_to_settle:
        import pyarrow  # noqa: F401

        import semel.protocol.columns_decode
        import semel.protocol.columns_encode  # noqa: F401

        gc.collect()
        gc.freeze()
        _tasks_to_settle -= 1


def end_quietly_when_idle() -> None:
    """Spark ends workers that have nothing to do by closing their connection: after a minute, and when it stops.
    PySpark takes that for a failed task, reports it to the closed connection, and prints a traceback (BrokenPipeError).
    From the next task on this process ends without one. The same holds for the processes in which Spark plans with a
    Python source: an argument of the daemon names the module that its workers run."""
    name = sys.argv[1] if len(sys.argv) > 1 and sys.argv[1].startswith("pyspark.") else "pyspark.worker"
    module: Any = sys.modules.get(name)  # in a process that the daemon has forked
    if getattr(module, "main", None) is None or module.main.__module__ == __name__:
        return
    run_task = module.main

    def main(infile: Any, outfile: Any) -> None:
        if not infile.peek(1):
            sys.exit(1)
        run_task(infile, outfile)

    module.main = main


def end_quietly_when_stopped() -> None:
    """For a reader's `stop`. Spark ends the process of a stream's source by closing its connection, too. PySpark stops
    the reader, reports the end of the connection to the connection, and prints a traceback (BrokenPipeError) of a query
    that was stopped as it should be. The process has nothing left to do here, and ends."""
    error = sys.exc_info()[1]
    if isinstance(error, EOFError) and error.__traceback__ is not None:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__") == "pyspark.serializers":  # Spark's next request, not what the reader did
            sys.stderr.flush()
            os._exit(0)


@contextmanager
def worker_cluster(settings: ClientSettings) -> Iterator[Cluster]:
    """Connections and metadata that stay for the next task of this worker: a small batch would spend more time on
    connecting than on its rows. After a failure, or a task that ended early, they are closed: nothing is left in them
    that another task could stumble over."""
    cluster = _clusters.pop(settings, None) or Cluster(settings)
    try:
        yield cluster
    except BaseException:
        cluster.close()
        raise
    if settings in _clusters:
        cluster.close()  # two were in use at once
        return
    _clusters[settings] = cluster
    while len(_clusters) > KEPT_CLUSTERS:
        _clusters.pop(next(iter(_clusters))).close()


def tables_of(source: SourceOptions, wanted: Range, *, headers: bool, views: bool = False) -> Iterator[Any]:
    """What a task reads of a range, as `RangeReader.tables` gives it."""
    with worker_cluster(ClientSettings.of(source.client, allow_auto_create_topics=False)) as cluster:
        reader = RangeReader(
            cluster, wanted, read_committed=source.read_committed, fail_on_data_loss=source.fail_on_data_loss
        )
        yield from reader.tables(headers=headers, views=views)
