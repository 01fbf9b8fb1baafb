"""Slices of segment files: index lookup, one pread, cut at whole batches. Never looks at a record."""

from __future__ import annotations

from bisect import bisect_right

from semel.protocol.batch import HEADER, HEADER_SIZE, LOG_OVERHEAD, MAGIC, BatchHeader
from semel.storage.segment import Segment

Limit = tuple[int, int, int]  # offset, base offset of its segment, position: where a read must stop
Hints = dict[int, tuple[Segment, int]]
_HINTS_MAX = 64
_LOOK_AHEAD_BYTES = 8192  # an index entry stands for at least 4 KB of batches: the start is usually within this
_unpack = HEADER.unpack_from


def read(
    segments: list[Segment],
    bases: list[int],
    hints: Hints,
    offset: int,
    max_bytes: int,
    limit: Limit,
    min_one_batch: bool,
) -> tuple[memoryview, int] | None:
    """Whole batches from the one that holds `offset`, at most `max_bytes` of them, and the offset after the last.

    The first batch comes whole even if it is larger, where `min_one_batch` says so. None: there is nothing to read.
    """
    _, limit_base, limit_position = limit
    hint = hints.get(offset)
    if hint is not None:
        number = bisect_right(bases, hint[0].base_offset) - 1
        start = hint[1]
    else:
        number = max(0, bisect_right(bases, offset) - 1)
        start = segments[number].position_hint(offset)
    while number < len(segments) and bases[number] <= limit_base:
        segment = segments[number]
        end = limit_position if segment.base_offset == limit_base else segment.size
        found = _read_segment(segment, start, end, offset, max_bytes, min_one_batch, hints)
        if found is not None:
            return found
        number, start = number + 1, 0
    return None


def _read_segment(
    segment: Segment, start: int, end: int, offset: int, max_bytes: int, min_one_batch: bool, hints: Hints
) -> tuple[memoryview, int] | None:
    if start >= end:
        return None
    read_at, fd = segment.files.read_at, segment.fd
    data = read_at(fd, min(max_bytes + _LOOK_AHEAD_BYTES, end - start), start)
    first = _first_batch(data, offset)
    if first is None:  # the batch at the index entry is longer than what was read
        place = segment.find(offset)
        if place is None or place[0] >= end:
            return None
        start = place[0]
        data, first = read_at(fd, min(max(max_bytes, place[1].size), end - start), start), 0
    header = BatchHeader._make(_unpack(data, first))
    if header.size > max_bytes:
        return _one_batch(segment, start + first, header) if min_one_batch else (memoryview(b""), offset)
    if len(data) - first < max_bytes and start + len(data) < end:
        start, first, data = start + first, 0, read_at(fd, min(max_bytes, end - start - first), start + first)
    stop, next_offset = _last_whole(segment, data, start, first, min(len(data), first + max_bytes))
    if len(hints) >= _HINTS_MAX:
        hints.clear()
    hints[next_offset] = (segment, start + stop)
    return memoryview(data)[first:stop], next_offset


def _one_batch(segment: Segment, position: int, header: BatchHeader) -> tuple[memoryview, int]:
    return memoryview(segment.files.read_at(segment.fd, header.size, position)), header.next_offset


def _first_batch(data: bytes, offset: int) -> int | None:
    """Where the batch that reaches the offset starts; None if it does not start in these bytes."""
    at, end = 0, len(data) - HEADER_SIZE
    while at <= end:
        base, length, _, magic, _, _, last_delta, *_ = _unpack(data, at)
        if magic != MAGIC or length < HEADER_SIZE - LOG_OVERHEAD:
            return None
        if base + last_delta >= offset:
            return at
        at += length + LOG_OVERHEAD
    return None


def _last_whole(segment: Segment, data: bytes, start: int, first: int, limit: int) -> tuple[int, int]:
    """Where the last whole batch within a limit ends, and the offset after it. Walks only from the last index entry."""
    at = first
    entry = segment.offset_index.floor(start + limit - HEADER_SIZE, field=1)
    if entry is not None and entry.second - start > first:
        at = entry.second - start
        if at + _size_at(data, at) > limit:  # the indexed batch itself is cut: an earlier entry is needed
            entry = segment.offset_index.floor(entry.second - 1, field=1)
            at = max(first, entry.second - start) if entry is not None else first
    next_offset = -1
    while limit - at >= HEADER_SIZE:
        base, length, _, _, _, _, last_delta, *_ = _unpack(data, at)
        if at + length + LOG_OVERHEAD > limit:
            break
        next_offset = base + last_delta + 1
        at += length + LOG_OVERHEAD
    return at, next_offset


def _size_at(data: bytes, at: int) -> int:
    length: int = _unpack(data, at)[1]
    return length + LOG_OVERHEAD


def locate(segments: list[Segment], bases: list[int], hints: Hints, offset: int) -> tuple[Segment, int]:
    """Segment and position of the first batch that reaches an offset; the end of the last segment if none does."""
    hint = hints.get(offset)
    if hint is not None:
        return hint
    for segment in segments[max(0, bisect_right(bases, offset) - 1) :]:
        found = segment.find(offset)
        if found is not None:
            if len(hints) >= _HINTS_MAX:
                hints.clear()
            if found[1].base_offset == offset:
                hints[offset] = (segment, found[0])
            return segment, found[0]
    return segments[-1], segments[-1].size
