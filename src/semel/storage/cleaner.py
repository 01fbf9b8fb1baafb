"""Compaction: of every key the latest record stays, tombstones stay for a while, aborted data goes.

Three steps, on two threads. `plan` (the log's thread) says which segments may be cleaned: whole ones below the last
stable offset. `clean` (any thread) writes their replacements aside, as `.cleaned` files. `swap` (the log's thread) puts
them in place: `.cleaned` -> `.swap` -> the real name, so that recovery finishes or undoes what was interrupted.

Never lost: the last batch of a producer, if only as an empty one, so that its sequence survives; a marker while data of
its transaction is there; the last batch of every replaced stretch, so that its offsets stay known.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

from semel.protocol.batch import BatchHeader
from semel.protocol.errors import CorruptBatchError
from semel.storage.files import FileCache, Files
from semel.storage.keeper import Keeper, KeepingRules, Transactions, marker_of, records_of, short_key
from semel.storage.log import PartitionLog
from semel.storage.segment import CLEANED, LOG, SEGMENT_FILES, Segment, file_name
from semel.storage.txnindex import AbortedTransaction

_log = logging.getLogger("semel.storage")

KEYS_MAX = 500_000  # of one pass; a longer dirty part is cleaned in several
RETRY_MS = 600_000  # a log whose compaction failed is left out so long: reading it again and again helps nobody


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


class _Sources:
    """Reads the batches of the segments to clean, with its own file descriptors: old segments never change."""

    def __init__(self, plan: CleaningPlan, cache: FileCache) -> None:
        self._plan = plan
        self._cache = cache

    def segment(self, source: Source) -> Segment:
        return Segment(self._cache, self._plan.folder, source.base_offset, {LOG: source.size}, source.modified_ms)

    def batches(self, source: Source) -> Iterator[tuple[Segment, int, BatchHeader]]:
        """Every batch of a segment. CorruptBatchError if it is damaged: what follows would be lost with the segment."""
        segment = self.segment(source)
        end = 0
        try:
            for position, header in segment.batches(verify=True):
                yield segment, position, header
                end = position + header.size
                time.sleep(0)  # lets the broker's thread run: this one is in no hurry
        finally:
            segment.close()
        if end != source.size:
            raise CorruptBatchError(f"{segment.log.path} is damaged at {end}: no whole batch with a sound CRC is there")

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
    keys, mapped_end = _latest_offsets(plan, sources, Transactions(aborted))
    transactions = Transactions(aborted)
    groups = [
        _clean_group(plan, group, sources, cache, keys, mapped_end, transactions) for group in _groups(plan, mapped_end)
    ]
    return CleanedLog(groups, mapped_end)


def _latest_offsets(plan: CleaningPlan, sources: _Sources, transactions: Transactions) -> tuple[dict[bytes, int], int]:
    """Key -> latest offset in the dirty part, and the offset up to which this is known."""
    keys: dict[bytes, int] = {}
    for source, after in zip(plan.sources, [*plan.sources[1:], None], strict=True):
        source_end = after.base_offset if after else plan.end_offset
        if source_end <= plan.first_dirty_offset:
            continue
        for segment, position, header in sources.batches(source):
            if header.is_control:
                transactions.end(header, marker_of(segment, position, header))
            elif not transactions.is_aborted_data(header):
                if len(keys) + header.record_count > KEYS_MAX and keys:
                    return keys, header.base_offset
                for record in records_of(segment, position, header):
                    if record.key is not None and record.offset >= plan.first_dirty_offset:
                        keys[short_key(record.key)] = record.offset
    return keys, plan.end_offset


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
    transactions: Transactions,
) -> CleanedGroup:
    target = Segment(cache, plan.folder, group[0].base_offset, {}, group[-1].modified_ms, CLEANED)
    for path in target.paths():  # of a cleaning that was given up
        if os.path.exists(path):
            plan.files.remove(path)
    rules = KeepingRules(keys, mapped_end, plan.last_of_producers, plan.now_ms, plan.delete_retention_ms)
    keeper = Keeper(rules, transactions, target, plan.index_interval_bytes)
    try:
        for source in group:
            for segment, position, header in sources.batches(source):
                is_last = source is group[-1] and position + header.size == source.size
                keeper.pass_on(segment, position, header, is_last)
        target.seal()
        for handle in target.handles():
            plan.files.sync_file(cache.fd(handle), handle.path)
    finally:
        target.close()
    sizes = {
        suffix: os.path.getsize(path)
        for suffix, path in zip(SEGMENT_FILES, target.paths(), strict=True)
        if os.path.exists(path)
    }
    return CleanedGroup([source.base_offset for source in group], sizes, target.created_ms)


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
        self._left_out: dict[PartitionLog, int] = {}  # log: when it is tried again
        self.compacted = 0

    async def run_once(self, logs: Iterable[PartitionLog], now_ms: int) -> PartitionLog | None:
        """Compacts the log that needs it most; None if none does, or can be.

        A log that cannot be compacted stays as it is and is left out for a while; the next one takes its turn.
        """
        wanted = [log for log in logs if log.config.compact]
        self._left_out = {log: due for log, due in self._left_out.items() if due > now_ms and log in wanted}
        while plans := self._plans(wanted, now_ms):
            dirtiest = max(plans, key=lambda made: made.dirty_ratio)
            if await self._compact(dirtiest, now_ms):
                self.compacted += 1
                return dirtiest.log
        return None

    def _plans(self, logs: list[PartitionLog], now_ms: int) -> list[CleaningPlan]:
        plans = []
        for log in logs:
            try:
                if log not in self._left_out and (made := plan(log, now_ms)) is not None:
                    plans.append(made)
            except Exception as error:
                self._leave_out(log, now_ms, error)
        return plans

    async def _compact(self, made: CleaningPlan, now_ms: int) -> bool:
        log = made.log
        try:
            cleaned = await asyncio.get_running_loop().run_in_executor(self._pool, clean, made)
            if log.is_loaded and swap(log, cleaned, now_ms):
                return True
            self._left_out[log] = now_ms + 1  # it changed meanwhile: the next round plans anew
        except Exception as error:
            self._leave_out(log, now_ms, error)
        return False

    def _leave_out(self, log: PartitionLog, now_ms: int, error: Exception) -> None:
        self._left_out[log] = now_ms + RETRY_MS
        _log.error(
            "%s-%d cannot be compacted and stays as it is: %r; tried again in %d s",
            log.topic,
            log.partition,
            error,
            RETRY_MS // 1000,
        )

    def close(self) -> None:
        self._pool.shutdown(wait=True)
