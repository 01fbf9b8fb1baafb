"""Consume, process, produce: the loop around a function, with a guarantee that is one argument.

    import semel

    def shout(record):
        return record.value.upper()

    semel.process("orders", "orders.loud", shout, application_id="shouter", bootstrap_servers="localhost:9092")

Start it as often as you like: instances with one application id share the partitions as a consumer group. SIGTERM and
Ctrl-C finish the current transaction, leave the group and return.
"""

from __future__ import annotations

import difflib
import inspect
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import msgspec

from semel.client.admin import Admin
from semel.client.admin.risks import warn_of_risks
from semel.client.cluster_calls import group_coordinator
from semel.client.consumer import Consumer
from semel.client.consumer.core import RebalanceListener
from semel.client.errors import (
    AbortableError,
    CommitUncertainError,
    ConfigError,
    FatalError,
    FencedError,
    KafkaError,
    TimedOutError,
)
from semel.client.immediate import run
from semel.client.metrics import Measured, MetricsTable
from semel.client.producer import Producer
from semel.client.settings import ProducerSettings
from semel.client.timing import Backoff
from semel.client.types import GroupMetadata, TopicPartition
from semel.client.waiting import Flag
from semel.patterns.process_decisions import PostgresAndTopics
from semel.patterns.process_external import FilesMode
from semel.patterns.process_modes import MODES, Mode
from semel.patterns.process_options import (
    check_bad_records,
    check_external,
    check_function,
    check_guarantee,
    check_limits,
    check_state,
    consumer_options,
    underscored,
)
from semel.patterns.process_output import (
    HOPELESS,
    Emitter,
    OnError,
    Output,
    RecordError,
    RowFunction,
    StateFunction,
    TableFunction,
)
from semel.patterns.process_postgres import PostgresMode, PostgresTablesMode
from semel.patterns.process_state import Changelog, StatefulEmitter, StatefulExactlyOnce
from semel.patterns.state import KeyedState
from semel.patterns.stopping import stop_on_signals
from semel.protocol.errors import ErrorCode, Recovery
from semel.protocol.messages.groups import LEAVE_GROUP, LeaveGroupRequest, MemberIdentity
from semel.sinks.files.settings import COMMIT_INTERVAL_MS as FILES_INTERVAL_MS
from semel.sinks.files.settings import MAX_RECORDS as FILES_RECORDS
from semel.sinks.files.settings import Files
from semel.sinks.postgres.settings import Postgres

__all__ = ["Output", "Processor", "RecordError", "Stats", "process"]

log = logging.getLogger("semel.process")

COMMIT_INTERVAL_MS = 100
MAX_RECORDS = 20_000
IDLE_POLL_MS = 200
FIRST_CONTACT_S = 10.0  # a broker that restarts is back by then
LEAVE_TIMEOUT_S = 5.0
GIVE_UP_AGAIN_S = 1.0
STOP_TIMEOUT_S = 15.0  # after `stop`; more than an orderly end takes, less than what supervisors kill after
MAX_TIMEOUTS_IN_A_ROW = 3
FOR_GOOD = (  # another run of the same transaction would end in the same way
    ErrorCode.FENCED_INSTANCE_ID,
    ErrorCode.TOPIC_AUTHORIZATION_FAILED,
    ErrorCode.GROUP_AUTHORIZATION_FAILED,
    *HOPELESS,
)


class MissingSourceError(FatalError):
    """A source topic does not exist."""


def find_source(consumer: Consumer, topics: Iterable[str], timeout_s: float) -> list[TopicPartition]:
    """All partitions of the topics; waits for topics that are being created, up to the timeout."""
    deadline_s = time.monotonic() + timeout_s
    found = []
    for topic in topics:
        left_ms = max(1.0, (deadline_s - time.monotonic()) * 1000)
        try:
            found += [TopicPartition(topic, number) for number in sorted(consumer.partitions_for(topic, left_ms))]
        except KafkaError as error:
            if error.code is not ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                raise
            raise MissingSourceError(
                f"source topic {topic!r} does not exist, and did not appear within {timeout_s:g} s; create it "
                f"(`semel topic create {topic}`), or correct its name",
                error.code,
            ) from error
    return found


# When a loop ends by itself. With `stop_at_end`: when what this instance has to read is committed up to the end offsets
# of the start. With `idle_stop_ms`: when every partition was read to its end, and nothing more came for so long.
# Neither may mistake a slow broker for an empty topic: what counts is offsets that a broker has returned.


class EndOffsets:
    """Where the partitions of the source ended at the start: under read_committed, before the first open transaction.

    Each instance waits for the partitions that it has. One that has none waits for some, or until the group has
    committed the end of all of them."""

    def __init__(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        starts = consumer.beginning_offsets(partitions)
        ends = consumer.settled_ends(partitions)
        self._ends = {partition: end for partition, end in ends.items() if end > starts[partition]}

    def reached(self, consumer: Consumer) -> bool:
        """Whether all has been read. Sends requests only where no partition is assigned."""
        assigned = consumer.assignment()
        if not assigned:
            at = consumer.committed(self._ends) if self._ends else {}
            wanted = self._ends
        else:
            at = consumer.consumed()
            wanted = {partition: self._ends.get(partition, 0) for partition in assigned}
        return all(partition in at and at[partition].offset >= end for partition, end in wanted.items())


class IdleClock:
    """Runs while all assigned partitions are known to be read to their end: not before the first fetch response of
    each, and not while records wait at the broker."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._idle_since_s: float | None = None

    def interrupt(self) -> None:
        """Something came."""
        self._idle_since_s = None

    def is_over(self, consumer: Consumer) -> bool:
        assigned = consumer.assignment()
        if not assigned or any(consumer.current_lag(partition) != 0 for partition in assigned):
            self._idle_since_s = None
            return False
        if self._idle_since_s is None:
            self._idle_since_s = self._clock()
        return self._clock() - self._idle_since_s >= self._limit_s


class Stats(msgspec.Struct):
    """What a run did. Records that were read or sent again after an abort count again. Dead letters are not among
    `records_out`; `duplicates` are the events that an inbox had received before."""

    records_in: int = 0
    records_out: int = 0
    commits: int = 0
    aborts: int = 0
    dead_letters: int = 0
    duplicates: int = 0


class LoopMetrics(msgspec.Struct, Measured, frozen=True, kw_only=True):
    """A processing loop at one moment, for `semel.prometheus`."""

    application_id: str
    instance: str | None = None
    records_in_total: int = 0
    records_out_total: int = 0
    commit_total: int = 0
    abort_total: int = 0
    dead_letter_total: int = 0
    retry_total: int = 0
    stage_seconds_total: dict[str, float] = {}
    records_lag: dict[TopicPartition, int] = {}


LoopMetrics.TABLE = MetricsTable(
    "loop",
    "semel_loop_",
    ("application_id", "instance"),
    {
        "records_in_total": "Records that were read; after an abort they count again.",
        "records_out_total": "Records that were sent; after an abort they count again.",
        "commit_total": "Units of work that were committed.",
        "abort_total": "Units of work that were undone.",
        "dead_letter_total": "Records that went to the dead-letter topic.",
        "retry_total": "Errors after which the loop went back to the committed offsets.",
        "stage_seconds_total": "Time spent, by stage: read (waiting included), work, commit.",
        "records_lag": "Offsets between the loop and the end of the partition, by its last fetch.",
    },
)


def process(
    source: str | Iterable[str],
    sink: str | Postgres | Files | None,
    function: RowFunction | TableFunction | StateFunction,
    *,
    application_id: str,
    guarantee: str = "exactly_once",
    **options: Any,
) -> Stats:
    """Reads, processes and writes until SIGTERM or Ctrl-C; returns what was done."""
    return Processor(source, sink, function, application_id=application_id, guarantee=guarantee, **options).run()


class Processor(RebalanceListener):
    """One instance of a processing loop.

    source              topic or topics to read
    sink                topic to write to; None if the function names the topics; a `semel.Postgres` for tables: then
                        the function returns rows (dicts, `TableRow`, `Statement`), or with tables=True an Arrow table,
                        or {table name: table}, which are written in this order, with constraints checked after each; a
                        `semel.Files` for Parquet or JSON lines: then it returns rows (dicts), or an Arrow table with
                        tables=True
    function            a row in (`ConsumerRecord`), and out: None, bytes, `Output`, the record itself, or several;
                        with tables=True an Arrow table in, and out: None, a table, or {topic: table}
    application_id      the consumer group, shared by all instances
    guarantee           exactly_once, at_least_once or at_most_once
    bootstrap_servers   the brokers, as host:port
    instance            a name for this instance that is the same after a restart: what a killed one left open is then
                        aborted at once, not after transaction_timeout_ms, and as a static member (group.instance.id)
                        it gets its partitions back at once, not after session.timeout.ms; two running ones must not
                        share it
    tables              whether the function takes Arrow tables
    commit_interval_ms  how long a transaction (a unit of work) may collect records; 100, with a `semel.Files` 10,000
    max_records         how many it may hold; 20,000, with a `semel.Files` 100,000
    stop_at_end         return when all is processed that was readable at the start (up to the first open transaction);
                        instances that run beside it do so for their own partitions
    idle_stop_ms        return when all was read and nothing more came for so long; None: never. For "caught up", use
                        stop_at_end, which does not depend on a clock
    dead_letter_topic   where records go for which the function raises, or makes an output that is larger than
                        max.request.size, in the same transaction: as they were, with headers that say why and where
                        they were read. Without it, the loop ends with a `RecordError` that names topic, partition and
                        offset
    on_error            called as on_error(record, error) when the function raises (with tables=True: a table of one
                        row); returns what the function might, such as None to skip the record, or raises: then it is a
                        dead letter
    transaction_timeout_ms  after so long the broker aborts what a dead instance left open; must exceed
                        commit_interval_ms and the time that the function takes for max_records
    consumer            more options for the consumer, by Kafka's names
    producer            more options for the producer
    on_settled          called with the `Stats` so far when a unit of work has ended
    state               a `semel.KeyedState`, or its name: the function is called as function(record, state), and its
                        state, output and offsets commit together; with tables=True, as function(table, state) with the
                        records of one partition
    """

    def __init__(
        self,
        source: str | Iterable[str],
        sink: str | Postgres | Files | None,
        function: RowFunction | TableFunction | StateFunction,
        *,
        application_id: str,
        guarantee: str = "exactly_once",
        bootstrap_servers: str | Iterable[str] = "localhost:9092",
        instance: str | None = None,
        tables: bool = False,
        commit_interval_ms: int | None = None,
        max_records: int | None = None,
        stop_at_end: bool = False,
        idle_stop_ms: int | None = None,
        transaction_timeout_ms: int = 10_000,
        consumer: Mapping[str, Any] | None = None,
        producer: Mapping[str, Any] | None = None,
        dead_letter_topic: str | None = None,
        on_error: OnError | None = None,
        on_settled: Callable[[Stats], None] | None = None,
        state: KeyedState | str | None = None,
        **unknown: Any,
    ) -> None:
        _refuse_unknown(unknown)
        self._topics = [source] if isinstance(source, str) else list(source)
        check_guarantee(guarantee, application_id)
        if isinstance(sink, Files):
            commit_interval_ms = FILES_INTERVAL_MS if commit_interval_ms is None else commit_interval_ms
            max_records = FILES_RECORDS if max_records is None else max_records
            # There is no transaction that could time out.
            transaction_timeout_ms = max(transaction_timeout_ms, commit_interval_ms + 1)
        commit_interval_ms = COMMIT_INTERVAL_MS if commit_interval_ms is None else commit_interval_ms
        max_records = MAX_RECORDS if max_records is None else max_records
        check_limits(guarantee, commit_interval_ms, max_records, transaction_timeout_ms)
        check_bad_records(self._topics, dead_letter_topic, on_error)
        self._application_id, self._instance = application_id, instance
        self._tables = tables
        self._transaction_timeout_ms = transaction_timeout_ms
        self._interval_s = commit_interval_ms / 1000
        self._max_records = max_records
        self._stop_at_end = stop_at_end
        self._idle = None if idle_stop_ms is None else IdleClock(idle_stop_ms / 1000)
        self._on_settled = on_settled
        self._mode_type = MODES[guarantee]
        self._external = sink if isinstance(sink, Postgres | Files) else None
        if self._external is not None:
            check_external(self._external, guarantee, tables, dead_letter_topic, state)
        self._state = KeyedState(state) if isinstance(state, str) else state
        shared = {"bootstrap_servers": bootstrap_servers, "client_id": f"{application_id}-{instance or 'any'}"}
        self._consumer_options = {**shared, **consumer_options(application_id, instance, consumer)}
        check_function(function, self._state is not None)
        if self._state is not None:
            check_state(guarantee, self._topics, self._consumer_options)
        self._producer_options = {**shared, **underscored(producer)}
        if guarantee == "exactly_once":
            name = f"{application_id}-{instance or uuid.uuid4().hex}"
            self._producer_options |= {"transactional_id": name, "transaction_timeout_ms": transaction_timeout_ms}
        topic = None if isinstance(sink, Postgres | Files) else sink
        self._emitter = self._make_emitter(function, topic, dead_letter_topic, on_error)
        self._stopping = Flag()
        self._prepare_run()

    def _make_emitter(
        self,
        function: RowFunction | TableFunction | StateFunction,
        topic: str | None,
        dead_letter_topic: str | None,
        on_error: OnError | None,
    ) -> Emitter:
        """What calls the function. Where a record may fail, an output that is too large is found before it is sent."""
        has_way_out = dead_letter_topic is not None or on_error is not None
        return (Emitter if self._state is None else StatefulEmitter)(
            function,
            topic,
            self._tables,
            dead_letter_topic=dead_letter_topic,
            on_error=on_error,
            max_record_bytes=ProducerSettings.of(self._producer_options).max_request_size if has_way_out else None,
        )

    def _prepare_run(self) -> None:
        """What changes while the loop runs. The next run starts anew."""
        self.stats = Stats()
        if self._idle is not None:
            self._idle.interrupt()
        self._mode: Mode | None = None
        self._consumer: Consumer | None = None
        self._ends: EndOffsets | None = None
        self._is_at_end = False
        self._backoff = Backoff(50, 2_000)
        self._collected = self._retries = 0
        self._took_last = False  # of this unit of work: the read after its time is done
        self._seconds: dict[str, float] = {}
        self._began_s = self._started_s = time.monotonic()
        self._has_joined = False  # this instance has its assignment, perhaps empty
        self._has_worked = False
        self._timed_out_in_a_row = 0
        self._stopped_or_ended = Flag()
        self._has_given_up = False  # the stop took too long

    def stop(self) -> None:
        """Ends the loop after the current transaction, or after 15 s with a `TimedOutError`: the brokers did not
        confirm it, and its records are read again. May be called from a signal handler or another thread."""
        self._stopping.set()
        self._stopped_or_ended.set()
        if self._consumer is not None:
            self._consumer.wakeup()

    # -- the loop ------------------------------------------------------------------------------------------------------
    def run(self) -> Stats:
        """Returns what was done when `stop` is called or the end is reached; raises what it cannot recover from. Leaves
        its group, unless it was stopped and is a static member: that one is expected back."""
        self._prepare_run()
        if self._stopping.is_set():
            self._stopped_or_ended.set()
        ended = Flag()
        threading.Thread(target=self._give_up_late, args=(self._stopped_or_ended, ended), daemon=True).start()
        try:
            return self._run()
        except KafkaError as error:
            if not self._has_given_up:
                raise
            raise TimedOutError(
                f"the loop was stopped, and the brokers did not confirm its last unit of work within "
                f"{STOP_TIMEOUT_S:g} s; what was not committed is read again by the next run"
            ) from error
        finally:
            ended.set()
            self._stopped_or_ended.set()
            self._stopping.clear()

    def _give_up_late(self, stopped_or_ended: Flag, ended: Flag) -> None:
        """Ends the calls that a stopped loop waits in when its time is over, and those that it makes after that. The
        function has all the time that it takes."""
        stopped_or_ended.wait()
        stopped_s = time.monotonic()
        while not ended.wait(GIVE_UP_AGAIN_S if self._has_given_up else STOP_TIMEOUT_S):
            mode, consumer = self._mode, self._consumer
            while mode is not None and (left_s := mode.called_s(stopped_s) + STOP_TIMEOUT_S - time.monotonic()) > 0:
                if ended.wait(left_s):
                    return
            self._has_given_up = True
            with suppress(KafkaError):
                if mode is not None:
                    mode.end_calls()
                if consumer is not None:
                    consumer.end_calls()

    def _run(self) -> Stats:
        with stop_on_signals(self.stop), Consumer(self._consumer_options) as consumer:
            self._consumer = consumer
            mode = self._mode = self._make_mode(consumer)
            try:
                mode.start()
                self._started_s = time.monotonic()
                partitions = find_source(consumer, self._topics, FIRST_CONTACT_S)
                self._warn_of_risks(consumer)
                self._ends = EndOffsets(consumer, partitions) if self._stop_at_end else None
                consumer.subscribe(self._topics, self)
                while not (self._stopping.is_set() or self._is_at_end or self._is_idle(consumer)):
                    self._turn(consumer, mode)
                if mode.failed is None:
                    self._settle(mode)
                member = None if self._stopping.is_set() else consumer.group_metadata()
            except BaseException:
                self._abandon(mode)
                raise
            finally:
                self._consumer = self._mode = None  # leaving the group revokes partitions; there is nothing to finish
                mode.close()
        if member is not None and member.group_instance_id is not None:
            self._leave(consumer, member)
        return self.stats

    def _leave(self, consumer: Consumer, member: GroupMetadata) -> None:
        """One that has reached its end does not come back: others need not wait for the end of its session."""
        identity = MemberIdentity(member.member_id, member.group_instance_id)
        request = LeaveGroupRequest(member.group_id, members=[identity])
        try:
            with Admin(consumer.settings) as admin:
                target = group_coordinator(member.group_id)
                run(admin.calls.cluster.call(target, LEAVE_GROUP, request, timeout_s=LEAVE_TIMEOUT_S, at_least=3))
        except KafkaError as error:
            log.debug("the static member stays in its group until its session ends: %s", error)

    def _warn_of_risks(self, consumer: Consumer) -> None:
        topics = [topic for topic in (self._emitter.sink, self._emitter.dead_letter_topic) if topic is not None]
        with Admin(consumer.settings) as admin:
            run(warn_of_risks(admin.calls, topics, log))

    def _turn(self, consumer: Consumer, mode: Mode) -> None:
        try:
            if mode.failed is not None:
                self._undo(mode)
            with self._stage("read"):
                batch = self._read(consumer, mode)
            if mode.failed is not None:  # partitions went while this was read
                mode.set_aside(_first_offsets(batch))
                return
            if len(batch):
                self._take(mode, batch)
            if self._has_joined and not consumer.assignment():  # others have all of them, or there are none any more
                find_source(consumer, self._topics, FIRST_CONTACT_S)
            is_at_end = self._ends is not None and self._has_joined and self._ends.reached(consumer)
            if mode.is_working and (is_at_end or self._is_due()):
                self._settle(mode)
            self._is_at_end = is_at_end
        except KafkaError as error:
            self._recover(mode, error)

    def _read(self, consumer: Consumer, mode: Mode) -> Any:
        timeout_ms = self._ms_to_settle() if mode.is_working else IDLE_POLL_MS
        limit = max(1, self._max_records - self._collected)
        table = consumer.poll_table(timeout_ms, max_records=limit, headers=True)
        if self._tables:
            return table
        from semel.client.consumer.decode import Records

        return Records(table)

    def _take(self, mode: Mode, batch: Any) -> None:
        if self._idle is not None:
            self._idle.interrupt()
        if not mode.is_working:
            self._began_s = time.monotonic()
        with self._stage("work"), mode.calling() if self._external is not None else nullcontext():
            mode.take(batch, _first_offsets(batch))
        self._collected += len(batch)
        self.stats.records_in += len(batch)
        if not mode.is_working:
            self._settled(mode)  # at_most_once: each batch is a unit of work

    def _settle(self, mode: Mode) -> None:
        with self._stage("commit"):
            mode.settle()
        self._settled(mode)

    def _make_mode(self, consumer: Consumer) -> Mode:
        external, named = self._external, (self._application_id, self._instance)
        if isinstance(external, Files):
            return FilesMode(consumer, self._emitter, external, *named)
        if external is not None and external.with_topics:
            name = self._producer_options["transactional_id"]
            return PostgresAndTopics(consumer, self._emitter, external, *named, name, self._settings_of)
        if external is not None:
            mode = PostgresTablesMode if self._tables else PostgresMode
            return mode(consumer, self._emitter, external, *named)

        def make_producer() -> Producer:
            return Producer(self._producer_options)

        if not isinstance(self._emitter, StatefulEmitter):
            return self._mode_type(consumer, make_producer, self._emitter)
        assert self._state is not None
        changelog = Changelog(self._application_id, self._state, self._topics, self._consumer_options)
        return StatefulExactlyOnce(
            consumer, make_producer, self._emitter, self._state, changelog, self._stopping.is_set
        )

    def _settings_of(self, transactional_id: str, two_phase: bool) -> ProducerSettings:
        options = {**self._producer_options, "transactional_id": transactional_id}
        if two_phase:
            del options["transaction_timeout_ms"]
            options["two_phase_commit"] = True
        return ProducerSettings.of(options)

    def _settled(self, mode: Mode) -> None:
        self._collected, self._took_last = 0, False
        self._has_worked = True
        self._timed_out_in_a_row = 0
        self._backoff.reset()
        self._count(mode)

    def _count(self, mode: Mode) -> None:
        stats = self.stats
        stats.records_out, stats.commits, stats.aborts = mode.records_out, mode.commits, mode.aborts
        stats.dead_letters, stats.duplicates = mode.dead_letters, mode.duplicates
        if self._on_settled is not None:
            self._on_settled(stats)

    def _ms_to_settle(self) -> float:
        """How long the current unit of work may still collect records."""
        if self._collected >= self._max_records:
            return 0.0
        return max(0.0, self._interval_s - (time.monotonic() - self._began_s)) * 1000

    def _is_due(self) -> bool:
        """Whether the unit of work ends. When its time is over it takes once more what has come meanwhile: a loop whose
        turns are slow would commit the few records of an old fetch response again and again, and never catch up."""
        if self._ms_to_settle():
            return False
        is_due = self._took_last or self._collected >= self._max_records or not self._interval_s
        self._took_last = True
        return is_due

    def _is_idle(self, consumer: Consumer) -> bool:
        return self._idle is not None and self._idle.is_over(consumer)

    # -- errors --------------------------------------------------------------------------------------------------------
    def _recover(self, mode: Mode, error: KafkaError) -> None:
        """Notes what is transient, to be undone by the next turn; raises the rest."""
        if not self._can_go_on(error):
            raise error
        self._retries += 1
        log.warning("going back to the committed offsets after: %s", error)
        if mode.failed is None or isinstance(error, FencedError):
            mode.failed = error
        self._stopping.wait(self._backoff.next_s())

    def _undo(self, mode: Mode) -> None:
        mode.undo()
        self._collected, self._took_last = 0, False
        self._count(mode)

    def _can_go_on(self, error: KafkaError) -> bool:
        if error.code in FOR_GOOD:
            return False
        if isinstance(error, FencedError):
            return self._instance is None and self._may_time_out_again(error)  # the name is unique: a timeout
        if isinstance(error, CommitUncertainError):
            return True
        return error.recovery in (Recovery.RETRY, Recovery.ABORT) and (self._is_established() or self._is_new())

    def _may_time_out_again(self, error: FencedError) -> bool:
        """The name is unique, so the broker's timeout ended the transaction. Retried a few times."""
        self._timed_out_in_a_row += 1
        if self._timed_out_in_a_row < MAX_TIMEOUTS_IN_A_ROW:
            return True
        raise FatalError(
            f"{MAX_TIMEOUTS_IN_A_ROW} transactions in a row exceeded "
            f"transaction_timeout_ms={self._transaction_timeout_ms} "
            f"({error}); the work takes too long: lower max_records (now {self._max_records}), or raise the timeout",
            error.code,
        ) from error

    def _is_established(self) -> bool:
        return self._has_worked or (self._consumer is not None and bool(self._consumer.assignment()))

    def _is_new(self) -> bool:
        """Before anything has worked an error is most likely a wrong address or a missing topic: say so and stop, but
        not at once."""
        return time.monotonic() - self._started_s < FIRST_CONTACT_S

    def _abandon(self, mode: Mode) -> None:
        """The error that led here is the one to see."""
        try:
            mode.abandon()
        except Exception as failure:
            log.warning("the current unit of work was left to its timeout: %s", failure)

    # -- rebalances ----------------------------------------------------------------------------------------------------
    def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
        self._has_joined = True
        mode = self._mode
        if mode is not None and mode.has_state and mode.failed is None:
            try:
                if mode.is_working:  # to restore state may take longer than a transaction
                    self._settle(mode)
                mode.assigned(partitions)
            except KafkaError as error:
                self._fail_or_raise(mode, error, "new partitions are not ready yet")

    def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
        """Partitions will be given back: finish what is open, so that the next owner starts right after it."""
        self._has_joined = False
        mode = self._mode
        if mode is None:
            return
        if mode.is_working and mode.failed is None:
            try:
                self._settle(mode)
            except KafkaError as error:
                self._fail_or_raise(mode, error, "the work on revoked partitions could not be finished")
        mode.released(partitions)

    def on_partitions_lost(self, partitions: list[TopicPartition]) -> None:
        """Partitions are gone: what is open must not count, others may have done it already."""
        self._has_joined = False
        mode = self._mode
        if mode is None:
            return
        if mode.is_working:
            self._fail(mode, AbortableError("the group went on without this instance; its partitions were lost"))
        mode.released(partitions)

    def _fail_or_raise(self, mode: Mode, error: KafkaError, what: str) -> None:
        if not self._can_go_on(error):
            raise error
        log.warning("%s: %s", what, error)
        self._fail(mode, error)

    def _fail(self, mode: Mode, error: KafkaError) -> None:
        """Ends what is open while the partitions are still ours to give; if that fails, the next turn tries again."""
        mode.failed = mode.failed or error
        try:
            mode.drop()
        except KafkaError as failure:
            log.warning("not undone yet: %s", failure)

    # -- small things --------------------------------------------------------------------------------------------------
    def metrics(self) -> LoopMetrics:
        """What was done so far. Any thread may call it; it sends no request."""
        stats, consumer = self.stats, self._consumer
        return LoopMetrics(
            application_id=self._application_id,
            instance=self._instance,
            records_in_total=stats.records_in,
            records_out_total=stats.records_out,
            commit_total=stats.commits,
            abort_total=stats.aborts,
            dead_letter_total=stats.dead_letters,
            retry_total=self._retries,
            stage_seconds_total=dict(self._seconds),
            records_lag={} if consumer is None else consumer.metrics().records_lag,
        )

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        started_s = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - started_s


def _first_offsets(batch: Any) -> dict[TopicPartition, int]:
    """The first offset of each partition in a batch: a table whose batches hold one partition each, or its rows."""
    firsts: dict[TopicPartition, int] = {}
    for part in getattr(batch, "table", batch).to_batches():
        if part.num_rows:
            partition = TopicPartition(part.column("topic")[0].as_py(), part.column("partition")[0].as_py())
            firsts.setdefault(partition, part.column("offset")[0].as_py())
    return firsts


def _options() -> dict[str, inspect.Parameter]:
    """The parameters of `Processor`, which are those of `process`."""
    parameters = inspect.signature(Processor).parameters
    return {name: parameter for name, parameter in parameters.items() if name != "unknown"}


def _refuse_unknown(unknown: Iterable[str]) -> None:
    for name in unknown:
        known = list(_options())
        near = difflib.get_close_matches(name.replace(".", "_").lower(), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"the options are {', '.join(known[3:])}"
        raise ConfigError(f"process has no option {name!r}; {hint}")


# `help(semel.process)` and editors show every option.
process.__dict__["__signature__"] = inspect.Signature(list(_options().values()), return_annotation="Stats")
process.__doc__ = f"{process.__doc__}\n\n{(Processor.__doc__ or '').partition(chr(10) + chr(10))[2]}"
