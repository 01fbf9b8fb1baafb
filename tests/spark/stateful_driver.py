"""Several queries in one Spark session, as users write them: joins, deduplication, a source in another cluster.

python -m tests.spark.stateful_driver '{"brokers": "...", "other": "...", "folder": "...", "topics": {...}, ...}'

With `crash_at` each query stops at its n-th batch between the end of its transaction and Spark's own commit; when all
are there, the process is killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import semel
from semel import faults

PER_BATCH = 40
_query = threading.local()


class CrashTogether(faults.Injector):
    """Holds every query at its n-th committed batch until all are there, and then kills the process."""

    def __init__(self, queries: int, nth: int) -> None:
        self._missing, self._nth = queries, nth
        self._hits: Counter[str] = Counter()
        self._lock = threading.Lock()

    def hit(self, point: str) -> None:
        if point != "sink.after_commit":
            return
        with self._lock:
            self._hits[_query.name] += 1
            if self._hits[_query.name] != self._nth:
                return
            self._missing -= 1
            if not self._missing:
                print("fault fired: all are committed", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()


def json_of(spark: Any, job: dict[str, Any], topic: str, columns: str, brokers: str = "brokers") -> Any:
    options = {
        "kafka.bootstrap.servers": job[brokers],
        "subscribe": job["topics"][topic],
        "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": str(PER_BATCH),
    }
    rows = spark.readStream.format("semel").options(**options).load()
    parsed = rows.selectExpr(f"from_json(cast(value AS STRING), '{columns}') AS row").select("row.*")
    return parsed.withColumn("at", parsed["second"].cast("timestamp"))


def orders(spark: Any, job: dict[str, Any]) -> Any:
    return json_of(spark, job, "orders", "id LONG, customer LONG, second LONG")


def stream_static(spark: Any, job: dict[str, Any]) -> Any:
    """Every order with the name of its customer, from a table."""
    customers = spark.createDataFrame([(number, f"name-{number}") for number in range(7)], "customer LONG, name STRING")
    named = orders(spark, job).join(customers, "customer")
    return named.selectExpr("cast(id AS STRING) AS key", "concat_ws(':', id, name) AS value")


def stream_stream(spark: Any, job: dict[str, Any]) -> Any:
    """Every order with its payment, which may come in a later batch; without one when it can come no more."""
    paid = json_of(spark, job, "payments", "order LONG, second LONG").withColumnRenamed("at", "paid_at").drop("second")
    joined = (
        orders(spark, job)
        .withWatermark("at", "10 seconds")
        .join(
            paid.withWatermark("paid_at", "10 seconds"),
            _expression("order = id AND paid_at BETWEEN at AND at + INTERVAL 20 SECONDS"),
            "leftOuter",
        )
    )
    return joined.selectExpr(
        "cast(id AS STRING) AS key", "concat_ws(':', id, if(order IS NULL, 'unpaid', 'paid')) AS value"
    )


def _expression(text: str) -> Any:
    from pyspark.sql import functions

    return functions.expr(text)


def events(spark: Any, job: dict[str, Any]) -> Any:
    return json_of(spark, job, "events", "id LONG, second LONG")


def once(rows: Any) -> Any:
    return rows.selectExpr("cast(id AS STRING) AS key", "cast(id AS STRING) AS value")


def deduplicated(spark: Any, job: dict[str, Any]) -> Any:
    return once(events(spark, job).dropDuplicates(["id"]))


def within_watermark(spark: Any, job: dict[str, Any]) -> Any:
    return once(events(spark, job).withWatermark("at", "1 hour").dropDuplicatesWithinWatermark(["id"]))


def other_cluster(spark: Any, job: dict[str, Any]) -> Any:
    """The orders of another cluster, where the topic has the same name."""
    return once(json_of(spark, job, "orders", "id LONG, customer LONG, second LONG", "other"))


QUERIES: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    query.__name__: query for query in (stream_static, stream_stream, deduplicated, within_watermark, other_cluster)
}


def start(spark: Any, job: dict[str, Any], name: str) -> tuple[Any, Any]:
    sink = semel.sink(
        job["brokers"],
        application_id=job["topics"][name],
        topic=job["topics"][name],
        source_cluster_is_other=name == "other_cluster",
    )

    def write(rows: Any, batch_id: int) -> None:
        _query.name = name
        sink(rows, batch_id)

    writer = QUERIES[name](spark, job).writeStream.foreachBatch(write)
    options = {"checkpointLocation": f"{job['folder']}/{name}"}
    query = writer.options(**options).outputMode("append").trigger(availableNow=True).start()
    while query.isActive and not sink.reports:  # one after the other: Spark gives a Python process 10 s to start
        time.sleep(0.1)
    return query, sink


def main(job: dict[str, Any]) -> None:
    if job["crash_at"]:
        faults.install(CrashTogether(len(QUERIES), job["crash_at"]))
    spark = semel.spark_session(
        master="local[2]", spark__ui__enabled="false", spark__sql__shuffle__partitions="2", app_name="stateful"
    )
    spark.sparkContext.setLogLevel("OFF")
    started = {name: start(spark, job, name) for name in QUERIES}
    for name, (query, sink) in started.items():
        query.awaitTermination()
        print("verdicts", name, json.dumps([report.verdict for report in sink.reports]), flush=True)
    print("done", flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
