"""Record sets to Arrow columns, without a Python object per record.

The steps: `record_sets` says which batches are visible; `record_starts` finds where records start; then every field of
all records is read at once, and Arrow gathers keys and values out of the buffer in one call each.

Memory: beside what it returns, a call takes at most one decompressed batch, or RUN_BYTES of smaller ones, and a few
arrays for SLICE_ROWS records. `limit_bytes` bounds one batch, each of its records counted with RECORD_OVERHEAD_BYTES;
`max_bytes` ends the call early, so that a caller reads a large answer in parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from semel.protocol.batch import (
    DEFAULT_LIMIT_BYTES,
    HEADER_SIZE,
    RECORD_OVERHEAD_BYTES,
    TIMESTAMP_TYPE_BIT,
    BatchHeader,
    Buffer,
    check_header_count,
    read_body,
)
from semel.protocol.errors import CorruptBatchError
from semel.protocol.gathering import gather, views
from semel.protocol.headers_decode import HEADERS_TYPE, Headers, headers_array, read_headers
from semel.protocol.record_sets import AbortedTransactions, Progress, visible_batches
from semel.protocol.record_starts import Bodies, find_record_starts
from semel.protocol.vector_varints import Int64s, VarintReader

RUN_BYTES = 16 * 1024 * 1024  # of batches that are decoded together
SLICE_ROWS = 32 * 1024  # of records whose fields are read together: the numbers stay in the processor's cache
DEFAULT_MAX_BYTES = 1024 * 1024 * 1024


class Wanted(NamedTuple):
    """What a caller wants to have in its table."""

    start_offset: int
    headers: bool
    views: bool

    def schema(self) -> pa.Schema:
        payload = pa.binary_view() if self.views else pa.binary()
        fields = [
            pa.field("offset", pa.int64(), nullable=False),
            pa.field("timestamp", pa.int64(), nullable=False),
            pa.field("timestamp_type", pa.int8(), nullable=False),
            pa.field("key", payload),
            pa.field("value", payload),
        ]
        return pa.schema([*fields, pa.field("headers", HEADERS_TYPE)] if self.headers else fields)


SCHEMA = Wanted(0, headers=False, views=False).schema()
SCHEMA_WITH_HEADERS = Wanted(0, headers=True, views=False).schema()


class DecodedRecords(NamedTuple):
    """Records of one partition as columns, and where to go on.

    `table` has `offset`, `timestamp` (milliseconds), `timestamp_type` (0 CreateTime, 1 LogAppendTime), `key`, `value`
    and, if asked for, `headers` (null where a record has none)."""

    table: pa.Table
    next_offset: int  # where the next fetch starts; past what was left out, too
    bytes_read: int  # of the record set; what is left is a partial batch, or for another call (`max_bytes`)
    leader_epoch: int  # of the last batch, -1 if there was none


class _Run(NamedTuple):
    """Batches to decode together, and the buffer that holds their records."""

    headers: list[BatchHeader]
    data: npt.NDArray[np.uint8]
    starts: list[int]
    ends: list[int]


def decode_record_set(
    data: Buffer,
    *,
    start_offset: int = 0,
    aborted: AbortedTransactions | None = None,
    headers: bool = False,
    views: bool = False,
    limit_bytes: int = DEFAULT_LIMIT_BYTES,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> DecodedRecords:
    """The visible records of a fetch answer from `start_offset` on. `aborted` holds the answer's aborted transactions
    for read_committed, and is None for read_uncommitted.

    With `views`, keys and values are of type binary_view and stay in `data` (or in what was decompressed): nothing is
    copied, `data` is kept alive, and must not be changed. `ColumnEncoder` takes such columns as they are."""
    progress = Progress(start_offset)
    wanted = Wanted(start_offset, headers, views)
    batches: list[pa.RecordBatch] = []
    for run in _runs(data, progress, aborted, limit_bytes, max_bytes):
        batches += _decode_run(run, wanted, limit_bytes)
    table = pa.Table.from_batches(batches, wanted.schema())
    return DecodedRecords(table, progress.next_offset, progress.bytes_read, progress.leader_epoch)


def _runs(
    data: Buffer, progress: Progress, aborted: AbortedTransactions | None, limit_bytes: int, max_bytes: int
) -> Iterator[_Run]:
    """Visible batches in runs: neighbours that lie in `data` as they are, or decompressed ones, put together."""
    whole = np.frombuffer(data, np.uint8)
    plain: list[tuple[int, BatchHeader]] = []
    unpacked: list[tuple[memoryview, BatchHeader]] = []
    run_bytes = total_bytes = 0
    for at, header in visible_batches(data, progress, aborted, limit_bytes):
        if total_bytes and total_bytes + header.size > max_bytes:
            break
        body = read_body(data, header, at, limit_bytes)
        if not header.record_count:
            continue
        batch_bytes = len(body) + header.record_count * RECORD_OVERHEAD_BYTES
        total_bytes += batch_bytes
        if (
            (plain and header.compression)
            or (unpacked and not header.compression)
            or run_bytes + batch_bytes > RUN_BYTES
        ):
            yield from _closed(whole, plain, unpacked)
            plain, unpacked, run_bytes = [], [], 0
        run_bytes += batch_bytes
        if header.compression:
            unpacked.append((body, header))
        else:
            plain.append((at, header))
    yield from _closed(whole, plain, unpacked)


def _closed(
    whole: npt.NDArray[np.uint8],
    plain: list[tuple[int, BatchHeader]],
    unpacked: list[tuple[memoryview, BatchHeader]],
) -> Iterator[_Run]:
    if plain:
        first, end = plain[0][0], plain[-1][0] + plain[-1][1].size
        starts = [at - first + HEADER_SIZE for at, _ in plain]
        ends = [at - first + header.size for at, header in plain]
        yield _Run([header for _, header in plain], whole[first:end], starts, ends)
    if unpacked:
        ends = np.cumsum([len(body) for body, _ in unpacked]).tolist()
        bodies = [body for body, _ in unpacked]
        joined = np.frombuffer(bodies[0] if len(bodies) == 1 else b"".join(bodies), np.uint8)
        yield _Run([header for _, header in unpacked], joined, [0, *ends[:-1]], ends)


def _decode_run(run: _Run, wanted: Wanted, limit_bytes: int) -> Iterator[pa.RecordBatch]:
    reader = VarintReader(run.data)
    counts = np.array([header.record_count for header in run.headers], np.int64)
    last_deltas = np.array([header.last_offset_delta for header in run.headers], np.int64)
    bodies = Bodies(np.array(run.starts, np.int64), np.array(run.ends, np.int64), counts, last_deltas)
    starts = find_record_starts(reader, bodies)
    firsts = np.cumsum(counts) - counts
    ends = np.append(starts[1:], 0)
    ends[firsts + counts - 1] = bodies.ends
    batch_of_row = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    numbers = _BatchNumbers.of(run.headers)
    header_totals = np.zeros(len(counts), np.int64)
    previous = -1
    for row in range(0, len(starts), SLICE_ROWS):
        rows = slice(row, row + SLICE_ROWS)
        fields = _read_fields(reader, starts[rows], ends[rows])
        previous = _check_offsets(fields.offset_deltas, batch_of_row[rows], row, firsts, last_deltas, previous)
        found = None
        if fields.header_counts is not None:
            header_totals += np.bincount(batch_of_row[rows], fields.header_counts, len(counts)).astype(np.int64)
            check_header_count(int(header_totals.max()), limit_bytes)
            found = read_headers(reader, fields.header_starts, fields.header_counts, fields.ends)
        yield _to_arrow(reader, fields, found, numbers, batch_of_row[rows], wanted)


class _BatchNumbers(NamedTuple):
    """What records need of their batch's header, by batch."""

    base_offsets: Int64s
    base_timestamps: Int64s
    append_timestamps: Int64s
    timestamp_types: npt.NDArray[np.int8]

    @classmethod
    def of(cls, headers: list[BatchHeader]) -> _BatchNumbers:
        return cls(
            np.array([header.base_offset for header in headers], np.int64),
            np.array([header.base_timestamp for header in headers], np.int64),
            np.array([header.max_timestamp for header in headers], np.int64),
            np.array([bool(header.attributes & TIMESTAMP_TYPE_BIT) for header in headers], np.int8),
        )


class _Fields(NamedTuple):
    """The numbers of some records. Lengths are -1 for null."""

    timestamp_deltas: Int64s
    offset_deltas: Int64s
    key_starts: Int64s
    key_lengths: Int64s
    value_starts: Int64s
    value_lengths: Int64s
    header_starts: Int64s
    header_counts: Int64s | None  # None if there are none
    ends: Int64s

    def only(self, rows: npt.NDArray[np.bool_]) -> _Fields:
        return _Fields(*(None if numbers is None else numbers[rows] for numbers in self))  # type: ignore[arg-type]


def _read_fields(reader: VarintReader, starts: Int64s, ends: Int64s) -> _Fields:
    """All fields up to the number of headers. Every step goes forward, so it is enough to check the end."""
    timestamp_deltas, offset_deltas, at = reader.read_front(starts)
    key_lengths, key_starts = reader.read(at)
    value_lengths, value_starts = reader.read(key_starts + np.maximum(key_lengths, 0))
    if min(int(key_lengths.min()), int(value_lengths.min())) < -1:
        raise CorruptBatchError("the key or value of a record has a negative length")
    header_counts, at = _read_header_counts(reader, value_starts + np.maximum(value_lengths, 0), ends)
    return _Fields(
        timestamp_deltas, offset_deltas, key_starts, key_lengths, value_starts, value_lengths, at, header_counts, ends
    )


def _read_header_counts(reader: VarintReader, at: Int64s, ends: Int64s) -> tuple[Int64s | None, Int64s]:
    """(numbers of headers or None where no record has any, positions after them)."""
    if (at == ends - 1).all() and not reader.data[at].any():
        return None, ends
    counts, at = reader.read(at)
    if int(counts.min()) < 0:
        raise CorruptBatchError("a record has a negative number of headers")
    if ((at > ends) | ((counts == 0) & (at != ends))).any():
        raise CorruptBatchError("the fields of a record do not end where the record ends")
    return counts, at


def _check_offsets(
    deltas: Int64s,
    batch_of_row: npt.NDArray[np.int32],
    first_row: int,
    firsts: Int64s,
    last_deltas: Int64s,
    previous: int,
) -> int:
    """Offsets rise within a batch and stay within it. Returns the last delta, for the rows that follow."""
    before = np.empty_like(deltas)
    before[0], before[1:] = previous, deltas[:-1]
    inside = firsts[(firsts >= first_row) & (firsts < first_row + len(deltas))] - first_row
    before[inside] = -1
    if (deltas <= before).any() or (deltas > last_deltas[batch_of_row]).any():
        raise CorruptBatchError("offsets in a batch do not rise, or go past its last offset")
    return int(deltas[-1])


def _to_arrow(
    reader: VarintReader,
    fields: _Fields,
    headers: Headers | None,
    numbers: _BatchNumbers,
    batch_of_row: npt.NDArray[np.int32],
    wanted: Wanted,
) -> pa.RecordBatch:
    offsets = numbers.base_offsets[batch_of_row] + fields.offset_deltas
    data = pa.py_buffer(reader.data)
    header_column = headers_array(data, headers, fields.header_counts, len(offsets)) if wanted.headers else None
    if int(offsets.min()) < wanted.start_offset:
        keep = offsets >= wanted.start_offset
        offsets, fields, batch_of_row = offsets[keep], fields.only(keep), batch_of_row[keep]
        header_column = None if header_column is None else header_column.filter(pa.array(keep))
    types = numbers.timestamp_types[batch_of_row]
    timestamps = numbers.base_timestamps[batch_of_row] + fields.timestamp_deltas
    if types.any():
        timestamps = np.where(types, numbers.append_timestamps[batch_of_row], timestamps)
    places = ((fields.key_starts, fields.key_lengths), (fields.value_starts, fields.value_lengths))
    columns = [pa.array(offsets), pa.array(timestamps), pa.array(types)]
    columns += [views(reader, data, *place) if wanted.views else gather(data, *place) for place in places]
    if header_column is not None:
        columns.append(header_column)
    return pa.RecordBatch.from_arrays(columns, schema=wanted.schema())
