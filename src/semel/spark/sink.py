"""The sink: a function for foreachBatch that writes each micro-batch in one transaction.

    sink = semel.sink("localhost:9092", application_id="payments", topic="out")
    df.writeStream.foreachBatch(sink).option("checkpointLocation", path).start()

The steps of a transaction are in `transaction`, the Spark job that writes the rows in `write_job`. What is here: a
batch that is written runs into Spark's noop sink, and one that fails is aborted and runs again.
"""

from __future__ import annotations

import time
from itertools import count
from typing import Any

from semel.client.errors import ConnectionFailedError, TimedOutError
from semel.spark.base_sink import BaseSink, BatchReport, SinkError, log
from semel.spark.checksums import Observed
from semel.spark.encoding import BadRowError
from semel.spark.failures import FailedGuessError
from semel.spark.ledger import Batch, Verdict
from semel.spark.options import OptionError
from semel.spark.sink_options import SinkOptions
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
                f"the sink got no answer from its brokers (bootstrap servers {options.bootstrap_servers!r}): "
                f"{error}. Start them, or correct the addresses, and start the query again"
            ) from error
        self.transaction.own_if_free()

    def close(self) -> None:
        self.transaction.close()

    def _batch(self, df: Any, batch: Batch) -> None:
        assert self._run is not None
        if self.transaction.decide(batch, self._run.is_stateful, self._run.short_lived):
            self._write_until_done(df, batch)
        else:
            self._replay(df, batch)

    def _replay(self, df: Any, batch: Batch) -> None:
        """Runs a batch that is written. A stateful plan must run, or Spark fails the query; and it must give the rows
        that were written, or the state is not the one that they came from."""
        observed = self._observed(df)
        (df if observed is None else observed.frame).write.format("noop").mode("overwrite").save()
        if observed is not None:
            self.transaction.check_replay(batch, observed.checksum())
        self._tell(BatchReport(batch.batch_id, Verdict.ALREADY_WRITTEN.value, 0, 0, 0, 0.0, 0.0))

    def _observed(self, df: Any) -> Observed | None:
        """The frame with a checksum of its rows, where the query keeps state."""
        assert self._run is not None
        return Observed(df, self.options) if self._run.is_stateful() else None

    def _write_until_done(self, df: Any, batch: Batch) -> None:
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
                if isinstance(error, Cancelled) or is_final(error):
                    self.transaction.abort()
                    raise
                if self.transaction.settle(batch, error, self._run.is_stateful, self._run.short_lived):
                    return
                if not isinstance(error, FailedGuessError):
                    failures += 1
                if failures == self.options.max_attempts:
                    raise
                log.warning("batch %d, attempt %d failed and runs again: %s", batch.batch_id, attempt, error)

    def _attempt(self, df: Any, batch: Batch, attempt: int) -> None:
        assert self._run is not None
        started_s = time.monotonic()
        handle = self.transaction.begin()
        observed = self._observed(df)
        frame = df if observed is None else observed.frame
        reports = self.job(frame, self.options, self.transaction.targets, batch, handle)
        written_s = time.monotonic()
        self.transaction.audit(reports)
        checksum = "" if observed is None else observed.checksum()
        entry = self.transaction.commit(batch, reports, self._run.run_id, checksum, attempt)
        write_ms, commit_ms = (written_s - started_s) * 1000, (time.monotonic() - written_s) * 1000
        verdict = Verdict.WRITE.value
        self._tell(BatchReport(batch.batch_id, verdict, entry.rows, entry.dead_letters, attempt, write_ms, commit_ms))


def is_final(error: Exception) -> bool:
    """Errors of the query itself: running the batch again would only repeat them."""
    return isinstance(error, (OptionError, BadRowError))
