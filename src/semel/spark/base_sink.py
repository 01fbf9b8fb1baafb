"""What all sinks have in common: one run of one query, one batch at a time, and a report after each."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from typing import Any, NamedTuple

from semel.spark.checkpoint import Run
from semel.spark.ledger import Batch
from semel.spark.sink_options import SinkOptions

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


def refuse_connect() -> None:
    from pyspark.sql.utils import is_remote

    if is_remote():
        raise SinkError(NOT_ON_CONNECT)


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


class BatchReport(NamedTuple):
    """What became of one batch."""

    batch_id: int
    verdict: str
    rows: int
    dead_letters: int
    attempts: int
    write_ms: float
    commit_ms: float


class BaseSink(ABC):
    """A function for foreachBatch. Make a new one for every start of a query."""

    def __init__(self, options: SinkOptions) -> None:
        self.options = options
        self.reports: deque[BatchReport] = deque(maxlen=KEPT_REPORTS)
        self._lock = threading.Lock()
        self._run: Run | None = None

    def __call__(self, df: Any, batch_id: int) -> None:
        if not self._lock.acquire(blocking=False):
            raise SinkError("this sink is writing a batch of another query; make one sink per query")
        try:
            self._batch(df, self._same_run(df.sparkSession).batch(batch_id))
        except Exception as error:
            short = shortened(str(error))
            if short == str(error):
                raise
            log.exception("batch %d failed", batch_id)
            raise SinkError(short) from None
        finally:
            self._lock.release()

    def __reduce__(self) -> Any:
        raise SinkError(NOT_ON_CONNECT)

    @abstractmethod
    def _batch(self, df: Any, batch: Batch) -> None:
        """Writes a batch, or raises."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of connections. A sink that is closed cannot be used again."""

    def _same_run(self, session: Any) -> Run:
        if self._run is not None and self._run.is_current(session):
            return self._run
        run = Run(session)
        if self._run is None:
            self._run = run
        elif self._run.run_id != run.run_id:
            raise SinkError(
                f"this sink belongs to run {self._run.run_id} of query {self._run.query_id}, and is called by run "
                f"{run.run_id} of query {run.query_id}; call semel.sink(...) again for every start"
            )
        return self._run

    def _tell(self, report: BatchReport) -> None:
        self.reports.append(report)
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

    def report(self, batch_id: int) -> BatchReport | None:
        """What became of a recent batch: for a StreamingQueryListener, which knows the batch's number."""
        return next((report for report in reversed(self.reports) if report.batch_id == batch_id), None)
