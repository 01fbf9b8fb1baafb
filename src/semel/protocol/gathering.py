"""Values that lie scattered in a buffer, as an Arrow column: copied out of it, or left where they are."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from semel.protocol.vector_varints import Int64s, VarintReader

IN_PLACE_BYTES = 12  # the largest value that stands in its view
_MASKS = np.array([(1 << (8 * size)) - 1 for size in range(9)], np.uint64)  # keeps the first `size` bytes of a word


def gather(data: pa.Buffer, starts: Int64s, lengths: Int64s) -> pa.Array:
    """The values at the given places, one after the other. They are taken out of a column that covers the buffer:
    value, gap, value, gap."""
    count = len(starts)
    if not count:
        return pa.nulls(0, pa.binary())
    shortest = int(lengths.min())
    if int(lengths.max()) == -1:
        return pa.nulls(count, pa.binary())
    bounds = np.empty(2 * count, np.int32)
    bounds[0::2] = starts
    bounds[1::2] = starts + (lengths if shortest >= 0 else np.maximum(lengths, 0))
    pool = pa.Array.from_buffers(pa.binary(), 2 * count - 1, [None, pa.py_buffer(bounds), data])
    taken = pool.take(pa.array(np.arange(0, 2 * count, 2, dtype=np.int32)))
    if shortest >= 0:
        return taken
    valid = pa.py_buffer(np.packbits(lengths >= 0, bitorder="little"))
    return pa.Array.from_buffers(pa.binary(), count, [valid, *taken.buffers()[1:]])


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
    valid = None
    if int(lengths.min()) < 0:
        valid = pa.py_buffer(np.packbits(lengths >= 0, bitorder="little"))
    return pa.Array.from_buffers(pa.binary_view(), len(starts), [valid, pa.py_buffer(words), data])
