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

from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from semel import faults
from semel.client.errors import FencedError, KafkaError
from semel.client.producer.coordinator import EndUnknownError
from semel.client.producer.handle import TransactionHandle, TransactionOwner
from semel.protocol.errors import ErrorCode
from semel.spark.checksums import Summed, why_state_differs
from semel.spark.columns import check_columns
from semel.spark.committing import audit, write_entry, written_places
from semel.spark.lag import send_positions
from semel.spark.ledger import Batch, Decision, Entry, Verdict, decide, refuse_lost_state, topic_of
from semel.spark.ledger_topic import create, last_entry, wait_for_markers
from semel.spark.owners import why_in_use
from semel.spark.reasons import reason_first
from semel.spark.sink import FencedSinkError, RefusedError
from semel.spark.sink_options import SinkOptions
from semel.spark.stream_writer_checkpoint import QueryCheckpoint
from semel.spark.stream_writer_state import DriverState
from semel.spark.targets import Targets
from semel.spark.write_job import Report
from semel.spark.writer_options import writer_options
from semel.spark.writer_task import check_routed, write_rows

log = logging.getLogger("semel.spark")


class Plan(NamedTuple):
    """What the planning of a batch decided. Goes to every task, and with their messages to the commit."""

    batch: Batch
    sequence: int  # of the ledger entry to write
    targets: Targets
    handle: TransactionHandle | None  # None: the batch is in the ledger already
    planned_at_ms: int
    is_stateful: bool
    checksum: str  # of the rows in the ledger, if the batch is there


@dataclass
class Done(WriterCommitMessage):
    """What one task wrote."""

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
        types = {f.name: f.dataType.simpleString() for f in schema.fields}
        check_columns(types, self.options)
        check_routed(types, self.options)
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
            return Done(self._plan, run_id, [], summed)
        reports = write_rows(rows, self.options, self._plan.targets, self._plan.batch.batch_id, self._plan.handle)
        return Done(self._plan, run_id, reports, summed)

    @reason_first()
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        done = [message for message in messages if isinstance(message, Done)]
        plans = {(m.plan.batch.batch_id, m.plan.handle and m.plan.handle.identity) for m in done}
        if len(plans) != 1 or len(done) != len(messages) or done[0].plan.batch.batch_id != batchId:
            raise WrongBatchError(f"batch {batchId} has messages of {sorted(map(str, plans))}; it cannot be committed")
        if done[0].plan.handle is None:
            _check_replay(self.options, done)
            log.info("batch %d already written", batchId)
            return
        commit(self.options, done[0].plan, done[0].plan.handle, done)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """As well as it can be done: what stays open is aborted by the next start or the transaction's time-out."""
        plans = [message.plan for message in messages if isinstance(message, Done)]
        handle = plans[0].handle if plans else DriverState(self.options.producer_settings()).recall()
        if handle is None:
            return
        with TransactionOwner(handle.settings) as owner:
            owner.resume(handle)
            try:
                owner.end(commit=False)
                _remember(owner)
            except KafkaError as error:
                log.warning("batch %d could not be aborted now: %s", batchId, error)


# --- planning ---


def plan(options: SinkOptions, batch: Batch, is_stateful: bool) -> Plan:
    """Decides by the ledger, and opens the transaction. Nothing is fenced before it is clear that the batch may run."""
    loop = options.refuse_loop(batch)
    if loop is not None:
        raise RefusedError(loop)
    with TransactionOwner(options.producer_settings()) as owner:
        create(owner.cluster, options.application_id)
        targets = Targets.of(owner.cluster, options.topics())
        handle = None
        is_written, last = _decided(owner, options, batch, is_stateful)
        if not is_written:
            _refuse_in_use(owner, options, batch, last, targets)
            own(owner, options.application_id)
            # While the id was being taken over, its owner before may have finished this very batch.
            is_written, last = _decided(owner, options, batch, is_stateful)
            if not is_written:
                handle = owner.begin([*targets.places(), (topic_of(options.application_id), 0)])
            _remember(owner)
        faults.hit("sink.after_begin")
        sequence = 0 if last is None else last.sequence + 1
        checksum = last.checksum if is_written and last is not None else ""
        return Plan(batch, sequence, targets, handle, int(time.time() * 1000), is_stateful, checksum)


def _decided(
    owner: TransactionOwner, options: SinkOptions, batch: Batch, is_stateful: bool
) -> tuple[bool, Entry | None]:
    """(whether the batch is written, the last entry), or an error if it may not be."""
    last, decision = _asked(owner, options, batch)
    if decision.verdict is Verdict.REFUSE:  # perhaps the entry of the batch before is not visible yet
        wait_for_markers(owner.cluster, options.application_id)
        last, decision = _asked(owner, options, batch)
    lost = refuse_lost_state(last, batch, options.application_id)
    if lost is not None and is_stateful and not options.accept_lost_state:
        raise RefusedError(lost)
    if decision.verdict is Verdict.REFUSE:
        raise RefusedError(f"application {options.application_id!r}: {decision.reason}")
    return decision.verdict is Verdict.ALREADY_WRITTEN, last


def _asked(owner: TransactionOwner, options: SinkOptions, batch: Batch) -> tuple[Entry | None, Decision]:
    last = last_entry(owner.cluster, options.application_id, must_exist=True, accept_empty=options.adopt_checkpoint)
    return last, decide(last, batch, adopt=options.adopt_checkpoint)


def _refuse_in_use(
    owner: TransactionOwner, options: SinkOptions, batch: Batch, last: Entry | None, targets: Targets
) -> None:
    """Before the first batch of a Spark application. After that the id is ours, or the coordinator knows better."""
    if DriverState(owner.settings).recall() is None:
        in_use = why_in_use(owner.cluster, options.application_id, last, batch, targets.places())
        if in_use:
            raise RefusedError(in_use)


def own(owner: TransactionOwner, application_id: str) -> None:
    """The first time in a Spark application the id is taken over; after that it must still be ours."""
    known = DriverState(owner.settings).recall()
    if known is None:
        owner.own()
        return
    owner.resume(known)
    try:
        owner.renew()
    except FencedError as error:
        if error.code is ErrorCode.INVALID_PRODUCER_ID_MAPPING:  # it expired: nobody's
            owner.own()
            return
        raise FencedSinkError(
            f"application id {application_id!r} was taken over by another driver: {error}. If that is the one that "
            "should run, this one is right to stop; else start this Spark application again. Two queries need two "
            "application ids"
        ) from error


def _remember(owner: TransactionOwner) -> None:
    assert owner.identity is not None
    DriverState(owner.settings).remember(*owner.identity, owner.generation)


# --- in a task ---


def check_batch(batch: Batch) -> str:
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


def checksum_of(done: list[Done]) -> str:
    """Of the rows of all tasks; "" where nobody summed them up."""
    parts = [message.summed for message in done if message.summed is not None]
    whole = Summed()
    for part in parts:
        whole.add(part)
    return whole.checksum() if parts else ""


def _check_replay(options: SinkOptions, done: list[Done]) -> None:
    """A batch that ran again must have given the rows that were written, or the state is not the one they came from."""
    plan = done[0].plan
    differs = why_state_differs(plan.batch.batch_id, plan.checksum, checksum_of(done))
    if differs and not options.accept_lost_state:
        raise RefusedError(f"application {options.application_id!r}: {differs}")
    if differs:
        log.warning("accepted: %s", differs)


def commit(options: SinkOptions, plan: Plan, handle: TransactionHandle, done: list[Done]) -> None:
    """Audit, ledger entry, positions and the end: as `semel.sink` does it."""
    reports = [report for message in done for report in message.reports]
    entry = entry_of(options, plan, done[0].run_id, reports, checksum_of(done))
    started_s = time.monotonic()
    with TransactionOwner(handle.settings) as owner:
        owner.resume(handle)
        audit(owner, plan.targets, reports)
        is_first = plan.batch.batch_id == 0 or plan.sequence == 0  # the next batch must find its query in the ledger
        if entry.rows == 0 and plan.batch.starts == plan.batch.ends and not is_first:
            owner.end(commit=False)  # nothing to say and nothing moved
        else:
            write_entry(handle, options.application_id, entry)
            send_positions(owner, options, plan.batch)
            faults.hit("sink.after_offsets")
            _end(owner, options, entry)
        faults.hit("sink.after_commit")
        _remember(owner)
    log.info(
        "batch %d write: %d rows, %d dead letters, write %.0f ms, commit %.0f ms",
        plan.batch.batch_id,
        entry.rows,
        entry.dead_letters,
        entry.committed_at_ms - plan.planned_at_ms,
        (time.monotonic() - started_s) * 1000,
    )


def _end(owner: TransactionOwner, options: SinkOptions, entry: Entry) -> None:
    try:
        owner.end(commit=True)
    except EndUnknownError:
        owner.renew()
        last = last_entry(owner.cluster, options.application_id, must_exist=True, accept_empty=True)
        if last is None or last.sequence != entry.sequence:
            raise


def entry_of(options: SinkOptions, plan: Plan, run_id: str, reports: list[Report], checksum: str) -> Entry:
    return Entry(
        sequence=plan.sequence,
        query_id=plan.batch.query_id,
        run_id=run_id,
        batch_id=plan.batch.batch_id,
        starts=plan.batch.starts,
        ends=plan.batch.ends,
        written=written_places(plan.targets, reports),
        rows=sum(r.rows for r in reports),
        dead_letters=sum(r.dead for r in reports),
        committed_at_ms=int(time.time() * 1000),
        plan=plan.batch.plan,
        dead_letter_topic=options.dead_letter_topic,
        checksum=checksum,
    )
