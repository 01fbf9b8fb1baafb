"""E3: a task that fails, is retried or speculates, an executor or driver that dies or freezes, leaves no trace in
committed output."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from confluent_kafka import Producer

from tests.support.broker import Cluster
from tests.support.reading import create_topic
from tests.support.spark_cluster import executor_of, frozen_host_of, kill_tree, state_of
from tests.support.spark_driver import Pipeline, SparkSite
from tests.support.waiting import until

KAFKA = pytest.mark.kafka
FULL = pytest.mark.full
SEMEL_ALWAYS = ["semel", pytest.param("apache_kafka", marks=[KAFKA, FULL])]
KAFKA_ALWAYS = [pytest.param("semel", marks=FULL), pytest.param("apache_kafka", marks=KAFKA)]
GIVING_UP_S = 8


@pytest.fixture
def pipeline(cluster: Cluster, tmp_path: Path) -> Pipeline:
    return Pipeline(cluster, tmp_path)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("cluster", SEMEL_ALWAYS, indirect=True)
@pytest.mark.parametrize("point", ["task.after_opening", pytest.param("task.after_rows", marks=FULL)])
def test_python_worker_killed_while_it_writes(pipeline: Pipeline, spark: SparkSite, point: str) -> None:
    spark.faults.arm(point, "kill")
    outcome = spark.driver().run(pipeline.job()).succeeded()
    spark.faults.fired(point)
    assert outcome.attempts == 2, "the batch had to be aborted and written again"
    pipeline.assert_exact()


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("point", ["task.after_opening", "task.after_rows"])
def test_python_worker_killed_while_it_writes_what_it_has_read(
    cluster: Cluster, spark: SparkSite, tmp_path: Path, point: str
) -> None:
    pipeline = Pipeline(cluster, tmp_path, partitioner="murmur2")  # keys are where the sink would put them: no shuffle
    spark.faults.arm(point, "kill")
    outcome = spark.driver().run(pipeline.job()).succeeded()
    spark.faults.fired(point)
    assert outcome.attempts == 2, "the batch had to be aborted and written again"
    assert outcome.stages[:2] == [1, 2], "the first attempt was not without a shuffle, or the second not with one"
    pipeline.assert_exact()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("cluster", KAFKA_ALWAYS, indirect=True)
@pytest.mark.parametrize("point", [pytest.param("task.after_opening", marks=FULL), "task.after_rows"])
def test_executor_killed_while_its_task_writes(pipeline: Pipeline, spark: SparkSite, point: str) -> None:
    spark.faults.arm(point, "stop")
    driver = spark.driver()
    number = driver.begin(pipeline.job())
    (worker,) = spark.faults.fired(point)
    executor = executor_of(worker)
    kill_tree(executor)
    outcome = driver.end(number).succeeded()
    assert outcome.attempts == 2, "the batch had to be aborted and written again"
    pipeline.assert_exact()


@pytest.mark.full
@pytest.mark.timeout(400)
def test_executor_that_was_given_up_but_lives_writes_nothing(pipeline: Pipeline, spark: SparkSite) -> None:
    settings = {
        "spark__network__timeout": f"{GIVING_UP_S}s",
        "spark__network__timeoutInterval": "1s",
        "spark__executor__heartbeatInterval": "1s",
    }
    spark.faults.arm("task.after_opening", "stop")
    driver = spark.driver(**settings)
    number = driver.begin(pipeline.job())
    (worker,) = spark.faults.fired("task.after_opening")
    executor = executor_of(worker)
    assert spark.cluster is not None
    with frozen_host_of(spark.cluster, executor):  # nobody there can kill the executor when it is given up
        os.kill(executor, signal.SIGSTOP)  # the driver hears nothing of it any more
        outcome = driver.end(number).succeeded()
        assert state_of(executor) == state_of(worker) == "T", "the executor was not frozen, but ended"
        assert outcome.attempts == 2
        before = pipeline.committed()
        for pid in (executor, worker):
            os.kill(pid, signal.SIGCONT)  # it wakes up with the rest of its rows in hand
        until(lambda: state_of(worker) in ("", "Z"), "the worker that was given up did not end")
    assert pipeline.committed() == before
    pipeline.assert_exact()
    driver.close()


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("cluster", ["semel"], indirect=True)
def test_executor_that_was_given_up_writes_nothing_where_the_winner_has_no_rows(
    cluster: Cluster, spark: SparkSite, tmp_path: Path
) -> None:
    """It wakes up after the counts were compared, when neither a handshake nor an audit could notice its rows."""
    pipeline = Pipeline(cluster, tmp_path, rows=0)
    left = create_topic(cluster.bootstrap, cluster.unique("spark-left"), 1)
    producer = Producer({"bootstrap.servers": cluster.bootstrap, "log_level": 0})
    for number in range(20):
        producer.produce(pipeline.source, b"%d" % number, partition=0)  # one task has them all
        pipeline.expected[b"%d" % number] += 1
    assert producer.flush(30) == 0
    settings = {
        "spark__network__timeout": f"{GIVING_UP_S}s",
        "spark__network__timeoutInterval": "1s",
        "spark__executor__heartbeatInterval": "1s",
    }
    spark.faults.arm("sink.after_audit", "stop")
    driver = spark.driver(**settings)
    step = ["late_topic", {"folder": str(tmp_path), "topics": [left, pipeline.output]}]
    number = driver.begin(pipeline.job(step=step, select=["value", "topic"], sink={"topics": [left]}))
    until((tmp_path / "begun").exists, "the first attempt did not begin", 120)
    worker = int((tmp_path / "begun").read_text())
    executor = executor_of(worker)
    assert spark.cluster is not None
    with frozen_host_of(spark.cluster, executor):
        os.kill(executor, signal.SIGSTOP)
        (stopped,) = spark.faults.fired("sink.after_audit")
        (tmp_path / "go").touch()
        os.kill(executor, signal.SIGCONT)  # it has rows for a partition that is not open
        until(lambda: state_of(worker) in ("", "Z"), "the worker that was given up did not end", 120)
        spark.go_on(stopped)
        outcome = driver.end(number).succeeded()
    assert outcome.attempts == 2
    assert "were lost while the batch was written" in driver.warnings
    assert not pipeline.committed(left)
    pipeline.assert_exact()
    driver.close()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("cluster", KAFKA_ALWAYS, indirect=True)
@pytest.mark.parametrize(
    "point",
    [
        pytest.param("sink.after_begin", marks=FULL),
        pytest.param("sink.after_write", marks=FULL),
        "sink.after_offsets",
        pytest.param("sink.after_commit", marks=FULL),
    ],
)
def test_frozen_driver_is_refused_after_a_second_took_over(
    pipeline: Pipeline, local_spark: SparkSite, point: str
) -> None:
    local_spark.faults.arm(point, "stop")
    first = local_spark.driver()
    number = first.begin(pipeline.job())
    local_spark.faults.fired(point)
    first.process.pause()  # its JVM too
    with local_spark.second_driver() as second:
        second.run(pipeline.job()).succeeded()
        pipeline.assert_exact()
        first.process.resume()
        if point == "sink.after_commit":  # nothing is left to write; Spark sees that its log was written by another
            first.end(number).failed_with("CONCURRENT_STREAM_LOG_UPDATE")
        else:
            refused = first.end(number)
            refused.failed_with("FencedSinkError", pipeline.application_id, "taken over by another driver")
        pipeline.fill(100)
        second.run(pipeline.job()).succeeded()  # the second is not disturbed
    pipeline.assert_exact()


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("cluster", SEMEL_ALWAYS, indirect=True)
def test_transaction_that_times_out_in_the_middle_of_a_batch(pipeline: Pipeline, spark: SparkSite) -> None:
    spark.faults.arm("task.after_opening", "stop")
    driver = spark.driver()
    number = driver.begin(pipeline.job(sink={"transaction_timeout_ms": 2000}))
    (worker,) = spark.faults.fired("task.after_opening")
    assert pipeline.has_open_transaction()
    until(lambda: not pipeline.has_open_transaction(), "the coordinator did not abort the transaction")
    os.kill(worker, signal.SIGCONT)
    driver.end(number).failed_with("TimedOutTransactionError", "transaction_timeout_ms", "maxOffsetsPerTrigger")
    assert not pipeline.committed()
    driver.run(pipeline.job()).succeeded()  # with more time
    pipeline.assert_exact()
