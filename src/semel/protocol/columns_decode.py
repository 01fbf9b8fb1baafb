"""Record sets to Arrow columns, without a Python object per record.

The steps: `record_sets` says which batches are visible, `decode_runs` which of them are decoded together;
`record_fields` finds where records start; then every field of all records is read at once, and Arrow gathers keys and
values out of the buffer in one call each.

Memory: beside what it returns, a call takes at most one decompressed batch, or RUN_BYTES of smaller ones, and a few
arrays for SLICE_ROWS records.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from semel.protocol.arrow_numbers import to_arrow
from semel.protocol.batch import DEFAULT_LIMIT_BYTES, TIMESTAMP_TYPE_BIT, Buffer, check_header_count
from semel.protocol.decode_runs import DEFAULT_MAX_BYTES, BatchRun, DecodeLimits, RecordSet, runs
from semel.protocol.errors import CorruptBatchError
from semel.protocol.record_fields import Bodies, Fields, Headers, find_record_starts, read_fields, read_headers
from semel.protocol.record_sets import AbortedTransactions, Progress
from semel.protocol.vector_varints import Int64s, VarintReader

# --- Values that lie scattered in a buffer, as an Arrow column: copied out of it, or left where they are ---


IN_PLACE_BYTES = 12  # the largest value that stands in its view
_MASKS = np.array([(1 << (8 * size)) - 1 for size in range(9)], np.uint64)  # keeps the first `size` bytes of a word


def gather(data: pa.Buffer, starts: Int64s, lengths: Int64s) -> pa.Array:
    """The values at the given places, one after the other."""
    if not len(starts) or int(lengths.max()) == -1:
        return pa.nulls(len(starts), pa.binary())
    if ((lengths <= 0) | (lengths > IN_PLACE_BYTES)).all():
        return _copied_from_views(data, starts, lengths)
    return _taken(data, starts, lengths)


def _copied_from_views(data: pa.Buffer, starts: Int64s, lengths: Int64s) -> pa.Array:
    """Arrow knows beforehand how much it will copy, so this is a third faster than `_taken`. The views never leave this
    function, so they do without the start of each value, which short ones would need."""
    words = np.empty((len(starts), 2), np.int64)
    np.maximum(lengths, 0, out=words[:, 0])
    np.left_shift(starts, 32, out=words[:, 1])
    places = pa.Array.from_buffers(pa.binary_view(), len(starts), [_validity(lengths), pa.py_buffer(words), data])
    return places.cast(pa.binary())


def _taken(data: pa.Buffer, starts: Int64s, lengths: Int64s) -> pa.Array:
    """Taken out of a column that covers the buffer: value, gap, value, gap."""
    count = len(starts)
    bounds = np.empty(2 * count, np.int32)
    bounds[0::2] = starts
    bounds[1::2] = starts + np.maximum(lengths, 0)
    pool = pa.Array.from_buffers(pa.binary(), 2 * count - 1, [None, pa.py_buffer(bounds), data])
    taken = pool.take(to_arrow(np.arange(0, 2 * count, 2, dtype=np.int32)))
    valid = _validity(lengths)
    return taken if valid is None else pa.Array.from_buffers(pa.binary(), count, [valid, *taken.buffers()[1:]])


def _validity(lengths: Int64s) -> pa.Buffer | None:
    return None if int(lengths.min()) >= 0 else pa.py_buffer(np.packbits(lengths >= 0, bitorder="little"))


def views(reader: VarintReader, data: pa.Buffer, starts: Int64s, lengths: Int64s) -> pa.Array:
    """The values at the given places, left there: a column of views, which keeps the buffer alive."""
    if not len(starts) or int(lengths.max()) == -1:
        return pa.nulls(len(starts), pa.binary_view())
    sizes = np.maximum(lengths, 0)
    half = np.uint64(32)
    first = reader.words(starts)
    words = np.empty((len(starts), 2), np.uint64)
    words[:, 0] = sizes.view(np.uint64) | (first << half)
    words[:, 1] = starts.view(np.uint64) << half
    if int(sizes.min()) <= IN_PLACE_BYTES:
        rows = np.flatnonzero(sizes <= IN_PLACE_BYTES)
        short = sizes[rows]
        low = first[rows] & _MASKS.take(np.minimum(short, 8))
        high = reader.words(starts[rows] + 8) & _MASKS.take(np.maximum(short - 8, 0))
        words[rows, 0] = short.view(np.uint64) | (low << half)
        words[rows, 1] = (low >> half) | (high << half)
    return pa.Array.from_buffers(pa.binary_view(), len(starts), [_validity(lengths), pa.py_buffer(words), data])


SLICE_ROWS = 64 * 1024  # of records whose fields are read together: the numbers stay in the processor's cache


class Wanted(NamedTuple):
    """What a caller wants to have in its table."""

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


HEADERS_TYPE = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
SCHEMA = Wanted(headers=False, views=False).schema()
SCHEMA_WITH_HEADERS = Wanted(headers=True, views=False).schema()


class DecodedRecords(NamedTuple):
    """Records of one partition as columns, and where to go on.

    `table` has `offset`, `timestamp` (milliseconds), `timestamp_type` (0 CreateTime, 1 LogAppendTime), `key`, `value`
    and, if asked for, `headers` (null where a record has none)."""

    table: pa.Table
    next_offset: int  # where the next fetch starts; past what was left out, too
    bytes_read: int  # of the record set; what is left is a partial batch, or for another call (`max_bytes`)
    leader_epoch: int  # of the last batch, -1 if there was none


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
    """Visible records of a fetch response from `start_offset` on. `aborted` holds the response's aborted transactions
    for read_committed, and is None for read_uncommitted. `limit_bytes` bounds one batch, each of its records counted
    with RECORD_OVERHEAD_BYTES; `max_bytes` ends the call early, so that a caller reads a large response in parts.

    With `views`, keys and values are of type binary_view and stay in `data` (or in what was decompressed): nothing is
    copied, `data` is kept alive, and must not be changed. `ColumnEncoder` takes such columns as they are."""
    record_set = RecordSet(data, start_offset, aborted)
    return _decode([record_set], Wanted(headers, views), DecodeLimits(limit_bytes, max_bytes))[0]


def decode_record_sets(
    record_sets: Sequence[RecordSet], *, headers: bool = False, views: bool = False
) -> list[DecodedRecords]:
    """As `decode_record_set`, for several partitions of a response: together they cost less than one by one."""
    return _decode(record_sets, Wanted(headers, views), DecodeLimits())


def _decode(record_sets: Sequence[RecordSet], wanted: Wanted, limits: DecodeLimits) -> list[DecodedRecords]:
    progress = [Progress(record_set.start_offset) for record_set in record_sets]
    batches: list[list[pa.RecordBatch]] = [[] for _ in record_sets]
    for run in runs(zip(record_sets, progress, strict=True), limits):
        for batch, shares in _decode_run(run, record_sets, wanted, limits.batch_bytes):
            for number, part in _parts(batch, run.sets, shares):
                batches[number].append(part)
    schema = wanted.schema()
    return [
        DecodedRecords(pa.Table.from_batches(found, schema), each.next_offset, each.bytes_read, each.leader_epoch)
        for found, each in zip(batches, progress, strict=True)
    ]


def _parts(batch: pa.RecordBatch, sets: list[int], shares: Int64s) -> Iterator[tuple[int, pa.RecordBatch]]:
    """What is each set's of decoded records, of which `shares` are those of each batch."""
    rows = np.bincount(sets, shares).astype(np.int64).tolist()
    at = 0
    for number, count in enumerate(rows):
        if count:
            yield number, batch.slice(at, count)
            at += count


def _decode_run(
    run: BatchRun, record_sets: Sequence[RecordSet], wanted: Wanted, limit_bytes: int
) -> Iterator[tuple[pa.RecordBatch, Int64s]]:
    """(records, how many of them are of each batch), in slices."""
    reader = VarintReader(run.data)
    numbers = _BatchNumbers.of(run, record_sets)
    counts = numbers.record_counts
    bodies = Bodies(np.array(run.starts, np.int64), np.array(run.ends, np.int64), counts, numbers.last_deltas)
    starts = find_record_starts(reader, bodies)
    firsts = np.cumsum(counts) - counts
    ends = np.append(starts[1:], 0)
    ends[firsts + counts - 1] = bodies.ends
    header_totals = np.zeros(len(counts), np.int64)
    previous = -1
    for row in range(0, len(starts), SLICE_ROWS):
        rows = slice(row, row + SLICE_ROWS)
        shares = np.clip(firsts + counts - row, 0, SLICE_ROWS) - np.clip(firsts - row, 0, SLICE_ROWS)
        fields = read_fields(reader, starts[rows], ends[rows])
        previous = -1 if row in firsts else previous
        previous = _check_offsets(fields.offset_deltas, shares, numbers.last_deltas, previous)
        found = None
        if fields.header_counts is not None:
            header_totals += _sums(fields.header_counts, shares)
            check_header_count(int(header_totals.max()), limit_bytes)
            found = read_headers(reader, fields.header_starts, fields.header_counts, fields.ends)
        yield _to_arrow(reader, fields, found, numbers, shares, wanted)


class _BatchNumbers(NamedTuple):
    """What records need of their batch's header, by batch."""

    record_counts: Int64s
    last_deltas: Int64s
    base_offsets: Int64s
    start_offsets: Int64s  # from where on they are wanted
    base_timestamps: Int64s
    append_timestamps: Int64s
    timestamp_types: Int64s

    @classmethod
    def of(cls, run: BatchRun, record_sets: Sequence[RecordSet]) -> _BatchNumbers:
        rows = [
            (
                header.record_count,
                header.last_offset_delta,
                header.base_offset,
                record_sets[number].start_offset,
                header.base_timestamp,
                header.max_timestamp,
                bool(header.attributes & TIMESTAMP_TYPE_BIT),
            )
            for header, number in zip(run.headers, run.sets, strict=True)
        ]
        return cls(*np.array(rows, np.int64).T.copy())


def _check_offsets(deltas: Int64s, shares: Int64s, last_deltas: Int64s, previous: int) -> int:
    """Offsets rise within a batch and stay within it. `shares` says how many rows are each batch's; `previous` is the
    delta before the first row, if that goes on with a batch, else -1. Returns the one for the rows that follow."""
    there = np.flatnonzero(shares)
    ends = np.cumsum(shares[there])
    rises = deltas[1:] > deltas[:-1]
    firsts = ends[:-1]
    rises[firsts - 1] = deltas[firsts] >= 0
    if not rises.all() or deltas[0] <= previous or (deltas[ends - 1] > last_deltas[there]).any():
        raise CorruptBatchError("offsets in a batch do not rise, or go past its last offset")
    return int(deltas[-1])


def _sums(numbers: npt.NDArray[Any], shares: Int64s) -> Int64s:
    """Of the rows of each batch."""
    totals = np.append(0, np.cumsum(numbers))
    ends = np.cumsum(shares)
    result: Int64s = totals[ends] - totals[ends - shares]
    return result


def _to_arrow(
    reader: VarintReader,
    fields: Fields,
    headers: Headers | None,
    numbers: _BatchNumbers,
    shares: Int64s,
    wanted: Wanted,
) -> tuple[pa.RecordBatch, Int64s]:
    """(those that are wanted, how many of them are of each batch). `shares` is that before they are chosen."""
    offsets = np.repeat(numbers.base_offsets, shares)
    offsets += fields.offset_deltas
    timestamps = np.repeat(numbers.base_timestamps, shares)
    timestamps += fields.timestamp_deltas
    types = np.repeat(numbers.timestamp_types.astype(np.int8), shares)
    if numbers.timestamp_types.any():
        timestamps = np.where(types, np.repeat(numbers.append_timestamps, shares), timestamps)
    data = pa.py_buffer(reader.data)
    header_column = headers_array(data, headers, fields.header_counts, len(offsets)) if wanted.headers else None
    if (numbers.base_offsets < numbers.start_offsets).any():
        keep = offsets >= np.repeat(numbers.start_offsets, shares)
        shares = _sums(keep, shares)
        offsets, timestamps, types, fields = offsets[keep], timestamps[keep], types[keep], fields.only(keep)
        header_column = None if header_column is None else header_column.filter(to_arrow(keep))
    places = ((fields.key_starts, fields.key_lengths), (fields.value_starts, fields.value_lengths))
    columns = [to_arrow(offsets), to_arrow(timestamps), to_arrow(types)]
    columns += [views(reader, data, *place) if wanted.views else gather(data, *place) for place in places]
    if header_column is not None:
        columns.append(header_column)
    return pa.RecordBatch.from_arrays(columns, schema=wanted.schema()), shares


# --- The headers of many records as an Arrow column ---
def headers_array(data: pa.Buffer, headers: Headers | None, counts: Int64s | None, row_count: int) -> pa.Array:
    """The headers as a list column, null where a record has none."""
    if headers is None or counts is None:
        return pa.nulls(row_count, HEADERS_TYPE)
    names = _as_text(gather(data, headers.name_starts, headers.name_lengths))
    values = gather(data, headers.value_starts, headers.value_lengths)
    entries = pa.StructArray.from_arrays([names, values], fields=list(HEADERS_TYPE.value_type))
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    valid = pa.py_buffer(np.packbits(counts > 0, bitorder="little"))
    return pa.Array.from_buffers(HEADERS_TYPE, len(counts), [valid, pa.py_buffer(offsets)], children=[entries])


def _as_text(names: pa.Array) -> pa.Array:
    try:
        return names.cast(pa.string())
    except pa.ArrowInvalid:  # not UTF-8: as the row codec reads it
        return pa.array([name.decode(errors="replace") for name in names.to_pylist()], pa.string())
