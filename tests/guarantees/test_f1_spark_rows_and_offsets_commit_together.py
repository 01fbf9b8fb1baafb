"""F1 on Spark: rows and offsets of a micro-batch are in the database together, wherever a driver or a task died."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import psycopg
import pytest

from semel.local.postgres import PostgresServer
from semel.prove.injection import POSTGRES_SINK_POINTS
from tests.support.broker import Cluster
from tests.support.spark_driver import Pipeline, SparkSite
from tests.support.waiting import until

SEMEL = pytest.mark.parametrize("cluster", ["semel"], indirect=True)
KAFKA = pytest.mark.parametrize(
    "cluster",
    [
        pytest.param("semel", marks=pytest.mark.full),
        pytest.param("apache_kafka", marks=[pytest.mark.kafka, pytest.mark.full]),
    ],
    indirect=True,
)
ALWAYS = "postgres_sink.after_commit"  # the rest is in `make test-full`


class TablePipeline(Pipeline):
    """A query that copies a topic into a table."""

    def __init__(self, cluster: Cluster, folder: Path, dsn: str) -> None:
        super().__init__(cluster, folder)
        self.dsn = dsn
        self.more: dict[str, Any] = {}  # of every job
        with psycopg.connect(dsn) as connection:
            connection.execute("CREATE TABLE out (key text, value text NOT NULL)")

    def table_job(self, **more: Any) -> Any:
        postgres = {"dsn": self.dsn, "application_id": self.application_id, "table": "out", **more.pop("postgres", {})}
        select = ["cast(key AS STRING) AS key", "cast(value AS STRING) AS value"]
        return {**self.job(**more), "postgres": postgres, "select": select, **self.more}

    def rows(self) -> Counter[bytes]:
        with psycopg.connect(self.dsn) as connection:
            return Counter(row[0].encode() for row in connection.execute("SELECT value FROM out"))

    def assert_table(self) -> None:
        found = self.rows()
        assert not self.expected - found, f"lost: {sorted(self.expected - found)[:5]}"
        assert not found - self.expected, f"twice: {sorted(found - self.expected)[:5]}"
        with psycopg.connect(self.dsn) as connection:
            left = connection.execute("SELECT table_name FROM semel.staging").fetchall()
            tables = connection.execute(
                "SELECT count(*) FROM pg_class WHERE relname LIKE 'stage\\_%' AND relkind = 'r'"
            ).fetchone()
        assert left == []
        assert tables == (0,), "staging tables were left behind"


@pytest.fixture
def pipeline(cluster: Cluster, tmp_path: Path, dsn: str) -> TablePipeline:
    return TablePipeline(cluster, tmp_path, dsn)


def crash(pipeline: TablePipeline, local_spark: SparkSite, point: str) -> None:
    """Runs the query until its driver is killed at the point."""
    local_spark.faults.arm(point, "kill")
    driver = local_spark.driver()
    driver.begin(pipeline.table_job())
    local_spark.faults.fired(point)
    driver.close()  # its JVM too


@pytest.mark.timeout(400)
@SEMEL
@pytest.mark.parametrize(
    "point", [p if p == ALWAYS else pytest.param(p, marks=pytest.mark.full) for p in POSTGRES_SINK_POINTS]
)
def test_driver_killed_at_a_named_point_leaves_no_trace(
    pipeline: TablePipeline, local_spark: SparkSite, point: str
) -> None:
    """The last batch but one is written, the driver dies in the next; what follows continues exactly there."""
    local_spark.driver().run(pipeline.table_job()).succeeded()
    pipeline.fill(150)
    crash(pipeline, local_spark, point)
    again = local_spark.driver().run(pipeline.table_job()).succeeded()
    assert (again.reports[0]["verdict"] == "already written") == (point == ALWAYS)
    pipeline.assert_table()


@pytest.mark.timeout(400)
@SEMEL
def test_a_task_that_dies_with_its_rows_staged_and_a_checkpoint_that_is_lost(
    pipeline: TablePipeline, local_spark: SparkSite
) -> None:
    """Spark runs the task again: its rows are staged twice and written once. Then the checkpoint is lost, and the query
    goes on where the database ends."""
    local_spark.faults.arm("postgres_task.after_stage", "kill")
    local_spark.driver().run(pipeline.table_job()).succeeded()
    local_spark.faults.fired("postgres_task.after_stage")
    pipeline.assert_table()
    shutil.rmtree(pipeline.checkpoint)
    pipeline.fill(50)
    earliest = local_spark.driver().run(pipeline.table_job())
    earliest.failed_with("committed_offsets()")
    shutil.rmtree(pipeline.checkpoint)
    local_spark.driver().run(pipeline.table_job(source={"startingOffsets": "committed"})).succeeded()
    pipeline.assert_table()


@pytest.mark.full
@pytest.mark.timeout(400)
@SEMEL
@pytest.mark.parametrize("point", ["postgres_sink.after_write", "postgres_sink.after_move", ALWAYS])
def test_in_the_fast_lane_neither_a_task_nor_a_driver_that_dies_leaves_a_trace(
    pipeline: TablePipeline, local_spark: SparkSite, point: str
) -> None:
    pipeline.more = {"fast_lane": "texts"}
    local_spark.faults.arm("postgres_task.after_stage", "kill")
    local_spark.driver().run(pipeline.table_job()).succeeded()
    local_spark.faults.fired("postgres_task.after_stage")
    pipeline.assert_table()
    pipeline.fill(150)
    crash(pipeline, local_spark, point)
    again = local_spark.driver().run(pipeline.table_job()).succeeded()
    assert (again.reports[0]["verdict"] == "already written") == (point == ALWAYS)
    pipeline.assert_table()


@pytest.mark.timeout(400)
@KAFKA
def test_a_frozen_driver_is_fenced_by_the_next(pipeline: TablePipeline, local_spark: SparkSite) -> None:
    local_spark.driver().run(pipeline.table_job()).succeeded()
    pipeline.fill(150)
    local_spark.faults.arm("postgres_sink.after_write", "stop")
    driver = local_spark.driver()
    waiting = driver.begin(pipeline.table_job())
    [pid] = local_spark.faults.fired("postgres_sink.after_write")
    with local_spark.second_driver() as second:
        second.run(pipeline.table_job()).succeeded()
        pipeline.assert_table()
        local_spark.go_on(pid)
        driver.end(waiting).failed_with("was taken over by another driver")
    pipeline.assert_table()


@pytest.mark.timeout(400)
@pytest.mark.full
@SEMEL
@pytest.mark.parametrize("death", ["kill", "immediate"])
def test_the_database_server_dies_under_a_running_query(
    cluster: Cluster, local_spark: SparkSite, tmp_path: Path, mortal_postgres: PostgresServer, death: str
) -> None:
    pipeline = TablePipeline(cluster, tmp_path, mortal_postgres.create_database())
    pipeline.fill(600)
    driver = local_spark.driver()
    waiting = driver.begin(pipeline.table_job())
    for _ in range(3):
        seen = sum(pipeline.rows().values())
        until(lambda seen=seen: sum(pipeline.rows().values()) > seen, "the query stands still")
        if death == "kill":
            mortal_postgres.kill()
        else:
            mortal_postgres.stop("immediate")
        mortal_postgres.start()
        if sum(pipeline.rows().values()) > 700:
            break
    driver.end(waiting).succeeded()
    pipeline.assert_table()
