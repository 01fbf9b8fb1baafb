"""Instances of `semel.process` in a simulated world: the real loop, consumer and producer, with their threads.

Instances are killed, frozen (they come back as zombies), stopped and get stuck in their function, while the broker has
its faults: at any time, and while they commit or change partitions. At the end all are killed in the middle of it. Each
output names the input that it was made of.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

from semel.client.consumer import Consumer
from semel.client.errors import KafkaError
from semel.client.group.offset_requests import committed_offsets, offset_fetch_request
from semel.client.producer import Producer
from semel.client.producer.deliveries import Delivery, TableDelivery
from semel.client.types import TopicPartition
from semel.patterns import process as loop
from semel.patterns.process import Processor
from semel.patterns.process_output import Output
from semel.patterns.state import KeyedState
from semel.protocol.messages.groups import CONSUMER_GROUP_HEARTBEAT, HEARTBEAT, JOIN_GROUP, SYNC_GROUP
from semel.protocol.messages.offsets import OFFSET_COMMIT, OFFSET_FETCH
from semel.protocol.messages.records import PRODUCE
from semel.protocol.messages.transactions import END_TXN, INIT_PRODUCER_ID, TXN_OFFSET_COMMIT
from tests.simulation.aimed_faults import AimedFaults
from tests.simulation.call_timeouts import kept_timeouts
from tests.simulation.group_workload import STRATEGIES, SlowWriter, drawn_protocol
from tests.simulation.operating_system import ClientProcess, client_processes
from tests.simulation.producer_process import WireClient
from tests.simulation.workloads import Disturbances, ask, read_rows
from tests.simulation.world import PARTITIONS, TOPIC, World, simulated

GUARANTEES = ("exactly_once", "exactly_once", "at_least_once", "at_most_once")
APPLICATION, SINK, SINK_PARTITIONS = "app", "out", 2
WRITERS, TRANSACTIONS = 2, 20
TRANSACTION_TIMEOUT_MS = 10_000
SESSION_TIMEOUT_MS, HEARTBEAT_MS, POLL_INTERVAL_MS = 2_000, 300, 4_000  # a group does not wait long for the dead
BROKER_SETTINGS = {
    "group.min.session.timeout.ms": str(SESSION_TIMEOUT_MS),
    "group.consumer.session.timeout.ms": str(SESSION_TIMEOUT_MS),
    "group.consumer.heartbeat.interval.ms": str(HEARTBEAT_MS),
}
LONGEST_UNIT_MS = 6_000  # long enough to lose partitions and to get others meanwhile
SEND_STRIKE_RATE = 0.01  # of writes to a socket, soon after which something happens to the broker
AMBUSH_S = 5.0  # if nobody commits for so long, all are killed all the same
DRAIN_S = 300.0  # virtual
OFFSET_FETCH_VERSION = 8
COMMITS = {END_TXN: 0.5, TXN_OFFSET_COMMIT: 0.1, OFFSET_COMMIT: 0.1, INIT_PRODUCER_ID: 0.1, PRODUCE: 0.05}
LOSSES = {HEARTBEAT: 0.15, CONSUMER_GROUP_HEARTBEAT: 0.15}
REBALANCES = {JOIN_GROUP: 0.1, SYNC_GROUP: 0.3, HEARTBEAT: 0.04, CONSUMER_GROUP_HEARTBEAT: 0.04}


def _blocks_s(producer: Producer, *_: Any, timeout_ms: float | None = None, **__: Any) -> float:
    return (producer.settings.max_block_ms if timeout_ms is None else timeout_ms) / 1000


def _calls_s(consumer: Consumer, _: Any = None, timeout_ms: float | None = None) -> float:
    return (consumer.settings.default_api_timeout_ms if timeout_ms is None else timeout_ms) / 1000


def _polls_s(_: Consumer, timeout_ms: float = 1000, **__: Any) -> float:
    return timeout_ms / 1000


TIMEOUTS = {
    (Producer, "init_transactions"): _blocks_s,
    (Producer, "send_offsets_to_transaction"): _blocks_s,
    (Producer, "commit_transaction"): _blocks_s,
    (Producer, "abort_transaction"): _blocks_s,
    (Producer, "send"): _blocks_s,
    (Producer, "send_table"): _blocks_s,
    (Producer, "close"): lambda _, timeout_ms: timeout_ms / 1000,
    (Delivery, "result"): lambda _: inf,  # ends with delivery.timeout.ms; a poll that calls a listener does not
    (TableDelivery, "result"): lambda _: inf,
    (Consumer, "partitions_for"): _calls_s,
    (Consumer, "commit"): _calls_s,
    (Consumer, "committed"): _calls_s,
    (Consumer, "poll"): _polls_s,
    (Consumer, "poll_table"): _polls_s,
}
Place = tuple[int, int]  # of an input: partition, offset


class Instances:
    """The instances of one application, what happens to them, and who takes the place of one that ended."""

    timeouts = TIMEOUTS

    def __init__(
        self, world: World, guarantee: str, protocol: str, disturbances: Disturbances, long_units: bool
    ) -> None:
        self._world = world
        self._disturbances = disturbances
        self.aim = AimedFaults(world, disturbances, {**COMMITS, **REBALANCES, **(LOSSES if long_units else {})})
        self.guarantee = guarantee
        self._group: dict[str, Any] = {"group.protocol": protocol}
        if protocol == "classic":
            self._group |= {"session.timeout.ms": SESSION_TIMEOUT_MS, "heartbeat.interval.ms": HEARTBEAT_MS}
            self._group["partition.assignment.strategy"] = world.rng.choice(STRATEGIES)
        rng = world.rng
        self._every_s = rng.choice([1.5, 5.0, 15.0])  # something happens to an instance
        self._is_named = rng.random() < 0.5  # an instance that is started again has the name of the one before
        self._options: dict[str, Any] = {
            "commit_interval_ms": rng.choice([20, 200, 1_000, LONGEST_UNIT_MS]),
            "max_records": rng.choice([1, 5, 1_000]),
            "tables": rng.random() < 0.3,
        }
        self._work_s = rng.choice([0.0, 0.0, 0.3])  # how long the function takes: more records come meanwhile
        self._worked_s: dict[ClientProcess, float] = {}  # when it did last
        self._timeouts_ms = {
            "request": rng.choice([300, 1_000]),
            "delivery": rng.choice([1_000, 8_000]),
            "block": rng.choice([300, 1_000, 5_000]),
            "linger": rng.choice([0, 0, 300]),
        }
        self.aim.timeout_s = self._timeouts_ms["block"] / 1000
        if long_units:
            self._options |= {"commit_interval_ms": LONGEST_UNIT_MS, "max_records": 1_000}
            self.aim.timeout_s = SESSION_TIMEOUT_MS / 1000
        self._cut_rate = rng.choice([0.0, 0.05, 0.15])
        self._preemption_rate = rng.random() * 0.05
        self.disturbed = True
        self.living: dict[ClientProcess, Processor] = {}
        self._stuck: dict[ClientProcess, float] = {}
        self._count = 0
        for number in range(rng.choice([2, 3])):
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
        self.aim.watch(process)
        world.note(f"{name} starts")

    def _function(self, process: ClientProcess) -> Callable[..., Any]:
        """What the loop is given, made of rows or of tables."""

        def made_of(record: Any) -> Output:
            self._work(process)
            value = b"%d:%d:%s" % (record.partition, record.offset, record.value)
            return Output(value, partition=record.partition % SINK_PARTITIONS)

        def made_of_table(table: Any) -> Any:
            self._work(process)
            rows = table.select(["partition", "offset", "value"]).to_pylist()
            values = [b"%d:%d:%s" % (row["partition"], row["offset"], row["value"]) for row in rows]
            targets = [row["partition"] % SINK_PARTITIONS for row in rows]
            return table.from_pydict({"value": values, "to_partition": targets})

        return made_of_table if self._options["tables"] else made_of

    def _state(self, instance: str) -> KeyedState | None:
        return None

    def _processor(self, instance: str, process: ClientProcess) -> Processor:
        timeouts_ms = self._timeouts_ms
        return Processor(
            TOPIC,
            SINK,
            self._function(process),
            application_id=APPLICATION,
            state=self._state(instance),
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
                "linger.ms": timeouts_ms["linger"],
                "retry.backoff.ms": 20,
            },
            **self._options,
        )

    def _work(self, process: ClientProcess) -> None:
        """Takes its time for the first of many records that come at once."""
        if self._world.now_s - self._worked_s.get(process, 0.0) > self._work_s:
            loop.time.sleep(self._work_s)
            self._worked_s[process] = self._world.now_s
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
        self._world.after(self._world.rng.expovariate(1 / self._every_s), self._strike)

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
    long_units: bool = False,
    of: type[Instances] = Instances,
    check: Callable[[World], None] = lambda world: None,
) -> World:
    """Instances of one application and writers of their input, every fault. AssertionError: a promise is broken.
    `long_units`: instances are often away until their partitions are lost, in the middle of a unit of work."""
    with simulated(seed, data) as world, client_processes(world), kept_timeouts(world, of.timeouts):
        on_start(world)
        rng = world.rng
        world.broker.topics[SINK] = SINK_PARTITIONS
        world.broker.settings |= BROKER_SETTINGS
        world.broker.start()
        assert world.run(lambda: world.broker.is_up)
        chosen = rng.choice(GUARANTEES)
        disturbances = Disturbances(world, every_s=rng.choice([1.0, 4.0, 15.0]))
        by = protocol or drawn_protocol(seed)
        instances = of(world, guarantee or chosen, by, disturbances, long_units)
        world.note(instances.guarantee)
        # A commit that is tried again may arrive once more behind later ones, and sets the offsets back: brokers do not
        # order the connections of a client, and at_most_once has no transaction that would refuse it.
        world.cuts_lose_requests = rng.random() < 0.5 or instances.guarantee == "at_most_once"
        writers = [SlowWriter(world, f"w{number}", f"w{number}", TRANSACTIONS) for number in range(WRITERS)]
        world.processes += writers
        world.stall_rate = rng.random() * 0.01
        assert world.run(lambda: any(writer.is_over for writer in writers), DRAIN_S), "the writers did not end"
        instances.aim.ambush(COMMITS, instances.kill_all)
        world.run(lambda: not instances.disturbed, AMBUSH_S)
        disturbances.end()
        world.stall_rate = 0.0
        instances.kill_all()
        assert world.run(lambda: world.broker.is_up, DRAIN_S)
        assert world.run(lambda: all(writer.is_over for writer in writers), DRAIN_S), "the writers did not end"
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
        world.run_for(5.0)  # at_most_once: the output comes after the offsets
        instances.kill_all()
        world.run_for(2 * TRANSACTION_TIMEOUT_MS / 1000)
        _check_end(instances.guarantee, inputs, committed, _outputs(world))
        check(world)
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
