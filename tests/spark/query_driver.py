"""A streaming program of the kind that a job names, run by tests as a process of its own that may be killed.

python query_driver.py '{"brokers": "...", "pipeline": "windows", "source": {...}, "sink": {...}, "checkpoint": "..."}'
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import semel


def copy(rows: Any) -> Any:
    return rows.selectExpr("key", "value")


def text(rows: Any) -> Any:
    """For sources that are not Kafka: their first column as the value."""
    return rows.selectExpr(f"cast({rows.columns[0]} AS STRING) AS value")


def windows(rows: Any) -> Any:
    """Counts per window of ten seconds, with a watermark. Values are seconds."""
    from pyspark.sql import functions as f

    times = rows.select(f.timestamp_seconds(rows["value"].cast("string").cast("long")).alias("at"))
    counted = times.withWatermark("at", "10 seconds").groupBy(f.window("at", "10 seconds")).count()
    start = f.unix_timestamp("window.start").cast("string")
    return counted.select(start.alias("key"), f.concat_ws(":", start, "count").alias("value"))


def running(rows: Any) -> Any:
    """A count per key that goes on and on: transformWithState, one value state."""
    from pyspark.sql.streaming import StatefulProcessor

    class Counter(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self._count = handle.getValueState("count", "n LONG")

        def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
            from pyspark.sql import Row

            before = self._count.get()[0] if self._count.exists() else 0
            count = before + sum(1 for _ in rows)
            self._count.update((count,))
            yield Row(key=key[0], value=f"{key[0]}:{count}")

        def close(self) -> None:
            pass

    keyed = rows.selectExpr("concat('k', cast(cast(value AS STRING) AS LONG) % 7) AS key")
    return keyed.groupBy("key").transformWithState(
        statefulProcessor=Counter(),
        outputStructType="key STRING, value STRING",
        outputMode="Update",
        timeMode="None",
    )


def stumbling(rows: Any, flag: str) -> Any:
    """The same rows; but one task fails, once, so that the batch is aborted and runs again."""

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            if not os.path.exists(flag):
                open(flag, "w").close()
                raise RuntimeError("stumbled")
            yield batch

    return rows.select("key", "value").mapInArrow(run, "key BINARY, value BINARY")


PIPELINES: dict[str, Callable[[Any], Any]] = {"copy": copy, "text": text, "windows": windows, "running": running}


def slow_or_broken(table: Any) -> Any:
    """For the fast lane: keeps even numbers, and writes them in another way."""
    import pyarrow as pa

    numbers = [int(value) for value in table.column("value").to_pylist()]
    kept = [n for n in numbers if n % 2 == 0]
    return pa.table({"key": [f"k{n}" for n in kept], "value": [f"{n:06d}".encode() for n in kept]})


def written(job: dict[str, Any], spark: Any) -> tuple[Any, Any]:
    """The writer of the job, and its sink if there is one in this process."""
    source = {"kafka.bootstrap.servers": job["brokers"], **job["source"]}
    if job.get("format", "semel") != "semel":
        source = job["source"]
    if job["pipeline"] == "fast":
        sink = semel.sink(job["brokers"], **job["sink"])
        function = slow_or_broken if job.get("function") else None
        return semel.table_pipeline(spark, source=job["source"], sink=sink, function=function, by_key=True), sink
    sink = semel.sink(job["brokers"], **job["sink"]) if "sink" in job else None
    reader = spark.readStream.format(job.get("format", "semel")).options(**source)
    loaded = reader.schema(job["schema"]).load() if "schema" in job else reader.load()
    rows = PIPELINES[job["pipeline"]](stumbling(loaded, job["stumble"]) if "stumble" in job else loaded)
    if sink is not None:
        return rows.writeStream.foreachBatch(sink), sink
    routed = semel.route(rows, job["brokers"], topic=job["writer"]["topic"])
    return routed.writeStream.format("semel").options(
        **{"kafka.bootstrap.servers": job["brokers"], **job["writer"]}
    ), None


def main(job: dict[str, Any]) -> None:
    spark = semel.spark_session(
        master=job.get("master", "local[2]"), spark__ui__enabled="false", spark__sql__shuffle__partitions="2"
    )
    spark.sparkContext.setLogLevel("OFF")
    writer, sink = written(job, spark)
    query = (
        writer.option("checkpointLocation", job["checkpoint"])
        .outputMode(job.get("mode", "append"))
        .trigger(**job.get("trigger", {"availableNow": True}))
        .start()
    )
    try:
        query.awaitTermination()
    except Exception as error:
        print("failed", str(error).replace("\n", " ")[:3000], flush=True)
        sys.exit(1)
    for report in sink.reports if sink is not None else []:
        print("report", json.dumps(report._asdict()), flush=True)
    print("done", flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
