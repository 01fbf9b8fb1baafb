"""Sagas: steps in several places that end in all done or all undone, without a transaction over all of them.

    transfer = semel.Sagas("transfer", [
        semel.SagaStep("debit", do=debit, undo=put_back, key=lambda data: data["from"]),
        semel.SagaStep("credit", do=credit, key=lambda data: data["to"]),
    ], bootstrap_servers="localhost:9092")
    transfer.create()
    transfer.run()                                              # the orchestrator and all participants
    transfer.start("t-1", {"from": "a", "to": "b", "cents": 5})  # anywhere else

The orchestrator and the participants are instances of `semel.process` with state: what each of them decides, sends and
remembers is one transaction. NAME.log, compacted, has the last state of every saga. Steps are visible to others before
their saga has ended: there is no isolation.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from semel.client.consumer import Consumer
from semel.client.dead_letters import REASON_CHARACTERS, reason_of
from semel.client.errors import ConfigError, KafkaError, TimedOutError
from semel.client.producer import Producer
from semel.client.settings import ProducerSettings
from semel.client.timing import Deadline, timeout_in_ms
from semel.client.types import ConsumerRecord, TopicPartition
from semel.client.waiting import Flag
from semel.patterns.process import Processor, Stats
from semel.patterns.process_options import underscored
from semel.patterns.process_output import Output, check_rows
from semel.patterns.saga_states import (
    ENDED,
    SagaOrder,
    SagaReply,
    SagaState,
    SagaStep,
    SagaStepError,
    SagaTable,
    check_steps,
)
from semel.patterns.state import KeyedState, State
from semel.patterns.stopping import stop_on_signals
from semel.patterns.topics import BROKER_TIME, COMPACTED, create_topics, partition_count, read_up_to
from semel.protocol.partitioning import partition_for_key

log = logging.getLogger("semel.saga")

TICK = "tick"  # the header of a record that says what time it is
SAGA, TIMER = b"s", b"t"
RECEIPT = "\x01saga\x01"  # keys of a participant's state that are not the functions'
DUE_AT_ONCE = 20_000  # sagas that a tick moves on: after hours without an orchestrator very many may be due
KEEP_MS = 7 * 24 * 3_600_000
POLL_MS = 200.0
_TIME = struct.Struct(">Q")
_decode_saga = msgspec.json.Decoder(SagaState).decode
_decode_reply = msgspec.json.Decoder(SagaReply).decode
_decode_order = msgspec.json.Decoder(SagaOrder).decode
_encode = msgspec.json.encode


class StepFailedError(Exception):
    """To be raised by a step that is refused for good: the saga is compensated."""


class StepCall(NamedTuple):
    """What a step gets. `id` is the same whenever the step of a saga is called again: for services that recognise
    duplicates. `results` are those of the steps before."""

    saga: str
    step: str
    id: str
    data: Any
    results: dict[str, Any]
    state: State


# --- the orchestrator ---
class Orchestrate:
    """The function of the orchestrator's loop: starts, replies and ticks in; commands and the log out."""

    def __init__(self, name: str, table: SagaTable, partitions: int, max_bytes: int) -> None:
        self._name, self._table, self._partitions = name, table, partitions
        self._max_bytes = max_bytes  # of an output

    def __call__(self, record: ConsumerRecord, state: State) -> list[Output]:
        if record.headers and record.headers[0][0] == TICK:
            return self._tick(record, state)
        if not record.key or partition_for_key(record.key, self._partitions) != record.partition:
            raise ValueError(
                "the key is no id of a saga of this partition; producers must partition by murmur2 "
                "(librdkafka: partitioner=murmur2_random)"
            )
        known = self._get(record.key, state)
        if record.topic.endswith(".replies"):
            return self._reply(record, known, state)
        data = msgspec.json.decode(record.value or b"")
        if known is not None:
            return []  # started before
        saga, orders = self._table.begin(record.key.decode(), data, record.timestamp)
        return self._journal(record, state, saga, 0, orders)

    def _reply(self, record: ConsumerRecord, saga: SagaState | None, state: State) -> list[Output]:
        reply = _decode_reply(record.value or b"")
        if saga is None or saga.status in ENDED or saga.waits_for != "reply":
            return []
        if (reply.step, reply.action, reply.attempt) != (saga.step, saga.action, saga.tries):
            return []  # of a command that is not waited for any more
        before_ms = saga.due_ms
        return self._journal(
            record, state, saga, before_ms, self._table.handle(saga, reply.status, record.timestamp, reply)
        )

    def _tick(self, record: ConsumerRecord, state: State) -> list[Output]:
        """The first that are due; the next tick goes on. Those that cannot go on stay due, and are not counted."""
        outputs: list[Output] = []
        moved = 0
        for key, _ in list(state.scan(TIMER, TIMER + _TIME.pack(record.timestamp + 1))):
            saga = self._get(key[len(TIMER) + _TIME.size :], state)
            made = [] if saga is None else self._due_alone(record, state, saga)
            outputs += made
            moved += bool(made)
            if moved == DUE_AT_ONCE:
                break
        return outputs

    def _due_alone(self, record: ConsumerRecord, state: State, saga: SagaState) -> list[Output]:
        """One that cannot go on, such as one that has grown too large for its log, keeps no other one waiting."""
        savepoint = state.savepoint()
        try:
            outputs = self._due(record, state, saga)
            check_rows(outputs, self._max_bytes)
            return outputs
        except KafkaError:
            raise
        except Exception as error:
            state.roll_back(savepoint)
            log.error("saga %r of %r cannot go on: %s: %s", saga.saga, self._name, type(error).__name__, error)
            return []

    def _due(self, record: ConsumerRecord, state: State, saga: SagaState) -> list[Output]:
        before_ms = saga.due_ms
        if saga.status in ENDED:
            name = saga.saga.encode()
            state.delete(SAGA + name)
            state.delete(TIMER + _TIME.pack(before_ms) + name)
            return [Output(None, name, f"{self._name}.log", record.partition)]
        event = "timeout" if saga.waits_for == "reply" else "due"
        return self._journal(record, state, saga, before_ms, self._table.handle(saga, event, record.timestamp))

    def _get(self, name: bytes, state: State) -> SagaState | None:
        raw = state.get(SAGA + name)
        return None if raw is None else _decode_saga(raw)

    def _journal(
        self, record: ConsumerRecord, state: State, saga: SagaState, before_ms: int, orders: list[SagaOrder]
    ) -> list[Output]:
        """What the saga is now, its timer, and what follows from it."""
        name, data = saga.saga.encode(), _encode(saga)
        state.put(SAGA + name, data)
        if before_ms != saga.due_ms:
            if before_ms:
                state.delete(TIMER + _TIME.pack(before_ms) + name)
            state.put(TIMER + _TIME.pack(saga.due_ms) + name, b"")
        outputs = [Output(data, name, f"{self._name}.log", record.partition)]
        return outputs + [self._command(order, record.partition) for order in orders]

    def _command(self, order: SagaOrder, partition: int) -> Output:
        step = self._table.steps[order.step]
        value = _encode(msgspec.structs.replace(order, reply_to=partition))
        return Output(value, order.key, f"{self._name}.{step.service}.commands")


class SagaOrchestrator(Processor):
    """The orchestrator's loop. It writes the time to its partitions, and refuses sagas whose steps it does not have."""

    def __init__(self, sagas: Sagas, table: SagaTable, tick_ms: int, source: list[str], **options: Any) -> None:
        super().__init__(source, None, **options)
        self._sagas, self._table, self._tick_ms = sagas, table, tick_ms
        self._mine: set[int] = set()

    def run(self) -> Stats:
        for saga in self._sagas.states():
            self._table.check(saga)
        over = Flag()
        ticker = threading.Thread(target=self._tell_time, args=[over], name="saga-ticks", daemon=True)
        ticker.start()
        try:
            return super().run()
        finally:
            over.set()
            ticker.join(5)

    def _tell_time(self, over: Flag) -> None:
        with Producer({"linger_ms": 0, **self._sagas.options}) as producer:
            while not over.wait(self._tick_ms / 1000):
                try:
                    for number in list(self._mine):
                        producer.send(f"{self._sagas.name}.requests", None, None, number, headers=[(TICK, b"")])
                except KafkaError as error:
                    log.warning("timers wait: the time could not be written: %s", error)

    def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
        super().on_partitions_assigned(partitions)
        self._mine |= {partition.partition for partition in partitions}

    def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
        self._mine -= {partition.partition for partition in partitions}
        super().on_partitions_revoked(partitions)

    def on_partitions_lost(self, partitions: list[TopicPartition]) -> None:
        self._mine -= {partition.partition for partition in partitions}
        super().on_partitions_lost(partitions)


# --- a participant ---
class Participate:
    """The function of a participant's loop. A command that comes again gets the reply of the first time."""

    def __init__(self, name: str, steps: Mapping[str, SagaStep], reply_partitions: int) -> None:
        self._replies, self._steps, self._count = f"{name}.replies", steps, reply_partitions

    def __call__(self, record: ConsumerRecord, state: State) -> list[Output]:
        order = _decode_order(record.value or b"")
        if order.action not in ("do", "undo", "forget") or not 0 <= order.reply_to < self._count:
            raise ValueError("no command: the action must be do, undo or forget, with a partition for the reply")
        step = self._steps.get(order.step)
        if step is None:
            raise SagaStepError(
                f"saga {order.saga!r} orders the step {order.step!r}, which this participant does not have (it has "
                f"{', '.join(self._steps)}). Nothing of it is lost: go on with a version that has it"
            )
        receipt = f"{RECEIPT}{order.saga}\x01{order.step}"
        if order.action == "forget":
            state.delete(receipt)
            return []
        reply = self._run(step, order, receipt, state)
        return [Output(_encode(reply), order.saga, self._replies, order.reply_to)]

    def _run(self, step: SagaStep, order: SagaOrder, receipt: str, state: State) -> SagaReply:
        known = state.get(receipt) or {}  # {"done": result} after do, {"undone": true} after undo
        status, result, error = "done", known.get("done"), ""
        function = step.do if order.action == "do" else step.undo
        if order.action == "undo" and "done" not in known:
            state.put(receipt, {"undone": True})  # there is nothing to undo
        elif order.action == "do" and "undone" in known:
            status, error = "failed", "it was undone before"
        elif function is None:
            status = "kept"
        elif order.action == "undo" or not known:
            call = StepCall(order.saga, order.step, f"{order.saga}/{order.step}", order.data, order.results, state)
            try:
                result = function(call)
                state.put(receipt, {"done": result} if order.action == "do" else {"undone": True})
            except Exception as failure:
                state.roll_back()
                status = "failed" if isinstance(failure, StepFailedError) else "error"
                result, error = None, reason_of(failure)[:REASON_CHARACTERS]
        return SagaReply(order.step, order.action, order.attempt, status, result, error)


# --- all of it ---
class Sagas:
    """Sagas of one kind, in topics of one name.

    name                of the kind; its topics are NAME.requests, NAME.replies, NAME.log (compacted), NAME.dead (what
                        could not be read) and NAME.SERVICE.commands
    steps               in order
    bootstrap_servers   the brokers, as host:port
    keep_ms             how long an ended saga is remembered; its id starts nothing again until then
    tick_ms             how often the orchestrator writes the time, hence how exact timers are
    client              more options, of those that all clients have (security.protocol ...), by Kafka's names
    """

    def __init__(
        self,
        name: str,
        steps: Iterable[SagaStep],
        *,
        bootstrap_servers: str | Iterable[str] = "localhost:9092",
        keep_ms: int = KEEP_MS,
        tick_ms: int = 1_000,
        client: Mapping[str, Any] | None = None,
    ) -> None:
        self.name, self._steps = name, list(steps)
        check_steps(self._steps)
        if not name or tick_ms < 1 or keep_ms < 1:
            raise ConfigError("sagas need a name, and tick_ms and keep_ms must be at least 1")
        self._keep_ms, self._tick_ms = keep_ms, tick_ms
        given = {option.replace(".", "_"): value for option, value in (client or {}).items()}
        self.options: dict[str, Any] = {"bootstrap_servers": bootstrap_servers, **given}
        self.services = list(dict.fromkeys(step.service for step in self._steps))
        self._producer: Producer | None = None
        self._partitions = 0

    def create(self, partitions: int = 4, replication_factor: int = -1) -> None:
        """Creates the topics that are not there. The number of partitions cannot be changed later."""
        topics: dict[str, Mapping[str, str]] = {
            f"{self.name}.requests": BROKER_TIME,
            f"{self.name}.replies": BROKER_TIME,
            f"{self.name}.log": COMPACTED,
            f"{self.name}.dead": {},
            **{f"{self.name}.{service}.commands": {} for service in self.services},
        }
        create_topics(self.options, topics, partitions, replication_factor)

    # -- loops ---------------------------------------------------------------------------------------------------------
    def orchestrator(self, *, directory: str | None = None, **options: Any) -> SagaOrchestrator:
        """An instance that leads sagas from step to step; `run()` it. Instances share the partitions."""
        partitions = self._check_partitions()
        table = SagaTable(self._steps, self._keep_ms)
        source = [f"{self.name}.requests", f"{self.name}.replies"]
        settings = self._loop(f"{self.name}.orchestrator", "sagas", "bytes", directory, options)
        producer = {"bootstrap_servers": settings["bootstrap_servers"], **settings["producer"]}
        max_bytes = ProducerSettings.of(underscored(producer)).max_request_size
        function = Orchestrate(self.name, table, partitions, max_bytes)
        return SagaOrchestrator(self, table, self._tick_ms, source, function=function, **settings)

    def participant(self, service: str = "steps", *, directory: str | None = None, **options: Any) -> Processor:
        """An instance that runs the steps of a service; `run()` it. Instances share the partitions."""
        steps = {step.name: step for step in self._steps if step.service == service}
        if not steps:
            raise ConfigError(f"no step has the service {service!r}; there is {', '.join(self.services)}")
        settings = self._loop(f"{self.name}.{service}", "state", "json", directory, options)
        function = Participate(self.name, steps, self._check_partitions())
        return Processor(f"{self.name}.{service}.commands", None, function, **settings)

    def run(self, **options: Any) -> None:
        """The orchestrator and all participants in this process, until SIGTERM or Ctrl-C."""
        loops = [self.orchestrator(**options), *(self.participant(service, **options) for service in self.services)]
        errors: list[BaseException] = []

        def stop() -> None:
            for loop in loops:
                loop.stop()

        def run(loop: Processor) -> None:
            try:
                loop.run()
            except BaseException as error:
                errors.append(error)
            stop()

        threads = [threading.Thread(target=run, args=[loop], name=f"saga-{n}") for n, loop in enumerate(loops)]
        with stop_on_signals(stop):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]

    def _loop(
        self, application_id: str, store: str, format: str, directory: str | None, options: dict[str, Any]
    ) -> dict[str, Any]:
        client = {name: value for name, value in self.options.items() if name != "bootstrap_servers"}
        return {
            "commit_interval_ms": 0,  # what comes while a transaction ends is the next one
            **options,
            "application_id": application_id,
            "bootstrap_servers": self.options["bootstrap_servers"],
            "state": KeyedState(store, format=format, directory=directory),
            "dead_letter_topic": f"{self.name}.dead",
            "consumer": {**client, **options.get("consumer", {})},
            "producer": {**client, **options.get("producer", {})},
        }

    def _check_partitions(self) -> int:
        changelog = f"{self.name}.orchestrator.sagas.changelog"
        alike = [f"{self.name}.{kind}" for kind in ("requests", "replies", "log")]
        return partition_count(self.options, alike, optional=[changelog])

    # -- for those who start sagas and look at them --------------------------------------------------------------------
    def start(self, saga: str, data: Any) -> None:
        """Starts a saga; again with the same id: nothing happens."""
        key = saga.encode()
        if not key:
            raise ConfigError("the id of a saga is empty")
        if self._producer is None:
            self._partitions = self._check_partitions()
            self._producer = Producer({"linger_ms": 0, **self.options})
        place = partition_for_key(key, self._partitions)
        self._producer.send(f"{self.name}.requests", _encode(data), key, place).result()

    @timeout_in_ms
    def wait(self, saga: str, *, timeout_ms: float = 60_000) -> SagaState:
        """The saga when it has ended. Reads the log from its beginning: for scripts and tests."""
        deadline = Deadline(timeout_ms / 1000)
        found: SagaState | None = None
        with self._reader() as consumer:
            place = TopicPartition(f"{self.name}.log", partition_for_key(saga.encode(), self._check_partitions()))
            consumer.assign([place])
            consumer.seek_to_beginning(place)
            while found is None or found.status not in ENDED:
                if deadline.expired:
                    state = "not started" if found is None else f"{found.status} at step {found.step!r} {found.error}"
                    raise TimedOutError(f"saga {saga!r} has not ended within {timeout_ms:g} ms: it is {state}")
                for record in consumer.poll(POLL_MS):
                    if record.key == saga.encode() and record.value is not None:
                        found = _decode_saga(record.value)
        return found

    def states(self) -> list[SagaState]:
        """The last state of every saga that is remembered, by the log."""
        return read_sagas(self.name, self.options)

    def _reader(self) -> Consumer:
        return _log_reader(self.options)

    def close(self) -> None:
        if self._producer is not None:
            self._producer.close()
            self._producer = None


def _log_reader(options: Mapping[str, Any]) -> Consumer:
    fixed = {"isolation_level": "read_committed", "auto_offset_reset": "earliest", "enable_auto_commit": False}
    return Consumer({**options, **fixed})


def read_sagas(name: str, options: Mapping[str, Any]) -> list[SagaState]:
    """The last state of every saga in NAME.log, oldest step first."""
    found: dict[bytes, SagaState] = {}
    partition_count(options, [f"{name}.log"])
    with _log_reader(options) as consumer:
        places = [TopicPartition(f"{name}.log", number) for number in consumer.partitions_for(f"{name}.log")]
        consumer.assign(places)
        consumer.seek_to_beginning(*places)
        ends = consumer.end_offsets(places)
        for records in read_up_to(consumer, ends):
            for record in records:
                found.pop(record.key, None)
                if record.value is not None:
                    found[record.key] = _decode_saga(record.value)
    return sorted(found.values(), key=lambda saga: (saga.since_ms, saga.saga))
