"""What a demo starts (broker, producer, program), what happens in it, in order, and what is counted at its end."""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from semel.client.admin import Admin, NewTopic
from semel.client.errors import KafkaError
from semel.client.producer import Producer
from semel.demo.program import FAULTS, GUARANTEES, DemoFault, Screen
from semel.demo.workloads import DemoTopics, DemoWorkload, Event, Outcome, OutputRecord
from semel.local.brokers import Broker
from semel.local.processes import Process

PER_TRANSACTION = 20
ABORTED = 0.08  # share of transactions that the producer takes back
BACKOFF_S = 0.2


class Feeder(threading.Thread):
    """Runs until `finish`. An id is never sent twice: what became of a failed transaction need not be known."""

    def __init__(self, brokers: str, topic: str, workload: DemoWorkload, seed: int, per_s: float) -> None:
        super().__init__(name="feeder", daemon=True)
        self._options = {
            "bootstrap_servers": brokers,
            "transactional_id": f"{topic}.producer",
            "transaction_timeout_ms": 10_000,
            "linger_ms": 0,
        }
        self._topic = topic
        self._workload = workload
        self._rng = random.Random(seed)
        self._per_s = per_s
        self._started_ms = int(time.time()) * 1000
        self._events: Iterator[Event] = workload.events(random.Random(seed + 1), self._started_ms, per_s)
        self._produced = 0
        self._ending = threading.Event()
        self.committed = self.aborted = self.failed = 0  # records
        self.error: BaseException | None = None

    def finish(self, timeout_s: float = 30.0) -> None:
        """Sends what closes the input and returns when it is committed."""
        self._ending.set()
        self.join(timeout_s)
        if self.is_alive():
            raise TimeoutError(f"the producer did not finish within {timeout_s} s")

    def run(self) -> None:
        try:
            while not self._with_one_producer():
                time.sleep(BACKOFF_S)
        except BaseException as error:
            self.error = error

    def _with_one_producer(self) -> bool:
        """Returns when it is to finish (True), or the producer cannot go on."""
        with Producer(self._options) as producer:
            try:
                producer.init_transactions()
                while not self._ending.wait(self._due_in_s()):
                    self._transaction(producer, list(islice(self._events, PER_TRANSACTION)))
                self._close(producer)
            except KafkaError:
                return False
        return True

    def _due_in_s(self) -> float:
        due_ms = self._started_ms + (self._produced + PER_TRANSACTION) * 1000 / self._per_s
        return max(0.001, min(1.0, due_ms / 1000 - time.time()))

    def _close(self, producer: Producer) -> None:
        closing = self._workload.closing(self._started_ms, self._produced, self._per_s)
        if closing:
            self._transaction(producer, closing, may_abort=False)

    def _transaction(self, producer: Producer, events: list[Event], may_abort: bool = True) -> None:
        self._produced += len(events)
        aborts = may_abort and self._rng.random() < ABORTED
        try:
            producer.begin_transaction()
            for event in events:
                producer.send(self._topic, event.value, event.key)
            producer.abort_transaction() if aborts else producer.commit_transaction()
        except KafkaError:
            self.failed += len(events)
            raise
        if aborts:
            self.aborted += len(events)
        else:
            self.committed += len(events)


# --- the broker, the producer and the program under test as processes and threads ---
POLL_S = 0.05


class DemoTestbedError(Exception):
    """The demo could not go on; the message says why."""


class DemoTestbed:
    """Everything that a demo starts. Use it as a context manager."""

    def __init__(self, workload: DemoWorkload, engine: str, seed: int, per_s: float, *, keep: bool = False) -> None:
        self.workload = workload
        self.engine = engine
        self.prefix = f"demo-{workload.name}"
        self.folder = Path(tempfile.mkdtemp(prefix="semel-demo-"))
        self._keep = keep
        self.broker = Broker(self.folder / "broker", settings={"group.initial.rebalance.delay.ms": 0})
        self._seed, self._per_s = seed, per_s
        self.feeder: Feeder | None = None
        self._driver: Process | None = None
        self._read_lines = 0

    def __enter__(self) -> DemoTestbed:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends all processes; the folder goes, unless it is to be kept."""
        if self._driver is not None:
            self._driver.kill()
        self.broker.stop()
        if not self._keep:
            shutil.rmtree(self.folder, ignore_errors=True)

    # --- the broker and the producer ---
    def create_topics(self) -> None:
        wanted = {name: count for g in GUARANTEES for name, count in DemoTopics.of(self.prefix, g).partitions().items()}
        with Admin(bootstrap_servers=self.broker.bootstrap) as admin:
            admin.create_topics([NewTopic(name, count) for name, count in wanted.items()])

    def start_feeder(self) -> Feeder:
        source = DemoTopics.of(self.prefix, GUARANTEES[0]).source
        self.feeder = Feeder(self.broker.bootstrap, source, self.workload, self._seed, self._per_s)
        self.feeder.start()
        return self.feeder

    # --- the program ---
    def start_driver(self) -> None:
        job = {
            "brokers": self.broker.bootstrap,
            "workload": self.workload.name,
            "prefix": self.prefix,
            "folder": str(self.folder / "checkpoints"),
        }
        command = [sys.executable, "-m", "semel.demo.drivers", self.engine, json.dumps(job)]
        self._driver = Process(command, stdin=True, cwd=self.folder)
        self._read_lines = 0

    @property
    def driver(self) -> Process:
        assert self._driver is not None
        return self._driver

    def command(self, *words: object) -> None:
        self.driver.write(" ".join(map(str, words)) + "\n")

    def events(self, timeout_s: float) -> Iterator[dict[str, Any] | None]:
        """What the program says, as it says it; None now and then, so that the caller can look at the clock."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            running = self.driver.running
            if not running:
                self.driver.wait()  # until its last output is here
            lines = self.driver.lines(self._read_lines)
            self._read_lines += len(lines)
            for line in lines:
                if line.startswith('{"event"'):
                    yield json.loads(line)
            if not lines:
                if not running:
                    raise DemoTestbedError(f"the program ended by itself:\n{self._last_output()}")
                yield None
                time.sleep(POLL_S)
        raise DemoTestbedError(f"the program did not get on within {timeout_s:.0f} s:\n{self._last_output()}")

    def _last_output(self) -> str:
        return "\n".join(self.driver.output.splitlines()[-30:])


# --- reading for the count: through confluent-kafka where it is installed, else through semel's own consumer ---
class _Own(NamedTuple):
    timestamp_ms: int
    value: bytes | None


def reader_name() -> str:
    """Who counts."""
    if find_spec("confluent_kafka") is None:
        return "semel's own consumer (an independent one needs `pip install semel[prove]`)"
    import confluent_kafka

    return f"confluent-kafka {confluent_kafka.__version__}"


def read(brokers: str, topic: str) -> Sequence[OutputRecord]:
    """Every committed record."""
    if find_spec("confluent_kafka") is None:
        from semel.client.read_table import read_table

        rows = read_table(topic, bootstrap_servers=brokers).select(["timestamp", "value"]).to_pylist()
        return [_Own(row["timestamp"], row["value"]) for row in rows]
    from semel.prove.checker.reading import read as read_independently

    return read_independently(brokers, [topic])


# --- what happens, in order ---
START_TIMEOUT_S = 120.0
GET_ON_TIMEOUT_S = 120.0
BROKER_DOWN_S = 0.8
# Batches that each pipeline has finished since the arming, before it is held: enough for the next one to have output.
BATCHES_BEFORE = 1


class Moment(NamedTuple):
    """Something that happened, on the wall clock."""

    at_s: float
    who: str  # "driver" or "broker"
    what: str  # "up", "killed", "down"
    text: str


class RunHistory(NamedTuple):
    started_s: float
    ended_s: float
    moments: list[Moment]
    held: list[tuple[str, str, str]]  # fault, guarantee, point: proof that every pipeline stood where it should
    failures: list[tuple[str, str]]  # guarantee, error of a query that was started again


class DemoRun:
    def __init__(self, testbed: DemoTestbed, screen: Screen, faults: Sequence[DemoFault] = FAULTS) -> None:
        self._testbed = testbed
        self._screen = screen
        self._faults = faults
        self._started_s = time.time()
        self._moments: list[Moment] = []
        self._held: list[tuple[str, str, str]] = []
        self._failures: list[tuple[str, str]] = []

    def run(self) -> RunHistory:
        self._begin()
        for fault in self._faults:
            self._inflict(fault)
        self._finish()
        return RunHistory(self._started_s, time.time(), self._moments, self._held, self._failures)

    # --- steps ---
    def _begin(self) -> None:
        self._testbed.broker.start()
        self._note("broker", "up", f"broker is up on {self._testbed.broker.bootstrap}")
        self._testbed.create_topics()
        self._testbed.start_feeder()
        self._start_driver()

    def _inflict(self, fault: DemoFault) -> None:
        self._testbed.command("arm", fault.name, BATCHES_BEFORE)
        self._await("all_held", fault)
        if fault.victim == "driver":
            self._testbed.driver.kill()  # and its JVM
            self._note("driver", "killed", f"kill -9: the driver, {fault.what}", bad=True)
            self._start_driver()
        else:
            self._testbed.broker.kill()
            self._note("broker", "killed", f"kill -9: the broker, {fault.what}", bad=True)
            self._testbed.command("open")
            self._pause(BROKER_DOWN_S)
            self._testbed.broker.start()
            self._note("broker", "up", "broker is up again")

    def _finish(self) -> None:
        feeder = self._testbed.feeder
        assert feeder is not None
        feeder.finish()
        self._screen.moment(f"producer is done: {feeder.committed:,} {self._testbed.workload.records}; draining")
        self._testbed.command("finish")
        self._await("finished")
        self._testbed.driver.kill()  # and its JVM
        self._note("driver", "down", "all three have read everything")

    # --- pieces ---
    def _start_driver(self) -> None:
        again = " again" if any(moment.who == "driver" for moment in self._moments) else ""
        name = "Spark" if self._testbed.engine == "spark" else "program"
        for lane in self._screen.lanes.values():
            lane.state = f"{name} is starting"
        self._testbed.start_driver()
        self._await("started", timeout_s=START_TIMEOUT_S)
        self._note("driver", "up", f"{name} is up{again}, with three pipelines")

    def _await(self, wanted: str, fault: DemoFault | None = None, timeout_s: float = GET_ON_TIMEOUT_S) -> None:
        for event in self._testbed.events(timeout_s):
            self._show_feeder()
            self._screen.refresh()
            if event is None:
                continue
            self._take(event, fault)
            if event["event"] == wanted:
                return

    def _take(self, event: dict[str, Any], fault: DemoFault | None) -> None:
        lane = self._screen.lanes.get(event.get("guarantee", ""))
        if event["event"] == "batch" and lane is not None:
            lane.add(event["rows"])
        elif event["event"] == "held" and lane is not None and fault is not None:
            lane.state = f"held at {event['point']}"
            self._held.append((fault.name, event["guarantee"], event["point"]))
        elif event["event"] == "query_failed":
            self._failures.append((event["guarantee"], event["error"]))
            self._screen.moment(f"{event['guarantee']}: its query failed and is started again")

    def _show_feeder(self) -> None:
        feeder = self._testbed.feeder
        if feeder is None:
            return
        if feeder.error is not None:
            raise feeder.error
        aborted = f", {feeder.aborted:,} taken back" if feeder.aborted else ""
        records = self._testbed.workload.records
        self._screen.footer = f"{self._screen.elapsed_s:.0f} s · producer: {feeder.committed:,} {records}{aborted}"

    def _pause(self, duration_s: float) -> None:
        until_s = time.monotonic() + duration_s
        while time.monotonic() < until_s:
            self._screen.refresh()
            time.sleep(0.05)

    def _note(self, who: str, what: str, text: str, *, bad: bool = False) -> None:
        self._moments.append(Moment(time.time(), who, what, text))
        self._screen.moment(text, bad=bad)


def count(testbed: DemoTestbed) -> list[Outcome]:
    """Reads all topics through the independent client and counts."""
    outcomes = []
    for guarantee in GUARANTEES:
        topics = DemoTopics.of(testbed.prefix, guarantee)
        source, output, rejected = (
            read(testbed.broker.bootstrap, topic) for topic in (topics.source, topics.output, topics.rejected)
        )
        outcomes.append(testbed.workload.compare(guarantee, source, output, rejected))
    return outcomes
