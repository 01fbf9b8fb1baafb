"""A Spark session with what semel needs, and nothing else changed."""

from __future__ import annotations

import os
import sys
from typing import Any

# Only what must be set for exactly-once on Python sources; each can be overridden.
SETTINGS = {
    # State in RocksDB with changelogs: a batch uploads what changed, not the whole state.
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    # A stage that runs again with other rows is noticed (Spark 4.2 and later have it on by default).
    "spark.sql.shuffle.orderIndependentChecksum.enabled": "true",
}


def spark_session(app_name: str = "semel", *, master: str | None = None, **settings: Any) -> Any:
    """SparkSession.builder...getOrCreate() with these settings; `settings` are Spark's names with dots as "__".

    semel works with a session made in another way, too: PYSPARK_PYTHON must then be the Python that has semel.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(app_name)
    if master is not None:
        builder = builder.master(master)
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    for name, value in settings.items():
        builder = builder.config(name.replace("__", "."), str(value))
    return builder.getOrCreate()
