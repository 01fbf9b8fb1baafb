"""Drivers as processes, told what to do line by line; and a pipeline: a query that copies one topic to another."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from confluent_kafka import Consumer, Producer, TopicPartition

from semel.local.processes import Process
from semel.local.spark_cluster import SparkCluster
from semel.prove.injection import command
from semel.spark.session import LAUNCHED_SETTINGS
from tests.support.broker import Cluster
from tests.support.reading import create_topic, read_values
from tests.support.spark_cluster import Faults
from tests.support.waiting import PATIENCE_S, until

DRIVER_TIMEOUT_S = 180
PARTITIONS = 4
LOCAL = "local[2,4]"  # a task may fail three times, as on a cluster


class Outcome(NamedTuple):
    """How a query ended."""

    error: str
    reports: list[dict[str, Any]]
    stages_again: list[int]  # that Spark ran more than once
    stages: list[int]  # how many each job has

    def succeeded(self) -> Outcome:
        assert not self.error, self.error
        return self

    def failed_with(self, *words: str) -> Outcome:
        missing = [word for word in words if word not in self.error]
        assert not missing, f"{missing} not in the error: {self.error or '(the query succeeded)'}"
        return self

    @property
    def attempts(self) -> int:
        return max(report["attempts"] for report in self.reports)


class SparkDriver:
    """One driver process."""

    def __init__(self, master: str, faults: Faults, conf: dict[str, str], env: dict[str, str] | None = None) -> None:
        setup = {"master": master, "conf": {**_CONF, **conf}}
        self.faults = faults
        environment = {**faults.spark_python(), "SPARK_LOCAL_IP": "127.0.0.1", **(env or {})}
        program = command(faults.injection, "-m", "tests.spark.driver", json.dumps(setup))
        self.process = Process(program, env=environment, stdin=True)
        self._numbers = count(1)
        self._is_ready = False
        self._unanswered = 0

    @property
    def is_idle(self) -> bool:
        return self.process.running and not self._unanswered

    def run(self, job: dict[str, Any]) -> Outcome:
        """To its end."""
        outcome = self.start(job)
        return outcome if outcome.error else self.wait()

    def start(self, job: dict[str, Any]) -> Outcome:
        return self._answer(self._ask("start", job=job))

    def wait(self) -> Outcome:
        return self._answer(self._ask("wait"))

    def stop(self) -> Outcome:
        return self._answer(self._ask("stop"))

    def begin(self, job: dict[str, Any]) -> int:
        """Starts a query and asks for its end, without waiting; `end` gives it."""
        self.start(job).succeeded()
        return self._ask("wait")

    def end(self, number: int) -> Outcome:
        return self._answer(number)

    @property
    def warnings(self) -> str:
        """Why batches ran again."""
        return "\n".join(line for line in self.process.output.splitlines() if not line.startswith("answer"))[-3000:]

    def close(self) -> None:
        self.process.kill()

    def _ask(self, do: str, **more: Any) -> int:
        if not self._is_ready:
            self.process.wait_for_line("^ready$", DRIVER_TIMEOUT_S)
            self._is_ready = True
        number = next(self._numbers)
        self._unanswered += 1
        self.process.write(json.dumps({"number": number, "do": do, **more}) + "\n")
        return number

    def _answer(self, number: int) -> Outcome:
        found = self.process.wait_for_line(rf"^answer {number} (.*)$", DRIVER_TIMEOUT_S)
        self._unanswered -= 1
        answer = json.loads(found[1])
        return Outcome(answer["error"], *(answer.get(name, []) for name in ("reports", "stages_again", "stages")))


_CONF = {
    "spark.driver.memory": "512m",
    "spark.sql.shuffle.partitions": "2",
    "spark.shuffle.io.retryWait": "200ms",
}


class SparkSite:
    """A cluster and its drivers. A driver is kept for the next test with the same settings, if it is still alive."""

    def __init__(self, folder: Path, cluster: SparkCluster | None) -> None:
        self.cluster = cluster
        self.folder = folder
        self.faults = Faults(folder / "faults")
        self._drivers: dict[str, SparkDriver] = {}
        self._numbers = count(1)

    def driver(self, **conf: str) -> SparkDriver:
        """One that may be shared; whoever kills it need not say so. Dots in names are written `__`."""
        settings = {name.replace("__", "."): value for name, value in conf.items()}
        key = json.dumps(settings, sort_keys=True)
        known = self._drivers.get(key)
        if known is None or not known.process.running:
            self._drivers[key] = known = self.new_driver(**settings)
        return known

    def new_driver(self, **settings: str) -> SparkDriver:
        if self.cluster is None:
            return SparkDriver(LOCAL, self.faults, {**LAUNCHED_SETTINGS, **settings})
        return SparkDriver(self.cluster.url, self.faults, {**self.cluster.conf(), **settings})

    @contextmanager
    def second_driver(self) -> Iterator[SparkDriver]:
        """One more, for this test alone, that obeys no faults."""
        driver = SparkDriver(
            LOCAL if self.cluster is None else self.cluster.url,
            Faults(self.folder / f"no-faults-{next(self._numbers)}"),
            LAUNCHED_SETTINGS if self.cluster is None else self.cluster.conf(),
        )
        try:
            yield driver
        finally:
            driver.close()

    @staticmethod
    def go_on(pid: int) -> None:
        """What a fault has stopped goes on."""
        os.kill(pid, signal.SIGCONT)

    def settle(self) -> None:
        """After each test: no fault stays armed, and no query goes on that a failed test has left."""
        self.faults.disarm()
        for driver in self._drivers.values():
            if not driver.is_idle:
                driver.close()

    def close(self) -> None:
        for driver in self._drivers.values():
            driver.close()


class Pipeline:
    """A source topic with numbered rows, an output topic, and the query between them as a job for a driver."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        rows: int = 200,
        bootstrap: str | None = None,
        partitioner: str = "consistent",  # not where Java's producers, and the sink, put the keys
    ) -> None:
        self.partitioner = partitioner
        self.bootstrap = bootstrap or cluster.bootstrap
        self.reading_from = cluster.bootstrap  # never through a proxy
        self.source, self.output = cluster.unique("spark-in"), cluster.unique("spark-out")
        self.application_id = cluster.unique("spark-app")
        self.folder = folder
        self.checkpoint = folder / "checkpoint"
        for topic in (self.source, self.output):
            create_topic(cluster.bootstrap, topic, PARTITIONS)
        self.expected: Counter[bytes] = Counter()
        self.fill(rows)

    def fill(self, rows: int, padding_bytes: int = 0) -> None:
        settings = {"bootstrap.servers": self.reading_from, "partitioner": self.partitioner, "log_level": 0}
        producer = Producer(settings)
        first = sum(self.expected.values())
        for number in range(first, first + rows):
            value = b"%06d" % number + bytes(padding_bytes)
            producer.produce(self.source, value, key=b"key-%d" % number)
            self.expected[value] += 1
        assert producer.flush(60) == 0

    def job(self, *, source: dict[str, str] | None = None, sink: dict[str, Any] | None = None, **more: Any) -> Any:
        """What a driver is to run; `source` and `sink` are options on top of the usual ones."""
        options = {
            "subscribe": self.source,
            "startingOffsets": "earliest",
            "maxOffsetsPerTrigger": "100",
            "applicationId": self.application_id,
        }
        return {
            "brokers": self.bootstrap,
            "checkpoint": str(self.checkpoint),
            "source": {**options, **(source or {})},
            "sink": {"application_id": self.application_id, "topic": self.output, **(sink or {})},
            **more,
        }

    def committed(self, topic: str | None = None) -> Counter[bytes]:
        """Values by how often they are there, for a reader of committed records that is not ours."""
        found = read_values(self.reading_from, topic or self.output)
        return Counter(value or b"" for _, _, value in found)

    def assert_exact(self) -> None:
        """The output is the expected one."""
        # the end of a transaction is answered before its markers are written: until then readers do not see it
        until(lambda: not self.has_open_transaction(), "a transaction is still open in the output")
        found = self.committed()
        lost, doubled = self.expected - found, found - self.expected
        assert not lost, f"{sum(lost.values())} rows are lost, such as {sorted(lost)[:5]}"
        assert not doubled, f"{sum(doubled.values())} rows are there too often, such as {sorted(doubled)[:5]}"

    def uncommitted(self) -> int:
        """How many records are in the log of the output; markers count too."""
        return sum(self._ends(self.output, "read_uncommitted").values())

    def has_open_transaction(self, topic: str | None = None) -> bool:
        """Whether readers of committed records must wait somewhere in the topic."""
        return self._ends(topic or self.output, "read_committed") != self._ends(
            topic or self.output, "read_uncommitted"
        )

    def offsets(self) -> dict[int, int]:
        """Of the group, as far as they are committed; a stable reader would wait while a transaction is open."""
        settings = {"bootstrap.servers": self.reading_from, "group.id": self.application_id, "log_level": 0}
        consumer = Consumer({**settings, "isolation.level": "read_uncommitted"})
        wanted = [TopicPartition(self.source, p) for p in range(PARTITIONS)]
        found = {tp.partition: tp.offset for tp in consumer.committed(wanted, timeout=PATIENCE_S)}
        consumer.close()
        return found

    def ends(self) -> dict[int, int]:
        return self._ends(self.source, "read_committed")

    def _ends(self, topic: str, isolation: str) -> dict[int, int]:
        """Where each partition ends for such a reader."""
        settings = {"bootstrap.servers": self.reading_from, "group.id": "ends", "isolation.level": isolation}
        consumer = Consumer({**settings, "log_level": 0})
        places = [TopicPartition(topic, p) for p in range(PARTITIONS)]
        found = {tp.partition: consumer.get_watermark_offsets(tp, timeout=PATIENCE_S)[1] for tp in places}
        consumer.close()
        return found
