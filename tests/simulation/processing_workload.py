"""Instances of `semel.process` in a simulated world: the real loop, consumer and producer, with their threads.

Instances are killed, frozen (they come back as zombies), stopped and get stuck in their function, while the broker has
its faults. Each output names the input that it was made of.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from semel.client.errors import KafkaError
from semel.client.group.offset_requests import committed_offsets, offset_fetch_request
from semel.client.types import TopicPartition
from semel.patterns import process as loop
from semel.patterns.process import Processor
from semel.patterns.process_output import Output
from semel.protocol.messages.offsets import OFFSET_FETCH
from tests.simulation.group_workload import SlowWriter, drawn_protocol
from tests.simulation.operating_system import ClientProcess, client_processes
from tests.simulation.producer_process import WireClient
from tests.simulation.workloads import Disturbances, ask, read_rows
from tests.simulation.world import PARTITIONS, TOPIC, World, simulated

GUARANTEES = ("exactly_once", "exactly_once", "at_least_once", "at_most_once")
APPLICATION, SINK, SINK_PARTITIONS = "app", "out", 2
INSTANCES, WRITERS, TRANSACTIONS = 3, 2, 12
TRANSACTION_TIMEOUT_MS = 10_000
POLL_INTERVAL_MS = 7_000
SEND_STRIKE_RATE = 0.01  # of writes to a socket, soon after which something happens to the broker
DRAIN_S = 300.0  # virtual
OFFSET_FETCH_VERSION = 8

Place = tuple[int, int]  # of an input: partition, offset


class Instances:
    """The instances of one application, what happens to them, and who takes the place of one that ended."""

    def __init__(self, world: World, guarantee: str, protocol: str, disturbances: Disturbances) -> None:
        self._world = world
        self._disturbances = disturbances
        self.guarantee = guarantee
        self._group: dict[str, Any] = {"group.protocol": protocol}
        if protocol == "classic":
            self._group |= {"session.timeout.ms": 6_000, "heartbeat.interval.ms": 500}
        rng = world.rng
        self._is_named = rng.random() < 0.5  # an instance that is started again has the name of the one before
        self._options: dict[str, Any] = {
            "commit_interval_ms": rng.choice([20, 200, 1_000]),
            "max_records": rng.choice([1, 5, 1_000]),
            "tables": rng.random() < 0.3,
        }
        self._timeouts_ms = {
            "request": rng.choice([300, 1_000]),
            "delivery": rng.choice([1_000, 8_000]),
            "block": rng.choice([300, 5_000]),
        }
        self._cut_rate = rng.choice([0.0, 0.05, 0.15])
        self._preemption_rate = rng.random() * 0.05
        self.disturbed = True
        self.living: dict[ClientProcess, Processor] = {}
        self._stuck: dict[ClientProcess, float] = {}
        self._count = 0
        for number in range(INSTANCES):
            self.start(f"i{number}")
        self._next()

    def start(self, instance: str) -> None:
        world = self._world
        self._count += 1
        name = f"{instance}.{self._count}"

        def work() -> None:
            processor = self.living[process] = self._processor(instance, process)
            processor.run()

        process = ClientProcess(world, name, work)
        process.cut_rate = self._cut_rate if self.disturbed else 0.0
        process.preemption_rate = self._preemption_rate
        process.on_end = lambda: self._ended(process, instance)
        process.on_send = lambda: self._disturbances.maybe_strike_soon(SEND_STRIKE_RATE)
        world.note(f"{name} starts")

    def _processor(self, instance: str, process: ClientProcess) -> Processor:
        tables, timeouts_ms = self._options["tables"], self._timeouts_ms

        def made_of(record: Any) -> Output:
            self._maybe_stick(process)
            value = b"%d:%d:%s" % (record.partition, record.offset, record.value)
            return Output(value, partition=record.partition % SINK_PARTITIONS)

        def made_of_table(table: Any) -> Any:
            self._maybe_stick(process)
            rows = table.select(["partition", "offset", "value"]).to_pylist()
            values = [b"%d:%d:%s" % (row["partition"], row["offset"], row["value"]) for row in rows]
            targets = [row["partition"] % SINK_PARTITIONS for row in rows]
            return table.from_pydict({"value": values, "to_partition": targets})

        return Processor(
            TOPIC,
            SINK,
            made_of_table if tables else made_of,
            application_id=APPLICATION,
            guarantee=self.guarantee,
            bootstrap_servers="broker:9092",
            instance=instance if self._is_named else None,
            transaction_timeout_ms=TRANSACTION_TIMEOUT_MS,
            consumer={
                **self._group,
                "max.poll.interval.ms": POLL_INTERVAL_MS,
                "request.timeout.ms": timeouts_ms["request"],
                "default.api.timeout.ms": timeouts_ms["block"],
                "retry.backoff.ms": 20,
                "isolation.level": "read_committed",
            },
            producer={
                "request.timeout.ms": timeouts_ms["request"],
                "delivery.timeout.ms": timeouts_ms["delivery"],
                "max.block.ms": timeouts_ms["block"],
                "retry.backoff.ms": 20,
            },
            **self._options,
        )

    def _maybe_stick(self, process: ClientProcess) -> None:
        seconds = self._stuck.pop(process, 0.0)
        if seconds:
            self._world.fault(f"{process.name} is stuck for {seconds:.1f} s")
            loop.time.sleep(seconds)

    def _ended(self, process: ClientProcess, instance: str) -> None:
        """As under a supervisor: another one follows."""
        self.living.pop(process, None)
        if process.error is not None:
            self._world.note(f"{process.name} ended: {process.error!r}")
            if not isinstance(process.error, KafkaError):
                raise AssertionError(f"{process.name} ended: {process.error!r}") from process.error
        elif not process.was_killed:
            self._world.note(f"{process.name} stopped")
        if self.disturbed:
            self._world.after(self._world.rng.random() * 3, lambda: self.start(instance) if self.disturbed else None)

    def kill_all(self) -> None:
        self.disturbed = False
        for process in list(self.living):
            process.kill()

    def _next(self) -> None:
        self._world.after(self._world.rng.expovariate(1 / 1.5), self._strike)

    def _strike(self) -> None:
        if not self.disturbed:
            return
        rng = random.Random(self._world.rng.random())  # a fault that is left out changes no other
        if self.living and self._world.may_strike():
            process = rng.choice(list(self.living))
            what = rng.choice(["kill", "freeze", "stick", "stop"])
            if what == "kill":
                process.kill()
            elif what == "freeze":
                process.freeze(rng.choice([rng.random() * 3, rng.expovariate(1 / 10.0)]))
            elif what == "stick":
                self._stuck[process] = rng.choice(
                    [1.0, 2 * POLL_INTERVAL_MS / 1000, 1.5 * TRANSACTION_TIMEOUT_MS / 1000]
                )
            else:
                self._world.fault(f"{process.name} is stopped")
                self.living[process].stop()
        self._next()


def processing(
    seed: int,
    data: Path,
    on_start: Callable[[World], None] = lambda world: None,
    guarantee: str | None = None,
    protocol: str | None = None,
) -> World:
    """Instances of one application and writers of their input, every fault. AssertionError: a promise is broken."""
    with simulated(seed, data) as world, client_processes(world):
        on_start(world)
        rng = world.rng
        world.broker.topics[SINK] = SINK_PARTITIONS
        world.broker.start()
        assert world.run(lambda: world.broker.is_up)
        chosen = rng.choice(GUARANTEES)
        disturbances = Disturbances(world, every_s=rng.choice([1.0, 4.0]))
        instances = Instances(world, guarantee or chosen, protocol or drawn_protocol(seed), disturbances)
        world.note(instances.guarantee)
        # A commit that is tried again may arrive once more behind later ones, and sets the offsets back: brokers do not
        # order the connections of a client, and at_most_once has no transaction that would refuse it.
        world.cuts_lose_requests = instances.guarantee == "at_most_once"
        writers = [SlowWriter(world, f"w{number}", f"w{number}", TRANSACTIONS) for number in range(WRITERS)]
        world.processes += writers
        world.stall_rate = rng.random() * 0.01
        assert world.run(lambda: all(writer.is_over for writer in writers), DRAIN_S), "the writers did not end"
        world.run_for(rng.random() * 3)
        disturbances.end()
        world.stall_rate = 0.0
        instances.kill_all()
        assert world.run(lambda: world.broker.is_up, DRAIN_S)
        world.run_for(60.0)  # transactions that were left open are aborted at their timeout
        inputs, before = _inputs(world), _outputs(world)
        committed = _committed(world)
        _check_agreement(instances.guarantee, inputs, committed, before)
        instances.start("last")
        ends = {partition: max(at for part, at in inputs if part == partition) + 1 for partition in _parts(inputs)}
        deadline_s = world.now_s + DRAIN_S
        while any(_committed(world).get(partition, 0) < end for partition, end in ends.items()):
            assert world.now_s < deadline_s, f"not everything was processed: {_committed(world)} of {ends}"
            world.run_for(1.0)
        instances.kill_all()
        world.run_for(2 * TRANSACTION_TIMEOUT_MS / 1000)
        _check_end(instances.guarantee, inputs, committed, _outputs(world))
        return world


def _parts(inputs: dict[Place, bytes | None]) -> set[int]:
    return {partition for partition, _ in inputs}


def _inputs(world: World) -> dict[Place, bytes | None]:
    return {
        (partition, offset): value
        for partition in range(PARTITIONS)
        for offset, value in read_rows(world, partition, committed=True)
    }


def _outputs(world: World) -> Counter[Place]:
    found: Counter[Place] = Counter()
    for partition in range(SINK_PARTITIONS):
        for _, value in read_rows(world, partition, committed=True, topic=SINK):
            assert value is not None
            source, offset, _ = value.split(b":", 2)
            found[int(source), int(offset)] += 1
    return found


def _committed(world: World) -> dict[int, int]:
    places = [TopicPartition(TOPIC, partition) for partition in range(PARTITIONS)]
    request = offset_fetch_request(APPLICATION, places, True, OFFSET_FETCH_VERSION)
    while True:
        response = ask(world, WireClient(world), OFFSET_FETCH, request, OFFSET_FETCH_VERSION)
        try:
            found = committed_offsets(response, APPLICATION, OFFSET_FETCH_VERSION)
        except KafkaError:  # offsets of a transaction that is about to end
            world.run_for(0.5)
            continue
        return {place.partition: at.offset for place, at in found.items()}


def _check_agreement(
    guarantee: str, inputs: dict[Place, bytes | None], committed: dict[int, int], outputs: Counter[Place]
) -> None:
    """Offsets and output, when everyone was killed in the middle of it."""
    for place in inputs:
        is_committed = place[1] < committed.get(place[0], 0)
        count = outputs[place]
        if guarantee == "exactly_once":
            assert count == is_committed, f"input {place} is {count} times in the output, committed: {committed}"
        elif guarantee == "at_least_once":
            assert count or not is_committed, f"input {place} is not in the output, committed: {committed}"
        else:
            assert count <= is_committed, f"input {place} is {count} times in the output, committed: {committed}"
    assert set(outputs) <= set(inputs), f"made of nothing: {set(outputs) - set(inputs)}"


def _check_end(
    guarantee: str, inputs: dict[Place, bytes | None], committed: dict[int, int], outputs: Counter[Place]
) -> None:
    """Without faults everything that was not committed before is processed once."""
    for place in inputs:
        count, is_new = outputs[place], place[1] >= committed.get(place[0], 0)
        if guarantee == "exactly_once" or (guarantee == "at_most_once" and is_new):
            assert count == 1, f"input {place} is {count} times in the output"
        elif guarantee == "at_least_once":
            assert count >= 1, f"input {place} is not in the output"
        else:
            assert count <= 1, f"input {place} is {count} times in the output"
