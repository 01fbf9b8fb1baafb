"""A Spark program as users write it, run by tests as a process of its own: copies one topic to another, exactly once.

python driver.py '{"brokers": "...", "source": "in", "sink": {...}, "checkpoint": "..."}'
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["PYSPARK_PYTHON"] = sys.executable

from pyspark.sql import SparkSession

import semel


def main(job: dict[str, Any]) -> None:
    builder = SparkSession.builder.master(job.get("master", "local[2]")).config("spark.ui.enabled", "false")
    for name, value in job.get("conf", {}).items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    sink = semel.sink(job["brokers"], **job["sink"])
    rows = (
        spark.readStream.format("semel").options(**{"kafka.bootstrap.servers": job["brokers"], **job["source"]}).load()
    )
    query = (
        rows.selectExpr(*job.get("select", ["key", "value"]))
        .writeStream.foreachBatch(sink)
        .option("checkpointLocation", job["checkpoint"])
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    for report in sink.reports:
        print("report", json.dumps(report._asdict()), flush=True)
    print("done", flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
