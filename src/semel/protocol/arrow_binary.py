"""Arrow binary and string columns as numpy arrays: where each value starts and ends in one run of bytes. No copies."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from semel.protocol.arrow_numbers import valid
from semel.protocol.errors import EncodeError

Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class BinaryParts(NamedTuple):
    """Value i is `data[starts[i] : ends[i]]`; null where `valid` is there and false. Nulls may span bytes."""

    data: Bytes
    starts: npt.NDArray[np.signedinteger[Any]]
    ends: npt.NDArray[np.signedinteger[Any]]
    valid: npt.NDArray[np.bool_] | None


def binary_parts(column: Any) -> BinaryParts:
    """The parts of a binary, string, large or view column (Array or ChunkedArray)."""
    array = plain_binary(column)
    length, offset = len(array), array.offset
    width = np.dtype(np.int64) if pa.types.is_large_binary(array.type) else np.dtype(np.int32)
    _, offsets_buffer, data_buffer = array.buffers()
    if offsets_buffer is None or not offsets_buffer.size:
        offsets = np.zeros(length + 1, width)
    else:
        offsets = np.frombuffer(offsets_buffer, width, length + 1, offset * width.itemsize)
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer is not None and data_buffer.size else _NO_BYTES
    return BinaryParts(data, offsets[:-1], offsets[1:], valid_mask(array))


def plain_binary(column: Any) -> Any:
    """A binary or large_binary Array with the same bytes: a free cast where the type only has another name."""
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        if isinstance(column, pa.ChunkedArray):  # combine_chunks keeps the chunks when they do not fit one array
            column = pa.concat_arrays([chunk.cast(pa.large_binary()) for chunk in column.chunks])
    kind = column.type
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return column
    if pa.types.is_dictionary(kind):
        return plain_binary(column.dictionary_decode())
    if pa.types.is_large_string(kind):
        return column.cast(pa.large_binary())
    if pa.types.is_string(kind) or kind in (pa.string_view(), pa.binary_view()) or pa.types.is_null(kind):
        return column.cast(pa.binary())
    if pa.types.is_fixed_size_binary(kind):
        return column.cast(pa.binary())
    raise EncodeError(f"a column of type {kind}, expected binary or string")


def valid_mask(array: Any) -> npt.NDArray[np.bool_] | None:
    """True where a value is, or None where all are."""
    if not array.null_count:
        return None
    return valid(array)


_NO_BYTES: Bytes = np.zeros(0, np.uint8)
