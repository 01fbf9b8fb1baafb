"""Did a stage of a job run more than once?

A stage that Spark runs again (its shuffle files were lost) may send rows another way the second time. Tasks that had
read the first run and tasks that read the second then hold a mix: some rows twice, some never. Spark 4.2 and later
compare order-independent checksums of both runs and fail or repeat what has read the wrong one. Where that is off or
absent, and where rows crossed a shuffle of the query before (which is compared only within one of the jobs that a
batch consists of), a batch that ran any stage twice is not trusted: it is aborted and runs again from the start.

Without a transaction nothing can be aborted. There the rows are settled first: no stage behind them runs again.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import pyspark

from semel.spark.in_place import tasks_without_shuffle

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
    pushed = session.sparkContext._conf.get("spark.shuffle.push.enabled", "false")
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
