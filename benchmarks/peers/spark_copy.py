"""A Spark program from topics to topics (see `spark_jobs.py`), made to run in a process of its own: one warm session,
one job after the other.

    python spark_copy.py KIND '{"jars": [...], "cores": 2}'        KIND: spark, semel, json or fast

It reads jobs from stdin, one JSON object a line, and answers each with one line of JSON. It runs in the peers' virtual
environment as well, so that nothing but PySpark is imported at the top.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import datetime
from typing import Any

from spark_jobs import JOBS, Output, json_schema  # type: ignore[import-not-found]  # beside this file, which is run as a program

SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.memory": "2g",
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.streaming.numRecentProgressUpdates": "1000",
}


def session(kind: str, settings: dict[str, Any]) -> Any:
    """The same for every kind, except the jars; semel's is made as its users make it."""
    chosen = {**SETTINGS, **settings.get("conf", {})}
    master = f"local[{settings['cores']}]"
    if kind == "spark":
        from pyspark.sql import SparkSession

        os.environ["PYSPARK_PYTHON"] = sys.executable
        builder = SparkSession.builder.master(master).config("spark.jars", ",".join(settings["jars"]))
        for name, value in chosen.items():
            builder = builder.config(name, value)
        spark = builder.getOrCreate()
    else:
        import semel

        spark = semel.spark_session(master=master, **{name.replace(".", "__"): value for name, value in chosen.items()})
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def source_options(job: dict[str, Any]) -> dict[str, str]:
    options = {
        "kafka.bootstrap.servers": job["brokers"],
        "subscribe": job["source"],
        "startingOffsets": job["starting"],
        "maxOffsetsPerTrigger": str(job["per_batch"]),
        "kafka.isolation.level": "read_committed",
    }
    return options | ({"includeHeaders": "true"} if _is_copy(job) else {})


def _is_copy(job: dict[str, Any]) -> bool:
    return bool(job.get("work", "copy") == "copy")


def _output(rows: Any, job: dict[str, Any]) -> Output:
    return JOBS[job.get("work", "copy")](rows, job)


def spark_own(spark: Any, job: dict[str, Any]) -> tuple[Any, Any]:
    """Spark's own source and sink: at-least-once."""
    rows = spark.readStream.format("kafka").options(**source_options(job)).load()
    output = _output(rows, job)
    writer = output.rows.writeStream.format("kafka").outputMode(output.mode)
    if "targets" not in job:
        writer = writer.option("topic", job["target"])
    return writer.option("kafka.bootstrap.servers", job["brokers"]), None


def semel_frame(spark: Any, job: dict[str, Any], **more: str) -> tuple[Any, Any]:
    """semel's source and sink, exactly once, rows to the partition of their key. The option `columns` names what is
    read: Spark does not hand that to a Python source."""
    import semel

    where = {"topics": job["targets"]} if "targets" in job else {"topic": job["target"]}
    sink = semel.sink(job["brokers"], application_id=job["id"], **where, **job.get("sink", {}))
    source = {**source_options(job), "columns": "key,value,headers" if _is_copy(job) else "key,value", **more}
    rows = spark.readStream.format("semel").options(**source).load()
    output = _output(rows, job)
    return output.rows.writeStream.outputMode(output.mode).foreachBatch(sink), sink


def semel_json(spark: Any, job: dict[str, Any]) -> tuple[Any, Any]:
    """The same, with JSON that the source has read."""
    return semel_frame(
        spark, job, jsonSchema=json_schema(job["work"]), columns="key,value,json" if "targets" in job else "json"
    )


def semel_fast(spark: Any, job: dict[str, Any]) -> tuple[Any, Any]:
    """semel's fast lane, exactly once."""
    import semel

    sink: Any = semel.sink(job["brokers"], application_id=job["id"], topic=job["target"])
    source = {name: value for name, value in source_options(job).items() if name != "includeHeaders"}
    return semel.table_pipeline(spark, source=source, sink=sink), sink


KINDS = {"spark": spark_own, "semel": semel_frame, "json": semel_json, "fast": semel_fast}


def run(spark: Any, kind: str, job: dict[str, Any]) -> dict[str, Any]:
    """One query from its making to its end, by the clock on the wall; with a trigger, until the next line comes."""
    started_s = time.perf_counter()
    writer, sink = KINDS[kind](spark, job)
    made_s = time.perf_counter()
    prepared = writer.option("checkpointLocation", job["checkpoint"])
    if "trigger_ms" in job:
        query = prepared.trigger(processingTime=f"{job['trigger_ms']} milliseconds").start()
        print(json.dumps({"started": True}), flush=True)
        sys.stdin.readline()  # "stop"
        query.stop()
    else:
        query = prepared.trigger(availableNow=True).start()
        query.awaitTermination()
    took_s, ended_s = time.perf_counter() - started_s, time.time()
    progress = [dict(json.loads(p.json) if hasattr(p, "json") else p) for p in query.recentProgress]
    if sink is not None:
        sink.close()
    return {
        "seconds": took_s,
        "making_seconds": made_s - started_s,
        "running_seconds": ended_s - datetime.fromisoformat(progress[0]["timestamp"]).timestamp(),
        "rows": sum(p["numInputRows"] for p in progress),
        "batches": [p["durationMs"] for p in progress],
        "reports": [] if sink is None else [report._asdict() for report in sink.reports],
    }


def main(kind: str, settings: dict[str, Any]) -> None:
    spark = session(kind, settings)
    print(json.dumps({"ready": spark.version}), flush=True)
    for line in iter(sys.stdin.readline, ""):
        try:
            answer = run(spark, kind, json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
