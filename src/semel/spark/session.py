"""A Spark session with what semel needs, and nothing else changed."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

LAUNCHER = Path(__file__).with_name("python.sh")
# Who has set one of these may have another Spark, or a cluster.
ELSEWHERE = ("SPARK_HOME", "SPARK_CONF_DIR", "HADOOP_CONF_DIR", "PYSPARK_GATEWAY_PORT", "MASTER", "SPARK_REMOTE")

# Only what exactly-once on Python sources needs, and what costs nothing; each can be overridden.
SETTINGS = {
    # State in RocksDB with changelogs: a batch uploads what changed, not the whole state.
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    # A stage that runs again with other rows is noticed (Spark 4.2 and later have it on by default).
    "spark.sql.shuffle.orderIndependentChecksum.enabled": "true",
    # Between Spark and its Python workers. Over TCP the second small packet of a task waits for the acknowledgement of
    # the first, up to 40 ms, and a task of a query has three such conversations.
    "spark.python.unix.domain.socket.enabled": "true",
}

# Where everything stays on this machine, checkpoints most likely too. Spark's usual way to write them starts a program
# (readlink) for every look at a local file, as Hadoop's own library for that is not in PySpark: 60 ms a batch. This is
# the one that it uses for file systems that know no other: a new file, then a rename.
LOCAL_SETTINGS = {
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
}


def spark_session(app_name: str = "semel", *, master: str | None = None, **settings: Any) -> Any:
    """SparkSession.builder...getOrCreate() with these settings; `settings` are Spark's names with dots as "__".

    semel works with a session made in another way, too: PYSPARK_PYTHON must then be the Python that has semel.
    """
    _choose_python(master)
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(app_name)
    if master is not None:
        builder = builder.master(master)
    for name, value in {**SETTINGS, **(LOCAL_SETTINGS if stays_here(master) else {})}.items():
        builder = builder.config(name, value)
    for name, value in settings.items():
        builder = builder.config(name.replace("__", "."), str(value))
    return builder.getOrCreate()


def _choose_python(master: str | None) -> None:
    """PYSPARK_PYTHON, unless the user has set it: this Python, and on this machine by way of the launcher."""
    if os.environ.get("PYSPARK_PYTHON", str(LAUNCHER)) != str(LAUNCHER):
        return
    os.environ["PYSPARK_PYTHON"] = sys.executable
    if stays_here(master) and os.access(LAUNCHER, os.X_OK):
        os.environ["SEMEL_PYTHON"] = sys.executable
        os.environ["PYSPARK_PYTHON"] = str(LAUNCHER)


def stays_here(master: str | None) -> bool:
    """Whether Spark's tasks run in this program's own JVM, with the pyspark that is installed here."""
    if any(name in os.environ for name in ELSEWHERE):
        return False
    return master is None or master == "local" or master.startswith("local[")
