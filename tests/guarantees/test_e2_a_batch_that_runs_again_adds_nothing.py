"""E2: a batch that Spark runs again adds nothing, wherever its driver died and whatever the end's answer was."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from confluent_kafka import Producer

from semel.protocol.messages.transactions import END_TXN
from semel.prove.injection import SINK_POINTS
from semel.prove.proxy import Effect, Proxy, Rule
from tests.support.broker import Cluster
from tests.support.spark_driver import Pipeline, SparkSite
from tests.support.waiting import until

ALWAYS = {("semel", "sink.after_commit")}  # the rest is in `make test-full`
IN_FULL = [
    pytest.param("semel", marks=pytest.mark.full),
    pytest.param("apache_kafka", marks=[pytest.mark.kafka, pytest.mark.full]),
]
SEMEL_ALWAYS = ["semel", pytest.param("apache_kafka", marks=[pytest.mark.kafka, pytest.mark.full])]
KAFKA_ALWAYS = [pytest.param("semel", marks=pytest.mark.full), pytest.param("apache_kafka", marks=pytest.mark.kafka)]


def _marks(name: str, point: str) -> list[pytest.MarkDecorator]:
    kafka = [pytest.mark.kafka] if name == "apache_kafka" else []
    return kafka if (name, point) in ALWAYS else [*kafka, pytest.mark.full]


@pytest.fixture
def pipeline(cluster: Cluster, tmp_path: Path) -> Pipeline:
    return Pipeline(cluster, tmp_path)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("cluster", "point"),
    [
        pytest.param(name, point, marks=_marks(name, point), id=f"{name}-{point}")
        for name in ("semel", "apache_kafka")
        for point in SINK_POINTS
    ],
    indirect=["cluster"],
)
def test_driver_killed_at_a_named_point_leaves_no_trace(pipeline: Pipeline, local_spark: SparkSite, point: str) -> None:
    local_spark.driver().run(pipeline.job()).succeeded()
    pipeline.fill(150)
    crash(pipeline, local_spark, point)
    again = local_spark.driver().run(pipeline.job()).succeeded()
    assert (again.reports[0]["verdict"] == "already written") == (point == "sink.after_commit")
    pipeline.assert_exact()
    assert pipeline.offsets() == pipeline.ends()


def crash(pipeline: Pipeline, local_spark: SparkSite, point: str, **job: object) -> None:
    """Runs the query until its driver is killed at the point."""
    local_spark.faults.arm(point, "kill")
    driver = local_spark.driver()
    driver.begin(pipeline.job(**job))
    local_spark.faults.fired(point)
    driver.close()  # its JVM too


ENDS = {
    "the request is lost": lambda: Rule(END_TXN, Effect.DROP_REQUEST),
    "the answer is lost": lambda: Rule(END_TXN, Effect.DROP_RESPONSE),
    "no answer ever comes": lambda: Rule(END_TXN, Effect.SILENCE_RESPONSE),
}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "lost",
    [
        pytest.param("the request is lost", marks=pytest.mark.full),
        "the answer is lost",
        pytest.param("no answer ever comes", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("cluster", SEMEL_ALWAYS, indirect=True)
def test_end_of_the_transaction_is_not_guessed(
    cluster: Cluster, local_spark: SparkSite, tmp_path: Path, lost: str
) -> None:
    with Proxy(cluster.bootstrap) as proxy:
        pipeline = Pipeline(cluster, tmp_path, bootstrap=proxy.bootstrap)
        fault: Rule = proxy.add(ENDS[lost]())
        client = {"request.timeout.ms": 3000, "default.api.timeout.ms": 10_000}
        local_spark.driver().run(pipeline.job(sink={"client": client})).succeeded()
        fault.assert_fired()
    pipeline.assert_exact()
    assert pipeline.offsets() == pipeline.ends()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("cluster", KAFKA_ALWAYS, indirect=True)
def test_query_stopped_in_the_middle_of_a_batch(pipeline: Pipeline, local_spark: SparkSite) -> None:
    local_spark.faults.arm("task.after_opening", "stop")
    driver = local_spark.driver()
    driver.start(pipeline.job()).succeeded()
    local_spark.faults.fired("task.after_opening")
    stopped = driver.stop()
    assert not [r for r in stopped.reports if r["batch_id"] == 0], "the batch was written, nothing was stopped"
    until(lambda: not pipeline.has_open_transaction(), "the transaction stayed open")
    assert not pipeline.committed()
    driver.run(pipeline.job()).succeeded()
    pipeline.assert_exact()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("cluster", IN_FULL, indirect=True)
def test_crash_in_batch_0_that_starts_at_the_latest_offset(
    cluster: Cluster, local_spark: SparkSite, tmp_path: Path
) -> None:
    pipeline = Pipeline(cluster, tmp_path, rows=0)
    old = Producer({"bootstrap.servers": cluster.bootstrap, "log_level": 0})
    for number in range(40):
        old.produce(pipeline.source, b"old", key=b"%d" % number)
    assert old.flush(30) == 0
    crash(pipeline, local_spark, "sink.before_begin", source={"startingOffsets": "latest"}, available_now=False)
    assert (pipeline.checkpoint / "offsets" / "0").exists(), "the crash was not in batch 0"
    pipeline.fill(50)  # between the crash and the restart: `latest` is another place now
    local_spark.driver().run(pipeline.job(source={"startingOffsets": "latest"})).succeeded()
    pipeline.assert_exact()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("cluster", IN_FULL, indirect=True)
@pytest.mark.parametrize("point", ["sink.after_write", "sink.after_commit"])
def test_limit_per_batch_changed_between_crash_and_restart(
    pipeline: Pipeline, local_spark: SparkSite, point: str
) -> None:
    local_spark.driver().run(pipeline.job()).succeeded()
    pipeline.fill(150)
    crash(pipeline, local_spark, point)
    local_spark.driver().run(pipeline.job(source={"maxOffsetsPerTrigger": "37"})).succeeded()
    pipeline.assert_exact()
    assert pipeline.offsets() == pipeline.ends()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("cluster", SEMEL_ALWAYS, indirect=True)
def test_older_checkpoint_is_refused_with_the_way_out(
    pipeline: Pipeline, local_spark: SparkSite, tmp_path: Path
) -> None:
    driver = local_spark.driver()
    driver.run(pipeline.job()).succeeded()
    shutil.copytree(pipeline.checkpoint, tmp_path / "old")
    pipeline.fill(200)
    driver.run(pipeline.job()).succeeded()
    newest = pipeline.checkpoint.rename(tmp_path / "newest")
    shutil.copytree(tmp_path / "old", pipeline.checkpoint)
    pipeline.fill(100)
    refused = driver.run(pipeline.job(source={"maxOffsetsPerTrigger": "1000"}))
    refused.failed_with("RefusedError", "an older copy", "startingOffsets=committed")
    shutil.rmtree(pipeline.checkpoint)
    newest.rename(pipeline.checkpoint)  # the way out
    driver.run(pipeline.job()).succeeded()
    pipeline.assert_exact()
