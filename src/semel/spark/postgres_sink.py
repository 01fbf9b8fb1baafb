"""The sink for PostgreSQL: a function for foreachBatch that writes each micro-batch in one database transaction.

    sink = semel.postgres_sink("postgresql://user@host/db", application_id="payments", table="payments")
    df.writeStream.foreachBatch(sink).option("checkpointLocation", path).start()

The steps are in `postgres_transaction`, what tasks do in `postgres_tasks`, the loop in `transactional_sink`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from semel.client.errors import ConfigError, ConnectionFailedError, TimedOutError
from semel.sinks.postgres.database import Database
from semel.sinks.postgres.errors import DatabaseFatalError, DatabaseUnavailableError, RowRefusedError
from semel.sinks.postgres.moving import DELETE, BadStagedRowError, SameKeyError
from semel.sinks.postgres.target import fitting
from semel.spark.base_sink import SinkError, refuse_connect
from semel.spark.decided_transaction import DecidedHandle, DecidedReports, DecidedTransaction
from semel.spark.in_place import tasks_without_shuffle
from semel.spark.ledger import LedgerError, MicroBatch
from semel.spark.options import OptionError
from semel.spark.postgres_lane import columns_of, stage_ranges
from semel.spark.postgres_options import PostgresOptions, SinkTopics
from semel.spark.postgres_tasks import row_column, stage_task
from semel.spark.postgres_transaction import BatchHandle, PostgresTransaction
from semel.spark.range_tasks import Step
from semel.spark.sink import TransactionalSink, no_brokers
from semel.spark.write_job import Reports, StageWatch, WriteJob, collected, settled, spark_notices
from semel.spark.writing import COPIED, REPORT_COLUMNS, Report, mapped

# By database and owner: the sink of this process that took it over last.
_newest: WeakValueDictionary[tuple[str, str, str], PostgresSink] = WeakValueDictionary()


class PostgresSink(TransactionalSink):
    """Writes to a table; the ledger is a table of the same database."""

    transaction: PostgresTransaction
    final_errors: ClassVar[tuple[type[Exception], ...]] = (
        *TransactionalSink.final_errors,
        ConfigError,
        LedgerError,
        RowRefusedError,
        DatabaseFatalError,
        SameKeyError,
        BadStagedRowError,
    )

    transaction_type: ClassVar[type[PostgresTransaction]] = PostgresTransaction
    step: Step | None = None  # of the fast lane, whose rows are not those of Spark

    def __init__(self, options: PostgresOptions) -> None:
        super().__init__(options)
        self.transaction = self.transaction_type(options)
        try:
            self.transaction.open()
        except DatabaseUnavailableError as error:
            raise SinkError(
                f"the sink cannot reach its database: {error}. Start it, or correct the DSN, and start the query again"
            ) from error

    def _batch(self, df: Any, batch: MicroBatch) -> None:
        if self.transaction.generation is None:
            self._close_ended()
        super()._batch(df, batch)

    def _close_ended(self) -> None:
        """A query that was started again in this process: the sink of its last run is connected and looks alive."""
        name = (self.options.database.where, self.options.schema, self.options.owner)
        last = _newest.get(name)
        _newest[name] = self
        if last is not None and last is not self and not last._is_running():
            last.close()

    def _is_running(self) -> bool:
        return self._run is not None and self._run.is_active()

    def committed_offsets(self) -> str:
        """Where the database ends, for the source's option committedOffsets (with startingOffsets=committed): for a
        start with a new checkpoint."""
        return self.transaction.committed_offsets()

    def _one_frame(self, given: Any) -> Any:
        if not isinstance(given, (list, tuple)):
            return given
        if not given:
            raise OptionError(
                "the sink was called with an empty list; give at least one DataFrame, it may have no rows"
            )
        first, *others = given
        for frame in others:
            first = first.unionByName(frame)
        return first

    def _hashed_columns(self, df: Any) -> list[str]:
        return list(df.columns)

    def _write(self, df: Any, batch: MicroBatch, handle: BatchHandle) -> Reports:
        options = self.options
        if self.step is not None:
            reports = stage_ranges(self.step, df, options, batch, handle)
            self.transaction.columns = columns_of(reports)
            if reports:
                self._check_named([column.name for column in self.transaction.columns])
            return reports
        stores = options.mode != DELETE
        columns = fitting(handle.table, [row_column(*pair) for pair in df.dtypes], options.aside(), stores=stores)
        self._check_named(df.columns)
        self.transaction.columns = columns
        rows = df if options.max_tasks is None else df.coalesce(options.max_tasks)
        task = stage_task(options.database, handle.stage, columns, options.sets_aside)
        return collected(mapped(rows, task, REPORT_COLUMNS), options.precautions)

    def _check_named(self, names: list[str]) -> None:
        options = self.options
        named = {"key": options.key, "order_by": options.order_by, "operation_column": (options.operation_column,)}
        for option, wanted in named.items():
            for name in wanted:
                if name is not None and name not in names:
                    raise OptionError(f"{option} names {name!r}, which the rows do not have; they have {names}")


class DecidedSink(PostgresSink):
    """Writes to a table and to topics, with one decision."""

    transaction: DecidedTransaction
    transaction_type = DecidedTransaction
    _job: WriteJob | None = None

    def __init__(self, options: PostgresOptions) -> None:
        try:
            super().__init__(options)
        except (ConnectionFailedError, TimedOutError) as error:
            raise no_brokers(options.kafka, error) from error

    def _write(self, df: Any, batch: MicroBatch, handle: Any) -> Any:
        """Rows and records come from the same computed rows: a function such as uuid() gives other values when it runs
        again."""
        topics, session = self.options.topics, df.sparkSession
        watched = self.options.precautions.single_runs and not spark_notices(session)
        with StageWatch(session) if watched else nullcontext() as watch, settled(df, always=True) as kept:
            if tasks_without_shuffle(df) is None:  # from a shuffle, with as many partitions as that, 200 by default
                kept = kept.coalesce(session.sparkContext.defaultParallelism)
            records = self._write_records(topics.records(kept), batch, handle)
            rows = super()._write(topics.rows(kept), batch, handle.tables)
        if watch is not None:
            rows.watch = watch  # of all jobs, that which computed the rows among them
        copied = [report for report in records if report.failure == COPIED]
        records[:] = [report for report in records if report.failure != COPIED]
        return DecidedReports(rows, records, copied)

    def _write_records(self, df: Any, batch: MicroBatch, handle: DecidedHandle) -> list[Report]:
        transaction = self.transaction.topics
        if self._job is None:
            self._job = WriteJob(transaction.owner.cluster)
        keep = None if handle.copy is None else handle.copy.keep
        return self._job(df, transaction.options, transaction.targets, batch, handle.topics, keep)


def postgres_sink(
    dsn: str,
    *,
    application_id: str,
    table: str,
    mode: str = "insert",
    key: Iterable[str] | str = (),
    order_by: Iterable[str] | str = (),
    operation_column: str | None = None,
    on_error: str = "stop",
    schema: str = "semel",
    max_tasks: int | None = None,
    max_attempts: int = 3,
    lock_timeout_ms: int = 30_000,
    retry_timeout_ms: int = 60_000,
    adopt_checkpoint: bool = False,
    accept_lost_state: bool = False,
    on_batch: Callable[[Any], None] | None = None,
    topics: SinkTopics | None = None,
) -> PostgresSink:
    """A function for `foreachBatch` that writes every micro-batch in one database transaction.

    It reads the ledger when it is made: make it before the source is loaded, once for every start.

    dsn                postgresql://user:password@host:port/database, or libpq's key=value form
    application_id     names the ledger rows and the owner row of this query
    table              where rows go: table or schema.table; columns go to columns of the same name
    mode               insert; upsert (a row replaces the one with its key); delete (rows with these values are deleted)
    key                key columns: of an upsert (default: the primary key), or those by which mode="delete" deletes
    order_by           for upsert: of several rows of a batch with one key the one with the highest value counts
    operation_column   for upsert: a column that says what happened to the key: c, u, r, insert, update, ... or d,
                       delete; or a boolean, true for deleted. The table need not have it, nor those of order_by
    on_error           stop (nothing of the batch is written), or dead_letter: rows that break a constraint or do not
                       fit go to the table dead_rows of semel's schema, in the same transaction, with the reason
    schema             the schema of semel's own tables
    max_tasks          how many tasks write at once; each has a connection. Default: as many as the frame has
    max_attempts       how often a batch is tried before the query fails
    lock_timeout_ms    how long a statement waits for a lock that another session holds
    retry_timeout_ms   how long a database that does not respond is waited for
    adopt_checkpoint   True: an existing checkpoint goes on although the ledger is empty
    accept_lost_state  as for `semel.sink`
    on_batch           called with a report after each batch: rows, dead letters, attempts, times
    topics             a `semel.SinkTopics`: every micro-batch writes to these topics, too, with one decision about rows
                       and records, which the database makes
    """
    refuse_connect()
    kind = PostgresSink if topics is None else DecidedSink
    return kind(
        PostgresOptions(
            database=Database(dsn, schema=schema, lock_timeout_ms=lock_timeout_ms),
            application_id=application_id,
            table=table,
            mode=mode,
            key=(key,) if isinstance(key, str) else tuple(key),
            order_by=(order_by,) if isinstance(order_by, str) else tuple(order_by),
            operation_column=operation_column,
            on_error=on_error,
            max_tasks=max_tasks,
            max_attempts=max_attempts,
            retry_timeout_ms=retry_timeout_ms,
            adopt_checkpoint=adopt_checkpoint,
            accept_lost_state=accept_lost_state,
            on_batch=on_batch,
            topics=topics,
        )
    )
