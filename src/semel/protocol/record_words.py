"""Records of different lengths, checked by words of eight bytes.

The chain of lengths is followed in Python, which yields where each record should start. Everything else is some twenty
operations on all records at once: a record's first eight bytes hold its length, its timestamp delta and its offset
delta; the lengths of key and value are looked up by their first two bytes. What does not fit this form (headers,
lengths of three bytes, anything wrong) is not decided here: the caller reads such a batch in a slower way.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from semel.protocol.batch import Buffer
from semel.protocol.record_check import RecordFacts, facts_of
from semel.protocol.vector_varints import (
    SHORT_LIMIT,
    SHORT_RECORD_SIZES,
    SHORT_SIZES,
    SHORT_VALUES,
    Bytes,
    UInt64s,
    length_sizes,
    varint_words,
    zigzag,
)

LONG_LIMIT = 65536  # records of a batch; an offset delta takes three bytes then

_PADDING = bytes(8)  # so that a word can be read at every position
_NOWHERE = 1 << 40  # no position
_NULL = 1  # the length -1

# By the first two bytes of a varint: the bytes of a length and of what it counts, none by -1; bits of a record's length
# and its attributes, 0 if the length is negative or longer; bits of a timestamp delta, 0 if it is longer.
_ADVANCES: npt.NDArray[np.int64] = np.where(
    (SHORT_SIZES == 0) | (SHORT_VALUES < -1), _NOWHERE, SHORT_SIZES + np.maximum(SHORT_VALUES, 0).astype(np.int64)
)
_TIMESTAMP_BITS: npt.NDArray[np.uint8] = SHORT_SIZES << np.uint8(3)
_LENGTH_BITS: npt.NDArray[np.uint8] = np.where(SHORT_RECORD_SIZES == 0, 0, _TIMESTAMP_BITS + 8).astype(np.uint8)


class OffsetTable(NamedTuple):
    """Of the offset deltas 0, 1, 2 and so on, up to a limit: their bytes as words, and how many bits these take."""

    words: UInt64s
    masks: UInt64s
    bits: Bytes


@functools.cache
def _offset_table(limit: int) -> OffsetTable:
    deltas = np.arange(limit, dtype=np.int64)
    sizes = length_sizes(deltas).astype(np.uint8)
    bits = sizes << np.uint8(3)
    masks = (np.uint64(1) << bits.astype(np.uint64)) - np.uint64(1)
    return OffsetTable(varint_words(zigzag(deltas)), masks, bits)


def check_words(body: Buffer, record_count: int) -> RecordFacts | None:
    """None if the records are not of this form: that says nothing about whether they are right."""
    size = len(body)
    data = b"".join((body, _PADDING))
    chain = _follow_lengths(data, record_count)
    if chain[-1] != size:
        return None
    words: npt.NDArray[np.uint64] = np.ndarray((size + 1,), "<u8", data, 0, (1,))
    pairs: npt.NDArray[np.uint16] = np.ndarray((size + 1,), "<u2", data, 0, (1,))
    positions = np.frombuffer(array("q", chain), np.int64)
    starts, last = positions[:-1], positions[1:] - 1
    front = words[starts]
    used = _LENGTH_BITS.take(front.astype(np.uint16))
    if not used.all() or pairs[last].astype(np.uint8).any():  # the last byte of a record is its number of headers
        return None
    front >>= used
    stamps = front.astype(np.uint16)
    timestamp_bits = _TIMESTAMP_BITS.take(stamps)
    front >>= timestamp_bits  # by none, if it is longer: then it is no offset delta either
    offsets = _offset_table(SHORT_LIMIT if record_count <= SHORT_LIMIT else LONG_LIMIT)
    front ^= offsets.words[:record_count]
    front &= offsets.masks[:record_count]
    if front.any():
        return None
    used += timestamp_bits
    used += offsets.bits[:record_count]
    used >>= np.uint8(3)
    at = starts + used
    try:
        keys = pairs[at]
        at += _ADVANCES.take(keys)
        at += _ADVANCES.take(pairs[at])
    except IndexError:  # a key that ends beyond the batch, or is no key
        return None
    if (at != last).any():
        return None
    highest = int(SHORT_VALUES.take(stamps).max())
    return facts_of(int(timestamp_bits.max()) >> 3, highest, _keyless(keys.astype(np.uint8).tobytes()))


def _keyless(key_lengths: bytes) -> Sequence[int]:
    """By the first byte of each key's length."""
    count = key_lengths.count(_NULL)
    if not count:
        return ()
    if count == len(key_lengths):
        return range(count)
    return [number for number, length in enumerate(key_lengths) if length == _NULL]


def _follow_lengths(data: bytes, record_count: int) -> list[int]:
    """Where each record starts, and the end of the last, if their lengths take one or two bytes. A length of another
    form leads to a wrong place; the caller looks for such lengths."""
    chain = [0]
    note = chain.append
    at = 0
    try:
        for _ in range(record_count):
            low = data[at]
            if low < 0x80:
                at += 1 + (low >> 1)
            else:
                at += (low >> 1) + (data[at + 1] << 6) - 62  # 2 + ((low & 0x7F) >> 1) + (high << 6)
            note(at)
    except IndexError:
        note(_NOWHERE)
    return chain
