"""A group of consumers in a simulated world: members come, go, die, freeze and get stuck, while others write."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from semel.client.types import TopicPartition
from semel.protocol.messages.records import (
    DELETE_RECORDS,
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsTopic,
)
from tests.simulation.cluster_front import NODES, ClusterFront
from tests.simulation.consumer_process import ConsumerProcess
from tests.simulation.group_history import GroupHistory
from tests.simulation.producer_process import WireClient
from tests.simulation.transactional_process import TransactionalProcess
from tests.simulation.workloads import Disturbances, ask, check_visible, read_rows
from tests.simulation.world import PARTITIONS, TOPIC, World, simulated

CONSUMERS, WRITERS, TRANSACTIONS = 3, 2, 20
DRAIN_S = 200.0  # virtual; less than metadata.max.age.ms
PREFETCH_BYTES, FETCH_BYTES, PARTITION_BYTES = 1_500, 1_200, 500
LARGEST_BATCH_BYTES = 2_500  # the first batch of a response may exceed all limits
CONSUMER_PROTOCOL_RATE = 0.3
LISTENER_BUG_RATE = 0.3
STRATEGIES = ("range", "cooperative-sticky", "sticky", "roundrobin")


class SlowWriter(TransactionalProcess):
    """Pauses between transactions."""

    _rests_until_s = 0.0

    def _begin(self) -> None:
        if self._world.now_s < self._rests_until_s:
            self._resumes_s = self._rests_until_s
        else:
            super()._begin()

    def _ended(self, where: list[bytes]) -> None:
        super()._ended(where)
        self._rests_until_s = self._world.now_s + self._world.rng.expovariate(1 / 1.5)


class ConsumerGroup:
    """The processes of a group; while it is `disturbed`, one thing after the other happens to them."""

    def __init__(self, world: World, front: ClusterFront, history: GroupHistory, protocol: str) -> None:
        rng = world.rng
        self.all: list[ConsumerProcess] = []
        self.disturbed = True
        self._world = world
        self._front = front
        self._history = history
        self._is_static = rng.random() < 0.3
        self._options: dict[str, Any] = {
            "partition_assignment_strategy": rng.choice(STRATEGIES),
            "session_timeout_ms": 6_000,
            "heartbeat_interval_ms": 1_500,
            "max_poll_interval_ms": 12_000,
            "max_poll_records": rng.choice([1, 3, 20]),
            "request_timeout_ms": 4_000,
            "retry_backoff_ms": 50,
            "metadata_max_age_ms": 3_600_000,
            "prefetch_bytes": PREFETCH_BYTES,
            "fetch_max_bytes": FETCH_BYTES,
            "max_partition_fetch_bytes": PARTITION_BYTES,
        }
        if protocol == "consumer":
            for name in ("partition_assignment_strategy", "session_timeout_ms", "heartbeat_interval_ms"):
                del self._options[name]
            self._options["group_protocol"] = protocol
        self._cut_rate = rng.random() * 0.05
        for number in range(CONSUMERS):
            self.start(f"static-{number}")
        self._next()

    @property
    def living(self) -> list[ConsumerProcess]:
        return [process for process in self.all if not process.is_over]

    def start(self, instance_id: str) -> None:
        options: dict[str, Any] = {**self._options}
        if self._is_static:
            options["group_instance_id"] = instance_id
        name = f"c{len(self.all)}"
        process = ConsumerProcess(self._world, self._front, self._history, name, **options)
        process.cut_rate = self._cut_rate
        process.listener_bug_rate = LISTENER_BUG_RATE if self.disturbed else 0.0
        process.work_s = self._world.rng.choice([0.1, 2.0]) if self.disturbed else 0.1
        self.all.append(process)
        self._world.processes.append(process)
        self._world.note(f"{name} starts")

    def calm(self) -> None:
        """From here on nothing happens to them any more, and at least one works."""
        self.disturbed = False
        for process in self.living:
            process.cut_rate, process.work_s, process.listener_bug_rate = 0.0, 0.1, 0.0
        if not any(not process.is_closing for process in self.living):
            self.start("static-0")

    def _next(self) -> None:
        self._world.after(self._world.rng.expovariate(1 / 2.0), self._strike)

    def _strike(self) -> None:
        if not self.disturbed:
            return
        rng = random.Random(self._world.rng.random())  # a fault that is left out changes no other
        if self.living and self._world.may_strike():
            process = rng.choice(self.living)
            what = rng.choice(["kill", "freeze", "stick", "close", "pause", "move", "down"])
            if what == "freeze":
                process.freeze(rng.expovariate(1 / 5.0))
            elif what == "stick":
                process.stick(rng.expovariate(1 / 8.0))
            elif what == "pause":
                process.pause_one()
            elif what == "move":
                rng.choice([self._front.move_a_leader, self._front.move_the_coordinator])()
            elif what == "down":
                self._front.take_down(rng.choice(NODES))
                self._world.after(rng.random() * 4, self._front.bring_up)
            elif what == "close":
                process.close()
                self._replace(process, rng.random() * 6)
            else:
                process.kill()
                self._replace(process, rng.random() * 6)
        self._next()

    def _replace(self, process: ConsumerProcess, after_s: float) -> None:
        """Another one comes after a while; a static one under the same id."""
        instance_id = process.settings.group_instance_id or "static-0"
        self._world.after(after_s, lambda: self.start(instance_id) if self.disturbed else None)


def drawn_protocol(seed: int) -> str:
    """By numbers of its own: all else that the seed draws stays as it is."""
    return "consumer" if random.Random(f"protocol {seed}").random() < CONSUMER_PROTOCOL_RATE else "classic"


def consumers(
    seed: int, data: Path, on_start: Callable[[World], None] = lambda world: None, protocol: str | None = None
) -> World:
    """Consumers of one group, writers of transactions, every fault. Raises AssertionError if a promise is broken."""
    with simulated(seed, data) as world:
        on_start(world)
        rng = world.rng
        world.broker.start()
        assert world.run(lambda: world.broker.is_up)
        front, history = ClusterFront(world), GroupHistory(world)
        group = ConsumerGroup(world, front, history, protocol or drawn_protocol(seed))
        writers = [SlowWriter(world, f"w{number}", f"w{number}", TRANSACTIONS) for number in range(WRITERS)]
        world.processes += writers
        world.stall_rate = rng.random() * 0.01
        disturbances = Disturbances(world, every_s=rng.choice([5.0, 20.0]))
        while not all(writer.is_over for writer in writers):
            world.run_for(1.0 + rng.random() * 4)
            if rng.random() < 0.35 and world.may_strike():
                _delete_records(world, history, rng.randrange(PARTITIONS))
        disturbances.end()
        group.calm()
        world.stall_rate = 0.0
        gone = rng.choice(NODES)
        if world.may_strike():
            front.take_down(gone)  # for good
        assert world.run(lambda: world.broker.is_up, DRAIN_S)
        working = [process for process in group.living if not process.is_closing]
        if len(working) > 1 and world.may_strike():
            rng.choice(working).stick(10_000.0)
        writers.append(SlowWriter(world, "last", "last", TRANSACTIONS // 4))
        world.processes.append(writers[-1])
        assert world.run(lambda: writers[-1].is_over, DRAIN_S)
        world.run_for(30.0)  # transactions that were left open are aborted at their timeout
        _look(world, history)
        assert world.run(history.is_drained, DRAIN_S), "the group did not read everything"
        _look(world, history)
        history.check()
        check_visible(list(writers), [list(rows.values()) for rows in history.visible.values()])
        most = PREFETCH_BYTES + len(NODES) * max(FETCH_BYTES, LARGEST_BATCH_BYTES)
        for process in group.all:
            assert process.most_bytes <= most, f"{process.name} kept {process.most_bytes} bytes of read-ahead"
        return world


def _look(world: World, history: GroupHistory) -> None:
    for partition in range(PARTITIONS):
        place = TopicPartition(TOPIC, partition)
        history.saw(place, read_rows(world, partition, True, history.deleted_to.get(place, 0)))


def _delete_records(world: World, history: GroupHistory, partition: int) -> None:
    """As retention does, whoever has read them or not."""
    place = TopicPartition(TOPIC, partition)
    rows = read_rows(world, partition, True, history.deleted_to.get(place, 0))
    history.saw(place, rows)
    if rows:
        before = rows[world.rng.randrange(len(rows) // 2, len(rows))][0] + 1
        history.deleted_to[place] = max(history.deleted_to.get(place, 0), before)
        world.note(f"{place} is deleted up to {before}")
        topic = DeleteRecordsTopic(TOPIC, [DeleteRecordsPartition(partition, before)])
        ask(world, WireClient(world), DELETE_RECORDS, DeleteRecordsRequest([topic], 10_000), 2)
