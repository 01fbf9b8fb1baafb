"""The sink: a function for foreachBatch that writes each micro-batch in one transaction.

    sink = semel.sink("localhost:9092", application_id="payments", topic="out")
    df.writeStream.foreachBatch(sink).option("checkpointLocation", path).start()

The steps of a transaction are in `transaction`, the Spark job that writes the rows in `write_job`. What is here: a
batch that is written runs into Spark's noop sink, and one that fails is aborted and runs again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import Any

from semel.client.errors import ConnectionFailedError, TimedOutError
from semel.spark.base_sink import BaseSink, SinkError, log, refuse_connect
from semel.spark.checksums import Observed
from semel.spark.encoding import BadRowError
from semel.spark.failures import FailedGuessError
from semel.spark.ledger import MicroBatch, Verdict
from semel.spark.options import OptionError
from semel.spark.plain_sink import PlainSink
from semel.spark.sink_options import EXACTLY_ONCE, SinkOptions
from semel.spark.transaction import BatchTransaction
from semel.spark.write_job import Cancelled, Job, WriteJob


class Sink(BaseSink):
    """guarantee=exactly_once. Reads the ledger when it is made, before the query starts."""

    def __init__(self, options: SinkOptions) -> None:
        super().__init__(options)
        self.transaction = BatchTransaction(options)
        self.job: Job = WriteJob(self.transaction.owner.cluster)
        try:
            self.transaction.open()
        except (ConnectionFailedError, TimedOutError) as error:
            raise SinkError(
                f"the sink got no response from its brokers (bootstrap servers {options.bootstrap_servers!r}): "
                f"{error}. Start them, or correct the addresses, and start the query again"
            ) from error
        self.transaction.own_if_free()

    def close(self) -> None:
        self.transaction.close()

    def _ledger_sequence(self) -> int | None:
        return None if self.transaction.last is None else self.transaction.last.sequence

    def _batch(self, df: Any, batch: MicroBatch) -> None:
        assert self._run is not None
        with self._counters.stage("decide"):
            is_due = self.transaction.decide(batch, self._run.is_stateful, self._run.short_lived)
        if is_due:
            self._write_until_done(df, batch)
        else:
            self._replay(df, batch)

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
        return Observed(df, self.options) if self._run.is_stateful() else None

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
            except Exception as error:  # also a FencedError: only InitProducerId knows who owns the id
                self._counters.aborts += 1
                if isinstance(error, Cancelled | OptionError | BadRowError):  # it would come again, or was stopped
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
            reports = self.job(frame, self.options, self.transaction.targets, batch, handle)
        written_s = time.monotonic()
        with stage("audit"):
            self.transaction.audit(reports)
            checksum = "" if observed is None else observed.checksum()
        with stage("commit"):
            entry = self.transaction.commit(batch, reports, self._run.run_id, checksum, attempt)
        self._report(batch, Verdict.WRITE.value, entry.rows, entry.dead_letters, attempt, started_s, written_s)


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
        extra_topics=(topics,) if isinstance(topics, str) else tuple(topics),
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
