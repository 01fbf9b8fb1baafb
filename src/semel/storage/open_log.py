"""An open log: its segments, producers and leader epochs in memory. One way in (`_append`), one way out (`read`).

Everything runs on one thread (the broker's loop); only fsync runs elsewhere, on the files that `take_unsynced` returns.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from semel.protocol.batch import (
    HEADER,
    LOG_OVERHEAD,
    NO_TIMESTAMP,
    TIMESTAMP_TYPE_BIT,
    TRANSACTIONAL_BIT,
    patch_log_append_time,
    patch_offset,
)
from semel.protocol.errors import ErrorCode
from semel.storage import checkpoints
from semel.storage.config import LogConfig
from semel.storage.files import FileCache, Handle
from semel.storage.producer_state import BatchInfo, CompletedTransaction, DataBatch, MarkerBatch, encode_snapshot
from semel.storage.recovery import LogContents, add_earlier_batches
from semel.storage.results import AppendResult, Isolation, ReadResult, StorageError
from semel.storage.segment import SNAPSHOT, AbortedTxn, Segment, file_name
from semel.storage.segments import Limit, SegmentList
from semel.storage.validation import Inspection, check_client_batch, check_coordinator_batches, refuse_size

_log = logging.getLogger("semel.storage")

COMPLAIN_EVERY_MS = 10_000

_Check = Callable[[DataBatch, object | None], BatchInfo | None]


@dataclass(slots=True)
class LogShared:
    """What the logs of one data folder share."""

    cache: FileCache
    now_ms: Callable[[], int]
    waits_for_disk: bool  # fsync=commit: nothing is visible before it is synced
    mark_unsynced: Callable[[Any], None]  # of the group commit: this log has something to sync
    garbage: dict[str, list[tuple[int, str]]] = field(
        default_factory=dict
    )  # by folder: (when it is due, what to remove)
    on_start_raised: Callable[[], None] = lambda: None  # records were deleted: the start offsets need a checkpoint
    _complained_ms: int | None = None  # when the log last said that the disk refuses writes

    def write_refused(self, what: str, error: OSError) -> StorageError:
        """The disk does not take a write. The log says so, but not at every try of every client."""
        refusal, now_ms = storage_error(what, error), self.now_ms()
        if self._complained_ms is None or abs(now_ms - self._complained_ms) >= COMPLAIN_EVERY_MS:
            self._complained_ms = now_ms
            _log.error("%s; clients are refused with KAFKA_STORAGE_ERROR until the disk takes writes again", refusal)
        return refusal


def storage_error(what: str, error: Exception) -> StorageError:
    return StorageError(ErrorCode.KAFKA_STORAGE_ERROR, f"{what}: {error}; nothing was acknowledged, try again later")


class OpenLog:
    """The offsets that clients may see, and the files behind them."""

    __slots__ = (
        "_folder",
        "_hw_base",
        "_hw_position",
        "_names_unsynced",
        "_on_advance",
        "_on_unsynced",
        "_shared",
        "_tail_unsynced",
        "_unsynced_files",
        "_unsynced_records",
        "_waits_for_disk",
        "config",
        "end_offset",
        "epochs",
        "high_watermark",
        "leader_epoch",
        "segments",
        "start_offset",
        "states",
        "unsaved",
    )

    def __init__(
        self,
        folder: str,
        contents: LogContents,
        config: LogConfig,
        leader_epoch: int,
        shared: LogShared,
        on_unsynced: Callable[[], None],
        on_advance: Callable[[], None],
    ) -> None:
        self.config = config
        self.leader_epoch = leader_epoch  # stamped into every batch
        self.segments = SegmentList(folder, shared.cache, contents.segments)
        self.states = contents.states
        self.epochs = contents.epochs
        self.start_offset = contents.start_offset
        self.end_offset = contents.end_offset
        self.unsaved = bool(contents.unsynced)  # whether a clean stop has something to write
        self._folder = folder
        self._shared = shared
        self._waits_for_disk = shared.waits_for_disk
        self._on_unsynced = on_unsynced
        self._on_advance = on_advance
        self._tail_unsynced = False  # the active segment has batches that no sync covers yet
        self._unsynced_records = 0
        self._unsynced_files: list[Handle] = []  # besides the active segment's batches
        self._names_unsynced = False  # files were created or renamed
        self._set_high_watermark(self.end_offset, self.segments.active.base_offset, self.segments.active.size)

    @property
    def _name(self) -> str:
        return os.path.basename(self._folder)

    # Offsets

    @property
    def last_stable_offset(self) -> int:
        """min(high watermark, first offset of the earliest transaction that is open or not yet durably decided)."""
        unstable = self.states.first_unstable_offset()
        if unstable is None or unstable >= self.high_watermark:
            return self.high_watermark
        return max(unstable, self.start_offset)

    @property
    def visible_bytes(self) -> int:
        """The size of what is below the high watermark: without what was written but not synced yet."""
        before = (segment.size for segment in self.segments.items if segment.base_offset < self._hw_base)
        return sum(before) + self._hw_position

    def _set_high_watermark(self, offset: int, segment_base: int, position: int) -> None:
        self.high_watermark = offset
        self._hw_base = segment_base
        self._hw_position = position
        self.states.settle(offset)

    def advance(self, offset: int, segment_base: int, position: int) -> None:
        """Raises the high watermark: readers may see batches up to an offset."""
        self._set_high_watermark(offset, segment_base, position)
        self._on_advance()

    # Appending

    def append(
        self,
        batches: memoryview | bytearray,
        now_ms: int,
        guard: object | None,
        inspection: Inspection | None,
        light_only: bool,
    ) -> AppendResult:
        data = batches if type(batches) is memoryview else memoryview(batches)
        data, fields = check_client_batch(data, self.config, now_ms, inspection, light_only)
        return self._append(data, ((0, fields),), now_ms, self._check_client, guard)

    def append_records(self, batches: memoryview | bytearray, now_ms: int, guard: object | None) -> AppendResult:
        data = memoryview(batches)
        headers = check_coordinator_batches(data, self.config)
        return self._append(data, headers, now_ms, self.states.check_coordinator_batch, guard)

    def append_record(self, key: bytes | None, value: bytes | None, now_ms: int) -> int:
        """Appends one record of a coordinator, outside of transactions, as a batch. Returns its offset.

        The same as `append_records` of that batch in a third of the time: nothing in it needs to be read back.
        """
        from semel.protocol.rows import encode_single

        config, offset = self.config, self.end_offset
        data = encode_single(now_ms, key, value, offset=offset, leader_epoch=self.leader_epoch)
        if config.log_append_time:
            return self.append_records(data, now_ms, None).base_offset
        size = len(data)
        if size > config.max_message_bytes:
            refuse_size(size, config)
        segment = self.segments.active
        if self.segments.is_full(config, size, offset, now_ms, now_ms):
            segment = self.roll(now_ms)
        self._write(segment, data)
        segment.note_batch(offset, now_ms, size, config.index_interval_bytes)
        self._appended(segment, offset, offset + 1)
        return offset

    def append_marker(self, marker: MarkerBatch, transaction_version: int) -> AppendResult:
        from semel.protocol.rows import MarkerType, encode_marker

        self.states.check_marker(marker, transaction_version)
        data = encode_marker(
            MarkerType.COMMIT if marker.committed else MarkerType.ABORT,
            timestamp=marker.timestamp_ms,
            producer_id=marker.producer_id,
            producer_epoch=marker.epoch,
            coordinator_epoch=marker.coordinator_epoch,
        )
        return self._append(data, ((0, HEADER.unpack_from(data)),), marker.timestamp_ms, marker=marker)

    def _append(
        self,
        data: memoryview | bytearray,
        headers: Sequence[tuple[int, tuple[int, ...]]],
        now_ms: int,
        check: _Check | None = None,
        guard: object | None = None,
        marker: MarkerBatch | None = None,
    ) -> AppendResult:
        """Appends whole batches as one write, all or none: producers are checked, offset, epoch and LogAppendTime are
        patched in place, the bytes are written, then indexes, producers and offsets follow."""
        config = self.config
        log_append_time = config.log_append_time and marker is None
        base_offset = offset = self.end_offset
        newest_ms = NO_TIMESTAMP
        placed: list[tuple[int, int, int, int, DataBatch | None]] = []
        for at, header in headers:
            _, length, _, _, _, attributes, delta, _, timestamp_ms, producer_id, epoch, sequence, _ = header
            if log_append_time:
                timestamp_ms = now_ms
            batch = None
            if check is not None and producer_id >= 0:
                last_sequence = (sequence + delta) & 0x7FFFFFFF if sequence >= 0 else sequence
                transactional = bool(attributes & TRANSACTIONAL_BIT)
                batch = DataBatch(producer_id, epoch, sequence, last_sequence, transactional, timestamp_ms)
                known = check(batch, guard)
                if known is not None:
                    return AppendResult(
                        known.base_offset, known.last_offset, known.timestamp_ms, True, self.start_offset
                    )
            if log_append_time and not attributes & TIMESTAMP_TYPE_BIT:
                patch_log_append_time(data, now_ms, at)
            patch_offset(data, offset, self.leader_epoch, at)
            placed.append((offset, offset + delta, timestamp_ms, length + LOG_OVERHEAD, batch))
            offset += delta + 1
            if timestamp_ms > newest_ms:
                newest_ms = timestamp_ms
        segment = self.segments.active
        if self.segments.is_full(config, len(data), offset - 1, newest_ms, now_ms):
            segment = self.roll(now_ms)
        if marker is None or marker.committed:
            self._write(segment, data)
        else:
            self._write_abort(segment, data, self.states.completion(marker, base_offset))
        for first, last, timestamp_ms, size, batch in placed:
            segment.note_batch(last, timestamp_ms, size, config.index_interval_bytes)
            if batch is not None:
                self.states.apply_data(batch, first, last, now_ms)
        if marker is not None:
            self.states.apply_marker(marker, base_offset)
        self._appended(segment, base_offset, offset)
        return AppendResult(
            base_offset, offset - 1, now_ms if log_append_time else NO_TIMESTAMP, False, self.start_offset
        )

    def _check_client(self, batch: DataBatch, guard: object | None) -> BatchInfo | None:
        """The append rules. A snapshot keeps one batch per producer: before a refusal the end of the log is read."""
        try:
            return self.states.check_client_batch(batch, guard)
        except StorageError as error:
            entry = self.states.producers.get(batch.producer_id)
            if error.code is not ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER or entry is None or not entry.history_cut:
                raise
            add_earlier_batches(entry, self.segments.items)
            return self.states.check_client_batch(batch, guard)

    def _write(self, segment: Segment, data: memoryview | bytearray) -> None:
        try:
            segment.write(data)
        except OSError as error:
            raise self._shared.write_refused(f"cannot append to {segment.log.path}", error) from error

    def _write_abort(
        self, segment: Segment, data: memoryview | bytearray, completed: CompletedTransaction | None
    ) -> None:
        """The index has an abort before the log has its marker: readers must never miss it."""
        if completed is None:
            self._write(segment, data)
            return
        try:
            segment.txn_index.append(AbortedTxn(*completed[:4]))
        except OSError as error:
            raise self._shared.write_refused(f"cannot write {segment.txn_index.handle.path}", error) from error
        try:
            self._write(segment, data)
        except StorageError:
            segment.txn_index.drop_last()
            raise

    def _appended(self, segment: Segment, base_offset: int, end_offset: int) -> None:
        """The bytes are in the file: the log is longer, and readers may see it now or after the next sync."""
        if not self.epochs or self.epochs[-1][0] != self.leader_epoch:
            self._assign_epoch(base_offset)
        self.end_offset = end_offset
        self.unsaved = True
        if not self._waits_for_disk:
            self.advance(end_offset, segment.base_offset, segment.size)
            self._unsynced_records += end_offset - base_offset
            if self._unsynced_records >= self.config.flush_messages:
                self.sync_soon()
        elif not self._tail_unsynced:
            self._tail_unsynced = True
            self._on_unsynced()

    def _assign_epoch(self, start_offset: int) -> None:
        """The first batch of a leader epoch, which is also the first batch of a new log."""
        self.epochs.append((self.leader_epoch, start_offset))
        path = os.path.join(self._folder, checkpoints.LEADER_EPOCHS)
        try:
            checkpoints.write_epochs(self._shared.cache.files, path, self.epochs, sync=False)
        except OSError as error:  # recovery finds it in the batches
            _log.warning("cannot write %s: %s", path, error)
        self._mark_unsynced(Handle(path, close_unpinned=True))

    def roll(self, now_ms: int) -> Segment:
        """Starts a new segment at the end of the log, with a snapshot of the producers."""
        old = self.segments.active
        try:
            old.seal()
            self._write_snapshot()
            new = Segment(self._shared.cache, self._folder, self.end_offset, {}, now_ms)
            new.write_indexes()
            _ = new.fd  # creates the file: its name is the end offset of an empty log
        except OSError as error:
            raise self._shared.write_refused(f"cannot start a new segment of {self._name}", error) from error
        self.segments.add(new)
        self._mark_unsynced(*old.handles(), new.log)
        return new

    def _write_snapshot(self) -> None:
        path = os.path.join(self._folder, file_name(self.end_offset, SNAPSHOT))
        self._shared.cache.files.write_whole(path, encode_snapshot(self.states.producers.values()), sync=False)
        self._mark_unsynced(Handle(path, close_unpinned=True))

    # Syncing

    def _mark_unsynced(self, *handles: Handle) -> None:
        """These files need a sync before the recovery point may pass them."""
        self._unsynced_files += handles
        self._names_unsynced = True
        self._on_unsynced()

    def _discard_unsynced(self, gone: list[Segment]) -> None:
        """Files that are about to be removed need no sync."""
        paths = {path for segment in gone for path in segment.paths()}
        self._unsynced_files = [handle for handle in self._unsynced_files if handle.path not in paths]

    def sync_soon(self) -> None:
        """fsync=os: syncs in the background what was appended, for flush.messages and flush.ms."""
        if self._unsynced_records and not self._tail_unsynced:
            self._tail_unsynced = True
            self._on_unsynced()

    def mark_all_unsynced(self) -> None:
        """For a flush: the indexes too."""
        self.segments.active.write_indexes()
        self._mark_unsynced(*self.segments.active.handles())
        self._tail_unsynced = True

    def take_unsynced(self) -> tuple[list[Handle], bool]:
        """The files that need a sync, and whether the folder does. They count as synced from here on."""
        handles, names_unsynced = self._unsynced_files, self._names_unsynced
        if self._tail_unsynced:
            handles = [*handles, self.segments.active.log]
            self._tail_unsynced, self._unsynced_records = False, 0
        self._unsynced_files, self._names_unsynced = [], False
        return handles, names_unsynced

    def seal(self) -> None:
        """Before a clean stop: indexes complete, producers in a snapshot."""
        self.segments.active.seal()
        self._write_snapshot()

    # Reading

    def read(self, offset: int, max_bytes: int, up_to: Isolation, min_one_batch: bool) -> ReadResult:
        if not self.start_offset <= offset <= self.end_offset:
            raise StorageError(
                ErrorCode.OFFSET_OUT_OF_RANGE,
                f"offset {offset} is not in {self._name}, which has [{self.start_offset}, {self.end_offset})",
            )
        stable = self.last_stable_offset
        limit = self._limit(up_to, stable)
        committed_only = up_to == "last_stable"
        found = None
        if offset < limit[0]:
            try:
                found = self.segments.read(offset, max_bytes, limit, min_one_batch)
            except OSError as error:
                message = f"cannot read {self._name} at {offset}: {error}"
                raise StorageError(ErrorCode.KAFKA_STORAGE_ERROR, message) from error
        if found is None:
            return ReadResult(b"", self.high_watermark, stable, self.start_offset, [] if committed_only else None)
        records, next_offset = found
        aborted = self.segments.aborted_in(offset, next_offset) if committed_only else None
        return ReadResult(
            records, self.high_watermark, stable, self.start_offset, aborted, has_more=next_offset < limit[0]
        )

    def _limit(self, up_to: Isolation, stable: int) -> Limit:
        """Offset, segment and position where a read must stop."""
        if up_to == "log_end":
            return self.end_offset, self.segments.active.base_offset, self.segments.active.size
        if up_to == "high_watermark" or stable == self.high_watermark:
            return self.high_watermark, self._hw_base, self._hw_position
        return self.segments.locate(stable)

    # Deleting

    def delete_records(self, before_offset: int) -> int:
        target = self.high_watermark if before_offset == -1 else before_offset
        if not 0 <= target <= self.high_watermark:
            raise StorageError(
                ErrorCode.OFFSET_OUT_OF_RANGE,
                f"cannot delete records of {self._name} up to {target}: the high watermark is {self.high_watermark}",
            )
        if target > self.start_offset:
            self._raise_start(target)
            self._shared.on_start_raised()
        return self.start_offset

    def apply_retention(self, now_ms: int) -> int:
        segments = self.segments.items
        count = self.segments.expired_count(self.config, now_ms, self.high_watermark, self.start_offset)
        if count == len(segments):
            if self.segments.active.size == 0:
                count -= 1
            else:
                count = self._roll_for_retention(count, now_ms)
        if count:
            self._raise_start(max(self.start_offset, segments[count].base_offset))
            self.drop_segments(segments[:count], now_ms)
        return count

    def _roll_for_retention(self, count: int, now_ms: int) -> int:
        """A new segment in place of the last one that goes. On a full disk the others go first, to make the space."""
        try:
            self.roll(now_ms)
        except StorageError:
            if count == 1:
                raise
            return count - 1
        return count

    def _raise_start(self, offset: int) -> None:
        self.start_offset = offset
        self.epochs = checkpoints.epochs_from(self.epochs, offset)

    def drop_segments(self, dropped: list[Segment], now_ms: int) -> None:
        """Takes segments out of the log. Their files are renamed at once and removed later."""
        self._discard_unsynced(dropped)
        self._remove_later(self.segments.drop(dropped), now_ms)

    def replace_segments(self, bases: list[int], sizes: dict[str, int], modified_ms: int, now_ms: int) -> None:
        """Puts a compacted segment, written aside, in the place of several (see SegmentList.replace)."""
        self._discard_unsynced([segment for segment in self.segments.items if segment.base_offset in bases])
        new, renamed = self.segments.replace(bases, sizes, modified_ms)
        self._remove_later(renamed, now_ms)
        self._mark_unsynced(*new.handles())
        if self._hw_base in bases:  # the high watermark was the end of the last of them
            self._hw_base = next(s.base_offset for s in self.segments.items if s.base_offset > bases[-1])
            self._hw_position = 0

    def _remove_later(self, paths: list[str], now_ms: int) -> None:
        due_ms = now_ms + self.config.file_delete_delay_ms
        self._shared.garbage.setdefault(self._folder, []).extend((due_ms, path) for path in paths)
