"""E6: a batch job writes atomically; running the same job id twice writes once."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from semel.local.processes import Process
from semel.protocol.partitioning import partition_for_key
from tests.support.broker import Cluster
from tests.support.direct import DirectClient
from tests.support.reading import read_values

PROGRAM = """
import json, sys
import semel
job = json.loads(sys.argv[1])
spark = semel.spark_session(master="local[3]", spark__ui__enabled="false")
spark.sparkContext.setLogLevel("ERROR")
rows = spark.range(0, 300, 1, 3).selectExpr("cast(id as string) AS key", "concat('v', id) AS value")
for attempt in job["attempts"]:
    df = rows
    if attempt["route"]:
        df = semel.route(df, job["brokers"], topic=job["topic"])
    if attempt.get("fail"):
        df = df.selectExpr("key", "if(key = '17', raise_error('boom'), value) AS value", "partition")
    writer = df.write.format("semel").mode("append").option("kafka.bootstrap.servers", job["brokers"])
    writer = writer.option("topic", job["topic"]).option("applicationId", job["app"]).option("jobId", attempt["id"])
    try:
        writer.save()
        print("saved", flush=True)
    except Exception as error:
        text = str(error)
        known = [word for word in ("nothing was written now", "semel.route", "boom") if word in text]
        print("refused", *known, flush=True)
print("done", flush=True)
"""


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "cluster",
    ["semel", pytest.param("apache_kafka", marks=[pytest.mark.kafka, pytest.mark.full])],
    indirect=True,
)
def test_a_job_is_written_whole_and_once(cluster: Cluster, tmp_path: Path) -> None:
    topic, app = cluster.unique("batch-out"), cluster.unique("batch-app")
    with DirectClient(cluster.bootstrap) as client:
        client.create_topic(topic, 3)
    attempts = [
        {"id": "broken", "route": True, "fail": True},  # the fault: a task fails in the middle
        {"id": "scattered", "route": False},  # rows of one partition in three tasks
        {"id": "nightly", "route": True},
        {"id": "nightly", "route": True},  # the same job again
    ]
    job = {"brokers": cluster.bootstrap, "topic": topic, "app": app, "attempts": attempts}
    process = Process([sys.executable, "-c", PROGRAM, json.dumps(job)])
    try:
        process.wait_for_line("^done$", timeout_s=300)
        outcomes = [line for line in process.output.splitlines() if line.split(" ")[0] in ("saved", "refused")]
    finally:
        process.kill()
    assert outcomes == ["refused boom", "refused semel.route", "saved", "refused nothing was written now"]
    found = read_values(cluster.bootstrap, topic)
    assert sorted(value or b"" for _, _, value in found) == sorted(b"v%d" % n for n in range(300))
    assert all(partition == partition_for_key((value or b"")[1:], 3) for partition, _, value in found)
