"""A partition's log on disk: the object that the broker appends to and reads from.

All methods run on one thread (the broker's loop); only fsync runs elsewhere, between `begin_sync` and `end_sync`.
A log reads its files on first use, so ten thousand idle partitions cost next to nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from uuid import UUID

from crc32c import crc32c

from semel.protocol.batch import (
    CRC_START,
    HEADER,
    HEADER_SIZE,
    LOG_OVERHEAD,
    MAGIC,
    NO_TIMESTAMP,
    TIMESTAMP_TYPE_BIT,
    TRANSACTIONAL_BIT,
    iter_headers,
    patch_log_append_time,
    patch_offset,
    read_header,
)
from semel.protocol.errors import CorruptBatchError, ErrorCode
from semel.protocol.record_check import is_ready
from semel.storage import checkpoints, epochs, history, reading, retention, snapshot, timequery, validation
from semel.storage.config import LogConfig
from semel.storage.errors import StorageError
from semel.storage.files import Files, Handle
from semel.storage.producer_state import BatchInfo, DataBatch, ProducerEntry, ProducerStates
from semel.storage.recovery import LogFolder, open_log
from semel.storage.results import (
    AppendResult,
    Isolation,
    LogSurroundings,
    ProducerInfo,
    ReadResult,
    SyncJob,
    TimestampOffset,
)
from semel.storage.segment import SNAPSHOT, Segment, file_name
from semel.storage.segments import SegmentList
from semel.storage.txnindex import AbortedTransaction
from semel.storage.validation import Inspection

_log = logging.getLogger("semel.storage")
_unpack_header = HEADER.unpack_from
_NOT_PLAIN = ~validation.PLAIN_ATTRIBUTES


class PartitionLog:
    """One partition. Offsets of what clients may see, how far the disk has it, and the files behind it."""

    __slots__ = (
        "_clean",
        "_config",
        "_dirty",
        "_dirty_folders",
        "_dirty_handles",
        "_end",
        "_end_limit",
        "_ended",
        "_epochs",
        "_generation",
        "_high_watermark",
        "_hw_base",
        "_hw_position",
        "_loaded",
        "_recovery_point",
        "_segments",
        "_shared",
        "_start",
        "_states",
        "_unflushed",
        "_unsaved",
        "_waits_for_disk",
        "cleaned_offset",
        "folder",
        "leader_epoch",
        "offline",
        "on_advance",
        "partition",
        "topic",
        "topic_id",
    )

    def __init__(
        self,
        folder: str,
        topic: str,
        partition: int,
        topic_id: UUID,
        config: LogConfig,
        shared: LogSurroundings,
        *,
        clean: bool,
        recovery_point: int = 0,
        start_offset: int = 0,
        cleaned_offset: int = 0,
    ) -> None:
        self.folder = folder
        self.topic = topic
        self.partition = partition
        self.topic_id = topic_id
        self.leader_epoch = 0  # stamped into every batch
        self.on_advance: Callable[[PartitionLog], None] | None = None  # high watermark or LSO moved: wake fetches
        self.offline: StorageError | None = None  # why the last write or sync failed; the next use tries again
        self.cleaned_offset = cleaned_offset  # compaction is done below it
        self._shared = shared
        self._waits_for_disk = shared.sync.waits_for_disk
        self._clean = clean
        self._recovery_point = recovery_point
        self._start = start_offset
        self._end_limit: int | None = None
        self._ended: StorageError | None = None  # closed or deleted: never to be opened again by this object
        self._loaded = False
        self._generation = 0
        self._unflushed = 0  # records since the last sync
        self._unsaved = False  # there is something that a clean stop has to write
        self._dirty = False
        self._dirty_handles: list[Handle] = []
        self._dirty_folders: list[str] = []
        self._states = ProducerStates()
        self._epochs: list[tuple[int, int]] = []
        self._end = self._high_watermark = self._hw_base = self._hw_position = 0
        self.config = config

    def __repr__(self) -> str:
        return f"PartitionLog({self.topic}-{self.partition})"

    @property
    def config(self) -> LogConfig:
        return self._config

    @config.setter
    def config(self, config: LogConfig) -> None:
        """May change at any time; it counts from the next append on."""
        self._config = config

    # Offsets

    @property
    def start_offset(self) -> int:
        if not self._loaded:
            self._load()
        return self._start

    @property
    def end_offset(self) -> int:
        if not self._loaded:
            self._load()
        return self._end

    @property
    def high_watermark(self) -> int:
        """The end of what readers may see. Under fsync=commit: what a power cut can't take back."""
        if not self._loaded:
            self._load()
        return self._high_watermark

    @property
    def last_stable_offset(self) -> int:
        """min(high watermark, first offset of the earliest transaction that is open or not yet durably decided)."""
        if not self._loaded:
            self._load()
        unstable = self._states.first_unstable_offset()
        if unstable is None or unstable >= self._high_watermark:
            return self._high_watermark
        return max(unstable, self._start)

    @property
    def last_epoch(self) -> int:
        """The leader epoch of the last batch; -1 if there never was one."""
        if not self._loaded:
            self._load()
        return self._epochs[-1][0] if self._epochs else -1

    @property
    def recovery_point(self) -> int:
        """Below it everything is on the disk, indexes too. Known without reading the log."""
        return self._recovery_point

    @property
    def known_start_offset(self) -> int:
        """The start offset as far as it is known without reading the log: what the checkpoint needs to remember."""
        return self._start

    @property
    def is_loaded(self) -> bool:
        return self._loaded

    @property
    def size_bytes(self) -> int:
        if not self._loaded:
            self._load()
        return self._segments.size_bytes

    @property
    def visible_bytes(self) -> int:
        """The size of what is below the high watermark: without what was written but not synced yet."""
        if not self._loaded:
            self._load()
        before = (segment.size for segment in self._segments.items if segment.base_offset < self._hw_base)
        return sum(before) + self._hw_position

    @property
    def segments(self) -> list[Segment]:
        """Oldest first; the last one is being written. For retention, compaction and tests."""
        if not self._loaded:
            self._load()
        return self._segments.items

    @property
    def files(self) -> Files:
        return self._shared.cache.files

    @property
    def states(self) -> ProducerStates:
        if not self._loaded:
            self._load()
        return self._states

    # Loading

    def _load(self) -> None:
        """Reads the folder. After a failed write or sync: keeps only what is surely on the disk, or stays offline."""
        if self._ended is not None:
            raise self._ended
        folder = LogFolder(
            path=self.folder,
            cache=self._shared.cache,
            clean=self._clean,
            recovery_point=self._recovery_point,
            start_offset=self._start,
            index_interval_bytes=self._config.index_interval_bytes,
            now_ms=self._shared.now_ms(),
            end_limit=self._end_limit,
        )
        try:
            opened = open_log(folder)
            news = opened.cut_bytes or opened.end_offset > self._recovery_point or self._end_limit is not None
            if opened.unsynced and news and (self._waits_for_disk or self._end_limit is not None):
                self._sync_now(opened.unsynced)
        except Exception as error:  # also what nobody thought of: other partitions must not suffer from it
            raise self._failed(error) from error
        opened.states.verifications = self._states.verifications  # a failed sync does not undo what was verified
        self._segments = SegmentList(self.folder, self._shared, opened.segments)
        self._states, self._epochs = opened.states, opened.epochs
        self.leader_epoch = max(
            [self.leader_epoch, *(epoch for epoch, _ in self._epochs)]
        )  # higher in a folder that was copied in
        self._start, self._end = opened.start_offset, opened.end_offset
        self.cleaned_offset = min(self.cleaned_offset, self._end)  # what comes after a cut is not compacted
        self._clean = True
        self._end_limit = None
        self._loaded = True
        self._unsaved = bool(opened.unsynced)
        self.offline = None
        self._recovery_point = self._end if self._waits_for_disk else min(self._recovery_point, self._end)
        self._show_up_to(self._end, self._segments.active.base_offset, self._segments.active.size)

    def _sync_now(self, handles: list[Handle]) -> None:
        cache = self._shared.cache
        for handle in handles:
            cache.files.sync_file(cache.fd(handle), handle.path)
        cache.files.sync_dir(self.folder)

    def load(self) -> None:
        """Reads the folder now instead of on first use; recovers it if need be."""
        if not self._loaded:
            self._load()

    # Appending

    def append(
        self,
        batches: memoryview | bytearray,
        *,
        now_ms: int,
        guard: object | None = None,
        inspection: Inspection | None = None,
        light_only: bool = False,
    ) -> AppendResult:
        """Appends a client's batch (exactly one), patching offset, epoch and LogAppendTime in place.

        Raises StorageError with Kafka's code. A transactional batch needs an open transaction or the guard that
        `start_verification` gave before the coordinator was asked. With `light_only`, HeavyBatch where the records
        should be looked at by a thread first (`inspect`), whose `inspection` is then given here.
        """
        if not self._loaded:
            self._load()
        data = batches if type(batches) is memoryview else memoryview(batches)
        size = len(data)
        config = self._config
        if size < HEADER_SIZE:
            validation.check_client_batch(data, config, now_ms)
        fields = _unpack_header(data)
        base, length, _, magic, crc, attributes, last_delta, base_timestamp, max_timestamp = fields[:9]
        producer_id, epoch, sequence, count = fields[9:]
        if (
            length + LOG_OVERHEAD != size
            or magic != MAGIC
            or base
            or size > config.max_message_bytes
            or count < 1
            or last_delta + 1 != count
            or attributes & _NOT_PLAIN
            or attributes & 7 > validation.COMPRESSION_MAX
            or (sequence < 0 <= producer_id)
            or max_timestamp - now_ms > config.message_timestamp_after_max_ms
            or crc32c(data[CRC_START:]) != crc
        ):
            validation.check_client_batch(data, config, now_ms)
        if inspection is None and not attributes & 7 and config.compression_type == "producer":
            if light_only and (size > validation.LIGHT_PLAIN_BYTES or not is_ready(count)):
                raise validation.HeavyBatch
            facts = validation.check_plain(data, count)
        else:
            facts, data = inspection or validation.inspect(data, attributes, count, config, light_only=light_only)
            size = len(data)
        validation.check_facts(facts, data, base_timestamp, config, now_ms)
        if config.log_append_time:
            patch_log_append_time(data, now_ms)
            max_timestamp = now_ms
        batch = None
        if producer_id >= 0:
            last_sequence = (sequence + last_delta) & 0x7FFFFFFF
            transactional = bool(attributes & TRANSACTIONAL_BIT)
            batch = DataBatch(producer_id, epoch, sequence, last_sequence, transactional, max_timestamp)
            duplicate = self._check_producer(batch, guard)
            if duplicate is not None:
                return AppendResult(
                    duplicate.base_offset, duplicate.last_offset, duplicate.timestamp_ms, True, self._start
                )
        base_offset = self._end
        last_offset = base_offset + last_delta
        segment = self._segment_for(size, last_offset, max_timestamp, now_ms)
        patch_offset(data, base_offset, self.leader_epoch)
        self._write(segment, data)
        segment.note_batch(last_offset, max_timestamp, size, config.index_interval_bytes)
        if batch is not None:
            self._states.apply_data(batch, base_offset, last_offset, now_ms)
        self._appended(segment, base_offset, last_offset)
        return AppendResult(
            base_offset, last_offset, now_ms if config.log_append_time else NO_TIMESTAMP, False, self._start
        )

    def inspect(self, batch: memoryview) -> Inspection:
        """Looks at the records of a batch that `append` found too heavy, in any thread. StorageError: refused."""
        header = read_header(batch)
        return validation.inspect(batch, header.attributes, header.record_count, self._config)

    def _check_producer(self, batch: DataBatch, guard: object | None) -> BatchInfo | None:
        """The append rules. A snapshot keeps one batch per producer: before a refusal the log's tail is asked."""
        try:
            return self._states.check_client_batch(batch, guard)
        except StorageError as error:
            entry = self._states.producers.get(batch.producer_id)
            if error.code is not ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER or entry is None or not entry.history_cut:
                raise
            history.extend(entry, self._segments.items)
            return self._states.check_client_batch(batch, guard)

    def append_records(
        self, batches: memoryview | bytearray, *, now_ms: int, guard: object | None = None
    ) -> AppendResult:
        """Appends batches of the broker itself (coordinators): any number of batches, no sequence check."""
        if not self._loaded:
            self._load()
        data = memoryview(batches)
        base_offset = self._end
        placed, size, max_timestamp = self._place(data, guard, now_ms)
        last_offset = placed[-1][1]
        segment = self._segment_for(size, last_offset, max_timestamp, now_ms)
        self._write(segment, data)
        for first, last, timestamp_ms, batch_size, batch in placed:
            segment.note_batch(last, timestamp_ms, batch_size, self._config.index_interval_bytes)
            if batch is not None:
                self._states.apply_data(batch, first, last, now_ms)
        self._appended(segment, base_offset, last_offset)
        append_time_ms = now_ms if self._config.log_append_time else NO_TIMESTAMP
        return AppendResult(base_offset, last_offset, append_time_ms, False, self._start)

    def _place(
        self, data: memoryview, guard: object | None, now_ms: int
    ) -> tuple[list[tuple[int, int, int, int, DataBatch | None]], int, int]:
        """Checks the broker's own batches and gives them their offsets; (first, last, time, size, batch) of each."""
        placed: list[tuple[int, int, int, int, DataBatch | None]] = []
        offset, size, max_timestamp = self._end, 0, NO_TIMESTAMP
        try:
            first = read_header(data)
            headers = [(0, first)] if first.size == len(data) else list(iter_headers(data))
        except CorruptBatchError as error:
            raise StorageError(error.code, str(error)) from error
        if not headers or headers[-1][0] + headers[-1][1].size != len(data):
            raise StorageError(ErrorCode.CORRUPT_MESSAGE, f"{len(data)} bytes are not a sequence of whole batches")
        for at, header in headers:
            if header.size > self._config.max_message_bytes:
                validation.refuse_size(header.size, self._config)
            timestamp_ms = now_ms if self._config.log_append_time else header.max_timestamp
            batch = None
            if header.has_producer_id:
                batch = DataBatch(
                    header.producer_id,
                    header.producer_epoch,
                    header.base_sequence,
                    header.last_sequence,
                    header.is_transactional,
                    timestamp_ms,
                )
                self._states.check_coordinator_batch(batch, guard)
            if self._config.log_append_time and not header.attributes & TIMESTAMP_TYPE_BIT:
                patch_log_append_time(data, now_ms, at)
            patch_offset(data, offset, self.leader_epoch, at)
            placed.append((offset, offset + header.last_offset_delta, timestamp_ms, header.size, batch))
            offset += header.last_offset_delta + 1
            size += header.size
            max_timestamp = max(max_timestamp, timestamp_ms)
        return placed, size, max_timestamp

    def append_marker(
        self,
        producer_id: int,
        producer_epoch: int,
        coordinator_epoch: int,
        *,
        commit: bool,
        now_ms: int,
        transaction_version: int = 1,
    ) -> AppendResult:
        """Ends a producer's transaction here. INVALID_PRODUCER_EPOCH or TRANSACTION_COORDINATOR_FENCED if too old."""
        from semel.protocol.rows import MarkerType, encode_marker

        if not self._loaded:
            self._load()
        self._states.check_marker(producer_id, producer_epoch, coordinator_epoch, transaction_version)
        offset = self._end
        data = encode_marker(
            MarkerType.COMMIT if commit else MarkerType.ABORT,
            offset=offset,
            timestamp=now_ms,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            coordinator_epoch=coordinator_epoch,
            leader_epoch=self.leader_epoch,
        )
        segment = self._segment_for(len(data), offset, now_ms, now_ms)
        self._write_marker(segment, data, producer_id, offset, commit=commit)
        segment.note_batch(offset, now_ms, len(data), self._config.index_interval_bytes)
        self._states.apply_marker(
            producer_id, producer_epoch, coordinator_epoch, committed=commit, offset=offset, timestamp_ms=now_ms
        )
        self._appended(segment, offset, offset)
        return AppendResult(offset, offset, NO_TIMESTAMP, False, self._start)

    def _write_marker(self, segment: Segment, data: bytearray, producer_id: int, offset: int, *, commit: bool) -> None:
        """An abort stands in the index before its marker is in the log: readers must never miss it."""
        completed = None if commit else self._states.completion(producer_id, offset, committed=False)
        if completed is None:
            self._write(segment, data)
            return
        aborted = AbortedTransaction(producer_id, completed.first_offset, offset, completed.last_stable_offset)
        try:
            segment.txn_index.append(aborted)
        except OSError as error:
            raise _storage_error(f"cannot write {segment.txn_index.handle.path}", error) from error
        try:
            self._write(segment, data)
        except StorageError:
            segment.txn_index.drop_last()
            raise

    def _segment_for(self, size: int, last_offset: int, timestamp_ms: int, now_ms: int) -> Segment:
        """The segment that takes the next bytes; a new one where the last is full or old."""
        full = self._segments.is_full(self._config, size, last_offset, timestamp_ms, now_ms)
        return self.roll(now_ms) if full else self._segments.active

    def _write(self, segment: Segment, data: memoryview | bytearray) -> None:
        try:
            segment.write(data)
        except OSError as error:
            raise _storage_error(f"cannot append to {segment.log.path}", error) from error

    def _appended(self, segment: Segment, base_offset: int, last_offset: int) -> None:
        """The bytes are in the file: the log is longer, and readers may see it now or after the next sync."""
        if not self._epochs or self._epochs[-1][0] != self.leader_epoch:
            self._assign_epoch(base_offset)
        self._end = last_offset + 1
        self._unsaved = True
        if not self._waits_for_disk:
            self._advance(self._end, segment.base_offset, segment.size)
            self._unflushed += last_offset - base_offset + 1
            if self._unflushed >= self._config.flush_messages:
                self.sync_soon()
        elif not self._dirty:
            self._dirty = True
            self._shared.sync.mark_dirty(self)

    def sync_soon(self) -> None:
        """fsync=os: has what was written synced in the background, as flush.messages and flush.ms ask for."""
        if self._unflushed and not self._dirty:
            self._dirty = True
            self._shared.sync.mark_dirty(self)

    def _assign_epoch(self, start_offset: int) -> None:
        """The first batch of a leader epoch, which is also the first batch of a new log."""
        self._epochs.append((self.leader_epoch, start_offset))
        path = os.path.join(self.folder, checkpoints.LEADER_EPOCHS)
        try:
            checkpoints.write_epochs(self._shared.cache.files, path, self._epochs, sync=False)
        except OSError as error:  # it is found again in the batches
            _log.warning("cannot write %s: %s", path, error)
        self._soil(Handle(path, doomed=True))

    def _show_up_to(self, offset: int, segment_base: int, position: int) -> None:
        self._high_watermark = offset
        self._hw_base = segment_base
        self._hw_position = position
        self._states.settle(offset)

    def _advance(self, offset: int, segment_base: int, position: int) -> None:
        self._show_up_to(offset, segment_base, position)
        if self.on_advance is not None:
            self.on_advance(self)

    def roll(self, now_ms: int) -> Segment:
        """Starts a new segment at the end of the log, with a snapshot of the producers."""
        old = self._segments.active
        try:
            old.seal()
            self._write_snapshot()
            new = Segment(self._shared.cache, self.folder, self._end, {}, now_ms)
            new.write_indexes()
            _ = new.fd  # the file must be there: an empty log knows its end by it
        except OSError as error:
            raise _storage_error(f"cannot start a new segment of {self}", error) from error
        self._segments.add(new)
        self._soil(*old.handles(), new.log)
        return new

    def _write_snapshot(self) -> None:
        path = os.path.join(self.folder, file_name(self._end, SNAPSHOT))
        self._shared.cache.files.write_whole(path, snapshot.encode(self._states.producers.values()), sync=False)
        self._soil(Handle(path, doomed=True))

    def _soil(self, *handles: Handle) -> None:
        """These files need a sync before the recovery point may pass them."""
        self._dirty_handles += handles
        if self.folder not in self._dirty_folders:
            self._dirty_folders.append(self.folder)
        self._shared.sync.mark_dirty(self)

    def is_new_in(self, parent: str) -> None:
        """The log was just created: its folder's name and its topic id must be durable with the first batch."""
        metadata = os.path.join(self.folder, checkpoints.PARTITION_METADATA)
        self._dirty_handles.append(Handle(metadata, doomed=True))
        self._dirty_folders += [self.folder, parent]

    # Syncing (see sync.py)

    def begin_sync(self) -> SyncJob:
        """Everything that was written up to now, for a thread that syncs it. The files stay open until `end_sync`."""
        active = self._segments.active
        handles = [*self._dirty_handles, active.log] if self._dirty else self._dirty_handles
        folders = self._dirty_folders
        if self._dirty:
            self._dirty, self._unflushed = False, 0
        self._dirty_handles, self._dirty_folders = [], []
        pinned: list[Handle] = []
        try:
            for handle in handles:
                self._shared.cache.pin(handle)
                pinned.append(handle)
        except OSError as error:
            for handle in pinned:
                self._shared.cache.unpin(handle)
            raise self._failed(error) from error
        return SyncJob(self, handles, folders, self._end, active.base_offset, active.size, self._generation)

    def run_sync(self, job: SyncJob) -> OSError | None:
        """The part for another thread: it touches nothing but the pinned files."""
        files = self._shared.cache.files
        try:
            for handle in job.handles:
                files.sync_file(handle.fd, handle.path)
            for folder in job.folders:
                files.sync_dir(folder)
        except OSError as error:
            return error
        return None

    def end_sync(self, job: SyncJob, error: OSError | None) -> StorageError | None:
        """Back on the log's thread: readers see what is durable now; or nothing is, and the log goes offline."""
        for handle in job.handles:
            self._shared.cache.unpin(handle)
        if error is not None:
            return self._failed(error)
        if job.generation == self._generation:
            if self._waits_for_disk:
                self._recovery_point = max(self._recovery_point, job.end_offset)
                if job.end_offset > self._high_watermark:
                    self._advance(job.end_offset, job.segment_base, job.position)
            else:
                self._recovery_point = max(self._recovery_point, job.segment_base)
        return self.offline

    def _failed(self, error: Exception) -> StorageError:
        """After a failed sync nobody knows what is on the disk beyond the high watermark: that part is given up."""
        if self._loaded:
            self._end_limit = self._high_watermark
            self._close_files()
        self._loaded = False
        self._generation += 1
        self._dirty = False
        self._dirty_handles, self._dirty_folders = [], []
        self.offline = _storage_error(f"{self} is offline", error)
        _log.error("%s", self.offline, exc_info=None if isinstance(error, OSError) else error)
        return self.offline

    # Reading

    def read(
        self, offset: int, max_bytes: int, *, up_to: Isolation = "high_watermark", min_one_batch: bool = True
    ) -> ReadResult:
        """Batches from `offset` on. OFFSET_OUT_OF_RANGE before the start or beyond the end of the log."""
        if not self._loaded:
            self._load()
        if not self._start <= offset <= self._end:
            raise StorageError(
                ErrorCode.OFFSET_OUT_OF_RANGE,
                f"offset {offset} is not in {self.topic}-{self.partition}, which has [{self._start}, {self._end})",
            )
        stable = self.last_stable_offset
        limit = self._limit(up_to, stable)
        committed_only = up_to == "last_stable"
        found = None
        if offset < limit[0]:
            found = self._slice(offset, max_bytes, limit, min_one_batch)
        if found is None:
            return ReadResult(b"", self._high_watermark, stable, self._start, [] if committed_only else None)
        records, next_offset = found
        aborted = self.aborted_in(offset, next_offset) if committed_only else None
        return ReadResult(records, self._high_watermark, stable, self._start, aborted)

    def _slice(
        self, offset: int, max_bytes: int, limit: reading.Limit, min_one_batch: bool
    ) -> tuple[memoryview, int] | None:
        try:
            return self._segments.read(offset, max_bytes, limit, min_one_batch)
        except OSError as error:
            raise StorageError(ErrorCode.KAFKA_STORAGE_ERROR, f"cannot read {self} at {offset}: {error}") from error

    def _limit(self, up_to: Isolation, stable: int) -> reading.Limit:
        """Offset, segment and position where a read must stop."""
        if up_to == "log_end":
            return self._end, self._segments.active.base_offset, self._segments.active.size
        if up_to == "high_watermark" or stable == self._high_watermark:
            return self._high_watermark, self._hw_base, self._hw_position
        return self._segments.locate(stable)

    def aborted_in(self, offset: int, upper_offset: int) -> list[tuple[int, int]]:
        """(producer id, first offset) of aborted transactions that overlap a range, by first offset."""
        return self._segments.aborted_in(offset, upper_offset)

    def offset_for_time(self, timestamp_ms: int) -> TimestampOffset | None:
        """The first record with this timestamp or a later one (ListOffsets by time); None if there is none."""
        if not self._loaded:
            self._load()
        found = timequery.first_at_or_after(self._segments.items, timestamp_ms, self._start)
        return None if found is None else TimestampOffset(*found)

    def max_timestamp(self) -> TimestampOffset | None:
        """The record with the highest timestamp (ListOffsets -3)."""
        if not self._loaded:
            self._load()
        found = timequery.highest(self._segments.items, self._start)
        return None if found is None else TimestampOffset(*found)

    # Leader epochs

    def epoch_end_offset(self, leader_epoch: int) -> tuple[int, int]:
        """(epoch, end offset) for OffsetForLeaderEpoch; (-1, -1) if the epoch is unknown."""
        if not self._loaded:
            self._load()
        return epochs.end_offset(self._epochs, leader_epoch, self.leader_epoch, self._end)

    def epoch_at(self, offset: int) -> int:
        """The leader epoch that an offset was written in; -1 if it is not known."""
        if not self._loaded:
            self._load()
        return epochs.epoch_at(self._epochs, offset)

    # Producers

    def start_verification(
        self, producer_id: int, producer_epoch: int, sequence: int, *, supports_epoch_bump: bool
    ) -> object | None:
        """A guard to hand to `append` once the coordinator confirmed the transaction; None: already open, no need.

        A marker or an append with the guard makes it void, so a late confirmation cannot leave a hanging transaction.
        `supports_epoch_bump`: the producer speaks TV2 (Produce >= 12): its first sequence here must be 0.
        """
        now_ms = self._shared.now_ms()
        return self.states.start_verification(
            producer_id, producer_epoch, sequence, supports_epoch_bump=supports_epoch_bump, now_ms=now_ms
        )

    def has_open_transaction(self, producer_id: int, producer_epoch: int | None = None) -> bool:
        return self.states.has_open_transaction(producer_id, producer_epoch)

    def producer(self, producer_id: int) -> ProducerInfo | None:
        entry = self.states.producers.get(producer_id)
        return None if entry is None else _info(entry)

    def active_producers(self) -> list[ProducerInfo]:
        return [_info(entry) for entry in self.states.producers.values()]

    def all_producer_ids(self) -> set[int]:
        """Every producer id in the state, the snapshots and the batches. Reads the whole log."""
        return history.producer_ids(self.states, self.folder, self.segments)

    def expire_producers(self, now_ms: int) -> int:
        """Forgets producers idle for producer.id.expiration.ms that have no open transaction. Returns how many."""
        return self.states.expire(now_ms, self._config.producer_id_expiration_ms) if self._loaded else 0

    # Deleting

    def delete_records(self, before_offset: int) -> int:
        """DeleteRecords: raises the log start offset (-1: to the high watermark) and returns the new one."""
        if not self._loaded:
            self._load()
        target = self._high_watermark if before_offset == -1 else before_offset
        if not 0 <= target <= self._high_watermark:
            raise StorageError(
                ErrorCode.OFFSET_OUT_OF_RANGE,
                f"cannot delete records of {self.topic}-{self.partition} up to {target}: "
                f"the high watermark is {self._high_watermark}",
            )
        if target > self._start:
            self._raise_start(target)
            self._shared.on_start_raised()
        return self._start

    def apply_retention(self, now_ms: int) -> int:
        """Removes segments that are too old, too many or below the start offset. Returns how many."""
        if not self._loaded:
            self._load()
        segments = self._segments.items
        count = retention.expired_count(segments, self._config, now_ms, self._high_watermark, self._start)
        if count == len(segments):
            if self._segments.active.size == 0:
                count -= 1
            else:
                self.roll(now_ms)
        if count:
            self._raise_start(max(self._start, segments[count].base_offset))
            self.drop_segments(segments[:count], now_ms)
        return count

    def _raise_start(self, offset: int) -> None:
        self._start = offset
        self._epochs = epochs.starting_at(self._epochs, offset)

    def drop_segments(self, dropped: list[Segment], now_ms: int) -> None:
        """Takes segments out of the log. Their files are renamed at once and removed later."""
        self._forget_dirt(dropped)
        self._segments.drop(dropped, now_ms + self._config.file_delete_delay_ms)

    def replace_segments(self, bases: list[int], sizes: dict[str, int], modified_ms: int, now_ms: int) -> None:
        """Puts a compacted segment, written aside, in the place of several (see SegmentList.replace)."""
        self._forget_dirt([segment for segment in self._segments.items if segment.base_offset in bases])
        new = self._segments.replace(bases, sizes, modified_ms, now_ms + self._config.file_delete_delay_ms)
        self._soil(*new.handles())
        if self._hw_base in bases:  # the high watermark was the end of the last of them
            self._hw_base = next(s.base_offset for s in self._segments.items if s.base_offset > bases[-1])
            self._hw_position = 0

    def _forget_dirt(self, gone: list[Segment]) -> None:
        """Files that are about to go need no sync."""
        paths = {path for segment in gone for path in segment.paths()}
        self._dirty_handles = [handle for handle in self._dirty_handles if handle.path not in paths]

    # Ending

    def flush(self) -> None:
        """fsyncs everything now, on this thread, and advances the high watermark."""
        if not self._loaded:
            self._load()
        self._segments.active.write_indexes()
        self._soil(*self._segments.active.handles())
        self._dirty = True
        job = self.begin_sync()
        error = self.end_sync(job, self.run_sync(job))
        if error is not None:
            raise error
        self._recovery_point = job.end_offset

    def close(self, *, sync: bool = True) -> None:
        """Clean shutdown of this log: snapshot, flush, file handles closed. Without `sync` the caller syncs."""
        if self._loaded and self._unsaved:
            self._segments.active.seal()
            self._write_snapshot()
            if sync:
                self.flush()
            self._dirty = self._unsaved = False
            self._dirty_handles, self._dirty_folders = [], []
            self._recovery_point = self._end
        self._end_with(ErrorCode.KAFKA_STORAGE_ERROR, "is closed, the broker is stopping")

    @property
    def is_unsaved(self) -> bool:
        """Whether `close` has something to write."""
        return self._unsaved

    def _close_files(self) -> None:
        self._segments.close()

    def abandon(self) -> None:
        """Closes the files and nothing more: the partition is deleted."""
        self._end_with(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "was deleted")

    def _end_with(self, code: ErrorCode, what: str) -> None:
        """Late requests must not open the folder again: it may belong to a new partition of the same name."""
        if self._loaded:
            self._close_files()
        self._loaded = False
        self._generation += 1
        self._ended = StorageError(code, f"{self.topic}-{self.partition} {what}")


def _info(entry: ProducerEntry) -> ProducerInfo:
    return ProducerInfo(
        entry.producer_id,
        entry.epoch,
        entry.last_sequence,
        entry.last_timestamp_ms,
        entry.coordinator_epoch,
        entry.txn_first_offset,
    )


def _storage_error(what: str, error: Exception) -> StorageError:
    return StorageError(ErrorCode.KAFKA_STORAGE_ERROR, f"{what}: {error}; nothing was acknowledged, try again later")
