"""The outbox relay: rows that an application inserts in its own transaction reach their topics exactly once.

    semel.Outbox(dsn, application_id="orders").run()

A relay sends chunks. One chunk is one Kafka transaction: the rows, and a record in the topic `<application_id>.outbox`
with the chunk's number and the rows' ids. Then one database transaction removes the rows and notes the number. A relay
that starts, or goes on after an error, first takes over the transactional id, reads the topic's last record and removes
the rows that it names, if they are still there: they are in their topics. Only then it sends.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from semel import faults
from semel.client.admin import Admin
from semel.client.consumer import Consumer
from semel.client.errors import (
    CommitUncertainError,
    ConfigError,
    FatalError,
    FencedError,
    KafkaError,
    RecordTooLargeError,
)
from semel.client.producer import Producer
from semel.client.settings import ProducerSettings
from semel.client.timing import Backoff
from semel.client.types import TopicPartition
from semel.client.waiting import Flag
from semel.patterns.process_options import underscored
from semel.patterns.process_output import HOPELESS, OutputTooLargeError, check_rows
from semel.patterns.stopping import stop_on_signals
from semel.protocol.errors import ErrorCode, Recovery
from semel.sinks.postgres.database import Database
from semel.sinks.postgres.errors import sorted_errors
from semel.sinks.postgres.outbox_table import (
    CHANNEL,
    OUTBOX,
    OutboxRow,
    OutboxStatus,
    RelayProgress,
    Release,
    adopt,
    note_sent,
    read_progress,
    read_status,
    ready,
    set_aside,
    times_of,
)
from semel.sinks.postgres.session import DatabaseSession
from semel.sinks.postgres.tables import OWNERS, claim, filled, hold, install

if TYPE_CHECKING:
    from psycopg import Connection

log = logging.getLogger("semel.outbox")

OWNER = "outbox"  # one relay at a time for one table, whatever its application id
PROGRESS_CONFIG = {
    "cleanup.policy": "compact",
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "segment.bytes": str(4 << 20),
}
SHORT_WAIT_MS = (2, 100)  # while rows wait for a transaction that gives no sign when it ends
INTERNAL_TOPICS = ("__consumer_offsets", "__transaction_state", "__share_group_state", "__cluster_metadata")
MISSING_BEFORE_MS = 500  # for a topic that was awaited in vain before
FIRST_LOOK_BACK = 16
RANGE_BYTES = 2 * 19 + 4  # of two ids as JSON
RANGES_BYTES = 256 << 10  # of one record of the topic of chunks
LOOKING_S = 30.0
REMEDY = (
    "or delete the rows that were sent since, then start with accept_database=True (--accept-database): it sends every "
    "row that the table holds"
)


class ProgressRecord(msgspec.Struct):
    """What a chunk's record says: its number, and the ids of its rows as ranges, both ends included. Ranges that one
    record cannot hold are in several, of one Kafka transaction, each under a key of its own. `rows` is the hash of all
    ids and times: a database that lost its last transactions gives their ids again."""

    chunk: int
    ranges: list[tuple[int, int]]
    part: int = 0
    parts: int = 1
    rows: str = ""

    def ids(self) -> list[int]:
        return [number for first, last in self.ranges for number in range(first, last + 1)]


_decode_progress = msgspec.json.Decoder(ProgressRecord).decode


class OutboxProgressError(FatalError):
    """The database and the topic of chunks do not fit together: one of them was restored, or belongs to another."""


class RelayStats(msgspec.Struct):
    """What a relay did."""

    rows: int = 0
    chunks: int = 0
    set_aside: int = 0
    retries: int = 0


class Outbox:
    """The outbox of a database, and its relay.

    dsn                 postgresql://user:password@host:port/database, or libpq's key=value form
    application_id      names the relay: its transactional id and its topic of chunks
    bootstrap_servers   the brokers, as host:port
    schema              where the outbox's tables are
    max_rows            how many rows one Kafka transaction may hold, if they take no more than 32 MiB; more, where one
                        source transaction has more
    poll_interval_ms    how long to wait for a notification before looking anyway
    missing_topic_timeout_ms  how long to wait for a topic that does not exist, before its rows are set aside
    accept_database     after a restore: send what the table holds, although the topic of chunks says that it is older
    client              more options for its clients, by Kafka's names, such as security.protocol
    producer            more options for the producer
    on_chunk            called with the `RelayStats` after each chunk
    """

    def __init__(
        self,
        dsn: str,
        application_id: str = "",
        *,
        bootstrap_servers: str | Iterable[str] = "localhost:9092",
        schema: str = "semel",
        max_rows: int = 5_000,
        poll_interval_ms: int = 500,
        missing_topic_timeout_ms: int = 10_000,
        transaction_timeout_ms: int = 60_000,
        accept_database: bool = False,
        client: Mapping[str, Any] | None = None,
        producer: Mapping[str, Any] | None = None,
        on_chunk: Callable[[RelayStats], None] | None = None,
    ) -> None:
        if max_rows < 1 or poll_interval_ms < 1:
            raise ConfigError("max_rows and poll_interval_ms must be at least 1")
        self._database = Database(dsn, schema=schema)
        self._application_id = application_id
        self._schema = schema
        self._max_rows = max_rows
        self._poll_interval_ms = poll_interval_ms
        self._missing_topic_timeout_ms = missing_topic_timeout_ms
        self._accept_database = accept_database
        self._on_chunk = on_chunk
        shared = {"bootstrap_servers": bootstrap_servers, "client_id": f"{application_id}-outbox"}
        self._client_options = {**underscored(client), **shared}
        self._producer_options = {
            **self._client_options,
            **underscored(producer),
            "transactional_id": f"{application_id}-outbox",
            "transaction_timeout_ms": transaction_timeout_ms,
            "allow_auto_create_topics": False,  # one that was deleted is as missing as one that never was
        }
        self._max_record_bytes = ProducerSettings.of(self._producer_options).max_request_size
        self._session = DatabaseSession(self._database, f"outbox {application_id}")
        self._listener: Connection[Any] | None = None
        self._producer: Producer | None = None
        self._stopping = Flag()
        self._generation = 0
        self._chunk = 0
        self._bad: dict[int, str] = {}  # rows that cannot be sent, and why
        self._alone: set[int] = set()  # rows that go in batches of their own: one of them cannot be sent
        self._has_learned = False  # more about these two
        self._partitions: dict[str, int] = {}  # of the topics that rows have named
        self._missing: set[str] = set()  # topics that were awaited in vain
        self._looked_up: dict[str, str] = {}  # topics, once for each chunk, and what is wrong with them
        self._short = Backoff(*SHORT_WAIT_MS)
        self.stats = RelayStats()

    # -- for applications ----------------------------------------------------------------------------------------------
    def init(self) -> None:
        """Creates the tables, if they are not there. The relay does so, too."""

        def work(connection: Connection[Any]) -> None:
            for component in (OWNERS, OUTBOX):
                install(connection, self._schema, component)

        self._session.run("creating the outbox", work)

    def send(
        self,
        connection: Any,
        topic: str,
        value: bytes | str | None,
        key: bytes | str | None = None,
        *,
        headers: Sequence[tuple[str, bytes | None]] = (),
        partition: int | None = None,
    ) -> None:
        """Inserts a row in the caller's own transaction; `connection` is psycopg's. A value of None is a tombstone."""
        names, values = [name for name, _ in headers], [data for _, data in headers]
        statement = (
            "INSERT INTO {schema}.outbox (topic, partition, key, value, header_names, header_values) "
            "VALUES (%s, %s, %s, %s, %s, %s)"
        )
        row = [topic, partition, _bytes(key), _bytes(value), names or None, values or None]
        connection.execute(filled(statement, self._schema), row)

    def status(self) -> OutboxStatus:
        return self._session.run("reading the outbox", self._status)

    def _status(self, connection: Connection[Any]) -> OutboxStatus:
        made = "SELECT FROM pg_tables WHERE schemaname = %s AND tablename = 'outbox'"
        if not connection.execute(made, [self._schema]).rowcount:
            raise FatalError(
                f"there is no outbox in the schema {self._schema!r} of this database; `semel outbox init` creates it"
            )
        return read_status(connection, self._schema)

    def close(self) -> None:
        self._session.close()

    def stop(self) -> None:
        """Ends `run` after the current chunk. May be called from a signal handler or another thread."""
        self._stopping.set()

    # -- the relay -----------------------------------------------------------------------------------------------------
    def run(self, *, until_empty: bool = False) -> RelayStats:
        """Sends rows until `stop`, SIGTERM or Ctrl-C; with `until_empty`, until the table is empty. Raises what it
        cannot recover from, such as a relay that took over."""
        if not self._application_id:
            raise ConfigError("application_id is empty; it names the relay and its topic of chunks")
        with stop_on_signals(self.stop):
            try:
                self.init()
                self._create_progress_topic()
                self._own()
                self._turns(until_empty)
            finally:
                self._stopping.clear()  # it may run again
                self._close_all()
        return self.stats

    def _turns(self, until_empty: bool) -> None:
        backoff = Backoff(50, 2_000)
        needs_recovery = False
        following: Release | None = None
        while not self._stopping.is_set():
            try:
                if needs_recovery:
                    self._recover()
                    needs_recovery = False
                release = following or self._session.run("reading the outbox", self._ready)
                following = None
                if release.rows:
                    following = self._relay(release.rows)
                    backoff.reset()
                    self._short.reset()
                elif until_empty and not release.held:
                    return
                else:
                    self._wait(bool(release.held))
            except KafkaError as error:
                if not _can_go_on(error):
                    raise
                log.warning("reading again what was sent, after: %s", error)
                self.stats.retries += 1
                needs_recovery = True
                if self._has_learned:
                    self._has_learned = False
                    backoff.reset()
                self._stopping.wait(backoff.next_s())

    def _ready(self, connection: Connection[Any]) -> Release:
        release = ready(connection, self._schema, self._max_rows)
        if release.rows:
            # The lock is a write, whose commit puts all before it on disk: a row of somebody who does not wait for that
            # (synchronous_commit=off) must not be sent and then be lost, its id given to another one.
            self._hold(connection)
        return release

    # -- ownership -----------------------------------------------------------------------------------------------------
    def _own(self) -> None:
        """Takes over from any other relay: in the database first, then the transactional id."""
        holder = f"{self._application_id} on {socket.gethostname()}, process {os.getpid()}"

        def work(connection: Connection[Any]) -> int:
            generation = claim(connection, self._schema, OWNER, holder)
            progress = read_progress(connection, self._schema)
            if progress is not None and progress.application_id != self._application_id:
                raise ConfigError(
                    f"this outbox is relayed as {progress.application_id!r}, not {self._application_id!r}: two relays "
                    "under different names would both send every row. Use that application id, or another schema"
                )
            return generation

        self._generation = self._session.run("taking over the outbox", work)
        self._take_over()

    def _recover(self) -> None:
        """After an error: still the owner? Then the id anew, which settles what was open."""
        self._session.run("checking the owner", self._hold)
        self._take_over()

    def _hold(self, connection: Connection[Any]) -> None:
        hold(connection, self._schema, OWNER, self._generation)

    def _take_over(self) -> None:
        if self._producer is not None:
            self._producer.close(timeout_ms=0)
        self._partitions.clear()  # a topic may have been deleted
        self._producer = Producer(self._producer_options)
        self._producer.init_transactions()
        if faults.armed:
            faults.hit("outbox.after_init")
        self._reconcile(self._last_sent())

    def _reconcile(self, sent: ProgressRecord | None) -> None:
        """Removes rows that are in their topics already. Refuses what does not fit together."""
        number = 0 if sent is None else sent.chunk

        def work(connection: Connection[Any]) -> int:
            self._hold(connection)
            progress = read_progress(connection, self._schema)
            if progress is None or self._accept_database:
                self._check_new(progress, number)
                adopt(connection, self._schema, self._application_id, number)
                return number
            if progress.chunk == number:
                return number
            if sent is None or progress.chunk != number - 1:
                raise self._mismatch(progress.chunk, number)
            there = times_of(connection, self._schema, sent.ids())
            if there and sent.rows and hash_of(there) != sent.rows:
                raise OutboxProgressError(
                    f"topic {self._topic!r} has chunk {number}, and the ids of its rows belong to other rows now: the "
                    "database lost them, as in a fail-over to a replica that was behind. Restore its last "
                    f"transactions; {REMEDY}"
                )
            removed = note_sent(connection, self._schema, number, sent.ids())
            log.warning("chunk %d had been sent: removed its %d rows", number, removed)
            return number

        self._chunk = self._session.run("comparing the outbox with its topic of chunks", work)
        self._accept_database = False  # once

    def _check_new(self, progress: RelayProgress | None, number: int) -> None:
        if progress is None and number and not self._accept_database:
            raise self._mismatch(None, number)

    def _mismatch(self, in_database: int | None, in_kafka: int) -> OutboxProgressError:
        known = "no chunk" if in_database is None else f"chunk {in_database}"
        return OutboxProgressError(
            f"the database has noted {known} as its last one, topic {self._topic!r} has chunk {in_kafka}: one of them "
            "was restored from a backup, or belongs to another outbox. Restore the other one to the same time; "
            f"{REMEDY}"
        )

    # -- one chunk -----------------------------------------------------------------------------------------------------
    def _relay(self, rows: list[OutboxRow]) -> Release | None:
        """Sends a chunk and removes it; what may be sent next, where the same transaction has found some."""
        self._looked_up.clear()
        sendable = [row for row in rows if self._is_sendable(row)]
        chunk = self._chunk + 1
        if sendable:
            self._send(chunk, sendable)
        else:
            chunk = self._chunk
        aside = {row.id: self._bad[row.id] for row in rows if row.id in self._bad}
        ids = [row.id for row in sendable]

        def work(connection: Connection[Any]) -> Release:
            self._hold(connection)
            note_sent(connection, self._schema, chunk, ids)
            if aside:
                set_aside(connection, self._schema, aside)
            return ready(connection, self._schema, self._max_rows)

        following = self._session.run(
            "removing sent rows", work, was_committed=lambda connection: self._is_noted(connection, chunk)
        )
        self._chunk, self._bad, self._alone = chunk, {}, set()
        self.stats.rows += len(sendable)
        self.stats.chunks += 1
        self.stats.set_aside += len(aside)
        if self._on_chunk is not None:
            self._on_chunk(self.stats)
        return following if following.rows else None

    def _is_noted(self, connection: Connection[Any], chunk: int) -> bool:
        self._hold(connection)
        progress = read_progress(connection, self._schema)
        return progress is not None and progress.chunk == chunk

    def _send(self, chunk: int, rows: list[OutboxRow]) -> None:
        producer = self._producer
        assert producer is not None
        deliveries: list[Any] = []
        try:
            producer.begin_transaction()
            for row in rows:
                if row.id in self._alone:
                    producer.flush()
                deliveries.append(
                    producer.send(row.topic, row.value, row.key, row.partition, row.timestamp_ms, row.headers or None)
                )
                if row.id in self._alone:
                    producer.flush()
            for record in self._progress_of(chunk, rows):
                key = b"progress-%d" % record.part if record.part else b"progress"
                producer.send(self._topic, msgspec.json.encode(record), key)
            if faults.armed:
                faults.hit("outbox.before_commit")
            producer.commit_transaction()
        except KafkaError:
            self._find_bad(rows, deliveries)
            raise
        if faults.armed:
            faults.hit("outbox.after_commit")

    def _progress_of(self, chunk: int, rows: list[OutboxRow]) -> list[ProgressRecord]:
        ranges = ranges_of(row.id for row in rows)
        at_once = max(1, min(self._max_record_bytes // 2, RANGES_BYTES) // RANGE_BYTES)
        parts = range(0, len(ranges), at_once)
        hash_ = hash_of((row.id, row.timestamp_ms) for row in rows)
        return [
            ProgressRecord(chunk, ranges[first : first + at_once], part, len(parts), hash_)
            for part, first in enumerate(parts)
        ]

    def _find_bad(self, rows: list[OutboxRow], deliveries: list[Any]) -> None:
        """Notes the rows that will never be stored. Where a batch shares an error and the broker names no record, each
        row of it goes alone the next time."""
        refused: dict[int, str] = {}
        shared: set[int] = set()
        for row, delivery in zip(rows, deliveries, strict=False):
            why = delivery.exception() if delivery.done() else None
            if why is not None and why.code in HOPELESS and delivery.is_refused_alone:
                refused[row.id] = str(why)
            elif why is not None and why.code in HOPELESS:
                shared.add(row.id)
            elif why is None and delivery.done():
                self._alone.discard(row.id)  # it can be sent
        self._bad |= refused
        self._alone |= set() if refused else shared
        self._has_learned = bool(refused or shared)

    def _is_sendable(self, row: OutboxRow) -> bool:
        """Whether the row can be sent at all; else `_bad` has the reason."""
        if row.id not in self._bad:
            self._check_names(row)
        if row.id not in self._bad and (row.topic not in self._partitions or row.partition is not None):
            self._check_place(row)
        if row.id in self._bad:
            return False
        if len(row.value or b"") + len(row.key or b"") > self._max_record_bytes // 2 or row.header_names:
            try:
                check_rows([(row.value, row.key, None, None, None, row.headers)], self._max_record_bytes)
            except OutputTooLargeError as error:
                self._bad[row.id] = str(error)
        return row.id not in self._bad

    def _check_names(self, row: OutboxRow) -> None:
        """What the table's own types let through."""
        if row.topic == self._topic or row.topic in INTERNAL_TOPICS:
            self._bad[row.id] = f"topic {row.topic!r} is not for applications"
        elif not all(isinstance(name, str) for name in row.header_names or ()):
            self._bad[row.id] = f"header_names is {row.header_names}; expected one dimension of names, without nulls"
        elif not all(value is None or isinstance(value, bytes) for value in row.header_values or ()):
            self._bad[row.id] = "header_values has several dimensions; expected one value for each name"

    def _check_place(self, row: OutboxRow) -> None:
        """A topic is not created by sending to it: it may be a misspelled one."""
        count = self._partitions.get(row.topic)
        if row.topic in self._looked_up:
            if count is None:
                self._bad[row.id] = self._looked_up[row.topic]
                return
        elif count is None or (row.partition is not None and row.partition >= count):
            self._looked_up[row.topic] = ""
            try:
                with Consumer({**self._client_options, "allow_auto_create_topics": False}) as consumer:
                    timeout_ms = self._missing_topic_timeout_ms
                    if row.topic in self._missing:
                        timeout_ms = min(timeout_ms, MISSING_BEFORE_MS)
                    count = len(consumer.partitions_for(row.topic, timeout_ms))
            except KafkaError as error:
                if error.code not in (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.INVALID_TOPIC_EXCEPTION):
                    raise
                self._partitions.pop(row.topic, None)
                self._missing.add(row.topic)
                self._bad[row.id] = self._looked_up[row.topic] = f"topic {row.topic!r}: {error}"
                return
            self._partitions[row.topic] = count
            self._missing.discard(row.topic)
        if row.partition is not None and not 0 <= row.partition < count:
            self._bad[row.id] = f"partition {row.partition} of topic {row.topic!r} does not exist; it has {count}"

    # -- the topic of chunks -------------------------------------------------------------------------------------------
    @property
    def _topic(self) -> str:
        return f"{self._application_id}.outbox"

    def _create_progress_topic(self) -> None:
        with Admin(self._client_options) as admin:
            admin.create_topic(self._topic, 1, configs=PROGRESS_CONFIG, if_not_exists=True)
        with Consumer(self._client_options) as consumer:
            count = len(consumer.partitions_for(self._topic))
        if count != 1:
            raise ConfigError(
                f"topic {self._topic!r} has {count} partitions, a topic of chunks has 1: another program made it. "
                "Choose another application id"
            )

    def _last_sent(self) -> ProgressRecord | None:
        """The last committed record; None if there is none. Nobody writes meanwhile: the id is ours."""
        place = TopicPartition(self._topic, 0)
        options = {**self._client_options, "isolation_level": "read_committed", "auto_offset_reset": "earliest"}
        with Consumer(options) as consumer:
            consumer.assign([place])
            begin, end = consumer.beginning_offsets([place])[place], consumer.end_offsets([place])[place]
            back = FIRST_LOOK_BACK
            while True:
                start = max(begin, end - back)
                found = _records_from(consumer, place, start, end)
                parts = [record for record in found if record.chunk == found[-1].chunk]
                if parts and len(parts) == parts[-1].parts:
                    ranges = [pair for record in parts for pair in record.ranges]
                    return ProgressRecord(parts[-1].chunk, ranges, rows=parts[-1].rows)
                if start == begin:
                    if parts:
                        raise OutboxProgressError(
                            f"topic {self._topic!r} has {len(parts)} of the {parts[-1].parts} records of chunk "
                            f"{parts[-1].chunk}: records were deleted. Restore it"
                        )
                    return None
                back *= 8

    # -- waiting -------------------------------------------------------------------------------------------------------
    def _wait(self, is_held: bool) -> None:
        """Until a notification, or for the interval; shortly where rows wait for other transactions to end."""
        timeout_s = self._short.next_s() if is_held else self._poll_interval_ms / 1000
        with sorted_errors("waiting for rows", self._database.hide):
            if self._listener is None or self._listener.closed:
                self._listener = self._database.connect(f"outbox {self._application_id} listener", autocommit=True)
                self._listener.execute(f"LISTEN {CHANNEL}")
                return  # rows may have come before
            try:
                for _ in self._listener.notifies(timeout=min(timeout_s, self._poll_interval_ms / 1000), stop_after=1):
                    pass
            except BaseException:
                self._listener.close()
                raise

    def _close_all(self) -> None:
        if self._producer is not None:
            self._producer.close(timeout_ms=0)
        if self._listener is not None:
            self._listener.close()
        self._session.close()


def _can_go_on(error: KafkaError) -> bool:
    if isinstance(error, FencedError):
        return False
    if isinstance(error, CommitUncertainError | RecordTooLargeError):  # a row that is too large is set aside
        return True
    return error.recovery in (Recovery.RETRY, Recovery.ABORT)


def _bytes(data: bytes | str | None) -> bytes | None:
    return data.encode() if isinstance(data, str) else data


def hash_of(rows: Iterable[tuple[int, int | None]]) -> str:
    """Of ids and times, in the order of the ids."""
    return hashlib.sha256(msgspec.json.encode(sorted(rows))).hexdigest()


def ranges_of(ids: Iterable[int]) -> list[tuple[int, int]]:
    """Ids as ranges, both ends included."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(ids):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ranges


def _records_from(consumer: Consumer, place: TopicPartition, start: int, end: int) -> list[ProgressRecord]:
    """The records in a range of offsets; none where there are markers only."""
    found: list[ProgressRecord] = []
    consumer.seek(place, start)
    deadline_s = time.monotonic() + LOOKING_S
    while consumer.position(place) < end:
        found += [_decode_progress(record.value or b"") for record in consumer.poll(200)]
        if time.monotonic() > deadline_s:
            raise FatalError(f"{place.topic} could not be read up to its end at {end} within {LOOKING_S:g} s")
    return found
