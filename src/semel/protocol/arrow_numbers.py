"""Columns of numbers between numpy and Arrow, without pandas.

Where pandas is installed, the first `pa.array`, `pa.scalar` or `to_numpy` of a process imports it, and so does a
function of `pyarrow.compute` that is given a Python value: 0.4 s of processor time, in every Python worker of Spark and
in every short program, for a library that nothing here uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def to_arrow(values: npt.NDArray[Any]) -> pa.Array:
    """A column of numbers or booleans, without nulls; numbers are not copied."""
    if values.dtype == np.bool_:
        return pa.Array.from_buffers(pa.bool_(), len(values), [None, _bits(values)])
    return pa.Array.from_buffers(
        pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(np.ascontiguousarray(values))]
    )


def to_numpy(column: Any) -> npt.NDArray[Any]:
    """The values of a column of integers, floats or booleans (Array or ChunkedArray); of nulls whatever is there."""
    if isinstance(column, pa.ChunkedArray):
        if column.num_chunks == 1:
            return to_numpy(column.chunk(0))
        parts = [to_numpy(chunk) for chunk in column.chunks]
        return np.concatenate(parts) if parts else to_numpy(pa.nulls(0, column.type))
    length, data = len(column), column.buffers()[1]
    is_bool = pa.types.is_boolean(column.type)
    kind = np.dtype(np.bool_ if is_bool else column.type.to_pandas_dtype())
    if data is None or not data.size:
        return np.zeros(length, kind)
    if is_bool:
        bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little", count=column.offset + length)
        return bits[column.offset :].view(np.bool_)
    return np.frombuffer(data, kind, length, column.offset * kind.itemsize)


def valid(column: Any) -> npt.NDArray[np.bool_]:
    """True where a column has a value."""
    return to_numpy(column.is_valid())


def filled(column: Any, otherwise: int) -> npt.NDArray[Any]:
    """The values of a column of integers, and another one where it has none."""
    found = to_numpy(column)
    return np.where(valid(column), found, otherwise) if column.null_count else found


def scalar(value: int, kind: pa.DataType | None = None) -> pa.Scalar:
    """An integer for `pyarrow.compute`, also as a type that an int64 can be cast to."""
    made = to_arrow(np.array([value], np.int64))
    return (made if kind is None else made.cast(kind))[0]


def binaries(values: Sequence[bytes | None]) -> pa.Array:
    """A column of bytes."""
    bare, valid = cast(Sequence[bytes], values), None
    try:
        data = b"".join(bare)
    except TypeError:  # there is a null
        valid = _bits(np.fromiter((value is not None for value in values), np.bool_, len(values)))
        bare = [value or b"" for value in values]
        data = b"".join(bare)
    is_large = len(data) >= 2**31
    ends = np.zeros(len(values) + 1, np.int64 if is_large else np.int32)
    np.cumsum(np.fromiter(map(len, bare), np.int64, len(values)), out=ends[1:])
    kind = pa.large_binary() if is_large else pa.binary()
    return pa.Array.from_buffers(kind, len(values), [valid, pa.py_buffer(ends), pa.py_buffer(data)])


def texts(values: Sequence[str]) -> pa.Array:
    return binaries([value.encode() for value in values]).cast(pa.string())


def column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """A column of integers or texts, without nulls."""
    return texts(values) if pa.types.is_string(kind) else to_arrow(np.array(values, kind.to_pandas_dtype()))


def _bits(values: npt.NDArray[np.bool_]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(values, bitorder="little"))
