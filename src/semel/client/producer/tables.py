"""Arrow tables to batches: which row goes to which partition, and rows to columns. Loads numpy and pyarrow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from semel.client.errors import ConfigError, RecordTooLargeError
from semel.client.producer.batches import RECORD_OVERHEAD_BYTES, Row
from semel.client.settings import ProducerSettings
from semel.protocol.arrow_numbers import binaries, filled, to_arrow, valid
from semel.protocol.batch import HEADER_SIZE
from semel.protocol.columns import ColumnEncoder
from semel.protocol.columns_encode import milliseconds
from semel.protocol.partitioning import partitions_for_keys

COLUMNS = ("key", "value", "headers", "timestamp", "partition")
SLICE_BYTES = 16 * 1024 * 1024  # of a table that are encoded together; what is encoded waits in memory
NO_LIMIT = 2**31 - 2**17

Rows = slice | npt.NDArray[np.int64]


class TableBatch(NamedTuple):
    """An encoded batch and the rows of the table that are in it."""

    partition: int
    data: memoryview
    record_count: int
    rows: Rows


class TablePart(NamedTuple):
    """Rows of a small table that wait for others to share their batch."""

    key: pa.Array | None
    value: pa.Array | None
    timestamp: pa.Array | int
    row_count: int
    size_bytes: int  # that they take in a batch, at most

    @property
    def kind(self) -> tuple[Any, ...]:
        """Parts of one kind can be put together."""
        columns = (self.key, self.value, self.timestamp)
        return tuple(getattr(column, "type", None) for column in columns)


def checked_table(table: Any) -> pa.Table:
    """The table as pyarrow.Table, with columns that are known and of the right kind."""
    if isinstance(table, pa.RecordBatch):
        table = pa.Table.from_batches([table])
    if not isinstance(table, pa.Table):
        raise ConfigError(f"send_table takes a pyarrow.Table or RecordBatch, not {type(table).__name__}")
    unknown = [name for name in table.column_names if name not in COLUMNS]
    if unknown:
        raise ConfigError(f"send_table does not know the columns {unknown}; it takes {', '.join(COLUMNS)}")
    if len(set(table.column_names)) < table.num_columns:
        raise ConfigError(f"send_table takes each column once, not {', '.join(table.column_names)}")
    if not {"key", "value"} & set(table.column_names):
        raise ConfigError("send_table needs a column 'value' or 'key'")
    for name in ("key", "value"):
        if name in table.column_names and not is_bytes(table.schema.field(name).type):
            raise ConfigError(
                f"column {name!r} has type {table.schema.field(name).type}; expected binary or string: cast it first"
            )
    if "partition" in table.column_names and not pa.types.is_integer(table.schema.field("partition").type):
        raise ConfigError(f"column 'partition' has type {table.schema.field('partition').type}; expected an integer")
    if "timestamp" in table.column_names:
        kind = table.schema.field("timestamp").type
        if not (pa.types.is_integer(kind) or pa.types.is_timestamp(kind) or pa.types.is_null(kind)):
            raise ConfigError(f"column 'timestamp' has type {kind}; expected a timestamp or milliseconds as an integer")
    return table


def is_bytes(kind: pa.DataType) -> bool:
    plain = (pa.binary(), pa.string(), pa.large_binary(), pa.large_string(), pa.binary_view(), pa.string_view())
    return kind in plain or bool(pa.types.is_null(kind) or pa.types.is_fixed_size_binary(kind))


@dataclass
class TableEncoder:
    """Turns slices of one table into batches. `sticky(bytes)` names the partition for that many bytes without a key."""

    table: pa.Table
    partition_count: int
    sticky: Callable[[int], int]
    settings: ProducerSettings
    batch_size: int
    base_timestamp: int | None = None
    sealed: bool = True
    now_ms: int = field(default_factory=lambda: int(time.time() * 1000))

    @property
    def is_small(self) -> bool:
        """Whether the rows should wait for others. Headers are encoded at once, as their errors must be raised."""
        table = self.table
        size_bytes = int(table.nbytes) + table.num_rows * RECORD_OVERHEAD_BYTES + HEADER_SIZE
        return (
            size_bytes <= min(self.batch_size, self.settings.max_request_size) and "headers" not in table.column_names
        )

    def parts(self) -> Iterator[tuple[int, TablePart, Rows]]:
        """(partition, rows, which rows of the table they are) of a small table."""
        table = self.table
        if not table.num_rows:
            return
        columns = {name: _one_chunk(table.column(name)) for name in table.column_names}
        stamps = self._timestamps(columns.get("timestamp"))
        rows, groups = self._route(table, columns)
        at = 0
        for partition, count in groups:
            chosen: Rows = slice(at, at + count) if rows is None else rows[at : at + count]
            key, value, timestamp = (
                _rows_of(column, chosen) for column in (columns.get("key"), columns.get("value"), stamps)
            )
            size_bytes = sum(0 if column is None else int(column.nbytes) for column in (key, value))
            yield partition, TablePart(key, value, timestamp, count, size_bytes + count * RECORD_OVERHEAD_BYTES), chosen
            at += count

    def batches(self) -> Iterator[TableBatch]:
        """All batches, encoded slice by slice as they are taken."""
        count = self.table.num_rows
        if not count:
            return
        row_bytes = max(1, self.table.nbytes // count)
        slice_bytes = max(SLICE_BYTES, self.partition_count * self.batch_size)
        step = max(1, slice_bytes // row_bytes)
        for start in range(0, count, step):
            yield from self._encode(start, self.table.slice(start, step))

    def _encode(self, start: int, part: pa.Table) -> Iterator[TableBatch]:
        columns = {name: _one_chunk(part.column(name)) for name in part.column_names}
        encoder = ColumnEncoder(
            columns.get("value"), columns.get("key"), columns.get("headers"), self._timestamps(columns.get("timestamp"))
        )
        rows, groups = self._route(part, columns)
        encoded = encoder.encode_groups(
            rows,
            [count for _, count in groups],
            [-1] * len(groups),
            compression=self.settings.compression,
            max_batch_bytes=min(self.batch_size, self.settings.max_request_size),
            base_timestamp=self.base_timestamp,
            sealed=self.sealed,
        )
        at, max_bytes = 0, self.settings.max_request_size
        for (partition, _), batches in zip(groups, encoded, strict=True):
            for batch in batches:
                if len(batch.buffer) > max_bytes:
                    raise RecordTooLargeError(
                        f"row {start + at} takes {len(batch.buffer)} bytes in a batch; max.request.size is "
                        f"{max_bytes}: raise it (and the topic's max.message.bytes), or write smaller rows"
                    )
                end = at + batch.record_count
                in_table = slice(start + at, start + end) if rows is None else rows[at:end] + start
                yield TableBatch(partition, batch.buffer, batch.record_count, in_table)
                at = end

    def _timestamps(self, column: Any) -> Any:
        """A column of milliseconds, or one number for all rows. Rows without a time have that of now."""
        if column is None or pa.types.is_null(column.type):
            return self.now_ms
        try:
            if not column.null_count:
                return to_arrow(milliseconds(column))
            stamps = np.full(len(column), self.now_ms, np.int64)
            stamps[valid(column)] = milliseconds(column.drop_null())
            return to_arrow(stamps)
        except pa.ArrowInvalid as error:
            raise ConfigError(
                f"column 'timestamp' has a time that is no 64-bit number of milliseconds: {error}"
            ) from None

    def _route(
        self, part: pa.Table, columns: dict[str, Any]
    ) -> tuple[npt.NDArray[np.int64] | None, list[tuple[int, int]]]:
        """(rows in the order of their partitions, [(partition, how many)]); None for rows as they are."""
        if self.partition_count == 1 and "partition" not in columns:
            return None, [(0, part.num_rows)]
        partitions = self._partitions(columns, part.num_rows)
        if partitions is None:
            return None, self._sticky_runs(part, part.num_rows)
        keyless = partitions < 0
        if keyless.any():
            rows = np.flatnonzero(keyless)
            at = 0
            for partition, count in self._sticky_runs(part, len(rows)):
                partitions[rows[at : at + count]] = partition
                at += count
        counts = np.bincount(partitions, minlength=self.partition_count)
        used = np.flatnonzero(counts)
        groups = [(int(partition), int(counts[partition])) for partition in used]
        if len(groups) == 1:
            return None, groups
        smallest = (
            partitions.astype(np.uint8 if self.partition_count <= 256 else np.uint16)
            if (self.partition_count <= 65536)
            else partitions
        )
        return np.argsort(smallest, kind="stable"), groups  # small integers are sorted by radix, in linear time

    def _partitions(self, columns: dict[str, Any], count: int) -> npt.NDArray[np.int64] | None:
        """The partition of every row, -1 where neither the row nor its key says; None if that is so for all."""
        chosen, key = columns.get("partition"), columns.get("key")
        hashed = None if key is None or key.null_count == len(key) else partitions_for_keys(key, self.partition_count)
        if chosen is None or chosen.null_count == len(chosen):
            return None if hashed is None else hashed.astype(np.int64)
        given = filled(chosen.cast(pa.int64()), -1)
        is_valid = valid(chosen)
        wrong = is_valid & ((given < 0) | (given >= self.partition_count))
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise ConfigError(
                f"column 'partition' names partition {given[row]}; the topic has 0 to {self.partition_count - 1}"
            )
        return np.where(is_valid, given, -1 if hashed is None else hashed)

    def _sticky_runs(self, part: pa.Table, count: int) -> list[tuple[int, int]]:
        """Rows without a key, a batch's worth at a time to one partition."""
        if self.partition_count == 1:
            return [(0, count)]
        per_row = max(1, part.nbytes // max(part.num_rows, 1)) + 8
        step = max(1, self.batch_size // per_row)
        runs: list[tuple[int, int]] = []
        for start in range(0, count, step):
            size = min(step, count - start)
            partition = self.sticky(size * per_row)
            if runs and runs[-1][0] == partition:
                runs[-1] = (partition, runs[-1][1] + size)
            else:
                runs.append((partition, size))
        return runs


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _rows_of(column: Any, rows: Rows) -> Any:
    """Some rows of a column; what is no column stays as it is."""
    if not isinstance(column, pa.Array):
        return column
    return column[rows] if isinstance(rows, slice) else column.take(to_arrow(rows))


def encode_parts(parts: Sequence[TablePart], compression: int) -> memoryview:
    """Parts of one kind to one batch."""
    key, value, stamps = (_put_together([part[number] for part in parts], parts) for number in range(3))
    encoder = ColumnEncoder(value, key, None, stamps)
    (batch,) = encoder.encode(compression=compression, max_batch_bytes=NO_LIMIT, max_batch_records=NO_LIMIT)
    return batch.buffer


def _put_together(columns: list[Any], parts: Sequence[TablePart]) -> Any:
    first = columns[0]
    if isinstance(first, pa.Array):
        return first if len(columns) == 1 else pa.concat_arrays(columns)
    if first is None or columns.count(first) == len(columns):
        return first
    return np.repeat(np.array(columns, np.int64), [part.row_count for part in parts])


def encode_row_columns(rows: Sequence[Row], compression: int) -> memoryview:
    """Rows without headers to one batch, by columns."""
    keys, values, timestamps, _ = zip(*rows, strict=True)
    stamps: Any = timestamps[0]
    if timestamps[-1] != stamps or timestamps.count(stamps) != len(timestamps):
        stamps = to_arrow(np.array(timestamps, np.int64))
    key = None if keys[0] is None and keys.count(None) == len(keys) else binaries(keys)
    encoder = ColumnEncoder(binaries(values), key, None, stamps)
    (batch,) = encoder.encode(compression=compression, max_batch_bytes=NO_LIMIT, max_batch_records=NO_LIMIT)
    return batch.buffer
