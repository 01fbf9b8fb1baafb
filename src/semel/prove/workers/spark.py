"""A Spark driver: `python -m semel.prove.workers.spark JSON`. A query as users write it, from topic to topic.

copy        rows keep their keys and their order
any_order   rows without keys that a step may give in any order, and that go to either of two topics
count       a stateful query: how often each key was seen
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

from pyspark.sql import SparkSession

import semel


def main(job: dict[str, Any]) -> int:
    builder = SparkSession.builder.master(job["master"]).config("spark.ui.enabled", "false")
    for name, value in job["conf"].items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    sink = semel.sink(job["brokers"], on_batch=_tell, **job["sink"])
    rows = spark.readStream.format("semel").option("kafka.bootstrap.servers", job["brokers"]).options(**job["source"])
    query = (
        QUERIES[job["query"]](rows.load(), job)
        .writeStream.foreachBatch(sink)
        .outputMode("update" if job["query"] == "count" else "append")
        .option("checkpointLocation", job["checkpoint"])
        .trigger(processingTime=job["trigger"])
        .start()
    )
    print("started", flush=True)
    query.awaitTermination()
    return 0


def _tell(report: Any) -> None:
    if report.rows:
        print(
            f"working: batch {report.batch_id} {report.verdict}, {report.rows} rows, attempt {report.attempts}",
            flush=True,
        )


def copy(rows: Any, job: dict[str, Any]) -> Any:
    return rows.selectExpr("key", "value")


def any_order(rows: Any, job: dict[str, Any]) -> Any:
    topics = job["sink"]["topics"]
    return rows.selectExpr("value").mapInArrow(_scattered(topics), "value BINARY, topic STRING")


def _scattered(topics: list[str]) -> Any:
    """As if each row had been enriched by a service that answers in its own time: another order with every attempt."""

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        import random

        import pyarrow as pa

        luck = random.Random()
        for batch in batches:
            values = batch.column(0).to_pylist()
            luck.shuffle(values)
            chosen = [luck.choice(topics) for _ in values]
            yield pa.RecordBatch.from_arrays(
                [pa.array(values, pa.binary()), pa.array(chosen, pa.string())], names=["value", "topic"]
            )

    return run


def count(rows: Any, job: dict[str, Any]) -> Any:
    counted = rows.selectExpr("cast(key AS string) AS name").groupBy("name").count()
    return counted.selectExpr("name AS key", "cast(count AS string) AS value")


QUERIES = {"copy": copy, "any_order": any_order, "count": count}

if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
