"""What is run under faults: small classes. A new one needs its processes, its topics and what to expect, and a line in
`table_workloads.WORKLOADS`."""

from __future__ import annotations

import json
import os
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from semel.prove.checker.check import Expectation, OffsetsRule, Violation
from semel.prove.checker.histories import check_appends, check_sagas, last_values, read_calls, statuses
from semel.prove.checker.reading import Seen, read
from semel.prove.checker.sinks import check_folder, folder_content
from semel.prove.database import TestbedDatabase
from semel.prove.injection import COMPACTION_POINTS, FILES_POINTS, SINK_POINTS, STATE_POINTS, TASK_POINTS
from semel.prove.inputs import KEYS, by_key, forbidden_up_to, key_of, source_expectation, values_up_to
from semel.prove.schedule import (
    ABORT_POINTS,
    COMMIT_POINTS,
    GROUP_APIS,
    LONG_FREEZE_MS,
    PLAIN_APIS,
    READ_APIS,
    TRANSACTION_APIS,
    Fault,
    broker_faults,
    network_faults,
    point_faults,
    process_faults,
)
from semel.prove.testbed import SupervisedProcess, Testbed


# --- Finding the user's functions by their names ---
class AppError(Exception):
    """What was named is not there, or is not a function."""


def load_function(name: str) -> Callable[..., Any]:
    """`package.module:function`, looked for in the current folder too."""
    module_name, colon, attribute = name.partition(":")
    if not colon or not attribute:
        raise AppError(f"{name!r} should read module:function")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(import_module(module_name), attribute)
    except ImportError as error:
        raise AppError(f"{name}: the module cannot be imported: {error}") from error
    except AttributeError:
        raise AppError(f"{name}: module {module_name} has no {attribute!r}") from None
    if not callable(found):
        raise AppError(f"{name} is not a function")
    return found  # type: ignore[no-any-return]


def expectation_name(app: str) -> str:
    """Where the function that says what is expected is, unless the user says otherwise."""
    return f"{app.partition(':')[0]}:expected"


# --- What a workload says of itself ---
PARTITIONS = 4
PRODUCER = "producer"  # the process that fills the source; it ends when it is done
FEED_PACE_MS = 60
SESSION_TIMEOUT_MS = {True: 2_000, False: 6_000}  # with a broker of one's own; the least that Kafka allows by default
PRODUCER_APIS = ("InitProducerId", "Produce", "EndTxn")


class Workload(ABC):
    """A pipeline from a source topic to output topics, as processes."""

    name: ClassVar[str]
    help: ClassVar[str]
    faults_per_round: ClassVar[int] = 8
    spread_ms: ClassVar[int] = 1_200  # faults of a round begin within so long
    guarantees: ClassVar[tuple[str, ...]] = ("exactly_once", "at_least_once", "at_most_once")  # that it can be run with
    may_end_quietly: ClassVar[bool] = True  # with its groups at the end, it is over when nothing more comes
    stuck_after_s: ClassVar[float] = 120.0  # after that a pipeline that has not caught up is stuck
    ends_when_quiet: ClassVar[bool] = True  # without groups: whether one that writes nothing for long has ended

    def __init__(self, testbed: Testbed, prefix: str, guarantee: str, options: Mapping[str, str]) -> None:
        self.testbed = testbed
        self.prefix = prefix
        self.guarantee = guarantee
        self.options = dict(options)
        self.source = f"{prefix}.in"
        self.checkpoint: Path | None = None
        self.database: TestbedDatabase | None = None

    # --- for planning ---
    @classmethod
    @abstractmethod
    def faults(cls, guarantee: str, *, broker: bool) -> list[Fault]:
        """Every fault that makes sense; with those of the broker's process if it is ours."""

    @classmethod
    def led(cls, guarantee: str) -> tuple[str, ...]:
        """Which leaders matter on a cluster of several nodes."""
        return ("output", "offsets", *(("transactions",) if guarantee == "exactly_once" else ()))

    @staticmethod
    def producer_faults() -> list[Fault]:
        return [*process_faults("producer", PRODUCER_APIS), *network_faults(PRODUCER_APIS, "producer")]

    # --- for running ---
    @property
    def outputs(self) -> tuple[str, ...]:
        """The topics at the end."""
        return (f"{self.prefix}.out",)

    @property
    def application(self) -> str:
        return f"{self.prefix}-app"

    def topics(self) -> dict[str, int]:
        """All topics to be made, with their partitions."""
        return dict.fromkeys((self.source, *self.outputs), PARTITIONS)

    def led_topic(self, led: str) -> tuple[str, str]:
        """The topic whose leader is meant, and for internal topics the group or id whose partition it is."""
        return {
            "output": ((*self.outputs, self.source)[0], ""),
            "ledger": (f"{self.application}.ledger", ""),
            "offsets": ("__consumer_offsets", self.groups()[-1][0] if self.groups() else self.application),
            "transactions": ("__transaction_state", self.transactional_id),
        }[led]

    @property
    def transactional_id(self) -> str:
        return self.application

    @abstractmethod
    def start(self) -> None:
        """Starts its processes, supervised by the testbed."""

    def groups(self) -> list[tuple[str, str]]:
        """(group, topic it reads): when all of them stand at the end, the work is done."""
        return [(self.application, self.source)]

    @abstractmethod
    def expectation(self, transactions: int) -> Expectation:
        """What the outputs must hold after so many transactions of input."""

    def source_expectations(self, transactions: int) -> list[Expectation]:
        """Of what the producer wrote, looked at when a workload ends."""
        return [source_expectation(self.source, transactions)]

    def further_expectations(self, transactions: int) -> list[Expectation]:
        """Of topics in between, looked at when a workload ends."""
        return []

    def copied(
        self, reader: tuple[str, str], topics: tuple[str, ...], transactions: int, **changes: Any
    ) -> Expectation:
        """Every record is there once, in order, and the reader, one of `groups`, stands where the output ends."""
        fields: dict[str, Any] = {
            "ids": dict.fromkeys(values_up_to(transactions), 1),
            "order": by_key,
            "forbidden": forbidden_up_to(transactions),
            "offsets": (OffsetsRule(*reader, lambda record: [(record.value or b"").decode()]),),
            **changes,
        }
        return Expectation(topics, **fields)

    def table_violations(self, transactions: int) -> list[Violation]:
        """What is wrong with the tables that it writes to."""
        return []

    def end(self) -> None:
        """Ends what is no process of the testbed."""
        if self.database is not None:
            self.database.close()

    def complete(self, seen: Iterable[Seen], transactions: int) -> bool:
        """Whether a reader has everything. Asked again and again, so it should be quick."""
        return len({record.value for record in seen}) >= len(values_up_to(transactions))

    # --- pieces ---
    @property
    def member_options(self) -> dict[str, Any]:
        """Of a consumer in a group."""
        return {
            "session_timeout_ms": SESSION_TIMEOUT_MS[self.testbed.own is not None],
            "heartbeat_interval_ms": 300,
            "request_timeout_ms": REQUEST_TIMEOUT_MS,
        }

    def run(self, name: str, worker: str, options: Mapping[str, Any], *, spark: bool = False) -> SupervisedProcess:
        """Starts a program of `semel.prove.workers` with options as JSON."""
        started = self.testbed.add_process(name, "-m", "semel.prove.workers", worker, json.dumps(options), spark=spark)
        started.start()
        return started

    def feed(self, transactions: int) -> SupervisedProcess:
        """Starts the producer that fills the source up to so many transactions, and then ends."""
        return self.run(
            PRODUCER,
            "producer",
            {
                "brokers": self.testbed.proxy.bootstrap,
                "direct": self.testbed.direct,
                "topic": self.source,
                "transactional_id": f"{self.prefix}-producer",
                "state": str(self.testbed.folder / f"{self.prefix}.acknowledged"),
                "upto": transactions,
                "pace_ms": FEED_PACE_MS,
            },
        )


# --- The processing loop, `semel.process`: two instances of one application, and a chain of three applications ---
TRANSACTION_TIMEOUT_MS = 4_000
REQUEST_TIMEOUT_MS = 1_500
RESPONSE_POINTS = ("InitProducerId", "Produce", "TxnOffsetCommit", "EndTxn", "OffsetFetch", "JoinGroup")


def unit_of(record: Seen) -> str | None:
    tag = record.header("txn")
    return tag.decode() if tag else None


def loop_faults(guarantee: str, broker: bool, workers: tuple[str, ...]) -> list[Fault]:
    exactly = guarantee == "exactly_once"
    apis = TRANSACTION_APIS if exactly else PLAIN_APIS
    faults = [
        *network_faults((*apis, *GROUP_APIS, *READ_APIS), workers[0].partition("-")[0]),
        *Workload.producer_faults(),
    ]
    for worker in workers:
        faults += process_faults(worker, apis)
        if exactly:
            faults += [Fault("takeover", worker, api=api, side="request") for api in ("EndTxn", "TxnOffsetCommit")]
    if broker:
        responses = tuple(f"{api}.{when}_response" for api in RESPONSE_POINTS for when in ("before", "after"))
        faults += broker_faults((*COMMIT_POINTS, *ABORT_POINTS, *responses))
        faults.append(Fault("delay", "broker", "marker.before", for_ms=400, times=3))
    return faults


class LoopWorkload(Workload):
    name = "loop"
    help = "semel.process: two instances share a topic and copy it"

    @classmethod
    def faults(cls, guarantee: str, *, broker: bool) -> list[Fault]:
        return loop_faults(guarantee, broker, ("worker-a", "worker-b"))

    @property
    def transactional_id(self) -> str:
        return f"{self.application}-worker-a"

    def start(self) -> None:
        for name in ("worker-a", "worker-b"):
            is_static = name == "worker-a" and self.options.get("static") != "no"
            self.start_link(name, self.application, self.source, self.outputs[0], static=is_static)

    def start_link(self, name: str, application: str, source: str, sink: str, *, static: bool) -> None:
        """`name` is the process; a static member keeps its partitions over a restart."""
        options = {
            "source": source,
            "sink": sink,
            "application_id": application,
            "guarantee": self.guarantee,
            "bootstrap_servers": self.testbed.proxy.bootstrap,
            "instance": name,
            "delay_ms": 1,
            "commit_interval_ms": int(self.options.get("commit_ms", "100")),
            "max_records": 200,
            "transaction_timeout_ms": TRANSACTION_TIMEOUT_MS,
            "consumer": {**self.member_options, "group_instance_id": name if static else None},
            "producer": {"request_timeout_ms": REQUEST_TIMEOUT_MS},
        }
        self.run(name, self.worker, options | self.more_options(name))

    worker: ClassVar[str] = "loop"

    def more_options(self, name: str) -> dict[str, Any]:
        return {}

    def expectation(self, transactions: int) -> Expectation:
        return self.copied(self.groups()[-1], self.outputs, transactions, transaction=unit_of)


class StateWorkload(LoopWorkload):
    name = "state"
    help = "semel.process with state: how often each key was seen, which must equal a replay of the input"
    worker = "counting-loop"

    @classmethod
    def faults(cls, guarantee: str, *, broker: bool) -> list[Fault]:
        workers = ("worker-a", "worker-b")
        own = [fault for worker in workers for fault in point_faults(worker, STATE_POINTS)]
        return [*loop_faults(guarantee, broker, workers), *own, *own]

    def more_options(self, name: str) -> dict[str, Any]:
        return {"directory": str(self.testbed.folder / f"{self.prefix}.{name}.state")}

    def expectation(self, transactions: int) -> Expectation:
        """Every count of every key once, rising, and the group stands where the output ends."""
        values = values_up_to(transactions)
        return Expectation(
            self.outputs,
            ids=dict.fromkeys(map(_count_made_of, values), 1),
            identify=_key_and_count,
            order=_count_of,
            totals=_totals(transactions),
            total_of=_count_of,
            transaction=unit_of,
            offsets=(OffsetsRule(*self.groups()[-1], lambda record: [_count_made_of((record.value or b"").decode())]),),
        )

    def further_expectations(self, transactions: int) -> list[Expectation]:
        """The changelog has the same counts."""
        changelog = f"{self.application}.counts.changelog"
        last = _totals(transactions)
        return [Expectation((changelog,), identify=_change, totals=last, total_of=_changed_count)]

    def complete(self, seen: Iterable[Seen], transactions: int) -> bool:
        return _is_counted(seen, transactions)


def _totals(transactions: int) -> Counter[str]:
    return Counter(key_of(int(value)).decode() for value in values_up_to(transactions))


def _is_counted(seen: Iterable[Seen], transactions: int) -> bool:
    last = dict(map(_count_of, seen))
    return all(last.get(name, 0) >= number for name, number in _totals(transactions).items())


def _count_of(record: Seen) -> tuple[str, int]:
    return (record.key or b"").decode(), int(record.value or b"0")


def _key_and_count(record: Seen) -> str:
    return "{}={}".format(*_count_of(record))


def _count_made_of(value: str) -> str:
    """What counting makes of an input: those of a key are numbered in a row."""
    return f"{key_of(int(value)).decode()}={int(value) // KEYS + 1}"


def _change(record: Seen) -> str:
    return f"{record.partition}: {record.key!r}={record.value!r}"


def _changed_count(record: Seen) -> tuple[str, int]:
    """Of a changelog: a count, or something that semel writes itself."""
    value = record.value or b""
    return (record.key or b"").decode(), int.from_bytes(value, "big") if len(value) == 8 else 0


class ChainWorkload(LoopWorkload):
    name = "chain"
    help = "three services one after the other, each exactly once"

    SERVICES = ("service-1", "service-2", "service-3")

    @classmethod
    def faults(cls, guarantee: str, *, broker: bool) -> list[Fault]:
        return loop_faults(guarantee, broker, cls.SERVICES)

    @property
    def transactional_id(self) -> str:
        return f"{self.prefix}-{self.SERVICES[-1]}-{self.SERVICES[-1]}"

    @property
    def stations(self) -> list[str]:
        return [self.source, f"{self.prefix}.one", f"{self.prefix}.two", f"{self.prefix}.out"]

    def topics(self) -> dict[str, int]:
        return dict.fromkeys(self.stations, 4)

    def groups(self) -> list[tuple[str, str]]:
        return [(f"{self.prefix}-{name}", source) for name, source in zip(self.SERVICES, self.stations, strict=False)]

    def start(self) -> None:
        for name, (source, sink) in zip(self.SERVICES, pairwise(self.stations), strict=True):
            self.start_link(name, f"{self.prefix}-{name}", source, sink, static=True)

    def further_expectations(self, transactions: int) -> list[Expectation]:
        return [
            self.copied(reader, (sink,), transactions, transaction=unit_of)
            for reader, sink in zip(self.groups()[:2], self.stations[1:3], strict=True)
        ]


# --- patterns on the loop: entities and sagas, whose callers take the place of the producer ---
class PatternWorkload(Workload):
    """Instances of loops with state, in topics that they create themselves."""

    guarantees = ("exactly_once",)
    loops: ClassVar[dict[str, dict[str, str]]]  # the name of a process -> what it runs
    worker: ClassVar[str]
    caller: ClassVar[str]

    @classmethod
    def faults(cls, guarantee: str, *, broker: bool) -> list[Fault]:
        own = [fault for name in cls.loops for fault in point_faults(name, STATE_POINTS)]
        faults = loop_faults(guarantee, broker, tuple(cls.loops))
        met = [fault for fault in faults if fault.api != "EndTxn" or PRODUCER not in (fault.client, fault.target)]
        return [*met, *own, *own]

    @property
    def application(self) -> str:
        return f"{self.prefix}.kind"

    def start(self) -> None:
        for name, role in self.loops.items():
            options = {
                "name": self.application,
                "partitions": PARTITIONS,
                "bootstrap_servers": self.testbed.proxy.bootstrap,
                "instance": name,
                "transaction_timeout_ms": TRANSACTION_TIMEOUT_MS,
                "directory": str(self.testbed.folder / f"{self.prefix}.{name}.state"),
                "consumer": self.member_options,
                "producer": {"request_timeout_ms": REQUEST_TIMEOUT_MS},
            }
            self.run(name, self.worker, options | role)

    def feed(self, transactions: int) -> SupervisedProcess:
        options = {
            "name": self.application,
            "partitions": PARTITIONS,
            "brokers": self.testbed.proxy.bootstrap,
            "direct": self.testbed.direct,
            "history": str(self._history),
            "state": str(self._history),
            "upto": transactions,
        }
        return self.run(PRODUCER, self.caller, options)

    @property
    def _history(self) -> Path:
        return self.testbed.folder / f"{self.prefix}.history"

    def source_expectations(self, transactions: int) -> list[Expectation]:
        return []


class EntitiesWorkload(PatternWorkload):
    name = "entities"
    help = "semel.Entities: 50 threads append to entities; of concurrent ones one wins, and what calls return holds"
    loops: ClassVar = {"worker-a": {}, "worker-b": {}}
    worker, caller = "entity-owner", "entity-writers"

    def __init__(self, testbed: Testbed, prefix: str, guarantee: str, options: Mapping[str, str]) -> None:
        super().__init__(testbed, prefix, guarantee, options)
        self.source = f"{self.application}.commands"

    @property
    def outputs(self) -> tuple[str, ...]:
        return (self.application,)

    @property
    def transactional_id(self) -> str:
        return f"{self.application}-worker-a"

    def expectation(self, transactions: int) -> Expectation:
        return Expectation(self.outputs, ids=dict.fromkeys(values_up_to(transactions), 1), order=_version_of)

    def table_violations(self, transactions: int) -> list[Violation]:
        return check_appends(self.application, read_calls(self._history), read(self.testbed.direct, [self.application]))


def _version_of(record: Seen) -> tuple[str, int]:
    return (record.key or b"").decode(), int(record.header("version") or b"0")


class SagasWorkload(PatternWorkload):
    name = "sagas"
    help = "semel.Sagas: transfers in three steps, some refused; each is done or undone as a whole"
    loops: ClassVar = {
        "worker-a": {"role": "orchestrator"},
        "worker-b": {"role": "orchestrator"},
        "worker-c": {"role": "participant"},
        "worker-d": {"role": "participant"},
    }
    worker, caller = "saga-loop", "saga-starts"

    def __init__(self, testbed: Testbed, prefix: str, guarantee: str, options: Mapping[str, str]) -> None:
        super().__init__(testbed, prefix, guarantee, options)
        self.source = f"{self.application}.requests"

    @property
    def outputs(self) -> tuple[str, ...]:
        return (f"{self.application}.log",)

    @property
    def transactional_id(self) -> str:
        return f"{self.application}.orchestrator-worker-a"

    may_end_quietly = False  # what is under way between its loops is in none of these groups

    def groups(self) -> list[tuple[str, str]]:
        return [(f"{self.application}.orchestrator", self.source)]

    def expectation(self, transactions: int) -> Expectation:
        return Expectation(self.outputs, identify=_saga_entry)

    def complete(self, seen: Iterable[Seen], transactions: int) -> bool:
        ends = statuses(seen)
        return all(ends.get(f"s-{int(value)}") in SAGA_ENDS for value in values_up_to(transactions))

    def table_violations(self, transactions: int) -> list[Violation]:
        numbers = [int(value) for value in values_up_to(transactions)]
        wanted = {f"s-{number}": SAGA_ENDS[_is_refused(number) :] for number in numbers}
        log = f"{self.application}.log"
        changes = read(self.testbed.direct, [f"{self.application}.accounts.state.changelog"])
        balances = {key.decode(): int(value) for key, value in last_values(changes).items() if key[:1] > b"\x01"}
        return check_sagas(log, statuses(read(self.testbed.direct, [log])), wanted, balances, _effects)


SAGA_ENDS = ("done", "compensated")  # a step that is not run in time is undone


def _is_refused(number: int) -> bool:
    return number % 5 == 4 or number % 7 == 6


def _effects(saga: str) -> dict[str, int]:
    number = int(saga.removeprefix("s-"))
    found: Counter[str] = Counter({f"account-{number % 8}": -(100 + number)})
    found[f"account-{(number * 3 + 1) % 8}"] += 100 + number
    return found


def _saga_entry(record: Seen) -> str:
    """A state of a saga: each is written once."""
    if record.value is None:
        return f"{record.key!r} forgotten"
    state = json.loads(record.value)
    return "{saga} {status} {at} {tries} {waits_for} {due_ms}".format(**state)


# --- Files: two instances of a loop write one folder, and a third process compacts it ---
class FilesWorkload(LoopWorkload):
    name = "files"
    help = "semel.process into a folder (semel.Files): two instances, and compactions; the folder must equal the topic"
    guarantees = ("exactly_once",)
    worker = "files"

    @classmethod
    def faults(cls, guarantee: str, *, broker: bool) -> list[Fault]:
        faults = [
            *network_faults(("OffsetFetch", "JoinGroup", "Fetch", "OffsetCommit"), "worker"),
            *cls.producer_faults(),
        ]
        for worker in ("worker-a", "worker-b"):
            faults += [*process_faults(worker, ()), Fault("takeover", worker, api="Fetch", side="request")]
            faults += [*point_faults(worker, FILES_POINTS)] * 2
            faults += [Fault("stop", worker, point, for_ms=LONG_FREEZE_MS) for point in FILES_POINTS]
        faults += [*process_faults("compactor", ()), *point_faults("compactor", COMPACTION_POINTS)] * 2
        return [*faults, *broker_faults(())] if broker else faults

    @property
    def outputs(self) -> tuple[str, ...]:
        """There is no topic at the end: the folder is looked at as tables are."""
        return (self.source,)

    @property
    def folder(self) -> Path:
        return self.testbed.folder / f"{self.prefix}.files"

    def groups(self) -> list[tuple[str, str]]:
        """The folder has the offsets: the group may be behind them after a crash."""
        return []

    def start(self) -> None:
        super().start()
        self.run("compactor", "compactor", {"folder": str(self.folder)})

    def more_options(self, name: str) -> dict[str, Any]:
        return {"folder": str(self.folder)}

    def expectation(self, transactions: int) -> Expectation:
        return source_expectation(self.source, transactions)

    def table_violations(self, transactions: int) -> list[Violation]:
        return check_folder(self.folder, dict.fromkeys(values_up_to(transactions), 1))

    def complete(self, seen: Iterable[Seen], transactions: int) -> bool:
        return sum(folder_content(self.folder).files.values()) >= len(values_up_to(transactions))


# --- Structured Streaming queries with `semel.sink`, on local Spark ---
LOCAL = "local[2,4]"  # a task may fail three times before its job does
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"  # drivers live for seconds: starting fast counts
CONF = {
    "spark.driver.extraJavaOptions": QUICK,
    "spark.executor.extraJavaOptions": QUICK,
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.memory": "768m",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
}
DESCRIBE = ("DescribeProducers",)


class SparkWorkload(Workload):
    name = "spark"
    help = "a stateless Structured Streaming query: rows keep their keys and their order"
    faults_per_round = 5
    spread_ms = 2_500
    stuck_after_s = 240.0

    query: ClassVar[str] = "copy"

    @classmethod
    def faults(cls, guarantee: str, *, broker: bool) -> list[Fault]:
        exactly = guarantee == "exactly_once"
        apis = (*TRANSACTION_APIS, *DESCRIBE) if exactly else PLAIN_APIS
        faults = [*network_faults((*apis, "ListOffsets", *READ_APIS), "driver"), *cls.producer_faults()]
        faults += [Fault("kill", "driver"), Fault("stop", "driver", for_ms=1_500), Fault("kill", "task")]
        faults += cls.guarantee_faults(guarantee)
        if exactly:
            faults += [
                Fault("stop", "driver", point, for_ms=1_000) for point in ("sink.after_write", "sink.after_offsets")
            ]
            faults += [Fault("takeover", "driver", point) for point in ("sink.before_begin", "sink.after_offsets")]
            faults += cls.checkpoint_faults()
        if broker:
            faults += broker_faults((*COMMIT_POINTS, "EndTxn.before_response", "EndTxn.after_response"))
        return faults

    @classmethod
    def guarantee_faults(cls, guarantee: str) -> list[Fault]:
        """The points of the sink's protocol that a guarantee passes, and those of its tasks."""
        if guarantee == "exactly_once":
            tasks = [Fault("stop", "task", point, for_ms=1_500) for point in TASK_POINTS]
            return [*point_faults("driver", SINK_POINTS), *point_faults("task", TASK_POINTS), *tasks]
        point = "sink.after_write" if guarantee == "at_least_once" else "sink.after_offsets"
        return [Fault("kill", "driver", point)] * 3

    @classmethod
    def led(cls, guarantee: str) -> tuple[str, ...]:
        return (*super().led(guarantee), *(("ledger",) if guarantee == "exactly_once" else ()))

    @classmethod
    def checkpoint_faults(cls) -> list[Fault]:
        return [Fault("checkpoint_lost", "driver")]

    def sink_options(self) -> dict[str, Any]:
        return {"topic": self.outputs[0]}

    def start(self) -> None:
        self.checkpoint = self.testbed.folder / self.prefix / "checkpoint"
        exactly = self.guarantee == "exactly_once"
        master, conf = self.spark_cluster()
        job = {
            "query": self.query,
            "master": master,
            "conf": conf,
            "brokers": self.testbed.proxy.bootstrap,
            "checkpoint": str(self.checkpoint),
            "trigger": "100 milliseconds",
            "source": {
                "subscribe": self.source,
                "startingOffsets": "committed" if exactly and self.query != "count" else "earliest",
                "maxOffsetsPerTrigger": self.options.get("per_batch", "120"),
                "applicationId": self.application,
                "kafka.request.timeout.ms": "3000",
                "kafka.client.id": "driver-source",
            },
            "sink": {
                "application_id": self.application,
                "guarantee": self.guarantee,
                "transaction_timeout_ms": 60_000,
                "client": {"request.timeout.ms": 3_000, "client.id": "driver", **self._batch_size()},
                **self.sink_options(),
            },
        }
        driver = self.run("driver", "spark", job, spark=True)
        driver.hosts = self.testbed.spark.workers if self.testbed.spark is not None else ()

    def spark_cluster(self) -> tuple[str, dict[str, str]]:
        """The master's address, and the settings of a session."""
        return LOCAL, CONF

    def _batch_size(self) -> dict[str, Any]:
        return {"batch.size": int(self.options["batch_bytes"])} if "batch_bytes" in self.options else {}

    def expectation(self, transactions: int) -> Expectation:
        return self.copied(self.groups()[0], self.outputs, transactions, one_epoch_each=True)


class AnyOrderWorkload(SparkWorkload):
    name = "spark-any-order"
    help = "a stateless query whose rows come in another order with every attempt, and go to either of two topics"

    query = "any_order"

    @property
    def outputs(self) -> tuple[str, ...]:
        return (f"{self.prefix}.out", f"{self.prefix}.more")[: int(self.options.get("topics", "2"))]

    def sink_options(self) -> dict[str, Any]:
        return {"topics": list(self.outputs)}

    def expectation(self, transactions: int) -> Expectation:
        return self.copied(self.groups()[0], self.outputs, transactions, one_epoch_each=True, order=None)


class ExecutorsWorkload(AnyOrderWorkload):
    name = "spark-executors"
    help = "the same on a standalone cluster: a master, two workers, an executor on each (needs about 3 GB of memory)"
    stuck_after_s = 300.0

    def spark_cluster(self) -> tuple[str, dict[str, str]]:
        cluster = self.testbed.start_spark_cluster(self.testbed.folder / self.prefix / "spark", QUICK)
        return cluster.url, {**CONF, **cluster.conf()}

    @classmethod
    def guarantee_faults(cls, guarantee: str) -> list[Fault]:
        at_once = [Fault("kill", "executor", api=api, side="response") for api in ("Produce", "Fetch")]
        return [*at_once, Fault("kill", "executor"), Fault("stop", "executor", for_ms=3_000)] * 3

    @classmethod
    def checkpoint_faults(cls) -> list[Fault]:
        return []


class StreamWriterWorkload(SparkWorkload):
    name = "spark-stream-writer"
    help = "a stateless query written with writeStream.format('semel'): planned and committed in processes apart"

    guarantees = ("exactly_once",)
    query = "routed"

    @classmethod
    def faults(cls, guarantee: str, *, broker: bool) -> list[Fault]:
        """What meets a point of the sink is a Python process of the driver, not the driver: it cannot be replaced."""
        faults = super().faults(guarantee, broker=broker)
        return [fault for fault in faults if fault.what != "takeover"]


class StatefulWorkload(SparkWorkload):
    name = "spark-stateful"
    help = "a stateful query: how often each key was seen; state and output must agree"

    query = "count"

    @classmethod
    def checkpoint_faults(cls) -> list[Fault]:
        return []  # a stateful query that lost its state cannot go on, and says so

    def expectation(self, transactions: int) -> Expectation:
        """Each count once, rising, and the last one right."""
        return Expectation(
            self.outputs,
            identify=_key_and_count,
            order=_count_of,
            totals=_totals(transactions),
            total_of=_count_of,
            one_epoch_each=True,
        )

    def complete(self, seen: Iterable[Seen], transactions: int) -> bool:
        return _is_counted(seen, transactions)


# --- The user's own pipeline from topic to topic, with their function that says what is expected ---
class AppWorkload(Workload):
    name = "app"
    help = "your own pipeline: --app module:function"
    spread_ms = 2_000

    @classmethod
    def faults(cls, guarantee: str, *, broker: bool) -> list[Fault]:
        apis = TRANSACTION_APIS if guarantee == "exactly_once" else PLAIN_APIS
        faults = [*network_faults((*apis, *READ_APIS), ""), *cls.producer_faults()]
        faults += [fault for fault in process_faults("app", ()) for _ in range(6)]
        return [*faults, *broker_faults(("EndTxn.before_response", "EndTxn.after_response"))] if broker else faults

    def groups(self) -> list[tuple[str, str]]:
        return []  # whether it has one is its own business

    def start(self) -> None:
        self.run(
            "app",
            "app",
            {
                "app": self.options["app"],
                "brokers": self.testbed.proxy.bootstrap,
                "source": self.source,
                "output": self.outputs[0],
                "application_id": self.application,
            },
        )

    def _outputs_of(self, transactions: int) -> Counter[str]:
        """How often each value must be in the output."""
        function = load_function(self.options["expected"])
        found: Counter[str] = Counter()
        for value in values_up_to(transactions):
            found.update(_text(out) for out in function(value.encode()))
        return found

    def expectation(self, transactions: int) -> Expectation:
        return Expectation(self.outputs, ids=self._outputs_of(transactions))

    def complete(self, seen: Iterable[Seen], transactions: int) -> bool:
        return not self._outputs_of(transactions) - Counter(_text(record.value or b"") for record in seen)


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode(errors="replace")
