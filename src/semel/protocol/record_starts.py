"""Where the records of many batches start.

Each record says where the next one starts, so a batch is a chain, and a chain can't be followed by numpy. But many
chains can be followed at once, a step of all of them at a time. Batches are such chains; long ones are cut into
lanes at places that look like the start of a record (its attributes are 0, and the two records after it have the next
offsets). A guess costs nothing but time: a lane counts only if the lane before it ends exactly where it starts, and so
on back to the start of the batch. Where one does not, the batch is walked from its start, plainly.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from semel.protocol.batch import SMALLEST_RECORD
from semel.protocol.errors import CorruptBatchError
from semel.protocol.varints import read_varint
from semel.protocol.vector_varints import SHORT_RECORD_SIZES, Int64s, VarintReader

LANE_RECORDS = 32  # records in a lane: more steps of fewer lanes, or fewer steps of more
FEW_RECORDS = 300  # not worth lanes
SEARCH_RECORDS = 3  # how many average records wide the search for a lane's start is
WIDEST_SEARCH_BYTES = 16 * 1024


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
    lanes = _Lanes.cut(reader, bodies)
    steps, final = _follow(reader, lanes)
    inside = steps < lanes.limits
    per_lane = inside.sum(axis=0)
    per_batch = np.bincount(lanes.batches, weights=per_lane, minlength=len(bodies.starts)).astype(np.int64)
    broken = per_batch != bodies.record_counts
    broken[lanes.batches[final != lanes.limits]] = True
    starts: Int64s = steps.T[inside.T]
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
    data = reader.data[start:end].tobytes()
    starts, at, end = [], 0, len(data)
    for _ in range(count):
        starts.append(at)
        length, at = read_varint(data, at, end)
        if not 0 <= length <= end - at:
            raise CorruptBatchError(f"a record says it takes {length} bytes, but {end - at} are left in its batch")
        at += length
    if at != end:
        raise CorruptBatchError(f"{end - at} bytes are left after the {count} records of a batch")
    return np.array(starts, np.int64) + start


class _Lanes(NamedTuple):
    """Runs of records, in order: where each starts, where the next one (or the end of the batch) is, whose it is."""

    starts: Int64s
    limits: Int64s
    batches: Int64s

    @classmethod
    def cut(cls, reader: VarintReader, bodies: Bodies) -> _Lanes:
        lane_counts = np.maximum(bodies.record_counts // LANE_RECORDS, 1)
        batches = np.repeat(np.arange(len(bodies.starts)), lane_counts)
        number = np.arange(len(batches)) - np.repeat(np.cumsum(lane_counts) - lane_counts, lane_counts)
        body_bytes = bodies.ends - bodies.starts
        starts = bodies.starts[batches] + number * (body_bytes // lane_counts)[batches]
        guesses = np.flatnonzero(number)
        found = _guess_starts(reader, bodies, starts[guesses], batches[guesses])
        starts[guesses] = found
        keep = starts >= 0
        starts, batches = starts[keep], batches[keep]
        limits = np.append(starts[1:], 0)
        last_of_batch = np.append(batches[1:] != batches[:-1], True)
        limits[last_of_batch] = bodies.ends[batches[last_of_batch]]
        return cls(starts, limits, batches)


def _follow(reader: VarintReader, lanes: _Lanes) -> tuple[Int64s, Int64s]:
    """(the positions of all lanes at each step, where they stopped). A lane stops at its limit or past it."""
    at = lanes.starts
    steps = []
    going = at < lanes.limits
    while going.any():
        steps.append(at)
        sizes = SHORT_RECORD_SIZES.take(reader.pairs(at))
        if sizes.min() <= 0:
            _settle_long(reader, at, sizes, going)
        at = at + sizes * going
        going = at < lanes.limits
    return np.array(steps, np.int64).reshape(len(steps), len(at)), at


def _settle_long(reader: VarintReader, at: Int64s, sizes: Int64s, going: npt.NDArray[np.bool_]) -> None:
    """Sizes of records whose length takes three bytes and more. One that cannot be ends its lane far out."""
    rows = np.flatnonzero((sizes <= 0) & going)
    if len(rows):
        lengths, after = reader.read_loosely(at[rows])
        sizes[rows] = np.where(lengths < 0, NOWHERE, after - at[rows] + lengths)


NOWHERE = 2**40  # no buffer is this long


def _guess_starts(reader: VarintReader, bodies: Bodies, around: Int64s, batches: Int64s) -> Int64s:
    """For each place the first position after it that looks like the start of a record, or -1."""
    result = np.full(len(around), -1, np.int64)
    if not len(around):
        return result
    average = int(((bodies.ends - bodies.starts) // np.maximum(bodies.record_counts, 1)).max())
    width = min(max(SEARCH_RECORDS * average, 64), WIDEST_SEARCH_BYTES, len(reader.data))
    windows: npt.NDArray[Any] = np.lib.stride_tricks.sliding_window_view(reader.data, width)
    at = np.minimum(around, len(windows) - 1)
    lane, place = np.divmod(np.flatnonzero(windows[at] == 0), width)  # attributes of a record, perhaps
    zero = at[lane] + place
    # The length before it takes one, two or three bytes.
    candidates = np.concatenate([zero - 3, zero - 2, zero - 1])
    lane = np.concatenate([lane, lane, lane])
    sizes = np.repeat(np.array([3, 2, 1]), len(zero))
    keep = candidates > bodies.starts[batches[lane]]
    candidates, lane, sizes = candidates[keep], lane[keep], sizes[keep]
    candidates, lane = _plausible(reader, bodies, candidates, lane, batches, sizes)
    # The first one of each lane: written last.
    order = np.argsort(-candidates, kind="stable")
    result[lane[order]] = candidates[order]
    return result


def _plausible(
    reader: VarintReader, bodies: Bodies, candidates: Int64s, lane: Int64s, batches: Int64s, sizes: Int64s
) -> tuple[Int64s, Int64s]:
    """Those that are followed by two more records with the next offsets, or by the end of the batch."""
    head = _record_heads(reader, candidates)
    ends = bodies.ends[batches[lane]]
    keep = (head.field_bytes == sizes) & (head.length >= SMALLEST_RECORD - 1) & (head.next <= ends)
    keep &= (head.next == ends) | (reader.byte(head.next + 1) == 0) | (reader.byte(head.next + 2) == 0)
    candidates, lane = candidates[keep], lane[keep]
    at, offset = candidates, None
    good = np.ones(len(candidates), np.bool_)
    ends, last = bodies.ends[batches[lane]], bodies.last_offset_deltas[batches[lane]]
    dense = (bodies.last_offset_deltas + 1 == bodies.record_counts)[batches[lane]]
    for _ in range(3):
        head = _record_heads(reader, at)
        own = head.offset_deltas(reader)
        over = at >= ends
        fine = (head.length >= SMALLEST_RECORD - 1) & (head.next <= ends) & (own >= 0) & (own <= last)
        if offset is not None:
            fine &= np.where(dense, own == offset + 1, own > offset)
        good &= over | fine
        at, offset = np.where(over | ~good, at, head.next), own
    return candidates[good], lane[good]


class _RecordHeads(NamedTuple):
    at: Int64s
    length: Int64s
    field_bytes: Int64s
    next: Int64s

    def offset_deltas(self, reader: VarintReader) -> Int64s:
        _, after = reader.read_loosely(self.at + self.field_bytes + 1, bits=64)
        return reader.read_loosely(after)[0]


def _record_heads(reader: VarintReader, at: Int64s) -> _RecordHeads:
    length, after = reader.read_loosely(at)
    return _RecordHeads(at, length, after - at, after + np.maximum(length, 0))
