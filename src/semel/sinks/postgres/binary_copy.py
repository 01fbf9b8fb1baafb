"""Arrow columns as PostgreSQL's binary COPY stream, whole columns at a time.

A row on the wire is the number of its fields, then for each field its length and its bytes; -1 stands for null. What
has the same size in every row is laid out by numpy in one block, what has not is a binary Arrow column; Arrow joins the
pieces of each row, and the data of the joined column is the stream.

The sizes and codes of values are those of PostgreSQL's receive functions (`int8recv`, `numeric_recv`, `array_recv`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

HEADER = b"PGCOPY\n\xff\r\n\x00" + bytes(8)
TRAILER = b"\xff\xff"
CHUNK_BYTES = 4 << 20  # rows of more than this are encoded in several steps
EPOCH_DAYS = 10_957  # from 1970-01-01 to 2000-01-01
EPOCH_US = EPOCH_DAYS * 86_400_000_000
# What date_recv and timestamp_recv take, as they are in Arrow: from 4714-11-24 BC on, and not every day of an int32.
# A timestamp is never too late, and an earlier one would wrap to a late one.
DAYS = (-2_440_588, 2_145_042_905)
MICROSECONDS = (-210_866_803_200_000_000, 2**63 - 1)
GROUP = 10_000  # PostgreSQL's numeric has digits in base 10,000
LONGEST_NUMERIC = 18  # decimal digits that fit into an int64


class WireType(NamedTuple):
    """What a column is in the stream: its type in PostgreSQL and that type's oid, which arrays carry."""

    name: str
    oid: int


_SIMPLE = {
    pa.bool_(): WireType("boolean", 16),
    pa.int8(): WireType("smallint", 21),
    pa.int16(): WireType("smallint", 21),
    pa.int32(): WireType("integer", 23),
    pa.int64(): WireType("bigint", 20),
    pa.float32(): WireType("real", 700),
    pa.float64(): WireType("double precision", 701),
    pa.string(): WireType("text", 25),
    pa.large_string(): WireType("text", 25),
    pa.binary(): WireType("bytea", 17),
    pa.large_binary(): WireType("bytea", 17),
    pa.date32(): WireType("date", 1082),
}
_WIDTHS = {"boolean": "u1", "smallint": ">i2", "integer": ">i4", "bigint": ">i8", "real": ">f4"} | {
    "double precision": ">f8",
    "date": ">i4",
    "timestamp": ">i8",
    "timestamptz": ">i8",
}


def wire_type(kind: pa.DataType) -> WireType | None:
    """The type in which a column travels; None if it cannot."""
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if pa.types.is_timestamp(kind):
        return WireType("timestamp", 1114) if kind.tz is None else WireType("timestamptz", 1184)
    if pa.types.is_decimal128(kind):
        # a longer one travels as text, and PostgreSQL reads it
        return WireType("numeric", 1700) if kind.precision <= LONGEST_NUMERIC else WireType("text", 25)
    if pa.types.is_list(kind):
        inside = wire_type(kind.value_type)
        return None if inside is None or inside.name.endswith("[]") else WireType(f"{inside.name}[]", inside.oid)
    return None


def bad_times(column: pa.Array) -> dict[int, str]:
    """Rows with a date or time that is out of range, with the reason."""
    is_list = pa.types.is_list(column.type)
    values = pc.list_flatten(column) if is_list else column
    if not (pa.types.is_date(values.type) or pa.types.is_timestamp(values.type)):
        return {}
    is_date = pa.types.is_date(values.type)
    (first, last), unit = (DAYS, "days") if is_date else (MICROSECONDS, "microseconds")
    numbers = values.cast(pa.int32() if is_date else pa.int64())
    is_bad = pc.or_(pc.less(numbers, first), pc.greater(numbers, last))
    if not pc.any(is_bad).as_py():
        return {}
    rows = pc.list_parent_indices(column) if is_list else pa.array(range(len(column)))
    found = zip(rows.filter(is_bad).to_pylist(), numbers.filter(is_bad).to_pylist(), strict=True)
    return {row: f"is {number} {unit} from 1970" for row, number in found}


def encoded(batch: pa.RecordBatch, chunk_bytes: int = CHUNK_BYTES) -> Iterator[memoryview]:
    """The rows of a batch in the stream, without its header and trailer, in pieces of a bounded size."""
    rows = batch.num_rows
    if not rows:
        return
    step = max(1, rows * chunk_bytes // max(1, batch.nbytes))
    for start in range(0, rows, step):
        yield _rows(batch.slice(start, step))


def _rows(batch: pa.RecordBatch) -> memoryview:
    row = _Row(batch.num_rows)
    row.fixed(np.full(batch.num_rows, batch.num_columns, ">i2"))
    for column in batch.columns:
        _append(row, column)
    return row.joined()


class _Row:
    """The pieces of all rows, side by side."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pieces: list[pa.Array] = []
        self._blocks: list[np.ndarray] = []  # each (count, bytes) in the end, not yet a piece

    def fixed(self, values: np.ndarray) -> None:
        """Values of one size."""
        self._blocks.append(np.ascontiguousarray(values).view(np.uint8).reshape(self.count, -1))

    def varying(self, values: pa.Array) -> None:
        """A binary column without nulls."""
        self._close_block()
        self._pieces.append(values)

    def _close_block(self) -> None:
        if self._blocks:
            block = self._blocks[0] if len(self._blocks) == 1 else np.concatenate(self._blocks, axis=1)
            self._pieces.append(_as_column(block))
            self._blocks = []

    def column(self) -> pa.Array:
        """All pieces of each row in one binary value."""
        self._close_block()
        if len(self._pieces) == 1:
            return self._pieces[0]
        return pc.binary_join_element_wise(*self._pieces, b"")

    def joined(self) -> memoryview:
        column = self.column()
        offsets = np.frombuffer(column.buffers()[1], np.int32)
        first, last = offsets[column.offset], offsets[column.offset + len(column)]
        return memoryview(column.buffers()[2])[first:last]


def _as_column(block: np.ndarray) -> pa.Array:
    count, width = block.shape
    offsets = np.arange(0, (count + 1) * width, width, dtype=np.int32)[: count + 1]
    return _binary(offsets, np.ascontiguousarray(block))


def _binary(offsets: np.ndarray, data: Any) -> pa.Array:
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def _append(row: _Row, column: pa.Array) -> None:
    """One field of all rows: its length, then its bytes."""
    kind = column.type
    if pa.types.is_decimal128(kind) and kind.precision > LONGEST_NUMERIC:
        column = column.cast(pa.string())
    if pa.types.is_list(kind):
        _append_lists(row, column)
    elif wire_type(column.type) in (_SIMPLE[pa.string()], _SIMPLE[pa.binary()]):
        _append_bytes(row, column.cast(pa.binary()))
    else:
        _append_values(row, _blocks_of(column), column)


def _is_valid(column: pa.Array) -> np.ndarray | None:
    """None where no value is null."""
    return column.is_valid().to_numpy(zero_copy_only=False) if column.null_count else None


def _append_values(row: _Row, block: np.ndarray, column: pa.Array) -> None:
    """Values of one size, a line of bytes each; what stands in the place of a null is left out."""
    width = block.shape[1]
    valid = _is_valid(column)
    if valid is None:
        row.fixed(np.full(row.count, width, ">i4"))
        row.fixed(block)
        return
    row.fixed(np.where(valid, width, -1).astype(">i4"))
    row.varying(_binary(_offsets(valid * width), np.ascontiguousarray(block[valid])))


def _append_bytes(row: _Row, column: pa.Array) -> None:
    lengths = pc.binary_length(column)
    if column.null_count:
        lengths, column = lengths.fill_null(-1), column.fill_null(b"")
    row.fixed(lengths.to_numpy(zero_copy_only=False).astype(">i4"))
    row.varying(column)


def _append_lists(row: _Row, column: pa.Array) -> None:
    """Arrays of one dimension. The encoded values of all lists lie one after the other, so a list is a slice of them.
    A list without values has a dimension of length 0, which PostgreSQL reads as an empty array."""
    inside = wire_type(column.type.value_type)
    assert inside is not None, "checked before anything is written"
    values = column.flatten()  # without what null lists cover
    data = _field_of(values)
    counts = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
    valid = _is_valid(column)
    ends = np.frombuffer(data.buffers()[1], np.int32)
    offsets = ends[_offsets(counts)]
    header = np.empty((row.count, 5), ">i4")
    header[:] = (1, int(values.null_count > 0), inside.oid, 0, 1)
    header[:, 3] = counts
    lengths = header.nbytes // row.count + np.diff(offsets)
    if valid is None:
        row.fixed(lengths.astype(">i4"))
        row.fixed(header)
    else:
        row.fixed(np.where(valid, lengths, -1).astype(">i4"))
        row.varying(_binary(_offsets(valid * 20), np.ascontiguousarray(header[valid])))
    row.varying(_binary(offsets, data.buffers()[2]))


def _field_of(values: pa.Array) -> pa.Array:
    """A field by itself: length and bytes of each value."""
    if not len(values):
        return _binary(np.zeros(1, np.int32), b"")
    row = _Row(len(values))
    _append(row, values)
    return row.column()


def _offsets(lengths: np.ndarray) -> np.ndarray:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _blocks_of(column: pa.Array) -> np.ndarray:
    """Values of one size as PostgreSQL has them: a line of bytes for each."""
    kind = column.type
    if pa.types.is_decimal128(kind):
        return _numerics(column)
    wire = wire_type(kind)
    assert wire is not None, "checked before anything is written"
    values = _numbers(column).astype(_WIDTHS[wire.name])
    return np.ascontiguousarray(values).view(np.uint8).reshape(len(column), -1)


def _numbers(column: pa.Array) -> np.ndarray:
    """Numbers as they lie in Arrow's buffer; days and microseconds count from the year 2000."""
    kind = column.type
    if pa.types.is_boolean(kind):
        return np.asarray(column.cast(pa.uint8()).fill_null(0))
    if pa.types.is_date(kind):
        return _buffer(column, np.int32) - EPOCH_DAYS
    if pa.types.is_timestamp(kind):
        return _buffer(column.cast(pa.timestamp("us", kind.tz)), np.int64) - EPOCH_US
    return _buffer(column, kind.to_pandas_dtype())


def _buffer(column: pa.Array, kind: Any) -> np.ndarray:
    found = np.frombuffer(column.buffers()[1], kind)
    return found[column.offset : column.offset + len(column)]


def _numerics(column: pa.Array) -> np.ndarray:
    """Digits in base 10,000, as many for each value as the type needs; PostgreSQL strips zeros at both ends."""
    digits, scale = column.type.precision, max(0, column.type.scale)
    words = np.frombuffer(column.buffers()[1], np.int64)[2 * column.offset : 2 * (column.offset + len(column))]
    valid = _is_valid(column)
    unscaled = words[0::2] if valid is None else np.where(valid, words[0::2], 0)
    size = np.abs(unscaled)
    whole, part = np.divmod(size, 10**scale)
    wholes, parts = -(-max(1, digits - scale) // 4), -(-scale // 4)
    out = np.empty((len(column), 4 + wholes + parts), ">i2")
    out[:, 0], out[:, 1] = wholes + parts, wholes - 1
    out[:, 2] = np.where(unscaled < 0, 0x4000, 0)
    out[:, 3] = scale
    last = 4 + wholes + parts
    if scale % 4:  # the last group has fewer digits
        last -= 1
        part, rest = np.divmod(part, 10 ** (scale % 4))
        out[:, last] = rest * 10 ** (4 - scale % 4)
    for value, first, end in ((whole, 4, 4 + wholes), (part, 4 + wholes, last)):
        for place in reversed(range(first, end)):
            value, out[:, place] = np.divmod(value, GROUP)
    return out.view(np.uint8).reshape(len(column), -1)
