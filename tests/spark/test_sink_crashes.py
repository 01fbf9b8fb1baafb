"""E1-E3, E5: one transaction per micro-batch, and a driver that is killed at every named point of its protocol."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from semel.protocol.partitioning import partition_for_key
from semel.spark.faults import POINTS
from tests.support.broker import Cluster
from tests.support.direct import DirectClient
from tests.support.load import read_all
from tests.support.processes import Process

DRIVER = Path(__file__).with_name("driver.py")
ROWS, PARTITIONS = 600, 3


class Pipeline:
    """Two topics and the program that copies one to the other."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.bootstrap = cluster.bootstrap
        self.source, self.output = cluster.unique("spark-in"), cluster.unique("spark-out")
        self.application_id = cluster.unique("spark-app")
        self.checkpoint = folder / "checkpoint"
        with DirectClient(self.bootstrap) as client:
            client.create_topic(self.source, PARTITIONS)
            client.create_topic(self.output, PARTITIONS)
        self.expected: Counter[bytes] = Counter()
        self.fill(ROWS)

    def fill(self, rows: int) -> None:
        producer = Producer({"bootstrap.servers": self.bootstrap, "log_level": 0})
        first = sum(self.expected.values())
        for number in range(first, first + rows):
            producer.produce(self.source, b"%06d" % number, key=b"key-%d" % number)
            self.expected[b"%06d" % number] += 1
        assert producer.flush(30) == 0

    def start(self, fault: str = "", per_batch: int = 200, **changes: Any) -> Process:
        job = {
            "brokers": self.bootstrap,
            "checkpoint": str(self.checkpoint),
            "source": {
                "subscribe": self.source,
                "startingOffsets": changes.pop("starting", "earliest"),
                "maxOffsetsPerTrigger": str(per_batch),
                "applicationId": self.application_id,
            },
            "sink": {"application_id": self.application_id, "topic": self.output, **changes},
        }
        return Process([sys.executable, str(DRIVER), json.dumps(job)], env={"SEMEL_SINK_FAULTS": fault})

    def run(self, **options: Any) -> str:
        process = self.start(**options)
        try:
            process.wait_for_line("^done$", timeout_s=180)
            return process.output
        finally:
            process.kill()

    def crash(self, fault: str, **options: Any) -> None:
        process = self.start(fault=fault, **options)
        try:
            process.wait_for_line(f"fault fired: {fault.split(':')[0]}", timeout_s=180)
            process.wait(timeout_s=30)
        finally:
            process.kill()

    def output_values(self) -> Counter[bytes]:
        return Counter(value or b"" for _, _, value in read_all(self.bootstrap, self.output, PARTITIONS))

    def positions(self) -> dict[int, int]:
        consumer = Consumer({"bootstrap.servers": self.bootstrap, "group.id": self.application_id, "log_level": 0})
        wanted = [TopicPartition(self.source, p) for p in range(PARTITIONS)]
        found = {tp.partition: tp.offset for tp in consumer.committed(wanted, timeout=20)}
        consumer.close()
        return found

    def ends(self) -> dict[int, int]:
        consumer = Consumer({"bootstrap.servers": self.bootstrap, "group.id": "ends", "log_level": 0})
        found = {p: consumer.get_watermark_offsets(TopicPartition(self.source, p))[1] for p in range(PARTITIONS)}
        consumer.close()
        return found


ALWAYS = {("semel", "sink.after_commit"), ("apache_kafka", "sink.after_positions")}  # the rest is in `make test-full`
KAFKA_IN_FULL = pytest.param("apache_kafka", marks=[pytest.mark.kafka, pytest.mark.full])


def _marks(name: str, point: str) -> list[pytest.MarkDecorator]:
    kafka = [pytest.mark.kafka] if name == "apache_kafka" else []
    return kafka if (name, point) in ALWAYS else [*kafka, pytest.mark.full]


@pytest.fixture
def pipeline(cluster: Cluster, tmp_path: Path) -> Pipeline:
    return Pipeline(cluster, tmp_path)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("cluster", ["semel", KAFKA_IN_FULL], indirect=True)
def test_rows_land_once_where_any_producer_would_put_them_and_the_group_shows_no_lag(pipeline: Pipeline) -> None:
    pipeline.run()
    assert pipeline.output_values() == pipeline.expected
    assert pipeline.positions() == pipeline.ends()  # E4: any Kafka tool sees the lag
    for partition, _, value in read_all(pipeline.bootstrap, pipeline.output, PARTITIONS):
        assert partition == partition_for_key(b"key-%d" % int(value or b""), PARTITIONS)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("cluster", "point"),
    [
        pytest.param(name, point, marks=_marks(name, point), id=f"{name}-{point}")
        for name in ("semel", "apache_kafka")
        for point in POINTS
    ],
    indirect=["cluster"],
)
def test_driver_killed_at_a_named_point_leaves_no_trace(pipeline: Pipeline, point: str) -> None:
    pipeline.crash(f"{point}:kill:2")
    pipeline.run()
    assert pipeline.output_values() == pipeline.expected
    assert pipeline.positions() == pipeline.ends()


@pytest.mark.full
@pytest.mark.timeout(400)
def test_lost_checkpoint_resumes_from_the_ledger(pipeline: Pipeline) -> None:
    pipeline.crash("sink.after_write:kill:2")  # the dead driver's transaction is still open
    shutil.rmtree(pipeline.checkpoint)
    pipeline.run(starting="committed")
    assert pipeline.output_values() == pipeline.expected


@pytest.mark.full
@pytest.mark.timeout(400)
def test_older_checkpoint_is_refused_with_the_way_out(pipeline: Pipeline, tmp_path: Path) -> None:
    pipeline.crash("sink.after_commit:kill:2")
    shutil.copytree(pipeline.checkpoint, tmp_path / "old")
    pipeline.run()
    pipeline.fill(200)
    pipeline.run()
    shutil.rmtree(pipeline.checkpoint)
    shutil.copytree(tmp_path / "old", pipeline.checkpoint)
    process = pipeline.start()
    process.wait_for_line("startingOffsets=committed", timeout_s=180)
    process.wait(timeout_s=60)
    assert pipeline.output_values() == pipeline.expected
