"""E4: the query's lag is visible to every Kafka tool, as a consumer group, and never ahead of the output."""

from __future__ import annotations

from pathlib import Path

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions
from confluent_kafka.admin import AdminClient

from semel.local.apache_kafka import ApacheKafka
from tests.support.broker import Cluster
from tests.support.reading import settle
from tests.support.spark_driver import Pipeline, SparkSite
from tests.support.waiting import PATIENCE_S


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "cluster", ["semel", pytest.param("apache_kafka", marks=[pytest.mark.kafka, pytest.mark.full])], indirect=True
)
def test_group_shows_what_is_left_to_do_also_after_a_batch_that_failed(
    cluster: Cluster, local_spark: SparkSite, tmp_path: Path
) -> None:
    pipeline = Pipeline(cluster, tmp_path)
    driver = local_spark.driver()
    driver.run(pipeline.job()).succeeded()
    assert lag(pipeline) == 0
    pipeline.fill(60)
    assert lag(pipeline) == 60
    local_spark.faults.arm("task.after_rows", "kill", times=8)  # the fault: no attempt at the next batch succeeds
    driver.run(pipeline.job(sink={"max_attempts": 1})).failed_with("Python worker")
    local_spark.faults.fired("task.after_rows")
    local_spark.faults.disarm()
    assert lag(pipeline) == 60, "offsets moved without their rows"
    driver.run(pipeline.job()).succeeded()
    assert lag(pipeline) == 0
    pipeline.assert_exact()
    if isinstance(cluster.broker, ApacheKafka):
        shown = cluster.broker.tool("ConsumerGroupCommand", "--describe", "--group", pipeline.application_id)
        assert [line.split()[5] for line in shown.splitlines() if pipeline.source in line] == ["0"] * 4, shown


def lag(pipeline: Pipeline) -> int:
    """As a foreign administration client sees it, when what was committed has its markers."""
    settle(pipeline.reading_from)
    admin = AdminClient({"bootstrap.servers": pipeline.reading_from, "log_level": 0})
    asked = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(pipeline.application_id)])
    found = asked[pipeline.application_id].result(PATIENCE_S).topic_partitions
    offsets = {tp.partition: tp.offset for tp in found if tp.topic == pipeline.source}
    return sum(pipeline.ends().values()) - sum(offsets.values())
