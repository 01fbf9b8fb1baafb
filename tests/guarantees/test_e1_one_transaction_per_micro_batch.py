"""E1: one transaction per micro-batch covers all tasks, all topics and the source offsets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from semel.local.apache_kafka import ApacheKafka
from semel.local.brokers import SemelBroker
from semel.protocol.partitioning import partition_for_key
from tests.support.broker import Cluster
from tests.support.reading import create_topic, read_values
from tests.support.spark_cluster import state_of
from tests.support.spark_driver import PARTITIONS, Pipeline, SparkSite

BY_PARITY = "if(cast(cast(value as string) as int) % 2 = 0, '{even}', '{odd}') AS topic"


@pytest.mark.full
@pytest.mark.timeout(400)
def test_rows_of_all_topics_and_the_offsets_become_visible_together(
    cluster: Cluster, spark: SparkSite, tmp_path: Path
) -> None:
    pipeline = Pipeline(cluster, tmp_path)
    odd = create_topic(cluster.bootstrap, cluster.unique("spark-odd"), PARTITIONS)
    select = ["key", "value", BY_PARITY.format(even=pipeline.output, odd=odd)]
    job = pipeline.job(source={"maxOffsetsPerTrigger": "1000"}, sink={"topics": [odd]}, select=select)
    spark.faults.arm("sink.after_offsets", "stop")  # the fault: the driver stands still just before the end
    driver = spark.driver()
    number = driver.begin(job)
    (standing,) = spark.faults.fired("sink.after_offsets")
    everything = pipeline.expected
    for topic, parity in ((pipeline.output, 0), (odd, 1)):
        written = read_values(cluster.bootstrap, topic, "read_uncommitted")
        assert Counter(v or b"" for _, _, v in written) == Counter(v for v in everything if int(v) % 2 == parity)
        assert pipeline.has_open_transaction(topic), "the transaction is over"
        assert not pipeline.committed(topic), "a reader of committed records saw rows of an open transaction"
        assert state_of(standing) == "T", "the driver went on"
    assert set(pipeline.offsets().values()) == {-1001}, "offsets were there before the rows"
    driver.process.resume()
    driver.end(number).succeeded()
    assert pipeline.committed() + pipeline.committed(odd) == everything
    assert pipeline.offsets() == pipeline.ends()
    for partition, _, value in read_values(cluster.bootstrap, odd):
        assert partition == partition_for_key(b"key-%d" % int(value or b""), PARTITIONS)


@pytest.fixture(params=["semel", pytest.param("apache_kafka", marks=[pytest.mark.kafka, pytest.mark.full])])
def mortal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    """A broker of this test's own, to be killed."""
    if request.param == "apache_kafka":
        request.getfixturevalue("kafka_installation")
    kind = SemelBroker if request.param == "semel" else ApacheKafka
    with kind(tmp_path / "mortal") as broker:
        yield Cluster(request.param, broker)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("point", ["task.after_opening", pytest.param("sink.after_offsets", marks=pytest.mark.full)])
def test_broker_killed_in_the_middle_of_a_batch(mortal: Cluster, spark: SparkSite, tmp_path: Path, point: str) -> None:
    pipeline = Pipeline(mortal, tmp_path)
    spark.faults.arm(point, "stop")
    driver = spark.driver()
    number = driver.begin(pipeline.job())
    (stopped,) = spark.faults.fired(point)
    mortal.broker.kill()
    mortal.broker.start()
    spark.go_on(stopped)
    driver.end(number).succeeded()
    pipeline.assert_exact()
    assert pipeline.offsets() == pipeline.ends()
