"""A stage that Spark runs again because its shuffle files are gone: rows may go another way the second time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from semel.spark.reruns import CHECKSUMS
from tests.support.broker import Cluster
from tests.support.spark_driver import Pipeline, SparkSite

pytestmark = pytest.mark.full
BOTH = ["semel", pytest.param("apache_kafka", marks=pytest.mark.kafka)]
SPARKS_OWN = {"true": {}, "false": dict.fromkeys(CHECKSUMS, "false")}  # as the session has it, or all of it off
RANDOM = {"step": ["random_keys", {}]}


def run_with_lost_shuffle_files(pipeline: Pipeline, spark: SparkSite, **job: Any) -> tuple[int, str]:
    """Two of four write tasks have read the first run of the stage before; the others find its files deleted.

    Returns how often the batch was tried, and the driver's warnings.
    """
    spark.faults.arm("task.after_rows", "stop", times=2)
    driver = spark.driver()
    number = driver.begin(pipeline.job(source={"maxOffsetsPerTrigger": "1000"}, **job))
    stopped = spark.faults.fired("task.after_rows", times=2)
    assert spark.cluster is not None
    assert spark.cluster.delete_shuffle_files() > 0, "there was nothing to delete"
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
@pytest.mark.parametrize("checksums", ["true", "false"])
def test_stage_that_runs_again_leaves_no_trace(pipeline: Pipeline, spark: SparkSite, keys: str, checksums: str) -> None:
    job: dict[str, Any] = {"conf": SPARKS_OWN[checksums], **(RANDOM if keys == "random" else {})}
    attempts, warnings = run_with_lost_shuffle_files(pipeline, spark, **job)
    assert attempts == 2, f"the batch was not aborted and written again, once: {warnings}"
    pipeline.assert_exact()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("cluster", BOTH, indirect=True)
def test_without_any_precaution_two_runs_of_a_stage_are_mixed(pipeline: Pipeline, spark: SparkSite) -> None:
    job: dict[str, Any] = {"conf": SPARKS_OWN["false"], "precautions": {"single_runs": False}, **RANDOM}
    attempts, warnings = run_with_lost_shuffle_files(pipeline, spark, **job)
    assert attempts == 1, f"somebody noticed: {warnings}"
    assert pipeline.committed() != pipeline.expected, "rows were expected to be lost and doubled"
