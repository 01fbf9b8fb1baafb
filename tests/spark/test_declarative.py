"""Spark Declarative Pipelines: a sink of format semel, run by Spark's own command, as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pyspark
import pytest

from tests.spark.queries import Query
from tests.support.broker import KAFKA_IN_FULL, Cluster
from tests.support.missing import skip_loudly

ROWS = 120

SPEC = """
name: booking
storage: file://{folder}/storage
libraries:
  - glob:
      include: flows/**
"""

FLOWS = """
import semel
from pyspark import pipelines as dp
from pyspark.sql import SparkSession

spark = SparkSession.active()
BROKERS = "{brokers}"

dp.create_sink(
    "booked", "semel", {{"kafka.bootstrap.servers": BROKERS, "topic": "{output}", "applicationId": "{application}"}}
)


@dp.append_flow(target="booked", name="book")
def book():
    orders = (
        spark.readStream.format("semel")
        .option("kafka.bootstrap.servers", BROKERS)
        .option("subscribe", "{source}")
        .option("startingOffsets", "earliest")
        .load()
        .selectExpr("key", "value")
    )
    return semel.route(orders, BROKERS, topic="{output}")
"""


def make_project(folder: Path, query: Query) -> Path:
    (folder / "flows").mkdir(parents=True)
    (folder / "spark-pipeline.yml").write_text(SPEC.format(folder=folder))
    flows = FLOWS.format(
        brokers=query.bootstrap, output=query.output, source=query.source, application=query.application_id
    )
    (folder / "flows" / "book.py").write_text(flows)
    return folder


def run(project: Path, timeout_s: int = 240) -> subprocess.CompletedProcess[str]:
    """spark-pipelines run, with the Python that runs this test."""
    command = Path(pyspark.__file__).parent / "bin" / "spark-pipelines"
    env = {name: value for name, value in os.environ.items() if name != "SPARK_HOME"}
    env["PYSPARK_PYTHON"] = env["PYSPARK_DRIVER_PYTHON"] = sys.executable
    env["SPARK_HOME"] = str(Path(pyspark.__file__).parent)
    spec = str(project / "spark-pipeline.yml")
    conf = ["--conf", "spark.ui.enabled=false", "--conf", f"spark.sql.warehouse.dir={project}/warehouse"]
    return subprocess.run(
        [str(command), *conf, "run", "--spec", spec],
        cwd=project,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout_s,
        check=False,
    )


def found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:
        return False


@pytest.fixture
def needs_pipelines() -> None:
    missing = [name for name in ("google.protobuf", "grpc", "yaml") if not found(name)]
    if missing:
        skip_loudly(f"Spark Declarative Pipelines need pyspark[pipelines], which brings {', '.join(missing)}")


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("needs_pipelines")
@pytest.mark.parametrize("cluster", ["semel", KAFKA_IN_FULL], indirect=True)
def test_a_pipeline_with_a_sink_of_format_semel_writes_once_and_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    query = Query(cluster, tmp_path, "copy", ROWS)
    project = make_project(tmp_path / "project", query)
    for rows in (ROWS, ROWS + 30):
        query.fill(rows - query.filled)
        done = run(project)
        assert done.returncode == 0, done.stdout[-4000:]
        assert query.values() == Counter(str(n) for n in range(rows))


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("needs_pipelines")
@pytest.mark.parametrize("cluster", ["semel"], indirect=True)
def test_rows_in_the_wrong_task_stop_the_pipeline_with_the_way_out(cluster: Cluster, tmp_path: Path) -> None:
    query = Query(cluster, tmp_path, "copy", ROWS)
    project = make_project(tmp_path / "project", query)
    flow = project / "flows" / "book.py"
    flow.write_text(flow.read_text().replace(f'semel.route(orders, BROKERS, topic="{query.output}")', "orders"))
    done = run(project)
    assert done.returncode != 0
    assert "semel.route" in done.stdout
    assert query.values() == Counter()
