"""The sink: a function for foreachBatch that writes each micro-batch in one transaction.

    sink = semel.sink("localhost:9092", application_id="payments", topic="out")
    df.writeStream.foreachBatch(sink).option("checkpointLocation", path).start()

The steps of a transaction are in `transaction`, the Spark job that writes the rows in `write_job`.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import Any, ClassVar, Protocol

from semel import faults
from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.errors import ConnectionFailedError, TimedOutError
from semel.client.producer.handle import PlainHandle, TransactionHandle
from semel.client.types import OffsetAndMetadata, TopicPartition
from semel.spark.base_sink import BaseSink, SinkError, log, refuse_connect, two_sinks
from semel.spark.checksums import Observed, hashed_columns
from semel.spark.encoding import BadRowError, Targets
from semel.spark.failures import Cancelled, FailedGuessError, was_cancelled
from semel.spark.ledger import LedgerEntry, MicroBatch, Verdict
from semel.spark.options import OptionError
from semel.spark.sink_options import AT_MOST_ONCE, EXACTLY_ONCE, SinkOptions, topic_names
from semel.spark.topics import ABSENT_S, is_here, limits_of
from semel.spark.transaction import BatchTransaction, source_offsets
from semel.spark.write_job import Job, WriteJob, plain_job, settled
from semel.spark.writing import Report

# --- The sink without transactions, for those who want less and say so ---
#
# at_least_once: rows first, then the offsets. A crash in between writes the batch again: duplicates, no loss.
# at_most_once:  offsets first, then the rows, once. A crash in between leaves rows out: loss, no duplicates.
#
# Tasks write straight to the partitions of their rows: without exactly-once a partition may have many writers, so
# there is no shuffle. at_most_once needs to know whether a task ran before, so rows that crossed a shuffle of the
# query are computed first, and written from where Spark keeps them.


GroupOffsets = dict[tuple[str, int], OffsetAndMetadata]


class PlainSink(BaseSink):
    def __init__(self, options: SinkOptions) -> None:
        super().__init__(options)
        self._settings = options.producer_settings()
        self._admin = Admin(self._settings.common())
        self._cluster = Cluster(self._settings)
        self._elsewhere: set[str] = set()  # source topics that this cluster does not have
        Targets.of(self._cluster, options.topics())  # a topic that is missing shows before the query starts
        self._limits = limits_of(self._cluster, options.topics())

    def close(self) -> None:
        self._admin.close()
        self._cluster.close()

    def _batch(self, df: Any, batch: MicroBatch) -> None:
        offsets = source_offsets(batch.ends, lambda topic: self.options.stores_offsets and self._is_here(topic))
        if self.options.guarantee == AT_MOST_ONCE:
            self._at_most_once(df, batch, offsets)
        else:
            self._at_least_once(df, batch, offsets)

    def _is_here(self, topic: str) -> bool:
        """At most once depends on it: a topic whose offsets were left out by mistake would be read again."""
        must_be_sure = self.options.guarantee == AT_MOST_ONCE and topic not in self._elsewhere
        found = is_here(self._cluster, topic, ABSENT_S if must_be_sure else 0.0)
        if not found:
            self._elsewhere.add(topic)
        return found

    def _at_least_once(self, df: Any, batch: MicroBatch, offsets: GroupOffsets) -> None:
        started_s = time.monotonic()
        rows, dead = self._write(df, batch)
        written_s = time.monotonic()
        faults.hit("sink.after_write")
        self._commit(offsets)
        self._report(batch, "write", rows, dead, 1, started_s, written_s)

    def _at_most_once(self, df: Any, batch: MicroBatch, offsets: GroupOffsets) -> None:
        if not offsets:
            raise ValueError(
                "at_most_once stores the sources' offsets before it writes, but no source of this query is a topic "
                "of this cluster; use at_least_once or exactly_once"
            )
        started_s = time.monotonic()
        if self._was_tried(batch, offsets):
            log.warning(
                "batch %d is left out: group %r has its offsets already, so it was tried before and its rows may be "
                "written (at_most_once)",
                batch.batch_id,
                self.options.application_id,
            )
            df.write.format("noop").mode("overwrite").save()
            self._report(batch, "already tried", 0, 0, 1, started_s, started_s)
            return
        with settled(df) as frame:
            assert self._run is not None
            metadata = f"{batch.plan}/{self._run.run_id}"  # by these an attempt that was made is known
            self._commit({place: at._replace(metadata=metadata) for place, at in offsets.items()})
            faults.hit("sink.after_offsets")
            rows, dead = self._write(frame, batch)
        self._report(batch, "write", rows, dead, 1, started_s, time.monotonic())

    def _write(self, df: Any, batch: MicroBatch) -> tuple[int, int]:
        targets = Targets.of(self._cluster, self.options.topics(), self._limits)  # partitions may have been added
        with self._counters.stage("write"):
            reports = plain_job(df, self.options, targets, batch.batch_id, PlainHandle(self._settings))
        return sum(r.rows for r in reports), sum(r.dead for r in reports)

    def _commit(self, offsets: GroupOffsets) -> None:
        if offsets:
            with self._counters.stage("commit"):
                self._admin.alter_group_offsets(self.options.application_id, offsets)

    def _was_tried(self, batch: MicroBatch, offsets: GroupOffsets) -> bool:
        """Whether an earlier attempt has stored the offsets of this batch: then its rows may be there.

        Where a batch moves no offset (its rows come from state, or from a source that is no topic of this cluster),
        those of the batch before look the same, and the plan that is stored with them decides.
        """
        found = self._admin.group_offsets(self.options.application_id)
        places = {TopicPartition(*place): wanted.offset for place, wanted in offsets.items()}
        if not all(place in found and found[place].offset >= offset for place, offset in places.items()):
            return False
        started = source_offsets(batch.starts, lambda _: True)
        moves = any(place not in started or started[place].offset != at.offset for place, at in offsets.items())
        tried = [(found[place].metadata or "").partition("/") for place in places]
        if not moves and any(plan != batch.plan for plan, _, _ in tried):
            return False
        assert self._run is not None
        if all(run_id == self._run.run_id for _, _, run_id in tried):
            raise SinkError(two_sinks(self.options.application_id, batch.batch_id))
        return True


# The loop of every sink with a ledger: a batch that is written runs into Spark's noop sink, one that fails is undone
# and runs again. Where the ledger is, and what undoing means, is the transaction's (`BatchPort`).


class BatchPort(Protocol):
    """Decides about batches and makes them visible, all of one or nothing; see `transaction` for the steps."""

    last: LedgerEntry | None

    def decide(self, batch: MicroBatch, is_stateful: Callable[[], bool], cause: str = "") -> bool: ...
    def check_replay(self, batch: MicroBatch, checksum: str) -> None: ...
    def begin(self) -> Any: ...
    def audit(self, reports: Any) -> None: ...
    def commit(
        self, batch: MicroBatch, reports: Any, run_id: str, checksum: str = "", attempts: int = 1
    ) -> LedgerEntry: ...
    def settle(self, batch: MicroBatch, error: Exception, is_stateful: Callable[[], bool], cause: str = "") -> bool: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...


class TransactionalSink(BaseSink):
    """guarantee=exactly_once. Reads the ledger when it is made, before the query starts."""

    transaction: BatchPort
    # They would come again, or the query was stopped.
    final_errors: ClassVar[tuple[type[Exception], ...]] = (Cancelled, OptionError, BadRowError)

    def close(self) -> None:
        self.transaction.close()

    @abstractmethod
    def _write(self, df: Any, batch: MicroBatch, handle: Any) -> Any:
        """Runs the Spark job that writes the rows into what was begun; returns what its tasks reported."""

    @abstractmethod
    def _hashed_columns(self, df: Any) -> list[str]:
        """The columns that a checksum of the rows is made from."""

    def _ledger_sequence(self) -> int | None:
        return None if self.transaction.last is None else self.transaction.last.sequence

    def _batch(self, df: Any, batch: MicroBatch) -> None:
        assert self._run is not None
        with self._counters.stage("decide"):
            is_due = self.transaction.decide(batch, self._run.is_stateful, self._run.short_lived)
        if is_due:
            self._write_until_done(df, batch)
        else:
            self._refuse_other_sink(batch)
            self._replay(df, batch)

    def _refuse_other_sink(self, batch: MicroBatch) -> None:
        """A run comes to a batch once: one that this run has written before was written by another sink of it."""
        assert self._run is not None
        last = self.transaction.last
        if last is not None and last.run_id == self._run.run_id:
            raise SinkError(two_sinks(self.options.application_id, batch.batch_id))

    def _replay(self, df: Any, batch: MicroBatch) -> None:
        """Runs a batch that is written. A stateful plan must run, or Spark fails the query; and it must give the rows
        that were written, or the state is not the one that they came from."""
        observed = self._observed(df)
        with self._counters.stage("replay"):
            (df if observed is None else observed.frame).write.format("noop").mode("overwrite").save()
        if observed is not None:
            self.transaction.check_replay(batch, observed.checksum())
        now_s = time.monotonic()
        self._report(batch, Verdict.ALREADY_WRITTEN.value, 0, 0, 0, now_s, now_s)

    def _observed(self, df: Any) -> Observed | None:
        """The frame with a checksum of its rows, where the query keeps state."""
        assert self._run is not None
        return Observed(df, self._hashed_columns(df)) if self._run.is_stateful() else None

    def _write_until_done(self, df: Any, batch: MicroBatch) -> None:
        """Aborts and runs the batch again after anything that is not final, a bounded number of times. A guess of the
        sink that failed does not count: it is none of the query's failures, and is not made again."""
        assert self._run is not None
        failures = 0
        for attempt in count(1):
            try:
                self._attempt(df, batch, attempt)
                return
            except SinkError:
                raise
            except Exception as error:  # also a fenced one: only the next step of `settle` knows who owns the id
                self._counters.aborts += 1
                if isinstance(error, self.final_errors) or was_cancelled(error):
                    self.transaction.abort()
                    raise
                if self.transaction.settle(batch, error, self._run.is_stateful, self._run.short_lived):
                    return
                if not isinstance(error, FailedGuessError):
                    failures += 1
                if failures == self.options.max_attempts:
                    raise
                self._counters.retries += 1
                log.warning("batch %d, attempt %d failed and runs again: %s", batch.batch_id, attempt, error)

    def _attempt(self, df: Any, batch: MicroBatch, attempt: int) -> None:
        assert self._run is not None
        started_s, stage = time.monotonic(), self._counters.stage
        with stage("begin"):
            handle = self.transaction.begin()
        observed = self._observed(df)
        frame = df if observed is None else observed.frame
        with stage("write"):
            reports = self._write(frame, batch, handle)
        written_s = time.monotonic()
        with stage("audit"):
            self.transaction.audit(reports)
            checksum = "" if observed is None else observed.checksum()
        with stage("commit"):
            entry = self.transaction.commit(batch, reports, self._run.run_id, checksum, attempt)
        self._report(batch, Verdict.WRITE.value, entry.rows, entry.dead_letters, attempt, started_s, written_s)


class Sink(TransactionalSink):
    """Writes to topics; the ledger is a topic."""

    transaction: BatchTransaction

    def __init__(self, options: SinkOptions) -> None:
        super().__init__(options)
        self.transaction = BatchTransaction(options)
        self.job: Job = WriteJob(self.transaction.owner.cluster)
        try:
            self.transaction.open()
        except (ConnectionFailedError, TimedOutError) as error:
            raise no_brokers(options, error) from error
        self.transaction.own_if_free()

    def _write(self, df: Any, batch: MicroBatch, handle: TransactionHandle) -> list[Report]:
        return self.job(df, self.options, self.transaction.targets, batch, handle)

    def _hashed_columns(self, df: Any) -> list[str]:
        return hashed_columns(df, self.options)


def no_brokers(options: SinkOptions, error: Exception) -> SinkError:
    return SinkError(
        f"the sink got no response from its brokers (bootstrap servers {options.bootstrap_servers!r}): {error}. Start "
        "them, or correct the addresses, and start the query again"
    )


def sink(
    brokers: str,
    *,
    application_id: str,
    topic: str | None = None,
    topics: Iterable[str] | str = (),
    dead_letter_topic: str | None = None,
    bad_column: str | None = None,
    partitioner: str = "murmur2",
    shuffle: str = "auto",
    guarantee: str = "exactly_once",
    transaction_timeout_ms: int = 600_000,
    max_attempts: int = 3,
    adopt_checkpoint: bool = False,
    accept_lost_state: bool = False,
    compression: str = "none",
    max_request_size: int = 1024 * 1024,
    source_cluster_is_other: bool = False,
    on_batch: Callable[[Any], None] | None = None,
    client: Mapping[str, Any] | None = None,
) -> BaseSink:
    """A function for `foreachBatch` that writes every micro-batch in one transaction.

    It reads the ledger when it is made: make it before the source is loaded, once for every start. In a function of
    your own call it once per batch: `sink(df, batch_id)`, or `sink([df_a, df_b], batch_id)` for several frames.

    brokers                 host:port,host:port
    application_id          names the transactional id, the consumer group that shows the lag, and the ledger topic
    topic                   where rows go that have no topic of their own
    topics                  further topics that a column `topic` may name
    dead_letter_topic       where rows go that cannot be written, in the same transaction; else they fail the batch
    bad_column              a column that marks bad rows: true, or a text that says why
    partitioner             murmur2 (where any Kafka producer would put the key), hash (Spark's own), none (no shuffle)
    shuffle                 auto (none where a topic is copied with its keys to as many partitions), always
    guarantee               exactly_once, at_least_once, at_most_once
    transaction_timeout_ms  must exceed the longest batch; the broker's transaction.max.timeout.ms is its limit
    max_attempts            how often a batch is tried before the query fails
    adopt_checkpoint        True: an existing checkpoint goes on although the ledger is empty; so does a new one
                            although the group has offsets that say that the ledger was lost
    accept_lost_state       True: a stateful query may go on with a new checkpoint, and so without its state; or with
                            state from a batch that gave other rows, when it ran again, than it had written
    compression             none, gzip, snappy, lz4, zstd
    max_request_size        the largest record, in bytes
    source_cluster_is_other True: the sources are topics of another cluster, so no offsets are stored here
    on_batch                called with a report after each batch: rows, attempts, times
    client                  further client options by Kafka's names: security.protocol, sasl.username, ...
    """
    refuse_connect()
    options = SinkOptions(
        bootstrap_servers=brokers,
        application_id=application_id,
        topic=topic,
        extra_topics=topic_names(topics),
        dead_letter_topic=dead_letter_topic,
        bad_column=bad_column,
        partitioner=partitioner,
        shuffle=shuffle,
        guarantee=guarantee,
        transaction_timeout_ms=transaction_timeout_ms,
        max_attempts=max_attempts,
        adopt_checkpoint=adopt_checkpoint,
        accept_lost_state=accept_lost_state,
        compression=compression,
        max_request_size=max_request_size,
        source_cluster_is_other=source_cluster_is_other,
        on_batch=on_batch,
        client=dict(client or {}),
    )
    return Sink(options) if options.guarantee == EXACTLY_ONCE else PlainSink(options)
