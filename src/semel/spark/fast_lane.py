"""The fast lane: a step that is nothing but a Python function on Arrow tables, without a record crossing the JVM.

    query = (
        semel.table_pipeline(spark, source={"subscribe": "in"}, function=clean, sink=sink)
        .option("checkpointLocation", path).trigger(availableNow=True).start()
    )

Spark plans, schedules, retries and checkpoints as always, but the rows it sees are ranges of offsets. A task takes its
ranges, fetches them, calls the function, encodes what it returns and produces it, all in one Python worker. Output goes
to the partition with the number of the source's, unless `by_key=True` asks for the key's; then the encoded batches, not
the records, go through one shuffle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from semel.client.producer.handle import TransactionHandle
from semel.client.settings import common_options
from semel.spark.base_sink import BaseSink
from semel.spark.encoding import (
    BLOB_COLUMNS,
    BadRowError,
    Encoder,
    Routing,
    Targets,
    TargetTopic,
    filled_times,
    routing_of,
)
from semel.spark.ledger import MicroBatch
from semel.spark.offsets import Range
from semel.spark.options import OptionError, SourceOptions
from semel.spark.postgres_sink import DecidedSink, PostgresSink
from semel.spark.range_tasks import FunctionError, Step, TableFunction, planned, ranges_task
from semel.spark.sink import Sink
from semel.spark.sink_options import Precautions, SinkOptions
from semel.spark.stages import ENCODE, stage
from semel.spark.write_job import careful, collected, write_tasks, written
from semel.spark.writing import Blob, Report, failure_report, mapped, to_batches, write_blobs

# What a function may return beside value, key, headers and timestamp, and what it needs to be obeyed.
SENT_ELSEWHERE = {
    "partition": "by_key=True",
    "topic": "a sink with topics=[...]",
    "bad": "a sink with a dead_letter_topic",
}


def table_pipeline(
    spark: Any,
    *,
    source: Mapping[str, Any],
    sink: Sink | PostgresSink,
    function: TableFunction | None = None,
    by_key: bool = False,
) -> Any:
    """A DataStreamWriter: give it a checkpoint location and a trigger, and start it.

    source    options of `format("semel")`; brokers and security are the sink's unless kafka.bootstrap.servers is given
    sink      a `semel.sink`, or a `semel.postgres_sink`
    function  pyarrow.Table -> pyarrow.Table, or None for no rows; without one rows are copied. It gets key, value,
              headers, offset and timestamp (milliseconds), and returns value and, where there are any, key, headers and
              timestamp; for a `semel.postgres_sink` the columns of its table, always of the same types. It must be
              deterministic: a task may run it again
    by_key    True: rows go where Kafka's partitioner puts their key; False: to the partition they came from
    """
    if isinstance(sink, BaseSink) and sink.is_used:
        raise OptionError(
            "the sink belongs to a query or table pipeline that was made before, which would go on with this function "
            "and this source; make a new sink for every pipeline, and for every start"
        )
    options = {k: str(v) for k, v in source.items()}
    if isinstance(sink, PostgresSink):
        _check_table_sink(sink, options, function, by_key)
        sink.step = Step(SourceOptions.parse(options, streaming=True), function)
    else:
        _check_topic_sink(sink)
        if "kafka.bootstrap.servers" not in options:
            same = {"bootstrap.servers": sink.options.bootstrap_servers, **common_options(sink.options.client)}
            options = {**{f"kafka.{name}": str(value) for name, value in same.items()}, **options}
        step = Step(SourceOptions.parse(options, streaming=True), function, by_key, sink.options.bad_column)
        sink.job = partial(write_ranges, step)
    ranges = spark.readStream.format("semel").options(**options, emit="ranges").load()
    sink.is_used = True
    return ranges.writeStream.foreachBatch(sink)


def _check_topic_sink(sink: Any) -> None:
    if not isinstance(sink, Sink):
        raise OptionError("the fast lane is exactly_once; make the sink without another guarantee")
    if sink.options.topic is None:
        raise OptionError("the fast lane needs a sink with topic=..., where rows go that name none themselves")


def _check_table_sink(
    sink: PostgresSink, options: Mapping[str, str], function: TableFunction | None, by_key: bool
) -> None:
    if isinstance(sink, DecidedSink):
        raise OptionError(
            "the fast lane writes to topics or to a table; for both use writeStream.foreachBatch(sink) with the "
            "DataFrame of the source"
        )
    if function is None:
        raise OptionError("the fast lane to a table needs a function, which makes the table's columns out of records")
    if by_key:
        raise OptionError("by_key says to which partition rows go, and a table has none; leave it out")
    if "kafka.bootstrap.servers" not in options:
        raise OptionError("source lacks kafka.bootstrap.servers: the brokers that are read; the sink has a database")


def write_ranges(
    step: Step, df: Any, options: SinkOptions, targets: Targets, batch: MicroBatch, handle: TransactionHandle
) -> list[Report]:
    """In place of a `WriteJob`. The ranges of a batch are in the offset log, so the driver deals them out to tasks by
    itself: one stage, no shuffle, and the source's tasks need not run."""
    wanted = planned(batch, step.source)
    if not wanted:
        return []
    session = df.sparkSession
    routing = routing_of(options, targets, batch.batch_id, handle.settings)
    precautions = careful(options.precautions, session)
    if step.by_key or len(targets.topics) > 1:
        dealt = [[(r, -1)] for r in wanted]
        tasks = session.range(0, len(dealt), 1, len(dealt))  # each with one row that nobody reads
        blobs = mapped(tasks, _encode_ranges(step, routing, dealt), BLOB_COLUMNS)
        return written(blobs, write_tasks(df, targets), targets, handle, precautions)
    dealt = _by_target(wanted, targets.topics[targets.index(options.topic)], write_tasks(df, targets))
    job = _copy_ranges(step, handle, routing, precautions, dealt)
    # As an RDD: planning SQL would take longer than it runs.
    tasks = session.sparkContext.parallelize(range(len(dealt)), len(dealt))
    return collected(tasks.mapPartitions(job))  # no stage before it: no reruns


Dealt = list[list[tuple[Range, int]]]  # for every task: ranges and the target of each


def _by_target(wanted: list[Range], topic: TargetTopic, tasks: int) -> Dealt:
    """The ranges that belong to a target partition are all in one task, in the order of their offsets."""
    by_target: dict[int, list[tuple[Range, int]]] = {}
    for r in sorted(wanted):
        target = topic.first + r.partition % topic.partitions
        by_target.setdefault(target, []).append((r, target))
    groups = list(by_target.values())
    return [[pair for group in groups[n::tasks] for pair in group] for n in range(min(tasks, len(groups)))]


def _copy_ranges(
    step: Step, handle: TransactionHandle, routing: Routing, precautions: Precautions, dealt: Dealt
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """One worker does everything, and returns rows of REPORT_COLUMNS."""

    def copied(number: int) -> Iterator[Any]:
        blobs = _range_blobs(step, routing, dealt[number])
        try:
            yield from write_blobs(handle, routing.targets, precautions, blobs)
        except BadRowError as error:
            yield failure_report(error)

    return ranges_task("copy", copied)


def _tables(step: Step, wanted: Range, *, views: bool = False) -> Iterator[Any]:
    for result in step.results(wanted, views=views):
        yield writable(result, step.bad_column, views=views)


def _range_blobs(step: Step, routing: Routing, dealt: list[tuple[Range, int]]) -> Iterator[Blob]:
    opened: set[int] = set()
    for wanted, target in dealt:
        for table in _tables(step, wanted, views=True):
            yield from _encoded(_sendable(table, routing), target, routing, target not in opened)
            opened.add(target)


def _encode_ranges(step: Step, routing: Routing, dealt: Dealt) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """For rows that may go to any partition: encoded here, written behind a shuffle. One range for each task."""

    def encoded(number: int) -> Iterator[Any]:
        [(wanted, _)] = dealt[number]
        encoder = Encoder(routing, number, None if step.by_key else wanted.partition)
        batches = (batch for table in _tables(step, wanted) for batch in table.to_batches())
        yield from to_batches(encoder.blobs(batches))

    return ranges_task("encode", encoded)


def _sendable(table: Any, routing: Routing) -> Any:
    """Checked, and with a timestamp for every row."""
    import numpy as np

    from semel.protocol.arrow_numbers import to_arrow

    columns = {name: table.column(name) for name in table.column_names}
    _refuse_elsewhere(columns)
    _refuse_too_large(columns, routing)
    if "timestamp" in columns:
        times = filled_times(columns["timestamp"], routing.timestamp_ms)
        return table.set_column(table.column_names.index("timestamp"), "timestamp", times)
    return table.append_column("timestamp", to_arrow(np.full(table.num_rows, routing.timestamp_ms, np.int64)))


def _encoded(table: Any, target: int, routing: Routing, is_first: bool) -> Iterator[Blob]:
    """The rows as blobs; the first row of a partition as one of its own (see `Encoder.blobs`)."""
    from semel.protocol.columns_encode import ColumnEncoder

    counts = [1, table.num_rows - 1] if is_first and table.num_rows > 1 else [table.num_rows]
    columns = {name: table.column(name) for name in table.column_names}
    with stage(ENCODE):
        encoder = ColumnEncoder(columns["value"], columns.get("key"), columns.get("headers"), columns["timestamp"])
        groups = encoder.encode_groups(
            None, counts, [0] * len(counts), compression=routing.compression, max_batch_bytes=routing.batch_bytes
        )
    for batch in (batch for group in groups for batch in group):
        yield target, batch.record_count, 0, batch.buffer


def _refuse_elsewhere(columns: Mapping[str, Any]) -> None:
    """A task that keeps to its partition cannot send rows to others."""
    for name, needed in SENT_ELSEWHERE.items():
        if name in columns:
            raise FunctionError(f"the function returned a column {name!r}, which needs {needed}")


def _refuse_too_large(columns: Mapping[str, Any], routing: Routing) -> None:
    largest = sum(_longest(columns[name]) for name in ("key", "value") if name in columns)
    if largest > routing.max_record_bytes:
        raise BadRowError(
            f"a record of up to {largest} bytes is larger than max_request_size allows ({routing.max_record_bytes}); "
            "raise it, or give the sink a dead_letter_topic"
        )


def _longest(column: Any) -> int:
    """Bytes of the longest value."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    if column.type not in (pa.binary_view(), pa.string_view()):
        return pc.max(pc.binary_length(column)).as_py() or 0
    longest = 0
    for chunk in column.chunks:
        if len(chunk):  # views have 16 bytes each, the length first
            lengths = np.frombuffer(chunk.buffers()[1], np.int32)[::4]
            longest = max(longest, int(lengths[chunk.offset : chunk.offset + len(chunk)].max()))
    return longest


# --- what a function may return ---
def writable(table: Any, bad_column: str | None = None, *, views: bool = False) -> Any:
    """The columns that are written, in the types that the encoder takes; with `views`, keys and values may be such."""
    import pyarrow as pa

    from semel.client.producer.tables import is_bytes
    from semel.protocol.columns_encode import check_headers_type

    if "value" not in table.column_names:
        raise FunctionError(f"the function returned columns {table.column_names}; a column 'value' is needed")
    known = ("key", "value", "headers", "timestamp", *SENT_ELSEWHERE)
    columns = {name: table.column(name) for name in known if name in table.column_names}
    for name in ("key", "value"):
        if name in columns and not is_bytes(columns[name].type):
            raise FunctionError(
                f"the function returned a column {name!r} of type {columns[name].type}, expected binary or string"
            )
    if bad_column is not None and bad_column in table.column_names:
        columns["bad"] = table.column(bad_column)
    columns = {name: _with_type(name, column, views) for name, column in columns.items()}
    if "headers" in columns:
        check_headers_type(columns["headers"].type)
    if "partition" in columns and not pa.types.is_integer(columns["partition"].type):
        raise FunctionError(
            f"the function returned a column 'partition' of type {columns['partition'].type}, expected an integer"
        )
    return pa.table(columns)


def _with_type(name: str, column: Any, views: bool) -> Any:
    """A column without a value has no type in Arrow: a list of keys that are all None, say. It gets the one that its
    name asks for."""
    import pyarrow as pa

    header = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])
    if pa.types.is_null(column.type):
        others = {"headers": pa.list_(header), "timestamp": pa.timestamp("ms"), "partition": pa.int64()}
        kind = others.get(name, pa.string() if name in ("topic", "bad") else pa.binary())
        return pa.chunked_array([pa.nulls(len(column), kind)])
    if not views and name in ("key", "value"):
        plain = {pa.binary_view(): pa.binary(), pa.string_view(): pa.string()}
        return column.cast(plain.get(column.type, column.type))
    return column
