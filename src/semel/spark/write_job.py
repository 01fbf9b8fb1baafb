"""One Spark job that writes a micro-batch: rows to blobs, blobs to their partitions, a report per partition."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from semel.client.handle import TransactionHandle
from semel.spark.columns import prepared
from semel.spark.encoding import BLOB_COLUMNS, SPREAD, Routing
from semel.spark.sink_options import SinkOptions
from semel.spark.targets import Targets
from semel.spark.writing import REPORT_COLUMNS, direct_task, encode_task, write_task

ARROW_BYTES = 32 * 1024 * 1024  # of one Arrow batch between the JVM and Python, which bounds a worker's memory
ARROW_BYTES_SETTING = "spark.sql.execution.arrow.maxBytesPerBatch"


class Cancelled(Exception):
    """The job was cancelled: the query was stopped. Not to be tried again."""


class Report(NamedTuple):
    """What the winning attempt wrote into one partition. Rows of REPORT_COLUMNS."""

    target: int
    rows: int
    dead: int
    first: int
    last: int
    sequence: int
    mark: int


def write_job(
    df: Any, options: SinkOptions, targets: Targets, batch_id: int, handle: TransactionHandle
) -> list[Report]:
    """Runs the job and returns what the winners reported."""
    rows = prepared(df, options)
    routing = Routing(
        targets=targets,
        topic=options.topic,
        dead_letter=options.dead_letter_topic,
        partitioner=options.partitioner,
        batch_id=batch_id,
        timestamp_ms=int(time.time() * 1000),
        max_record_bytes=options.max_request_size - 512,
        batch_bytes=handle.settings.batch_size,
        compression=handle.settings.compression,
        allowed=frozenset(t for t in (options.topic, *options.extra_topics) if t is not None),
    )
    rows.sparkSession.conf.set(ARROW_BYTES_SETTING, str(ARROW_BYTES))
    if needs_no_shuffle(rows, options):
        fewest = min(topic.partitions for topic in targets.topics)
        task = direct_task(handle, Routing(**{**routing.__dict__, "partitioner": SPREAD}), options.precautions)
        job = rows.coalesce(fewest).mapInArrow(task, REPORT_COLUMNS)
    else:
        tasks = write_tasks(rows, targets)
        blobs = rows.mapInArrow(encode_task(routing), BLOB_COLUMNS)
        shuffled = blobs.repartitionById(tasks, blobs["target"])
        job = shuffled.mapInArrow(write_task(handle, targets, options.precautions), REPORT_COLUMNS)
    return collected(job)


def needs_no_shuffle(rows: Any, options: SinkOptions) -> bool:
    """Without keys and given partitions any task may have any partition, so each keeps one to itself."""
    return options.partitioner == SPREAD or not {"key", "partition"} & set(rows.columns)


def write_tasks(rows: Any, targets: Targets) -> int:
    """One task per partition, but not many more than can run at once: a task costs more than a partition."""
    slots: int = rows.sparkSession.sparkContext.defaultParallelism
    return max(1, min(targets.count, 2 * slots))


def collected(job: Any) -> list[Report]:
    try:
        return [Report(*row) for row in job.collect()]
    except Exception as error:
        if "SPARK_JOB_CANCELLED" in str(error) or "InterruptedException" in str(error):
            raise Cancelled(str(error)[:500]) from error
        raise
