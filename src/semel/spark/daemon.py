"""The process that Spark's Python workers on this machine are forked from: PySpark's, with semel imported beforehand.

Every worker would import both anew. What starts threads when it is imported (numpy, pyarrow, pandas) is left to the
workers: a process with threads must not fork. `spark_session()` names this module to Spark.
"""

from __future__ import annotations

import gc

import pyspark.worker  # noqa: F401
from pyspark.daemon import manager

import semel.spark.batch_writer
import semel.spark.source
import semel.spark.stream_writer
import semel.spark.write_job  # noqa: F401
from semel.spark.workers import end_quietly_when_idle

if __name__ == "__main__":
    end_quietly_when_idle()
    gc.freeze()  # what is imported never becomes garbage, and workers look for garbage after every task
    manager()
