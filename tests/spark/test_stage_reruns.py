"""A stage that Spark runs again because its shuffle files are gone: rows may go another way the second time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyspark
import pytest

from semel.spark.write_job import CHECKSUMS, FIRST_WITH_CHECKSUMS
from tests.support.broker import Cluster
from tests.support.spark_cluster import delete_shuffle_files
from tests.support.spark_driver import Pipeline, SparkSite

pytestmark = pytest.mark.full
BOTH = ["semel", pytest.param("apache_kafka", marks=pytest.mark.kafka)]
SPARK_VERSION = tuple(int(part) for part in pyspark.__version__.split(".")[:2])
# How Spark compares two runs of a stage; "alone": semel trusts it and does not look itself.
COMPARED = {
    "as usual": {},
    "never": dict.fromkeys(CHECKSUMS, "false"),
    "by Spark alone": dict.fromkeys(CHECKSUMS, "true"),
}
RANDOM = {"step": ["random_keys", {}]}


def run_with_lost_shuffle_files(pipeline: Pipeline, spark: SparkSite, **job: Any) -> tuple[int, str]:
    """Two of four write tasks have read the first run of the stage before; the others find its files deleted.

    Returns how often the batch was tried, and the driver's warnings.
    """
    spark.faults.arm("task.after_rows", "stop", times=2)
    driver = spark.driver()
    number = driver.begin(pipeline.job(source={"maxOffsetsPerTrigger": "1000"}, sink={"shuffle": "always"}, **job))
    stopped = spark.faults.fired("task.after_rows", times=2)
    assert spark.cluster is not None
    assert delete_shuffle_files(spark.cluster) > 0, "there was nothing to delete"
    for pid in stopped:
        spark.go_on(pid)
    outcome = driver.end(number).succeeded()
    assert outcome.stages_again, f"no stage ran again: {driver.warnings}"
    return outcome.attempts, driver.warnings


@pytest.fixture
def pipeline(cluster: Cluster, tmp_path: Path) -> Pipeline:
    return Pipeline(cluster, tmp_path, rows=400)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("cluster", BOTH, indirect=True)
@pytest.mark.parametrize("keys", ["from the rows", "random"])
@pytest.mark.parametrize("compared", COMPARED)
def test_stage_that_runs_again_leaves_no_trace(pipeline: Pipeline, spark: SparkSite, keys: str, compared: str) -> None:
    job: dict[str, Any] = {"conf": COMPARED[compared], **(RANDOM if keys == "random" else {})}
    attempts, warnings = run_with_lost_shuffle_files(pipeline, spark, **job)
    trusts_spark = compared == "by Spark alone" and FIRST_WITH_CHECKSUMS <= SPARK_VERSION
    expected = 1 if keys == "from the rows" and trusts_spark else 2
    assert attempts == expected, f"the batch was tried {attempts} times, not {expected}: {warnings}"
    pipeline.assert_exact()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("cluster", BOTH, indirect=True)
def test_without_any_precaution_two_runs_of_a_stage_are_mixed(pipeline: Pipeline, spark: SparkSite) -> None:
    job: dict[str, Any] = {"conf": COMPARED["never"], "precautions": {"single_runs": False}, **RANDOM}
    attempts, warnings = run_with_lost_shuffle_files(pipeline, spark, **job)
    assert attempts == 1, f"somebody noticed: {warnings}"
    assert pipeline.committed() != pipeline.expected, "rows were expected to be lost and doubled"
