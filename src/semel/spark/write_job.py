"""One Spark job that writes a micro-batch: rows to blobs, blobs to their partitions, a report per partition."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from types import TracebackType
from typing import Any

import pyspark

from semel.client.cluster import Cluster
from semel.client.producer.handle import PlainHandle, TransactionHandle
from semel.spark.encoding import BLOB_COLUMNS, Targets, routing_of
from semel.spark.failures import FailedGuessError, cancelled, was_cancelled
from semel.spark.in_place import InPlace, tasks_without_shuffle
from semel.spark.ledger import MicroBatch
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
    mapped,
    raise_failures,
    write_task,
)

# --- Did a stage of a job run more than once? ---
#
# A stage that Spark runs again (its shuffle files were lost) may send rows another way the second time. Tasks that had
# read the first run and tasks that read the second then hold a mix: some rows twice, some never. Spark 4.2 and later
# compare order-independent checksums of both runs and fail or repeat what has read the wrong one. Where that is off or
# absent, and where rows crossed a shuffle of the query before (which is compared only within one of the jobs that a
# batch consists of), a batch that ran any stage twice is not trusted: it is aborted and runs again from the start.
#
# Without a transaction nothing can be aborted. There the rows are settled first: no stage behind them runs again.


CHECKSUMS = (
    "spark.sql.shuffle.orderIndependentChecksum.enabled",
    "spark.sql.shuffle.orderIndependentChecksum.enableFullRetryOnMismatch",
    "spark.sql.shuffle.orderIndependentChecksum.enableQueryLevelRollbackOnMismatch",  # off by default
)
FIRST_WITH_CHECKSUMS = (4, 2)  # 4.1 has the settings, but leaves stages behind that have read the wrong run
EVENTS_TIMEOUT_MS = 30_000


class RerunError(RuntimeError):
    """A stage ran more than once, or nobody can say whether it did."""


def spark_notices(session: Any) -> bool:
    """Whether Spark itself sees that a stage gave other rows the second time."""
    if tuple(int(part) for part in pyspark.__version__.split(".")[:2]) < FIRST_WITH_CHECKSUMS:
        return False
    pushed = of_context(session.sparkContext, "spark.shuffle.push.enabled", "false")
    return pushed != "true" and all(session.conf.get(name, "false") == "true" for name in CHECKSUMS)


@contextmanager
def settled(df: Any, *, always: bool = False) -> Iterator[Any]:
    """The rows of a DataFrame for one job whose tasks know by their attempt number that they are not the first.

    Spark runs a stage again when shuffle files before it are lost, and counts its tasks' attempts from 0 again. So rows
    that crossed a shuffle are computed and kept on the executors; what reads them from there has nothing to fetch.
    `always`: other rows, too, for several jobs that must see the same ones.
    """
    if not always and tasks_without_shuffle(df) is not None:
        yield df
        return
    kept = df.localCheckpoint(eager=True)
    try:
        yield kept
    finally:
        kept._jdf.queryExecution().analyzed().rdd().unpersist(False)


class StageWatch:
    """Around the jobs of one attempt at a batch; `check` raises if one of their stages ran more than once."""

    def __init__(self, session: Any) -> None:
        self._context = session.sparkContext
        self._tag = f"semel-{uuid.uuid4()}"

    def __enter__(self) -> StageWatch:
        self._context.addJobTag(self._tag)
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._context.removeJobTag(self._tag)

    def check(self) -> None:
        java = self._context._jsc.sc()
        java.listenerBus().waitUntilEmpty(EVENTS_TIMEOUT_MS)  # what is read below is known by events
        jobs = sorted(java.statusTracker().getJobIdsForTag(self._tag))
        if not jobs:
            raise RerunError(
                "Spark has forgotten the job that wrote this batch, so nobody can say whether a stage ran twice; raise "
                "spark.ui.retainedJobs"
            )
        if is_plain(java.statusStore(), jobs):
            return
        again = reruns(stages_of(java, jobs))
        if again:
            raise RerunError(
                f"stages {again} ran more than once (shuffle files were lost), so rows may be mixed from two runs; "
                "the batch is aborted and runs again"
            )


def lost_executors(java: Any, since_ms: int) -> list[str]:
    """The executors that Spark has given up since then; their processes may live."""
    java.listenerBus().waitUntilEmpty(EVENTS_TIMEOUT_MS)
    listed = java.statusStore().executorList(False)
    known = [listed.apply(i) for i in range(listed.size())]
    gone = [each for each in known if not each.isActive() and each.removeTime().isDefined()]
    return [str(each.id()) for each in gone if each.removeTime().get().getTime() >= since_ms]


def is_plain(store: Any, jobs: list[int]) -> bool:
    """The usual case, known by a few numbers: no stage failed, and each job but the first added one stage."""
    for number in jobs:
        job = store.job(number)
        if job.numFailedStages() or (number != jobs[0] and job.numCompletedStages() > 1):
            return False
    return True


def stages_of(java: Any, jobs: Any) -> list[tuple[int, int, int]]:
    """(stage, attempt, the data set it computes) of every stage that ran in these jobs."""
    store, tracker = java.statusStore(), java.statusTracker()
    numbers = sorted({int(stage) for job in jobs for stage in tracker.getJobInfo(job).get().stageIds()})
    found = []
    for stage in numbers:
        data = store.lastStageAttempt(stage)
        if data.status().name() not in ("SKIPPED", "PENDING"):
            found.append((stage, int(data.attemptId()), _last(data.rddIds())))
    return found


def _last(numbers: Any) -> int:
    """Data sets are numbered as they are made: the last of a stage is what the stage computes."""
    return max(int(numbers.apply(i)) for i in range(numbers.size()))


def reruns(stages: list[tuple[int, int, int]]) -> list[int]:
    """Stages with a second attempt, or that computed again what another had computed."""
    seen: set[int] = set()
    again = []
    for stage, attempt, computes in stages:
        if attempt or computes in seen:
            again.append(stage)
        seen.add(computes)
    return again


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
            job = mapped(rows.coalesce(direct), task, REPORT_COLUMNS)
            return without_stragglers(job, df, lambda: collected(job, precautions))
        few = write_tasks(rows, targets)  # tasks that read several partitions one after the other
        if may_guess(df, options, precautions) and self._in_place.allows(df, options, targets, batch, few):
            task = direct_task(handle, routing, precautions, is_guess=True, keep=keep)
            job = mapped(rows.coalesce(few), task, REPORT_COLUMNS)
            return without_stragglers(job, df, lambda: self._stay(job, batch.batch_id))
        blobs = mapped(rows, encode_task(routing), BLOB_COLUMNS)
        return written(blobs, few, targets, handle, precautions, keep)

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
    blobs: Any,
    tasks: int,
    targets: Targets,
    handle: TransactionHandle,
    precautions: Precautions,
    keep: Keep | None = None,
) -> list[Report]:
    """Brings encoded batches to the tasks that write them.

    Adaptive execution would run every stage as a job of its own and plan again in between. The number of write tasks is
    fixed, so there is nothing to adapt, and a small batch costs a sixth less without."""
    shuffled = blobs.repartitionById(tasks, blobs["target"])
    job = mapped(shuffled, write_task(handle, targets, precautions, keep), REPORT_COLUMNS)
    with changed(job.sparkSession, {ADAPTIVE: "false"}):
        return collected(job, precautions)


def plain_job(df: Any, options: SinkOptions, targets: Targets, batch_id: int, handle: PlainHandle) -> list[Report]:
    """Writes rows without a transaction: any task to any partition."""
    rows = prepared(df, options)
    routing = routing_of(options, targets, batch_id, handle.settings)
    only_once = options.guarantee == AT_MOST_ONCE
    task = direct_task(handle, routing, Precautions(handshake=False), only_once=only_once)
    reports = collected(mapped(rows, task, REPORT_COLUMNS))
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
    return of_context(session.sparkContext, "spark.speculation", "false") == "true"


@lru_cache(maxsize=8)
def of_context(context: Any, name: str, otherwise: str) -> str:
    """A setting that stands while a context lives: the JVM is asked once, not for every batch."""
    return str(context._conf.get(name, otherwise))


def _collect(job: Any) -> list[Report]:
    try:
        return [Report(*row) for row in job.collect()]
    except Exception as error:
        if was_cancelled(error):
            raise cancelled(error) from error
        raise
