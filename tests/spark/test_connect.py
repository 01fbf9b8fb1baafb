"""Spark Connect: what works there, and what says precisely that it does not."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from semel.local.processes import Process
from tests.spark.queries import Query
from tests.spark.test_declarative import needs_pipelines  # noqa: F401 (skips where gRPC is missing)
from tests.support.broker import Cluster

ROWS = 60

PROGRAM = """
import json, os, sys
os.environ["PYSPARK_PYTHON"] = sys.executable
import semel
job = json.loads(sys.argv[1])
from pyspark.sql import SparkSession
spark = SparkSession.builder.remote("local[2]").config("spark.ui.enabled", "false").getOrCreate()
print("session", type(spark).__module__, flush=True)
source = {"kafka.bootstrap.servers": job["brokers"], "subscribe": job["source"], "startingOffsets": "earliest"}
target = {"kafka.bootstrap.servers": job["brokers"], "topic": job["output"]}

def rows(reader):
    return reader.format("semel").options(**source).load().selectExpr("key", "value")

def routed(df):
    return semel.route(df, job["brokers"], topic=job["output"])

def read():
    return rows(spark.read).count()

def write():
    options = {**target, "applicationId": job["app"] + "-batch", "jobId": "once"}
    routed(rows(spark.read)).write.format("semel").options(**options).mode("append").save()

def stream_writer():
    options = {**target, "applicationId": job["app"], "checkpointLocation": job["checkpoint"]}
    query = routed(rows(spark.readStream)).writeStream.format("semel").options(**options)
    query = query.trigger(availableNow=True).start()
    assert query.awaitTermination(120)
    return sum(p.numInputRows for p in query.recentProgress)

def foreach_batch():
    sink = semel.sink(job["brokers"], application_id=job["app"] + "-sink", topic=job["output"])
    rows(spark.readStream).writeStream.foreachBatch(sink).option("checkpointLocation", job["checkpoint"] + "-2").start()

def fast_lane():
    sink = semel.sink(job["brokers"], application_id=job["app"] + "-fast", topic=job["output"])
    pipeline = semel.table_pipeline(spark, source=source, sink=sink)
    pipeline.option("checkpointLocation", job["checkpoint"] + "-3").start()

for attempt in (read, write, stream_writer, foreach_batch, fast_lane):
    try:
        print(attempt.__name__, "worked", attempt(), flush=True)
    except Exception as error:
        print(attempt.__name__, "refused", str(error).replace("\\n", " ")[:1500], flush=True)
spark.stop()
print("done", flush=True)
"""


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("needs_pipelines")
@pytest.mark.parametrize("cluster", ["semel"], indirect=True)
def test_sources_and_writers_work_and_functions_are_refused_with_the_way_out(cluster: Cluster, tmp_path: Path) -> None:
    query = Query(cluster, tmp_path, "copy", ROWS)
    job = {
        "brokers": query.bootstrap,
        "source": query.source,
        "output": query.output,
        "app": query.application_id,
        "checkpoint": str(query.checkpoint),
    }
    process = Process([sys.executable, "-c", PROGRAM, json.dumps(job)])
    try:
        process.wait_for_line("^session pyspark.sql.connect", timeout_s=120)
        process.wait_for_line("^read worked 60", timeout_s=120)
        process.wait_for_line("^write worked", timeout_s=120)
        process.wait_for_line("^stream_writer worked 60", timeout_s=120)
        process.wait_for_line('^foreach_batch refused .*writeStream.format."semel"', timeout_s=120)
        process.wait_for_line('^fast_lane refused .*writeStream.format."semel"', timeout_s=120)
        process.wait_for_line("^done$", timeout_s=60)
    finally:
        process.kill()
    assert query.values() == Counter({str(n): 2 for n in range(ROWS)})  # once by the job, once by the stream
