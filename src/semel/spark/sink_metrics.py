"""What a sink has done so far, for `semel.prometheus`. Counted per batch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from semel.client.metrics import Measured, MetricsTable
from semel.client.types import TopicPartition


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
