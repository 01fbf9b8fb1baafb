"""The segments of one log, oldest first: where an offset is, when a new one starts, how old ones go."""

from __future__ import annotations

import os
from bisect import bisect_right

from semel.protocol.errors import ErrorCode
from semel.storage import reading
from semel.storage.config import LogConfig
from semel.storage.errors import StorageError
from semel.storage.results import LogSurroundings
from semel.storage.segment import CLEANED, DELETED, RELATIVE_OFFSET_MAX, SNAPSHOT, SWAP, Segment, file_name


class SegmentList:
    """`active` is the last one, the only one that is written to."""

    __slots__ = ("_bases", "_folder", "_hints", "_shared", "active", "items")

    def __init__(self, folder: str, shared: LogSurroundings, items: list[Segment]) -> None:
        self._folder = folder
        self._shared = shared
        self._hints: reading.Hints = {}  # where a read ended: the next one starts there
        self._set(items)

    def _set(self, items: list[Segment]) -> None:
        self.items = items
        self.active = items[-1]
        self._bases = [segment.base_offset for segment in items]
        self._hints.clear()

    @property
    def size_bytes(self) -> int:
        return sum(segment.size for segment in self.items)

    # Reading

    def read(
        self, offset: int, max_bytes: int, limit: reading.Limit, min_one_batch: bool
    ) -> tuple[memoryview, int] | None:
        return reading.read(self.items, self._bases, self._hints, offset, max_bytes, limit, min_one_batch)

    def locate(self, offset: int) -> reading.Limit:
        """Where a read up to an offset must stop."""
        segment, position = reading.locate(self.items, self._bases, self._hints, offset)
        return offset, segment.base_offset, position

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
            or active.offset_index.size_bytes >= config.segment_index_bytes // 8 * 8
            or active.time_index.size_bytes >= config.segment_index_bytes // 12 * 12
            or last_offset - active.base_offset > RELATIVE_OFFSET_MAX
        )

    def add(self, segment: Segment) -> None:
        self.items.append(segment)
        self._bases.append(segment.base_offset)
        self.active = segment

    # Shrinking

    def drop(self, dropped: list[Segment], due_ms: int, keep_snapshot_of: int = -1) -> None:
        """Takes segments out of the log. Their files are renamed at once and removed when they are due."""
        files = self._shared.cache.files
        for segment in dropped:
            segment.close()
            paths = segment.paths()
            if segment.base_offset != keep_snapshot_of:
                paths.append(os.path.join(self._folder, file_name(segment.base_offset, SNAPSHOT)))
            for path in paths:
                if os.path.exists(path):
                    files.rename(path, path + DELETED)
                    self._shared.garbage.append((due_ms, path + DELETED))
        self._set([segment for segment in self.items if segment not in dropped])

    def replace(self, bases: list[int], sizes: dict[str, int], modified_ms: int, due_ms: int) -> Segment:
        """Puts the `.cleaned` segment at the first base in the place of several. Recovery finishes what is interrupted.

        From the moment that `.log.swap` is there (the last of the renames) the new segment counts.
        """
        files = self._shared.cache.files
        new = Segment(self._shared.cache, self._folder, bases[0], sizes, modified_ms)
        for path in reversed(new.paths()):
            if os.path.exists(path + CLEANED):
                files.rename(path + CLEANED, path + SWAP)
        files.sync_dir(self._folder)
        self.drop([s for s in self.items if s.base_offset in bases], due_ms, keep_snapshot_of=bases[0])
        for path in reversed(new.paths()):
            if os.path.exists(path + SWAP):
                files.rename(path + SWAP, path)
        self._set(sorted([*self.items, new], key=lambda segment: segment.base_offset))
        return new

    def close(self) -> None:
        for segment in self.items:
            segment.close()


def _is_old(segment: Segment, config: LogConfig, timestamp_ms: int, now_ms: int) -> bool:
    """Age counts by the records' own time, from the first batch on; without timestamps by the clock."""
    limit_ms = min(config.segment_ms, config.max_compaction_lag_ms) if config.compact else config.segment_ms
    first_ms = segment.rolling_timestamp_ms
    if first_ms is None:
        first_ms = segment.load_rolling_timestamp()
    if first_ms is not None and first_ms >= 0:
        return timestamp_ms - first_ms > limit_ms
    return now_ms - segment.created_ms > limit_ms
