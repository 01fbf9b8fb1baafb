"""The headers of many records at once: the first header of all of them, then the second, and so on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from semel.protocol.errors import CorruptBatchError
from semel.protocol.varints import read_varint
from semel.protocol.vector_varints import Int64s, VarintReader

_FEW_RECORDS = 24  # below this many records, a step of numpy costs more than the same work in plain Python


class Headers(NamedTuple):
    """Where names and values are, of all headers of some records, in order. A length of -1 stands for null."""

    name_starts: Int64s
    name_lengths: Int64s
    value_starts: Int64s
    value_lengths: Int64s

    @classmethod
    def empty(cls, count: int) -> Headers:
        return cls(*(np.empty(count, np.int64) for _ in range(4)))


def read_headers(reader: VarintReader, starts: Int64s, counts: Int64s, ends: Int64s) -> Headers | None:
    """The headers of records whose headers start at `starts`; None if there are none. Raises unless they fill their
    records."""
    rows = np.flatnonzero(counts)
    if not len(rows):
        return None
    at, counts, ends = starts[rows], counts[rows], ends[rows]
    if (counts > (ends - at) // 2).any():
        raise CorruptBatchError("a record says it has more headers than fit into it")
    found = Headers.empty(int(counts.sum()))
    index = np.cumsum(counts) - counts  # of each record's next header in `found`
    while len(at) > _FEW_RECORDS:
        at = _read_one_each(reader, at, ends, index, found)
        counts, index = counts - 1, index + 1
        done = counts == 0
        if done.any():
            if (at[done] != ends[done]).any():
                raise CorruptBatchError("the headers of a record do not end where the record ends")
            going = ~done
            at, counts, ends, index = at[going], counts[going], ends[going], index[going]
    for row in range(len(at)):
        _read_rest(reader, int(at[row]), int(ends[row]), int(index[row]), int(counts[row]), found)
    return found


def _read_one_each(reader: VarintReader, at: Int64s, ends: Int64s, index: Int64s, found: Headers) -> Int64s:
    name_lengths, name_starts = reader.read(at)
    value_lengths, value_starts = reader.read(name_starts + np.maximum(name_lengths, 0))
    if int(name_lengths.min()) < 0 or int(value_lengths.min()) < -1:
        raise CorruptBatchError("a header without a name, or with a negative length")
    found.name_starts[index], found.name_lengths[index] = name_starts, name_lengths
    found.value_starts[index], found.value_lengths[index] = value_starts, value_lengths
    after: Int64s = value_starts + np.maximum(value_lengths, 0)
    if (after > ends).any():
        raise CorruptBatchError("the headers of a record run past its end")
    return after


def _read_rest(reader: VarintReader, at: int, end: int, index: int, count: int, found: Headers) -> None:
    """The headers of one record that has more of them than most, or has few companions."""
    first, data = at, reader.data[at:end].tobytes()
    at, end = 0, end - first
    for i in range(index, index + count):
        length, at = read_varint(data, at, end)
        if not 0 <= length <= end - at:
            raise CorruptBatchError(f"a header's name says it takes {length} bytes, but {end - at} are left")
        found.name_starts[i], found.name_lengths[i] = first + at, length
        length, at = read_varint(data, at + length, end)
        if not -1 <= length <= end - at:
            raise CorruptBatchError(f"a header's value says it takes {length} bytes, but {end - at} are left")
        found.value_starts[i], found.value_lengths[i] = first + at, length
        at += max(length, 0)
    if at != end:
        raise CorruptBatchError("the headers of a record do not end where the record ends")
