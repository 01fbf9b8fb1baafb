"""Arrow columns to record batches, without a Python object per record.

A batch is a sequence of pieces: the few bytes before the key, the key, the length of the value, the value, the headers.
Arrow's view layout describes such a sequence in 16 bytes per piece (size, then up to 12 bytes in place, or a buffer
and an offset into it), and Arrow's cast of a view column to a binary one puts the pieces one after the other, in C++.
So the work here is to write those 16 bytes with numpy, for whole columns. Any rows in any order can be chosen, as only
views move: a table is split by partition without copying its values first.

The byte that ends a record without headers (their number, 0) is written in front of the next record, which saves a
piece; so is the batch header.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from semel.protocol.arrow_binary import plain_binary, valid_mask
from semel.protocol.arrow_numbers import filled, to_numpy
from semel.protocol.batch import (
    COMPRESSION_MASK,
    HEADER_SIZE,
    LOG_OVERHEAD,
    MAGIC,
    NO_PRODUCER_EPOCH,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    TRANSACTIONAL_BIT,
    next_sequence,
    seal_crc,
)
from semel.protocol.compression import compress
from semel.protocol.errors import EncodeError
from semel.protocol.vector_varints import (
    SHORT_LIMIT,
    SHORT_WORDS,
    WIDEST_WORD,
    Int64s,
    UInt64s,
    length_sizes,
    varint_sizes,
    varint_words,
    zigzag,
)

Views = npt.NDArray[np.complex128]  # 16 bytes that numpy moves as one
IN_PLACE_BYTES = 12  # the largest piece that stands in its view
CHUNK_ROWS = 16 * 1024  # rows that are worked on together: their numbers stay in the processor's cache
CHUNK_BYTES = 64 * 1024 * 1024
LARGEST_DATA_BYTES = 2**31 - 2**16  # of one buffer that views point into, or of one chunk that is put together

HEADER_TYPE = np.dtype(
    [
        ("base_offset", ">i8"),
        ("length", ">i4"),
        ("leader_epoch", ">i4"),
        ("magic", "i1"),
        ("crc", ">u4"),
        ("attributes", ">i2"),
        ("last_offset_delta", ">i4"),
        ("base_timestamp", ">i8"),
        ("max_timestamp", ">i8"),
        ("producer_id", ">i8"),
        ("producer_epoch", ">i2"),
        ("base_sequence", ">i4"),
        ("record_count", ">i4"),
    ]
)
assert HEADER_TYPE.itemsize == HEADER_SIZE


class EncodedBatch(NamedTuple):
    """A batch ready for a produce request, and what a producer keeps about it."""

    buffer: memoryview
    record_count: int
    base_sequence: int


class BatchOptions(NamedTuple):
    """What all batches of a call have in common."""

    producer_id: int = NO_PRODUCER_ID
    producer_epoch: int = NO_PRODUCER_EPOCH
    transactional: bool = False
    compression: int = 0
    compression_level: int | None = None
    base_timestamp: int | None = None  # the first record's, unless given
    max_batch_bytes: int = 1024 * 1024  # before compression; a larger record gets a batch of its own
    max_batch_records: int = 1_000_000
    sealed: bool = True  # with a CRC; False for a caller that changes the header and computes it then


class _Column(NamedTuple):
    """A binary column as views into buffers. A null has size 0."""

    views: Views
    buffers: list[Any]
    lengths: Int64s  # -1 for nulls

    def field_bytes(self) -> Int64s:
        """Bytes that each value takes in a record, its length included."""
        sizes: Int64s = length_sizes(self.lengths) + np.maximum(self.lengths, 0)
        return sizes


class _PlannedBatch(NamedTuple):
    """Rows `start` to `stop` (of those chosen) make a batch."""

    start: int
    stop: int
    group: int
    base_sequence: int


class ColumnEncoder:
    """Columns, prepared once; `encode` turns any of their rows into batches.

    `key` and `value` are binary or string columns, or None for all null; `headers` is a list of struct<key: string,
    value: binary>, or None; `timestamp` is a column of int64 milliseconds or of a timestamp type, or one for all.
    """

    def __init__(self, value: Any, key: Any = None, headers: Any = None, timestamp: Any = 0) -> None:
        columns = [column for column in (value, key, headers) if column is not None]
        if hasattr(timestamp, "__len__"):
            columns.append(timestamp)
        if len({len(column) for column in columns}) != 1:
            raise EncodeError(f"columns of equal length are needed, these have {[len(c) for c in columns]} rows")
        self.row_count = len(columns[0])
        self._buffers: list[Any] = []
        self._value = self._adopt(_binary_column(value))
        self._key = self._adopt(_binary_column(key))
        self._headers = self._adopt(None if headers is None else _headers_column(headers))
        self._timestamp, self._timestamps = _timestamps(timestamp)
        self._field_bytes = self._bytes_of_fields()

    def _adopt(self, column: _Column | None) -> _Column | None:
        """Lets the views of a column count in one list of buffers for all columns."""
        if column is None:
            return None
        views = _moved(column.views, len(self._buffers)) if column.buffers else column.views
        self._buffers += column.buffers
        return column._replace(views=views)

    def _bytes_of_fields(self) -> Int64s:
        """Bytes of each record but for its length field, timestamp and offset."""
        sizes = np.ones(self.row_count, np.int64)  # the attributes
        for column in (self._key, self._value):
            sizes += 1 if column is None else column.field_bytes()
        sizes += 1 if self._headers is None else self._headers.lengths
        return sizes

    def encode(self, rows: Rows = None, *, base_sequence: int = NO_SEQUENCE, **options: Any) -> list[EncodedBatch]:
        """Batches of the rows, in their order: all, a slice, or those of an index array. For options: BatchOptions."""
        chosen = _normal_rows(rows, self.row_count)
        count = chosen.stop - chosen.start if isinstance(chosen, slice) else len(chosen)
        return self.encode_groups(chosen, [count], [base_sequence], **options)[0]

    def encode_groups(
        self, rows: Rows, group_rows: Sequence[int], base_sequences: Sequence[int], **options: Any
    ) -> list[list[EncodedBatch]]:
        """Batches of several partitions at once: `rows` lists the first partition's rows, then the second's, and so on;
        `group_rows` says how many each has."""
        settings = BatchOptions(**options)
        chosen = _normal_rows(rows, self.row_count)
        sizes = self._field_bytes[chosen]
        timestamps = None if self._timestamps is None else self._timestamps[chosen]
        if sum(group_rows) != len(sizes):
            raise EncodeError(f"groups of {sum(group_rows)} rows in total, but {len(sizes)} rows are given")
        numbers = _Timestamps.of(self._timestamp, timestamps, settings.base_timestamp)
        plan = _plan_batches(sizes + numbers.widest_bytes, group_rows, base_sequences, settings)
        groups: list[list[EncodedBatch]] = [[] for _ in group_rows]
        for part in _chunks(plan, sizes):
            span = slice(part[0].start, part[-1].stop)
            encoded = self._encode_chunk(_part_of(chosen, span), sizes[span], numbers, part, settings)
            for batch, planned in zip(encoded, part, strict=True):
                groups[planned.group].append(batch)
        return groups

    def _encode_chunk(
        self,
        rows: slice | npt.NDArray[Any],
        sizes: Int64s,
        timestamps: _Timestamps,
        plan: list[_PlannedBatch],
        settings: BatchOptions,
    ) -> list[EncodedBatch]:
        """Puts whole batches together: numbers, then views, then one cast."""
        first = plan[0].start
        starts = np.array([batch.start - first for batch in plan], np.int64)
        counts = np.array([batch.stop - batch.start for batch in plan], np.int64)
        bases, highest, timestamp_deltas = timestamps.of_batches(first, starts, counts)
        timestamp = _Varints.of(timestamp_deltas)
        offset = _Varints.of(np.arange(len(sizes), dtype=np.int64) - np.repeat(starts, counts))
        lengths = sizes + timestamp.sizes + offset.sizes
        length = _Varints.of(lengths)
        batch_bytes = np.add.reduceat(lengths + length.sizes, starts) + HEADER_SIZE
        heads = _batch_headers(plan, batch_bytes, bases, highest, settings)

        packer = _Packer(leading_zero=self._headers is None)
        packer.add(length)
        packer.add_zero()  # the attributes
        packer.add(timestamp)
        packer.add(offset)
        for column in (self._key, self._value):
            if column is None:
                packer.add(_NULL_LENGTH)
            else:
                packer.add(_Varints.of(column.lengths[rows]))
                packer.add_column(column.views[rows])
        packer.add_column(None if self._headers is None else self._headers.views[rows])
        joined = _join(packer.columns, heads, starts, self._buffers, leading_zero=self._headers is None)
        return _finish(joined, plan, np.cumsum(batch_bytes).tolist(), settings)


Rows = npt.NDArray[np.integer[Any]] | slice | None


def _normal_rows(rows: Rows, row_count: int) -> slice | npt.NDArray[Any]:
    """A slice with both ends and step 1, or an index array."""
    if rows is None:
        return slice(0, row_count)
    if not isinstance(rows, slice):
        return rows
    start, stop, step = rows.indices(row_count)
    return slice(start, max(start, stop)) if step == 1 else np.arange(start, stop, step)


def _part_of(rows: slice | npt.NDArray[Any], span: slice) -> slice | npt.NDArray[Any]:
    return slice(rows.start + span.start, rows.start + span.stop) if isinstance(rows, slice) else rows[span]


# --- numbers
class _Timestamps(NamedTuple):
    """Timestamps of the chosen rows (or one for all), the requested base, and the size of the widest delta."""

    one: int
    column: Int64s | None
    base: int | None
    widest_bytes: int

    @classmethod
    def of(cls, one: int, column: Int64s | None, base: int | None) -> _Timestamps:
        low, high = (one, one) if column is None or not len(column) else (int(column.min()), int(column.max()))
        farthest = max(high - low if base is None else max(abs(high - base), abs(low - base)), 1)
        return cls(one, column, base, (farthest.bit_length() + 1 + 6) // 7)

    def of_batches(self, first: int, starts: Int64s, counts: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Of each batch the base and the highest timestamp, and of each record the delta."""
        if self.column is None:
            highest = np.full(len(starts), self.one, np.int64)
            bases = highest if self.base is None else np.full(len(starts), self.base, np.int64)
            stamps = np.full(int(counts.sum()), self.one, np.int64)
        else:
            stamps = self.column[first : first + int(counts.sum())]
            highest = np.maximum.reduceat(stamps, starts)
            bases = stamps[starts] if self.base is None else np.full(len(starts), self.base, np.int64)
        base_of_row = np.repeat(bases, counts)
        deltas = stamps - base_of_row
        if self.widest_bytes > 9 and (((stamps ^ base_of_row) & (stamps ^ deltas)) < 0).any():
            raise EncodeError("a timestamp is too far from the base timestamp of its batch")
        return bases, highest, deltas


class _Varints(NamedTuple):
    """Varints to write, each as the bytes of a word, and a second word for those of more than eight bytes."""

    words: UInt64s
    high_words: UInt64s | None
    sizes: Int64s
    largest_size: int

    @classmethod
    def of(cls, values: Int64s) -> _Varints:
        highest = int(values.max())
        if highest < SHORT_LIMIT and int(values.min()) >= -1:
            sizes = (values > 63).astype(np.int64)
            sizes += 1
            return cls(SHORT_WORDS.take(values), None, sizes, 2 if highest > 63 else 1)
        numbers = zigzag(values)
        sizes = varint_sizes(numbers)
        largest = int(sizes.max())
        if largest <= 8:
            return cls(varint_words(numbers), None, sizes, largest)
        words = varint_words(numbers & np.uint64(WIDEST_WORD - 1))
        words |= np.where(sizes > 8, _ALL_CONTINUE, np.uint64(0))  # eight bytes, all of which go on
        high = numbers >> np.uint64(56)
        tenth = high >> np.uint64(7)
        return cls(words, (high & np.uint64(0x7F)) | (tenth << np.uint64(7)) | (tenth << np.uint64(8)), sizes, largest)


_WORD_BITS = np.uint64(64)
_ALL_CONTINUE = np.uint64(0x8080808080808080)
_ZERO = np.zeros(1, np.uint64)
_NULL_LENGTH = _Varints.of(np.array([-1], np.int64))


def _plan_batches(
    sizes: Int64s, group_rows: Sequence[int], base_sequences: Sequence[int], settings: BatchOptions
) -> list[_PlannedBatch]:
    """Where batches begin and end. `sizes` are upper bounds but for two fields: the length and the offset."""
    ends = np.cumsum(sizes + 5 + (settings.max_batch_records.bit_length() + 1 + 6) // 7)
    most_bytes = settings.max_batch_bytes - HEADER_SIZE
    plan, start = [], 0
    for group, (rows, sequence) in enumerate(zip(group_rows, base_sequences, strict=True)):
        group_end = start + rows
        while start < group_end:
            before = int(ends[start - 1]) if start else 0
            stop = int(np.searchsorted(ends[start:group_end], before + most_bytes, side="right")) + start
            stop = min(max(stop, start + 1), start + settings.max_batch_records)
            plan.append(_PlannedBatch(start, stop, group, sequence))
            if sequence != NO_SEQUENCE:
                sequence = next_sequence(sequence, stop - start)
            start = stop
    return plan


def _chunks(plan: list[_PlannedBatch], sizes: Int64s) -> Iterator[list[_PlannedBatch]]:
    """Runs of batches to be put together at once."""
    part: list[_PlannedBatch] = []
    part_bytes = 0
    for batch in plan:
        batch_bytes = int(sizes[batch.start : batch.stop].sum()) + 32 * (batch.stop - batch.start)
        if batch_bytes > LARGEST_DATA_BYTES:
            raise EncodeError(f"a batch of about {batch_bytes} bytes does not fit its length field")
        if part and (batch.stop - part[0].start > CHUNK_ROWS or part_bytes + batch_bytes > CHUNK_BYTES):
            yield part
            part, part_bytes = [], 0
        part.append(batch)
        part_bytes += batch_bytes
    if part:
        yield part


def _batch_headers(
    plan: list[_PlannedBatch], batch_bytes: Int64s, bases: Int64s, highest: Int64s, settings: BatchOptions
) -> npt.NDArray[Any]:
    """The 61 bytes of every batch, but for the CRC."""
    heads = np.zeros(len(plan), HEADER_TYPE)
    heads["length"] = batch_bytes - LOG_OVERHEAD
    heads["leader_epoch"] = -1
    heads["magic"] = MAGIC
    heads["attributes"] = (settings.compression & COMPRESSION_MASK) | (
        TRANSACTIONAL_BIT if settings.transactional else 0
    )
    heads["record_count"] = [batch.stop - batch.start for batch in plan]
    heads["last_offset_delta"] = heads["record_count"] - 1
    heads["base_timestamp"] = bases
    heads["max_timestamp"] = highest
    heads["producer_id"] = settings.producer_id
    heads["producer_epoch"] = settings.producer_epoch
    heads["base_sequence"] = [batch.base_sequence for batch in plan]
    return heads


# --- views
class _Packer:
    """Collects the pieces of every record: columns of views. Varints that follow each other share a piece."""

    def __init__(self, leading_zero: bool) -> None:
        self.columns: list[Views] = []
        self._open(1 if leading_zero else 0)

    def _open(self, zeros: int = 0) -> None:
        """An empty piece. What is the same for all records is an array of one number."""
        self._low: UInt64s = np.zeros(1, np.uint64)
        self._high: UInt64s = np.zeros(1, np.uint64)
        self._sizes: Int64s = np.array([zeros], np.int64)
        self._largest_size = zeros

    def _close(self) -> None:
        if self._largest_size:
            self.columns.append(_views(self._sizes, self._low, self._high))
        self._open()

    def add_zero(self) -> None:
        if self._largest_size + 1 > IN_PLACE_BYTES:
            self._close()
        self._sizes = self._sizes + 1
        self._largest_size += 1

    def add(self, varints: _Varints) -> None:
        if self._largest_size + varints.largest_size > IN_PLACE_BYTES:
            self._close()
        words, bits = varints.words, (self._sizes << 3).view(np.uint64)
        self._low = self._low | (words << bits)  # numpy shifts by 64 and more to 0
        if self._largest_size + varints.largest_size > 8:
            high = words >> (_WORD_BITS - bits)
            if self._largest_size > 8:
                high |= words << (bits - _WORD_BITS)
            if varints.high_words is not None:
                high |= varints.high_words << bits
            self._high = self._high | high
        self._sizes = self._sizes + varints.sizes
        self._largest_size += varints.largest_size

    def add_column(self, views: Views | None) -> None:
        self._close()
        if views is not None:
            self.columns.append(views)


def _views(sizes: Int64s, low: UInt64s, high: UInt64s) -> Views:
    """Views whose bytes stand in them: size, eight bytes of `low`, four of `high`."""
    half = np.uint64(32)
    first = sizes.view(np.uint64) | (low << half)
    words = np.empty((len(first), 2), np.uint64)
    words[:, 0] = first
    words[:, 1] = (low >> half) | (high << half)
    return words.reshape(-1).view(np.complex128)


_HEAD_STRIDE = 80  # holds a zero, the batch header and the piece that follows it


def _head_views(
    pieces: Views, heads: npt.NDArray[Any], leading_zero: bool, buffer_index: int
) -> tuple[Views, npt.NDArray[np.uint8]]:
    """The first piece of each batch with the batch header in it (behind the zero that ends the batch before)."""
    lead = int(leading_zero)
    piece_bytes = pieces.view(np.uint8).reshape(-1, 16)
    data = np.zeros((len(heads), _HEAD_STRIDE), np.uint8)
    data[:, lead : lead + HEADER_SIZE] = heads.view(np.uint8).reshape(-1, HEADER_SIZE)
    data[:, lead + HEADER_SIZE : HEADER_SIZE + IN_PLACE_BYTES] = piece_bytes[:, 4 + lead :]
    views = np.empty((len(heads), 4), np.uint32)
    views[:, 0] = pieces.view(np.uint32)[::4] + HEADER_SIZE
    views[:, 1] = data[:, :4].copy().view(np.uint32)[:, 0]
    views[:, 2] = buffer_index
    views[:, 3] = np.arange(len(heads)) * _HEAD_STRIDE
    return views.reshape(-1).view(np.complex128), data


def _join(
    columns: list[Views], heads: npt.NDArray[Any], starts: Int64s, buffers: list[Any], leading_zero: bool
) -> npt.NDArray[np.uint8]:
    """All pieces, one after the other."""
    row_count = max(map(len, columns))
    flat = np.empty(row_count * len(columns) + 1, np.complex128)
    matrix = flat[:-1].reshape(row_count, len(columns))
    for number, column in enumerate(columns):
        matrix[:, number] = column
    matrix[starts, 0], head_bytes = _head_views(matrix[starts, 0].copy(), heads, leading_zero, len(buffers))
    flat[-1:] = _views(np.array([leading_zero], np.int64), _ZERO, _ZERO)
    pieces = pa.Array.from_buffers(
        pa.binary_view(), len(flat), [None, pa.py_buffer(flat), *buffers, pa.py_buffer(head_bytes)]
    )
    data = np.frombuffer(pieces.cast(pa.binary()).buffers()[2], np.uint8)
    return data[1:] if leading_zero else data


def _finish(
    data: npt.NDArray[np.uint8], plan: list[_PlannedBatch], ends: list[int], settings: BatchOptions
) -> list[EncodedBatch]:
    """Compresses where asked to, and fills in the CRC."""
    memory, start, batches = memoryview(data), 0, []  # type: ignore[arg-type]
    for batch, end in zip(plan, ends, strict=True):
        buffer = memory[start:end]
        if settings.compression:
            buffer = _compressed(buffer, settings)
        if settings.sealed:
            seal_crc(buffer)
        batches.append(EncodedBatch(buffer, batch.stop - batch.start, batch.base_sequence))
        start = end
    return batches


def _compressed(batch: memoryview, settings: BatchOptions) -> memoryview:
    body = compress(settings.compression, batch[HEADER_SIZE:], settings.compression_level)
    out = bytearray(batch[:HEADER_SIZE])
    out[8:12] = (HEADER_SIZE - LOG_OVERHEAD + len(body)).to_bytes(4, "big")
    out += body
    return memoryview(out)


# --- columns
def _binary_column(column: Any) -> _Column | None:
    """The views of a column; None if it is not there or has nothing but nulls."""
    if column is None or column.null_count == len(column):
        return None
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    arrays = [view for chunk in chunks for view in _view_arrays(chunk)]
    array = arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)
    _, views_buffer, *buffers = array.buffers()
    views = np.frombuffer(views_buffer, np.complex128, len(array), array.offset * 16)
    lengths = views.view(np.int32)[::4].astype(np.int64)
    valid = valid_mask(array)
    if valid is not None:
        views = np.where(valid, views, 0)
        lengths[~valid] = -1
    return _Column(views, buffers, lengths)


def _view_arrays(array: Any) -> Iterator[Any]:
    """A binary array as views; a large one in as many parts as its data needs (an offset in a view has 31 bits)."""
    if array.type in (pa.binary_view(), pa.string_view()):
        yield array.cast(pa.binary_view())
        return
    array = plain_binary(array)
    if not pa.types.is_large_binary(array.type):
        yield array.cast(pa.binary_view())
        return
    offsets = np.frombuffer(array.buffers()[1], np.int64, len(array) + 1, array.offset * 8)
    start = 0
    while start < len(array):
        stop = int(np.searchsorted(offsets, offsets[start] + LARGEST_DATA_BYTES, side="right")) - 1
        if stop <= start:
            raise EncodeError(f"a value of {offsets[start + 1] - offsets[start]} bytes does not fit a batch")
        part = array.slice(start, min(stop, len(array)) - start)
        yield part.cast(pa.binary()).cast(pa.binary_view())
        start = stop


def _timestamps(timestamp: Any) -> tuple[int, Int64s | None]:
    """(one for all, or a column of milliseconds)."""
    if isinstance(timestamp, int | np.integer):
        return int(timestamp), None
    return 0, timestamp.astype(np.int64) if isinstance(timestamp, np.ndarray) else milliseconds(timestamp)


def milliseconds(timestamp: Any) -> Int64s:
    """A column of timestamps as Kafka counts them."""
    if timestamp.null_count:
        raise EncodeError(
            f"{timestamp.null_count} timestamps are null; fill them, for example with the time of sending"
        )
    if not (pa.types.is_timestamp(timestamp.type) or pa.types.is_integer(timestamp.type)):
        raise EncodeError(f"timestamps of type {timestamp.type}, expected int64 milliseconds or a timestamp type")
    divisor = 1
    if pa.types.is_timestamp(timestamp.type):
        if timestamp.type.unit == "s":
            timestamp = timestamp.cast(pa.timestamp("ms", timestamp.type.tz))
        divisor = {"us": 1000, "ns": 1_000_000}.get(timestamp.type.unit, 1)
    numbers = to_numpy(timestamp.cast(pa.int64()))
    return numbers if divisor == 1 else numbers // divisor


def _headers_column(headers: Any) -> _Column | None:
    """The headers of each record as the bytes that stand in it: their number, then names and values."""
    if isinstance(headers, pa.ChunkedArray):
        headers = pa.concat_arrays(headers.chunks) if headers.num_chunks else pa.array([], headers.type)
    check_headers_type(headers.type)
    if headers.null_count == len(headers):
        return None
    counts = filled(pc.list_value_length(headers), 0).astype(np.int64)
    entries = headers.filter(headers.is_valid()).flatten() if headers.null_count else headers.flatten()
    if not len(entries):
        return None
    names, values = (entries.field(entries.type.get_field_index(name)) for name in ("key", "value"))
    if entries.null_count or names.null_count:
        raise EncodeError(f"{max(entries.null_count, names.null_count)} headers have no name")
    pieces = _header_pieces(counts, names, values)
    first = np.cumsum(4 * counts + 1) - 4 * counts - 1  # index of the piece that holds the count
    offsets = np.frombuffer(pieces.buffers()[1], np.int32, len(pieces) + 1)[np.append(first, len(pieces))]
    array = pa.Array.from_buffers(pa.binary(), len(counts), [None, pa.py_buffer(offsets), pieces.buffers()[2]])
    return _binary_column(array)


def check_headers_type(kind: Any) -> None:
    if pa.types.is_null(kind):
        return
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not is_list or not pa.types.is_struct(kind.value_type) or {"key", "value"} - {f.name for f in kind.value_type}:
        raise EncodeError(f"headers of type {kind}, expected list<struct<key: string, value: binary>>")


def _header_pieces(counts: Int64s, names: Any, values: Any) -> Any:
    """For each record a piece with the number of headers, then four for each header: length, name, length, value."""
    name, value = _binary_column(names), _binary_column(values)
    entry_count = int(counts.sum())
    buffers = [*(name.buffers if name else []), *(value.buffers if value else [])]
    flat = np.zeros(4 * entry_count + len(counts), np.complex128)
    is_count = np.zeros(len(flat), np.bool_)
    is_count[np.cumsum(4 * counts + 1) - 4 * counts - 1] = True
    flat[is_count] = _varint_views(counts)
    matrix = np.zeros((entry_count, 4), np.complex128)
    if name is not None:
        matrix[:, 0], matrix[:, 1] = _varint_views(name.lengths), name.views
        matrix[:, 2] = _varint_views(np.full(entry_count, -1, np.int64))
    if value is not None and name is not None:
        matrix[:, 2], matrix[:, 3] = _varint_views(value.lengths), _moved(value.views, len(name.buffers))
    flat[~is_count] = matrix.reshape(-1)
    array = pa.Array.from_buffers(pa.binary_view(), len(flat), [None, pa.py_buffer(flat), *buffers])
    return array.cast(pa.binary())


def _moved(views: Views, places: int) -> Views:
    """The same views for a list of buffers in which theirs come `places` later."""
    if not places:
        return views
    fields = views.view(np.int32).reshape(-1, 4).copy()
    fields[:, 2] += (fields[:, 0] > IN_PLACE_BYTES) * np.int32(places)
    return fields.reshape(-1).view(np.complex128)


def _varint_views(values: Int64s) -> Views:
    varints = _Varints.of(values)
    return _views(varints.sizes, varints.words, _ZERO)
