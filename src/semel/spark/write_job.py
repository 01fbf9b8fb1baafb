"""One Spark job that writes a micro-batch: rows to blobs, blobs to their partitions, a report per partition."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from semel.client.cluster import Cluster
from semel.client.producer.handle import PlainHandle, TransactionHandle
from semel.spark.encoding import BLOB_COLUMNS, Targets, routing_of
from semel.spark.failures import FailedGuessError, cancelled, was_cancelled
from semel.spark.in_place import InPlace, tasks_without_shuffle
from semel.spark.ledger import MicroBatch
from semel.spark.reruns import StageWatch, lost_executors, spark_notices
from semel.spark.session import changed
from semel.spark.sink_options import AT_MOST_ONCE, AUTO, SPREAD, Precautions, SinkOptions, prepared
from semel.spark.writing import (
    REPORT_COLUMNS,
    RETRIED,
    Keep,
    OwnerStalledError,
    Report,
    WrongTaskError,
    direct_task,
    encode_task,
    raise_failures,
    write_task,
)

ADAPTIVE = "spark.sql.adaptive.enabled"


class LostExecutorError(RuntimeError):
    """A task ran again because its executor was lost; the first attempt may live."""


class MovedRowsError(FailedGuessError):
    """Rows of one partition are in two tasks, so they need a shuffle."""


Job = Callable[[Any, SinkOptions, Targets, MicroBatch, TransactionHandle], list[Report]]


class WriteJob:
    """Writes rows into a transaction and returns what the winners reported. One for each query: it learns."""

    def __init__(self, cluster: Cluster) -> None:
        self._in_place = InPlace(cluster)

    def __call__(
        self,
        df: Any,
        options: SinkOptions,
        targets: Targets,
        batch: MicroBatch,
        handle: TransactionHandle,
        keep: Keep | None = None,
    ) -> list[Report]:
        rows = prepared(df, options)
        routing = routing_of(options, targets, batch.batch_id, handle.settings)
        precautions = careful(options.precautions, df.sparkSession)
        direct = direct_tasks(rows, options, targets)
        if direct is not None:
            task = direct_task(handle, replace(routing, partitioner=SPREAD), precautions, keep=keep)
            job = rows.coalesce(direct).mapInArrow(task, REPORT_COLUMNS)
            return without_stragglers(job, df, lambda: collected(job, precautions))
        few = write_tasks(rows, targets)  # tasks that read several partitions one after the other
        if may_guess(df, options, precautions) and self._in_place.allows(df, options, targets, batch, few):
            task = direct_task(handle, routing, precautions, is_guess=True, keep=keep)
            job = rows.coalesce(few).mapInArrow(task, REPORT_COLUMNS)
            return without_stragglers(job, df, lambda: self._stay(job, batch.batch_id))
        blobs = rows.mapInArrow(encode_task(routing), BLOB_COLUMNS)
        return written(blobs, targets, handle, precautions, keep)

    def _stay(self, job: Any, batch_id: int) -> list[Report]:
        """Every task writes what it has. There is no stage before it that could run twice."""
        try:
            return collected(job)
        except OwnerStalledError:
            self._in_place.stalled_batch = batch_id
            raise
        except WrongTaskError as error:
            self._in_place.has_failed = True
            raise MovedRowsError(
                "two tasks have rows for one partition: the batch is aborted and runs again with a shuffle, as all do "
                "that follow (shuffle='always' does so from the start)"
            ) from error


def may_guess(df: Any, options: SinkOptions, precautions: Precautions) -> bool:
    """Whether the sink may guess that rows are in place: only if the handshake finds out that they are not, if no copy
    of a task can be taken for another task, and if the batch may run again."""
    allowed = options.shuffle == AUTO and options.max_attempts > 1 and precautions.handshake
    return allowed and not speculates(df.sparkSession)


def written(
    blobs: Any, targets: Targets, handle: TransactionHandle, precautions: Precautions, keep: Keep | None = None
) -> list[Report]:
    """Brings encoded batches to the tasks that write them.

    Adaptive execution would run every stage as a job of its own and plan again in between. The number of write tasks is
    fixed, so there is nothing to adapt, and a small batch costs a sixth less without."""
    shuffled = blobs.repartitionById(write_tasks(blobs, targets), blobs["target"])
    job = shuffled.mapInArrow(write_task(handle, targets, precautions, keep), REPORT_COLUMNS)
    with changed(job.sparkSession, {ADAPTIVE: "false"}):
        return collected(job, precautions)


def plain_job(df: Any, options: SinkOptions, targets: Targets, batch_id: int, handle: PlainHandle) -> list[Report]:
    """Writes rows without a transaction: any task to any partition."""
    rows = prepared(df, options)
    routing = routing_of(options, targets, batch_id, handle.settings)
    only_once = options.guarantee == AT_MOST_ONCE
    task = direct_task(handle, routing, Precautions(handshake=False), only_once=only_once)
    reports = collected(rows.mapInArrow(task, REPORT_COLUMNS))
    return [report for report in reports if report.failure != RETRIED]


def needs_no_shuffle(rows: Any, options: SinkOptions) -> bool:
    """Where neither keys nor given partitions count, any task may have any partition, so each keeps one to itself."""
    return "partition" not in rows.columns and (options.partitioner == SPREAD or "key" not in rows.columns)


def direct_tasks(rows: Any, options: SinkOptions, targets: Targets) -> int | None:
    """How many tasks may write the rows that they have, each with a partition of every topic to itself; None: they are
    shuffled. A dead-letter topic often has one partition: then a single task would have to compute the whole batch."""
    if not needs_no_shuffle(rows, options):
        return None
    fewest = min(topic.partitions for topic in targets.topics)
    for_rows = min(topic.partitions for topic in targets.topics if topic.name != options.dead_letter_topic)
    slots: int = rows.sparkSession.sparkContext.defaultParallelism
    return None if fewest < min(for_rows, slots) else fewest


def write_tasks(rows: Any, targets: Targets) -> int:
    """One task per partition, but not more than can run at once: a task costs more than a partition."""
    slots: int = rows.sparkSession.sparkContext.defaultParallelism
    return max(1, min(targets.count, slots))


class Reports(list[Report]):
    """With the one who knows whether a stage of the job ran twice."""

    watch: StageWatch | None = None


def collected(job: Any, precautions: Precautions | None = None) -> Reports:
    """Runs the job; raises what a task reported instead of rows. With precautions, `check_single_runs` may be called
    about it."""
    if precautions is None or not precautions.single_runs or spark_notices(job.sparkSession):
        reports = Reports(_collect(job))
    else:
        with StageWatch(job.sparkSession) as watch:
            reports = Reports(_collect(job))
        reports.watch = watch
    raise_failures(reports)
    return reports


def check_single_runs(reports: list[Report]) -> None:
    """Raises if rows may be mixed from two runs of a stage. To be called late: Spark needs a moment to know."""
    if isinstance(reports, Reports) and reports.watch is not None:
        reports.watch.check()


def without_stragglers(job: Any, df: Any, run: Callable[[], list[Report]]) -> list[Report]:
    """The reports of a job whose tasks choose their partitions themselves, if no attempt may be left that writes.

    Two attempts at such a task may choose different partitions. One that runs on in an executor that Spark has given up
    could write, after the counts were compared, where the other has no rows and so nothing keeps it out. Behind a
    shuffle the partitions are those of the blobs, the same for every attempt."""
    began_ms = int(time.time() * 1000)
    reports = run()
    is_retried = any(report.failure == RETRIED for report in reports)
    if is_retried or tasks_without_shuffle(df) is None:  # a stage that runs again counts attempts from 0
        lost = lost_executors(job.sparkSession.sparkContext._jsc.sc(), began_ms)
        if lost:
            raise LostExecutorError(
                f"executors {', '.join(lost)} were lost while the batch was written, and may still write to partitions "
                "that no other attempt has opened: the batch is aborted and runs again"
            )
    reports[:] = [report for report in reports if report.failure != RETRIED]
    return reports


def careful(precautions: Precautions, session: Any) -> Precautions:
    """Without speculation nobody wants an attempt that came second: it need not wait to be killed."""
    return precautions if speculates(session) else precautions._replace(wait_s=0.0)


def speculates(session: Any) -> bool:
    return bool(session.sparkContext._conf.get("spark.speculation", "false") == "true")


def _collect(job: Any) -> list[Report]:
    try:
        return [Report(*row) for row in job.collect()]
    except Exception as error:
        if was_cancelled(error):
            raise cancelled(error) from error
        raise
