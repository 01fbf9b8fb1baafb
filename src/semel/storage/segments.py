"""The segments of one log, oldest first: which segment a batch goes to, where an offset or a time is, which may go.

A read is an index lookup, one pread and a cut at whole batches. It never looks at a record.
"""

from __future__ import annotations

import os
from bisect import bisect_right

from semel.protocol.batch import HEADER, HEADER_SIZE, LOG_OVERHEAD, MAGIC, BatchHeader
from semel.protocol.errors import ErrorCode
from semel.storage.config import LogConfig
from semel.storage.files import FileCache
from semel.storage.results import StorageError, TimedBatch
from semel.storage.segment import CLEANED, DELETED, RELATIVE_OFFSET_MAX, SNAPSHOT, SWAP, Segment, file_name

Limit = tuple[int, int, int]  # offset, base offset of its segment, position: where a read must stop
_HINTS_MAX = 64
_LOOK_AHEAD_BYTES = 8192  # an index entry stands for at least 4 KB of batches: the start is usually within this
_unpack = HEADER.unpack_from


class SegmentList:
    """`active` is the last one, the only one that is written to."""

    __slots__ = ("_bases", "_cache", "_folder", "_hints", "active", "items")

    def __init__(self, folder: str, cache: FileCache, items: list[Segment]) -> None:
        self._folder = folder
        self._cache = cache
        self._hints: dict[int, tuple[Segment, int]] = {}  # offset where a read ended: the next one starts there
        self._set(items)

    def _set(self, items: list[Segment]) -> None:
        self.items = items
        self.active = items[-1]
        self._bases = [segment.base_offset for segment in items]
        self._hints.clear()

    @property
    def size_bytes(self) -> int:
        return sum(segment.size for segment in self.items)

    # Offsets

    def read(self, offset: int, max_bytes: int, limit: Limit, min_one_batch: bool) -> tuple[memoryview, int] | None:
        """Whole batches from the one that holds `offset`, at most `max_bytes` of them, and the offset after the last.

        With `min_one_batch` the first batch comes whole even if it is larger. None: there is nothing to read.
        """
        _, limit_base, limit_position = limit
        segments, bases = self.items, self._bases
        hint = self._hints.get(offset)
        if hint is not None:
            number = bisect_right(bases, hint[0].base_offset) - 1
            start = hint[1]
        else:
            number = max(0, bisect_right(bases, offset) - 1)
            start = segments[number].position_hint(offset)
        while number < len(segments) and bases[number] <= limit_base:
            segment = segments[number]
            end = limit_position if segment.base_offset == limit_base else segment.size
            found = self._read_segment(segment, start, end, offset, max_bytes, min_one_batch)
            if found is not None:
                return found
            number, start = number + 1, 0
        return None

    def _read_segment(
        self, segment: Segment, start: int, end: int, offset: int, max_bytes: int, min_one_batch: bool
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
            if not min_one_batch:
                return memoryview(b""), offset
            return memoryview(read_at(fd, header.size, start + first)), header.next_offset
        if len(data) - first < max_bytes and start + len(data) < end:
            start, first, data = start + first, 0, read_at(fd, min(max_bytes, end - start - first), start + first)
        stop, next_offset = _last_whole(segment, data, start, first, min(len(data), first + max_bytes))
        self._add_hint(next_offset, segment, start + stop)
        return memoryview(data)[first:stop], next_offset

    def locate(self, offset: int) -> Limit:
        """Where a read up to an offset must stop: at the first batch that reaches it, or at the end of the log."""
        hint = self._hints.get(offset)
        if hint is not None:
            return offset, hint[0].base_offset, hint[1]
        for segment in self.items[max(0, bisect_right(self._bases, offset) - 1) :]:
            found = segment.find(offset)
            if found is not None:
                if found[1].base_offset == offset:
                    self._add_hint(offset, segment, found[0])
                return offset, segment.base_offset, found[0]
        return offset, self.active.base_offset, self.active.size

    def _add_hint(self, offset: int, segment: Segment, position: int) -> None:
        if len(self._hints) >= _HINTS_MAX:
            self._hints.clear()
        self._hints[offset] = (segment, position)

    def aborted_in(self, offset: int, upper_offset: int) -> list[tuple[int, int]]:
        """(producer id, first offset) of aborted transactions that overlap a range, by first offset."""
        found: list[tuple[int, int]] = []
        for segment in self.items[max(0, bisect_right(self._bases, offset) - 1) :]:
            if segment.txn_index.count:
                entries, complete = segment.txn_index.overlapping(offset, upper_offset)
                found += [(entry.first_offset, entry.producer_id) for entry in entries]
                if complete:
                    break
        return [(producer_id, first_offset) for first_offset, producer_id in sorted(found)]

    # Times: the indexes find the batch, the batch is decoded to find the record

    def batch_at_or_after(self, timestamp_ms: int, start_offset: int) -> TimedBatch | None:
        """The first batch, from an offset on, that has a record of at least this timestamp."""
        for segment in self.items:
            if segment.load_max_timestamp() < timestamp_ms:
                continue
            entry = segment.time_index.floor(timestamp_ms - 1)
            from_offset = max(start_offset, segment.base_offset + entry.second if entry else segment.base_offset)
            for position, header in segment.batches(segment.position_hint(from_offset)):
                if header.max_timestamp >= timestamp_ms and header.last_offset >= start_offset:
                    return TimedBatch(segment.read_batch(position, header), header, timestamp_ms, start_offset)
        return None

    def batch_of_highest_timestamp(self, start_offset: int) -> TimedBatch | None:
        """The batch with the first record that has the highest timestamp, from an offset on."""
        top: tuple[Segment, int, BatchHeader] | None = None
        for segment in self.items:
            highest_ms = -1 if top is None else top[2].max_timestamp
            if segment.load_max_timestamp() <= highest_ms:
                continue
            place = segment.find(segment.max_timestamp_offset)
            if place is not None and place[1].last_offset < start_offset:
                place = _newest(segment, start_offset)
            if place is not None and place[1].max_timestamp > highest_ms:
                top = segment, *place
        if top is None:
            return None
        segment, position, header = top
        return TimedBatch(segment.read_batch(position, header), header, header.max_timestamp, start_offset)

    # Growing

    def is_full(self, config: LogConfig, size: int, last_offset: int, timestamp_ms: int, now_ms: int) -> bool:
        """Whether the next bytes need a new segment: the active one is too large, too old, or its indexes are."""
        active = self.active
        if active.size + size > config.segment_bytes:
            if size > config.segment_bytes:
                raise StorageError(
                    ErrorCode.RECORD_LIST_TOO_LARGE,
                    f"{size} bytes do not fit a segment of segment.bytes={config.segment_bytes}",
                )
            return active.size > 0
        return active.size > 0 and (
            _is_old(active, config, timestamp_ms, now_ms)
            or active.offset_index.count >= config.segment_index_bytes // 8
            or active.time_index.count >= config.segment_index_bytes // 12
            or last_offset - active.base_offset > RELATIVE_OFFSET_MAX
        )

    def add(self, segment: Segment) -> None:
        self.items.append(segment)
        self._bases.append(segment.base_offset)
        self.active = segment

    # Shrinking

    def expired_count(self, config: LogConfig, now_ms: int, high_watermark: int, start_offset: int) -> int:
        """How many segments, from the oldest on, retention may delete. Never one that readers could not see yet."""
        segments = self.items
        excess_bytes = self.size_bytes - config.retention_bytes if config.retention_bytes >= 0 else -1
        count = 0
        for segment, next_base in zip(segments, [*self._bases[1:], None], strict=True):
            if next_base is not None and next_base > high_watermark:
                break
            below_start = next_base is not None and next_base <= start_offset
            too_old = config.delete and _is_past_retention(segment, config, now_ms)
            too_many = config.delete and segment.size > 0 and excess_bytes >= segment.size
            if not (below_start or too_old or too_many):
                break
            if next_base is None and not (segment.size > 0 and segment.next_offset() <= high_watermark):
                break
            excess_bytes -= segment.size
            count += 1
        return count

    def drop(self, dropped: list[Segment], keep_snapshot_of: int = -1) -> list[str]:
        """Takes segments out of the log. Their files are renamed; returns the new paths, to be removed later."""
        files = self._cache.files
        renamed: list[str] = []
        for segment in dropped:
            segment.close()
            paths = segment.paths()
            if segment.base_offset != keep_snapshot_of:
                paths.append(os.path.join(self._folder, file_name(segment.base_offset, SNAPSHOT)))
            for path in paths:
                if os.path.exists(path):
                    files.rename(path, path + DELETED)
                    renamed.append(path + DELETED)
        self._set([segment for segment in self.items if segment not in dropped])
        return renamed

    def replace(self, bases: list[int], sizes: dict[str, int], modified_ms: int) -> tuple[Segment, list[str]]:
        """Puts the `.cleaned` segment at the first base in the place of several. Recovery finishes what is interrupted.

        From the moment that `.log.swap` is there (the last of the renames) the new segment counts. Returns it, and the
        paths of the renamed old files.
        """
        files = self._cache.files
        new = Segment(self._cache, self._folder, bases[0], sizes, modified_ms)
        for path in reversed(new.paths()):
            if os.path.exists(path + CLEANED):
                files.rename(path + CLEANED, path + SWAP)
        files.sync_dir(self._folder)
        renamed = self.drop([s for s in self.items if s.base_offset in bases], keep_snapshot_of=bases[0])
        for path in reversed(new.paths()):
            if os.path.exists(path + SWAP):
                files.rename(path + SWAP, path)
        self._set(sorted([*self.items, new], key=lambda segment: segment.base_offset))
        return new, renamed

    def close(self) -> None:
        for segment in self.items:
            segment.close()


def _newest(segment: Segment, start_offset: int) -> tuple[int, BatchHeader] | None:
    """The first batch with the highest timestamp of what DeleteRecords left of a segment."""
    found = segment.batches(segment.position_hint(start_offset))
    left = (place for place in found if place[1].last_offset >= start_offset and place[1].record_count)
    return max(left, key=lambda place: place[1].max_timestamp, default=None)


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
        length: int = _unpack(data, at)[1]
        if at + length + LOG_OVERHEAD > limit:  # the indexed batch itself is cut: an earlier entry is needed
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


def _is_old(segment: Segment, config: LogConfig, timestamp_ms: int, now_ms: int) -> bool:
    """Age counts by the records' own time, from the first batch on; without timestamps by the clock."""
    limit_ms = min(config.segment_ms, config.max_compaction_lag_ms) if config.compact else config.segment_ms
    first_ms = segment.rolling_timestamp_ms
    if first_ms is None:
        first_ms = segment.load_rolling_timestamp()
    if first_ms is not None and first_ms >= 0:
        return timestamp_ms - first_ms > limit_ms
    return now_ms - segment.created_ms > limit_ms


def _is_past_retention(segment: Segment, config: LogConfig, now_ms: int) -> bool:
    if config.retention_ms < 0:
        return False
    newest_ms = segment.load_max_timestamp()
    if newest_ms < 0:
        newest_ms = segment.created_ms
    if now_ms - newest_ms <= config.retention_ms:
        return False
    checked_ms = segment.check_max_timestamp()  # a damaged index must not delete records
    return checked_ms < 0 or now_ms - checked_ms > config.retention_ms
