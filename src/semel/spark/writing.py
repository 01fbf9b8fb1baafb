"""Record batches to partitions, after the shuffle: what the second half of a write job does in every task.

A task opens each partition with a small batch that carries its mark, reads the mark back, and writes on only if it is
its own. Spark may run a task twice at once (speculation, an executor that was given up but lives); of all attempts
exactly one gets a partition. Another one waits to be killed: if it failed, four such copies would fail a healthy job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from semel import faults
from semel.client.producer.handle import PartitionWriter, PlainHandle, TransactionHandle
from semel.sinks.postgres.errors import DatabaseFatalError, FencedInDatabaseError, RowRefusedError
from semel.spark.encoding import BadRowError, Encoder, Routing, Targets, routing_of
from semel.spark.sink_options import Precautions, SinkOptions, written_columns
from semel.spark.stages import FROM_SPARK, PRODUCE, pulled, stage, task
from semel.spark.workers import settle_worker, worker_cluster

REPORT_COLUMNS = (
    "target integer, count long, dead long, first long, last long, sequence integer, mark long, "
    "failure string, message string"
)
FAILED_BLOB = -1  # in place of a record count: the blob has the message of a BadRowError
LOOK_AGAIN_S = 0.5
TASK_BITS = 20
WRITER_WAIT_S = 5.0  # the partition may belong to an attempt that Spark is about to end, or to another task for good

ROWS_OF_TASKS = (
    "Use semel.route(df, ...) before write, or partitioner=none and coalesce() to at most the number of partitions"
)
LETTERS_OF_TASKS = (
    "These are dead letters, and several tasks have bad rows: give the dead-letter topic at least as many partitions "
    "as the output topic (semel.route makes as many tasks), or write with foreachBatch(semel.sink(...)), which does "
    "not need them"
)

Handle = TransactionHandle | PlainHandle
Blob = tuple[int, int, int, memoryview]
Keep = Callable[[Iterator[Blob], int], int]  # pulls blobs, keeps a copy of each under a mark, says how many there were


class OwnerStalledError(RuntimeError):
    """Another attempt opened the partition first and then stopped writing."""


class WrongTaskError(RuntimeError):
    """Rows of one partition are in two tasks."""


class Report(NamedTuple):
    """What the winning attempt wrote into one partition, or why a task wrote nothing. Rows of REPORT_COLUMNS.

    A failure that the driver acts upon comes as a report, not as an exception: of that Spark would keep only a text,
    log it as an error, run the task again in vain, and end other tasks in the middle of their partitions.
    """

    target: int
    rows: int
    dead: int
    first: int
    last: int
    sequence: int
    mark: int
    failure: str = ""  # a name in FAILURES
    message: str = ""


# Failures that tasks report, with what the driver raises; the first of several is the reason.
FAILURES: dict[str, type[Exception]] = {
    "bad row": BadRowError,
    "wrong task": WrongTaskError,
    "owner stalled": OwnerStalledError,
    "fenced in the database": FencedInDatabaseError,
    "row refused": RowRefusedError,
    "database": DatabaseFatalError,
}
DATABASE_FAILURES = (FencedInDatabaseError, RowRefusedError, DatabaseFatalError)  # another try would not help


# In place of a failure:
RETRIED = "retried"  # the report comes from an attempt that is not the first of its task
COPIED = "copied"  # `rows` is the number of record batches in the staging table of the attempt


def retried_report() -> Report:
    return Report(-1, 0, 0, -1, -1, -1, 0, RETRIED)


def copied_report(batches: int, mark: int) -> Report:
    return Report(-1, batches, 0, -1, -1, -1, mark, COPIED)


def failure_report(error: Exception) -> Report:
    name = next(name for name, kind in FAILURES.items() if isinstance(error, kind))
    return Report(-1, 0, 0, -1, -1, -1, 0, name, str(error))


def raise_failures(reports: Sequence[Report]) -> None:
    """Raises what a task reported instead of rows."""
    for name, kind in FAILURES.items():
        message = next((report.message for report in reports if report.failure == name), None)
        if message is not None:
            raise kind(message)


class BlobWriter:
    """Writes blobs into a transaction and remembers what went where."""

    def __init__(self, writer: PartitionWriter, targets: Targets, mark: int, precautions: Precautions) -> None:
        self._writer = writer
        self._targets = targets
        self._mark = mark
        self._handshake = precautions.handshake
        self._wait_s = precautions.wait_s
        self._dead: dict[int, int] = {}
        self._opened: set[int] = set()

    def write(self, blob: Blob) -> None:
        target, count, is_dead, data = blob
        topic, partition = self._targets.place(target)
        self._dead[target] = self._dead.get(target, 0) + count * is_dead
        is_open = target in self._opened or not self._handshake
        self._opened.add(target)
        if is_open:
            self._writer.write_encoded(topic, partition, data, count)
        else:
            self._open(topic, partition, data, is_dead)

    def written(self, blobs: Iterator[Blob]) -> Iterator[Blob]:
        """The blobs, each when it is written."""
        for blob in blobs:
            with stage(PRODUCE):
                self.write(blob)
            yield blob

    def _open(self, topic: str, partition: int, data: memoryview, is_dead: int) -> None:
        """The first row of a partition comes by itself (see `Encoder.blobs`), so little is encoded twice."""
        from semel.protocol.columns_decode import decode_record_set

        table = decode_record_set(data, headers=True).table.select(["key", "value", "headers", "timestamp"])
        self._shake_hands(topic, partition, table.slice(0, 1), LETTERS_OF_TASKS if is_dead else ROWS_OF_TASKS)
        if table.num_rows > 1:
            self._writer.write(topic, partition, table.slice(1))

    def _shake_hands(self, topic: str, partition: int, row: Any, advice: str) -> None:
        compression = self._targets.compression(topic)
        opening = self._writer.open(topic, partition, row, self._mark, compression=compression)
        if not opening.is_owner:
            if opening.mark > 0 and task_of(opening.mark) != task_of(self._mark):
                raise WrongTaskError(
                    f"rows for {topic}-{partition} are in more than one task, but in a transaction one task writes a "
                    f"partition. {advice}"
                )
            self._wait_to_be_killed(topic, partition)
        faults.hit("task.after_opening")

    def _wait_to_be_killed(self, topic: str, partition: int) -> None:
        """Spark kills the attempt that it does not need. Raises only if the one that it needs makes no progress."""
        last, since_s = None, time.monotonic()
        while time.monotonic() - since_s < self._wait_s:
            time.sleep(LOOK_AGAIN_S)
            sequence = self._writer.last_sequence(topic, partition)
            if sequence != last:
                last, since_s = sequence, time.monotonic()
        raise OwnerStalledError(
            f"another attempt at this task opened {topic}-{partition} first and has written nothing since "
            f"{self._wait_s:.0f} s; the batch will be aborted and run again"
        )

    def report(self) -> Iterator[Report]:
        numbers = {self._targets.place(target): target for target in self._dead}
        for topic, partition, count, first, last, sequence in self._writer.finish():
            target = numbers[topic, partition]
            yield Report(target, count, self._dead[target], first, last, sequence, self._mark)


def write_rows(
    batches: Iterator[Any], options: SinkOptions, targets: Targets, batch_id: int, handle: TransactionHandle
) -> list[Report]:
    """Writes the rows of this task into the transaction and says what went where."""
    settle_worker()
    number, _ = task_identity()
    encoder = Encoder(routing_of(options, targets, batch_id, handle.settings), number)
    blobs = encoder.blobs(written_columns(batch, options) for batch in batches)
    try:
        return write_blobs(handle, targets, Precautions(wait_s=WRITER_WAIT_S), blobs)
    except OwnerStalledError as error:
        raise OwnerStalledError(
            f"{error}. If this comes again at every start, rows of one partition are in several tasks: use "
            "semel.route(df, ...)"
        ) from error


def encode_task(routing: Routing) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """For mapInArrow: rows in, blobs out."""

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        settle_worker()
        number, _ = task_identity()
        yield from task("encode", to_batches(Encoder(routing, number).blobs(batches)))
        drained(batches)

    return run


def write_task(
    handle: TransactionHandle, targets: Targets, precautions: Precautions, keep: Keep | None = None
) -> Callable[..., Iterator[Any]]:
    """For mapInArrow: blobs in, one report row per partition out."""
    reported = (BadRowError, *DATABASE_FAILURES)

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        settle_worker()
        yield from task("write", _reports(handle, targets, precautions, _from_batches(batches), reported, keep))
        drained(batches)

    return run


def direct_task(
    handle: Handle,
    routing: Routing,
    precautions: Precautions,
    *,
    only_once: bool = False,
    is_guess: bool = False,
    keep: Keep | None = None,
) -> Callable[..., Iterator[Any]]:
    """For mapInArrow where no shuffle is needed: rows in, one report row per partition out.

    `only_once`: an attempt that is not the first writes nothing, because the first may have written (at_most_once).
    `is_guess`: the rows are only believed to be where they belong; if they are not, the task reports that.
    """
    guessed = (WrongTaskError, OwnerStalledError) if is_guess else ()
    reported = (BadRowError, *guessed, *DATABASE_FAILURES)

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        settle_worker()
        if only_once and attempt_number() > 0:
            return
        number, _ = task_identity()
        blobs = Encoder(routing, number).blobs(batches)
        yield from task("write", _reports(handle, routing.targets, precautions, blobs, reported, keep))
        if attempt_number() > 0:
            yield from report_batches([retried_report()])
        drained(batches)

    return run


def mapped(rows: Any, task: Callable[[Iterator[Any]], Iterator[Any]], columns: str) -> Any:
    """rows.mapInArrow. The columns as types, in JSON's names: to read a text, PySpark asks the JVM three times."""
    from pyspark.sql.types import StructType

    schema = StructType()
    for name, kind in map(str.split, columns.split(", ")):
        schema.add(name, kind)
    return rows.mapInArrow(task, schema)


def drained(batches: Iterator[Any]) -> None:
    """Reads what Spark sends: a worker that leaves something unread is not used for another task."""
    for _ in batches:
        pass


def _reports(
    handle: Handle,
    targets: Targets,
    precautions: Precautions,
    blobs: Iterator[Blob],
    reported: tuple[type[Exception], ...],
    keep: Keep | None = None,
) -> Iterator[Any]:
    """Writes the blobs; yields the reports of all partitions, or of a failure that is reported."""
    try:
        reports = write_blobs(handle, targets, precautions, blobs, keep)
    except reported as error:
        reports = [failure_report(error)]
    yield from report_batches(reports)


def write_blobs(
    handle: Handle,
    targets: Targets,
    precautions: Precautions,
    blobs: Iterator[Blob],
    keep: Keep | None = None,
    mark: int | None = None,
) -> list[Report]:
    """Writes blobs under a mark, by default that of the attempt at a task that this runs in."""
    mark = task_identity()[1] if mark is None else mark
    with worker_cluster(handle.settings) as cluster, handle.writer(cluster) as writer:
        out = BlobWriter(writer, targets, mark, precautions)
        written = out.written(blobs)
        copied = 0
        if keep is None:
            drained(written)
        else:
            copied = keep(written, mark)
        with stage(PRODUCE):
            reports = [*out.report(), *([copied_report(copied, mark)] if copied else [])]
        faults.hit("task.after_rows")
    return reports


def task_identity() -> tuple[int, int]:
    """(number of the task in its stage, mark of this attempt: unique in the Spark application, and says the task)"""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None, "this function runs in a Spark task"
    task, attempt = context.partitionId(), context.taskAttemptId() + 1  # 0 could be anybody's base timestamp
    return task, attempt << TASK_BITS | task & (1 << TASK_BITS) - 1


def task_of(mark: int) -> int:
    return mark & (1 << TASK_BITS) - 1


def attempt_number() -> int:
    from pyspark import TaskContext

    context = TaskContext.get()
    return 0 if context is None else context.attemptNumber()


def to_batches(blobs: Iterator[Blob]) -> Iterator[Any]:
    """Blobs for the shuffle. A row that cannot be written is one, too: the task that reads it reports it."""
    try:
        for blob in blobs:
            yield blob_batch(*blob)
    except BadRowError as error:
        yield blob_batch(0, FAILED_BLOB, 0, memoryview(str(error).encode()))


def blob_batch(target: int, count: int, dead: int, data: memoryview) -> Any:
    import pyarrow as pa

    from semel.protocol.arrow_numbers import column

    schema = pa.schema([("target", pa.int32()), ("count", pa.int32()), ("dead", pa.int32()), ("data", pa.binary())])
    columns = [column([number], pa.int32()) for number in (target, count, dead)]
    offsets = pa.py_buffer(bytes(4) + len(data).to_bytes(4, "little"))
    blob = pa.Array.from_buffers(pa.binary(), 1, [None, offsets, pa.py_buffer(data)])
    return pa.RecordBatch.from_arrays([*columns, blob], schema=schema)


def _from_batches(batches: Iterator[Any]) -> Iterator[Blob]:
    for batch in pulled(batches, FROM_SPARK):
        targets, counts, dead = (batch.column(i).to_pylist() for i in range(3))
        data = batch.column(3)
        for i, (target, count, is_dead) in enumerate(zip(targets, counts, dead, strict=True)):
            blob = memoryview(data[i].as_buffer())
            if count == FAILED_BLOB:
                raise BadRowError(bytes(blob).decode())
            yield target, count, is_dead, blob


def report_batches(reports: Sequence[Report]) -> Iterator[Any]:
    import pyarrow as pa

    from semel.protocol.arrow_numbers import column

    kinds = [pa.int32(), *[pa.int64()] * 4, pa.int32(), pa.int64(), pa.string(), pa.string()]
    names = ["target", "count", "dead", "first", "last", "sequence", "mark", "failure", "message"]
    columns = [column([row[i] for row in reports], kind) for i, kind in enumerate(kinds)]
    yield pa.RecordBatch.from_arrays(columns, names=names)
