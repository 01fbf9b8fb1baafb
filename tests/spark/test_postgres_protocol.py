"""The PostgreSQL sink's protocol without Spark: a job is a function of the test that fills staging tables."""

from __future__ import annotations

import json
import logging
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import psycopg
import pyarrow as pa
import pytest

from semel.local.postgres import PostgresServer
from semel.prove.database import PostgresProxy
from semel.sinks.postgres.database import Database
from semel.sinks.postgres.errors import DatabaseConflictError, DatabaseFatalError, RowRefusedError
from semel.sinks.postgres.staging import fill
from semel.sinks.postgres.target import RowColumn, TableMismatchError, fitting
from semel.spark.base_sink import FencedSinkError, RefusedError, SinkError
from semel.spark.ledger import LostLedgerError, MicroBatch
from semel.spark.options import OptionError
from semel.spark.postgres_options import PostgresOptions
from semel.spark.postgres_sink import PostgresSink, postgres_sink
from semel.spark.postgres_transaction import BatchHandle
from semel.spark.writing import Report
from tests.support.missing import skip_loudly
from tests.support.sinks import SinkRun, micro_batch


class Frame:
    """A DataFrame of numbers, one attempt of a task for each list."""

    def __init__(self, *attempts: list[int]) -> None:
        self.attempts = attempts
        self.write = MagicMock()  # of Spark's DataFrameWriter: what goes to noop


class Writing(PostgresSink):
    """Its tasks run here, one after the other."""

    marks = iter(range(1, 1_000_000))
    losers: tuple[list[int], ...] = ()  # of attempts that Spark does not want

    def _write(self, df: Any, batch: MicroBatch, handle: BatchHandle) -> list[Report]:
        columns = fitting(handle.table, [RowColumn("id", "bigint", pa.int64())])
        self.transaction.columns = columns
        for rows in self.losers:
            self.attempt(handle, rows)
        return [self.attempt(handle, rows) for rows in df.attempts]

    def attempt(self, handle: BatchHandle, rows: list[int]) -> Report:
        mark = next(self.marks)
        with self.options.database.connect("task") as connection:
            batches = pa.table({"id": pa.array(rows, pa.int64())}).to_batches()
            staged = fill(connection, handle.stage, mark, self.transaction.columns, batches)
        return Report(0, staged.rows, 0, -1, -1, 0, mark)


class Application:
    """One application id that writes into table `out`."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.sinks: list[PostgresSink] = []
        self.connection = psycopg.connect(dsn, autocommit=True)
        self.connection.execute("CREATE TABLE out (id bigint)")

    def sink(self, run: str = "run", dsn: str = "", lock_timeout_ms: int = 2_000, **options: Any) -> Writing:
        database = Database(dsn or self.dsn, lock_timeout_ms=lock_timeout_ms)
        made = Writing(PostgresOptions(database, options.pop("application_id", "app"), "out", **options))
        made._run = SinkRun(run)  # type: ignore[assignment]
        self.sinks.append(made)
        return made

    def batch(self, number: int, start: int, end: int, query: str = "q") -> MicroBatch:
        return micro_batch("in", number, start, end, query)

    def values(self) -> list[int]:
        return [row[0] for row in self.connection.execute("SELECT id FROM out ORDER BY id")]

    def staging(self) -> list[str]:
        found = self.connection.execute(
            "SELECT relname FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace "
            "WHERE nspname = 'semel' AND relname LIKE 'stage\\_%' AND relkind = 'r'"
        )
        return [row[0] for row in found]

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()
        self.connection.close()


@pytest.fixture
def app(dsn: str) -> Iterator[Application]:
    made = Application(dsn)
    yield made
    made.close()


# --- the ledger decides ---
def test_rows_and_offsets_commit_together_and_a_repeated_batch_runs_into_nothing(app: Application) -> None:
    first = app.sink()
    first._batch(Frame([1, 2], [3]), app.batch(0, 0, 3))
    again, frame = app.sink("run 2"), Frame([1, 2, 3])
    again._batch(frame, app.batch(0, 0, 3))
    frame.write.format.assert_called_once_with("noop")
    assert [report.verdict for report in again.reports] == ["already written"]
    again._batch(Frame([4]), app.batch(1, 3, 4))
    assert app.values() == [1, 2, 3, 4]
    assert json.loads(again.committed_offsets()) == {"in": {"0": 4}}
    assert app.staging() == []


def test_a_second_sink_of_the_same_run_and_id_is_refused_and_written_under_an_id_of_its_own(app: Application) -> None:
    app.sink()._batch(Frame([1]), app.batch(0, 0, 3))
    with pytest.raises(SinkError, match="Give each sink in foreachBatch an application_id of its own"):
        app.sink()._batch(Frame([2]), app.batch(0, 0, 3))
    restarted, other = app.sink("run 2"), app.sink("run 2", application_id="other")
    for sink, rows in ((restarted, [1]), (other, [2])):
        sink._batch(Frame(rows), app.batch(0, 0, 3))
    assert app.values() == [1, 2]


def test_a_batch_that_does_not_continue_is_refused_with_both_ranges(app: Application) -> None:
    sink = app.sink()
    sink._batch(Frame([1]), app.batch(0, 0, 1))
    with pytest.raises(RefusedError, match=r'"in":\{"0":5\}.*"in":\{"0":1\}.*committed_offsets\(\)'):
        app.sink("r2")._batch(Frame([9]), app.batch(1, 5, 6))
    assert app.values() == [1]


def test_a_database_restored_from_an_older_backup_is_refused_with_the_ways_out(app: Application) -> None:
    sink = app.sink()
    for number in range(4):
        sink._batch(Frame([number]), app.batch(number, number, number + 1))
    sink.close()
    app.connection.execute("DELETE FROM out WHERE id > 1")  # as the backup was: two batches
    app.connection.execute("DELETE FROM semel.spark_ledger WHERE sequence > 1")
    with pytest.raises(RefusedError) as refused:
        app.sink("r2")._batch(Frame([4]), app.batch(4, 4, 5))
    said = str(refused.value)
    for part in (
        '{"in":{"0":4}} to {"in":{"0":5}}',
        '{"in":{"0":1}} to {"in":{"0":2}}',
        "restored from an older backup",
    ):
        assert part in said, said
    resumed = app.sink("r3")  # a new checkpoint that starts where the database ends
    assert json.loads(resumed.committed_offsets()) == {"in": {"0": 2}}
    resumed._batch(Frame([2, 3, 4]), app.batch(0, 2, 5, query="new"))
    assert app.values() == [0, 1, 2, 3, 4]


def test_a_database_restored_while_the_query_runs_is_noticed(app: Application) -> None:
    sink = app.sink()
    sink._batch(Frame([1]), app.batch(0, 0, 1))
    app.connection.execute("DELETE FROM semel.spark_ledger")
    with pytest.raises(LostLedgerError, match="ends at entry None, but this driver wrote up to 0"):
        sink._batch(Frame([2]), app.batch(1, 1, 2))
    assert app.values() == [1]
    assert app.staging() == []


def test_a_batch_without_rows_that_moves_offsets_is_in_the_ledger(app: Application) -> None:
    sink = app.sink()
    sink._batch(Frame(), app.batch(0, 0, 5))
    sink._batch(Frame(), app.batch(1, 5, 5))
    assert sink.transaction.last is not None
    assert (sink.transaction.last.batch_id, sink.transaction.last.sequence) == (0, 0), "nothing moved: nothing written"
    sink._batch(Frame([1]), app.batch(2, 5, 6))
    assert app.values() == [1]


# --- zombies ---
def test_a_replaced_driver_is_fenced_in_the_database(app: Application) -> None:
    zombie = app.sink("old run")
    zombie._batch(Frame([1]), app.batch(0, 0, 1))
    owner = app.sink("new run")
    owner._batch(Frame([2]), app.batch(1, 1, 2))
    with pytest.raises(FencedSinkError, match="generation 2 now"):
        zombie._batch(Frame([99]), app.batch(1, 1, 2))
    owner._batch(Frame([3]), app.batch(2, 2, 3))
    assert app.values() == [1, 2, 3]
    assert app.staging() == []


def test_a_driver_replaced_between_its_tasks_and_its_decision_writes_nothing(app: Application) -> None:
    zombie = app.sink("old run")
    zombie._batch(Frame([1]), app.batch(0, 0, 1))
    transaction, batch = zombie.transaction, app.batch(1, 1, 2)
    assert transaction.decide(batch, lambda: False)
    reports = zombie._write(Frame([99]), batch, transaction.begin())
    owner = app.sink("new run")
    owner._batch(Frame([2]), batch)
    with pytest.raises(Exception, match="generation 2 now"):
        transaction.commit(batch, reports, "old run")
    owner._batch(Frame([3]), app.batch(2, 2, 3))
    assert app.values() == [1, 2, 3]
    assert app.staging() == [], "what the zombie's task staged is swept by the new owner"


def test_a_driver_that_freezes_in_the_middle_of_its_decision_cannot_hold_up_the_next(app: Application) -> None:
    frozen = app.sink("old run")
    frozen._batch(Frame([1]), app.batch(0, 0, 1))
    transaction = frozen.transaction
    connection = transaction.session.connection()
    transaction._begin_decision(connection)
    connection.execute("INSERT INTO out VALUES (99)")
    owner = app.sink("new run")
    owner._batch(Frame([2]), app.batch(1, 1, 2))
    assert app.values() == [1, 2]
    with pytest.raises(psycopg.Error, match="idle-in-transaction"):
        connection.commit()
    assert app.values() == [1, 2]


def test_a_second_query_under_the_id_of_a_live_one_is_refused_and_disturbs_nobody(app: Application) -> None:
    owner = app.sink("run")
    owner._batch(Frame([1]), app.batch(0, 0, 1))
    with pytest.raises(RefusedError, match="is in use: query q on"):
        app.sink("other")._batch(Frame([2]), app.batch(0, 1, 2, query="copied"))
    owner._batch(Frame([2]), app.batch(1, 1, 2))
    owner.close()
    app.sink("other")._batch(Frame([3]), app.batch(0, 2, 3, query="copied"))
    assert app.values() == [1, 2, 3]


def test_attempts_that_spark_does_not_want_have_no_effect_and_are_swept(app: Application) -> None:
    sink = app.sink()
    sink.losers = ([77, 78], [79])
    sink._batch(Frame([1]), app.batch(0, 0, 1))
    assert app.values() == [1]
    sink.losers = ()
    sink._batch(Frame([2]), app.batch(1, 1, 2))
    assert app.values() == [1, 2]
    assert app.staging() == []


def test_a_task_that_is_given_up_and_commits_after_its_batch_has_no_effect(app: Application) -> None:
    sink = app.sink()
    batch = app.batch(0, 0, 1)
    assert sink.transaction.decide(batch, lambda: False)
    handle = sink.transaction.begin()
    reports = sink._write(Frame([1]), batch, handle)
    zombie = sink.options.database.connect("zombie task")
    rows = pa.table({"id": [99]}).to_batches()
    fill(zombie, handle.stage, 500_000, sink.transaction.columns, rows)
    sink.transaction.commit(batch, reports, "run")
    zombie.commit()  # late
    zombie.close()
    assert app.values() == [1]
    assert len(app.staging()) == 1
    sink._batch(Frame([2]), app.batch(1, 1, 2))
    assert app.values() == [1, 2]
    assert app.staging() == []


# --- the end that nobody knows ---
@pytest.mark.parametrize("cut", ["before", "after", "held"])
def test_a_connection_that_breaks_in_commit_is_settled_by_the_ledger(
    app: Application, postgres: PostgresServer, cut: str
) -> None:
    with PostgresProxy(postgres.host, postgres.port) as proxy:
        sink = app.sink(dsn=app.dsn.replace(f":{postgres.port}/", f":{proxy.port}/"))
        sink._batch(Frame([1]), app.batch(0, 0, 1))
        transaction, batch = sink.transaction, app.batch(1, 1, 2)
        ledger_writes = transaction.session.run

        def armed(what: str, *args: Any, **more: Any) -> Any:
            if what.startswith("writing batch"):
                proxy.arm(cut)  # type: ignore[arg-type]
                transaction.session.run = ledger_writes  # type: ignore[method-assign]
            return ledger_writes(what, *args, **more)

        transaction.session.run = armed  # type: ignore[method-assign, assignment]
        sink._batch(Frame([2]), batch)
        assert proxy.cuts == 1
        proxy.release()
        sink._batch(Frame([3]), app.batch(2, 2, 3))
    assert app.values() == [1, 2, 3]
    assert app.staging() == []


@pytest.mark.parametrize("death", ["immediate", "kill"])
def test_the_server_dies_after_tasks_have_staged_and_the_batch_runs_again(
    mortal_postgres: PostgresServer, death: str
) -> None:
    """Unlogged tables are empty after that: the counts tell."""
    app = Application(mortal_postgres.create_database())
    sink = app.sink()
    sink._batch(Frame([1]), app.batch(0, 0, 1))
    died = threading.Event()

    def audit(reports: list[Report]) -> None:
        if not died.is_set():
            died.set()
            mortal_postgres.kill() if death == "kill" else mortal_postgres.stop("immediate")
            mortal_postgres.start()
            sink.transaction.session.close()  # so that it meets the new server with the old counts

    sink.transaction.audit = audit  # type: ignore[method-assign]
    sink._batch(Frame([2, 3], [4]), app.batch(1, 1, 2))
    assert died.is_set()
    assert sink.reports[-1].attempts == 2
    app.connection = psycopg.connect(app.dsn, autocommit=True)
    assert app.values() == [1, 2, 3, 4]
    assert app.staging() == []
    app.close()


# --- bad input ---
def test_a_locked_table_fails_the_batch_with_what_to_do_and_nothing_partial(app: Application) -> None:
    sink = app.sink(lock_timeout_ms=200, max_attempts=2, retry_timeout_ms=100)
    with psycopg.connect(app.dsn) as other:
        other.execute("LOCK TABLE out IN SHARE MODE")
        with pytest.raises(DatabaseConflictError, match="another session holds a lock on the table"):
            sink._batch(Frame([1]), app.batch(0, 0, 1))
    assert app.values() == []
    assert app.staging() == []
    sink._batch(Frame([1]), app.batch(0, 0, 1))
    assert app.values() == [1]


def test_a_constraint_stops_the_query_and_nothing_of_the_batch_is_written(app: Application) -> None:
    app.connection.execute("ALTER TABLE out ADD CHECK (id < 10)")
    sink = app.sink()
    sink._batch(Frame([1]), app.batch(0, 0, 1))
    with pytest.raises(RowRefusedError, match="out_id_check"):
        sink._batch(Frame([2], [10]), app.batch(1, 1, 2))
    assert app.values() == [1]
    assert app.staging() == []
    assert sink.metrics().retry_total == 0, "it would fail again"


@pytest.fixture
def small_disk(mortal_postgres: PostgresServer) -> Iterator[Path]:
    """A file system of 4 MB, which belongs to the server's user."""
    folder = Path(tempfile.mkdtemp(prefix="semel-small-"))
    assert mortal_postgres.process is not None
    whose = Path(f"/proc/{mortal_postgres.process.pid}").stat()
    options = f"size=4m,uid={whose.st_uid},gid={whose.st_gid},mode=0700"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        folder.rmdir()
        skip_loudly(f"a small file system cannot be mounted: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        mortal_postgres.kill()
        subprocess.run(["umount", str(folder)], check=True)
        folder.rmdir()


@pytest.mark.full
def test_a_full_disk_stops_the_query_and_the_batch_is_written_when_there_is_space(
    mortal_postgres: PostgresServer, small_disk: Path
) -> None:
    app = Application(mortal_postgres.create_database())
    app.connection.execute(f"CREATE TABLESPACE small LOCATION '{small_disk}'")
    app.connection.execute("ALTER TABLE out SET TABLESPACE small")
    sink = app.sink()
    sink._batch(Frame([1, 2]), app.batch(0, 0, 2))
    many = list(range(3, 200_003))
    with pytest.raises(DatabaseFatalError, match=r"No space left on device.*free space on the server's disk"):
        sink._batch(Frame(many), app.batch(1, 2, 200_002))
    assert app.values() == [1, 2]
    assert app.staging() == []
    assert sink.metrics().retry_total == 0, "nobody frees a disk by waiting"
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    app.sink("run 2")._batch(Frame(many), app.batch(1, 2, 200_002))
    assert app.values() == [1, 2, *many]
    app.close()


def test_what_is_wrong_with_the_table_shows_before_the_query_starts(app: Application) -> None:
    with pytest.raises(TableMismatchError, match="'nowhere' is not there"):
        postgres_sink(app.dsn, application_id="app", table="nowhere")
    with pytest.raises(TableMismatchError, match="no primary key"):
        postgres_sink(app.dsn, application_id="app", table="out", mode="upsert")
    with pytest.raises(TableMismatchError, match="no column 'x'"):
        postgres_sink(app.dsn, application_id="app", table="out", mode="delete", key="x")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"mode": "merge"}, "expected insert, upsert, delete"),
        ({"mode": "delete"}, "needs key"),
        ({"key": "id"}, "has no key"),
        ({"mode": "upsert", "operation_column": "op"}, "needs order_by"),
        ({"order_by": "id"}, "belong to mode='upsert'"),
        ({"on_error": "ignore"}, "expected stop, dead_letter"),
        ({"max_tasks": 0}, "at least 1"),
        ({"topics": ["out"]}, "expected a semel.SinkTopics"),
        ({"max_attempts": "3"}, "max_attempts is '3'; expected a whole number"),
        ({"adopt_checkpoint": "false"}, "adopt_checkpoint is 'false'; expected True or False"),
        ({"application_id": "a b"}, "application_id is 'a b'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], why: str) -> None:
    given = {"application_id": "app", "table": "out", **options}
    with pytest.raises(OptionError, match=why):
        postgres_sink("postgresql://127.0.0.1:1/db", **given)


def test_no_error_or_log_has_the_password(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(SinkError, match="cannot reach its database") as failed:
        postgres_sink("postgresql://me:s3cr3t-word@127.0.0.1:1/db", application_id="app", table="out")
    shown = [caplog.text]
    error: BaseException | None = failed.value
    while error is not None:
        shown.append(repr(error))
        error = error.__cause__ or error.__context__
    assert "s3cr3t" not in "".join(shown)
