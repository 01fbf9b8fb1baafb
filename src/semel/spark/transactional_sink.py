"""The loop of every sink with a ledger: a batch that is written runs into Spark's noop sink, one that fails is undone
and runs again. Where the ledger is, and what undoing means, is the transaction's (`BatchPort`)."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable
from itertools import count
from typing import Any, ClassVar, Protocol

from semel.spark.base_sink import BaseSink, SinkError, log, two_sinks
from semel.spark.checksums import Observed
from semel.spark.encoding import BadRowError
from semel.spark.failures import Cancelled, FailedGuessError, was_cancelled
from semel.spark.ledger import LedgerEntry, MicroBatch, Verdict
from semel.spark.options import OptionError


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
