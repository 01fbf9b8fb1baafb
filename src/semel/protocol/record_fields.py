"""Many records at once: where they start, then their headers and all other fields."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from semel.protocol.batch import NO_TIMESTAMP, SMALLEST_RECORD, BatchHeader, Buffer, check_batch, read_body, read_header
from semel.protocol.errors import CorruptBatchError
from semel.protocol.varints import read_varint
from semel.protocol.vector_varints import (
    SHORT_RECORD_SIZES,
    SHORT_SIZES,
    Bytes,
    Int64s,
    VarintReader,
    joined_bits,
    last_bits,
)

# --- Where the records of many batches start ---
#
# Each record says where the next one starts, so a batch is a chain, and a chain can't be followed by numpy. But many
# chains can be followed at once, a step of all of them at a time. Batches are such chains; long ones are cut into
# lanes at places that look like the start of a record (its attributes are 0, and the record after it has the next
# offset). A guess costs nothing but time: a lane counts only if the lane before it ends exactly where it starts, and
# so on back to the start of the batch. Where one does not, the batch is walked from its start, plainly.


SHORTEST_LANE, LONGEST_LANE = 32, 256  # records in a lane: more steps of fewer lanes, or fewer steps of more
STEPS_BETWEEN_LOOKS = 8
FEW_RECORDS = 1000  # not worth lanes
WALKED_PER_STEP = 8  # records that a walk passes in the time of a step: lanes that take more steps are given up
MOST_POSITIONS = 8  # that lanes may come to for each record: uneven ones must not take all memory
MOST_ZEROS = 64  # around a place


class Bodies(NamedTuple):
    """The records of batches, in one buffer: where each batch's begin and end, and what its header says of them."""

    starts: Int64s
    ends: Int64s
    record_counts: Int64s
    last_offset_deltas: Int64s


def find_record_starts(reader: VarintReader, bodies: Bodies) -> Int64s:
    """The start of every record, in order. Raises unless each batch is filled by as many records as it should have."""
    total = int(bodies.record_counts.sum())
    if total < FEW_RECORDS:
        return _walk_all(reader, bodies, range(len(bodies.starts)))
    lanes = _Lanes.cut(reader, bodies, _lane_records(total))
    most_steps = min(total // WALKED_PER_STEP, total * MOST_POSITIONS // len(lanes.starts))
    steps = _follow(reader, lanes, most_steps)
    before = steps < lanes.limits
    passed = steps[np.minimum(before.sum(axis=0), len(steps) - 1), np.arange(len(lanes.limits))]
    before[:-1] &= steps[1:] != steps[:-1]  # where a lane stood still it is the same record
    per_lane = before.sum(axis=0)
    per_batch = np.bincount(lanes.batches, weights=per_lane, minlength=len(bodies.starts)).astype(np.int64)
    broken = per_batch != bodies.record_counts
    broken[lanes.batches[passed != lanes.limits]] = True
    starts: Int64s = steps.T[before.T]
    if not broken.any():
        return starts
    good = np.split(starts, np.cumsum(per_batch)[:-1])
    return np.concatenate(
        [_walk(reader, bodies, batch) if broken[batch] else good[batch] for batch in range(len(good))]
    )


def _walk_all(reader: VarintReader, bodies: Bodies, batches: range) -> Int64s:
    walked = [_walk(reader, bodies, batch) for batch in batches]
    return np.concatenate(walked) if walked else np.zeros(0, np.int64)


def _walk(reader: VarintReader, bodies: Bodies, batch: int) -> Int64s:
    """One batch from its start: the plain way, and the one that says what is wrong."""
    start, end, count = int(bodies.starts[batch]), int(bodies.ends[batch]), int(bodies.record_counts[batch])
    data = reader.data[start:end].data
    starts, at, end = [], 0, end - start
    for _ in range(count):
        starts.append(at)
        if at + 2 <= end and not (low := data[at]) & 0x81:  # one byte, not negative
            at += 1 + (low >> 1)
        elif at + 2 <= end and not low & 1 and (high := data[at + 1]) < 0x80:  # two
            at += 2 + ((low & 0x7F) >> 1 | high << 6)
        else:
            length, at = read_varint(data, at, end)
            at += length if length >= 0 else end + 1
        if at > end:
            raise CorruptBatchError(f"a record at byte {starts[-1]} of {end} has a length that runs past its batch")
    if at != end:
        raise CorruptBatchError(f"{end - at} bytes are left after the {count} records of a batch")
    return np.array(starts, np.int64) + start


class _Lanes(NamedTuple):
    """Runs of records, in order: where each starts, where the next one (or the end of the batch) is, whose it is."""

    starts: Int64s
    limits: Int64s
    batches: Int64s

    @classmethod
    def cut(cls, reader: VarintReader, bodies: Bodies, lane_records: int) -> _Lanes:
        lane_counts = np.maximum(bodies.record_counts // lane_records, 1)
        batches = np.repeat(np.arange(len(bodies.starts)), lane_counts)
        number = np.arange(len(batches)) - np.repeat(np.cumsum(lane_counts) - lane_counts, lane_counts)
        body_bytes = bodies.ends - bodies.starts
        starts = bodies.starts[batches] + number * (body_bytes // lane_counts)[batches]
        guesses = np.flatnonzero(number)
        found = _guess_starts(reader, bodies, starts[guesses], batches[guesses])
        starts[guesses] = found
        keep = starts < NOWHERE
        starts, batches = starts[keep], batches[keep]
        limits = np.append(starts[1:], 0)
        last_of_batch = np.append(batches[1:] != batches[:-1], True)
        limits[last_of_batch] = bodies.ends[batches[last_of_batch]]
        return cls(starts, limits, batches)


def _lane_records(total: int) -> int:
    """A step of all lanes costs about as much as the search for eight of them, so their number and length balance."""
    return min(max(math.isqrt(total // 8), SHORTEST_LANE), LONGEST_LANE)


def _follow(reader: VarintReader, lanes: _Lanes, most_steps: int) -> Int64s:
    """The positions of all lanes at each step. A lane that is past its limit goes on until all are: that does no harm,
    and looking at every step would cost more than the step. A lane that comes to a record with a length of three bytes
    or more stands still until the next look, and from then on every step is looked at."""
    steps = [lanes.starts]
    last = len(reader.data) - 2
    steps_between_looks = STEPS_BETWEEN_LOOKS
    while len(steps) <= most_steps:
        for _ in range(steps_between_looks):
            sizes = SHORT_RECORD_SIZES.take(reader.all_pairs[np.minimum(steps[-1], last)])
            steps.append(steps[-1] + sizes)
        going = steps[-1] < lanes.limits
        if not going.any():
            break
        waiting = np.flatnonzero(going & (sizes == 0))
        if len(waiting):
            steps.append(_past_long(reader, steps[-1], waiting))
            steps_between_looks = 1
    return np.array(steps, np.int64)


def _past_long(reader: VarintReader, at: Int64s, rows: npt.NDArray[np.intp]) -> Int64s:
    """A step over records whose length takes three bytes and more. One that cannot be ends its lane far out."""
    lengths, after = reader.read_loosely(at[rows])
    moved = at.copy()
    moved[rows] = np.where(lengths < 0, NOWHERE, after + lengths)
    return moved


NOWHERE = 2**40  # no buffer is this long


def _guess_starts(reader: VarintReader, bodies: Bodies, around: Int64s, batches: Int64s) -> Int64s:
    """For each place a position after it that looks like the start of a record, or NOWHERE. A lane without a start
    makes the one before it longer, and all wait for the longest: where many are missing, they are looked for again."""
    result = np.full(len(around), NOWHERE, np.int64)
    average = int((bodies.ends - bodies.starts).sum() // bodies.record_counts.sum())
    width = average + average // 2 + 64
    missing = np.arange(len(around))
    while len(missing) * 32 > len(around) and len(missing) * width <= len(reader.data):
        candidates, place = _candidates(reader.data, around[missing], width)
        good = _plausible(reader, bodies, candidates, batches[missing[place]])
        np.minimum.at(result, missing[place[good]], candidates[good])
        missing = np.flatnonzero(result == NOWHERE)
        width *= 4
    return result


def _candidates(data: Bytes, around: Int64s, width: int) -> tuple[Int64s, Int64s]:
    """(positions, the number of their place): one or two bytes that can be the length of a record, followed by a zero
    that can be its attributes."""
    at = np.minimum(around, len(data) - width)
    window = _windows(data, at, width)
    zeros = np.flatnonzero(window[2:] == 0) + 2
    if len(zeros) > MOST_ZEROS * len(at):  # values full of zeros: looking at all of them costs more than walking
        zeros = zeros[:0]
    low, high = window[zeros - 2], window[zeros - 1]
    one = (high & 0x81 == 0) & (high >= 2 * SMALLEST_RECORD - 2)  # zigzag: even if not negative
    two = (low & 0x81 == 0x80) & (high - np.uint8(1) < 0x7F)
    place, inside = np.divmod(np.concatenate([zeros[one] - 1, zeros[two] - 2]), width)
    candidates = at[place] + inside
    keep = candidates >= around[place]
    return candidates[keep], place[keep]


def _windows(data: Bytes, at: Int64s, width: int) -> Bytes:
    """`width` bytes from each position, one window after the other."""
    overlapping: npt.NDArray[Any] = np.ndarray((len(data) - width + 1,), f"V{width}", buffer=data, strides=(1,))
    return overlapping[at].view(np.uint8)


def _plausible(reader: VarintReader, bodies: Bodies, at: Int64s, batches: Int64s) -> npt.NDArray[np.intp]:
    """Which of the positions have a record that is followed by one with the next offset, or by the end of the batch."""
    sizes, offsets = _peek(reader, at)
    follower, ends = at + sizes, bodies.ends[batches]
    rows = np.flatnonzero((sizes > 0) & (follower < ends))
    sizes_after, offsets_after = _peek(reader, follower[rows])
    rises = offsets_after - offsets[rows]
    batches = batches[rows]
    gaps = (bodies.last_offset_deltas[batches] + 1) // bodies.record_counts[batches]  # 1, unless compacted
    good = (sizes_after > 0) & (rises > 0) & (rises <= np.where(gaps == 1, 1, 8 * gaps))
    return np.concatenate([rows[good], np.flatnonzero((sizes > 0) & (follower == ends))])


def _peek(reader: VarintReader, at: Int64s) -> tuple[Int64s, Int64s]:
    """(sizes, offset deltas) of what may be records. The size is 0 where there can't be one, or where it is long."""
    pairs = reader.pairs(at)
    sizes = SHORT_RECORD_SIZES.take(pairs)
    words = reader.words(at + SHORT_SIZES.take(pairs))  # attributes, timestamp, offset: they mostly fit
    sizes[(words.astype(np.uint8) != 0) | (sizes < SMALLEST_RECORD)] = 0
    words >>= np.uint64(8)
    words //= np.maximum(last_bits(words) << np.uint64(1), np.uint64(1))  # the timestamp is gone
    return sizes, joined_bits(words, last_bits(words)).view(np.int64) >> 1


# --- The headers of many records at once: the first header of all of them, then the second, and so on ---


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


class Fields(NamedTuple):
    """The numbers of some records. Lengths are -1 for null."""

    timestamp_deltas: Int64s
    offset_deltas: Int64s
    key_starts: Int64s
    key_lengths: Int64s
    value_starts: Int64s
    value_lengths: Int64s
    header_starts: Int64s
    header_counts: Int64s | None  # None if there are none
    ends: Int64s

    def only(self, rows: npt.NDArray[np.bool_]) -> Fields:
        return Fields(*(None if numbers is None else numbers[rows] for numbers in self))  # type: ignore[arg-type]


def read_fields(reader: VarintReader, starts: Int64s, ends: Int64s) -> Fields:
    """All fields up to the number of headers. Every step goes forward, so it is enough to check the end."""
    timestamp_deltas, offset_deltas, key_lengths, key_starts = reader.read_front(starts)
    value_lengths, value_starts = reader.read(key_starts + np.maximum(key_lengths, 0))
    if min(int(key_lengths.min()), int(value_lengths.min())) < -1:
        raise CorruptBatchError("the key or value of a record has a negative length")
    header_counts, at = _read_header_counts(reader, value_starts + np.maximum(value_lengths, 0), ends)
    return Fields(
        timestamp_deltas, offset_deltas, key_starts, key_lengths, value_starts, value_lengths, at, header_counts, ends
    )


def _read_header_counts(reader: VarintReader, at: Int64s, ends: Int64s) -> tuple[Int64s | None, Int64s]:
    """(numbers of headers or None where no record has any, positions after them)."""
    if (at == ends - 1).all() and not reader.data[at].any():
        return None, ends
    counts, at = reader.read(at)
    if int(counts.min()) < 0:
        raise CorruptBatchError("a record has a negative number of headers")
    if ((at > ends) | ((counts == 0) & (at != ends))).any():
        raise CorruptBatchError("the fields of a record do not end where the record ends")
    return counts, at


def first_at_or_after(batch: Buffer, timestamp_ms: int, start_offset: int) -> tuple[int, int] | None:
    """(timestamp, offset) of the first record of a batch, from an offset on, that has at least this timestamp."""
    header = read_header(batch)
    check_batch(batch, header)
    body = read_body(batch, header)
    if not header.record_count:
        return None
    timestamp_deltas, offset_deltas = _read_deltas(body, header)
    right = offset_deltas >= start_offset - header.base_offset
    if header.is_log_append_time:
        timestamps = np.full(len(timestamp_deltas), header.max_timestamp)
    else:
        timestamps = header.base_timestamp + timestamp_deltas
    right &= timestamps >= timestamp_ms
    if not right.any():
        return None
    row = int(right.argmax())
    return int(timestamps[row]), header.base_offset + int(offset_deltas[row])


def timestamps_outside(body: Buffer, header: BatchHeader, earliest_ms: int, latest_ms: int) -> list[tuple[int, int]]:
    """(number, timestamp) of every record of a batch that has a timestamp, but none of this range. The records were
    checked."""
    base = header.base_timestamp
    deltas, _ = _read_deltas(body, header)
    lowest, highest, none = (
        min(max(timestamp - base, -(2**63)), 2**63 - 1) for timestamp in (earliest_ms, latest_ms, NO_TIMESTAMP)
    )
    rows = np.flatnonzero(((deltas < lowest) | (deltas > highest)) & (deltas != none))
    return [(row, base + delta) for row, delta in zip(rows.tolist(), deltas[rows].tolist(), strict=True)]


def _read_deltas(body: Buffer, header: BatchHeader) -> tuple[Int64s, Int64s]:
    """The timestamp deltas and the offset deltas of a batch's records."""
    reader = VarintReader(np.frombuffer(body, np.uint8))
    numbers = (0, len(body), header.record_count, header.last_offset_delta)
    starts = find_record_starts(reader, Bodies(*(np.array([number], np.int64) for number in numbers)))
    timestamp_deltas, offset_deltas, _, _ = reader.read_front(starts)
    return timestamp_deltas, offset_deltas
