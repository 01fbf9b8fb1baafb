"""One database transaction per micro-batch; the steps are those of `transaction`, the ledger is a table.

    decide   the ledger says whether the batch may be written; the owner row is taken over first
    begin    a new round of staging tables
    write    tasks fill a staging table each, in transactions of their own
    commit   ONE database transaction: the owner row is locked and compared, the counts of the winners' tables are
             compared with their reports, rows move, the ledger row is written, the staging tables are dropped
    settle   after a failure: the ledger row, read under the owner's lock, says whether the batch is written

What attempts left that nobody wanted is swept after each batch and at the start (`staging.sweep`).
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from semel import faults
from semel.client.immediate import Closing
from semel.client.timing import Backoff, Deadline
from semel.sinks.postgres.errors import (
    DatabaseConflictError,
    DatabaseUnavailableError,
    FencedInDatabaseError,
    PostgresError,
)
from semel.sinks.postgres.moving import DEAD_ROWS, UPSERT, Move
from semel.sinks.postgres.session import DatabaseSession
from semel.sinks.postgres.staging import STAGING, Staged, StagingRound, drop, sweep
from semel.sinks.postgres.tables import OWNERS, Component, claim, filled, hold, install
from semel.sinks.postgres.target import TargetTable, WrittenColumn, delete_key, describe, upsert_key
from semel.spark.base_sink import FencedSinkError, LedgerRule, RefusedError, SinkError
from semel.spark.ledger import (
    KEPT_BATCHES,
    TABLE_WORDS,
    LedgerEntry,
    LedgerWords,
    LostLedgerError,
    MicroBatch,
    Written,
    decode,
)
from semel.spark.offsets import lowest, to_json
from semel.spark.postgres_options import PostgresOptions
from semel.spark.write_job import check_single_runs
from semel.spark.writing import Report

if TYPE_CHECKING:
    from psycopg import Connection

# --- the ledger as a table: one row per committed batch, written in the transaction of the batch's rows ---
#
# The same entries as in a ledger topic; the last `KEPT_BATCHES` of an application are kept.


LEDGER = Component(
    "spark_ledger",
    (
        """CREATE TABLE {schema}.spark_ledger (
            application_id text NOT NULL,
            sequence bigint NOT NULL,
            entry json NOT NULL,
            committed_at timestamptz NOT NULL DEFAULT now(),
            PRIMARY KEY (application_id, sequence)
        )""",
    ),
)


def last_row(connection: Connection[Any], schema: str, application_id: str) -> LedgerEntry | None:
    row = connection.execute(
        filled(
            "SELECT entry::text FROM {schema}.spark_ledger WHERE application_id = %s ORDER BY sequence DESC LIMIT 1",
            schema,
        ),
        [application_id],
    ).fetchone()
    return None if row is None else decode(row[0].encode())


def add_row(connection: Connection[Any], schema: str, application_id: str, entry: LedgerEntry) -> None:
    connection.execute(
        filled("INSERT INTO {schema}.spark_ledger (application_id, sequence, entry) VALUES (%s, %s, %s)", schema),
        [application_id, entry.sequence, entry.encode().decode()],
    )
    connection.execute(
        filled("DELETE FROM {schema}.spark_ledger WHERE application_id = %s AND sequence <= %s", schema),
        [application_id, entry.sequence - KEPT_BATCHES],
    )


log = logging.getLogger("semel.spark")
T = TypeVar("T")

# A driver that is frozen in the middle of its transaction holds the owner row; the server ends that transaction before
# the lock timeout of a new owner has passed.
IDLE_SHARE = 0.5
GONE_S = 1.0
WHOLE_TABLE = -1  # in place of a partition: what was written to a table


class BatchHandle(NamedTuple):
    """What was begun: where tasks put their rows, and the table that they are for."""

    stage: StagingRound
    table: TargetTable


class PostgresTransaction(LedgerRule, Closing):
    """The database transactions of one application id in one process, one after the other."""

    words: ClassVar[LedgerWords] = TABLE_WORDS
    components: ClassVar[tuple[Component, ...]] = (OWNERS, STAGING, LEDGER, DEAD_ROWS)

    def __init__(self, options: PostgresOptions) -> None:
        super().__init__(options)
        self.options: PostgresOptions = options
        self.session = DatabaseSession(options.database, "spark driver")
        self.generation: int | None = None
        self.columns: Sequence[WrittenColumn] = ()  # of the rows of this batch
        self._round = 0
        self._table: TargetTable | None = None
        self._marked: Any = None  # the connection that shows that this owner lives

    def close(self) -> None:
        self.session.close()

    def open(self) -> None:
        """Makes sure that semel's tables and the user's are there. Takes nothing from anybody."""
        schema = self.options.schema

        def work(connection: Connection[Any]) -> None:
            if connection.execute("SELECT pg_is_in_recovery()").fetchone() == (True,):
                raise SinkError(
                    f"{self.options.database.where} is a standby and takes no writes; give the address of the primary, "
                    "or several hosts with target_session_attrs=read-write"
                )
            for component in self.components:
                install(connection, schema, component)
            self.last = last_row(connection, schema, self.options.application_id)
            self._describe(connection)

        self.session.run("opening the sink", work)

    def committed_offsets(self) -> str:
        """Where the ledger ends, for the source's option committedOffsets."""
        edge = lowest(self.last.ends if self.last else [])
        return json.dumps(to_json(edge.offsets, edge.ids))

    def _describe(self, connection: Connection[Any]) -> TargetTable:
        options = self.options
        table = describe(connection, options.table)
        if options.mode == UPSERT:
            upsert_key(table, options.key)
        elif options.key:
            delete_key(table, options.key)
        self._table = table
        return table

    # --- decide ---
    def decide(self, batch: MicroBatch, is_stateful: Callable[[], bool], cause: str = "") -> bool:
        """Whether the batch is to be written; False: it is written. Raises RefusedError if it must not be.

        The first time, every earlier run is fenced, but only once it is clear that this batch is the next one."""
        if self.generation is None:
            self._retried("reading the ledger", self._read_ledger)
            if self.is_written(batch, is_stateful, cause):
                return False
            self._retried("taking over the application id", lambda connection: self._own(connection, batch))
        return not self.is_written(batch, is_stateful, cause)

    def _read_ledger(self, connection: Connection[Any]) -> None:
        self.last = last_row(connection, self.options.schema, self.options.application_id)

    def _own(self, connection: Connection[Any], batch: MicroBatch) -> None:
        """Waits for the end of a transaction that the owner before has open; then its entry is visible."""
        options = self.options
        self._refuse_in_use(connection, batch)
        holder = f"query {batch.query_id} on {socket.gethostname()}, process {os.getpid()}"
        self.generation = claim(connection, options.schema, options.owner, holder)
        self._show_life(connection)
        self._read_ledger(connection)

    def _refuse_in_use(self, connection: Connection[Any], batch: MicroBatch) -> None:
        """A second query under the id must not take it from a live one. An earlier run of this query is replaced."""
        if self.last is not None and self.last.query_id == batch.query_id:
            return
        row = connection.execute(
            filled("SELECT generation, holder, since FROM {schema}.owners WHERE name = %s", self.options.schema),
            [self.options.owner],
        ).fetchone()
        if row is None or row[1].startswith(f"query {batch.query_id} "):
            return
        if not self._is_gone(connection, row[0]):
            raise RefusedError(
                f"application id {self.options.application_id!r} is in use: {row[1]} is connected to the database "
                f"(generation {row[0]}, since {row[2]:%Y-%m-%d %H:%M:%S%z}). It was left alone, and nothing was "
                "written. Two queries need two application ids; to replace the running one, stop it first"
            )

    def _is_gone(self, connection: Connection[Any], generation: int) -> bool:
        """Whether an owner is not connected; one that has just ended may be for another moment."""
        life, deadline = self._life(connection, generation), Deadline(GONE_S)
        while connection.execute("SELECT pg_try_advisory_xact_lock(%s)", [life]).fetchone() != (True,):
            if deadline.expired:
                return False
            time.sleep(0.05)
        return True

    def _life(self, connection: Connection[Any], generation: int) -> int:
        """The number of the advisory lock that a live owner holds as long as it is connected."""
        text = f"semel {self.options.schema} {self.options.owner} {generation}"
        row = connection.execute("SELECT hashtextextended(%s, 0)", [text]).fetchone()
        assert row is not None
        return int(row[0])

    def _show_life(self, connection: Connection[Any]) -> None:
        assert self.generation is not None
        if connection is not self._marked:
            connection.execute("SELECT pg_try_advisory_lock(%s)", [self._life(connection, self.generation)])
            self._marked = connection

    # --- begin, audit ---
    def begin(self) -> BatchHandle:
        """A new round. The table may have been altered since the last one."""
        faults.hit("postgres_sink.before_begin")
        is_first = self._round == 0
        self._round += 1

        def work(connection: Connection[Any]) -> TargetTable:
            self._hold(connection)
            self._show_life(connection)
            if is_first:
                self._swept(connection)
            return self._describe(connection)

        table = self._retried("beginning a batch", work)
        faults.hit("postgres_sink.after_begin")
        return BatchHandle(self._stage(), table)

    def _stage(self) -> StagingRound:
        assert self.generation is not None, "decide() comes first"
        return StagingRound(self.options.schema, self.options.owner, self.generation, self._round)

    def audit(self, reports: list[Report]) -> None:
        """The counts are compared where rows are moved."""
        faults.hit("postgres_sink.after_write")
        check_single_runs(reports)

    # --- commit ---
    def commit(
        self, batch: MicroBatch, reports: list[Report], run_id: str, checksum: str = "", attempts: int = 1
    ) -> LedgerEntry:
        """Rows, ledger row and staging tables in one transaction. A batch without rows that moved nothing is left out,
        unless it is the first of its query: the next batch must find that in the ledger."""
        entry = self._entry(batch, reports, run_id, checksum, attempts)
        if entry.rows or self._is_news(batch):
            entry = self._decided(entry, reports)
        faults.hit("postgres_sink.after_commit")
        self._sweep_quietly()
        return entry

    def _is_news(self, batch: MicroBatch) -> bool:
        """Whether a batch belongs into the ledger even if it has no rows."""
        is_known = self.last is not None and self.last.query_id == batch.query_id
        return batch.starts != batch.ends or not batch.ends or not is_known

    def _decided(self, entry: LedgerEntry, reports: list[Report]) -> LedgerEntry:
        """The entry, when it is in the ledger and its rows are in the table."""
        self.last = self.session.run(
            f"writing batch {entry.batch_id} to {self.options.database.where}",
            lambda connection: self._decide_in_database(connection, entry, reports),
            was_committed=lambda connection: self._is_there(connection, entry),
        )
        return self.last

    def _decide_in_database(
        self, connection: Connection[Any], entry: LedgerEntry, reports: list[Report]
    ) -> LedgerEntry:
        options, stage = self.options, self._stage()
        self._begin_decision(connection)
        staged = [Staged(stage.table_of(report.mark), report.rows) for report in reports if report.rows]
        dead = self._move()(connection, staged, options.application_id, entry.sequence)
        faults.hit("postgres_sink.after_move")
        entry = _with_dead(entry, dead)
        add_row(connection, options.schema, options.application_id, entry)
        faults.hit("postgres_sink.after_ledger")
        drop(connection, options.schema, [one.table for one in staged])
        return entry

    def _begin_decision(self, connection: Connection[Any]) -> None:
        """The owner's row is locked until the end; a server that is set not to wait for the disk waits all the same."""
        idle_ms = max(1_000, int(self.options.database.lock_timeout_ms * IDLE_SHARE))
        connection.execute("SELECT set_config('idle_in_transaction_session_timeout', %s, true)", [f"{idle_ms}ms"])
        connection.execute(
            "SELECT set_config('synchronous_commit', 'on', true) WHERE current_setting('synchronous_commit') = 'off'"
        )
        self._hold(connection)
        faults.hit("postgres_sink.after_hold")
        known = last_row(connection, self.options.schema, self.options.application_id)
        ours = None if self.last is None else self.last.sequence
        found = None if known is None else known.sequence
        if found != ours:
            raise LostLedgerError(
                f"the ledger of application {self.options.application_id!r} ends at entry {found}, but this driver "
                f"wrote up to {ours}: the database was restored while the query ran, or its tables were changed by "
                "hand. Start the query again: it compares its checkpoint with the ledger"
            )

    def _move(self) -> Move:
        options, table = self.options, self._table
        assert table is not None, "begin() comes first"
        key = upsert_key(table, options.key) if options.mode == UPSERT else options.key
        return Move(
            options.schema,
            table,
            self.columns,
            options.mode,
            key,
            options.order_by,
            options.operation_column,
            options.sets_aside,
        )

    def _is_there(self, connection: Connection[Any], entry: LedgerEntry) -> bool:
        """After a COMMIT whose outcome is unknown. The owner's lock waits for the end of that transaction."""
        self._hold(connection)
        found = last_row(connection, self.options.schema, self.options.application_id)
        return found is not None and (found.sequence, found.run_id) == (entry.sequence, entry.run_id)

    def _entry(
        self, batch: MicroBatch, reports: list[Report], run_id: str, checksum: str, attempts: int
    ) -> LedgerEntry:
        rows = sum(report.rows for report in reports)
        name = self.options.table if self._table is None else self._table.text
        written = [Written(name, WHOLE_TABLE, rows, -1, -1)] if rows else []
        return self.next_entry(batch, run_id, checksum, attempts, written=written, rows=rows)

    # --- when it did not work ---
    def settle(self, batch: MicroBatch, error: Exception, is_stateful: Callable[[], bool], cause: str = "") -> bool:
        """After a failure: nothing is open any more. True if the batch is written after all; else it may run again."""

        def work(connection: Connection[Any]) -> None:
            self._hold(connection)
            self._read_ledger(connection)

        self._retried("reading how a batch ended", work)
        self._round += 1  # tasks that Spark has not ended yet belong to the round before
        self._sweep_quietly()
        return self.is_written(batch, is_stateful, cause)

    def abort(self) -> None:
        """Nothing is open in the database; what tasks left is swept now, or by the next batch or start."""
        self._round += 1
        self._sweep_quietly()

    def _hold(self, connection: Connection[Any]) -> None:
        assert self.generation is not None, "decide() comes first"
        hold(connection, self.options.schema, self.options.owner, self.generation)

    def _sweep_quietly(self) -> None:
        """What cannot be swept now is swept later."""

        def work(connection: Connection[Any]) -> None:
            self._hold(connection)
            self._swept(connection)

        try:
            self.session.run("sweeping staging tables", work)
        except PostgresError as error:
            log.warning("staging tables are left for the next batch: %s", error)

    def _swept(self, connection: Connection[Any]) -> None:
        dropped = sweep(connection, self._stage())
        if dropped:
            log.info("dropped %d staging tables that attempts had left, such as %s", len(dropped), dropped[0])

    def _retried(self, what: str, work: Callable[[Connection[Any]], T]) -> T:
        """Work that may run twice: a server that restarts is waited for."""
        deadline, pauses = Deadline(self.options.retry_timeout_ms / 1000), Backoff(50, 1_000)
        while True:
            try:
                return self.session.run(what, work)
            except FencedInDatabaseError as error:
                raise self._fenced(error) from error
            except (DatabaseUnavailableError, DatabaseConflictError):
                if deadline.expired:
                    raise
                time.sleep(pauses.next_s())

    def _fenced(self, error: FencedInDatabaseError) -> FencedSinkError:
        return FencedSinkError(
            f"application id {self.options.application_id!r} was taken over by another driver: {error}. If that is the "
            "one that should run, this one is right to stop; else start this Spark application again. Two queries need "
            "two application ids"
        )


def _with_dead(entry: LedgerEntry, dead: int) -> LedgerEntry:
    import msgspec

    return msgspec.structs.replace(entry, dead_letters=dead)
