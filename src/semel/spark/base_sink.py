"""What all sinks have in common: one run of one query, one batch at a time, and a report after each."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, Protocol

import msgspec

from semel.client.metrics import Measured, MetricsTable
from semel.client.types import TopicPartition
from semel.spark.checkpoint import QueryRun
from semel.spark.checksums import why_state_differs
from semel.spark.failures import (
    Cancelled,
    Reason,
    cancelled,
    overflows_spark,
    put_first,
    reason_in,
    was_cancelled,
)
from semel.spark.ledger import (
    TOPIC_WORDS,
    LedgerEntry,
    LedgerWords,
    MicroBatch,
    Verdict,
    decide,
    refuse_lost_state,
)
from semel.spark.session import reserve_environment_of_active
from semel.spark.sink_options import one_frame

# --- What a sink has done so far, for `semel.prometheus`. Counted per batch ---


class SinkMetrics(msgspec.Struct, Measured, frozen=True, kw_only=True):
    """A sink at one moment."""

    application_id: str
    batch_total: int = 0  # done: written, or found to be written
    replay_total: int = 0  # of these: found to be written before
    commit_total: int = 0
    abort_total: int = 0
    retry_total: int = 0
    error_total: int = 0  # batches that failed for good
    row_total: int = 0
    dead_letter_total: int = 0
    stage_seconds_total: dict[str, float] = {}
    last_batch_seconds: float | None = None
    last_batch_id: int | None = None
    ledger_sequence: int | None = None  # None: nothing is written yet, or the guarantee has no ledger
    transaction_timeout_seconds: float | None = None
    records_lag: dict[TopicPartition, int] = {}  # empty: no batch is done, or Spark does not know it (before 4.2)


SinkMetrics.TABLE = MetricsTable(
    "sink",
    "semel_sink_",
    ("application_id",),
    {
        "batch_total": "Batches that are done.",
        "replay_total": "Batches that ran again although they were written before.",
        "commit_total": "Batches that were committed.",
        "abort_total": "Transactions that were aborted.",
        "retry_total": "Attempts that failed and were repeated.",
        "error_total": "Batches that failed for good.",
        "row_total": "Rows that were written, dead letters included.",
        "dead_letter_total": "Rows that went to the dead-letter topic.",
        "stage_seconds_total": "Time spent, by stage of a batch.",
        "last_batch_seconds": "How long the last batch took, all attempts together.",
        "last_batch_id": "Spark's number of the last batch.",
        "ledger_sequence": "The last entry of the ledger.",
        "transaction_timeout_seconds": "The longest time that a batch may take.",
        "records_lag": "Offsets that were left to read when Spark planned the last batch that is done.",
    },
)


class SinkCounters:
    """What a sink counts. One thread writes a batch at a time; any thread may look."""

    def __init__(self) -> None:
        self.batches = self.replays = self.commits = self.aborts = self.retries = self.errors = 0
        self.rows = self.dead_letters = 0
        self.seconds: dict[str, float] = {}
        self.last_batch: tuple[int, float] | None = None  # number, duration

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time that a stage takes counts also if it fails."""
        started_s = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started_s


log = logging.getLogger("semel.spark")
KEPT_REPORTS = 100
MESSAGE_CHARS = 4_000


class SinkError(RuntimeError):
    """The batch was not written, and the query must stop. The message says what to do."""


# The sink owns a transactional id, in this process; a copy of it on a server would not.
NOT_ON_CONNECT = (
    "Spark Connect runs foreachBatch on its server, and a sink cannot be sent there. Use "
    'writeStream.format("semel") with the option applicationId (see docs/spark.md), or a session without Connect'
)

NOT_IN_TASKS = (
    "a sink stays in the driver and cannot be sent to tasks. Use writeStream.foreachBatch(sink), which calls it with "
    "the DataFrame of each batch; foreach(sink) would call it with rows"
)

ONE_CALL = (
    "Write several frames by one call, sink([df_a, df_b], batch_id), or unite them with df_a.unionByName(df_b, "
    "allowMissingColumns=True); a column `topic` says where each row goes (see docs/spark.md, several topics)."
)


def two_sinks(application_id: str, batch_id: int) -> str:
    """Two sinks of one query with one id: the second finds each batch written, by the first."""
    adopt = " and, for its first start, adopt_checkpoint=True" if batch_id else ""
    return (
        f"batch {batch_id} was written by another sink of this query that has the application id {application_id!r}, "
        "too; the rows of this call were not written. Give each sink in foreachBatch an application_id of its own: "
        f"this one a new id{adopt}. At the next start batch {batch_id} runs again, and only this sink writes it. "
        "(Several topics need no second sink: `topics` and a column `topic`, see docs/spark.md)"
    )


def refuse_connect() -> None:
    from pyspark.sql.utils import is_remote

    if is_remote():
        raise SinkError(NOT_ON_CONNECT)


def refuse_others(given: Any) -> None:
    """What a sink was called with, and is no DataFrame of Spark: one of pandas, say."""
    for frame in given if isinstance(given, (list, tuple)) else [given]:
        if not hasattr(frame, "sparkSession"):
            raise SinkError(
                f"the sink was called with a {type(frame).__module__}.{type(frame).__qualname__}, expected a DataFrame "
                "of Spark and the batch's number; make one of it, such as spark.createDataFrame(frame)"
            )


def shortened(message: str) -> str:
    """Without the JVM's stack, and not too long: Spark searches the text of an error with a regular expression that
    overflows its stack on a long one, and then the query ends without an error at all."""
    if len(message) <= MESSAGE_CHARS:
        return message
    lines = [line for line in message.splitlines() if not line.startswith("\tat ")]
    kept = "\n".join(lines)
    if len(kept) <= MESSAGE_CHARS:
        return kept
    half = MESSAGE_CHARS // 2
    return f"{kept[:half]}\n... (the whole text is in the driver's log) ...\n{kept[-half:]}"


def for_spark(error: Exception, batch_id: int) -> Exception:
    """The error with which a batch fails, with its reason first. What Spark cannot read of it is in the log alone."""
    if was_cancelled(error):
        error = cancelled(error)
    reason, short = reason_in(str(error)), shortened(str(error))
    is_readable = short == str(error) and not overflows_spark(error)
    if isinstance(error, Cancelled):
        log.warning("batch %d was not written: %s", batch_id, reason)
    else:
        log.error("batch %d failed: %s", batch_id, reason, exc_info=None if is_readable else error)
    if is_readable:
        put_first(error, reason)
        return error
    error.__cause__ = Reason(reason)
    if short == str(error) and not overflows_spark(error):
        return error
    failure = SinkError(f"{short}\n{reason}")
    failure.__cause__ = Reason(reason)
    return failure


class BatchReport(NamedTuple):
    batch_id: int
    verdict: str
    rows: int  # all that was written, dead letters among them
    dead_letters: int
    attempts: int
    write_ms: float
    commit_ms: float


class RunOptions(Protocol):
    """What every sink needs to know of its options."""

    @property
    def application_id(self) -> str: ...
    @property
    def transaction_timeout_ms(self) -> float: ...
    @property
    def on_batch(self) -> Callable[[Any], None] | None: ...
    def refuse_loop(self, batch: MicroBatch) -> str | None: ...


class BaseSink(ABC):
    """A function for foreachBatch. Make a new one for every start of a query."""

    def __init__(self, options: RunOptions) -> None:
        self.options: Any = options
        self.reports: deque[BatchReport] = deque(maxlen=KEPT_REPORTS)
        self._counters = SinkCounters()
        self._lock = threading.Lock()
        self._run: QueryRun | None = None
        self.is_used = False  # by a query, or for a table pipeline
        self._called_for = -1  # the batch of the last call
        reserve_environment_of_active()  # the query that calls this sink does not run yet

    def __call__(self, df: Any, batch_id: int) -> None:
        """Writes a batch: a DataFrame, or a list of them that become visible together."""
        if not self._lock.acquire(blocking=False):
            raise SinkError(
                "this sink is writing another batch, or another frame of this one; make one sink per query, and call "
                f"it once per batch. {ONE_CALL}"
            )
        try:
            refuse_others(df)
            frame = self._one_frame(df)
            run = self._same_run(frame.sparkSession)
            self._refuse_second_call(batch_id)
            batch = run.batch(batch_id)
            loop = self.options.refuse_loop(batch)
            if loop is not None:
                raise SinkError(loop)
            started_s = time.monotonic()
            self._batch(frame, batch)
            self._counters.last_batch = (batch_id, time.monotonic() - started_s)
        except Exception as error:
            self._counters.errors += 1
            failure = for_spark(error, batch_id)
            if failure is error:
                raise
            raise failure from failure.__cause__
        finally:
            self._lock.release()

    def __reduce__(self) -> Any:
        refuse_connect()
        raise SinkError(NOT_IN_TASKS)

    def _one_frame(self, given: Any) -> Any:
        """What the sink was called with, a DataFrame or a list of them, as one DataFrame."""
        return one_frame(given, self.options)

    @abstractmethod
    def _batch(self, df: Any, batch: MicroBatch) -> None:
        """Writes a batch, or raises."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of connections. A sink that is closed cannot be used again."""

    def _same_run(self, session: Any) -> QueryRun:
        if self._run is not None and self._run.is_current(session):
            return self._run
        run = QueryRun(session)
        if self._run is None:
            self._run, self.is_used = run, True
            if run.short_lived:
                log.warning("%s. The next start would be refused, or write again what is written", run.short_lived)
        elif self._run.run_id != run.run_id:
            raise SinkError(
                f"this sink belongs to run {self._run.run_id} of query {self._run.query_id}, and is called by run "
                f"{run.run_id} of query {run.query_id}; make a new sink for every start"
            )
        return self._run

    def _refuse_second_call(self, batch_id: int) -> None:
        """A batch is one transaction and one entry in the ledger. A second call would find it written, and its rows
        would be left out without a word."""
        if batch_id == self._called_for:
            raise SinkError(
                f"the sink was called twice for batch {batch_id}; the rows of this call were not written. {ONE_CALL} "
                f"If the first call succeeded, batch {batch_id} counts as written with its rows alone: after the "
                "correction write what is missing of this batch by hand, or start over with a new application id and "
                "a new checkpoint"
            )
        self._called_for = batch_id

    def _report(
        self, batch: MicroBatch, verdict: str, rows: int, dead: int, attempts: int, started_s: float, written_s: float
    ) -> None:
        """The batch is done now. Times are those of time.monotonic()."""
        write_ms, commit_ms = (written_s - started_s) * 1000, (time.monotonic() - written_s) * 1000
        report = BatchReport(batch.batch_id, verdict, rows, dead, attempts, write_ms, commit_ms)
        self.reports.append(report)
        self._count(report)
        log.info(
            "batch %d %s: %d rows, %d dead letters, attempt %d, write %.0f ms, commit %.0f ms",
            report.batch_id,
            report.verdict,
            report.rows,
            report.dead_letters,
            report.attempts,
            report.write_ms,
            report.commit_ms,
        )
        if self.options.on_batch is not None:
            try:
                self.options.on_batch(report)
            except Exception:
                log.exception(
                    "on_batch failed for batch %d; the batch is written, and the query goes on", report.batch_id
                )

    def _count(self, report: BatchReport) -> None:
        counters = self._counters
        counters.batches += 1
        if report.verdict == Verdict.WRITE.value:
            counters.commits += 1
        else:
            counters.replays += 1
        counters.rows += report.rows
        counters.dead_letters += report.dead_letters

    def metrics(self) -> SinkMetrics:
        """What was done so far, for `semel.prometheus`. Any thread may call it; it sends no request to a broker."""
        counters, last = self._counters, self._counters.last_batch
        return SinkMetrics(
            application_id=self.options.application_id,
            batch_total=counters.batches,
            replay_total=counters.replays,
            commit_total=counters.commits,
            abort_total=counters.aborts,
            retry_total=counters.retries,
            error_total=counters.errors,
            row_total=counters.rows,
            dead_letter_total=counters.dead_letters,
            stage_seconds_total=dict(counters.seconds),
            last_batch_id=None if last is None else last[0],
            last_batch_seconds=None if last is None else last[1],
            ledger_sequence=self._ledger_sequence(),
            transaction_timeout_seconds=self.options.transaction_timeout_ms / 1000,
            records_lag={} if self._run is None else self._run.lag(),
        )

    def _ledger_sequence(self) -> int | None:
        return None

    def report(self, batch_id: int) -> BatchReport | None:
        """What became of a recent batch: for a StreamingQueryListener, which knows the batch's number."""
        return next((report for report in reversed(self.reports) if report.batch_id == batch_id), None)


# --- What the ledger says about a batch, wherever the ledger is: in a topic or in a table ---


class RefusedError(SinkError):
    """The ledger says that this batch must not be written."""


class FencedSinkError(SinkError):
    """Another driver owns the application id."""


class LedgerOptions(Protocol):
    """What the user says about an application and its ledger."""

    @property
    def application_id(self) -> str: ...
    @property
    def adopt_checkpoint(self) -> bool: ...
    @property
    def accept_lost_state(self) -> bool: ...


class LedgerRule:
    """Holds the last entry of a ledger against batches. Who reads the ledger sets `last`."""

    words: ClassVar[LedgerWords] = TOPIC_WORDS

    def __init__(self, options: LedgerOptions) -> None:
        self.options = options
        self.last: LedgerEntry | None = None

    def is_written(self, batch: MicroBatch, is_stateful: Callable[[], bool], cause: str = "") -> bool:
        """What the ledger says: written before, or to be written now; anything else is refused."""
        options = self.options
        decision = decide(self.last, batch, adopt=options.adopt_checkpoint, words=self.words)
        lost = refuse_lost_state(self.last, batch, options.application_id)
        if lost is not None and not options.accept_lost_state and is_stateful():
            reason = lost  # where the batch is refused, too, this is the cause, and it has another way out
        elif decision.verdict is Verdict.REFUSE:
            reason = decision.reason
        else:
            return decision.verdict is Verdict.ALREADY_WRITTEN
        raise RefusedError(f"application {options.application_id!r}: {f'{cause}. ' if cause else ''}{reason}")

    def next_entry(self, batch: MicroBatch, run_id: str, checksum: str, attempts: int, **outcome: Any) -> LedgerEntry:
        """The entry of a batch that is about to be committed; `outcome` has the fields that say what was written."""
        return LedgerEntry(
            sequence=0 if self.last is None else self.last.sequence + 1,
            query_id=batch.query_id,
            run_id=run_id,
            batch_id=batch.batch_id,
            starts=batch.starts,
            ends=batch.ends,
            attempts=attempts,
            committed_at_ms=int(time.time() * 1000),
            plan=batch.plan,
            checksum=checksum,
            **outcome,
        )

    def check_replay(self, batch: MicroBatch, checksum: str) -> None:
        """A batch that ran again must have given the rows that were written, or the state of the query is not the one
        that they came from."""
        written = "" if self.last is None else self.last.checksum
        differs = why_state_differs(batch.batch_id, written, checksum)
        if differs and not self.options.accept_lost_state:
            raise RefusedError(f"application {self.options.application_id!r}: {differs}")
        if differs:
            log.warning("accepted: %s", differs)
