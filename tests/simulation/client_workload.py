"""Programs that use the blocking client as it is, in a simulated world: producers (also with acks=0, and throttled
ones), transactions, members of a group that iterate, a consumer that assigns its partitions and commits in both ways,
and a loop that ends when it has read everything.

Each call must keep its timeout. The programs are killed, frozen and interrupted (Ctrl-C), the broker has its faults and
moves to other addresses.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from semel.client.consumer import Consumer
from semel.client.consumer.commits import Offsets, PendingCommit
from semel.client.errors import CommitUncertainError, KafkaError
from semel.client.producer import Producer
from semel.client.producer.transaction_states import ProducerTxnState
from semel.client.types import TopicPartition
from semel.patterns.process import Processor
from tests.simulation.operating_system import (
    ClientProcess,
    SimulatedThread,
    client_processes,
    current_process,
    wait_for,
)
from tests.simulation.workloads import Disturbances, read_rows
from tests.simulation.world import PARTITIONS, TOPIC, World, simulated

SEND_STRIKE_RATE = 0.01  # of writes to a socket, soon after which something happens to the broker
COMMIT_STRIKE_RATE = 0.1  # the same while a transaction is committed
MOVE_RATE = 0.3  # of what happens to programs
INTERRUPT_RATE = 0.1  # of transactions
INIT_INTERRUPT_RATE = 0.5  # of calls of init_transactions
WRITER = "writer"  # a client id
RECORDS, TRANSACTIONS = 60, 25
BUFFER_BYTES = 1_500
LATE_S = 1.0  # how long a call may exceed its timeout: a thread may have to wait for its turn
CALM_COMMIT_MS = 20_000
IDLE_STOP_MS = 300
CATCH_UP_STALL_RATE = 0.02
CONNECTIONS_MAX = 8  # refused ones of a process in a second: reconnect.backoff.ms is 200
DRAIN_S = 300.0  # virtual
GROUP = "readers"
ENDED = (ProducerTxnState.READY, ProducerTxnState.FENCED, ProducerTxnState.UNINITIALIZED)


class History:
    def __init__(self) -> None:
        self.acknowledged: list[tuple[int, int, bytes]] = []  # partition, offset, value
        self.unacknowledged: set[bytes] = set()  # acks=0, sent and closed without faults
        self.committed: list[bytes] = []
        self.aborted: list[bytes] = []
        self.unknown: list[list[bytes]] = []
        self.processed: dict[tuple[int, int], int] = {}  # times
        self.caught_up: set[tuple[int, int]] = set()


class Programs:
    def __init__(self, world: World, disturbances: Disturbances) -> None:
        self.world = world
        self.history = History()
        self.disturbed = True
        self._disturbances = disturbances
        rng = world.rng
        self._cut_rate = rng.choice([0.0, 0.03, 0.1])
        self._preemption_rate = rng.random() * 0.1
        self._request_ms = rng.choice([300, 1_000])
        self._block_ms = rng.choice([400, 3_000])
        self._count = 0
        self._committing: set[ClientProcess] = set()
        self.living: list[ClientProcess] = []

    def start(self, kind: str, program: Callable[[], None], again: bool = False) -> ClientProcess:
        self._count += 1
        process = ClientProcess(self.world, f"{kind}{self._count}", program)
        process.cut_rate = self._cut_rate if self.disturbed else 0.0
        process.preemption_rate = self._preemption_rate
        process.on_send = lambda: self._disturbances.maybe_strike_soon(
            COMMIT_STRIKE_RATE if process in self._committing else SEND_STRIKE_RATE
        )
        process.on_end = lambda: self._ended(process, kind, program, again)
        self.living.append(process)
        self.world.note(f"{process.name} starts")
        return process

    def _ended(self, process: ClientProcess, kind: str, program: Callable[[], None], again: bool) -> None:
        self.living.remove(process)
        self.world.note(f"{process.name} ended: {process.error!r}"[:300])
        if not isinstance(process.error, KafkaError | None) or "thread ended" in str(process.error):
            raise AssertionError(f"{process.name} ended: {process.error!r}") from process.error
        assert not process.violations, process.violations[0]
        if again and self.disturbed:
            self.world.after(self.world.rng.random() * 3, lambda: self.start(kind, program, again))

    def options(self, **more: Any) -> dict[str, Any]:
        return {
            "bootstrap.servers": "bootstrap:9092",
            "request.timeout.ms": self._request_ms,
            "retry.backoff.ms": 20,
            "reconnect.backoff.ms": 200,
            **more,
        }

    @contextmanager
    def keeps(self, timeout_s: float) -> Iterator[None]:
        """A call ends, with or without an error, in time. Being frozen does not count."""
        process, began_s = current_process(), self.world.now_s
        try:
            yield
        finally:
            thawed_s = max(began_s, process.frozen_until_s)
            if not process.is_over and thawed_s <= self.world.now_s:
                took_s = self.world.now_s - thawed_s
                assert took_s <= timeout_s + LATE_S, f"{process.name}: {took_s:.2f} s instead of {timeout_s:.2f} s"
            self._check_connections(process)

    def _check_connections(self, process: ClientProcess) -> None:
        recent = [at for at in process.refused_s if at > self.world.now_s - 1.0]
        assert len(recent) <= CONNECTIONS_MAX, f"{process.name} tried {len(recent)} connections in a second"

    @contextmanager
    def maybe_interrupted(self, rate: float, within_s: float) -> Iterator[None]:
        """Sometimes with a Ctrl-C."""
        world = self.world
        if self.disturbed and world.rng.random() < rate and world.may_strike():
            with current_process().interrupted_after(world.rng.random() * within_s):
                yield
        else:
            yield

    # --- programs ---
    def write(self) -> None:
        """An idempotent producer with little memory."""
        rng, name, sent = self.world.rng, current_process().name, []
        options = self.options(
            **{
                "client.id": WRITER,
                "buffer.memory": BUFFER_BYTES,
                "batch.size": rng.choice([200, 600]),
                "max.block.ms": self._block_ms,
                "delivery.timeout.ms": rng.choice([1_000, 8_000]),
                "linger.ms": rng.choice([0, 5]),
            }
        )
        with Producer(options) as producer:
            for number in range(RECORDS):
                value, partition = b"%s-%d" % (name.encode(), number), rng.randrange(PARTITIONS)
                try:
                    with self.keeps(self._block_ms / 1000):
                        sent.append((producer.send(TOPIC, value, partition=partition), partition, value))
                except KafkaError as error:
                    self.world.note(f"{name}: {error!r}"[:200])
                assert producer._sender.used_bytes <= BUFFER_BYTES, "buffer.memory is exceeded"
                if rng.random() < 0.1:
                    try:
                        with self.keeps(0.5):
                            producer.flush(timeout_ms=500)
                    except KafkaError:
                        pass
                wait_for(lambda: False, rng.random() * 0.3)
        for delivery, partition, value in sent:
            assert delivery.done(), f"{value!r} was forgotten"
            assert "thread ended" not in str(delivery.exception(timeout_ms=0))
            if delivery.exception(timeout_ms=0) is None:
                self.history.acknowledged.append((partition, delivery.result(timeout_ms=0).offset, value))

    def write_without_acks(self) -> None:
        """Without faults nothing is lost, although nobody acknowledges it; and memory has its limit."""
        rng, name = self.world.rng, current_process().name
        is_safe = not self.disturbed
        options = self.options(
            **{
                "acks": 0,
                "enable.idempotence": False,
                "buffer.memory": BUFFER_BYTES,
                "batch.size": 300,
                "max.block.ms": 10_000,
            }
        )
        values = []
        with Producer(options) as producer:
            for number in range(RECORDS):
                values.append(b"%s-%d" % (name.encode(), number))
                producer.send(TOPIC, values[-1], partition=rng.randrange(PARTITIONS))
                assert producer._sender.used_bytes <= BUFFER_BYTES, "buffer.memory is exceeded"
                if not is_safe:
                    wait_for(lambda: False, rng.random() * 0.1)
        if is_safe:
            self.history.unacknowledged |= set(values)

    def transact(self) -> None:
        rng, name, history = self.world.rng, current_process().name, self.history
        delivery_ms = rng.choice([1_000, 8_000])
        options = self.options(
            **{
                "transactional.id": name,
                "transaction.timeout.ms": 10_000,
                "max.block.ms": max(self._block_ms, 3_000 if delivery_ms < 3_000 else 0),  # commits see batches fail
                "delivery.timeout.ms": delivery_ms,
                "batch.size": 200,
            }
        )
        with Producer(options) as producer:
            while producer._transactional().state is not ProducerTxnState.READY:
                try:
                    with self.maybe_interrupted(INIT_INTERRUPT_RATE, 0.05):
                        producer.init_transactions()
                except (KafkaError, KeyboardInterrupt) as error:
                    self.world.note(f"{name}: {error!r}"[:200])
                    wait_for(lambda: False, 0.1)
            for number in range(TRANSACTIONS):
                values = [b"%s-%d-%d" % (name.encode(), number, index) for index in range(rng.randrange(1, 10))]
                history.unknown.append(values)  # it may be killed at any time
                self._transact(producer, values, rng.random() < 0.3)
                wait_for(lambda: False, rng.random() * 0.2)

    def _transact(self, producer: Producer, values: list[bytes], gives_up: bool) -> None:
        history, rng = self.history, self.world.rng
        deliveries: list[Any] = []
        process = current_process()
        try:
            with self.maybe_interrupted(INTERRUPT_RATE, 2.0), producer.transaction() as transaction:
                for value in values:
                    deliveries.append(transaction.send(TOPIC, value, partition=rng.randrange(PARTITIONS)))
                    if rng.random() < 0.2:
                        wait_for(lambda: False, rng.random() * 0.3)
                if gives_up:
                    raise _GivenUpError
                self._committing.add(process)
        except CommitUncertainError:
            self._settle(producer, values)
        except (KafkaError, _GivenUpError, KeyboardInterrupt) as error:
            state = producer._transactional().state
            if state is ProducerTxnState.COMMITTING and isinstance(error, KeyboardInterrupt):
                self._settle(producer, values)
            elif state in ENDED:
                history.unknown.remove(values)
                history.aborted += values
            elif state in (ProducerTxnState.ABORTING, ProducerTxnState.FATAL):
                raise _StillOpenError(f"{current_process().name}: {state} after {error!r}") from error
            else:
                raise AssertionError(
                    f"{current_process().name} left its transaction {state} after {error!r}"
                ) from error
        else:
            assert all(delivery.exception(timeout_ms=0) is None for delivery in deliveries), (
                "committed without a record"
            )
            history.unknown.remove(values)
            history.committed += values
        finally:
            self._committing.discard(process)

    def _settle(self, producer: Producer, values: list[bytes]) -> None:
        """A commit in doubt is sent again until it is known."""
        for _ in range(20):
            try:
                producer.commit_transaction()
            except CommitUncertainError:
                continue
            except KafkaError as error:
                raise _StillOpenError(str(error)) from error
            self.history.unknown.remove(values)
            self.history.committed += values
            return
        raise _StillOpenError("the commit stays in doubt")

    def read(self) -> None:
        """A member of a group that iterates and leaves commits to the client."""
        rng, processed = self.world.rng, self.history.processed
        options = self.options(
            **{
                "group.id": GROUP,
                "auto.offset.reset": "earliest",
                "isolation.level": "read_committed",
                "enable.auto.commit": True,
                "auto.commit.interval.ms": 100,
                "session.timeout.ms": 6_000,
                "heartbeat.interval.ms": 500,
                "max.poll.interval.ms": 10_000,
                "default.api.timeout.ms": 3_000,
            }
        )
        with Consumer(options) as consumer:
            consumer.subscribe([TOPIC])
            for record in consumer:
                wait_for(lambda: False, rng.random() * 0.05)
                if self.disturbed and rng.random() < 0.02:
                    break  # at a record that it has not processed
                place = (record.partition, record.offset)
                processed[place] = processed.get(place, 0) + 1

    def commit_in_turns(self) -> None:
        """Assigned partitions: what is committed last is what the group has. wakeup() ends the next poll."""
        rng, name = self.world.rng, current_process().name
        place = TopicPartition(TOPIC, 0)
        options = self.options(**{"group.id": name, "enable.auto.commit": False, "default.api.timeout.ms": 2_000})
        with Consumer(options) as consumer:
            consumer.assign([place])
            number = 0
            stored: int | None = None  # by the last commit that succeeded
            late: set[int] = set()  # offsets in requests without a response, which may arrive behind newer ones
            looks_always = rng.random() < 0.5  # also after a failure, which makes the client look for the coordinator
            commits = consumer._engine.core.commits
            attempt_ended = commits.responded

            def responded(commit: PendingCommit, error: KafkaError | None, now_s: float) -> None:
                """Also of an attempt whose repetition succeeds."""
                if error is not None:
                    late.add(commit.offsets[place].offset)
                attempt_ended(commit, error, now_s)

            commits.responded = responded  # type: ignore[method-assign]

            def settled(offsets: Offsets, error: KafkaError | None) -> None:
                nonlocal stored
                if error is None:
                    stored = offsets[place].offset
                else:
                    late.add(offsets[place].offset)

            while self.disturbed:
                with self.keeps(0.2):
                    consumer.poll(200)
                number += 1
                failed = False
                consumer.commit_async({place: 2 * number}, settled)
                if rng.random() < 0.3:
                    wait_for(lambda: False, rng.random() * 0.1)
                try:
                    with self.keeps(0.8):
                        consumer.commit({place: 2 * number + 1}, timeout_ms=800)
                    stored = 2 * number + 1
                except KafkaError:
                    failed = True
                    late |= {2 * number, 2 * number + 1}  # the first of them may have no response yet
                if failed and not looks_always:
                    continue
                with suppress(KafkaError), self.keeps(0.5):
                    found = consumer.committed([place], timeout_ms=500).get(place)
                    offset = None if found is None else found.offset
                    assert offset == stored or offset in late, (
                        f"{name} committed {stored}, and perhaps {sorted(late)}; the group has {offset}"
                    )
                if rng.random() < 0.3:
                    self._wake(consumer, rng)
            wait_for(lambda: self.world.broker.is_up)
            try:
                consumer.commit({place: 2 * number + 2}, timeout_ms=CALM_COMMIT_MS)
            except KafkaError as error:
                raise AssertionError(f"{name} could not commit without faults: {error!r}") from error

    def catch_up(self) -> None:
        """A loop that ends by itself when it has read everything, however slow the broker is."""

        def take(record: Any) -> None:
            self.history.caught_up.add((record.partition, record.offset))

        Processor(
            TOPIC,
            None,
            take,
            application_id=current_process().name,
            guarantee="at_least_once",
            bootstrap_servers="bootstrap:9092",
            idle_stop_ms=IDLE_STOP_MS,
            consumer={
                "auto.offset.reset": "earliest",
                "isolation.level": "read_committed",
                "request.timeout.ms": 1_000,
                "default.api.timeout.ms": 1_000,
                "retry.backoff.ms": 20,
            },
        ).run()

    def _wake(self, consumer: Consumer, rng: random.Random) -> None:
        if rng.random() < 0.5:
            consumer.wakeup()
        else:
            thread = SimulatedThread(target=lambda: (wait_for(lambda: False, rng.random() * 0.02), consumer.wakeup()))
            thread.start()
        with self.keeps(0.5):
            consumer.poll(20_000)

    # --- faults ---
    def strike(self) -> None:
        if not self.disturbed:
            return
        rng = random.Random(self.world.rng.random())  # a fault that is left out changes no other
        if self.living and self.world.may_strike():
            process = rng.choice(self.living)
            if rng.random() < MOVE_RATE and self.world.broker.is_up:
                self.world.broker.move(rng.randrange(20))
                self.world.after(rng.random() * self._disturbances.down_s, self.world.broker.start)
            elif rng.random() < 0.5:
                process.kill()
            else:
                process.freeze(rng.choice([rng.random() * 3, rng.expovariate(1 / 8.0)]))
        self.world.after(self.world.rng.expovariate(1 / 2.0), self.strike)


class _GivenUpError(Exception):
    """The program does not want its transaction."""


class _StillOpenError(KafkaError):
    """The broker did not respond: the program ends."""


def clients(seed: int, data: Path, on_start: Callable[[World], None] = lambda world: None) -> World:
    """Programs of every kind, every fault. Raises AssertionError if a promise is broken."""
    with simulated(seed, data) as world, client_processes(world):
        on_start(world)
        rng = world.rng
        if rng.random() < 0.5:
            world.broker.quotas = {WRITER: rng.choice([100.0, 1_000.0])}
        world.cuts_lose_requests = rng.random() < 0.5
        world.broker.start()
        assert world.run(lambda: world.broker.is_up)
        disturbances = Disturbances(world, every_s=rng.choice([1.0, 4.0]), down_s=rng.choice([0.5, 2.0]))
        programs = Programs(world, disturbances)
        writers = [programs.start(kind, program) for kind, program in (("w", programs.write), ("x", programs.transact))]
        for _ in range(2):
            programs.start("r", programs.read, again=True)
        programs.start("a", programs.commit_in_turns, again=True)
        programs.start("n", programs.write_without_acks)
        world.stall_rate = rng.random() * rng.choice([0.01, 0.1])
        programs.strike()
        world.run(lambda: all(process.is_over for process in writers), 30.0)
        disturbances.end()
        programs.disturbed = False
        world.stall_rate, world.cuts_lose_requests = 0.0, False
        for process in programs.living:
            process.cut_rate = 0.0
        committing = [process for process in programs.living if process.name.startswith("a")]
        assert world.run(lambda: world.broker.is_up, DRAIN_S)
        assert world.run(lambda: all(process.is_over for process in writers), DRAIN_S), "a writer did not end"
        last = programs.start("n", programs.write_without_acks)
        assert world.run(lambda: last.is_over, DRAIN_S), "a writer did not end"
        assert world.run(lambda: all(process.is_over for process in committing), DRAIN_S), "a commit did not end"
        world.run_for(60.0)  # transactions that were left open are aborted at their timeout
        programs.start("r", programs.read)
        visible = [dict(read_rows(world, partition, committed=True)) for partition in range(PARTITIONS)]
        wanted = {(partition, offset) for partition, rows in enumerate(visible) for offset in rows}
        assert world.run(lambda: wanted <= set(programs.history.processed), DRAIN_S), (
            f"nobody processed {sorted(wanted - set(programs.history.processed))}"
        )
        _check(programs.history, visible)
        _catch_up(world, programs)
        return world


def _catch_up(world: World, programs: Programs) -> None:
    """A broker that is slow, and frozen at first, does not look like an empty topic."""
    before = set(programs.history.processed)
    world.stall_rate = CATCH_UP_STALL_RATE
    loop = programs.start("c", programs.catch_up)
    world.run_for(world.rng.random() * 0.5)
    world.broker.freeze(world.rng.random() * 3)
    assert world.run(lambda: loop.is_over, DRAIN_S), "a loop did not end although it has read everything"
    assert loop.error is None, f"a loop ended: {loop.error!r}"
    missed = before - programs.history.caught_up
    assert not missed, f"a loop ended before it had read {sorted(missed)}"


def _check(history: History, visible: list[dict[int, bytes | None]]) -> None:
    values = [value for rows in visible for value in rows.values()]
    assert len(values) == len(set(values)), "a record is stored twice"
    for partition, offset, value in history.acknowledged:
        assert visible[partition].get(offset) == value, f"{value!r} was acknowledged at {offset} of {partition}"
    seen = set(values)
    assert history.unacknowledged <= seen, f"lost with acks=0: {sorted(history.unacknowledged - seen)}"
    assert set(history.committed) <= seen, f"committed, but not visible: {sorted(set(history.committed) - seen)}"
    assert not seen & set(history.aborted), f"aborted, but visible: {sorted(seen & set(history.aborted))}"
    places = {(partition, offset) for partition, rows in enumerate(visible) for offset in rows}
    ghosts = set(history.processed) - places
    assert not ghosts, f"processed, but not committed: {sorted(ghosts)}"
    for transaction in history.unknown:
        shown = seen & set(transaction)
        assert not shown or shown == set(transaction), f"visible in part: {sorted(shown)} of {transaction}"
