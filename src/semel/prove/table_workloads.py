"""Pipelines into PostgreSQL under faults, which include the database's: its server, its backends, and connections that
break at COMMIT. Tables are read through psycopg."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import psycopg

from semel.prove import inputs
from semel.prove.checker.check import Expectation, Violation, ViolationKind
from semel.prove.checker.reading import Seen
from semel.prove.checker.sinks import check_table
from semel.prove.database import TestbedDatabase
from semel.prove.injection import (
    DECISION_POINTS,
    POSTGRES_POINTS,
    POSTGRES_SINK_POINTS,
    POSTGRES_TASK_POINTS,
    SINK_POINTS,
    TASK_POINTS,
)
from semel.prove.inputs import values_up_to
from semel.prove.schedule import (
    ABORT_POINTS,
    COMMIT_POINTS,
    Fault,
    broker_faults,
    database_faults,
    network_faults,
    point_faults,
    process_faults,
)
from semel.prove.workloads import (
    REQUEST_TIMEOUT_MS,
    RESPONSE_POINTS,
    TRANSACTION_TIMEOUT_MS,
    AnyOrderWorkload,
    AppWorkload,
    ChainWorkload,
    EntitiesWorkload,
    ExecutorsWorkload,
    FilesWorkload,
    LoopWorkload,
    SagasWorkload,
    SparkWorkload,
    StatefulWorkload,
    StateWorkload,
    StreamWriterWorkload,
    Workload,
)

PRODUCE_APIS = ("InitProducerId", "Produce", "EndTxn")
TABLE_APIS = ("OffsetFetch", "JoinGroup", "Fetch")
APPLIED = "applied"  # a row for each record
COPIES = 2  # so many records are the same event, for an inbox
WORKERS = ("worker-a", "worker-b")


class TableWorkload(Workload):
    """Has a database, whose table must hold what was fed in."""

    guarantees = ("exactly_once",)
    ends_when_quiet = False  # the table says what is missing

    @classmethod
    def broker_and_database_faults(cls, *, broker: bool) -> list[Fault]:
        """The database's faults, and the broker's if it is ours."""
        faults = list(database_faults()) * 4
        if broker:
            apis = [api for api in RESPONSE_POINTS if api != "TxnOffsetCommit"]  # the database has the offsets
            responses = tuple(f"{api}.{when}_response" for api in apis for when in ("before", "after"))
            faults += broker_faults((*COMMIT_POINTS, *ABORT_POINTS, *responses))
        return faults

    def rows(self, transactions: int) -> dict[str, int]:
        """How often each value must be in the table."""
        return dict.fromkeys(values_up_to(transactions), 1)

    def table_violations(self, transactions: int) -> list[Violation]:
        assert self.database is not None
        return check_table(self.database.direct, APPLIED, "value", self.rows(transactions))

    def has_rows(self, transactions: int) -> bool:
        try:
            found = self.table_violations(transactions)
        except psycopg.Error:
            return False  # the database is coming back
        return all(each.kind is not ViolationKind.LOST for each in found)

    def groups(self) -> list[tuple[str, str]]:
        """The tables have the offsets: the group may be behind them after a crash."""
        return []

    def expectation(self, transactions: int) -> Expectation:
        return self.copied((self.application, self.source), self.outputs, transactions, offsets=())


class OnlyTables(TableWorkload):
    """Writes to no topic."""

    @property
    def outputs(self) -> tuple[str, ...]:
        return ()

    @classmethod
    def led(cls, guarantee: str) -> tuple[str, ...]:
        return ("offsets",)

    def expectation(self, transactions: int) -> Expectation:
        """Of topics: that the input is what was fed in. The rest is in the table."""
        return inputs.source_expectation(self.source, transactions)

    def complete(self, seen: Iterable[Seen], transactions: int) -> bool:
        return self.has_rows(transactions)


# --- the loop, `semel.process` with a `semel.Postgres` sink ---
class LoopIntoTables(TableWorkload):
    """Two instances of one application."""

    kind: ClassVar[str]  # of the program that they run

    @classmethod
    def faults(cls, guarantee: str, *, broker: bool) -> list[Fault]:
        faults = [
            *network_faults(TABLE_APIS, "worker"),
            *cls.producer_faults(),
            *cls.broker_and_database_faults(broker=broker),
        ]
        for worker in WORKERS:
            faults += [*process_faults(worker, ()), Fault("takeover", worker, api="Fetch", side="request")]
        return faults + list(point_faults(WORKERS[0], cls.points())) * 2

    @classmethod
    def points(cls) -> Iterable[str]:
        return POSTGRES_POINTS

    def start(self) -> None:
        self.database = TestbedDatabase(APPLIED)
        for name in WORKERS:
            options = {
                "kind": self.kind,
                "dsn": self.database.dsn,
                "bootstrap_servers": self.testbed.proxy.bootstrap,
                "source": self.source,
                "topic": f"{self.prefix}.out",
                "table": APPLIED,
                "application_id": self.application,
                "instance": name,
                "consumer": self.member_options,
                **self.more_options(),
            }
            self.run(name, "tables", options)

    def more_options(self) -> dict[str, Any]:
        return {}


class PostgresWorkload(OnlyTables, LoopIntoTables):
    name = "postgres"
    help = "topic to PostgreSQL: two instances of semel.process with a semel.Postgres sink share a topic"
    kind = "rows"


class InboxWorkload(OnlyTables, LoopIntoTables):
    name = "inbox"
    help = "the same as an inbox: of two records with one event id, in any partitions, one is applied"
    kind = "inbox"

    def rows(self, transactions: int) -> dict[str, int]:
        return dict.fromkeys((event_of(value) for value in values_up_to(transactions)), 1)


def event_of(value: str) -> str:
    """The id of the event that a record is a copy of."""
    return str(int(value) // COPIES)


class PostgresAndTopicsWorkload(LoopIntoTables):
    name = "postgres+topics"
    help = "topic to PostgreSQL and to another topic in one decision: semel.Postgres(with_topics=True)"
    kind = "both"

    @classmethod
    def faults(cls, guarantee: str, *, broker: bool) -> list[Fault]:
        faults = super().faults(guarantee, broker=broker)
        for worker in WORKERS:
            faults += process_faults(worker, PRODUCE_APIS)
            faults += [Fault("takeover", worker, api=api, side="request") for api in ("EndTxn", "Produce")]
        return [*faults, *network_faults(PRODUCE_APIS, "worker")]

    @classmethod
    def points(cls) -> Iterable[str]:
        return (*POSTGRES_POINTS, *DECISION_POINTS)

    def more_options(self) -> dict[str, Any]:
        return {
            "transaction_timeout_ms": TRANSACTION_TIMEOUT_MS,
            "producer": {"request_timeout_ms": REQUEST_TIMEOUT_MS},
        }

    @property
    def transactional_id(self) -> str:
        return f"{self.application}-{WORKERS[0]}"

    def complete(self, seen: Iterable[Seen], transactions: int) -> bool:
        return super().complete(seen, transactions) and self.has_rows(transactions)


class OutboxWorkload(LoopIntoTables):
    name = "outbox"
    help = "topic to PostgreSQL, with receipts (semel.Postgres), and from its outbox to a topic (semel.Outbox)"
    kind = "outbox"

    @classmethod
    def faults(cls, guarantee: str, *, broker: bool) -> list[Fault]:
        faults = super().faults(guarantee, broker=broker)
        return [*faults, *network_faults(PRODUCE_APIS, "outbox"), *process_faults("relay", ())]

    @classmethod
    def points(cls) -> Iterable[str]:
        return ()

    @classmethod
    def led(cls, guarantee: str) -> tuple[str, ...]:
        return ("output", "offsets", "transactions")

    @property
    def transactional_id(self) -> str:
        return f"{self.application}-outbox"

    def start(self) -> None:
        super().start()
        assert self.database is not None
        shared = {"dsn": self.database.dsn, "bootstrap_servers": self.testbed.proxy.bootstrap}
        self.run("relay", "relay", {**shared, "application_id": self.application})


# --- Structured Streaming with `semel.postgres_sink` ---
class SparkPostgresWorkload(OnlyTables, SparkWorkload):
    name = "spark-postgres"
    help = "a Structured Streaming query into PostgreSQL: semel.postgres_sink"
    query = "table"

    @classmethod
    def faults(cls, guarantee: str, *, broker: bool) -> list[Fault]:
        faults = [*network_faults(("ListOffsets", "Fetch"), "driver"), *cls.producer_faults()]
        faults += list(database_faults()) * 3
        faults += [Fault("kill", "driver"), Fault("stop", "driver", for_ms=1_500), Fault("kill", "task")]
        faults += [Fault("checkpoint_lost", "driver"), *cls.faults_at_sink()]
        points = (*COMMIT_POINTS, "EndTxn.before_response", "EndTxn.after_response")
        return [*faults, *broker_faults(points)] if broker else faults

    @classmethod
    def faults_at_sink(cls) -> list[Fault]:
        points = ("postgres_sink.after_write", "postgres_sink.after_move")
        return [
            *point_faults("driver", (*POSTGRES_SINK_POINTS, *POSTGRES_POINTS)),
            *point_faults("task", POSTGRES_TASK_POINTS),
            *(Fault("stop", "driver", point, for_ms=1_000) for point in points),
            Fault("takeover", "driver", "postgres_sink.after_write"),
        ]

    def sink_options(self) -> dict[str, Any]:
        assert self.database is not None
        return {"dsn": self.database.dsn, "table": APPLIED}

    def start(self) -> None:
        self.database = TestbedDatabase(APPLIED)
        super().start()


class SparkPostgresAndTopicsWorkload(SparkPostgresWorkload):
    name = "spark-postgres+topics"
    help = "the same into a topic, too, in one decision: semel.postgres_sink(topics=semel.SinkTopics(...))"
    query = "both"

    @classmethod
    def faults(cls, guarantee: str, *, broker: bool) -> list[Fault]:
        return [*super().faults(guarantee, broker=broker), *network_faults(PRODUCE_APIS, "driver")]

    @classmethod
    def faults_at_sink(cls) -> list[Fault]:
        own = [point for point in SINK_POINTS if point != "sink.after_commit"]
        return [
            *super().faults_at_sink(),
            *point_faults("driver", (*DECISION_POINTS, *own)),
            *point_faults("task", TASK_POINTS),
            Fault("takeover", "driver", "decision.prepared"),
            Fault("takeover", "driver", "decision.made"),
        ]

    @classmethod
    def led(cls, guarantee: str) -> tuple[str, ...]:
        return ("output", "ledger", "transactions")

    @property
    def outputs(self) -> tuple[str, ...]:
        return (f"{self.prefix}.out",)

    def sink_options(self) -> dict[str, Any]:
        return {**super().sink_options(), "topic": self.outputs[0]}

    def expectation(self, transactions: int) -> Expectation:
        return TableWorkload.expectation(self, transactions)

    def complete(self, seen: Iterable[Seen], transactions: int) -> bool:
        return Workload.complete(self, seen, transactions) and self.has_rows(transactions)


# --- The workloads, by their names ---


WORKLOADS: dict[str, type[Workload]] = {
    workload.name: workload
    for workload in (
        LoopWorkload,
        ChainWorkload,
        StateWorkload,
        EntitiesWorkload,
        SagasWorkload,
        PostgresWorkload,
        PostgresAndTopicsWorkload,
        InboxWorkload,
        OutboxWorkload,
        FilesWorkload,
        SparkWorkload,
        AnyOrderWorkload,
        StreamWriterWorkload,
        StatefulWorkload,
        ExecutorsWorkload,
        SparkPostgresWorkload,
        SparkPostgresAndTopicsWorkload,
        AppWorkload,
    )
}
