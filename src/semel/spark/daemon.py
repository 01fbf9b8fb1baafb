"""The process that Spark's Python workers on this machine are forked from: PySpark's, with semel imported beforehand.

Every worker would import both anew. What starts threads when it is imported (numpy, pyarrow, pandas) is left to the
workers: a process with threads must not fork. `spark_session()` names this module to Spark.
"""

from __future__ import annotations

import gc
import socket

import pyspark.daemon
import pyspark.worker

import semel.spark.batch_writer
import semel.spark.source
import semel.spark.stream_writer
import semel.spark.write_job  # noqa: F401
from semel.spark.workers import end_quietly_when_idle

_worker = pyspark.daemon.worker


def worker(sock: socket.socket, authenticated: bool) -> int:
    """In a forked process. Spark closes the connection of a task that it does not need any more; the worker ends then,
    in PySpark with a traceback that looks like a failure of the query."""
    try:
        return int(_worker(sock, authenticated))
    except BrokenPipeError:
        return 1


pyspark.daemon.worker = worker

if __name__ == "__main__":
    end_quietly_when_idle()
    gc.freeze()  # what is imported never becomes garbage, and workers look for garbage after every task
    pyspark.daemon.manager()
