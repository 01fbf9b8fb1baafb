"""`writeStream.format("semel")`: the sink for pipelines that cannot pass a function, such as declarative ones.

    df.writeStream.format("semel").option("kafka.bootstrap.servers", brokers).option("topic", "out")
        .option("applicationId", "payments").option("checkpointLocation", path).start()

The same transaction per micro-batch as `semel.sink`, in the pieces that Spark offers: a batch is planned in one Python
process of the driver (decide by the ledger, begin), written by tasks, and committed or aborted in another process. The
handle of the transaction travels with the pickled writer to the tasks, and with their messages to the commit.

What it cannot do that `semel.sink` can: run a batch again by itself (Spark fails the query, whoever runs it starts it
again), route rows (use `semel.route`), and see whether a stage ran twice (PySpark 4.2 and later notice that).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from semel.client.producer.handle import TransactionHandle
from semel.spark.base_sink import RefusedError
from semel.spark.checkpoint import QueryCheckpoint
from semel.spark.checksums import Summed
from semel.spark.encoding import Targets
from semel.spark.failures import reason_first
from semel.spark.ledger import LedgerEntry, MicroBatch
from semel.spark.owners import DriverState
from semel.spark.sink_options import SinkOptions, check_schema, writer_options
from semel.spark.transaction import BatchTransaction
from semel.spark.writing import Report, write_rows

log = logging.getLogger("semel.spark")


class Plan(NamedTuple):
    """What the planning of a batch decided. Goes to every task, and with their messages to the commit."""

    batch: MicroBatch
    last: LedgerEntry | None  # of the ledger; what it says about partitions is left out
    targets: Targets
    handle: TransactionHandle | None  # None: the batch is in the ledger already
    planned_at_ms: int
    is_stateful: bool


@dataclass
class StreamMessage(WriterCommitMessage):
    plan: Plan
    run_id: str
    reports: list[Report]
    summed: Summed | None = None  # the rows of the task, where the query keeps state


class WrongBatchError(RuntimeError):
    """A task was handed a writer that was planned for another batch."""


class StreamWriter(DataSourceStreamArrowWriter):
    """Made for every batch twice: where it is planned (then it is pickled), and where it is committed (it is not)."""

    def __init__(self, raw: Mapping[str, str], schema: StructType) -> None:
        given = {name.lower(): value for name, value in raw.items()}
        self.options = writer_options(raw)
        check_schema(schema, self.options)
        self._location = given.get("checkpointlocation")
        self._plan: Plan | None = None

    @reason_first()
    def __getstate__(self) -> dict[str, Any]:
        """Pickled for the tasks: the one moment that happens once per batch, before it is written."""
        if self._plan is None:
            checkpoint = QueryCheckpoint(self._location)
            self._plan = plan(self.options, checkpoint.current(), checkpoint.is_stateful())
        return self.__dict__

    @reason_first()
    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Runs in a task."""
        assert self._plan is not None, "a writer is pickled before it writes"
        run_id = check_batch(self._plan.batch)
        summed = Summed() if self._plan.is_stateful else None
        rows = iterator if summed is None else summed.passed(iterator)
        if self._plan.handle is None:
            for _ in rows:  # a stateful plan must run, or Spark fails the query
                pass
            return StreamMessage(self._plan, run_id, [], summed)
        reports = write_rows(rows, self.options, self._plan.targets, self._plan.batch.batch_id, self._plan.handle)
        return StreamMessage(self._plan, run_id, reports, summed)

    @reason_first()
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        done = [message for message in messages if isinstance(message, StreamMessage)]
        plans = {(m.plan.batch.batch_id, m.plan.handle and m.plan.handle.identity) for m in done}
        if len(plans) != 1 or len(done) != len(messages) or done[0].plan.batch.batch_id != batchId:
            raise WrongBatchError(f"batch {batchId} has messages of {sorted(map(str, plans))}; it cannot be committed")
        commit(self.options, done)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        plans = [message.plan for message in messages if isinstance(message, StreamMessage)]
        handle = plans[0].handle if plans else _state(self.options).last_handle()
        if handle is not None:
            with _transaction(self.options) as transaction:
                transaction.resume(handle, Targets({}), None)
                transaction.abort()


def _state(options: SinkOptions) -> DriverState:
    return DriverState(options.producer_settings())


def _transaction(options: SinkOptions) -> BatchTransaction:
    return BatchTransaction(options, _state(options))


def plan(options: SinkOptions, batch: MicroBatch, is_stateful: bool) -> Plan:
    """Decides by the ledger, and opens the transaction. Nothing is fenced before it is clear that the batch may run."""
    loop = options.refuse_loop(batch)
    if loop is not None:
        raise RefusedError(loop)
    with _transaction(options) as transaction:
        transaction.open()
        handle = transaction.begin() if transaction.decide(batch, lambda: is_stateful) else None
        last = None if transaction.last is None else msgspec.structs.replace(transaction.last, written=[])
        return Plan(batch, last, transaction.targets, handle, int(time.time() * 1000), is_stateful)


# --- in a task ---
def check_batch(batch: MicroBatch) -> str:
    """The id of the run. Raises if the task belongs to another batch than the one that was planned."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None, "this function runs in a Spark task"
    found = (context.getLocalProperty("sql.streaming.queryId"), context.getLocalProperty("streaming.sql.batchId"))
    if found != (batch.query_id, str(batch.batch_id)):
        raise WrongBatchError(
            f"the checkpoint says batch {batch.batch_id} of query {batch.query_id}, Spark runs batch {found[1]} of "
            f"query {found[0]}; does another query use this checkpoint?"
        )
    return context.getLocalProperty("spark.jobGroup.id") or ""


# --- the commit ---
def checksum_of(done: list[StreamMessage]) -> str:
    """Of the rows of all tasks; "" where nobody summed them up."""
    parts = [message.summed for message in done if message.summed is not None]
    whole = Summed()
    for part in parts:
        whole.add(part)
    return whole.checksum() if parts else ""


def commit(options: SinkOptions, done: list[StreamMessage]) -> None:
    """Audit and commit, as `semel.sink` does it; or, where the batch was written before, a look at its rows."""
    plan, checksum = done[0].plan, checksum_of(done)
    reports = [report for message in done for report in message.reports]
    started_s = time.monotonic()
    with _transaction(options) as transaction:
        if plan.handle is None:
            transaction.last = plan.last
            transaction.check_replay(plan.batch, checksum)
            log.info("batch %d already written", plan.batch.batch_id)
            return
        transaction.resume(plan.handle, plan.targets, plan.last)
        transaction.audit(reports)
        entry = transaction.commit(plan.batch, reports, done[0].run_id, checksum)
    log.info(
        "batch %d write: %d rows, %d dead letters, write %.0f ms, commit %.0f ms",
        plan.batch.batch_id,
        entry.rows,
        entry.dead_letters,
        entry.committed_at_ms - plan.planned_at_ms,
        (time.monotonic() - started_s) * 1000,
    )
