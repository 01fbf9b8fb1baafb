"""What a task of `format("semel")` does, in batch jobs and in streams: encode its rows and write them, partition by
partition. Unlike the sink, a writer cannot bring the rows of a partition to one task; it notices if they are not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from semel.client.producer.handle import TransactionHandle
from semel.spark.columns import KNOWN, ColumnError
from semel.spark.encoding import Encoder
from semel.spark.sink_options import HASH, SinkOptions
from semel.spark.targets import Targets
from semel.spark.workers import settle_worker
from semel.spark.write_job import routing_of
from semel.spark.writing import BlobWriter, OwnerStalledError, Precautions, Report, task_identity

PATIENCE_S = 5.0  # the partition may belong to an attempt that Spark is about to end, or to another task for good


def write_rows(
    batches: Iterator[Any], options: SinkOptions, targets: Targets, batch_id: int, handle: TransactionHandle
) -> list[Report]:
    """Writes the rows of this task into the transaction and says what went where."""
    settle_worker()
    task, mark = task_identity()
    encoder = Encoder(routing_of(options, targets, batch_id, handle.settings), task)
    with handle.writer() as writer:
        out = BlobWriter(writer, targets, mark, Precautions(patience_s=PATIENCE_S))
        try:
            for blob in encoder.blobs(chosen_columns(batch, options) for batch in batches):
                out.write(blob)
        except OwnerStalledError as error:
            raise OwnerStalledError(
                f"{error}. If this comes again at every start, rows of one partition are in several tasks: use "
                "semel.route(df, ...)"
            ) from error
        return list(out.report())


def chosen_columns(batch: Any, options: SinkOptions) -> Any:
    """The columns that are written, keys and values as bytes. A topic column counts where there are several topics."""
    import pyarrow as pa

    columns = {}
    for name in KNOWN:
        if name in batch.schema.names and (name != "topic" or options.extra_topics):
            column = batch.column(name)
            columns[name] = column.cast(pa.binary()) if name in ("key", "value") else column
    if "partition" in columns:
        columns["partition"] = columns["partition"].cast(pa.int32())
    if options.bad_column is not None:
        columns["bad"] = batch.column(options.bad_column)
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def check_routed(types: dict[str, str], options: SinkOptions) -> None:
    """Spark's hash is computed by Spark, so before the writer."""
    if options.partitioner == HASH and "key" in types and "partition" not in types:
        raise ColumnError(
            'partitioner=hash needs a column partition: use semel.route(df, ..., partitioner="hash") before write'
        )
