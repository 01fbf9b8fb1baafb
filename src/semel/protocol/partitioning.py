"""Which partition a key belongs to, and which partition of an internal topic coordinates an id: as Kafka's Java code.

The scalar functions need nothing but Python. Those over a column load numpy and pyarrow when called.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

SEED = 0x9747B28C
MULTIPLIER = 0x5BD1E995
_SHIFT = 24
_MASK = 0xFFFFFFFF

NO_PARTITION = -1  # what `partitions_for_keys` gives to a null key
_FEW_ROWS = 24  # below this many rows, a step of numpy costs more than the same work in plain Python


def murmur2(data: bytes | memoryview) -> int:
    """Kafka's 32-bit murmur2, as the unsigned number behind Java's int."""
    words = len(data) // 4
    return _murmur2_on(SEED ^ len(data), struct.unpack_from(f"<{words}I", data), bytes(data[words * 4 :]))


def _murmur2_on(state: int, words: tuple[int, ...], tail: bytes) -> int:
    h = state
    for k in words:
        k = k * MULTIPLIER & _MASK
        k = (k ^ (k >> _SHIFT)) * MULTIPLIER & _MASK
        h = h * MULTIPLIER & _MASK ^ k
    if tail:
        h = (h ^ int.from_bytes(tail, "little")) * MULTIPLIER & _MASK
    h = (h ^ (h >> 13)) * MULTIPLIER & _MASK
    return h ^ (h >> 15)


def partition_for_key(key: bytes | memoryview, partitions: int) -> int:
    """Where the Java client's default partitioner puts a record with this key."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions


def java_string_hash(text: str) -> int:
    """Java's String.hashCode: over UTF-16 units, as a signed 32-bit number."""
    h = 0
    for unit in memoryview(text.encode("utf-16-le", "surrogatepass")).cast("H"):
        h = (h * 31 + unit) & _MASK
    return h - 2**32 if h & 0x80000000 else h


def coordinator_partition(id_: str, partitions: int) -> int:
    """The partition of `__consumer_offsets` or `__transaction_state` that a group or transactional id belongs to."""
    h = java_string_hash(id_)
    return (0 if h == -(2**31) else abs(h)) % partitions  # Java's abs of the smallest int; Kafka makes it 0


def murmur2_column(keys: Any) -> npt.NDArray[np.uint32]:
    """`murmur2` of every value of a binary or string column. What stands for a null is the hash of no bytes."""
    import numpy as np

    from semel.protocol.arrow_binary import binary_parts

    data, starts, ends, valid = binary_parts(keys)
    starts = starts.astype(np.int64)
    lengths = ends - starts
    if valid is not None:
        lengths[~valid] = 0
    return _murmur2_lanes(data, starts, lengths)


def partitions_for_keys(keys: Any, partitions: int) -> npt.NDArray[np.int32]:
    """`partition_for_key` of every value of a binary or string column, and NO_PARTITION for nulls."""
    import numpy as np

    from semel.protocol.arrow_numbers import valid

    hashes = murmur2_column(keys)
    result = ((hashes & np.uint32(0x7FFFFFFF)) % np.uint32(partitions)).astype(np.int32)
    if keys.null_count:
        result[~valid(keys)] = NO_PARTITION
    return result


def _murmur2_lanes(
    data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint32]:
    """All rows step through their words together, the longest in front, so that those still at work are a prefix."""
    import numpy as np

    m = np.uint32(MULTIPLIER)
    h = np.uint32(SEED) ^ lengths.astype(np.uint32)
    if not len(h):
        return h
    order = None
    if lengths[0] != lengths.min() or lengths[0] != lengths.max():
        order = np.argsort(-lengths, kind="stable")
        starts, lengths, h = starts[order], lengths[order], h[order]
    words = lengths >> 2
    unaligned = np.ndarray((max(len(data) - 3, 0),), "<u4", buffer=data, strides=(1,))
    steps = np.searchsorted(-words, -np.arange(1, int(words[0]) + 1), side="right")  # rows that have a word at step i
    for step, rows in enumerate(steps.tolist()):
        if rows <= _FEW_ROWS:
            for row in range(rows):
                h[row] = _words_in_python(int(h[row]), data, int(starts[row]) + step * 4, int(words[row]) - step)
            break
        k = unaligned[starts[:rows] + step * 4] * m
        k ^= k >> np.uint32(_SHIFT)
        k *= m
        h[:rows] *= m
        h[:rows] ^= k
    _mix_tails(h, data, starts + (words << 2), lengths & 3)
    h ^= h >> np.uint32(13)
    h *= m
    h ^= h >> np.uint32(15)
    if order is None:
        return h
    result = np.empty_like(h)
    result[order] = h
    return result


def _words_in_python(h: int, data: npt.NDArray[np.uint8], at: int, words: int) -> int:
    for k in struct.unpack_from(f"<{words}I", data.data, at):
        k = k * MULTIPLIER & _MASK
        k = (k ^ (k >> _SHIFT)) * MULTIPLIER & _MASK
        h = h * MULTIPLIER & _MASK ^ k
    return h


def _mix_tails(
    h: npt.NDArray[np.uint32],
    data: npt.NDArray[np.uint8],
    at: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
) -> None:
    """The one to three bytes after the last whole word."""
    import numpy as np

    for count in (1, 2, 3):
        rows = np.flatnonzero(counts == count)
        if len(rows):
            tail = np.zeros(len(rows), np.uint32)
            for i in range(count):
                tail |= data[at[rows] + i].astype(np.uint32) << np.uint32(8 * i)
            h[rows] = (h[rows] ^ tail) * np.uint32(MULTIPLIER)
