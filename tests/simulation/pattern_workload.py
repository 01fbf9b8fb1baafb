"""Versioned entities and sagas in a simulated world: their loops and their callers, with the checkers of `semel prove`.

Loops and callers are killed and frozen, and the broker has its faults. A caller notes its calls and what they
return in a list that outlives it, as an application does in its database, and goes on from there.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from semel.client.errors import ConfigError, KafkaError
from semel.patterns.entities import Entities
from semel.patterns.entity_writer import AppendUncertainError, ConflictError
from semel.patterns.saga_states import ENDED, SagaStep
from semel.patterns.sagas import Sagas, StepCall, StepFailedError
from semel.patterns.state import StateError
from semel.prove.checker.histories import AppendCall, check_appends, check_sagas, last_values, statuses
from semel.prove.checker.reading import Seen
from tests.simulation.operating_system import ClientProcess, client_processes, wait_for
from tests.simulation.processing_workload import BROKER_SETTINGS, HEARTBEAT_MS, SESSION_TIMEOUT_MS
from tests.simulation.state_workload import files_of_the_killed
from tests.simulation.workloads import DRAIN_S, Disturbances, read_records
from tests.simulation.world import World, simulated

NAME, KINDS, PARTITIONS = "kind", 2, 2
WRITERS, EACH, SAGAS = 4, 6, 6
BOOTSTRAP = "broker:9092"
TRANSACTION_TIMEOUT_MS = 6_000
TIMEOUTS_MS = {"request.timeout.ms": 1_000, "default.api.timeout.ms": 5_000, "retry.backoff.ms": 20}


class Programs:
    """Processes with what happens to them, and a supervisor who starts another one for each that ended early."""

    def __init__(self, world: World, every_s: float) -> None:
        self._world, self._every_s = world, every_s
        self._mains: dict[str, Callable[[], None]] = {}
        self._living: dict[str, ClientProcess] = {}
        self.finished: set[str] = set()
        self.disturbed = True
        self._count = 0
        self._cut_rate = world.rng.choice([0.0, 0.02, 0.05])
        self._next()

    def start(self, name: str, main: Callable[[], None]) -> None:
        self._mains[name] = main
        self._count += 1
        process = self._living[name] = ClientProcess(self._world, f"{name}.{self._count}", main)
        process.cut_rate = self._cut_rate if self.disturbed else 0.0
        process.on_end = lambda: self._ended(name, process)
        self._world.note(f"{process.name} starts")

    def _ended(self, name: str, process: ClientProcess) -> None:
        if self._living.get(name) is process:
            del self._living[name]
        error = process.error
        if error is None and not process.was_killed:
            self.finished.add(name)
            return
        if error is not None and (isinstance(error, StateError | ConfigError) or not isinstance(error, KafkaError)):
            raise AssertionError(f"{process.name} ended: {error!r}") from error
        self._world.note(f"{process.name} ended: {error!r}")
        self._world.after(self._world.rng.random() * 3, lambda: self.start(name, self._mains[name]))

    def calm_down(self) -> None:
        self.disturbed = False
        for process in self._living.values():
            process.cut_rate = 0.0

    def kill_all(self) -> None:
        for process in list(self._living.values()):
            process.on_end = lambda: None
            process.kill()

    def _next(self) -> None:
        self._world.after(self._world.rng.expovariate(1 / self._every_s), self._strike)

    def _strike(self) -> None:
        if not self.disturbed:
            return
        rng = random.Random(self._world.rng.random())  # a fault that is left out changes no other
        if self._living and self._world.may_strike():
            process = self._living[rng.choice(sorted(self._living))]
            if rng.random() < 0.6:
                process.kill()
            else:
                process.freeze(rng.choice([rng.random() * 3, rng.expovariate(1 / 8.0)]))
        self._next()


@contextlib.contextmanager
def _world_of(seed: int, data: Path, topics: list[str], on_start: Callable[[World], None]) -> Iterator[World]:
    with (
        files_of_the_killed(random.Random(seed).choice([0, 2, 50_000])),
        simulated(seed, data) as world,
        client_processes(world),
    ):
        on_start(world)
        world.broker.topics |= dict.fromkeys(topics, PARTITIONS)
        world.broker.settings |= BROKER_SETTINGS
        world.broker.start()
        assert world.run(lambda: world.broker.is_up)
        world.stall_rate = world.rng.random() * 0.01
        yield world


def _loop_options(world: World, instance: str, directory: Path) -> dict[str, Any]:
    return {
        "instance": instance,
        "directory": str(directory / instance),
        "transaction_timeout_ms": TRANSACTION_TIMEOUT_MS,
        "max_records": world.rng.choice([1, 3, 100]),
        "consumer": {
            **TIMEOUTS_MS,
            "session.timeout.ms": SESSION_TIMEOUT_MS,
            "heartbeat.interval.ms": HEARTBEAT_MS,
            "max.poll.interval.ms": 4_000,
        },
        "producer": {"request.timeout.ms": 1_000, "max.block.ms": 3_000, "retry.backoff.ms": 20},
    }


def _calm(world: World, disturbances: Disturbances, programs: Programs) -> None:
    disturbances.end()
    world.stall_rate = 0.0
    programs.calm_down()
    assert world.run(lambda: world.broker.is_up, DRAIN_S)


def _seen(world: World, topic: str) -> list[Seen]:
    return [
        Seen(topic, partition, record.offset, record.timestamp, record.key, record.value, tuple(record.headers))
        for partition in range(PARTITIONS)
        for record in read_records(world, partition, committed=True, topic=topic)
    ]


# --- entities ---
class SimulatedWriter:
    """Appends its numbers, each once, to one entity after the other."""

    def __init__(self, world: World, name: str) -> None:
        self._world, self._name = world, name
        self.calls: list[AppendCall] = []
        self._done = 0
        self._kept: list[Entities] = []

    def run(self) -> None:
        entities = Entities(NAME, bootstrap_servers=BOOTSTRAP, source=self._name, client=TIMEOUTS_MS)
        self._kept.append(entities)  # what is collected in a process that was killed would run
        known = [0] * KINDS
        while self._done < EACH:
            kind = self._done % KINDS
            if not self.calls or self.calls[-1].outcome:
                command = f"{self._name}-{len(self.calls)}"
                self.calls.append(AppendCall(command, f"e{kind}", known[kind], self._world.now_s))
            outcome, version = self._settle(entities, self.calls[-1])
            end = {"returned_s": self._world.now_s, "outcome": outcome, "version": version}
            self.calls[-1] = self.calls[-1]._replace(**end)
            known[kind] = version
            if outcome == "appended":
                self._done += 1
                wait_for(lambda: False, self._world.rng.random() * 2)
        entities.close()

    def _settle(self, entities: Entities, call: AppendCall) -> tuple[str, int]:
        while True:
            try:
                done = entities.append(call.entity, call.expected, [b"x"], command_id=call.command, timeout_ms=2_000)
                return "appended", done.version
            except ConflictError as error:
                return "conflict", error.version
            except AppendUncertainError as error:
                if error.version >= 0:
                    return "forgotten", error.version


def entities(seed: int, data: Path, on_start: Callable[[World], None] = lambda world: None) -> World:
    """Two owners and writers that compete. AssertionError: what a call returned does not hold."""
    topics = [NAME, *(f"{NAME}.{kind}" for kind in ("commands", "replies", "snapshots", "dead"))]
    directory = data.with_name(f"{data.name}.state")
    with _world_of(seed, data, topics, on_start) as world:
        disturbances = Disturbances(world, every_s=world.rng.choice([2.0, 6.0, 15.0]))
        programs = Programs(world, every_s=world.rng.choice([1.0, 3.0]))

        def own(instance: str) -> None:
            options = _loop_options(world, instance, directory)
            Entities(NAME, bootstrap_servers=BOOTSTRAP).owner(receipts=100, **options).run()

        for instance in ("o0", "o1"):
            programs.start(instance, lambda instance=instance: own(instance))  # type: ignore[misc]
        writers = {f"w{number}": SimulatedWriter(world, f"w{number}") for number in range(WRITERS)}
        for name, writer in writers.items():
            programs.start(name, writer.run)
        world.run(lambda: programs.finished >= writers.keys(), 40.0)
        _calm(world, disturbances, programs)
        assert world.run(lambda: programs.finished >= writers.keys(), DRAIN_S), "the writers did not end"
        programs.kill_all()
        world.run_for(3 * TRANSACTION_TIMEOUT_MS / 1000)
        calls = [call for writer in writers.values() for call in writer.calls]
        events = _seen(world, NAME)
        found = check_appends(NAME, calls, events)
        assert not found, "\n".join(map(str, found))
        assert len(events) == WRITERS * EACH
        return world


# --- sagas ---
def _transfer(number: int) -> dict[str, Any]:
    return {"from": f"a{number % 3}", "to": f"a{(number + 1) % 3}", "cents": 10 + number, "refused": number % 4 == 3}


def _effects(saga: str) -> dict[str, int]:
    data = _transfer(int(saga))
    return {data["from"]: -data["cents"], data["to"]: data["cents"]}


def _steps(world: World) -> list[SagaStep]:
    def book(call: StepCall, account: str, cents: int) -> None:
        call.state.put(account, call.state.get(account, 0) + cents)
        if world.rng.random() < 0.15:
            raise ConnectionError("not this time")  # after it was booked: the booking is undone

    def confirm(call: StepCall) -> None:
        if call.data["refused"]:
            raise StepFailedError("not confirmed")

    common: dict[str, Any] = {"timeout_ms": 15_000, "backoff_ms": 200, "retries": 2}
    return [
        SagaStep(
            "debit",
            lambda call: book(call, call.data["from"], -call.data["cents"]),
            lambda call: book(call, call.data["from"], call.data["cents"]),
            key=lambda data: data["from"],
            **common,
        ),
        SagaStep(
            "credit",
            lambda call: book(call, call.data["to"], call.data["cents"]),
            lambda call: book(call, call.data["to"], -call.data["cents"]),
            key=lambda data: data["to"],
            delay_ms=1_500,
            **common,
        ),
        SagaStep("confirm", confirm, **common),
    ]


def sagas(seed: int, data: Path, on_start: Callable[[World], None] = lambda world: None) -> World:
    """Two orchestrators and two participants. AssertionError: a saga is not whole."""
    topics = [f"{NAME}.{kind}" for kind in ("requests", "replies", "log", "dead", "steps.commands")]
    directory = data.with_name(f"{data.name}.state")
    with _world_of(seed, data, topics, on_start) as world:
        disturbances = Disturbances(world, every_s=world.rng.choice([2.0, 6.0, 15.0]))
        programs = Programs(world, every_s=world.rng.choice([1.0, 3.0]))
        steps = _steps(world)

        def kind() -> Sagas:
            return Sagas(NAME, steps, bootstrap_servers=BOOTSTRAP, tick_ms=500, client=TIMEOUTS_MS)

        def lead(instance: str) -> None:
            kind().orchestrator(**_loop_options(world, instance, directory)).run()

        def take_part(instance: str) -> None:
            kind().participant(**_loop_options(world, instance, directory)).run()

        started: list[int] = []

        kept: list[Sagas] = []

        def start() -> None:
            made = kind()
            kept.append(made)
            while len(started) < SAGAS:
                made.start(str(len(started)), _transfer(len(started)))
                started.append(len(started))
                wait_for(lambda: False, world.rng.random())
            made.close()

        for number in range(2):
            programs.start(f"o{number}", lambda number=number: lead(f"o{number}"))  # type: ignore[misc]
            programs.start(f"p{number}", lambda number=number: take_part(f"p{number}"))  # type: ignore[misc]
        programs.start("starter", start)
        world.run(lambda: "starter" in programs.finished, 30.0)
        _calm(world, disturbances, programs)
        deadline_s = world.now_s + DRAIN_S
        while sum(status in ENDED for status in statuses(_seen(world, f"{NAME}.log")).values()) < SAGAS:
            assert world.now_s < deadline_s, f"not all have ended: {statuses(_seen(world, f'{NAME}.log'))}"
            world.run_for(2.0)
        programs.kill_all()
        world.run_for(3 * TRANSACTION_TIMEOUT_MS / 1000)
        wanted = {str(number): ENDED[number % 4 == 3 :] for number in range(SAGAS)}
        changes = last_values(_seen(world, f"{NAME}.steps.state.changelog"))
        balances = {key.decode(): int(value) for key, value in changes.items() if key[:1] > b"\x01"}
        ends = statuses(_seen(world, f"{NAME}.log"))
        found = check_sagas(NAME, ends, wanted, balances, _effects)
        assert not found, "\n".join(map(str, found))
        return world
