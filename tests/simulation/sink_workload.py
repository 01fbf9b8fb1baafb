"""Drivers and tasks of the Spark sink in a simulated world, without Spark: the sink, its transactions, its ledger and
its writers are the real ones. What stands in for Spark is here: a checkpoint, a driver that plans batches, a scheduler
that runs each task until one attempt succeeds.

Drivers and tasks are killed and frozen at any step, often while a transaction is opened or ended. A driver that is gone
is followed by another one with the same checkpoint, while the first may wake up; or with an older copy of it, which is
refused unless nothing was written since. A task that is frozen, or only slow, gets a second attempt beside it: that one
gets its rows in another order, or computes them anew and sends some to other partitions. Once, all are killed in the
middle of it, and rows, ledger and offsets must agree.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

from semel.client.cluster import Cluster
from semel.client.errors import KafkaError
from semel.client.group.offset_requests import committed_offsets, offset_fetch_request
from semel.client.producer.batches import Identity
from semel.client.producer.handle import PartitionWriter, TransactionOwner
from semel.client.types import TopicPartition
from semel.protocol.messages.offsets import OFFSET_FETCH
from semel.protocol.messages.records import PRODUCE
from semel.protocol.messages.transactions import END_TXN, INIT_PRODUCER_ID, TXN_OFFSET_COMMIT
from semel.spark import writing
from semel.spark.base_sink import SinkError
from semel.spark.encoding import Encoder, Routing, TargetError, Targets, routing_of
from semel.spark.ledger import LedgerEntry, MicroBatch, Verdict, plan_of, topic_of
from semel.spark.sink import Sink
from semel.spark.sink_options import SinkOptions
from semel.spark.transaction import RefusedError, UnevenError
from semel.spark.writing import TASK_BITS, Report, write_blobs
from tests.simulation.aimed_faults import AimedFaults
from tests.simulation.call_timeouts import kept_timeouts
from tests.simulation.operating_system import ClientProcess, client_processes, current_process, wait_for
from tests.simulation.producer_process import WireClient
from tests.simulation.workloads import Disturbances, ask, read_rows
from tests.simulation.world import TOPIC, World, simulated

APPLICATION, SINK, SINK_PARTITIONS = "app", "out", 3
ROWS, LARGEST_BATCH = 200, 15
TRANSACTION_TIMEOUT_MS = 15_000
TASK_ATTEMPTS = 4
SEND_STRIKE_RATE = 0.004  # of writes to a socket, soon after which something happens to the broker
STEP_S = 0.5  # between two looks of the scheduler at its tasks
SHUFFLE_SOURCES = 2  # tasks whose rows a task reads, of one after the other
AMBUSH_S = 5.0  # if no transaction goes on for so long, all are killed all the same
DRAIN_S = 600.0  # virtual
OFFSET_FETCH_VERSION = 8
MOMENTS = {INIT_PRODUCER_ID: 0.2, PRODUCE: 0.03, TXN_OFFSET_COMMIT: 0.1, END_TXN: 0.5}


def _calls_s(user: TransactionOwner | PartitionWriter, *args: Any, **kwargs: Any) -> float:
    return user.cluster.settings.default_api_timeout_ms / 1000


TIMEOUTS = {
    (TransactionOwner, "own"): _calls_s,
    (TransactionOwner, "begin"): _calls_s,
    (TransactionOwner, "send_offsets"): _calls_s,
    (TransactionOwner, "end"): _calls_s,
    (TransactionOwner, "last_sequences"): _calls_s,
    (PartitionWriter, "open"): _calls_s,
    (PartitionWriter, "finish"): _calls_s,
}


class Checkpoint:
    """Spark's, on storage that outlives drivers: the planned range of each batch, and which are done."""

    def __init__(self, rng: random.Random, plans: Iterator[int]) -> None:
        self._rng = rng
        self._plans = plans
        self.offsets: list[tuple[int, str]] = []  # end, and the text of the file
        self.done = 0  # batches

    def older(self, batches: int) -> Checkpoint:
        """A copy from when so few were done; the next one was planned then, or not."""
        copy = Checkpoint(self._rng, self._plans)
        copy.done = max(0, self.done - batches)
        copy.offsets = self.offsets[: copy.done + self._rng.randrange(2)]
        return copy

    def plan(self) -> int:
        """The next batch to run: one that was planned before and is not done, or a new one."""
        if self.done == len(self.offsets):
            start = self.offsets[-1][0] if self.offsets else 0
            end = min(ROWS, start + self._rng.randrange(1, LARGEST_BATCH))
            self.offsets.append((end, f"plan {next(self._plans)}: {_offset_text(end)}"))
        return self.done

    @property
    def has_begun(self) -> bool:
        return self.done > 0

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


Blob = tuple[int, int, int, memoryview]


def _shares(rows: range, count: int) -> list[list[int]]:
    return [[row for row in rows if row % count == number] for number in range(count)]


def _shuffle_output(routing: Routing, rows: list[int]) -> list[Blob]:
    return list(_encoded(routing, 0, rows, None))


def _encoded(routing: Routing, task: int, rows: list[int], partitions: list[int] | None) -> Iterator[Blob]:
    """By key, or to given partitions."""
    columns: dict[str, Any] = {"key": [b"k%d" % (row % 7) for row in rows], "value": [b"%d" % row for row in rows]}
    if partitions is not None:
        columns["partition"] = pa.array(partitions, pa.int32())
    return Encoder(routing, task).blobs(iter([pa.RecordBatch.from_pydict(columns)] if rows else []))


class TaskFailedError(Exception):
    """All attempts at a task failed."""


EXPECTED = (KafkaError, SinkError, TargetError, TaskFailedError, UnevenError, type(None))  # the query is started again


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
        self.aim = AimedFaults(world, disturbances, MOMENTS)
        self.checkpoint = Checkpoint(rng, count(1))
        self._former: Checkpoint | None = None  # the right one, if the present one is refused
        self._restores = rng.random() < 0.5  # older copies of the checkpoint, now and then
        self.disturbed = True
        self.drivers: list[ClientProcess] = []
        self.tasks: list[ClientProcess] = []
        self._every_s = rng.choice([0.7, 2.0, 6.0])  # something happens to a driver or a task
        self._cut_rate = rng.choice([0.0, 0.03, 0.1])
        self._preemption_rate = rng.random() * 0.1
        self._task_count = rng.randrange(1, SINK_PARTITIONS + 1)
        self._slow_s = rng.choice([1.0, 8.0])  # after so long an attempt gets another one beside it
        self.is_shuffled = rng.random() < 0.5  # else each attempt computes its rows anew
        self.is_stopped = False
        self._attempts = 0
        self._running: dict[str, tuple[Checkpoint, int]] = {}  # the batch of each driver
        request_ms, api_ms = rng.choice([300, 1_000]), rng.choice([800, 800, 3_000])
        self.aim.timeout_s = api_ms / 1000
        self._options = SinkOptions(
            bootstrap_servers="broker:9092",
            application_id=APPLICATION,
            topic=SINK,
            transaction_timeout_ms=TRANSACTION_TIMEOUT_MS,
            client={
                "request.timeout.ms": request_ms,
                "default.api.timeout.ms": api_ms,
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
        self.aim.watch(process)
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
                number = checkpoint.plan()
                self._running[name] = (checkpoint, number)
                sink._batch(_Frame(checkpoint.rows(number)), checkpoint.batch(number))
                verdict = sink.reports[-1].verdict if sink.reports else "done"
                self.world.note(f"{name}: batch {number} {verdict}")
                if checkpoint is self.checkpoint and verdict == Verdict.WRITE.value:
                    self._former = None  # the ledger goes on with this one
                wait_for(lambda: False, self.world.rng.random() * 0.2)  # it may be killed before it says so
                if checkpoint.done > number:
                    raise SinkError("another driver has the checkpoint")
                checkpoint.done = number + 1

    def _driver_ended(self, driver: ClientProcess) -> None:
        error = driver.error
        self.world.note(f"{driver.name} ended: {error!r}"[:300])
        checkpoint, number = self._running.get(driver.name, (self.checkpoint, 0))
        is_refused = isinstance(error, RefusedError) and "is in use" not in str(error)
        is_stale = checkpoint is not self.checkpoint or number < checkpoint.done  # others went on while it was frozen
        if is_refused and not is_stale:
            if self._former is None:
                raise AssertionError(f"{driver.name} ended: {error!r}") from error
            self.world.note("the older checkpoint is refused")
            self.checkpoint, self._former = self._former, None
        elif not isinstance(error, EXPECTED):
            raise AssertionError(f"{driver.name} ended: {error!r}") from error
        if driver is self.drivers[-1] and not self.is_stopped and not self.checkpoint.is_complete:
            self.world.after(self.world.rng.random() * 2, self._start_next)

    def _start_next(self) -> None:
        if self.drivers[-1].is_over and not self.is_stopped and not self.checkpoint.is_complete:
            self.start_driver()

    def restore_older_checkpoint(self, rng: random.Random) -> None:
        """By somebody who thinks that it is needed, and starts the query again."""
        if self.checkpoint.has_begun and self._former is None:
            self._former, self.checkpoint = self.checkpoint, self.checkpoint.older(rng.randrange(4))
            self.world.fault(f"the checkpoint is set back from {self._former.done} batches to {self.checkpoint.done}")
            if rng.random() < 0.7:
                self.drivers[-1].kill()
            if self.drivers[-1].is_over or rng.random() < 0.5:
                self.start_driver()

    # --- tasks ---
    def _job(
        self, frame: _Frame, options: SinkOptions, targets: Targets, batch: MicroBatch, handle: Any
    ) -> list[Report]:
        """Brings the rows of a partition to one task, and runs the tasks."""
        routing = routing_of(options, targets, batch.batch_id, handle.settings)
        driver, tasks = current_process(), range(self._task_count)
        sources = [_shuffle_output(routing, rows) for rows in _shares(frame.rows, SHUFFLE_SOURCES)]

        def blobs(task: int, rng: random.Random) -> Iterator[Blob]:
            if self.is_shuffled:
                return self._shuffled(sources, task, rng)
            return self._computed(frame, routing, task, rng)

        writes = [self._writing(task, handle, targets, options, blobs) for task in tasks]
        first = [self._attempt(driver, batch, task, write) for task, write in enumerate(writes)]
        reports: list[Report] = []
        for task, write in enumerate(writes):
            reports += self._run_task(driver, batch, task, write, [first[task]])
        return reports

    def _shuffled(self, sources: list[list[Blob]], task: int, rng: random.Random) -> Iterator[Blob]:
        """What the tasks before have for this one, of each in its order; Spark reads from whoever has something."""
        left = [deque(blob for blob in blobs if blob[0] % self._task_count == task) for blobs in sources]
        while left := [blobs for blobs in left if blobs]:
            yield rng.choice(left).popleft()

    def _computed(self, frame: _Frame, routing: Routing, task: int, rng: random.Random) -> Iterator[Blob]:
        """The rows of a task whose query gives each of them to any of the task's partitions, by chance."""
        mine = [partition for partition in range(SINK_PARTITIONS) if partition % self._task_count == task]
        rows = [row for row in frame.rows if row % self._task_count == task]
        used = rng.sample(mine, rng.randrange(1, len(mine) + 1))
        return _encoded(routing, task, rows, [rng.choice(used) for _ in rows])

    def _writing(
        self,
        task: int,
        handle: Any,
        targets: Targets,
        options: SinkOptions,
        blobs: Callable[[int, random.Random], Iterator[Blob]],
    ) -> Callable[[], list[Report]]:
        def write() -> list[Report]:
            process = current_process()
            self._attempts += 1
            process.mark = (task, self._attempts << TASK_BITS | task)  # type: ignore[attr-defined]
            rng = random.Random(self.world.rng.random())
            return write_blobs(handle, targets, options.precautions._replace(wait_s=3.0), blobs(task, rng))

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
                    if self.world.rng.random() < 0.7 or not self.is_shuffled:
                        attempt.process.kill()
                return won
            living = [attempt for attempt in attempts if not attempt.process.is_over]
            if len(attempts) >= TASK_ATTEMPTS and not living:
                raise TaskFailedError(f"task {task} failed: {attempts[-1].process.error!r}")
            is_slow = len(living) == 1 and self.world.now_s - living[0].began_s > self._slow_s
            if (not living or is_slow) and len(attempts) < TASK_ATTEMPTS:
                attempts.append(self._attempt(driver, batch, task, write))

    # --- faults ---
    def kill_all(self) -> None:
        self.is_stopped = True
        for process in [*self.drivers, *self.tasks]:
            process.kill()

    def go_on(self) -> None:
        self.is_stopped = False
        if not self.checkpoint.is_complete:
            self.start_driver()

    def calm(self) -> None:
        self.disturbed = False
        for process in [*self.drivers, *self.tasks]:
            process.cut_rate = 0.0

    def _next(self) -> None:
        self.world.after(self.world.rng.expovariate(1 / self._every_s), self._strike)

    def _strike(self) -> None:
        if not self.disturbed:
            return
        rng = random.Random(self.world.rng.random())  # a fault that is left out changes no other
        tasks = [task for task in self.tasks if not task.is_over]
        living = [driver for driver in self.drivers if not driver.is_over]
        if self.world.may_strike():
            kinds = ["kill driver", "freeze driver", "kill task", "freeze task"]
            what = rng.choice([*kinds, "restore"] if self._restores else kinds)
            if what == "kill driver" and living:
                rng.choice(living).kill()
            elif what == "freeze driver" and living:
                living[-1].freeze(rng.choice([rng.random() * 2, rng.expovariate(1 / 8.0)]))
                if rng.random() < 0.7:
                    self.world.after(rng.random() * 3, self.start_driver)
            elif what == "restore":
                self.restore_older_checkpoint(rng)
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


@contextmanager
def _fenced_owners() -> Iterator[None]:
    """A driver whose id another one has taken over does not take it back."""
    own, renew = TransactionOwner.own, TransactionOwner.renew
    taken: list[int] = []  # epochs

    def watched_own(owner: TransactionOwner, timeout_s: float | None = None) -> Identity:
        identity = own(owner, timeout_s)
        taken.append(identity.epoch)
        return identity

    def watched_renew(owner: TransactionOwner, timeout_s: float | None = None) -> Identity:
        before = owner._owned()
        identity = renew(owner, timeout_s)
        between = [epoch for epoch in taken if before.epoch < epoch < identity.epoch]
        assert not between, f"{current_process().name} had {before}, others {between}, and it took the id back"
        return identity

    TransactionOwner.own, TransactionOwner.renew = watched_own, watched_renew  # type: ignore[method-assign]
    try:
        yield
    finally:
        TransactionOwner.own, TransactionOwner.renew = own, renew  # type: ignore[method-assign]


def sink(seed: int, data: Path, on_start: Callable[[World], None] = lambda world: None) -> World:
    """Drivers and tasks of one query, every fault. Raises AssertionError if a promise is broken."""
    with (
        simulated(seed, data) as world,
        client_processes(world),
        _without_spark(),
        _fenced_owners(),
        kept_timeouts(world, TIMEOUTS),
    ):
        on_start(world)
        rng = world.rng
        world.broker.topics[SINK] = SINK_PARTITIONS
        world.broker.start()
        assert world.run(lambda: world.broker.is_up)
        disturbances = Disturbances(world, every_s=rng.choice([2.0, 6.0, 20.0]))
        spark = SimulatedSpark(world, disturbances)
        world.stall_rate = rng.random() * 0.01
        # Rows of an attempt that has lost, in a partition that the winner has none for: nobody would see them if they
        # came between audit and EndTxn. So routing must not depend on chance. Here it may, but who has lost is gone.
        world.cuts_lose_requests = rng.random() < 0.5 or not spark.is_shuffled
        world.run(lambda: spark.checkpoint.is_complete, rng.uniform(10.0, 60.0))
        spark.aim.ambush(MOMENTS, spark.kill_all)
        world.run(lambda: spark.is_stopped, AMBUSH_S)
        disturbances.end()
        world.stall_rate = 0.0
        spark.calm()
        spark.kill_all()
        assert world.run(lambda: world.broker.is_up, DRAIN_S)
        world.run_for(2 * TRANSACTION_TIMEOUT_MS / 1000)  # transactions that were left open are aborted
        _check(world)
        spark.go_on()
        assert world.run(lambda: spark.checkpoint.is_complete, DRAIN_S), f"stuck at batch {spark.checkpoint.done}"
        world.run_for(2 * TRANSACTION_TIMEOUT_MS / 1000)
        rows = _check(world)
        assert rows == ROWS, f"{rows} rows were written"
        return world


def _check(world: World) -> int:
    """Rows, ledger and offsets agree. Returns how many rows were written."""
    output = [dict(read_rows(world, partition, committed=True, topic=SINK)) for partition in range(SINK_PARTITIONS)]
    values = sorted(int(value or b"") for rows in output for value in rows.values())
    entries = _entries(world)
    end = _offset(entries[-1].ends) if entries else 0
    assert values == list(range(end)), f"rows are missing or doubled: {values} of {end}"
    assert [entry.sequence for entry in entries] == list(range(len(entries))), "entries are missing or doubled"
    for before, entry in pairwise(entries):
        assert entry.starts == before.ends, f"{entry} does not follow {before}"
    for entry in entries:
        _check_entry(entry, output)
    committed = _committed(world)
    assert committed == (end if entries else None), f"the group has {committed}, the ledger {end}"
    return end


def _check_entry(entry: LedgerEntry, output: list[dict[int, bytes | None]]) -> None:
    written = []
    for part in entry.written:
        offsets = range(part.first_offset, part.last_offset + 1)
        there = [int(output[part.partition][offset] or b"") for offset in offsets if offset in output[part.partition]]
        assert len(there) == part.count, f"{entry} is in the output as {there}"
        for number in range(SHUFFLE_SOURCES):
            of_one = [row for row in there if row % SHUFFLE_SOURCES == number]
            assert of_one == sorted(of_one), f"not in the order of their task: {there}"
        written += there
    start, end = _offset(entry.starts), _offset(entry.ends)
    assert sorted(written) == list(range(start, end)), f"{entry} is in the output as {written}"
    assert entry.rows == end - start, f"{entry} counts {entry.rows} rows"


def _offset(texts: list[str | None]) -> int:
    return int(json.loads(texts[0] or "{}")[TOPIC]["0"])


def _entries(world: World) -> list[LedgerEntry]:
    name = topic_of(APPLICATION)
    if world.broker.node is None or world.broker.node.topics.get(name) is None:
        return []  # nobody came so far
    return [
        msgspec.json.decode(value or b"", type=LedgerEntry)
        for _, value in read_rows(world, 0, committed=True, topic=name)
    ]


def _committed(world: World) -> int | None:
    place = TopicPartition(TOPIC, 0)
    request = offset_fetch_request(APPLICATION, [place], True, OFFSET_FETCH_VERSION)
    response = ask(world, WireClient(world), OFFSET_FETCH, request, OFFSET_FETCH_VERSION)
    found = committed_offsets(response, APPLICATION, OFFSET_FETCH_VERSION)
    return found[place].offset if place in found else None
