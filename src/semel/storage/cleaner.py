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
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from semel.protocol.batch import (
    CONTROL_BIT,
    NO_TIMESTAMP,
    TIMESTAMP_TYPE_BIT,
    TRANSACTIONAL_BIT,
    BatchHeader,
    read_body,
)
from semel.protocol.errors import CorruptBatchError, DecodeError
from semel.protocol.varints import read_varint
from semel.storage.files import DiskFiles, FileCache
from semel.storage.log import PartitionLog
from semel.storage.segment import CLEANED, LOG, SEGMENT_FILES, AbortedTxn, Segment, file_name

if TYPE_CHECKING:
    from semel.protocol.rows import Marker

_log = logging.getLogger("semel.storage")

KEYS_MAX = 500_000  # of one pass; a longer dirty part is cleaned in several
RETRY_MS = 600_000  # a log whose compaction failed is left out for this time
_SHORT_KEY_BYTES = 24  # longer keys are kept as a digest, which is longer than this: the two never meet


class Source(NamedTuple):
    """A segment to clean, as it was when the plan was made."""

    base_offset: int
    size: int
    modified_ms: int


class CleaningPlan(NamedTuple):
    log: PartitionLog
    folder: str
    files: DiskFiles
    sources: list[Source]
    txn_indexes: list[tuple[int, int]]  # (base offset, entries) of every segment: an abort may be in a later one
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
                time.sleep(0)  # releases Python's lock for the broker's thread
        finally:
            segment.close()
        if end != source.size:
            raise CorruptBatchError(f"{segment.log.path} is damaged at {end}: no whole batch with a sound CRC is there")

    def aborted(self) -> list[AbortedTxn]:
        first = self._plan.sources[0].base_offset
        found: list[AbortedTxn] = []
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
    keys, mapped_end = _latest_offsets(plan, sources, TransactionTracker(aborted))
    transactions = TransactionTracker(aborted)
    try:
        groups = [
            _clean_group(plan, group, sources, cache, keys, mapped_end, transactions)
            for group in _groups(plan, mapped_end)
        ]
    except BaseException:
        discard(plan)  # a disk that they filled has to get its space back
        raise
    return CleanedLog(groups, mapped_end)


def discard(plan: CleaningPlan) -> None:
    """Removes replacements that are not going to be used, also those of a cleaning that did not end."""
    for source in plan.sources:
        _remove_replacement(plan, source)


def _remove_replacement(plan: CleaningPlan, source: Source) -> None:
    for suffix in SEGMENT_FILES:
        path = os.path.join(plan.folder, file_name(source.base_offset, suffix + CLEANED))
        if os.path.exists(path):
            plan.files.remove(path)


def _latest_offsets(
    plan: CleaningPlan, sources: _Sources, transactions: TransactionTracker
) -> tuple[dict[bytes, int], int]:
    """Key -> latest offset in the dirty part, and the offset up to which this is known."""
    keys: dict[bytes, int] = {}
    for source, after in zip(plan.sources, [*plan.sources[1:], None], strict=True):
        source_end = after.base_offset if after else plan.end_offset
        if source_end <= plan.first_dirty_offset:
            continue
        for segment, position, header in sources.batches(source):
            if header.is_control:
                transactions.end(header, segment.marker(position, header))
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
    transactions: TransactionTracker,
) -> CleanedGroup:
    target = Segment(cache, plan.folder, group[0].base_offset, {}, group[-1].modified_ms, CLEANED)
    _remove_replacement(plan, group[0])  # of a cleaning that did not end
    rules = CompactionRules(keys, mapped_end, plan.last_of_producers, plan.now_ms, plan.delete_retention_ms)
    kept = BatchFilter(rules, transactions, target, plan.index_interval_bytes)
    try:
        for source in group:
            for segment, position, header in sources.batches(source):
                is_last = source is group[-1] and position + header.size == source.size
                kept.add(segment, position, header, is_last)
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
            _log.info("compaction of %s ends: its segments changed meanwhile", log)
            return False
    for group in cleaned.groups:
        log.opened.replace_segments(group.replaced, group.sizes, group.modified_ms, now_ms)
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
        log, loop = made.log, asyncio.get_running_loop()
        try:
            cleaned = await loop.run_in_executor(self._pool, clean, made)
            if log.is_open and swap(log, cleaned, now_ms):
                return True
            await loop.run_in_executor(self._pool, discard, made)
            self._left_out[log] = now_ms + 1  # it changed meanwhile: the next round makes a new plan
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


# Which records stay
class FoundRecord(NamedTuple):
    offset: int
    timestamp_delta: int
    key: bytes | None
    has_value: bool
    start: int  # of its bytes in the decompressed batch, length and all
    end: int


def scan_batch(data: bytes, header: BatchHeader) -> tuple[bytes, list[FoundRecord]]:
    """The decompressed records of a batch and where each is. Raises DecodeError if they are not records."""
    body = bytes(read_body(data, header))
    found: list[FoundRecord] = []
    at, limit, base_offset = 0, len(body), header.base_offset
    for _ in range(header.record_count):
        start = at
        length, at = read_varint(body, at, limit)
        end = at + length
        if length < 0 or end > limit:
            raise CorruptBatchError(f"a record says it takes {length} bytes, but {limit - at} are left in its batch")
        timestamp_delta, at = read_varint(body, at + 1, end, 64)
        offset_delta, at = read_varint(body, at, end)
        key_length, at = read_varint(body, at, end)
        key = None
        if key_length >= 0:
            key = body[at : at + key_length]
            at += key_length
        value_length, _ = read_varint(body, at, end)
        found.append(FoundRecord(base_offset + offset_delta, timestamp_delta, key, value_length >= 0, start, end))
        at = end
    if at != limit:
        raise CorruptBatchError(f"{limit - at} bytes are left after the {header.record_count} records of a batch")
    return body, found


def short_key(key: bytes) -> bytes:
    return key if len(key) <= _SHORT_KEY_BYTES else hashlib.blake2b(key, digest_size=32).digest()


def records_of(segment: Segment, position: int, header: BatchHeader) -> list[FoundRecord]:
    """The records of a batch; none if they can't be read."""
    try:
        return scan_batch(segment.read_batch(position, header), header)[1]
    except DecodeError:
        return []


class TransactionTracker:
    """Which batches belong to aborted transactions, and which markers are not needed any more.

    A pass may start behind the marker of an abort, or find it compacted away: an abort counts only for batches between
    its first offset and its marker, whether the marker is met or not.
    """

    def __init__(self, aborted: Iterable[AbortedTxn]) -> None:
        self._coming = [(entry.first_offset, entry) for entry in aborted]
        heapq.heapify(self._coming)
        self._aborted: dict[int, AbortedTxn] = {}
        self._seen: set[int] = set()  # producers of aborted transactions of which data was met
        self._committed: set[int] = set()

    def is_aborted_data(self, header: BatchHeader) -> bool:
        aborted = self._aborted_at(header)
        if not header.is_transactional:
            return False
        if aborted is not None:
            self._seen.add(header.producer_id)
            return True
        self._committed.add(header.producer_id)
        return False

    def end(self, header: BatchHeader, marker: Marker | None) -> tuple[bool, AbortedTxn | None]:
        """For a control batch: whether its marker is not needed, and the abort that has to stay in the index."""
        aborted = self._aborted_at(header)
        producer_id = header.producer_id
        if marker is None:
            return True, None
        if marker.is_commit:
            needed = producer_id in self._committed
            self._committed.discard(producer_id)
            return not needed, None
        self._aborted.pop(producer_id, None)
        needed = producer_id in self._seen
        self._seen.discard(producer_id)
        return not needed, aborted if needed else None

    def _aborted_at(self, header: BatchHeader) -> AbortedTxn | None:
        """The aborted transaction that the batch belongs to."""
        while self._coming and self._coming[0][0] <= header.last_offset:
            _, entry = heapq.heappop(self._coming)
            self._aborted[entry.producer_id] = entry
        found = self._aborted.get(header.producer_id)
        return found if found is not None and header.base_offset <= found.last_offset else None


class CompactionRules(NamedTuple):
    keys: dict[bytes, int]  # key -> latest offset
    mapped_end: int  # what is at or after this offset stays as it is
    last_of_producers: dict[int, tuple[int, int]]  # producer id -> (last data offset or -1, epoch)
    now_ms: int
    delete_retention_ms: int

    def keeps(self, record: FoundRecord, horizon_ms: int | None) -> bool:
        """The latest of its key; a tombstone only until its horizon."""
        if record.offset >= self.mapped_end:
            return True
        if record.key is None or record.offset < self.keys.get(short_key(record.key), -1):
            return False
        return record.has_value or horizon_ms is None or self.now_ms < horizon_ms

    def is_last_of_producer(self, header: BatchHeader) -> bool:
        """Whether a producer's sequence, or its epoch, is known by this batch alone."""
        last = self.last_of_producers.get(header.producer_id) if header.has_producer_id else None
        if last is None:
            return False
        last_data_offset, epoch = last
        if last_data_offset >= 0:
            return header.last_offset == last_data_offset
        return header.is_control and header.producer_epoch == epoch


class BatchFilter:
    """Decides batch by batch, then record by record, what goes into the replacement."""

    def __init__(
        self, rules: CompactionRules, transactions: TransactionTracker, target: Segment, index_interval_bytes: int
    ) -> None:
        self._rules = rules
        self._transactions = transactions
        self._target = target
        self._index_interval_bytes = index_interval_bytes

    def add(self, segment: Segment, position: int, header: BatchHeader, is_last: bool) -> None:
        """`is_last`: of the stretch that is replaced; its offsets must stay known even if nothing else does."""
        horizon_ms = header.base_timestamp if header.has_delete_horizon else None
        keep_empty = is_last or self._rules.is_last_of_producer(header)
        if header.is_control:
            self._add_marker(segment, position, header, horizon_ms, keep_empty)
        elif self._transactions.is_aborted_data(header):
            if keep_empty:
                self._write(empty_batch(header), header, NO_TIMESTAMP)
        else:
            self._filter(segment.read_batch(position, header), header, horizon_ms, keep_empty)

    def _add_marker(
        self, segment: Segment, position: int, header: BatchHeader, horizon_ms: int | None, keep_empty: bool
    ) -> None:
        """A marker that is not needed any more gets a delete horizon first, and goes when that has passed."""
        marker = segment.marker(position, header)
        unneeded, aborted = self._transactions.end(header, marker)
        if aborted is not None:
            self._target.txn_index.append(aborted)
        expired = horizon_ms is not None and horizon_ms <= self._rules.now_ms
        if unneeded and (marker is None or expired):
            if keep_empty:
                self._write(empty_batch(header), header, NO_TIMESTAMP)
        elif unneeded and horizon_ms is None:
            self._write_with_horizon(segment.read_batch(position, header), header)
        else:
            self._write(segment.read_batch(position, header), header, header.max_timestamp)

    def _filter(self, data: bytes, header: BatchHeader, horizon_ms: int | None, keep_empty: bool) -> None:
        try:
            body, records = scan_batch(data, header)
        except DecodeError as error:  # appended while the topic was not compacted
            _log.warning("a batch at offset %d is kept as it is, it can't be read: %s", header.base_offset, error)
            self._write(data, header, header.max_timestamp)
            return
        kept = [record for record in records if self._rules.keeps(record, horizon_ms)]
        if not kept:
            if keep_empty:
                self._write(empty_batch(header), header, NO_TIMESTAMP)
        elif horizon_ms is None and not all(record.has_value for record in kept):
            offsets = {record.offset for record in kept}
            self._write_with_horizon(data, header, offsets)
        elif len(kept) == len(records):
            self._write(data, header, header.max_timestamp)
        else:
            smaller = smaller_batch(header, kept, b"".join(body[record.start : record.end] for record in kept))
            self._write(smaller, header, max_timestamp_of(header, kept))

    def _write_with_horizon(self, data: bytes, header: BatchHeader, offsets: set[int] | None = None) -> None:
        """From now on the batch says until when its tombstones, or its marker, have to stay."""
        from semel.protocol.rows import TimestampType, decode_batch, encode_batch

        records = [record for record in decode_batch(data).records if offsets is None or record.offset in offsets]
        batch = encode_batch(
            records,
            base_offset=header.base_offset,
            last_offset=header.last_offset,
            base_timestamp=self._rules.now_ms + self._rules.delete_retention_ms,
            timestamp_type=TimestampType.LOG_APPEND_TIME if header.is_log_append_time else TimestampType.CREATE_TIME,
            producer_id=header.producer_id,
            producer_epoch=header.producer_epoch,
            base_sequence=header.base_sequence,
            leader_epoch=header.leader_epoch,
            transactional=header.is_transactional,
            control=header.is_control,
            delete_horizon=True,
            compression=header.compression,
        )
        self._write(batch, header, max(record.timestamp for record in records))

    def _write(self, batch: bytes | bytearray, header: BatchHeader, max_timestamp_ms: int) -> None:
        self._target.write(batch)
        self._target.note_batch(header.last_offset, max_timestamp_ms, len(batch), self._index_interval_bytes)


def max_timestamp_of(header: BatchHeader, kept: list[FoundRecord]) -> int:
    if header.is_log_append_time:
        return header.max_timestamp
    return header.base_timestamp + max(record.timestamp_delta for record in kept)


def smaller_batch(header: BatchHeader, kept: list[FoundRecord], body: bytes) -> bytearray:
    """The same batch with fewer records: their bytes stay, as offsets and times count from the same base."""
    from semel.protocol.rows import seal_batch

    smaller = header._replace(max_timestamp=max_timestamp_of(header, kept), record_count=len(kept))
    return seal_batch(smaller, body, header.compression)


def empty_batch(header: BatchHeader) -> bytearray:
    """A batch without records that still has its producer, sequence and offsets."""
    from semel.protocol.rows import seal_batch

    attributes = header.attributes & (TRANSACTIONAL_BIT | CONTROL_BIT | TIMESTAMP_TYPE_BIT)
    return seal_batch(header._replace(attributes=attributes, base_timestamp=NO_TIMESTAMP, record_count=0), b"")
