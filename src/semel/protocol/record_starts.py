"""Where the records of many batches start.

Each record says where the next one starts, so a batch is a chain, and a chain can't be followed by numpy. But many
chains can be followed at once, a step of all of them at a time. Batches are such chains; long ones are cut into
lanes at places that look like the start of a record (its attributes are 0, and the record after it has the next
offset). A guess costs nothing but time: a lane counts only if the lane before it ends exactly where it starts, and so
on back to the start of the batch. Where one does not, the batch is walked from its start, plainly.
"""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from semel.protocol.batch import SMALLEST_RECORD
from semel.protocol.errors import CorruptBatchError
from semel.protocol.varints import read_varint
from semel.protocol.vector_varints import SHORT_RECORD_SIZES, SHORT_SIZES, Bytes, Int64s, VarintReader

SHORTEST_LANE, LONGEST_LANE = 32, 256  # records in a lane: more steps of fewer lanes, or fewer steps of more
FEW_RECORDS = 2500  # not worth lanes: a walk costs a fifth of a microsecond per record
WIDEST_SEARCH_BYTES = 16 * 1024
MOST_CANDIDATES = 64  # per place


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
    def cut(cls, reader: VarintReader, bodies: Bodies) -> _Lanes:
        lane_counts = np.maximum(bodies.record_counts // _lane_records(int(bodies.record_counts.sum())), 1)
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


def _lane_records(total: int) -> int:
    """A step of all lanes costs about as much as the search for eight of them, so their number and length balance."""
    return min(max(math.isqrt(total // 8), SHORTEST_LANE), LONGEST_LANE)


def _follow(reader: VarintReader, lanes: _Lanes) -> tuple[Int64s, Int64s]:
    """(the positions of all lanes at each step, where they stopped). A lane stops at its limit or past it."""
    at = lanes.starts
    steps = []
    going = at < lanes.limits
    last = len(reader.data) - 2
    while going.any():
        steps.append(at)
        sizes = SHORT_RECORD_SIZES.take(reader.all_pairs[np.minimum(at, last)])
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
    """For each place a position after it that looks like the start of a record, or -1."""
    result = np.full(len(around), -1, np.int64)
    average = int(((bodies.ends - bodies.starts) // np.maximum(bodies.record_counts, 1)).max())
    width = min(max(4 * average, 64), WIDEST_SEARCH_BYTES, len(reader.data))
    at = around.copy()
    missing = np.arange(len(around))
    search, tries = _match, 0
    while len(missing):
        candidates, lane, sizes = search(reader.data, at[missing], width)
        at[missing[lane]] = candidates
        keep = candidates > bodies.starts[batches[missing[lane]]]
        good, lane = _plausible(reader, bodies, candidates[keep], lane[keep], batches[missing], sizes[keep])
        order = np.argsort(-good, kind="stable")  # the first one of each lane is written last
        result[missing[lane[order]]] = good[order]
        tries, before, missing = tries + 1, len(missing), np.flatnonzero(result < 0)
        if search is _scan:
            break
        if tries < 2 or 2 * len(missing) <= before:
            continue  # a lane without a start makes the one before it longer, and all wait for the longest
        if len(missing) * 32 <= len(around):
            break
        search = _scan
    return result


# Most records have no headers: the number of headers of the record before (0), a length, the attributes (0).
_START = re.compile(rb"\x00[\x80-\xff]{0,2}[\x00-\x7f]\x00")


def _match(data: Bytes, at: Int64s, width: int) -> tuple[Int64s, Int64s, Int64s]:
    """(candidates, the number of their place, bytes of their length field): the first match after each place."""
    memory = data.data
    found = [(number, _START.search(memory, place, place + width)) for number, place in enumerate(at.tolist())]
    hits = [(match.start() + 1, number, match.end() - match.start() - 2) for number, match in found if match]
    candidates, lane, sizes = np.array(hits, np.int64).reshape(-1, 3).T
    return candidates, lane, sizes


def _scan(data: Bytes, at: Int64s, width: int) -> tuple[Int64s, Int64s, Int64s]:
    """As `_match`, but every zero with one to three bytes before it is a candidate: for records with headers."""
    at = np.minimum(at, len(data) - width)
    zero = _windows(data, at, width) == 0
    hits = np.flatnonzero(zero[2:-2] | zero[3:-1] | zero[4:])
    if len(hits) > MOST_CANDIDATES * len(at):  # values full of zeros: looking at all of them costs more than walking
        hits = hits[:0]
    found = []
    for length_bytes in (1, 2, 3):
        lane, place = np.divmod(hits[zero[hits + length_bytes + 1]], width)
        inside = place < width - length_bytes - 1  # not across two windows
        found.append((at[lane[inside]] + place[inside] + 1, lane[inside], np.full(int(inside.sum()), length_bytes)))
    candidates, lane, sizes = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return candidates, lane, sizes


def _windows(data: Bytes, at: Int64s, width: int) -> Bytes:
    """`width` bytes from each position, one window after the other."""
    overlapping: npt.NDArray[Any] = np.ndarray((len(data) - width + 1,), f"V{width}", buffer=data, strides=(1,))
    return overlapping[at].view(np.uint8)


def _plausible(
    reader: VarintReader, bodies: Bodies, candidates: Int64s, lane: Int64s, batches: Int64s, sizes: Int64s
) -> tuple[Int64s, Int64s]:
    """Those that are followed by a record with the next offset, or by the end of the batch."""
    batch = batches[lane]
    length, after = reader.read_loosely(candidates)
    follower = after + length
    keep = (after - candidates == sizes) & (length >= SMALLEST_RECORD - 1) & (follower <= bodies.ends[batch])
    candidates, lane, batch, follower = candidates[keep], lane[keep], batch[keep], follower[keep]
    _, offsets, _ = reader.read_front(np.concatenate([candidates, follower]), loosely=True)
    own, other = offsets[: len(candidates)], offsets[len(candidates) :]
    last = bodies.last_offset_deltas[batch]
    usual_gap = (last + 1) // bodies.record_counts[batch]  # 1, or more in a compacted batch
    rises = (other > own) & (other - own <= np.where(usual_gap == 1, 1, 8 * usual_gap)) & (other <= last)
    length_bytes = SHORT_SIZES.take(reader.pairs(follower))
    length_bytes[length_bytes == 0] = 3
    rises &= reader.byte(follower + length_bytes) == 0  # the follower's attributes
    good = (own >= 0) & (own <= last) & ((follower == bodies.ends[batch]) | rises)
    return candidates[good], lane[good]
