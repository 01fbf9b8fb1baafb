"""A partition's log: its life cycle, and the interface that the broker uses.

A log reads its files on first use, so ten thousand idle partitions cost next to nothing. What it holds once they are
read is an `OpenLog`. All methods run on one thread (the broker's loop); only `run_sync` and `inspect` run elsewhere.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from enum import Enum, auto
from typing import NamedTuple
from uuid import UUID

from semel.protocol.batch import read_header
from semel.protocol.errors import ErrorCode
from semel.storage import checkpoints, recovery, validation
from semel.storage.config import LogConfig
from semel.storage.files import DiskFiles, Handle
from semel.storage.open_log import LogShared, OpenLog, storage_error
from semel.storage.producer_state import MarkerBatch, ProducerStates, Verification
from semel.storage.results import AppendResult, Isolation, ReadResult, StorageError, TimedBatch
from semel.storage.segment import Segment
from semel.storage.validation import Inspection

_log = logging.getLogger("semel.storage")


class LogState(Enum):
    CLEAN = auto()  # not read yet; the last run stopped cleanly: the next use trusts the files
    UNCLEAN = auto()  # not read yet; the last run did not stop cleanly: the next use recovers the files
    OPEN = auto()
    FAILED = auto()  # a sync failed: the next use recovers the files and keeps what is below the high watermark
    CLOSED = auto()  # stopped; never opened again by this object
    DELETED = auto()  # never opened again: the folder may belong to a new partition of the same name


class LogEvent(Enum):
    OPENED = auto()  # the folder was read
    FAILED = auto()  # opening or syncing failed
    CLOSED = auto()
    DELETED = auto()


_S, _E = LogState, LogEvent
TRANSITIONS: dict[LogState, dict[LogEvent, LogState]] = {
    _S.CLEAN: {_E.OPENED: _S.OPEN, _E.FAILED: _S.CLEAN, _E.CLOSED: _S.CLOSED, _E.DELETED: _S.DELETED},
    _S.UNCLEAN: {_E.OPENED: _S.OPEN, _E.FAILED: _S.UNCLEAN, _E.CLOSED: _S.CLOSED, _E.DELETED: _S.DELETED},
    _S.OPEN: {_E.FAILED: _S.FAILED, _E.CLOSED: _S.CLOSED, _E.DELETED: _S.DELETED},
    _S.FAILED: {_E.OPENED: _S.OPEN, _E.FAILED: _S.FAILED, _E.CLOSED: _S.CLOSED, _E.DELETED: _S.DELETED},
    # A sync that ends after its log did changes nothing.
    _S.CLOSED: {_E.FAILED: _S.CLOSED, _E.CLOSED: _S.CLOSED, _E.DELETED: _S.DELETED},
    _S.DELETED: {_E.FAILED: _S.DELETED, _E.CLOSED: _S.DELETED, _E.DELETED: _S.DELETED},
}
_ENDED = {
    _S.CLOSED: (ErrorCode.KAFKA_STORAGE_ERROR, "is closed, the broker is stopping"),
    _S.DELETED: (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "was deleted"),
}


def next_state(state: LogState, event: LogEvent) -> LogState:
    after = TRANSITIONS[state].get(event)
    if after is None:
        raise RuntimeError(f"a log cannot be {event.name} when it is {state.name}")
    return after


class SyncJob(NamedTuple):
    """One sync of one log: these files and folders, and then its end offset is durable."""

    log: PartitionLog
    opened: OpenLog  # after a failure the log is opened again: then the job does not count for it
    handles: list[Handle]
    folders: list[str]
    end_offset: int
    segment_base: int
    position: int


class PartitionLog:
    """One partition. Its `OpenLog` exists while the state is OPEN; every use opens the log if need be."""

    __slots__ = (
        "_config",
        "_end_limit",
        "_leader_epoch",
        "_opened",
        "_shared",
        "_start",
        "_unsynced_parent",
        "_verifications",
        "cleaned_offset",
        "error",
        "folder",
        "on_advance",
        "partition",
        "recovery_point",
        "state",
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
        shared: LogShared,
        *,
        clean: bool,
        recovery_point: int = 0,
        start_offset: int = 0,
        cleaned_offset: int = 0,
        new_in: str | None = None,
    ) -> None:
        self.folder = folder
        self.topic = topic
        self.partition = partition
        self.topic_id = topic_id
        self.on_advance: Callable[[PartitionLog], None] | None = None  # high watermark or LSO moved: wake fetches
        self.state = LogState.CLEAN if clean else LogState.UNCLEAN
        self.error: StorageError | None = None  # why the last use failed; None while the log is open
        self.cleaned_offset = cleaned_offset  # compaction is done below it
        self._config = config
        self._leader_epoch = 0
        self._shared = shared
        self.recovery_point = recovery_point  # below it everything is on the disk, indexes too
        self._start = start_offset  # while the log is not open
        self._end_limit: int | None = None  # FAILED: nothing from this offset on is kept
        self._unsynced_parent = new_in  # of a new log: its name and its topic id are durable with the first batch
        self._opened: OpenLog | None = None
        self._verifications: dict[int, Verification] | None = None  # they outlive a failure

    def __repr__(self) -> str:
        return f"PartitionLog({self.topic}-{self.partition})"

    @property
    def config(self) -> LogConfig:
        return self._config

    @config.setter
    def config(self, config: LogConfig) -> None:
        """May change at any time; it counts from the next append on."""
        self._config = config
        if self._opened is not None:
            self._opened.config = config

    @property
    def leader_epoch(self) -> int:
        return self._leader_epoch

    @leader_epoch.setter
    def leader_epoch(self, leader_epoch: int) -> None:
        self._leader_epoch = leader_epoch
        if self._opened is not None:
            self._opened.leader_epoch = leader_epoch

    @property
    def files(self) -> DiskFiles:
        return self._shared.cache.files

    # Life cycle

    @property
    def is_open(self) -> bool:
        return self._opened is not None

    @property
    def opened(self) -> OpenLog:
        """The open log; reads the folder if that was not done, and recovers it if need be."""
        return self._opened or self._open()

    def _open(self) -> OpenLog:
        """Reads the folder. After a failed sync: keeps only what is surely on the disk, or stays FAILED."""
        if self.state in _ENDED:
            assert self.error is not None
            raise self.error
        try:
            contents = self._read_folder()
        except Exception as error:  # also an unexpected one: other partitions must not suffer from it
            raise self._fail(error) from error
        if self._verifications is not None:
            contents.states.verifications = self._verifications
        self._verifications = contents.states.verifications
        epochs = [epoch for epoch, _ in contents.epochs]  # higher in a folder that was copied in
        self._leader_epoch = max([self._leader_epoch, *epochs])
        opened = self._opened = OpenLog(
            self.folder,
            contents,
            self._config,
            self._leader_epoch,
            self._shared,
            self._mark_unsynced,
            self._advanced,
        )
        self.cleaned_offset = min(self.cleaned_offset, opened.end_offset)  # what comes after a cut is not compacted
        durable = opened.end_offset if self._shared.waits_for_disk else self.recovery_point
        self.recovery_point = min(durable, opened.end_offset)
        self._end_limit = self.error = None
        self.state = next_state(self.state, LogEvent.OPENED)
        return opened

    def _read_folder(self) -> recovery.LogContents:
        cache, limit = self._shared.cache, self._end_limit
        contents = recovery.open_log(
            recovery.LogFolder(
                path=self.folder,
                cache=cache,
                trusted=self.state is LogState.CLEAN,
                recovery_point=self.recovery_point,
                start_offset=self._start,
                index_interval_bytes=self._config.index_interval_bytes,
                now_ms=self._shared.now_ms(),
                end_limit=limit,
                waits_for_disk=self._shared.waits_for_disk,
            )
        )
        has_changed = contents.cut_bytes or contents.end_offset > self.recovery_point or limit is not None
        if contents.unsynced and has_changed and (self._shared.waits_for_disk or limit is not None):
            for handle in contents.unsynced:
                cache.files.sync_file(cache.fd(handle), handle.path)
            cache.files.sync_dir(self.folder)
        return contents

    def _mark_unsynced(self) -> None:
        self._shared.mark_unsynced(self)

    def _advanced(self) -> None:
        if self.on_advance is not None:
            self.on_advance(self)

    def _fail(self, error: Exception) -> StorageError:
        """A failed sync: it is unknown what the disk has beyond the high watermark, that part is discarded."""
        if self._opened is not None:
            self._end_limit = self._opened.high_watermark
        self._release()
        self.state = next_state(self.state, LogEvent.FAILED)
        if self.state in _ENDED:
            assert self.error is not None
            return self.error
        self.error = storage_error(f"{self} is offline", error)
        _log.error("%s", self.error, exc_info=None if isinstance(error, OSError) else error)
        return self.error

    def close(self, *, sync: bool = True) -> None:
        """Clean shutdown of this log: snapshot, flush, file handles closed. Without `sync` the caller syncs.

        The next start trusts the files: a log that waits for its recovery is recovered now. StorageError: it cannot be.
        """
        opened = self._open() if self.state in (LogState.UNCLEAN, LogState.FAILED) else self._opened
        if opened is not None and opened.unsaved:
            opened.seal()
            if sync:
                self.flush()
            self.recovery_point = opened.end_offset
        self._end(LogEvent.CLOSED)

    def mark_deleted(self) -> None:
        """Closes the files and writes nothing."""
        self._end(LogEvent.DELETED)

    def _end(self, event: LogEvent) -> None:
        self._release()
        self.state = next_state(self.state, event)
        code, what = _ENDED[self.state]
        self.error = StorageError(code, f"{self.topic}-{self.partition} {what}")

    def _release(self) -> None:
        if self._opened is not None:
            self._start = self._opened.start_offset
            self._opened.segments.close()
            self._opened = None

    # Syncing (see sync.py)

    def begin_sync(self) -> SyncJob:
        """Everything that was written up to now, for a thread that syncs it. The files stay open until `end_sync`."""
        opened = self.opened
        handles, names_unsynced = opened.take_unsynced()
        folders = [self.folder] if names_unsynced else []
        if self._unsynced_parent is not None:
            metadata = os.path.join(self.folder, checkpoints.PARTITION_METADATA)
            handles = [Handle(metadata, close_unpinned=True), *handles]
            folders = [self.folder, self._unsynced_parent]
        pinned: list[Handle] = []
        try:
            for handle in handles:
                self._shared.cache.pin(handle)
                pinned.append(handle)
        except OSError as error:
            for handle in pinned:
                self._shared.cache.unpin(handle)
            raise self._fail(error) from error
        active = opened.segments.active
        return SyncJob(self, opened, handles, folders, opened.end_offset, active.base_offset, active.size)

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
        """Back on the log's thread: what is durable becomes visible; or the log fails. Returns why it is not open."""
        for handle in job.handles:
            self._shared.cache.unpin(handle)
        if error is not None:
            return self._fail(error)
        if job.opened is self._opened:
            self._unsynced_parent = None
            if self._shared.waits_for_disk:
                self.recovery_point = max(self.recovery_point, job.end_offset)
                if job.end_offset > job.opened.high_watermark:
                    job.opened.advance(job.end_offset, job.segment_base, job.position)
            else:
                self.recovery_point = max(self.recovery_point, job.segment_base)
        return self.error

    def sync_soon(self) -> None:
        """fsync=os: syncs in the background what was appended, for flush.ms."""
        if self._opened is not None:
            self._opened.sync_soon()

    def flush(self) -> None:
        """fsyncs everything now, on this thread, and advances the high watermark."""
        self.opened.mark_all_unsynced()
        job = self.begin_sync()
        error = self.end_sync(job, self.run_sync(job))
        if error is not None:
            raise error
        self.recovery_point = job.end_offset

    # Known without reading the log

    @property
    def known_start_offset(self) -> int:
        """The start offset as far as it is known: what the checkpoint has to keep."""
        return self._start if self._opened is None else self._opened.start_offset

    @property
    def is_unsaved(self) -> bool:
        """Whether `close` has something to write."""
        return self._opened is not None and self._opened.unsaved

    # Offsets

    @property
    def start_offset(self) -> int:
        return (self._opened or self._open()).start_offset

    @property
    def end_offset(self) -> int:
        return (self._opened or self._open()).end_offset

    @property
    def high_watermark(self) -> int:
        """The end of what readers may see. Under fsync=commit: what a power cut cannot undo."""
        return (self._opened or self._open()).high_watermark

    @property
    def last_stable_offset(self) -> int:
        return (self._opened or self._open()).last_stable_offset

    @property
    def last_epoch(self) -> int:
        """The leader epoch of the last batch; -1 if there never was one."""
        epochs = self.opened.epochs
        return epochs[-1][0] if epochs else -1

    @property
    def size_bytes(self) -> int:
        return self.opened.segments.size_bytes

    @property
    def visible_bytes(self) -> int:
        return self.opened.visible_bytes

    @property
    def segments(self) -> list[Segment]:
        """Oldest first; the last one is being written."""
        return self.opened.segments.items

    @property
    def states(self) -> ProducerStates:
        return self.opened.states

    # Appending and reading

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
        `start_verification` returned before the coordinator confirmed. With `light_only`, HeavyBatch where a thread
        should check the records first (`inspect`), whose `inspection` is then given here.
        """
        return (self._opened or self._open()).append(batches, now_ms, guard, inspection, light_only)

    def inspect(self, batch: memoryview) -> Inspection:
        """Checks the records of a batch that is too heavy for `append`, in any thread. StorageError: refused."""
        header = read_header(batch)
        return validation.inspect(batch, header.attributes, header.record_count, self._config)

    def append_records(
        self, batches: memoryview | bytearray, *, now_ms: int, guard: object | None = None
    ) -> AppendResult:
        """Appends batches of the broker itself (coordinators): any number of batches, no sequence check."""
        return (self._opened or self._open()).append_records(batches, now_ms, guard)

    def append_record(self, key: bytes | None, value: bytes | None, *, now_ms: int) -> int:
        """Appends one record of a coordinator, outside of transactions, as a batch. Returns its offset."""
        return (self._opened or self._open()).append_record(key, value, now_ms)

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
        marker = MarkerBatch(producer_id, producer_epoch, coordinator_epoch, commit, now_ms)
        return (self._opened or self._open()).append_marker(marker, transaction_version)

    def read(
        self, offset: int, max_bytes: int, *, up_to: Isolation = "high_watermark", min_one_batch: bool = True
    ) -> ReadResult:
        """Batches from `offset` on. OFFSET_OUT_OF_RANGE before the start or beyond the end of the log."""
        return (self._opened or self._open()).read(offset, max_bytes, up_to, min_one_batch)

    def batch_for_time(self, timestamp_ms: int, from_offset: int = 0) -> TimedBatch | None:
        """The first batch that should hold such a record; if it turns out that it does not, ask for the next one."""
        opened = self.opened
        return opened.segments.batch_at_or_after(timestamp_ms, max(from_offset, opened.start_offset))

    def batch_of_max_timestamp(self) -> TimedBatch | None:
        opened = self.opened
        return opened.segments.batch_of_highest_timestamp(opened.start_offset)

    def epoch_end_offset(self, leader_epoch: int) -> tuple[int, int]:
        """(epoch, end offset) for OffsetForLeaderEpoch; (-1, -1) if the epoch is unknown."""
        opened = self.opened
        return checkpoints.epoch_end_offset(opened.epochs, leader_epoch, self._leader_epoch, opened.end_offset)

    def epoch_at(self, offset: int) -> int:
        """The leader epoch that an offset was written in; -1 if it is not known."""
        return checkpoints.epoch_at(self.opened.epochs, offset)

    # Producers

    def start_verification(
        self, producer_id: int, producer_epoch: int, sequence: int, *, supports_epoch_bump: bool
    ) -> object | None:
        """A guard to pass to `append` once the coordinator confirmed the transaction; None: already open, no need.

        A marker or an append with the guard makes it void, so a late confirmation cannot leave a hanging transaction.
        `supports_epoch_bump`: the producer uses TV2 (Produce >= 12): its first sequence here must be 0.
        """
        now_ms = self._shared.now_ms()
        return self.states.start_verification(
            producer_id, producer_epoch, sequence, supports_epoch_bump=supports_epoch_bump, now_ms=now_ms
        )

    def has_open_transaction(self, producer_id: int, producer_epoch: int | None = None) -> bool:
        return self.states.has_open_transaction(producer_id, producer_epoch)

    def transaction_start(self, producer_id: int, producer_epoch: int) -> int | None:
        """The first offset of the producer's open transaction."""
        return self.states.transaction_start(producer_id, producer_epoch)

    def all_producer_ids(self) -> set[int]:
        """Every producer id in the state, the snapshots and the batches. Reads the whole log."""
        return recovery.find_producer_ids(self.states, self.folder, self.segments)

    def expire_producers(self, now_ms: int) -> int:
        """Drops producers idle for producer.id.expiration.ms that have no open transaction. Returns how many."""
        return self.states.expire(now_ms, self._config.producer_id_expiration_ms) if self._opened is not None else 0

    # Deleting

    def delete_records(self, before_offset: int) -> int:
        """DeleteRecords: raises the log start offset (-1: to the high watermark) and returns the new one."""
        return self.opened.delete_records(before_offset)

    def apply_retention(self, now_ms: int) -> int:
        """Removes segments that are too old, too many or below the start offset. Returns how many."""
        return self.opened.apply_retention(now_ms)
