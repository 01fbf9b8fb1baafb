"""The processing loop under kill -9 and freezes: three guarantees side by side, checked through confluent-kafka.

For each guarantee two named instances share a group. The same faults hit all of them at the same moments: an instance
is killed and started again, or frozen (SIGSTOP) for longer than its session and its transactions last, so that it wakes
up as a zombie whose partitions others have.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confluent_kafka import Producer

from semel.client.admin import Admin
from semel.local.processes import Process, ProcessFailed
from tests.support.broker import Cluster
from tests.support.reading import read_values
from tests.support.waiting import PATIENCE_S

GUARANTEES = ("exactly_once", "at_least_once", "at_most_once")
INSTANCES = ("a", "b")
PARTITIONS = 4
SESSION_TIMEOUT_MS = 6_000  # the least that Apache Kafka allows by default
TRANSACTION_TIMEOUT_MS = 4_000
FREEZE_S = 7.0  # longer than both
WINDOW_WAIT_S = 3.0
CLASSIC = {"session_timeout_ms": SESSION_TIMEOUT_MS, "heartbeat_interval_ms": 1_000}
REPOSITORY = Path(__file__).parents[2]


@dataclass
class Outcome:
    """What one guarantee led to."""

    sent: int
    seen: Counter[bytes]
    kills: int = 0
    freezes: int = 0
    fenced: int = 0
    aborts: int = 0

    @property
    def lost(self) -> int:
        return self.sent - len(self.seen)

    @property
    def duplicates(self) -> int:
        return sum(self.seen.values()) - len(self.seen)


@dataclass
class Pipeline:
    """One guarantee: its topics, its group and its two instances."""

    cluster: Cluster
    guarantee: str
    source: str
    sink: str
    application: str
    tables: bool = False
    consumer: dict[str, Any] | None = None  # options; None: those of a static member of a classic group
    workers: dict[str, Process] = field(default_factory=dict)
    outcome: Outcome = field(default_factory=lambda: Outcome(0, Counter()))
    ended: list[Process] = field(default_factory=list)

    def start(self, name: str) -> None:
        options = {
            "source": self.source,
            "sink": self.sink,
            "application_id": self.application,
            "guarantee": self.guarantee,
            "bootstrap_servers": self.cluster.bootstrap,
            "instance": name,
            "tables": self.tables,
            "delay_ms": 0 if self.tables else 1,
            "commit_interval_ms": 250,
            "max_records": 400,
            "transaction_timeout_ms": TRANSACTION_TIMEOUT_MS,
            "consumer": self.consumer or CLASSIC | {"group_instance_id": name},
        }
        command = [sys.executable, "-m", "tests.support.process_worker", json.dumps(options)]
        self.workers[name] = Process(command, cwd=REPOSITORY)

    def kill(self, name: str) -> None:
        """At a moment at which it hurts, if one comes soon."""
        worker = self.workers[name]
        with contextlib.suppress(ProcessFailed):
            worker.wait_for_line("window", WINDOW_WAIT_S, after=worker.line_count)
        worker.kill()
        self.outcome.kills += 1
        self.ended.append(self.workers[name])
        self.start(name)

    def revive(self) -> None:
        """An instance that found itself fenced has stopped, as it should; its supervisor starts it again."""
        for name, worker in list(self.workers.items()):
            if not worker.running:
                if "fenced:" not in worker.output:
                    raise AssertionError(f"{self.guarantee} {name} ended by itself:\n{worker.output[-3000:]}")
                self.outcome.fenced += 1
                self.ended.append(worker)
                self.start(name)

    def count_aborts(self) -> None:
        for worker in [*self.workers.values(), *self.ended]:
            settled = [line.split() for line in worker.output.splitlines() if line.startswith("settled")]
            self.outcome.aborts += int(settled[-1][3]) if settled else 0


class Feeder(threading.Thread):
    """Writes numbered records to all sources at a steady pace until it is stopped."""

    def __init__(self, bootstrap: str, topics: list[str], per_s: int) -> None:
        super().__init__(daemon=True)
        self._producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 5, "enable.idempotence": True})
        self._topics = topics
        self._per_s = per_s
        self._done = threading.Event()
        self.sent = 0

    def run(self) -> None:
        started_s = time.monotonic()
        while not self._done.is_set():
            due = int((time.monotonic() - started_s) * self._per_s)
            for number in range(self.sent, due):
                for topic in self._topics:
                    self._producer.produce(topic, value=b"%d" % number, key=b"%d" % (number % 97))
            self.sent = max(self.sent, due)
            self._producer.poll(0)
            self._done.wait(0.02)
        left = self._producer.flush(30)
        assert left == 0, f"{left} records of the input were not stored"

    def stop(self) -> int:
        self._done.set()
        self.join(60)
        return self.sent


def run_campaign(
    cluster: Cluster,
    duration_s: float,
    seed: int,
    guarantees: tuple[str, ...] = GUARANTEES,
    consumer: dict[str, Any] | None = None,
) -> dict[str, Outcome]:
    """Runs the faults for so long, lets everything settle, stops with SIGTERM and reads the sinks."""
    rng = random.Random(seed)
    pipelines = [_pipeline(cluster, guarantee, consumer) for guarantee in guarantees]
    feeder = Feeder(cluster.bootstrap, [pipeline.source for pipeline in pipelines], per_s=200)
    try:
        for pipeline in pipelines:
            for name in INSTANCES:
                pipeline.start(name)
        feeder.start()
        for pipeline in pipelines:
            _wait_for_any_progress(pipeline)
        _inflict(pipelines, rng, duration_s)
        sent = feeder.stop()
        _wait_until_caught_up(cluster, pipelines)
        for pipeline in pipelines:
            _stop_cleanly(pipeline)
            pipeline.count_aborts()
            pipeline.outcome.sent = sent
            pipeline.outcome.seen = Counter(value for _, _, value in read_values(cluster.bootstrap, pipeline.sink))
    finally:
        feeder.stop()
        for pipeline in pipelines:
            for worker in pipeline.workers.values():
                worker.kill()
    return {pipeline.guarantee: pipeline.outcome for pipeline in pipelines}


def _pipeline(cluster: Cluster, guarantee: str, consumer: dict[str, Any] | None) -> Pipeline:
    stem = cluster.unique(f"campaign-{guarantee}")
    with Admin(bootstrap_servers=cluster.bootstrap) as admin:
        for topic in (stem, f"{stem}.out"):
            admin.create_topic(topic, PARTITIONS)
    return Pipeline(cluster, guarantee, stem, f"{stem}.out", f"{stem}-app", consumer=consumer)


def _wait_for_any_progress(pipeline: Pipeline) -> None:
    """Faults before the first commit would prove little."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not any("settled" in worker.output for worker in pipeline.workers.values()):
        pipeline.revive()
        outputs = "\n--\n".join(worker.output[-3000:] for worker in pipeline.workers.values())
        assert time.monotonic() < deadline_s, f"{pipeline.guarantee} did not start working:\n{outputs}"
        time.sleep(0.05)


def _inflict(pipelines: list[Pipeline], rng: random.Random, duration_s: float) -> None:
    """A kill or a freeze every few seconds; each of both happens at least once."""
    ends_s = time.monotonic() + duration_s
    faults = ["kill", "kill", "freeze"]
    while faults or time.monotonic() < ends_s:
        name, fault = rng.choice(INSTANCES), faults.pop(0) if faults else rng.choice(["kill", "kill", "freeze"])
        if fault == "kill":
            for pipeline in pipelines:
                pipeline.kill(name)
        else:
            _freeze(pipelines, name)
        time.sleep(rng.uniform(1.5, 3.0))
        for pipeline in pipelines:
            pipeline.revive()


def _freeze(pipelines: list[Pipeline], name: str) -> None:
    for pipeline in pipelines:
        pipeline.workers[name].pause()
        pipeline.outcome.freezes += 1
    time.sleep(FREEZE_S)
    for pipeline in pipelines:
        pipeline.workers[name].resume()


def _wait_until_caught_up(cluster: Cluster, pipelines: list[Pipeline]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    with Admin(bootstrap_servers=cluster.bootstrap) as admin:
        for pipeline in pipelines:
            while True:
                pipeline.revive()
                positions = admin.group_lag(pipeline.application)
                lag = [p.lag for p in positions if p.topic == pipeline.source]
                if len(lag) == PARTITIONS and not any(part is None or part for part in lag):
                    break
                outputs = "\n".join(worker.output[-1500:] for worker in pipeline.workers.values())
                assert time.monotonic() < deadline_s, f"{pipeline.guarantee} hangs with lag {lag}:\n{outputs}"
                time.sleep(0.1)


def _stop_cleanly(pipeline: Pipeline) -> None:
    for name, worker in pipeline.workers.items():
        code = worker.terminate(30)
        assert code == 0, f"{pipeline.guarantee} {name} ended with {code} after SIGTERM:\n{worker.output[-3000:]}"
