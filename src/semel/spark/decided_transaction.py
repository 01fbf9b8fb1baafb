"""One micro-batch into topics and PostgreSQL with one decision, which the database makes.

    begin    a round of staging tables; a transaction of Kafka
    write    tasks write records into the transaction, and rows into staging tables; where the coordinator may abort the
             transaction at its timeout, a copy of the records into staging tables, too
    commit   ledger entry and source offsets into the transaction of Kafka, which stays open. ONE database transaction:
             rows, ledger row, copy, and which transaction of Kafka belongs to them. Its COMMIT is the decision.
             EndTxn; then the copy is dropped
    settle   what the ledger row says is decided is brought to its end, everything else is aborted

At the start the database is read before InitProducerId is sent, which aborts what is open:

    decided, and the broker kept it   EndTxn(commit)
    decided, markers say committed    nothing is left to do
    decided, no markers               the counts again, then EndTxn(commit) with the stored identity
    decided, markers say aborted      the copy is written in a new transaction, decided and ended as the first
    not decided                       abort
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import msgspec

from semel import faults
from semel.client.errors import KafkaError, UnsupportedByBrokerError
from semel.client.log_reading import last_sequences
from semel.client.producer.batches import Identity, Place
from semel.client.producer.handle import PartitionWriter, TransactionHandle, TransactionOwner
from semel.client.settings import ProducerSettings
from semel.sinks.postgres.decisions import NO_TWO_PHASE, Decision, end_decided, lost
from semel.sinks.postgres.errors import DatabaseCommitUncertainError
from semel.sinks.postgres.moving import compare_counts
from semel.sinks.postgres.staging import Staged, drop
from semel.sinks.postgres.tables import Component, filled
from semel.spark.base_sink import SinkError
from semel.spark.ledger import LedgerEntry, LostLedgerError, MicroBatch, Written, topic_of
from semel.spark.ledger_topic import last_entry, wait_for_markers
from semel.spark.postgres_options import PostgresOptions
from semel.spark.postgres_tasks import CopyStage
from semel.spark.postgres_transaction import BatchHandle, PostgresTransaction, log
from semel.spark.transaction import BatchTransaction, entry_table, send_source_offsets, write_entry
from semel.spark.writing import Report

if TYPE_CHECKING:
    from psycopg import Connection

# What a database has decided about the transaction of Kafka of a micro-batch: one row for each application, and a copy
# of the batch's records as long as its end is not confirmed.
#
# The owner row of the application is the lock: whoever reads or writes here holds it (`owners.hold`).


DECIDED_BATCHES = Component(
    "spark_decisions",
    (
        """CREATE TABLE {schema}.spark_decisions (
            application_id text PRIMARY KEY,
            sequence bigint NOT NULL,
            state text NOT NULL CHECK (state IN ('decided', 'finished')),
            producer_id bigint NOT NULL,
            epoch integer NOT NULL,
            transaction_version integer NOT NULL,
            written jsonb NOT NULL,
            has_copy boolean NOT NULL,
            decided_at timestamptz NOT NULL DEFAULT now()
        );
        CREATE TABLE {schema}.spark_copies (
            application_id text NOT NULL,
            topic text NOT NULL,
            partition integer NOT NULL,
            number integer NOT NULL,
            records integer NOT NULL,
            data bytea NOT NULL,
            PRIMARY KEY (application_id, topic, partition, number)
        );
        ALTER TABLE {schema}.spark_copies ALTER COLUMN data SET STORAGE EXTERNAL""",
    ),
)
FETCHED_AT_ONCE = 8  # record batches of about a megabyte


class WrittenPlace(NamedTuple):
    """What a transaction wrote into a partition."""

    first_offset: int
    last_sequence: int


class DecidedBatch(NamedTuple):
    """A transaction that must commit, or whose records must be written again, once."""

    sequence: int  # of its entry in the ledgers
    identity: Identity
    transaction_version: int  # 1 or 2: TV1 or TV2
    written: dict[Place, WrittenPlace]
    has_copy: bool

    @property
    def decision(self) -> Decision:
        offsets = {place: wrote.first_offset for place, wrote in self.written.items()}
        return Decision(*self.identity, self.transaction_version, offsets, None)


def read_decided(connection: Connection[Any], schema: str, application_id: str) -> DecidedBatch | None:
    """What is decided and not finished."""
    row = connection.execute(
        filled(
            "SELECT sequence, producer_id, epoch, transaction_version, written, has_copy FROM {schema}.spark_decisions "
            "WHERE application_id = %s AND state = 'decided'",
            schema,
        ),
        [application_id],
    ).fetchone()
    if row is None:
        return None
    sequence, producer_id, epoch, version, written, has_copy = row
    places = {(topic, partition): WrittenPlace(*wrote) for topic, partition, *wrote in written}
    return DecidedBatch(sequence, Identity(producer_id, epoch), version, places, has_copy)


def write_decided(connection: Connection[Any], schema: str, application_id: str, batch: DecidedBatch) -> None:
    """From the commit of the caller's transaction on, it is decided."""
    from psycopg.types.json import Jsonb

    connection.execute(
        filled(
            "INSERT INTO {schema}.spark_decisions VALUES (%s, %s, 'decided', %s, %s, %s, %s, %s) "
            "ON CONFLICT (application_id) DO UPDATE SET sequence = excluded.sequence, state = 'decided', "
            "producer_id = excluded.producer_id, epoch = excluded.epoch, written = excluded.written, "
            "transaction_version = excluded.transaction_version, has_copy = excluded.has_copy, decided_at = now()",
            schema,
        ),
        [
            application_id,
            batch.sequence,
            *batch.identity,
            batch.transaction_version,
            Jsonb([[*place, *wrote] for place, wrote in batch.written.items()]),
            batch.has_copy,
        ],
    )


def finish(connection: Connection[Any], schema: str, application_id: str) -> None:
    """Its end is confirmed: the copy is not needed any more."""
    for statement in (
        "UPDATE {schema}.spark_decisions SET state = 'finished', written = '[]' WHERE application_id = %s",
        "DELETE FROM {schema}.spark_copies WHERE application_id = %s",
    ):
        connection.execute(filled(statement, schema), [application_id])


# --- copies ---
def keep_copies(
    connection: Connection[Any], schema: str, application_id: str, staged: Sequence[Staged], places: Sequence[Place]
) -> None:
    """Moves what tasks have staged, in the transaction that decides. `places` are the partitions by their numbers."""
    from psycopg.sql import Identifier

    if not staged:
        return
    compare_counts(connection, schema, staged)
    topics, partitions = [topic for topic, _ in places], [partition for _, partition in places]
    for one in staged:
        connection.execute(
            filled(
                "INSERT INTO {schema}.spark_copies SELECT %s, p.topic, p.partition, s.number, s.records, s.data "
                "FROM {schema}.{table} s JOIN unnest(%s::text[], %s::int[]) WITH ORDINALITY "
                "AS p (topic, partition, place) ON p.place = s.target + 1",
                schema,
                table=Identifier(one.table),
            ),
            [application_id, topics, partitions],
        )
    drop(connection, schema, [one.table for one in staged])


def copies(connection: Connection[Any], schema: str, application_id: str) -> Iterator[tuple[str, int, int, bytes]]:
    """(topic, partition, records, record batch) of all that was kept, a few in memory at a time. Inside of a database
    transaction."""
    with connection.cursor(name="semel_copies") as cursor:
        cursor.itersize = FETCHED_AT_ONCE
        yield from cursor.execute(
            filled(
                "SELECT topic, partition, records, data FROM {schema}.spark_copies WHERE application_id = %s "
                "ORDER BY topic, partition, number",
                schema,
            ),
            [application_id],
        )


COPY_ATTEMPTS = 3  # the transaction of a copy may be aborted, too
TABLE = "spark_decisions"


class DecidedHandle(NamedTuple):
    """What was begun: in the database, in Kafka, and where copies of records go; None: none are needed."""

    tables: BatchHandle
    topics: TransactionHandle
    copy: CopyStage | None


class DecidedReports(NamedTuple):
    """What tasks reported: of rows, of records, and of copies."""

    rows: list[Report]
    records: list[Report]
    copied: list[Report]


class DecidedTransaction(PostgresTransaction):
    components: ClassVar[tuple[Component, ...]] = (*PostgresTransaction.components, DECIDED_BATCHES)

    def __init__(self, options: PostgresOptions) -> None:
        super().__init__(options)
        self.topics = BatchTransaction(options.kafka)
        self.two_phase: bool | None = None  # whether the broker serves it; None: not known yet
        self._use_two_phase(True)
        self._deciding: tuple[DecidedBatch, list[Staged]] | None = None
        self._may_be_decided = False  # and its end is not confirmed
        self._sequence_floor = -1

    def close(self) -> None:
        self.topics.close()
        super().close()

    def open(self) -> None:
        super().open()
        self.topics.open()

    # --- decide ---
    def decide(self, batch: MicroBatch, is_stateful: Callable[[], bool], cause: str = "") -> bool:
        if self.generation is None:
            self._retried("reading the ledger", self._read_ledger)
            self.is_written(batch, is_stateful, cause)  # a query that is refused takes nothing from anybody
            self._retried("taking over the application id", lambda connection: self._own(connection, batch))
            self._finish_decided()
            self._compare_ledgers()
        return super().decide(batch, is_stateful, cause)

    def _compare_ledgers(self) -> None:
        """Nothing is open now: the ledger in the database and the one in the topic have the same last entry, unless one
        of them was restored or deleted."""
        cluster, application_id = self.topics.owner.cluster, self.options.application_id
        wait_for_markers(cluster, application_id)
        found = last_entry(cluster, application_id, must_exist=True, accept_empty=True)
        here, there = (None if entry is None else entry.sequence for entry in (self.last, found))
        if here == there:
            return
        if not self.options.adopt_checkpoint:
            raise LostLedgerError(
                f"the ledger of application {application_id!r} in the database ends at entry {here}, the one in topic "
                f"{topic_of(application_id)!r} at {there}: one of them was restored from a backup or deleted, or was "
                "written without the other. Restore the one that is older; or use another application id; or, if you "
                "know that topics and tables agree with the checkpoint, pass adopt_checkpoint=True once"
            )
        self._sequence_floor = -1 if there is None else there

    # --- begin, audit ---
    def begin(self) -> Any:
        tables = super().begin()
        topics = self.topics.begin()
        return DecidedHandle(tables, topics, None if self.two_phase else CopyStage(self.options.database, tables.stage))

    def audit(self, reports: Any) -> None:
        self.topics.audit(reports.records)
        super().audit(reports.rows)

    # --- commit ---
    def commit(
        self, batch: MicroBatch, reports: Any, run_id: str, checksum: str = "", attempts: int = 1
    ) -> LedgerEntry:
        entry = self._entry(batch, reports.rows, run_id, checksum, attempts)
        in_topics = msgspec.structs.replace(
            self.topics.entry(batch, reports.records, run_id, checksum, attempts), sequence=entry.sequence
        )
        if entry.rows or in_topics.rows or self._is_news(batch):
            self._deciding = self._prepared(in_topics, reports)
            faults.hit("decision.prepared")
            entry = self._decided(entry, reports.rows)
            faults.hit("decision.made")
            self._end()
            faults.hit("decision.ended")
        else:
            self.topics.abort()
        faults.hit("postgres_sink.after_commit")
        self._sweep_quietly()
        return msgspec.structs.replace(
            entry, rows=entry.rows + in_topics.rows, dead_letters=entry.dead_letters + in_topics.dead_letters
        )

    def _entry(
        self, batch: MicroBatch, reports: list[Report], run_id: str, checksum: str, attempts: int
    ) -> LedgerEntry:
        entry = super()._entry(batch, reports, run_id, checksum, attempts)
        return msgspec.structs.replace(entry, sequence=max(entry.sequence, self._sequence_floor + 1))

    def _prepared(self, entry: LedgerEntry, reports: DecidedReports) -> tuple[DecidedBatch, list[Staged]]:
        """Everything is in the transaction of Kafka, and acknowledged: it waits for its end."""
        topics, options = self.topics, self.topics.options
        handle = topics.handle
        in_ledger = write_entry(handle, options.application_id, entry, topics.owner)
        faults.hit("sink.after_ledger")
        send_source_offsets(topics.owner, options, entry.ends)
        faults.hit("sink.after_offsets")
        written: dict[Place, WrittenPlace] = {
            topics.targets.place(report.target): WrittenPlace(report.first, report.sequence)
            for report in reports.records
        }
        written[in_ledger.topic, in_ledger.partition] = WrittenPlace(in_ledger.first_offset, in_ledger.last_sequence)
        staged = [Staged(self._stage().table_of(report.mark), report.rows) for report in reports.copied]
        decided = DecidedBatch(entry.sequence, handle.identity, handle.generation, written, not self.two_phase)
        return decided, staged

    def _decided(self, entry: LedgerEntry, reports: list[Report]) -> LedgerEntry:
        self._may_be_decided = True
        try:
            return super()._decided(entry, reports)
        except DatabaseCommitUncertainError:
            raise
        except Exception:
            self._may_be_decided = False
            raise

    def _decide_in_database(
        self, connection: Connection[Any], entry: LedgerEntry, reports: list[Report]
    ) -> LedgerEntry:
        assert self._deciding is not None
        entry = super()._decide_in_database(connection, entry, reports)
        decided, staged = self._deciding
        schema, application_id = self.options.schema, self.options.application_id
        keep_copies(connection, schema, application_id, staged, self.topics.targets.places())
        write_decided(connection, schema, application_id, decided)
        return entry

    def _end(self) -> None:
        """It is decided: whatever becomes of EndTxn, it is brought to its end, here or at the next start."""
        try:
            self.topics.owner.end(commit=True)
        except KafkaError as error:
            log.warning("the end of a decided batch was refused or is unknown: %s", error)
            self._finish_decided()
        else:
            self._confirm()

    def _confirm(self) -> None:
        def work(connection: Connection[Any]) -> None:
            self._hold(connection)
            finish(connection, self.options.schema, self.options.application_id)

        self._retried("finishing a decided batch", work)
        self._may_be_decided = False

    # --- when it did not work ---
    def settle(self, batch: MicroBatch, error: Exception, is_stateful: Callable[[], bool], cause: str = "") -> bool:
        if super().settle(batch, error, is_stateful, cause):
            self._finish_decided()
            return True
        self._may_be_decided = False
        self.topics.renew()
        if not self.two_phase:
            self.topics.raise_if_too_long(error)
        return False

    def abort(self) -> None:
        """What may be decided stays as it is: the next start knows."""
        if not self._may_be_decided:
            self.topics.abort()
        super().abort()

    # --- what is decided ---
    def _finish_decided(self) -> None:
        """Brings what is decided to its end. After that nothing is open, and the transactional id is this driver's."""
        decided = self._retried("reading what is decided", self._read_decided)
        is_committed = self._own_topics(decided)
        for _ in range(COPY_ATTEMPTS):
            if decided is None or is_committed:
                break
            decided = self._write_copy(decided)
            try:
                self.topics.owner.end(commit=True)
                is_committed = True
            except KafkaError as error:
                log.warning("the copy of a decided batch is not committed yet: %s", error)
                is_committed = self._own_topics(decided)
        if decided is None:
            self._may_be_decided = False
            return
        if not is_committed:
            raise SinkError(
                f"batch entry {decided.sequence} of application {self.options.application_id!r} is decided, but its "
                f"records could not be committed in {COPY_ATTEMPTS} attempts; the database has a copy. Start the query "
                "again when the brokers are well; raise transaction_timeout_ms if the log speaks of timeouts"
            )
        self._confirm()

    def _read_decided(self, connection: Connection[Any]) -> DecidedBatch | None:
        self._hold(connection)
        return read_decided(connection, self.options.schema, self.options.application_id)

    def _own_topics(self, decided: DecidedBatch | None) -> bool:
        """Takes the transactional id over; whether what was decided is committed. That the id may be taken, the owner
        row says: who is not its owner any more has raised before."""
        if self.two_phase is not False:
            try:
                return self._end_kept(decided)
            except UnsupportedByBrokerError:
                pass
            except KafkaError as error:
                if error.code not in NO_TWO_PHASE:
                    raise
            self._use_two_phase(False)
        settings = self.topics.owner.settings
        is_committed = decided is not None and end_decided(
            settings, decided.decision, may_commit=lambda owner: not self._added(decided, owner)
        )
        self.topics.own()
        return is_committed

    def _use_two_phase(self, wanted: bool) -> None:
        settings = self.topics.options.producer_settings()
        if wanted:  # then a transaction has no timeout
            timeout_ms = ProducerSettings.transaction_timeout_ms
            settings = replace(settings, transaction_two_phase_commit_enable=True, transaction_timeout_ms=timeout_ms)
        self.topics.owner.close()
        self.topics.owner = TransactionOwner(settings)
        self.two_phase = None if wanted else False  # to be seen

    def _end_kept(self, decided: DecidedBatch | None) -> bool:
        owner = self.topics.owner
        kept = owner.own_keeping()
        self.two_phase = True
        if kept is not None:
            # A driver that replaced this one meanwhile may have decided about what is open.
            self._retried("looking for a new owner", self._hold)
            is_decided = decided is not None and kept == decided.identity
            if is_decided and decided is not None and self._added(decided, owner):
                raise self._lost(decided)
            owner.end(commit=is_decided)
            if is_decided:
                return True
        # Not kept: it was ended before. How, the markers say.
        return decided is not None and end_decided(owner.settings, decided.decision, may_be_open=False)

    def _added(self, decided: DecidedBatch, owner: TransactionOwner) -> dict[Place, int]:
        """The audit of the counts again: what a task that was given up has added since to the transaction."""
        places = [*self.topics.targets.places(), (topic_of(self.options.application_id), 0)]
        cluster = owner.cluster
        found = last_sequences(cluster, places, decided.identity, cluster.deadline().remaining_s())
        expected = {place: wrote.last_sequence for place, wrote in decided.written.items()}
        added = {place: sequence for place, sequence in found.items() if sequence != expected.get(place)}
        if added:
            log.warning("a decided transaction has records that no task reported, in %s", sorted(added)[:5])
        return added

    def _lost(self, decided: DecidedBatch) -> Exception:
        return lost(self.options.application_id, decided.decision, f"{self.options.schema}.{TABLE}")

    # --- the copy ---
    def _write_copy(self, decided: DecidedBatch) -> DecidedBatch:
        """The records again, in a new transaction, which takes the place of the one that was aborted."""
        if not decided.has_copy:
            raise self._lost(decided)
        log.warning("the coordinator aborted a decided transaction; writing its records again")
        handle = self.topics.begin()
        with handle.writer(self.topics.owner.cluster) as writer:
            entry = self._copied(writer)
            send_source_offsets(self.topics.owner, self.topics.options, entry.ends)
            written = {
                (one.topic, one.partition): WrittenPlace(one.first_offset, one.last_sequence) for one in writer.finish()
            }
        faults.hit("decision.copy_written")
        again = decided._replace(identity=handle.identity, transaction_version=handle.generation, written=written)

        def work(connection: Connection[Any]) -> None:
            self._hold(connection)
            write_decided(connection, self.options.schema, self.options.application_id, again)

        def was_committed(connection: Connection[Any]) -> bool:
            return self._read_decided(connection) == again

        self.session.run("deciding about the copy", work, was_committed=was_committed)
        faults.hit("decision.copy_decided")
        return again

    def _copied(self, writer: PartitionWriter) -> LedgerEntry:
        """Writes the copy, and the entry of its batch as it is now."""
        options = self.options

        def work(connection: Connection[Any]) -> None:
            self._read_ledger(connection)
            for topic, partition, records, data in copies(connection, options.schema, options.application_id):
                writer.write_encoded(topic, partition, data, records)

        self.session.run("reading the copy of a decided batch", work)
        written = [
            Written(w.topic, w.partition, w.record_count, w.first_offset, w.last_offset) for w in writer.finish()
        ]
        assert self.last is not None
        entry = msgspec.structs.replace(self.last, written=written, rows=sum(one.count for one in written))
        writer.write(topic_of(options.application_id), 0, entry_table(entry))
        return entry
