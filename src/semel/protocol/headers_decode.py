"""The headers of many records as an Arrow column."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from semel.protocol.gathering import gather
from semel.protocol.record_headers import Headers
from semel.protocol.vector_varints import Int64s

HEADERS_TYPE = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


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
