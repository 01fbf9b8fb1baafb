"""Compaction: of every key the latest record stays, tombstones stay for a while, aborted data goes.

Three steps, on two threads. `plan` (the log's thread) says which segments may be cleaned: whole ones below the last
stable offset. `clean` (any thread) writes their replacements aside, as `.cleaned` files. `swap` (the log's thread) puts
them in place: `.cleaned` -> `.swap` -> the real name, so that recovery finishes or undoes what was interrupted.

Never lost: the last batch of a producer, if only as an empty one, so that its sequence survives; a marker while data of
its transaction is there; the last batch of every replaced stretch, so that its offsets stay known.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import logging
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

from semel.protocol.batch import (
    CONTROL_BIT,
    NO_TIMESTAMP,
    TIMESTAMP_TYPE_BIT,
    TRANSACTIONAL_BIT,
    BatchHeader,
)
from semel.storage.errors import StorageError
from semel.storage.files import FileCache, Files
from semel.storage.log import PartitionLog
from semel.storage.segment import CLEANED, LOG, SEGMENT_FILES, Segment, file_name
from semel.storage.txnindex import AbortedTransaction

_log = logging.getLogger("semel.storage")

KEYS_MAX = 500_000  # of one pass; a longer dirty part is cleaned in several
_SHORT_KEY_BYTES = 24  # longer keys are kept as a digest, which is longer than this: the two never meet


class Source(NamedTuple):
    """A segment to clean, as it was when the plan was made."""

    base_offset: int
    size: int
    modified_ms: int


class CleaningPlan(NamedTuple):
    log: PartitionLog
    folder: str
    files: Files
    sources: list[Source]
    txn_indexes: list[tuple[int, int]]  # (base offset, entries) of every segment: an abort may stand in a later one
    first_dirty_offset: int
    end_offset: int
    segment_bytes: int
    index_interval_bytes: int
    delete_retention_ms: int
    now_ms: int
    last_of_producers: dict[int, tuple[int, int]]  # producer id -> (last data offset or -1, epoch)
    dirty_ratio: float


class CleanedGroup(NamedTuple):
    """Segments, by base offset, and what replaces them: one segment at the first of the offsets."""

    replaced: list[int]
    sizes: dict[str, int]
    modified_ms: int


class CleanedLog(NamedTuple):
    groups: list[CleanedGroup]
    cleaned_offset: int


# The plan


def plan(log: PartitionLog, now_ms: int, *, force: bool = False) -> CleaningPlan | None:
    """What can be cleaned in a log; None if it is clean enough, or if nothing may be touched yet."""
    config = log.config
    segments = log.segments
    first_dirty = log.cleaned_offset if log.start_offset <= log.cleaned_offset <= log.end_offset else log.start_offset
    limit = _first_uncleanable(log, first_dirty, now_ms)
    cleanable = [(segment, after.base_offset) for segment, after in pairwise(segments) if after.base_offset <= limit]
    dirty = [segment for segment, end_offset in cleanable if end_offset > first_dirty]
    if not dirty:
        return None
    ratio = sum(segment.size for segment in dirty) / max(1, sum(segment.size for segment, _ in cleanable))
    overdue = _is_overdue(dirty, config.max_compaction_lag_ms, now_ms)
    if not (ratio > config.min_cleanable_dirty_ratio or overdue or force):
        return None
    return CleaningPlan(
        log=log,
        folder=log.folder,
        files=segments[0].files,
        sources=[Source(segment.base_offset, segment.size, segment.created_ms) for segment, _ in cleanable],
        txn_indexes=[(s.base_offset, s.txn_index.count) for s in segments if s.txn_index.count],
        first_dirty_offset=first_dirty,
        end_offset=cleanable[-1][1],
        segment_bytes=config.segment_bytes,
        index_interval_bytes=config.index_interval_bytes,
        delete_retention_ms=config.delete_retention_ms,
        now_ms=now_ms,
        last_of_producers={
            entry.producer_id: (entry.last_offset, entry.epoch) for entry in log.states.producers.values()
        },
        dirty_ratio=ratio,
    )


def _first_uncleanable(log: PartitionLog, first_dirty: int, now_ms: int) -> int:
    """Not beyond the last stable offset, not the active segment, nothing younger than min.compaction.lag.ms."""
    end = min(log.last_stable_offset, log.segments[-1].base_offset)
    if log.config.min_compaction_lag_ms > 0:
        youngest_allowed_ms = now_ms - log.config.min_compaction_lag_ms
        for segment, after in pairwise(log.segments):
            if after.base_offset > first_dirty and segment.load_max_timestamp() > youngest_allowed_ms:
                return min(end, segment.base_offset)
    return end


def _is_overdue(dirty: list[Segment], max_lag_ms: int, now_ms: int) -> bool:
    """Whether a record waits longer than max.compaction.lag.ms, by the first timestamp of the dirty segments."""
    firsts = [first for segment in dirty if (first := segment.load_rolling_timestamp()) is not None and first > 0]
    return bool(firsts) and now_ms - min(firsts) > max_lag_ms


# Cleaning


class _Transactions:
    """Which batches belong to aborted transactions, and which markers nobody needs any more."""

    def __init__(self, aborted: Iterable[AbortedTransaction]) -> None:
        self._coming = [(entry.first_offset, entry) for entry in aborted]
        heapq.heapify(self._coming)
        self._aborted: dict[int, AbortedTransaction] = {}
        self._seen: set[int] = set()  # producers of aborted transactions of which data was met
        self._committed: set[int] = set()

    def is_aborted_data(self, header: BatchHeader) -> bool:
        self._begin_up_to(header.last_offset)
        if not header.is_transactional:
            return False
        if header.producer_id in self._aborted:
            self._seen.add(header.producer_id)
            return True
        self._committed.add(header.producer_id)
        return False

    def end(self, header: BatchHeader, commit: bool | None) -> tuple[bool, AbortedTransaction | None]:
        """For a control batch: whether its marker is not needed, and the abort that has to stay in the index."""
        self._begin_up_to(header.last_offset)
        producer_id = header.producer_id
        if commit is None:
            return True, None
        if commit:
            needed = producer_id in self._committed
            self._committed.discard(producer_id)
            return not needed, None
        aborted = self._aborted.pop(producer_id, None)
        needed = producer_id in self._seen
        self._seen.discard(producer_id)
        return not needed, aborted if needed else None

    def _begin_up_to(self, offset: int) -> None:
        while self._coming and self._coming[0][0] <= offset:
            _, entry = heapq.heappop(self._coming)
            self._aborted.setdefault(entry.producer_id, entry)


class _Sources:
    """Reads the batches of the segments to clean, with its own file descriptors: old segments never change."""

    def __init__(self, plan: CleaningPlan, cache: FileCache) -> None:
        self._plan = plan
        self._cache = cache

    def segment(self, source: Source) -> Segment:
        return Segment(self._cache, self._plan.folder, source.base_offset, {LOG: source.size}, source.modified_ms)

    def aborted(self) -> list[AbortedTransaction]:
        first = self._plan.sources[0].base_offset
        found: list[AbortedTransaction] = []
        for base_offset, count in self._plan.txn_indexes:
            segment = Segment(self._cache, self._plan.folder, base_offset, {}, 0)
            segment.txn_index.count = count
            found += [entry for entry in segment.txn_index.entries() if entry.last_offset >= first]
            segment.close()
        return found


def clean(plan: CleaningPlan) -> CleanedLog:
    """Writes the replacements, synced, beside the segments. Runs on any thread; touches nothing of the log."""
    cache = FileCache(plan.files, limit=16)
    sources = _Sources(plan, FileCache(plan.files, limit=16, create=False))
    aborted = sources.aborted()
    keys, mapped_end = _latest_offsets(plan, sources, _Transactions(aborted))
    transactions = _Transactions(aborted)
    groups = [
        _clean_group(plan, group, sources, cache, keys, mapped_end, transactions) for group in _groups(plan, mapped_end)
    ]
    return CleanedLog(groups, mapped_end)


def _latest_offsets(plan: CleaningPlan, sources: _Sources, transactions: _Transactions) -> tuple[dict[bytes, int], int]:
    """Key -> latest offset in the dirty part, and the offset up to which this is known."""
    from semel.protocol.rows import decode_batch

    keys: dict[bytes, int] = {}
    for source, after in zip(plan.sources, [*plan.sources[1:], None], strict=True):
        source_end = after.base_offset if after else plan.end_offset
        if source_end <= plan.first_dirty_offset:
            continue
        segment = sources.segment(source)
        for position, header in segment.batches():
            if header.is_control:
                transactions.end(header, _marker_of(segment, position, header))
            elif not transactions.is_aborted_data(header):
                if len(keys) + header.record_count > KEYS_MAX and keys:
                    return keys, header.base_offset
                for record in decode_batch(_bytes_of(segment, position, header)).records:
                    if record.key is not None and record.offset >= plan.first_dirty_offset:
                        keys[_short(record.key)] = record.offset
            time.sleep(0)  # lets the broker's thread run: this one is in no hurry
        segment.close()
    return keys, plan.end_offset


def _short(key: bytes) -> bytes:
    return key if len(key) <= _SHORT_KEY_BYTES else hashlib.blake2b(key, digest_size=32).digest()


def _bytes_of(segment: Segment, position: int, header: BatchHeader) -> bytes:
    return segment.files.read_at(segment.fd, header.size, position)


def _marker_of(segment: Segment, position: int, header: BatchHeader) -> bool | None:
    """True for a commit, False for an abort, None for a control batch that holds no marker (any more)."""
    from semel.protocol.rows import MarkerType, decode_batch, decode_marker

    records = decode_batch(_bytes_of(segment, position, header)).records
    marker = decode_marker(records[0]) if records else None
    return None if marker is None else marker.type is MarkerType.COMMIT


def _groups(plan: CleaningPlan, end_offset: int) -> list[list[Source]]:
    """Neighbours that fit one segment together: cleaning must not leave ever smaller files."""
    groups: list[list[Source]] = []
    size = 0
    for source in plan.sources:
        if source.base_offset >= end_offset:
            break
        reach = plan.end_offset - groups[-1][0].base_offset if groups else 0
        if groups and size + source.size <= plan.segment_bytes and reach < 2**31:
            groups[-1].append(source)
            size += source.size
        else:
            groups.append([source])
            size = source.size
    return groups


def _clean_group(
    plan: CleaningPlan,
    group: list[Source],
    sources: _Sources,
    cache: FileCache,
    keys: dict[bytes, int],
    mapped_end: int,
    transactions: _Transactions,
) -> CleanedGroup:
    target = Segment(cache, plan.folder, group[0].base_offset, {}, group[-1].modified_ms, CLEANED)
    for path in target.paths():  # of a cleaning that was given up
        if os.path.exists(path):
            plan.files.remove(path)
    keeper = _Keeper(plan, keys, mapped_end, transactions, target)
    for source in group:
        segment = sources.segment(source)
        for position, header in segment.batches():
            is_last = source is group[-1] and position + header.size == source.size
            keeper.pass_on(segment, position, header, is_last)
            time.sleep(0)
        segment.close()
    target.seal()
    for handle in target.handles():
        plan.files.sync_file(cache.fd(handle), handle.path)
    sizes = {
        suffix: os.path.getsize(path)
        for suffix, path in zip(SEGMENT_FILES, target.paths(), strict=True)
        if os.path.exists(path)
    }
    target.close()
    return CleanedGroup([source.base_offset for source in group], sizes, target.created_ms)


class _Keeper:
    """Decides batch by batch, then record by record, what goes into the replacement."""

    def __init__(
        self,
        plan: CleaningPlan,
        keys: dict[bytes, int],
        mapped_end: int,
        transactions: _Transactions,
        target: Segment,
    ) -> None:
        self._plan = plan
        self._keys = keys
        self._mapped_end = mapped_end
        self._transactions = transactions
        self._target = target

    def pass_on(self, segment: Segment, position: int, header: BatchHeader, is_last: bool) -> None:
        horizon_ms = header.base_timestamp if header.has_delete_horizon else None
        marker_unneeded = False
        if header.is_control:
            commit = _marker_of(segment, position, header)
            marker_unneeded, aborted = self._transactions.end(header, commit)
            if aborted is not None:
                self._target.txn_index.append(aborted)
            drop_all = marker_unneeded and (
                commit is None or (horizon_ms is not None and horizon_ms <= self._plan.now_ms)
            )
        else:
            drop_all = self._transactions.is_aborted_data(header)
        keep_empty = is_last or self._is_last_of_producer(header)
        if drop_all:
            if keep_empty:
                self._write(empty_batch(header), header, NO_TIMESTAMP)
            return
        self._filter(segment, position, header, horizon_ms, marker_unneeded, keep_empty)

    def _is_last_of_producer(self, header: BatchHeader) -> bool:
        last = self._plan.last_of_producers.get(header.producer_id) if header.has_producer_id else None
        if last is None:
            return False
        last_data_offset, epoch = last
        if last_data_offset >= 0:
            return header.last_offset == last_data_offset
        return header.is_control and header.producer_epoch == epoch

    def _filter(
        self,
        segment: Segment,
        position: int,
        header: BatchHeader,
        horizon_ms: int | None,
        marker_unneeded: bool,
        keep_empty: bool,
    ) -> None:
        from semel.protocol.rows import TimestampType, decode_batch, encode_batch

        data = _bytes_of(segment, position, header)
        records = decode_batch(data).records
        if header.is_control:
            kept = records
            needs_horizon = marker_unneeded and horizon_ms is None
        else:
            kept = [record for record in records if self._stays(record.offset, record.key, record.value, horizon_ms)]
            needs_horizon = horizon_ms is None and any(record.value is None for record in kept)
        if not kept:
            if keep_empty:
                self._write(empty_batch(header), header, NO_TIMESTAMP)
            return
        if len(kept) == len(records) and not needs_horizon:
            self._write(data, header, header.max_timestamp)
            return
        if needs_horizon:
            horizon_ms = self._plan.now_ms + self._plan.delete_retention_ms
        batch = encode_batch(
            kept,
            base_offset=header.base_offset,
            last_offset=header.last_offset,
            base_timestamp=horizon_ms,
            timestamp_type=TimestampType.LOG_APPEND_TIME if header.is_log_append_time else TimestampType.CREATE_TIME,
            producer_id=header.producer_id,
            producer_epoch=header.producer_epoch,
            base_sequence=header.base_sequence,
            leader_epoch=header.leader_epoch,
            transactional=header.is_transactional,
            control=header.is_control,
            delete_horizon=horizon_ms is not None,
            compression=header.compression,
        )
        self._write(batch, header, max(record.timestamp for record in kept))

    def _stays(self, offset: int, key: bytes | None, value: bytes | None, horizon_ms: int | None) -> bool:
        if offset >= self._mapped_end:
            return True
        if key is None or offset < self._keys.get(_short(key), -1):
            return False
        return value is not None or horizon_ms is None or self._plan.now_ms < horizon_ms

    def _write(self, batch: bytes | bytearray, header: BatchHeader, max_timestamp_ms: int) -> None:
        self._target.write(batch)
        self._target.note_batch(header.last_offset, max_timestamp_ms, len(batch), self._plan.index_interval_bytes)


def empty_batch(header: BatchHeader) -> bytearray:
    """A batch without records that still says who wrote it, with which sequence, over which offsets."""
    from semel.protocol.rows import seal_batch

    attributes = header.attributes & (TRANSACTIONAL_BIT | CONTROL_BIT | TIMESTAMP_TYPE_BIT)
    start = (header.base_offset, 0, header.leader_epoch, header.magic, 0, attributes)
    fields = (*start, header.last_offset_delta, NO_TIMESTAMP)
    producer = (header.producer_id, header.producer_epoch, header.base_sequence, 0)
    return seal_batch(fields, header.max_timestamp, producer, b"")


# Swapping and scheduling


def swap(log: PartitionLog, cleaned: CleanedLog, now_ms: int) -> bool:
    """Puts the replacements in place. False, and nothing changed, if the log is no longer as it was planned."""
    bases = {segment.base_offset for segment in log.segments[:-1]}
    for group in cleaned.groups:
        replacement = os.path.join(log.folder, file_name(group.replaced[0], LOG + CLEANED))
        if not bases.issuperset(group.replaced) or not os.path.exists(replacement):
            _log.info("compaction of %s given up: its segments changed meanwhile", log)
            return False
    for group in cleaned.groups:
        log.replace_segments(group.replaced, group.sizes, group.modified_ms, now_ms)
    log.cleaned_offset = cleaned.cleaned_offset
    return True


class Compactor:
    """Compacts the dirtiest log, one at a time, on a thread of its own."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="semel-compaction")
        self.compacted = 0

    async def run_once(self, logs: Iterable[PartitionLog], now_ms: int) -> PartitionLog | None:
        """Compacts the log that needs it most; None if none does. Errors are logged; the log stays as it was."""
        plans = [made for log in logs if log.config.compact and (made := plan(log, now_ms)) is not None]
        if not plans:
            return None
        dirtiest = max(plans, key=lambda made: made.dirty_ratio)
        loop = asyncio.get_running_loop()
        try:
            cleaned = await loop.run_in_executor(self._pool, clean, dirtiest)
            if dirtiest.log.is_loaded and swap(dirtiest.log, cleaned, now_ms):
                self.compacted += 1
                return dirtiest.log
        except (OSError, StorageError) as error:
            _log.warning("compaction of %s failed and will be tried again: %s", dirtiest.log, error)
        return None

    def close(self) -> None:
        self._pool.shutdown(wait=True)
