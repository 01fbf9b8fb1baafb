"""E5: the checkpoint can be lost: the query resumes from the committed offsets, without a gap and without doubles."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.broker import Cluster
from tests.support.spark_driver import Pipeline, SparkSite

COMMITTED = {"startingOffsets": "committed"}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("cluster", "point"),
    [
        ("semel", "sink.after_write"),
        pytest.param("semel", "sink.after_commit", marks=pytest.mark.full),
        pytest.param("apache_kafka", "sink.after_write", marks=[pytest.mark.kafka, pytest.mark.full]),
        pytest.param("apache_kafka", "sink.after_commit", marks=[pytest.mark.kafka, pytest.mark.full]),
    ],
    indirect=["cluster"],
)
def test_lost_checkpoint_resumes_from_the_ledger(
    cluster: Cluster, local_spark: SparkSite, tmp_path: Path, point: str
) -> None:
    pipeline = Pipeline(cluster, tmp_path)
    local_spark.driver().run(pipeline.job(source=COMMITTED)).succeeded()  # an empty ledger: from the beginning
    shutil.rmtree(pipeline.checkpoint)
    pipeline.fill(150)
    local_spark.driver().run(pipeline.job(source=COMMITTED)).succeeded()
    pipeline.assert_exact()
    pipeline.fill(150)
    local_spark.faults.arm(point, "kill")
    driver = local_spark.driver()
    driver.begin(pipeline.job(source=COMMITTED))
    local_spark.faults.fired(point)
    driver.close()
    assert pipeline.has_open_transaction() == (point == "sink.after_write"), "what the dead driver left"
    shutil.rmtree(pipeline.checkpoint)
    local_spark.driver().run(pipeline.job(source=COMMITTED)).succeeded()
    pipeline.assert_exact()
    assert pipeline.offsets() == pipeline.ends()
