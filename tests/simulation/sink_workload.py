"""Drivers and tasks of the Spark sink in a simulated world, without Spark: the sink, its transactions, its ledger and
its writers are the real ones. What stands in for Spark is here: a checkpoint, a driver that plans batches, a scheduler
that runs each task until one attempt succeeds.

Drivers and tasks are killed and frozen at any step. A driver that is gone is followed by another one with the same
checkpoint, while the first may wake up; a task that is frozen, or only slow, gets a second attempt beside it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

from semel.client.cluster import Cluster
from semel.client.errors import KafkaError
from semel.client.group.offset_requests import committed_offsets, offset_fetch_request
from semel.client.types import TopicPartition
from semel.protocol.messages.offsets import OFFSET_FETCH
from semel.spark import writing
from semel.spark.base_sink import SinkError
from semel.spark.encoding import Encoder, TargetError, Targets, routing_of
from semel.spark.ledger import LedgerEntry, MicroBatch, plan_of, topic_of
from semel.spark.sink import Sink
from semel.spark.sink_options import SinkOptions
from semel.spark.transaction import RefusedError
from semel.spark.writing import TASK_BITS, Report, write_blobs
from tests.simulation.operating_system import ClientProcess, client_processes, current_process, wait_for
from tests.simulation.producer_process import WireClient
from tests.simulation.workloads import Disturbances, ask, read_rows
from tests.simulation.world import TOPIC, World, simulated

APPLICATION, SINK, SINK_PARTITIONS = "app", "out", 3
ROWS, LARGEST_BATCH = 120, 15
TRANSACTION_TIMEOUT_MS = 15_000
TASK_ATTEMPTS = 4
SEND_STRIKE_RATE = 0.004  # of writes to a socket, soon after which something happens to the broker
STEP_S = 0.5  # between two looks of the scheduler at its tasks
DRAIN_S = 600.0  # virtual
OFFSET_FETCH_VERSION = 8


class Checkpoint:
    """Spark's, on storage that outlives drivers: the planned range of each batch, and which are done."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._plans = 0
        self.offsets: list[tuple[int, str]] = []  # end, and the text of the file
        self.done = 0  # batches

    def plan(self) -> int:
        """The next batch to run: one that was planned before and is not done, or a new one."""
        if self.done == len(self.offsets):
            start = self.offsets[-1][0] if self.offsets else 0
            end = min(ROWS, start + self._rng.randrange(1, LARGEST_BATCH))
            self._plans += 1
            self.offsets.append((end, f"plan {self._plans}: {_offset_text(end)}"))
        return self.done

    @property
    def is_complete(self) -> bool:
        return self.done == len(self.offsets) and bool(self.offsets) and self.offsets[-1][0] == ROWS

    def batch(self, number: int) -> MicroBatch:
        start, before = self.offsets[number - 1] if number else (0, "")
        end, text = self.offsets[number]
        plan_before = plan_of(before) if before else ""
        return MicroBatch("query", number, [_offset_text(start)], [_offset_text(end)], plan_of(text), plan_before)

    def rows(self, number: int) -> range:
        return range(self.offsets[number - 1][0] if number else 0, self.offsets[number][0])


def _offset_text(offset: int) -> str:
    return json.dumps({TOPIC: {"0": offset}})


class _Run(NamedTuple):
    """In place of a QueryRun."""

    run_id: str
    short_lived: str = ""

    def is_stateful(self) -> bool:
        return False


class _Frame(NamedTuple):
    """In place of a DataFrame."""

    rows: range

    @property
    def write(self) -> _Frame:
        return self

    def format(self, _: str) -> _Frame:
        return self

    def mode(self, _: str) -> _Frame:
        return self

    def save(self) -> None:
        """A batch that is written runs into nothing."""


class TaskFailedError(Exception):
    """All attempts at a task failed."""


EXPECTED = (KafkaError, SinkError, TargetError, TaskFailedError, type(None))  # the query is started again


class _Attempt:
    """One of a task: a process that writes, and what it reported."""

    def __init__(self, spark: SimulatedSpark, name: str, write: Callable[[], list[Report]]) -> None:
        self.reports: list[Report] | None = None

        def work() -> None:
            self.reports = write()

        self.process = spark.new_process(name, work)
        self.began_s = spark.world.now_s


class SimulatedSpark:
    """One cluster: driver processes, one after the other or two at once, and the processes of their tasks."""

    def __init__(self, world: World, disturbances: Disturbances) -> None:
        self.world = world
        self.disturbances = disturbances
        rng = world.rng
        self.checkpoint = Checkpoint(rng)
        self.disturbed = True
        self.drivers: list[ClientProcess] = []
        self.tasks: list[ClientProcess] = []
        self._cut_rate = rng.choice([0.0, 0.03, 0.1])
        self._preemption_rate = rng.random() * 0.1
        self._task_count = rng.randrange(1, SINK_PARTITIONS + 1)
        self._slow_s = rng.choice([1.0, 8.0])  # after so long an attempt gets another one beside it
        self._attempts = 0
        self._running: dict[str, int] = {}  # the batch of each driver
        request_ms = rng.choice([300, 1_000])
        self._options = SinkOptions(
            bootstrap_servers="broker:9092",
            application_id=APPLICATION,
            topic=SINK,
            transaction_timeout_ms=TRANSACTION_TIMEOUT_MS,
            client={
                "request.timeout.ms": request_ms,
                "delivery.timeout.ms": rng.choice([1_500, 8_000]),
                "max.block.ms": rng.choice([1_500, 8_000]),
                "retry.backoff.ms": 20,
                "batch.size": rng.choice([100, 16_384]),
            },
        )
        self.start_driver()
        self._next()

    def new_process(self, name: str, work: Callable[[], None]) -> ClientProcess:
        process = ClientProcess(self.world, name, work)
        process.cut_rate = self._cut_rate if self.disturbed else 0.0
        process.preemption_rate, process.preemption_s = self._preemption_rate, 0.05
        process.on_send = lambda: self.disturbances.maybe_strike_soon(SEND_STRIKE_RATE)
        return process

    # --- drivers ---
    def start_driver(self) -> None:
        name = f"driver{len(self.drivers)}"
        driver = self.new_process(name, lambda: self._drive(name))
        self.drivers.append(driver)
        driver.on_end = lambda: self._driver_ended(driver)
        self.world.note(f"{name} starts")

    def _drive(self, name: str) -> None:
        checkpoint = self.checkpoint
        with closing(Sink(self._options)) as sink:
            sink._run = _Run(name)  # type: ignore[assignment]
            sink.job = self._job
            while not checkpoint.is_complete:
                number = self._running[name] = checkpoint.plan()
                sink._batch(_Frame(checkpoint.rows(number)), checkpoint.batch(number))
                report = sink.reports[-1] if sink.reports else None
                self.world.note(f"{name}: batch {number} {report.verdict if report else 'done'}")
                wait_for(lambda: False, self.world.rng.random() * 0.2)  # it may be killed before it says so
                if checkpoint.done > number:
                    raise SinkError("another driver has the checkpoint")
                checkpoint.done = number + 1

    def _driver_ended(self, driver: ClientProcess) -> None:
        error = driver.error
        self.world.note(f"{driver.name} ended: {error!r}"[:300])
        is_refused = isinstance(error, RefusedError) and "is in use" not in str(error)
        is_stale = self._running.get(driver.name, 0) < self.checkpoint.done  # it was frozen while others went on
        if (is_refused and not is_stale) or not isinstance(error, EXPECTED):
            raise AssertionError(f"{driver.name} ended: {error!r}") from error
        if driver is self.drivers[-1] and not self.checkpoint.is_complete:
            self.world.after(self.world.rng.random() * 2, self._start_next)

    def _start_next(self) -> None:
        if self.drivers[-1].is_over and not self.checkpoint.is_complete:
            self.start_driver()

    # --- tasks ---
    def _job(
        self, frame: _Frame, options: SinkOptions, targets: Targets, batch: MicroBatch, handle: Any
    ) -> list[Report]:
        """Encodes rows, brings those of a partition to one task, and runs the tasks."""
        routing = routing_of(options, targets, batch.batch_id, handle.settings)
        keys = [b"k%d" % (row % 7) for row in frame.rows]
        table = pa.RecordBatch.from_pydict({"key": keys, "value": [b"%d" % row for row in frame.rows]})
        blobs = list(Encoder(routing, 0).blobs(iter([table])))
        driver, count = current_process(), self._task_count
        shares = [[blob for blob in blobs if blob[0] % count == task] for task in range(count)]
        tasks = [self._writing(task, handle, targets, options, share) for task, share in enumerate(shares)]
        first = [self._attempt(driver, batch, task, write) for task, write in enumerate(tasks)]
        reports: list[Report] = []
        for task, write in enumerate(tasks):
            reports += self._run_task(driver, batch, task, write, [first[task]])
        return reports

    def _writing(
        self, task: int, handle: Any, targets: Targets, options: SinkOptions, blobs: list[Any]
    ) -> Callable[[], list[Report]]:
        def write() -> list[Report]:
            process = current_process()
            self._attempts += 1
            process.mark = (task, self._attempts << TASK_BITS | task)  # type: ignore[attr-defined]
            return write_blobs(handle, targets, options.precautions._replace(wait_s=3.0), iter(blobs))

        return write

    def _attempt(
        self, driver: ClientProcess, batch: MicroBatch, task: int, write: Callable[[], list[Report]]
    ) -> _Attempt:
        attempt = _Attempt(self, f"{driver.name}-b{batch.batch_id}-t{task}", write)
        self.tasks.append(attempt.process)
        return attempt

    def _run_task(
        self,
        driver: ClientProcess,
        batch: MicroBatch,
        task: int,
        write: Callable[[], list[Report]],
        attempts: list[_Attempt],
    ) -> list[Report]:
        """What the first attempt that ends well reported. One that fails is followed by the next; one that is slow gets
        another one beside it, and is not always ended when that one has won."""
        ended = 0
        while True:
            wait_for(lambda seen=ended: sum(attempt.process.is_over for attempt in attempts) > seen, STEP_S)  # type: ignore[misc]
            ended = sum(attempt.process.is_over for attempt in attempts)
            won = next((attempt.reports for attempt in attempts if attempt.reports is not None), None)
            if won is not None:
                for attempt in attempts:
                    if self.world.rng.random() < 0.7:
                        attempt.process.kill()
                return won
            living = [attempt for attempt in attempts if not attempt.process.is_over]
            if len(attempts) >= TASK_ATTEMPTS and not living:
                raise TaskFailedError(f"task {task} failed: {attempts[-1].process.error!r}")
            is_slow = len(living) == 1 and self.world.now_s - living[0].began_s > self._slow_s
            if (not living or is_slow) and len(attempts) < TASK_ATTEMPTS:
                attempts.append(self._attempt(driver, batch, task, write))

    # --- faults ---
    def calm(self) -> None:
        self.disturbed = False
        for process in [*self.drivers, *self.tasks]:
            process.cut_rate = 0.0

    def _next(self) -> None:
        self.world.after(self.world.rng.expovariate(1 / 0.7), self._strike)

    def _strike(self) -> None:
        if not self.disturbed:
            return
        rng = random.Random(self.world.rng.random())  # a fault that is left out changes no other
        tasks = [task for task in self.tasks if not task.is_over]
        living = [driver for driver in self.drivers if not driver.is_over]
        if self.world.may_strike():
            what = rng.choice(["kill driver", "freeze driver", "kill task", "freeze task"])
            if what == "kill driver" and living:
                rng.choice(living).kill()
            elif what == "freeze driver" and living:
                living[-1].freeze(rng.choice([rng.random() * 2, rng.expovariate(1 / 8.0)]))
                if rng.random() < 0.7:
                    self.world.after(rng.random() * 3, self.start_driver)
            elif what == "kill task" and tasks:
                rng.choice(tasks).kill()
            elif what == "freeze task" and tasks:
                rng.choice(tasks).freeze(rng.choice([rng.random() * 2, rng.expovariate(1 / 8.0)]))
        self._next()


@contextmanager
def _without_spark() -> Any:
    """Tasks learn who they are from their process, and each has connections of its own."""

    @contextmanager
    def cluster(settings: Any) -> Any:
        with Cluster(settings) as made:
            yield made

    identity, workers = writing.task_identity, writing.worker_cluster
    writing.task_identity = lambda: current_process().mark  # type: ignore[attr-defined]
    writing.worker_cluster = cluster
    try:
        yield
    finally:
        writing.task_identity, writing.worker_cluster = identity, workers


def sink(seed: int, data: Path, on_start: Callable[[World], None] = lambda world: None) -> World:
    """Drivers and tasks of one query, every fault. Raises AssertionError if a promise is broken."""
    with simulated(seed, data) as world, client_processes(world), _without_spark():
        on_start(world)
        rng = world.rng
        world.broker.topics[SINK] = SINK_PARTITIONS
        world.broker.start()
        assert world.run(lambda: world.broker.is_up)
        disturbances = Disturbances(world, every_s=rng.choice([2.0, 6.0]))
        spark = SimulatedSpark(world, disturbances)
        world.stall_rate = rng.random() * 0.01
        world.run(lambda: spark.checkpoint.is_complete, 40.0)
        disturbances.end()
        world.stall_rate = 0.0
        spark.calm()
        assert world.run(lambda: spark.checkpoint.is_complete, DRAIN_S), f"stuck at batch {spark.checkpoint.done}"
        world.run_for(2 * TRANSACTION_TIMEOUT_MS / 1000)
        _check(world)
        return world


def _check(world: World) -> None:
    output = [dict(read_rows(world, partition, committed=True, topic=SINK)) for partition in range(SINK_PARTITIONS)]
    values = sorted(int(value or b"") for rows in output for value in rows.values())
    assert values == list(range(ROWS)), f"rows are missing or doubled: {values}"
    entries = [
        msgspec.json.decode(value or b"", type=LedgerEntry)
        for _, value in read_rows(world, 0, committed=True, topic=topic_of(APPLICATION))
    ]
    assert [entry.sequence for entry in entries] == list(range(len(entries))), "entries are missing or doubled"
    for before, entry in pairwise(entries):
        assert entry.starts == before.ends, f"{entry} does not follow {before}"
    for entry in entries:
        written = [
            int(output[part.partition][offset] or b"")
            for part in entry.written
            for offset in range(part.first_offset, part.last_offset + 1)
            if offset in output[part.partition]
        ]
        start, end = (json.loads(text[0] or "{}")[TOPIC]["0"] for text in (entry.starts, entry.ends))
        assert sorted(written) == list(range(start, end)), f"{entry} is in the output as {written}"
        assert entry.rows == end - start, f"{entry} counts {entry.rows} rows"
    request = offset_fetch_request(APPLICATION, [TopicPartition(TOPIC, 0)], True, OFFSET_FETCH_VERSION)
    response = ask(world, WireClient(world), OFFSET_FETCH, request, OFFSET_FETCH_VERSION)
    committed = committed_offsets(response, APPLICATION, OFFSET_FETCH_VERSION)
    assert committed[TopicPartition(TOPIC, 0)].offset == ROWS, f"the group has {committed}"
