"""The modes of `semel.process` whose sink is a database: rows and offsets in one database transaction.

    take      applies the function; nothing is sent yet
    settle    one database transaction: lock and compare the generations of the partitions, write, advance the offsets
    undo      read what the table says, and seek there

The table decides where to read on; see `process_external`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from semel.client.consumer import Consumer
from semel.client.dead_letters import reason_of
from semel.client.errors import KafkaError
from semel.client.timing import Backoff, Deadline
from semel.client.types import ConsumerRecord, TopicPartition
from semel.patterns.process_external import ExternalMode, SinkWords, log
from semel.patterns.process_output import Emitter, Output, first_record
from semel.sinks.claims import Claim, Claims
from semel.sinks.postgres.columns import TableForTable, TableWriter, tables_of
from semel.sinks.postgres.database import psycopg_module
from semel.sinks.postgres.errors import DatabaseUnavailableError, RowRefusedError, sorted_error
from semel.sinks.postgres.offsets import OFFSETS, OffsetsTable, OlderDatabaseError
from semel.sinks.postgres.rows import DEAD_LETTERS, RECEIPTS, RowWriter, event_id_of, give_back, receive, remove_old
from semel.sinks.postgres.rows import add as add_dead_letters
from semel.sinks.postgres.session import DatabaseSession
from semel.sinks.postgres.settings import Postgres, Statement, TableRow, effects_of
from semel.sinks.postgres.tables import Component, install

if TYPE_CHECKING:
    from psycopg import Connection

FIRST_CONTACT_S = 10.0  # a server that restarts is back by then
RECEIPTS_LOOK_S = 60.0  # so often old receipts are removed


class Applied(NamedTuple):
    """A record and what becomes of it. With a reason it is a dead letter."""

    record: ConsumerRecord
    effects: list[TableRow | Statement]
    reason: str | None = None
    event_id: str | None = None
    outputs: tuple[Output, ...] = ()  # for topics; see `process_decisions`


class WriteCounts(NamedTuple):
    rows: int
    dead_letters: int
    duplicates: int


class PostgresMode(ExternalMode):
    def __init__(
        self, consumer: Consumer, emitter: Emitter, settings: Postgres, application_id: str, instance: str | None
    ) -> None:
        super().__init__(consumer, emitter, application_id, instance, settings.when_behind)
        self._settings = settings
        self._schema = settings.database.schema
        self.words = SinkWords(
            "database",
            f"{self._schema}.offsets",
            f"delete the rows of application {application_id!r} from {self._schema}.offsets",
            "Postgres(dead_letters=True)",
            OlderDatabaseError,
        )
        self._session = DatabaseSession(settings.database, f"process {application_id}")
        self._table = OffsetsTable(self._schema, application_id, self.holder)
        self._writer = RowWriter(settings)
        self._event_id = None if settings.event_id is None else event_id_of(settings.event_id)
        self._taken: list[Applied] = []
        self._receipts_due_s = 0.0

    # -- the life of a mode --------------------------------------------------------------------------------------------
    def start(self) -> None:
        deadline, pauses = Deadline(FIRST_CONTACT_S), Backoff(50, 1_000)
        while True:
            try:
                self._install()
                return
            except DatabaseUnavailableError as error:
                if deadline.expired:
                    raise
                log.warning("trying again: %s", error)
                time.sleep(pauses.next_s())

    def _install(self) -> None:
        components = self._components()

        def work(connection: Connection[Any]) -> None:
            for component in components:
                install(connection, self._schema, component)

        self._session.run(f"creating semel's tables in schema {self._schema!r}", work)

    def _components(self) -> list[Component]:
        components = [OFFSETS]
        components += [DEAD_LETTERS] if self._settings.dead_letters else []
        components += [RECEIPTS] if self._event_id is not None else []
        return components

    def close(self) -> None:
        self._session.close()

    # -- partitions ----------------------------------------------------------------------------------------------------
    def _take_partitions(self, partitions: list[TopicPartition]) -> Claims:
        return self._session.run(
            "taking over partitions", lambda connection: self._table.claim(connection, partitions, self._topic_ids)
        )

    def _read_claims(self, partitions: Iterable[TopicPartition]) -> Claims:
        return self._session.run("reading offsets", lambda connection: self._table.read(connection, partitions))

    # -- work ----------------------------------------------------------------------------------------------------------
    def take(self, batch: Any, firsts: dict[TopicPartition, int]) -> None:
        self._begin(firsts)
        self._taken += [self._applied(record) for record in batch]

    def _applied(self, record: ConsumerRecord) -> Applied:
        event_id = None
        try:
            event_id = None if self._event_id is None else self._event_id(record)
            return self._made(record, self.emitter.function(record), event_id)
        except KafkaError:
            raise
        except Exception as error:
            return self._bad(record, error, event_id)

    def _made(self, record: ConsumerRecord, returned: Any, event_id: str | None) -> Applied:
        return Applied(record, effects_of(returned), None, event_id)

    def _bad(self, record: ConsumerRecord, error: Exception, event_id: str | None) -> Applied:
        """What `on_error` makes of it; else a dead letter, which gets no receipt: its event may be sent again; else the
        end of the loop."""
        if self.emitter.on_error is not None:
            try:
                return self._made(record, self.emitter.on_error(record, error), event_id)
            except KafkaError:
                raise
            except Exception as failure:
                error = failure
        return self._set_aside(record, error)

    def _set_aside(self, record: ConsumerRecord, error: Exception) -> Applied:
        reason = reason_of(error)
        if not self._settings.dead_letters:
            raise self._refused(record, reason) from error
        return Applied(record, [], reason)

    def settle(self) -> None:
        if not self.is_working:
            return
        offsets = self._ended()
        held = {partition: self._claims[partition] for partition in offsets}
        after = {partition: Claim(held[partition].generation, offset) for partition, offset in offsets.items()}
        try:
            outcome = self._transaction(held, offsets, after, self._write_all)
        except RowRefusedError as refused:
            log.info("finding the records that the database refuses: %s", refused)
            outcome = self._transaction(held, offsets, after, self._write_each)
        self._written(outcome, after)
        self._tell_group(offsets)
        self._remove_old_receipts()

    def _written(self, outcome: WriteCounts, after: Claims) -> None:
        """The database has it."""
        self._claims |= after
        self.records_out += outcome.rows
        self.dead_letters += outcome.dead_letters
        self.duplicates += outcome.duplicates
        self.commits += 1
        self._taken, self.begun = [], {}

    def _transaction(
        self,
        held: Claims,
        offsets: dict[TopicPartition, int],
        after: Claims,
        write: Callable[[Connection[Any]], WriteCounts],
    ) -> WriteCounts:
        def work(connection: Connection[Any]) -> WriteCounts:
            self._table.hold(connection, held)
            outcome = write(connection)
            self._table.advance(connection, offsets, self._topic_ids)
            return outcome

        def was_committed(connection: Connection[Any]) -> bool:
            return self._table.read(connection, after, lock=True) == after

        return self._session.run("writing rows and offsets", work, was_committed=was_committed)

    def _write_all(self, connection: Connection[Any]) -> WriteCounts:
        """Everything in a few requests. One refused row refuses all."""
        fresh = self._without_duplicates(connection)
        letters = [(each.record, each.reason) for each in fresh if each.reason is not None]
        rows = self._writer.write(connection, (effect for each in fresh for effect in each.effects))
        if letters:
            add_dead_letters(connection, self._schema, self._application_id, letters)
        return WriteCounts(rows, len(letters), len(self._taken) - len(fresh))

    def _write_each(self, connection: Connection[Any]) -> WriteCounts:
        """The same, record by record: so the ones are found that the database refuses."""
        connection.execute("SET CONSTRAINTS ALL IMMEDIATE")  # a deferred one would be checked by COMMIT, for all
        new = self._receive(connection)
        letters, rows, duplicates = [], 0, 0
        for given in self._taken:
            if given.event_id is not None and given.event_id not in new:
                duplicates += 1
                continue
            each = self._judged(connection, given)
            rows += len(each.effects)
            if each.reason is not None:
                letters.append((each.record, each.reason))
            elif given.event_id is not None:
                new.remove(given.event_id)
        if new:  # of events that were set aside, and not applied by a later copy
            give_back(connection, self._schema, self._application_id, new)
        if letters:
            add_dead_letters(connection, self._schema, self._application_id, letters)
        return WriteCounts(rows, len(letters), duplicates)

    def _judged(self, connection: Connection[Any], each: Applied) -> Applied:
        """Writes what a record leads to, or what is written instead; what that is. A dead letter writes nothing."""
        try:
            self._write_alone(connection, each.effects)
            return each
        except RowRefusedError as refused:
            instead = self._bad(each.record, refused, each.event_id)
        try:
            self._write_alone(connection, instead.effects)
            return instead
        except RowRefusedError as refused:
            return self._set_aside(each.record, refused)

    def _write_alone(self, connection: Connection[Any], effects: list[TableRow | Statement]) -> None:
        with self._alone(connection) if len(effects) > 1 else self._savepoint(connection):
            self._writer.write(connection, effects)

    @contextmanager
    def _alone(self, connection: Connection[Any]) -> Iterator[None]:
        """What breaks a constraint fails here, when all rows are there: a deferred one would be checked by COMMIT."""
        with self._savepoint(connection):
            connection.execute("SET CONSTRAINTS ALL DEFERRED")
            yield
            connection.execute("SET CONSTRAINTS ALL IMMEDIATE")

    @contextmanager
    def _savepoint(self, connection: Connection[Any]) -> Iterator[None]:
        try:
            with connection.transaction():
                yield
        except psycopg_module().Error as error:
            what = "the database refused the record"
            raise sorted_error(what, error, self._settings.database.hide) from None

    def _without_duplicates(self, connection: Connection[Any]) -> list[Applied]:
        """An inbox: of each event the first copy, unless it has a receipt."""
        if self._event_id is None:
            return self._taken
        new = self._receive(connection)
        fresh = []
        for each in self._taken:
            if each.event_id is None:
                fresh.append(each)
            elif each.event_id in new:
                new.remove(each.event_id)
                fresh.append(each)
        return fresh

    def _receive(self, connection: Connection[Any]) -> set[str]:
        """Writes receipts for all events; the ids of those that had none."""
        ids = [each.event_id for each in self._taken if each.event_id is not None]
        return receive(connection, self._schema, self._application_id, ids) if ids else set()

    def _remove_old_receipts(self) -> None:
        now_s = time.monotonic()
        if self._event_id is None or now_s < self._receipts_due_s:
            return
        self._receipts_due_s = now_s + RECEIPTS_LOOK_S
        retention_ms = self._settings.receipts_retention_ms
        try:
            while self._session.run(
                "removing old receipts",
                lambda connection: remove_old(connection, self._schema, self._application_id, retention_ms),
            ):
                pass
        except KafkaError as error:  # the next time
            log.warning("old receipts are still there: %s", error)

    # -- after an error ------------------------------------------------------------------------------------------------
    def drop(self) -> None:
        self._taken = []


# --- Arrow tables ---
#
# What the function returns for what was read at once is a piece. Where it raises, or the database refuses its rows, the
# table that it was given is halved, and the function called again with each half, until a single record is left.


class Piece(NamedTuple):
    """A table of records, and what becomes of it. With a reason its record is a dead letter."""

    given: Any
    made: list[TableForTable]
    reason: str | None = None
    is_instead: bool = False  # what on_error made of a bad record


class PostgresTablesMode(PostgresMode):
    def __init__(
        self, consumer: Consumer, emitter: Emitter, settings: Postgres, application_id: str, instance: str | None
    ) -> None:
        super().__init__(consumer, emitter, settings, application_id, instance)
        self._tables = TableWriter(settings)
        self._pieces: list[Piece] = []

    def take(self, batch: Any, firsts: dict[TopicPartition, int]) -> None:
        self._begin(firsts)
        self._pieces += self._made_of(batch)

    def _made_of(self, table: Any) -> list[Piece]:
        try:
            return [Piece(table, tables_of(self.emitter.function(table), self._settings.table))]
        except KafkaError:
            raise
        except Exception as error:
            return self._smaller(table, error)

    def _smaller(self, table: Any, error: Exception) -> list[Piece]:
        """The halves of a bad table; of a bad record what `on_error` makes of it, else a dead letter, else the end."""
        if table.num_rows > 1:
            half = table.num_rows // 2
            return self._made_of(table.slice(0, half)) + self._made_of(table.slice(half))
        if self.emitter.on_error is not None:
            try:
                returned = self.emitter.on_error(table, error)
                return [Piece(table, tables_of(returned, self._settings.table), is_instead=True)]
            except KafkaError:
                raise
            except Exception as failure:
                error = failure
        return [self._aside(table, error)]

    def _aside(self, table: Any, error: Exception) -> Piece:
        return Piece(table, [], self._set_aside(first_record(table), error).reason)

    # -- in the transaction --------------------------------------------------------------------------------------------
    def _write_all(self, connection: Connection[Any]) -> WriteCounts:
        rows = self._tables.write(connection, (each for piece in self._pieces for each in piece.made))
        letters = [piece for piece in self._pieces if piece.reason is not None]
        return self._written_with(connection, rows, letters)

    def _write_each(self, connection: Connection[Any]) -> WriteCounts:
        letters: list[Piece] = []
        rows = sum(self._judged_rows(connection, piece, letters) for piece in self._pieces)
        return self._written_with(connection, rows, letters)

    def _judged_rows(self, connection: Connection[Any], piece: Piece, letters: list[Piece]) -> int:
        """Writes a piece, or what can be written of it; how many rows."""
        if piece.reason is not None:
            letters.append(piece)
            return 0
        try:
            with self._alone(connection):
                return self._tables.write(connection, piece.made)
        except RowRefusedError as refused:
            left = [self._aside(piece.given, refused)] if piece.is_instead else self._smaller(piece.given, refused)
        return sum(self._judged_rows(connection, each, letters) for each in left)

    def _written_with(self, connection: Connection[Any], rows: int, letters: list[Piece]) -> WriteCounts:
        if letters:
            found = [(first_record(piece.given), piece.reason or "") for piece in letters]
            add_dead_letters(connection, self._schema, self._application_id, found)
        return WriteCounts(rows, len(letters), 0)

    def _written(self, outcome: WriteCounts, after: Claims) -> None:
        super()._written(outcome, after)
        self._pieces = []

    def drop(self) -> None:
        super().drop()
        self._pieces = []
