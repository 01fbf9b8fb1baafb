"""Runs `query_driver.py` for tests: topics, a checkpoint, crashes at named points, and what came out."""

from __future__ import annotations

import json
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

from confluent_kafka import Producer

import semel
from semel.local.processes import Process
from semel.prove.injection import Injection, command, spark_python
from semel.spark.source import HAS_ADMISSION_CONTROL
from tests.support.broker import Cluster
from tests.support.reading import read_values

DRIVER = Path(__file__).with_name("query_driver.py")
PARTITIONS = 2
_numbers = count(1)


class Query:
    """One pipeline from one topic to another."""

    def __init__(self, cluster: Cluster, folder: Path, pipeline: str, rows: int = 0, **job: Any) -> None:
        self.cluster, self.bootstrap = cluster, cluster.bootstrap
        self.source, self.output = cluster.unique("query-in"), cluster.unique("query-out")
        self.application_id = cluster.unique("query-app")
        self.checkpoint = folder / f"checkpoint-{self.application_id}"
        self.job = {"pipeline": pipeline, "brokers": self.bootstrap, "checkpoint": str(self.checkpoint), **job}
        with semel.Admin({"bootstrap.servers": self.bootstrap}) as admin:
            admin.create_topic(self.source, PARTITIONS)
            admin.create_topic(self.output, PARTITIONS)
        self.filled = 0
        self.fill(rows)

    def run_through(self, rows: Any, sink: Any) -> None:
        """Writes all that is there, in the test's own session, and closes the sink."""
        running = (
            rows.writeStream.foreachBatch(sink)
            .option("checkpointLocation", str(self.checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        assert running.awaitTermination(120)
        sink.close()

    def fill(self, rows: int) -> None:
        """Numbers, one after the other, in both partitions."""
        producer = Producer({"bootstrap.servers": self.bootstrap, "log_level": 0})
        for n in range(self.filled, self.filled + rows):
            producer.produce(self.source, str(n).encode(), key=f"key-{n}".encode(), partition=n % PARTITIONS)
        assert producer.flush(30) == 0
        self.filled += rows

    def start(self, fault: str = "", *, starting: str = "earliest", per_batch: int = 100, **changes: Any) -> Process:
        source = {
            "subscribe": self.source,
            "startingOffsets": starting,
            "maxOffsetsPerTrigger": str(per_batch),
            "applicationId": self.application_id,
        }
        sink = {"application_id": self.application_id, "topic": self.output, **changes.pop("sink", {})}
        job = {"source": source, **self.job, **changes}
        if "writer" in job:
            job["writer"] = {"applicationId": self.application_id, "topic": self.output, **job["writer"]}
        else:
            job["sink"] = sink
        injection = Injection(fault)
        env = spark_python(injection, self.checkpoint.with_name(f"python-{next(_numbers)}"))
        return Process(command(injection, DRIVER, json.dumps(job)), env=env)

    def run(self, **changes: Any) -> str:
        process = self.start(**changes)
        try:
            process.wait_for_line("^done$", timeout_s=180)
            return process.output
        finally:
            process.kill()

    def crash(self, point: str, batch: int = 2, **changes: Any) -> None:
        """Killed when the batch with this number (from 1) reaches the point."""
        nth = batch if HAS_ADMISSION_CONTROL else 1  # PySpark 4.1 reads everything in one batch
        process = self.start(f"{point}:kill:{nth}", **changes)
        try:
            process.wait_for_line(f"fault fired: {point}", timeout_s=180)
            process.wait(timeout_s=60)
        finally:
            process.kill()

    def failure(self, **changes: Any) -> str:
        """What a query says that must fail."""
        process = self.start(**changes)
        try:
            return process.wait_for_line("^failed (.*)$", timeout_s=180).group(1)
        finally:
            process.kill()

    def values(self) -> Counter[str]:
        found = read_values(self.bootstrap, self.output)
        return Counter((value or b"").decode() for _, _, value in found)
