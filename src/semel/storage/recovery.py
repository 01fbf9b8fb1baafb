"""From files to a log in memory: after a clean stop by trust, after a crash by reading.

After a crash everything from the recovery point's segment on is read: CRCs are checked, the first thing that is not a
whole batch ends the log, indexes are rebuilt as appending would have built them, and producers are restored from the
latest sound snapshot plus what was written after it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path

from semel.protocol.batch import CRC_START, HEADER, HEADER_SIZE, MAGIC, BatchHeader
from semel.protocol.crc import crc32c
from semel.protocol.errors import CorruptBatchError
from semel.storage import checkpoints
from semel.storage.config import INT64_MAX
from semel.storage.files import FileCache, Handle, write_fully
from semel.storage.producer_state import (
    BATCHES_REMEMBERED,
    BatchInfo,
    CompletedTransaction,
    CorruptSnapshotError,
    DataBatch,
    MarkerBatch,
    ProducerEntry,
    ProducerStates,
    decode_snapshot,
)
from semel.storage.segment import (
    CLEANED,
    DELETED,
    LOG,
    RELATIVE_OFFSET_MAX,
    SEGMENT_FILES,
    SNAPSHOT,
    SWAP,
    AbortedTxn,
    Segment,
    file_name,
)

_log = logging.getLogger("semel.storage")

STRAY = ".stray"  # batches that fit no log: kept, and never opened
_COPY_BYTES = 1 << 20
_TORN_BYTES_MAX = 128 << 20  # no request, and so no single write, is larger
_HISTORY_BYTES_MAX = 64 << 20
_DIGITS = 20  # of an offset in the name of a file
_UNFINISHED = ".tmp"
_DOOMED = frozenset(
    {suffix + DELETED for suffix in (*SEGMENT_FILES, SNAPSHOT)}
    | {suffix + CLEANED for suffix in SEGMENT_FILES}
    | {SNAPSHOT + _UNFINISHED}
)
_SWAPS = frozenset(suffix + SWAP for suffix in SEGMENT_FILES)
_UNFINISHED_CHECKPOINTS = (checkpoints.LEADER_EPOCHS + _UNFINISHED, checkpoints.PARTITION_METADATA + _UNFINISHED)


@dataclass(slots=True, kw_only=True)
class LogFolder:
    path: str
    cache: FileCache
    trusted: bool  # the last run was stopped cleanly: files are as that run left them
    recovery_point: int  # below it everything is on the disk, indexes too
    start_offset: int  # of log-start-offset-checkpoint
    index_interval_bytes: int
    now_ms: int
    end_limit: int | None = None  # nothing from this offset on is kept: its sync failed
    waits_for_disk: bool = False  # what is found counts as acknowledged


@dataclass(slots=True)
class LogContents:
    segments: list[Segment]
    states: ProducerStates
    epochs: list[tuple[int, int]]
    start_offset: int
    end_offset: int
    cut_bytes: int = 0
    unsynced: list[Handle] = field(default_factory=list)  # recovered files: sync them before they are shown


def open_log(folder: LogFolder) -> LogContents:
    names = _tidy(folder)
    segments = _find_segments(folder, names)
    snapshots = _find_snapshots(folder, names, segments)
    epochs = checkpoints.read_epochs(os.path.join(folder.path, checkpoints.LEADER_EPOCHS))
    opened = LogContents(segments, ProducerStates(), epochs, 0, 0)
    if folder.trusted and folder.end_limit is None:
        _trust(folder, opened, snapshots)
    else:
        _recover(folder, opened, snapshots)
    opened.start_offset = min(max(folder.start_offset, opened.segments[0].base_offset), opened.end_offset)
    return opened


# Files
def _tidy(folder: LogFolder) -> dict[str, os.stat_result]:
    """Finishes or takes back what an interrupted deletion or compaction left; the sizes of the files that remain."""
    names = _list(folder.path)
    for name in [name for name in names if name in _UNFINISHED_CHECKPOINTS or _offset_in(name, _DOOMED) is not None]:
        folder.cache.files.remove(os.path.join(folder.path, name))
        del names[name]
    if not any(_offset_in(name, _SWAPS) is not None for name in names):
        return names
    _finish_swaps(folder, names)
    return _list(folder.path)


def _finish_swaps(folder: LogFolder, names: dict[str, os.stat_result]) -> None:
    """A `.log.swap` is complete and synced: the segments that it replaces go, then it takes its place."""
    files = folder.cache.files
    for base in sorted(base for name in names if (base := _offset_in(name, (LOG + SWAP,))) is not None):
        swapped = Segment(folder.cache, folder.path, base, {LOG: names[file_name(base, LOG + SWAP)].st_size}, 0, SWAP)
        end, whole = base + 1, 0
        for position, header in swapped.batches(verify=True):
            end, whole = max(end, header.next_offset), position + header.size
        swapped.close()
        if whole != swapped.size and file_name(base, LOG) in names:
            _log.error("%s is damaged: the segments that it was made from stay", swapped.log.path)
            _rename_aside(folder, swapped.log.path)
            continue
        for old in _list(folder.path):
            offset = _offset_in(old, SEGMENT_FILES)
            if offset is not None and base <= offset < end:
                files.remove(os.path.join(folder.path, old))
        for suffix in (*SEGMENT_FILES[1:], LOG):  # the log last: until then this is done again
            source = os.path.join(folder.path, file_name(base, suffix + SWAP))
            if os.path.exists(source):
                files.rename(source, source.removesuffix(SWAP))
    for name in _list(folder.path):
        if _offset_in(name, _SWAPS) is not None:
            files.remove(os.path.join(folder.path, name))
    files.sync_dir(folder.path)


def _list(path: str) -> dict[str, os.stat_result]:
    with os.scandir(path) as entries:
        return {entry.name: entry.stat() for entry in entries if entry.is_file()}


def _offset_in(name: str, suffixes: Collection[str]) -> int | None:
    """The offset in the name of a file that this code wrote; None for any other file, which is not touched."""
    digits, suffix = name[:_DIGITS], name[_DIGITS:]
    if suffix not in suffixes or not (digits.isascii() and digits.isdigit()) or len(digits) < _DIGITS:
        return None
    offset = int(digits)
    return offset if offset <= INT64_MAX else None


def _find_segments(folder: LogFolder, names: dict[str, os.stat_result]) -> list[Segment]:
    bases = sorted(base for name in names if (base := _offset_in(name, (LOG,))) is not None)
    for name in names:
        offset = _offset_in(name, SEGMENT_FILES[1:])
        if offset is not None and file_name(offset, LOG) not in names:
            folder.cache.files.remove(os.path.join(folder.path, name))
    if not bases:
        return [Segment(folder.cache, folder.path, folder.start_offset, {}, folder.now_ms)]
    return [_segment(folder, base, names) for base in bases]


def _segment(folder: LogFolder, base: int, names: dict[str, os.stat_result]) -> Segment:
    sizes = {
        suffix: names[file_name(base, suffix)].st_size for suffix in SEGMENT_FILES if file_name(base, suffix) in names
    }
    modified_ms = int(names[file_name(base, LOG)].st_mtime * 1000)
    return Segment(folder.cache, folder.path, base, sizes, modified_ms)


def _find_snapshots(folder: LogFolder, names: dict[str, os.stat_result], segments: list[Segment]) -> list[int]:
    """Offsets of the snapshots, ascending. Those between segments are leftovers, except the latest."""
    offsets = sorted(offset for name in names if (offset := _offset_in(name, (SNAPSHOT,))) is not None)
    bases = {segment.base_offset for segment in segments}
    kept = [offset for offset in offsets if offset in bases or offset == offsets[-1]]
    for offset in set(offsets) - set(kept):
        folder.cache.files.remove(os.path.join(folder.path, file_name(offset, SNAPSHOT)))
    return kept


def _load_snapshot(folder: LogFolder, snapshots: list[int], up_to: int) -> tuple[ProducerStates, int]:
    """The latest sound snapshot that is not beyond an offset, and its offset; corrupt ones are removed."""
    states = ProducerStates()
    for offset in reversed([offset for offset in snapshots if offset <= up_to]):
        path = os.path.join(folder.path, file_name(offset, SNAPSHOT))
        try:
            with open(path, "rb") as file:
                entries = decode_snapshot(file.read(), folder.now_ms)
        except CorruptSnapshotError as error:
            _log.warning("producer snapshot %s is corrupt (%s), using an older one", path, error)
            snapshots.remove(offset)
            folder.cache.files.remove(path)
        else:
            for entry in entries:
                states.restore(entry)
            return states, offset
    return states, -1


# After a clean stop
def _trust(folder: LogFolder, opened: LogContents, snapshots: list[int]) -> None:
    active = opened.segments[-1]
    if not all(segment.indexes_look_sound() for segment in opened.segments):
        _recover(folder, opened, snapshots)
        return
    end = folder.recovery_point
    if end not in snapshots or end < active.base_offset:
        end = active.next_offset()
    opened.states, snapshot_offset = _load_snapshot(folder, snapshots, end)
    opened.end_offset = end
    replay_from = max(snapshot_offset, opened.segments[0].base_offset)
    if replay_from < end:
        _replay(opened.states, opened.segments, replay_from)
    active.load_max_timestamp()


def _replay(states: ProducerStates, segments: list[Segment], from_offset: int) -> None:
    """Applies what was written from an offset on to the producers; files stay as they are."""
    for number, segment in enumerate(segments):
        if number + 1 < len(segments) and segments[number + 1].base_offset <= from_offset:
            continue
        for position, header in segment.batches(segment.position_hint(from_offset)):
            if header.base_offset >= from_offset:
                _apply(states, segment, position, header)


# After a crash
def _recover(folder: LogFolder, opened: LogContents, snapshots: list[int]) -> None:
    """Reads from the recovery point's segment on; segments before it are complete and stay as they are."""
    segments = opened.segments
    point = folder.recovery_point if folder.end_limit is None else min(folder.recovery_point, folder.end_limit)
    first = max((i for i, segment in enumerate(segments) if segment.base_offset <= point), default=0)
    first = min([first, *(i for i in range(first) if not segments[i].indexes_look_sound())])
    opened.states, snapshot_offset = _load_snapshot(folder, snapshots, segments[first].base_offset)
    _replay(opened.states, segments[:first], snapshot_offset)
    opened.end_offset = segments[first].base_offset
    for number in range(first, len(segments)):
        cut = _recover_segment(folder, opened, segments[number])
        if cut or (number + 1 < len(segments) and folder.end_limit == opened.end_offset):
            opened.cut_bytes += cut
            _drop(folder, segments, number + 1, keep=folder.end_limit != opened.end_offset)
            break
    for offset in [offset for offset in snapshots if offset > opened.end_offset]:
        folder.cache.files.remove(os.path.join(folder.path, file_name(offset, SNAPSHOT)))
    opened.epochs = [(epoch, start) for epoch, start in opened.epochs if start <= opened.end_offset]


def _recover_segment(folder: LogFolder, opened: LogContents, segment: Segment) -> int:
    """Rebuilds one segment from its batches; returns how many bytes were cut off its end."""
    found, segment.size = segment.size, 0
    if found == 0 and not os.path.exists(segment.log.path):
        return 0
    segment.reset_indexes()
    segment.txn_index.reset()
    segment.suspect = False
    opened.end_offset = max(opened.end_offset, segment.base_offset)
    unsure_from: int | None = None
    for position, header in segment.batches(0, found, verify=True):
        if not _continues(header, opened.end_offset, segment.base_offset, folder.end_limit):
            break
        segment.note_found(header, folder.index_interval_bytes)
        completed = _apply(opened.states, segment, position, header)
        if completed is not None and not completed.committed:
            segment.txn_index.append(AbortedTxn(*completed[:4]))
        if not opened.epochs or header.leader_epoch > opened.epochs[-1][0]:
            opened.epochs.append((header.leader_epoch, header.base_offset))
        opened.end_offset = header.next_offset
        if unsure_from is None and header.next_offset > folder.recovery_point:
            unsure_from = position
    cut = found - segment.size
    if cut:
        if folder.end_limit != opened.end_offset and _is_damage(segment, found):
            _copy_aside(folder, segment, found)
        _log.warning("cut %d bytes off %s: not a whole batch at %d", cut, segment.log.path, segment.size)
        segment.truncate(segment.size)
    if unsure_from is not None and folder.waits_for_disk and folder.end_limit is None:
        _write_again(segment, unsure_from)
    if segment is not opened.segments[-1]:
        segment.seal()
        opened.unsynced += segment.handles()
    else:
        opened.unsynced.append(segment.log)
    return cut


def _write_again(segment: Segment, start: int) -> None:
    """A run that was killed may have had a failed fsync, after which the kernel takes what it could not write for
    written: the next fsync would leave it out."""
    for position in range(start, segment.size, _COPY_BYTES):
        data = segment.files.read_at(segment.fd, min(_COPY_BYTES, segment.size - position), position)
        write_fully(segment.files, segment.fd, data, position)


def _continues(header: BatchHeader, expected: int, base_offset: int, end_limit: int | None) -> bool:
    """Whether a sound batch belongs here: not an older one that a cut left behind, and below the limit."""
    in_order = header.base_offset >= expected and header.last_offset - base_offset <= RELATIVE_OFFSET_MAX
    return in_order and (end_limit is None or header.last_offset < end_limit)


def _drop(folder: LogFolder, segments: list[Segment], start: int, *, keep: bool) -> None:
    """Takes segments behind a cut out of the log, which cannot go on there.

    With `keep` their batches stay as `.stray`: the log is damaged before them. Without, they were never acknowledged.
    """
    for segment in segments[start:]:
        segment.close()
        if keep and segment.size:
            aside = _rename_aside(folder, segment.log.path)
            _log.error("%s is damaged before offset %d: %s is kept", folder.path, segment.base_offset, aside)
        for path in segment.paths():
            if os.path.exists(path):
                _log.warning("removing %s: it follows a cut", path)
                folder.cache.files.remove(path)
    del segments[start:]


def _is_damage(segment: Segment, found: int) -> bool:
    """Whether there is more behind the last sound batch than a torn write leaves: a part of one batch, or zeros."""
    head = segment.files.read_at(segment.fd, HEADER_SIZE, segment.size)
    if len(head) < HEADER_SIZE:
        return False
    header = BatchHeader._make(HEADER.unpack(head))
    rest_bytes = found - segment.size
    if header.magic != MAGIC or header.size < rest_bytes or rest_bytes > _TORN_BYTES_MAX:
        chunks = (segment.files.read_at(segment.fd, _COPY_BYTES, at) for at in range(segment.size, found, _COPY_BYTES))
        return any(chunk.strip(b"\0") for chunk in chunks)
    rest = segment.files.read_at(segment.fd, rest_bytes, segment.size)
    return _is_sound(rest, 0) or _has_batch(rest, header.next_offset)


def _has_batch(rest: bytes, base_offset: int) -> bool:
    """Whether a sound batch with an offset is somewhere in these bytes."""
    wanted = struct.pack(">Q", base_offset % 2**64)
    at = rest.find(wanted)
    while at >= 0 and not _is_sound(rest, at):
        at = rest.find(wanted, at + 1)
    return at >= 0


def _is_sound(data: bytes, at: int) -> bool:
    if len(data) - at < HEADER_SIZE:
        return False
    header = BatchHeader._make(HEADER.unpack_from(data, at))
    is_whole = header.magic == MAGIC and HEADER_SIZE <= header.size <= len(data) - at
    return is_whole and crc32c(data[at + CRC_START : at + header.size]) == header.crc


def _copy_aside(folder: LogFolder, segment: Segment, found: int) -> None:
    """Keeps what is about to be cut off. It may be acknowledged records; there is no other copy of them."""
    files = folder.cache.files
    aside = _free_name(f"{segment.log.path}.{segment.size}{STRAY}")
    fd = files.open(aside)
    try:
        for position in range(segment.size, found, _COPY_BYTES):
            data = files.read_at(segment.fd, min(_COPY_BYTES, found - position), position)
            write_fully(files, fd, data, position - segment.size)
        files.sync_file(fd, aside)
    finally:
        os.close(fd)
    files.sync_dir(folder.path)
    rest_bytes = found - segment.size
    _log.error("%s is damaged at %d: %d bytes are kept as %s", segment.log.path, segment.size, rest_bytes, aside)


def _rename_aside(folder: LogFolder, path: str) -> str:
    aside = _free_name(path + STRAY)
    folder.cache.files.rename(path, aside)
    return aside


def _free_name(path: str) -> str:
    names = chain([path], (f"{path}.{number}" for number in count(1)))
    return next(name for name in names if not os.path.exists(name))


def _apply(states: ProducerStates, segment: Segment, position: int, header: BatchHeader) -> CompletedTransaction | None:
    """Brings the producers up to date with a batch that is in the log: no checks, they were made when it came."""
    if not header.has_producer_id:
        return None
    if not header.is_control:
        batch = DataBatch(
            header.producer_id,
            header.producer_epoch,
            header.base_sequence,
            header.last_sequence,
            header.is_transactional,
            header.max_timestamp,
        )
        states.apply_data(batch, header.base_offset, header.last_offset, segment.created_ms)
        return None
    return _apply_control(states, segment, position, header)


def _apply_control(
    states: ProducerStates, segment: Segment, position: int, header: BatchHeader
) -> CompletedTransaction | None:
    try:
        marker = segment.marker(position, header)
    except CorruptBatchError:
        return None
    if marker is None:  # or compaction took it, with all of its transaction
        return None
    found = MarkerBatch(
        header.producer_id, header.producer_epoch, marker.coordinator_epoch, marker.is_commit, header.max_timestamp
    )
    return states.apply_marker(found, header.base_offset)


# What the files of an open log know of its producers
def add_earlier_batches(entry: ProducerEntry, segments: list[Segment]) -> None:
    """Adds the batches of the entry's epoch that precede those in its state. Reads headers only, and only once.

    A snapshot keeps only the last batch of each producer, but the responses of up to 5 may be lost when a broker stops.
    Before such a retry is refused as out of order, the earlier batches are looked up in the log.
    """
    entry.history_cut = False
    if not entry.batches:
        return
    known_from = entry.batches[0].base_offset
    earlier: list[BatchInfo] = []
    bytes_left = _HISTORY_BYTES_MAX
    for segment in reversed(segments):
        if segment.base_offset > known_from:
            continue
        earlier = _batches_of(entry, segment, known_from, bytes_left) + earlier
        bytes_left -= segment.size
        if len(earlier) + len(entry.batches) >= BATCHES_REMEMBERED or bytes_left <= 0:
            break
    entry.batches = (earlier + entry.batches)[-BATCHES_REMEMBERED:]


def _batches_of(entry: ProducerEntry, segment: Segment, before_offset: int, bytes_left: int) -> list[BatchInfo]:
    start = 0
    if segment.size > bytes_left:
        indexed = segment.offset_index.floor(segment.size - bytes_left, field=1)
        start = indexed.second if indexed is not None else 0
    found: list[BatchInfo] = []
    for _, header in segment.batches(start):
        if header.base_offset >= before_offset:
            break
        if header.producer_id == entry.producer_id and not header.is_control:
            if header.producer_epoch == entry.epoch:
                found.append(
                    BatchInfo(
                        header.base_sequence,
                        header.last_sequence,
                        header.base_offset,
                        header.last_offset,
                        header.max_timestamp,
                    )
                )
            else:
                found = []
    return found[-BATCHES_REMEMBERED:]


def find_producer_ids(states: ProducerStates, folder: str, segments: list[Segment]) -> set[int]:
    """Every producer id in state, snapshots and batches. Producers expire, and retention deletes batches."""
    found = set(states.producers)
    for name in os.listdir(folder):
        if name.endswith(SNAPSHOT):
            with contextlib.suppress(CorruptSnapshotError):
                entries = decode_snapshot(Path(folder, name).read_bytes(), 0)
                found.update(entry.producer_id for entry in entries)
    for segment in segments:
        found.update(header.producer_id for _, header in segment.batches() if header.has_producer_id)
    return found
