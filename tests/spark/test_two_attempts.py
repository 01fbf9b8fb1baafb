"""Two attempts at one task under one transaction: what the opening handshake and the count audit are for.

Each case runs twice: with the precaution switched off, to show that it corrupts the output, and with it on. Speculation
is on, and the two workers are two machines to Spark, so copies really start.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.broker import Cluster
from tests.support.reading import create_topic
from tests.support.spark_driver import PARTITIONS, Outcome, Pipeline, SparkDriver, SparkSite
from tests.support.waiting import until

SPECULATION = {
    "spark__speculation": "true",
    "spark__speculation__interval": "100ms",
    "spark__speculation__task__duration__threshold": "1s",
}
LARGE_TOPIC = {"max_message_bytes": "8000000"}
WRITE_AT_ONCE = 17_000_000  # a task writes when it has collected so many bytes, or has seen all its rows


class Size(NamedTuple):
    """Rows whose halves are each written at once, in at most five batches (more the broker does not remember)."""

    rows: int
    size_bytes: int


SIZES = {"small": Size(420_000, 100), "one to a batch": Size(10, 4_300_000)}
CLIENT = {"batch.size": 4_500_000, "buffer.memory": 5_000_000}  # a batch is sent when the one before is in the log
ROWS_AT_ONCE = "spark.sql.execution.arrow.maxRecordsPerBatch"  # between Spark and a Python worker


@pytest.fixture
def driver(spark: SparkSite) -> SparkDriver:
    return spark.driver(**SPECULATION)


def one_task(cluster: Cluster, folder: Path) -> Pipeline:
    """A batch of one row is read by one task."""
    pipeline = Pipeline(cluster, folder, rows=1)
    pipeline.output = create_topic(cluster.bootstrap, f"{pipeline.output}-large", PARTITIONS, **LARGE_TOPIC)
    return pipeline


def numbers(found: Counter[bytes]) -> Counter[int]:
    return Counter({int(value[:9]): times for value, times in found.items()})


def speculative_job(pipeline: Pipeline, folder: Path, size: Size, patience_s: float, **more: Any) -> Any:
    folder.mkdir()
    arguments = {"folder": str(folder), "rows": size.rows, "size_bytes": size.size_bytes, "patience_s": patience_s}
    sink = {"max_request_size": 7_000_000, "client": CLIENT}
    conf = {ROWS_AT_ONCE: "10000" if size.size_bytes < 1000 else "1"}
    return pipeline.job(step=["two_attempts", arguments], select=["value"], sink=sink, conf=conf, **more)


def run_two_attempts(driver: SparkDriver, pipeline: Pipeline, folder: Path, size: Size, job: Any) -> Outcome:
    """To its end. The copy may write when some of the first attempt's rows are in the log."""
    number = driver.begin(job)
    until(lambda: pipeline.uncommitted() >= size.rows // 4, "the first attempt's rows were not written", timeout_s=120)
    (folder / "written").touch()
    outcome = driver.end(number).succeeded()
    assert (folder / "begun-0-1").exists(), "Spark has started no copy of the task"
    return outcome


KINDS = [
    pytest.param("semel", "small", id="semel-small"),
    pytest.param("semel", "one to a batch", id="semel-one to a batch", marks=pytest.mark.full),
    pytest.param("apache_kafka", "small", id="kafka-small", marks=[pytest.mark.kafka, pytest.mark.full]),
    pytest.param(
        "apache_kafka", "one to a batch", id="kafka-one to a batch", marks=[pytest.mark.kafka, pytest.mark.full]
    ),
]


@pytest.mark.full  # shows what the handshake is for: one minute
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("cluster", "kind"), KINDS, indirect=["cluster"])
def test_without_the_handshake_two_attempts_are_merged_into_a_mix(
    cluster: Cluster, driver: SparkDriver, tmp_path: Path, kind: str
) -> None:
    pipeline = one_task(cluster, tmp_path)
    size = SIZES[kind]
    assert size.rows // 2 * size.size_bytes >= WRITE_AT_ONCE
    off = {"handshake": False}
    job = speculative_job(pipeline, tmp_path / "attempts", size, patience_s=60, precautions=off)
    run_two_attempts(driver, pipeline, tmp_path / "attempts", size, job)  # nobody notices
    found = numbers(pipeline.committed())
    assert sum(found.values()) == size.rows, "the count alone is right"
    assert found != Counter(range(size.rows)), "the two attempts were expected to be mixed"


@pytest.mark.full  # tests/kafka/test_transaction_handle shows the same without Spark
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("cluster", "kind"), KINDS, indirect=["cluster"])
def test_with_the_handshake_one_attempt_is_written(
    cluster: Cluster, driver: SparkDriver, tmp_path: Path, kind: str
) -> None:
    pipeline = one_task(cluster, tmp_path)
    size = SIZES[kind]
    job = speculative_job(pipeline, tmp_path / "attempts", size, patience_s=6)
    outcome = run_two_attempts(driver, pipeline, tmp_path / "attempts", size, job)
    assert outcome.attempts == 1, "the copy that was refused disturbed the one that writes"
    assert numbers(pipeline.committed()) == Counter(range(size.rows))


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "cluster", ["semel", pytest.param("apache_kafka", marks=[pytest.mark.kafka, pytest.mark.full])], indirect=True
)
@pytest.mark.parametrize(
    "audited", [pytest.param(False, id="not audited", marks=pytest.mark.full), pytest.param(True, id="audited")]
)
def test_rows_of_a_dead_attempt_where_the_winner_has_none(
    cluster: Cluster, spark: SparkSite, tmp_path: Path, audited: bool
) -> None:
    rows = 40
    pipeline = one_task(cluster, tmp_path)
    left = create_topic(cluster.bootstrap, cluster.unique("spark-left"), PARTITIONS)
    (tmp_path / "attempts").mkdir()
    arguments = {"folder": str(tmp_path / "attempts"), "rows": rows, "size_bytes": 600_000}
    spark.faults.arm("task.after_opening", "pass")
    written = str(spark.faults.folder / "task.after_opening@1.fired")
    step = ["changing_topic", {**arguments, "topics": [left, pipeline.output], "written": written}]
    job = pipeline.job(
        step=step,
        select=["value", "topic"],
        sink={"topics": [left]},
        precautions={"count_audit": audited},
        conf={ROWS_AT_ONCE: "1"},
    )
    outcome = spark.driver().run(job).succeeded()
    spark.faults.fired("task.after_opening")
    assert (tmp_path / "attempts" / "died").exists(), "no attempt died"
    assert numbers(pipeline.committed()) == Counter(range(rows))
    trace = pipeline.committed(left)
    assert bool(trace) == (not audited), "rows of the dead attempt"
    assert outcome.attempts == (2 if audited else 1)
