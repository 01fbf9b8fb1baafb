"""Zigzag varints, whole arrays at a time.

Writing: a varint of up to eight bytes is one little-endian 64-bit word. Reading: two bytes at a time through a table,
which settles numbers below 8,192; the few longer ones are read from 64-bit words.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from semel.protocol.errors import CorruptBatchError

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]

WIDEST_WORD = 2**56  # zigzag numbers below this take up to eight bytes


# --- writing
def zigzag(values: Int64s) -> UInt64s:
    result: UInt64s = ((values << 1) ^ (values >> 63)).view(np.uint64)
    return result


def length_sizes(lengths: Int64s) -> Int64s:
    """Bytes that each number takes; for numbers from -1 up to 32 bits, as lengths are."""
    longest = int(lengths.max()) if len(lengths) else 0
    sizes = (lengths > 63).astype(np.int64)
    sizes += 1
    for bits in (13, 20, 27):
        if longest >> bits:
            sizes += lengths >= 1 << bits
    return sizes


def varint_sizes(zigzagged: UInt64s) -> Int64s:
    """Bytes that each number takes."""
    sizes = np.ones(len(zigzagged), np.int64)
    largest = int(zigzagged.max()) if len(zigzagged) else 0
    bits = 7
    while largest >> bits:
        sizes += zigzagged >= np.uint64(1 << bits)
        bits += 7
    return sizes


def varint_words(zigzagged: UInt64s) -> UInt64s:
    """The bytes of each varint as a little-endian word. Numbers must be below WIDEST_WORD."""
    words = zigzagged & np.uint64(0x7F)
    largest = int(zigzagged.max()) if len(zigzagged) else 0
    byte = 1
    while largest >> (7 * byte):
        shifted = zigzagged >> np.uint64(7 * byte)
        words |= (shifted & np.uint64(0x7F)) << np.uint64(8 * byte)
        words |= (shifted != 0).astype(np.uint64) << np.uint64(8 * byte - 1)  # the byte before goes on
        byte += 1
    return words


SHORT_LIMIT = 8192  # numbers from -1 up to here have their words in a table, -1 at its end
SHORT_WORDS: UInt64s = varint_words(zigzag(np.append(np.arange(SHORT_LIMIT), -1)))


# --- reading
def _tables() -> tuple[npt.NDArray[np.int16], npt.NDArray[np.uint8]]:
    words = np.arange(65536, dtype=np.int32)
    low, high = words & 0xFF, words >> 8
    one = low < 0x80
    raw = np.where(one, low, (low & 0x7F) | (high << 7))
    sizes = np.where(one, 1, np.where(high < 0x80, 2, 0))
    raw[sizes == 0] = 0
    return ((raw >> 1) ^ -(raw & 1)).astype(np.int16), sizes.astype(np.uint8)


SHORT_VALUES, SHORT_SIZES = _tables()  # by the first two bytes; size 0 where the varint is longer
# A record's whole size, length field included, by its first two bytes; 0 where the field is longer or negative.
SHORT_RECORD_SIZES: Int64s = np.where(
    (SHORT_SIZES == 0) | (SHORT_VALUES < 0), 0, SHORT_VALUES.astype(np.int64) + SHORT_SIZES
)


def last_bits(words: UInt64s) -> UInt64s:
    """The top bit of the last byte of the varint at the start of each word; 0 if it goes on after the word."""
    bits = ~words & np.uint64(0x8080808080808080)
    bits &= np.uint64(0) - bits
    return bits


def joined_bits(words: UInt64s, last_bits: UInt64s) -> UInt64s:
    """The number (still zigzag) of each such varint, or of the part of it that is in the word: groups of 7 bits become
    groups of 14, of 28, one."""
    words = words & (last_bits - np.uint64(1)) & np.uint64(0x7F7F7F7F7F7F7F7F)
    for shift, low in ((1, 0x007F007F007F007F), (2, 0x00003FFF00003FFF), (4, 0x000000000FFFFFFF)):
        high = words >> np.uint64(shift)
        words &= np.uint64(low)
        words |= high & np.uint64(low << (8 * shift - shift))
    return words


# The size of a varint by the remainder of its last bit.
BYTES_OF_BIT = np.zeros(19, np.uint8)
BYTES_OF_BIT[[(0x80 << 8 * byte) % 19 for byte in range(8)]] = range(1, 9)


class VarintReader:
    """Reads varints at many positions of one buffer. A position past the end reads as zero bytes; whoever reads must
    check in the end that every record's fields end where the record ends."""

    def __init__(self, data: Bytes) -> None:
        if len(data) < 16:
            data = np.concatenate([data, np.zeros(16, np.uint8)])
        self.data = data
        self.all_pairs: npt.NDArray[Any] = np.ndarray((len(data) - 1,), "<u2", buffer=data, strides=(1,))
        self._words: npt.NDArray[Any] = np.ndarray((len(data) - 7,), "<u8", buffer=data, strides=(1,))

    def pairs(self, at: Int64s) -> npt.NDArray[np.uint16]:
        """Two bytes at each position."""
        last = len(self.all_pairs) - 1
        if not len(at) or at.max() <= last:
            return self.all_pairs[at]
        safe = np.minimum(at, last)
        past = at - safe
        return np.where(past < 2, self.all_pairs[safe] >> (past << 3).astype(np.uint16), 0).astype(np.uint16)

    def words(self, at: Int64s) -> UInt64s:
        """Eight bytes at each position."""
        last = len(self._words) - 1
        if not len(at) or at.max() <= last:
            return self._words[at]
        safe = np.minimum(at, last)
        past = np.minimum(at - safe, 8)
        return np.where(past < 8, self._words[safe] >> (np.minimum(past, 7) << 3).astype(np.uint64), np.uint64(0))

    def sizes(self, at: Int64s) -> npt.NDArray[np.uint8]:
        """Bytes of the varints at positions where varints are known to be."""
        sizes = SHORT_SIZES.take(self.pairs(at))
        if len(sizes) and not sizes.min():
            long = np.flatnonzero(sizes == 0)
            sizes[long] = self._read_long(at[long], 32)[1]
        return sizes

    def read(self, at: Int64s, bits: int = 32) -> tuple[Int64s, Int64s]:
        """(numbers, positions after them)."""
        values, after, wide = self._read(at, bits)
        if wide is not None and wide.any():
            raise CorruptBatchError(f"a varint of more than {bits} bits at byte {int(at[wide.argmax()])}")
        return values, after

    def read_loosely(self, at: Int64s) -> tuple[Int64s, Int64s]:
        """As `read`, for guesses: a number that is too wide comes out as -1."""
        values, after, wide = self._read(at, 32)
        if wide is not None:
            values[wide] = -1
        return values, after

    def read_front(self, starts: Int64s) -> tuple[Int64s, Int64s, Int64s, Int64s]:
        """(timestamp deltas, offset deltas, key lengths, positions after them) of the records that start at the
        positions. All that, with length and attributes, mostly fits one word: it is looked up once."""
        words = self.words(starts)
        sizes = SHORT_SIZES.take(words.astype(np.uint16))  # of the length
        short = sizes > 0
        used = sizes + np.uint8(1)
        words >>= used << np.uint8(3)
        numbers = []
        for _ in range(3):
            pairs = words.astype(np.uint16)
            numbers.append(SHORT_VALUES.take(pairs).astype(np.int64))
            sizes = SHORT_SIZES.take(pairs)
            words >>= sizes << np.uint8(3)
            short &= sizes > 0
            used += sizes
        short &= used <= 8
        timestamps, offsets, key_lengths = numbers
        after = starts + used
        if not short.all():
            long = np.flatnonzero(~short)
            at = starts[long] + self.sizes(starts[long]) + 1
            timestamps[long], at = self.read(at, 64)
            offsets[long], at = self.read(at)
            key_lengths[long], after[long] = self.read(at)
        return timestamps, offsets, key_lengths, after

    def _read(self, at: Int64s, bits: int) -> tuple[Int64s, Int64s, npt.NDArray[np.bool_] | None]:
        pairs = self.pairs(at)
        values = SHORT_VALUES.take(pairs).astype(np.int64)
        sizes = SHORT_SIZES.take(pairs)
        if not len(sizes) or sizes.min():
            return values, at + sizes, None
        long = np.flatnonzero(sizes == 0)
        values[long], sizes[long], wide_ones = self._read_long(at[long], bits)
        wide = np.zeros(len(at), np.bool_)
        wide[long] = wide_ones
        return values, at + sizes, wide

    def _read_long(self, at: Int64s, bits: int) -> tuple[Int64s, npt.NDArray[np.uint8], npt.NDArray[np.bool_]]:
        words = self.words(at)
        ends = last_bits(words)
        raw = joined_bits(words, ends)
        sizes = BYTES_OF_BIT.take(ends % np.uint64(19))
        wide = np.zeros(len(at), np.bool_)
        if not ends.all():
            self._read_ninth_and_tenth(at, raw, sizes, wide, np.flatnonzero(ends == 0))
        if bits == 32:
            wide = (raw >= np.uint64(1 << 32)) | (sizes > 5)
        one = np.uint64(1)
        return (raw >> one).view(np.int64) ^ -(raw & one).view(np.int64), sizes, wide

    def _read_ninth_and_tenth(
        self,
        at: Int64s,
        raw: UInt64s,
        sizes: npt.NDArray[np.uint8],
        wide: npt.NDArray[np.bool_],
        rows: npt.NDArray[np.intp],
    ) -> None:
        words = self.words(at[rows] + 8)
        ninth, tenth = words & np.uint64(0xFF), (words >> np.uint64(8)) & np.uint64(0xFF)
        more = ninth >= 0x80
        wide[rows] = more & (tenth > 1)
        raw[rows] |= (ninth & np.uint64(0x7F)) << np.uint64(56)
        raw[rows] |= np.where(more, tenth, np.uint64(0)) << np.uint64(63)
        sizes[rows] = np.where(more, 10, 9)


# glibc takes arrays beyond a size from the system each time, page by page, until it has seen a larger one freed. That
# can be half of what encoding costs, so it sees one here. Nothing is written to it: it takes no memory.
_large = np.empty(16 * 1024 * 1024, np.uint8)
del _large
