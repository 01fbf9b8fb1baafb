"""The mode of `semel.process` whose sink is a database: rows and offsets in one database transaction.

    take      applies the function; nothing is sent yet
    settle    one database transaction: lock and compare the generations of the partitions, write, advance the offsets
    undo      read what the table says, and seek there

The table decides where to read on: at the start, after every rebalance and after every error. The group gets the
offsets afterwards, for lag tools only.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from semel.client.consumer import Consumer
from semel.client.errors import KafkaError
from semel.client.timing import Backoff, Deadline
from semel.client.types import ConsumerRecord, OffsetAndMetadata, TopicPartition
from semel.patterns.process_modes import Mode
from semel.patterns.process_output import Emitter, Output, RecordError
from semel.sinks.postgres.database import psycopg_module
from semel.sinks.postgres.dead_letters import DEAD_LETTERS
from semel.sinks.postgres.dead_letters import add as add_dead_letters
from semel.sinks.postgres.errors import DatabaseUnavailableError, RowRefusedError, sorted_error
from semel.sinks.postgres.offsets import OFFSETS, Claim, Claims, OffsetsTable, OlderDatabaseError
from semel.sinks.postgres.receipts import RECEIPTS, event_id_of, give_back, receive, remove_old
from semel.sinks.postgres.rows import RowWriter
from semel.sinks.postgres.session import DatabaseSession
from semel.sinks.postgres.settings import Postgres, Statement, TableRow, effects_of
from semel.sinks.postgres.tables import Component, install

if TYPE_CHECKING:
    from psycopg import Connection

log = logging.getLogger("semel.process")

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


class PostgresMode(Mode):
    has_state = True  # offsets, for each partition

    def __init__(
        self, consumer: Consumer, emitter: Emitter, settings: Postgres, application_id: str, instance: str | None
    ) -> None:
        self.consumer = consumer
        self.emitter = emitter
        self.begun: dict[TopicPartition, int] = {}
        self.failed: BaseException | None = None
        self.records_out = self.dead_letters = self.duplicates = self.commits = self.aborts = 0
        self._settings = settings
        self._schema = settings.database.schema
        self._application_id = application_id
        self._session = DatabaseSession(settings.database, f"process {application_id}")
        self.holder = f"{instance or 'any'} on {socket.gethostname()}, process {os.getpid()}"
        self._table = OffsetsTable(self._schema, application_id, self.holder)
        self._writer = RowWriter(settings)
        self._event_id = None if settings.event_id is None else event_id_of(settings.event_id)
        self._claims: Claims = {}
        self._topic_ids: dict[str, UUID] = {}
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
    def assigned(self, partitions: list[TopicPartition]) -> None:
        self._claim(partitions)

    def released(self, partitions: list[TopicPartition]) -> None:
        for partition in partitions:
            self._claims.pop(partition, None)

    def _claim(self, partitions: Iterable[TopicPartition]) -> None:
        """Makes this instance their owner and goes to what the table says."""
        wanted = list(partitions)
        if not wanted:
            return
        self._topic_ids |= self.consumer.topic_ids(partition.topic for partition in wanted)
        claims = self._take_partitions(wanted)
        committed = self.consumer.committed(wanted)
        ends = self.consumer.end_offsets(wanted)
        for partition in wanted:
            behind = committed.get(partition)
            start = self._start_of(
                partition, claims[partition].next_offset, None if behind is None else behind.offset, ends[partition]
            )
            if start is None:
                self.consumer.seek_to_beginning(partition)
            elif start >= 0:
                self.consumer.seek(partition, start)
        self._claims |= claims

    def _take_partitions(self, partitions: list[TopicPartition]) -> Claims:
        return self._session.run(
            "taking over partitions", lambda connection: self._table.claim(connection, partitions, self._topic_ids)
        )

    def _start_of(self, partition: TopicPartition, mine: int | None, group: int | None, end: int) -> int | None:
        """Where to read on; None: at the beginning; -1: wherever a new group would. Raises if nobody can know."""
        name = f"{partition.topic}-{partition.partition}"
        if mine is not None and mine > end:
            raise OlderDatabaseError(
                f"{self._schema}.offsets has {name} at {mine}, but the topic ends at {end}: the topic was deleted and "
                f"created anew, or restored. Correct the topic's name, or delete the rows of application "
                f"{self._application_id!r} from {self._schema}.offsets to apply the new topic from its beginning"
            )
        if group is None or (mine is not None and group <= mine):
            return -1 if mine is None else mine
        if self._settings.when_behind == "refuse":
            raise OlderDatabaseError(
                f"{name}: the group {self._application_id!r} has committed offset {group}, {self._schema}.offsets has "
                f"{'none' if mine is None else mine}: the database is older than the topics, as after a restore from "
                "a backup, or it is another one. Restore a newer backup; or say when_behind='reprocess' to apply the "
                "records from the table's offset on again, or when_behind='skip' to go on at the group's"
            )
        return group if self._settings.when_behind == "skip" else mine

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
        reason = f"{type(error).__name__}: {error}"
        if not self._settings.dead_letters:
            raise RecordError(
                f"{record.topic}-{record.partition} at offset {record.offset}: {reason}. Nothing of its transaction "
                "was written. Correct it, or say what happens to such records with on_error= or "
                "Postgres(dead_letters=True)",
                None,
                record.topic,
                record.partition,
                record.offset,
            ) from error
        return Applied(record, [], reason)

    def settle(self) -> None:
        if not self.is_working:
            return
        offsets = {partition: at.offset for partition, at in self._progress().items()}
        self._topic_ids |= self.consumer.fetched_topic_ids(offsets)  # of a topic that was created anew meanwhile
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
        fresh = self._without_duplicates(connection)
        letters, rows = [], 0
        for each in fresh:
            written = self._try(connection, each)
            if isinstance(written, int):
                rows += written
                continue
            letters.append((each.record, written))
            if each.event_id is not None:
                give_back(connection, self._schema, self._application_id, each.event_id)
        if letters:
            add_dead_letters(connection, self._schema, self._application_id, letters)
        return WriteCounts(rows, len(letters), len(self._taken) - len(fresh))

    def _try(self, connection: Connection[Any], each: Applied) -> int | str:
        """The number of rows, or why it is a dead letter."""
        if each.reason is not None:
            return each.reason
        psycopg = psycopg_module()
        try:
            with connection.transaction():
                return self._writer.write(connection, each.effects)
        except psycopg.Error as error:
            refused: Any = sorted_error("the database refused the record", error, self._settings.database.hide)
            if not isinstance(refused, RowRefusedError):
                raise refused from None
        except RowRefusedError as error:
            refused = error
        instead = self._bad(each.record, refused, each.event_id)
        if instead.reason is not None:
            return instead.reason
        with connection.transaction():
            return self._writer.write(connection, instead.effects)

    def _without_duplicates(self, connection: Connection[Any]) -> list[Applied]:
        """An inbox: of each event the first copy, unless it has a receipt."""
        if self._event_id is None:
            return self._taken
        ids = [each.event_id for each in self._taken if each.event_id is not None]
        new = receive(connection, self._schema, self._application_id, ids)
        fresh = []
        for each in self._taken:
            if each.event_id is None:
                fresh.append(each)
            elif each.event_id in new:
                new.remove(each.event_id)
                fresh.append(each)
        return fresh

    def _tell_group(self, offsets: dict[TopicPartition, int]) -> None:
        def told(_: object, error: KafkaError | None) -> None:
            if error is not None:
                log.debug("the group does not have the offsets yet: %s", error)

        try:
            self.consumer.commit_async(
                {partition: OffsetAndMetadata(offset) for partition, offset in offsets.items()}, told
            )
        except KafkaError as error:
            told(None, error)

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

    def _rewind(self) -> None:
        """Back to what the table says, for everything that is assigned. What another instance took is claimed anew if
        the group still says that it is ours."""
        assigned = self.consumer.assignment()
        self._claims = {partition: claim for partition, claim in self._claims.items() if partition in assigned}
        found = self._session.run("reading offsets", lambda connection: self._table.read(connection, self._claims))
        for partition, mine in list(self._claims.items()):
            now = found.get(partition)
            if now is None or now.generation != mine.generation:
                self._check_membership(partition, mine)
                del self._claims[partition]
        for partition, began in self.begun.items():
            if partition in self._claims:
                claim = self._claims[partition] = found[partition]
                self.consumer.seek(partition, began if claim.next_offset is None else claim.next_offset)
        self._claim(partition for partition in assigned if partition not in self._claims)
        self.begun = {}

    def _check_membership(self, partition: TopicPartition, mine: Claim) -> None:
        """Raises if the group went on without this instance: then the other one is right."""
        if mine.next_offset is not None:
            self.consumer.commit({partition: OffsetAndMetadata(mine.next_offset)})
