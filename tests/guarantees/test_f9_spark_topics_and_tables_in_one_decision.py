"""F9 on Spark: rows and records of a micro-batch commit together or not at all, through every crash and timeout.

Most tests run the sink without Spark: a job is a function of the test, and a driver that dies is an exception that
nothing catches. What needs processes that are killed is at the end. Tables are read through psycopg, topics through
confluent-kafka.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import psycopg
import pyarrow as pa
import pytest

import semel
from semel import faults
from semel.client.admin import Admin
from semel.local.apache_kafka import ApacheKafka
from semel.local.brokers import SemelBroker
from semel.local.postgres import PostgresServer
from semel.prove.database import PostgresProxy
from semel.prove.injection import DECISION_POINTS, POSTGRES_SINK_POINTS, SINK_POINTS
from semel.sinks.postgres.database import Database
from semel.sinks.postgres.staging import fill
from semel.sinks.postgres.target import RowColumn, fitting
from semel.spark.decided_transaction import DecidedHandle, DecidedReports
from semel.spark.encoding import Encoder, routing_of
from semel.spark.ledger import MicroBatch
from semel.spark.postgres_options import PostgresOptions, SinkTopics
from semel.spark.postgres_sink import DecidedSink
from semel.spark.sink_options import Precautions
from semel.spark.writing import COPIED, Report, write_blobs
from tests.support.broker import Cluster
from tests.support.reading import create_topic, read_topic
from tests.support.sinks import SinkRun, execute
from tests.support.spark_driver import Pipeline, SparkSite
from tests.support.waiting import until

PARTITIONS = 3
SETTINGS = ("--fsync", "os", "--set=transaction.abort.timed.out.transaction.cleanup.interval.ms=50")
TWO_PHASE = "--set=transaction.two.phase.commit.enable=true"
POINTS = [
    *(point for point in SINK_POINTS if point != "sink.after_commit"),  # which is topics' alone
    *POSTGRES_SINK_POINTS,
    *(point for point in DECISION_POINTS if "copy" not in point),
]
DECIDED = ("postgres_sink.after_commit", "decision.made", "decision.ended")  # the batch is not to be written again
ALWAYS = "decision.made"  # the rest is in `make test-full`
WITH_COPY = pytest.mark.parametrize("broker", [()], indirect=True, ids=["with a copy"])
WITH_TWO_PHASE = pytest.mark.parametrize("broker", [(TWO_PHASE,)], indirect=True, ids=["two-phase"])


@pytest.fixture(scope="module", params=[(), (TWO_PHASE,)], ids=["with a copy", "two-phase"])
def broker(request: pytest.FixtureRequest) -> Iterator[SemelBroker]:
    with SemelBroker(None, *SETTINGS, *request.param) as broker:
        yield broker


class Killed(BaseException):
    """The driver is gone: nothing of it runs after this."""


class At(faults.Injector):
    """Does something at a point, once."""

    def __init__(self, point: str, act: Callable[[], None]) -> None:
        self._point, self._act = point, act
        self.fired = False

    def hit(self, point: str) -> None:
        if point == self._point and not self.fired:
            self.fired = True
            self._act()


def die() -> None:
    raise Killed


@pytest.fixture
def at() -> Iterator[Callable[..., At]]:
    def install(point: str, act: Callable[[], None] = die) -> At:
        injector = At(point, act)
        faults.install(injector)
        return injector

    yield install
    faults.install(None)


class Frame:
    """A DataFrame of numbers, which are rows and records."""

    def __init__(self, first: int, end: int) -> None:
        self.numbers = range(first, end)
        self.write = MagicMock()  # of Spark's DataFrameWriter: what goes to noop


class Writing(DecidedSink):
    """Its tasks run here: one for rows, one for records."""

    marks = iter(range(1, 1_000_000))

    def _write(self, df: Any, batch: MicroBatch, handle: DecidedHandle) -> DecidedReports:
        records = self._records(df.numbers, batch, handle)
        copied = [report for report in records if report.failure == COPIED]
        kept = [report for report in records if report.failure != COPIED]
        return DecidedReports(self._rows(df.numbers, handle), kept, copied)

    def _records(self, numbers: range, batch: MicroBatch, handle: DecidedHandle) -> list[Report]:
        transaction = self.transaction.topics
        texts = pa.array([b"%d" % number for number in numbers], pa.binary())
        routing = routing_of(transaction.options, transaction.targets, batch.batch_id, handle.topics.settings)
        blobs = Encoder(routing, 0).blobs(iter([pa.RecordBatch.from_arrays([texts, texts], names=["key", "value"])]))
        keep = None if handle.copy is None else handle.copy.keep
        return write_blobs(handle.topics, transaction.targets, Precautions(), blobs, keep, next(self.marks))

    def _rows(self, numbers: range, handle: DecidedHandle) -> list[Report]:
        stage, table = handle.tables
        self.transaction.columns = fitting(table, [RowColumn("number", "bigint", pa.int64())])
        mark = next(self.marks)
        with self.options.database.connect("task") as connection:
            batches = pa.table({"number": pa.array(numbers, pa.int64())}).to_batches()
            staged = fill(connection, stage, mark, self.transaction.columns, batches)
        return [Report(0, staged.rows, 0, -1, -1, 0, mark)]


class Ledger:
    """An application whose batches of ten numbers must be in the table and in the topic, each number once."""

    def __init__(self, cluster: Cluster, dsn: str) -> None:
        self.bootstrap, self.dsn = cluster.bootstrap, dsn
        self.id, self.source = cluster.unique("decided"), cluster.unique("numbers")
        self.output = create_topic(self.bootstrap, cluster.unique("entries"), PARTITIONS)
        create_topic(self.bootstrap, self.source, 1)
        self.table = self.id.replace("-", "_")
        self.execute(f"CREATE TABLE {self.table} (number bigint PRIMARY KEY)")
        self._sinks: list[Writing] = []
        self.batches = 0

    def execute(self, statement: str) -> list[Any]:
        return execute(self.dsn, statement)

    def sink(self, dsn: str = "", transaction_timeout_ms: int = 60_000, **options: Any) -> Writing:
        topics = SinkTopics(
            self.bootstrap,
            records=lambda df: df,
            topic=self.output,
            transaction_timeout_ms=transaction_timeout_ms,
        )
        database = Database(dsn or self.dsn, lock_timeout_ms=2_000)
        made = Writing(PostgresOptions(database, self.id, self.table, topics=topics, **options))
        made._run = SinkRun(f"run {len(self._sinks)}")  # type: ignore[assignment]
        self._sinks.append(made)
        return made

    def write(self, sink: Writing, number: int, frame: Frame | None = None) -> Frame:
        """Batch `number`; its rows must be there from now on."""
        starts, ends = (
            [json.dumps({self.source: {"0": at}}, separators=(",", ":"))] for at in (number * 10, number * 10 + 10)
        )
        frame = frame or Frame(number * 10, number * 10 + 10)
        self.batches = max(self.batches, number + 1)
        sink._batch(frame, MicroBatch("query", number, list(starts), list(ends)))
        return frame

    def dies(self, sink: Writing, number: int, frame: Frame | None = None) -> None:
        with pytest.raises(Killed):
            self.write(sink, number, frame)
        sink.close()  # its sockets: the operating system does that

    def rows(self) -> Counter[int]:
        return Counter(number for (number,) in self.execute(f"SELECT number FROM {self.table}"))

    def records(self) -> Counter[int]:
        return Counter(int(record.value or b"") for record in read_topic(self.bootstrap, self.output))

    def check(self) -> None:
        expected = Counter(range(self.batches * 10))
        until(lambda: self.records() == expected, "rows are missing in the topic, or too many")
        assert self.rows() == expected
        assert self.execute(f"SELECT state FROM semel.spark_decisions WHERE application_id = '{self.id}'") == [
            ("finished",)
        ]
        assert self.execute(f"SELECT count(*) FROM semel.spark_copies WHERE application_id = '{self.id}'") == [(0,)]
        left = self.execute(f"SELECT table_name FROM semel.staging WHERE owner = 'spark:{self.id}'")
        assert left == [], "staging tables were left behind"

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


@pytest.fixture
def ledger(broker: SemelBroker, dsn: str) -> Iterator[Ledger]:
    made = Ledger(Cluster("semel", broker), dsn)
    yield made
    made.close()


def abort_by_timeout(ledger: Ledger) -> None:
    """Waits until the coordinator has aborted the open transaction."""
    with Admin(bootstrap_servers=ledger.bootstrap) as admin:

        def states() -> list[str]:
            return [each.state for each in admin.list_transactions() if each.transactional_id == ledger.id]

        until(lambda: states() == ["CompleteAbort"], "the coordinator did not abort it")


def abort_by_hand(ledger: Ledger) -> None:
    with Admin(bootstrap_servers=ledger.bootstrap) as admin:
        admin.abort_transaction(ledger.id)


def test_rows_and_records_appear_together_and_no_copy_is_left(ledger: Ledger, broker: SemelBroker) -> None:
    sink = ledger.sink()
    for number in range(3):
        ledger.write(sink, number)
        ledger.check()
    assert sink.transaction.two_phase is (TWO_PHASE in broker.options)
    assert [report.rows for report in sink.reports] == [20, 20, 20]  # ten rows and ten records
    again = ledger.sink()
    frame = ledger.write(again, 2)
    frame.write.format.assert_called_once_with("noop")
    ledger.write(again, 3)
    ledger.check()


@pytest.mark.parametrize("point", [p if p == ALWAYS else pytest.param(p, marks=pytest.mark.full) for p in POINTS])
def test_a_driver_that_dies_at_a_point_leaves_both_or_neither(
    ledger: Ledger, at: Callable[..., At], point: str
) -> None:
    ledger.write(ledger.sink(), 0)
    fault = at(point)
    ledger.dies(ledger.sink(), 1)
    assert fault.fired
    decided = len(ledger.rows()) == 20
    assert decided == (point in DECIDED)
    again = ledger.sink()
    frame = ledger.write(again, 1)
    assert frame.write.format.called == decided  # a decided batch runs into nothing
    ledger.check()
    ledger.write(again, 2)
    ledger.check()


@WITH_COPY
def test_a_copy_is_compressed_as_fast_as_the_server_can(ledger: Ledger, at: Callable[..., At]) -> None:
    """pglz takes several times as long as everything else that a copy costs the server."""
    compression = "SELECT DISTINCT pg_column_compression(data) FROM semel.spark_copies WHERE length(data) > 10000"
    found: list[Any] = []
    at("decision.made", lambda: found.extend(ledger.execute(compression)))
    ledger.write(ledger.sink(), 0, Frame(0, 10_000))
    has_lz4 = "SELECT 'lz4' = ANY (enumvals) FROM pg_settings WHERE name = 'default_toast_compression'"
    assert found == [("lz4",) if ledger.execute(has_lz4) == [(True,)] else ("pglz",)]


@WITH_COPY
def test_the_coordinator_may_abort_what_is_decided(ledger: Ledger, at: Callable[..., At]) -> None:
    """A pause between the two commits that exceeds transaction.timeout.ms."""
    sink = ledger.sink(transaction_timeout_ms=3_000)
    fault = at("decision.made", lambda: abort_by_timeout(ledger))
    ledger.write(sink, 0)
    assert fault.fired
    ledger.check()
    ledger.write(sink, 1)
    ledger.check()


@WITH_TWO_PHASE
def test_a_prepared_transaction_has_no_timeout(ledger: Ledger, at: Callable[..., At]) -> None:
    def look() -> None:
        with Admin(bootstrap_servers=ledger.bootstrap) as admin:
            [mine] = [each for each in admin.list_transactions() if each.transactional_id == ledger.id]
            assert mine.state == "Ongoing"
            assert admin.describe_transaction(ledger.id).timeout_ms == 2**31 - 1

    fault = at("decision.made", look)
    ledger.write(ledger.sink(transaction_timeout_ms=1_000), 0)
    assert fault.fired
    ledger.check()


@WITH_COPY
@pytest.mark.parametrize(
    "point", [pytest.param("decision.copy_written", marks=pytest.mark.full), "decision.copy_decided"]
)
def test_a_driver_that_dies_while_the_copy_is_written_does_not_write_it_twice(
    ledger: Ledger, at: Callable[..., At], point: str
) -> None:
    at("decision.made")
    ledger.dies(ledger.sink(), 0)
    abort_by_hand(ledger)
    fault = at(point)
    ledger.dies(ledger.sink(), 0)
    assert fault.fired
    ledger.write(ledger.sink(), 0)
    ledger.check()


@pytest.mark.full
@WITH_COPY
def test_the_copy_may_be_aborted_too(ledger: Ledger, at: Callable[..., At]) -> None:
    at("decision.made")
    ledger.dies(ledger.sink(), 0)
    abort_by_hand(ledger)
    fault = at("decision.copy_decided", lambda: abort_by_hand(ledger))
    ledger.write(ledger.sink(), 0)
    assert fault.fired
    ledger.check()


@WITH_COPY
def test_records_that_a_lost_task_adds_after_the_decision_are_not_committed(
    ledger: Ledger, at: Callable[..., At]
) -> None:
    """The audit of the counts is repeated before EndTxn by those who did not see the first one."""
    sink = ledger.sink()
    one = Frame(0, 1)

    def add() -> None:
        topics = sink.transaction.topics
        [wrote] = topics.owner.last_sequences(topics.targets.places())
        elsewhere = next(place for place in topics.targets.places() if place != wrote)
        with topics.handle.writer() as writer:
            writer.write(*elsewhere, pa.table({"value": pa.array([b"999"], pa.binary())}))
            writer.finish()
        raise Killed

    fault = at("decision.made", add)
    ledger.dies(sink, 0, one)
    assert fault.fired
    ledger.write(ledger.sink(), 0, one)
    until(lambda: ledger.records() == Counter([0]), "other records than one are in the topic")


@WITH_TWO_PHASE
def test_a_decided_transaction_that_was_ended_by_force_is_reported(ledger: Ledger, at: Callable[..., At]) -> None:
    at("decision.made")
    ledger.dies(ledger.sink(), 0)
    abort_by_hand(ledger)
    with pytest.raises(semel.DecisionLostError, match="by force"):
        ledger.write(ledger.sink(), 0)


@pytest.mark.full
def test_a_driver_that_was_replaced_cannot_decide(ledger: Ledger, at: Callable[..., At]) -> None:
    """It stands still before the database's transaction, and goes on when the next one has written the batch."""
    zombie = ledger.sink()
    ledger.write(zombie, 0)

    def replaced() -> None:
        faults.install(None)
        ledger.write(ledger.sink(), 1)

    fault = at("decision.prepared", replaced)
    with pytest.raises(semel.FencedSinkError, match="taken over by another driver"):
        ledger.write(zombie, 1)
    assert fault.fired
    ledger.check()


@pytest.mark.full
@pytest.mark.parametrize("kind", ["before", "after"])
def test_an_unknown_commit_of_the_database_is_settled(ledger: Ledger, postgres: PostgresServer, kind: Any) -> None:
    with PostgresProxy(postgres.host, postgres.port) as proxy:
        through = ledger.dsn.replace(f":{postgres.port}/", f":{proxy.port}/")
        sink = ledger.sink(through)
        ledger.write(sink, 0)
        injector = At("decision.prepared", lambda: proxy.arm(kind))
        faults.install(injector)
        try:
            ledger.write(sink, 1)
        finally:
            faults.install(None)
        assert proxy.cuts == 1
    ledger.check()


@WITH_COPY
def test_a_database_older_than_the_topics_is_refused_with_both_ends(ledger: Ledger) -> None:
    """Database and checkpoint were restored from the same backup: only the topics know better."""
    sink = ledger.sink()
    for number in range(3):
        ledger.write(sink, number)
    sink.close()
    ledger.execute(f"DELETE FROM semel.spark_ledger WHERE application_id = '{ledger.id}' AND sequence > 0")
    with pytest.raises(semel.LostLedgerError, match=r"ends at entry 0, the one in topic .* at 2.*adopt_checkpoint"):
        ledger.write(ledger.sink(), 1)
    assert ledger.records() == Counter(range(30))
    ledger.execute(f"DELETE FROM {ledger.table} WHERE number >= 10")  # as in the backup
    again = ledger.sink(adopt_checkpoint=True)
    ledger.write(again, 1)
    ledger.write(again, 2)
    again.close()
    ledger.write(ledger.sink(), 3)  # both ledgers end with the same entry again
    assert ledger.rows() == Counter(range(40))
    assert ledger.records() == Counter([*range(40), *range(10, 30)])  # which is what was asked for


@WITH_COPY
def test_options_that_do_not_go_together_are_refused(ledger: Ledger) -> None:
    with pytest.raises(semel.OptionError, match="do not go together"):
        ledger.sink(on_error="dead_letter")
    with pytest.raises(semel.OptionError, match="functions of the batch's DataFrame"):
        SinkTopics("localhost:9092", records="value")  # type: ignore[arg-type]


# --- with Spark ---
class BothPipeline(Pipeline):
    """A query that copies a topic into a table and into another topic."""

    def __init__(self, cluster: Cluster, folder: Path, dsn: str) -> None:
        super().__init__(cluster, folder)
        self.dsn = dsn
        with psycopg.connect(dsn) as connection:
            connection.execute("CREATE TABLE out (key text, value text NOT NULL)")

    def both_job(self, **topics: Any) -> Any:
        postgres = {"dsn": self.dsn, "application_id": self.application_id, "table": "out"}
        select = ["cast(key AS STRING) AS key", "cast(value AS STRING) AS value"]
        return {**self.job(), "postgres": postgres, "topics": {"topic": self.output, **topics}, "select": select}

    def assert_both(self) -> None:
        self.assert_exact()
        with psycopg.connect(self.dsn) as connection:
            found = Counter(row[0].encode() for row in connection.execute("SELECT value FROM out"))
            states = connection.execute("SELECT state FROM semel.spark_decisions").fetchall()
            copies = connection.execute("SELECT count(*) FROM semel.spark_copies").fetchone()
        assert not self.expected - found, f"lost: {sorted(self.expected - found)[:5]}"
        assert not found - self.expected, f"twice: {sorted(found - self.expected)[:5]}"
        assert states == [("finished",)]
        assert copies == (0,)

    def dies(self, local_spark: SparkSite, point: str, **topics: Any) -> None:
        local_spark.faults.arm(point, "kill")
        driver = local_spark.driver()
        driver.begin(self.both_job(**topics))
        local_spark.faults.fired(point)
        driver.close()  # its JVM too


def both(cluster: Cluster, tmp_path: Path, dsn: str, local_spark: SparkSite) -> BothPipeline:
    """A pipeline whose last batch but one is written."""
    pipeline = BothPipeline(cluster, tmp_path, dsn)
    local_spark.driver().run(pipeline.both_job()).succeeded()
    pipeline.assert_both()
    pipeline.fill(150)
    return pipeline


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("point", POINTS)
def test_a_killed_driver_leaves_both_or_neither(
    broker: SemelBroker, local_spark: SparkSite, tmp_path: Path, dsn: str, point: str
) -> None:
    pipeline = both(Cluster("semel", broker), tmp_path, dsn, local_spark)
    pipeline.dies(local_spark, point)
    again = local_spark.driver().run(pipeline.both_job()).succeeded()
    assert (again.reports[0]["verdict"] == "already written") == (point in DECIDED)
    pipeline.assert_both()


@pytest.mark.full
@pytest.mark.timeout(400)
@WITH_COPY
@pytest.mark.parametrize("point", ["task.after_opening", "task.after_rows", "postgres_task.after_stage"])
def test_a_killed_task_writes_nothing_twice(
    broker: SemelBroker, local_spark: SparkSite, tmp_path: Path, dsn: str, point: str
) -> None:
    pipeline = both(Cluster("semel", broker), tmp_path, dsn, local_spark)
    local_spark.faults.arm(point, "kill")
    local_spark.driver().run(pipeline.both_job()).succeeded()
    local_spark.faults.fired(point)
    pipeline.assert_both()


@pytest.mark.full
@pytest.mark.timeout(400)
@WITH_COPY
def test_a_transaction_that_timed_out_after_the_driver_died_is_written_from_the_copy(
    broker: SemelBroker, local_spark: SparkSite, tmp_path: Path, dsn: str
) -> None:
    pipeline = both(Cluster("semel", broker), tmp_path, dsn, local_spark)
    pipeline.dies(local_spark, "decision.made", transaction_timeout_ms=5_000)
    with Admin(bootstrap_servers=broker.bootstrap) as admin:
        until(
            lambda: admin.describe_transaction(pipeline.application_id).state == "CompleteAbort",
            "the coordinator did not abort it",
        )
    local_spark.driver().run(pipeline.both_job()).succeeded()
    pipeline.assert_both()


@pytest.mark.full
@pytest.mark.kafka
@pytest.mark.timeout(400)
@pytest.mark.parametrize("ended", ["by the timeout", "by the next driver"])
def test_it_holds_on_apache_kafka(
    apache_kafka: ApacheKafka, local_spark: SparkSite, tmp_path: Path, dsn: str, ended: str
) -> None:
    pipeline = both(Cluster("apache_kafka", apache_kafka), tmp_path, dsn, local_spark)
    pipeline.dies(local_spark, "decision.made", transaction_timeout_ms=5_000)
    if ended == "by the timeout":
        with Admin(bootstrap_servers=pipeline.bootstrap) as admin:
            until(
                lambda: admin.describe_transaction(pipeline.application_id).state == "CompleteAbort",
                "the coordinator did not abort it",
            )
    local_spark.driver().run(pipeline.both_job()).succeeded()
    pipeline.assert_both()
