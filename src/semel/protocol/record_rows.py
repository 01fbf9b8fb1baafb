"""Records that are alike, checked as rows of bytes.

Many batches are made of runs of records of one shape: the same lengths, and timestamp and offset deltas that take as
many bytes. Such a run is a table. If every row has the first row's bytes in all places that hold lengths, and goes on
with a varint where the first row does, then all rows have the first row's fields at the same places. What counts of a
row fits two or three words of eight bytes, which are compared for all rows at once. The whole layout of small batches
is kept: the next batch often has the same.
"""

from __future__ import annotations

import functools
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from semel.protocol.batch import Buffer
from semel.protocol.errors import CorruptBatchError
from semel.protocol.record_check import RecordFacts, facts_of
from semel.protocol.varints import read_varint
from semel.protocol.vector_varints import (
    SHORT_LIMIT,
    SHORT_RECORD_SIZES,
    SHORT_SIZES,
    SHORT_VALUES,
    SHORT_WORDS,
    Bytes,
    UInt64s,
    VarintReader,
    length_sizes,
    varint_words,
    zigzag,
)

SHORTEST_RUN = 8  # records; batches of shorter runs are read otherwise
LARGEST_LAYOUT_BYTES = 64 << 10
MOST_LAYOUTS = 16
_WORD = 8
_FIRST_OF_SIZE = (64, 8192, 1 << 20, 1 << 27)  # the offset deltas from which on a varint takes a byte more


class _Shape(NamedTuple):
    """Where the fields of a record are; it has no headers."""

    size: int
    timestamp_at: int
    offset_at: int
    key_length_at: int
    key_at: int
    value_length_at: int
    value_at: int
    is_keyless: bool


_Run = tuple[int, int, _Shape]  # where it starts, its rows, their shape


class _Layout(NamedTuple):
    """A whole batch of records that were right: the bits that hold structure. Producers of records of one size send
    one batch after the other with the same."""

    places: npt.NDArray[np.intp]  # of the bytes that hold it
    mask: Bytes
    bits: bytes
    runs: list[_Run]
    facts: RecordFacts  # but for the highest timestamp


_layouts: OrderedDict[tuple[int, int, int], _Layout] = OrderedDict()


def check_alike(body: Buffer, record_count: int) -> RecordFacts | None:
    """None if the records are not alike: that says nothing about whether they are right."""
    key = (record_count, len(body), body[0])
    layout = _layouts.get(key)
    if layout is not None:
        found = np.frombuffer(body, np.uint8).take(layout.places)
        found &= layout.mask
        if found.tobytes() == layout.bits:
            facts = layout.facts
            return RecordFacts(facts.min_timestamp_delta, _highest_delta(body, layout.runs), False, facts.keyless)
    if not _starts_alike(body):
        return None
    runs: list[_Run] = []
    at = number = 0
    while number < record_count:
        shape = _shape_of(body, at, number)
        if shape is None:
            return None
        rows = _run(body, at, shape, number, record_count - number)
        if rows < SHORTEST_RUN and number + rows < record_count - 1:
            return None
        runs.append((at, rows, shape))
        number += rows
        at += rows * shape.size
    if at != len(body):
        return None
    facts = _facts(body, runs)
    if len(body) <= LARGEST_LAYOUT_BYTES:
        _keep(key, _layout_of(body, runs, facts))
    return facts


def _starts_alike(body: Buffer) -> bool:
    """At a glance: whether the first records have the same size."""
    low, high = body[0], body[1]
    if low < 0x80:
        size = 1 + (low >> 1)
    elif high < 0x80:
        size = 2 + ((low & 0x7F) >> 1 | high << 6)
    else:
        return True  # who knows
    return 2 * size < len(body) and body[size] == low == body[2 * size]


def _facts(body: Buffer, runs: list[_Run]) -> RecordFacts:
    keyless: list[range] = []
    number = 0
    for _, rows, shape in runs:
        if shape.is_keyless:
            keyless.append(range(number, number + rows))
        number += rows
    is_all = len(keyless) == len(runs)
    numbers = range(number) if is_all else [each for numbers in keyless for each in numbers]
    longest = max(shape.offset_at - shape.timestamp_at for _, _, shape in runs)
    return facts_of(longest, _highest_delta(body, runs), numbers)


def _highest_delta(body: Buffer, runs: list[_Run]) -> int:
    """Of the timestamps. What follows one byte of them is the offset delta: two bytes can always be read."""
    highest = []
    for at, rows, shape in runs:
        start = at + shape.timestamp_at
        if shape.offset_at - shape.timestamp_at <= 2:
            pairs: npt.NDArray[np.uint16] = np.ndarray((rows,), "<u2", body, start, (shape.size,))
            highest.append(int(SHORT_VALUES.take(pairs).max()))
        else:
            places = start + np.arange(rows, dtype=np.int64) * shape.size
            highest.append(int(VarintReader(np.frombuffer(body, np.uint8)).read(places, 64)[0].max()))
    return max(highest)


def _layout_of(body: Buffer, runs: list[_Run], facts: RecordFacts) -> _Layout:
    mask = np.zeros(len(body), np.uint8)
    for at, rows, shape in runs:
        table = mask[at : at + rows * shape.size].reshape(rows, shape.size)
        table[:, : shape.timestamp_at - 1] = 0xFF
        table[:, shape.timestamp_at : shape.offset_at] = 0x80  # whether the timestamp goes on
        table[:, shape.offset_at : shape.key_at] = 0xFF
        table[:, shape.value_length_at : shape.value_at] = 0xFF
        table[:, -1] = 0xFF
    places = np.flatnonzero(mask)
    mask = mask[places]
    return _Layout(places, mask, (np.frombuffer(body, np.uint8)[places] & mask).tobytes(), runs, facts)


def _keep(key: tuple[int, int, int], layout: _Layout) -> None:
    """Several threads may be here: each step is one operation on the dictionary."""
    _layouts[key] = layout
    while len(_layouts) > MOST_LAYOUTS:
        try:
            _layouts.popitem(last=False)
        except KeyError:
            return


def _shape_of(body: Buffer, start: int, number: int) -> _Shape | None:
    """The shape of the record at a position; None if it has headers, or another number, or is none."""
    try:
        length, at = read_varint(body, start, len(body))
        end = at + length
        if length < 0 or end > len(body):
            return None
        timestamp_at = at + 1
        _, offset_at = read_varint(body, timestamp_at, end, 64)
        offset_delta, key_length_at = read_varint(body, offset_at, end)
        key_length, key_at = read_varint(body, key_length_at, end)
        value_length_at = key_at + key_length if key_length > 0 else key_at
        value_length, value_at = read_varint(body, value_length_at, end)
    except CorruptBatchError:
        return None
    after = value_at + value_length if value_length > 0 else value_at
    if key_length < -1 or value_length < -1 or offset_delta != number or after != end - 1 or body[after]:
        return None
    return _Shape(
        end - start,
        timestamp_at - start,
        offset_at - start,
        key_length_at - start,
        key_at - start,
        value_length_at - start,
        value_at - start,
        key_length < 0,
    )


def _run(body: Buffer, at: int, shape: _Shape, number: int, left: int) -> int:
    """How many records from a position on, of which the first was looked at, have its shape and their numbers."""
    size = shape.size
    boundary = next((first for first in _FIRST_OF_SIZE if number < first), number)
    left_bytes = len(body) - at
    rows = min(left, boundary - number, left_bytes // size, (left_bytes - shape.value_length_at - _WORD) // size + 1)
    if rows < 2 or shape.key_length_at > _WORD or body[at + size] != body[at]:
        return 1
    front = np.ndarray((rows,), "<u8", body, at, (size,))
    same = (front & _front_mask(shape)) == _expected_fronts(int(front[0]), shape, number, rows)
    middle = np.ndarray((rows,), "<u8", body, at + shape.key_length_at, (size,))
    same &= _equal_to_first(middle, min(shape.value_at, shape.key_length_at + _WORD) - shape.key_length_at)
    if shape.value_at - shape.key_length_at > _WORD:
        lengths = np.ndarray((rows,), "<u8", body, at + shape.value_length_at, (size,))
        same &= _equal_to_first(lengths, shape.value_at - shape.value_length_at)
    same &= np.ndarray((rows,), np.uint8, body, at + size - 1, (size,)) == 0  # no headers
    return rows if same.all() else max(1, int(same.argmin()))


def _front_mask(shape: _Shape) -> np.uint64:
    """Of the bytes up to the key's length: the record's length, whether the timestamp goes on, the offset."""
    mask = b"\xff" * (shape.timestamp_at - 1) + b"\0"  # the attributes say nothing
    mask += b"\x80" * (shape.offset_at - shape.timestamp_at) + b"\xff" * (shape.key_length_at - shape.offset_at)
    return np.uint64(int.from_bytes(mask, "little"))


def _expected_fronts(first: int, shape: _Shape, number: int, rows: int) -> UInt64s:
    """The masked bytes up to the key's length of records like the first one, with their offsets."""
    deltas = SHORT_WORDS[number : number + rows] if number + rows <= SHORT_LIMIT else _deltas(number + rows)[number:]
    offset = ((1 << 8 * shape.key_length_at) - 1) & ~((1 << 8 * shape.offset_at) - 1)
    constant = first & int(_front_mask(shape)) & ~offset
    expected: UInt64s = (deltas << np.uint64(8 * shape.offset_at)) | np.uint64(constant)
    return expected


def _deltas(end: int) -> UInt64s:
    """The varints of 0 up to an end, as words."""
    rounded = 1 << (end - 1).bit_length()
    return _many_deltas(rounded)[:end]


@lru_cache(maxsize=1)
def _many_deltas(end: int) -> UInt64s:
    return varint_words(zigzag(np.arange(end)))


def _equal_to_first(words: UInt64s, bytes_: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    mask = np.uint64((1 << 8 * bytes_) - 1)
    equal: np.ndarray[tuple[int], np.dtype[np.bool_]] = (words & mask) == (words[0] & mask)
    return equal


# --- Records of different lengths, checked by words of eight bytes ---
#
# The chain of lengths is followed in Python, which yields where each record should start. Everything else is some
# twenty operations on all records at once: a record's first eight bytes hold its length, its timestamp delta and its
# offset delta; the lengths of key and value are looked up by their first two bytes. What does not fit this form
# (headers, lengths of three bytes, anything wrong) is not decided here: the caller reads such a batch in a slower
# way.


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
