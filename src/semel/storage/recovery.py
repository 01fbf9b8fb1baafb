"""From files to a log in memory: after a clean stop by trust, after a crash by reading.

After a crash everything from the recovery point's segment on is read: CRCs are checked, the first thing that is not a
whole batch ends the log, indexes are rebuilt as appending would have built them, and producers are restored from the
latest sound snapshot plus what was written after it.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field

from semel.protocol.batch import BatchHeader
from semel.protocol.errors import CorruptBatchError
from semel.storage import checkpoints, snapshot
from semel.storage.files import FileCache, Handle
from semel.storage.producer_state import CompletedTransaction, DataBatch, ProducerStates
from semel.storage.segment import (
    CLEANED,
    DELETED,
    LOG,
    RELATIVE_OFFSET_MAX,
    SEGMENT_FILES,
    SNAPSHOT,
    SWAP,
    Segment,
    file_name,
)
from semel.storage.txnindex import AbortedTransaction

_log = logging.getLogger("semel.storage")


@dataclass(slots=True, kw_only=True)
class LogFolder:
    """Where a log lies and what is known of it before it is read."""

    path: str
    cache: FileCache
    clean: bool  # the last run was stopped cleanly: files are as that run left them
    recovery_point: int  # below it everything is on the disk, indexes too
    start_offset: int  # of log-start-offset-checkpoint
    index_interval_bytes: int
    now_ms: int
    end_limit: int | None = None  # nothing from this offset on is kept: its sync failed


@dataclass(slots=True)
class OpenedLog:
    segments: list[Segment]
    states: ProducerStates
    epochs: list[tuple[int, int]]
    start_offset: int
    end_offset: int
    cut_bytes: int = 0
    unsynced: list[Handle] = field(default_factory=list)  # recovered files: sync them before they are shown


def open_log(folder: LogFolder) -> OpenedLog:
    names = _tidy(folder)
    segments = _find_segments(folder, names)
    snapshots = _find_snapshots(folder, names, segments)
    epochs = checkpoints.read_epochs(os.path.join(folder.path, checkpoints.LEADER_EPOCHS))
    opened = OpenedLog(segments, ProducerStates(), epochs, 0, 0)
    if folder.clean and folder.end_limit is None:
        _trust(folder, opened, snapshots)
    else:
        _recover(folder, opened, snapshots)
    opened.start_offset = min(max(folder.start_offset, opened.segments[0].base_offset), opened.end_offset)
    return opened


# Files


def _tidy(folder: LogFolder) -> dict[str, os.stat_result]:
    """Finishes or takes back what an interrupted deletion or compaction left; the sizes of the files that remain."""
    names = _list(folder.path)
    for name in [name for name in names if name.endswith((DELETED, CLEANED, ".tmp"))]:
        folder.cache.files.remove(os.path.join(folder.path, name))
        del names[name]
    if not any(name.endswith(SWAP) for name in names):
        return names
    _finish_swaps(folder, names, sorted(name for name in names if name.endswith(LOG + SWAP)))
    return _list(folder.path)


def _finish_swaps(folder: LogFolder, names: dict[str, os.stat_result], swaps: list[str]) -> None:
    """A `.log.swap` is complete and synced: the segments that it replaces go, then it takes its place."""
    files = folder.cache.files
    for name in swaps:
        base = _offset_of(name)
        swapped = Segment(folder.cache, folder.path, base, {LOG: names[name].st_size}, 0, SWAP)
        end = base + 1
        for _, header in swapped.batches():
            end = max(end, header.next_offset)
        swapped.close()
        for old in list(names):
            if old.endswith(SEGMENT_FILES) and base <= _offset_of(old) < end and old in _list(folder.path):
                files.remove(os.path.join(folder.path, old))
        for suffix in (*SEGMENT_FILES[1:], LOG):  # the log last: until then this is done again
            source = os.path.join(folder.path, file_name(base, suffix + SWAP))
            if os.path.exists(source):
                files.rename(source, source.removesuffix(SWAP))
    for name in _list(folder.path):
        if name.endswith(SWAP):
            files.remove(os.path.join(folder.path, name))
    files.sync_dir(folder.path)


def _list(path: str) -> dict[str, os.stat_result]:
    with os.scandir(path) as entries:
        return {entry.name: entry.stat() for entry in entries if entry.is_file()}


def _offset_of(name: str) -> int:
    return int(name.partition(".")[0])


def _find_segments(folder: LogFolder, names: dict[str, os.stat_result]) -> list[Segment]:
    bases = sorted(_offset_of(name) for name in names if name.endswith(LOG) and _is_offset_name(name))
    for name in names:
        if name.endswith(SEGMENT_FILES[1:]) and file_name(_offset_of(name), LOG) not in names:
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


def _is_offset_name(name: str) -> bool:
    stem = name.partition(".")[0]
    return len(stem) == 20 and stem.isdigit()


def _find_snapshots(folder: LogFolder, names: dict[str, os.stat_result], segments: list[Segment]) -> list[int]:
    """Offsets of the snapshots, ascending. Those between segments are leftovers, except the latest."""
    offsets = sorted(_offset_of(name) for name in names if name.endswith(SNAPSHOT) and _is_offset_name(name))
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
                entries = snapshot.decode(file.read(), folder.now_ms)
        except snapshot.CorruptSnapshotError as error:
            _log.warning("producer snapshot %s is corrupt (%s), using an older one", path, error)
            snapshots.remove(offset)
            folder.cache.files.remove(path)
        else:
            for entry in entries:
                states.restore(entry)
            return states, offset
    return states, -1


# After a clean stop


def _trust(folder: LogFolder, opened: OpenedLog, snapshots: list[int]) -> None:
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


def _recover(folder: LogFolder, opened: OpenedLog, snapshots: list[int]) -> None:
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
            _drop(folder, segments, number + 1)
            break
    for offset in [offset for offset in snapshots if offset > opened.end_offset]:
        folder.cache.files.remove(os.path.join(folder.path, file_name(offset, SNAPSHOT)))
    _keep_epochs_below(opened)


def _recover_segment(folder: LogFolder, opened: OpenedLog, segment: Segment) -> int:
    """Rebuilds one segment from its batches; returns how many bytes were cut off its end."""
    found, segment.size = segment.size, 0
    if found == 0 and not os.path.exists(segment.log.path):
        return 0
    segment.reset_indexes()
    opened.end_offset = max(opened.end_offset, segment.base_offset)
    for position, header in segment.batches(0, found, verify=True):
        if not _continues(header, opened.end_offset, segment.base_offset, folder.end_limit):
            break
        segment.note_found(header, folder.index_interval_bytes)
        completed = _apply(opened.states, segment, position, header)
        if completed is not None and not completed.committed:
            segment.txn_index.append(_aborted(completed))
        if not opened.epochs or header.leader_epoch > opened.epochs[-1][0]:
            opened.epochs.append((header.leader_epoch, header.base_offset))
        opened.end_offset = header.next_offset
    cut = found - segment.size
    if cut:
        _log.warning("cut %d bytes off %s: not a whole batch at %d", cut, segment.log.path, segment.size)
        segment.truncate(segment.size)
    if segment is not opened.segments[-1]:
        segment.seal()
        opened.unsynced += segment.handles()
    else:
        opened.unsynced.append(segment.log)
    return cut


def _continues(header: BatchHeader, expected: int, base_offset: int, end_limit: int | None) -> bool:
    """Whether a sound batch belongs here: not an older one that a cut left behind, and below the limit."""
    in_order = header.base_offset >= expected and header.last_offset - base_offset <= RELATIVE_OFFSET_MAX
    return in_order and (end_limit is None or header.last_offset < end_limit)


def _drop(folder: LogFolder, segments: list[Segment], start: int) -> None:
    """Removes segments after a cut: nothing in them can follow what is kept."""
    for segment in segments[start:]:
        _log.warning("removing segment %s: it follows a cut", segment.log.path)
        segment.close()
        for path in segment.paths():
            if os.path.exists(path):
                folder.cache.files.remove(path)
    del segments[start:]


def _keep_epochs_below(opened: OpenedLog) -> None:
    opened.epochs = [(epoch, start) for epoch, start in opened.epochs if start <= opened.end_offset]


def _aborted(completed: CompletedTransaction) -> AbortedTransaction:
    return AbortedTransaction(
        completed.producer_id, completed.first_offset, completed.marker_offset, completed.last_stable_offset
    )


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
    from semel.protocol.rows import MarkerType, decode_batch, decode_marker

    records = decode_batch(segment.files.read_at(segment.fd, header.size, position)).records
    if not records:  # compaction took the marker, with all of its transaction
        return None
    try:
        marker = decode_marker(records[0])
    except CorruptBatchError:
        return None
    if marker is None:
        return None
    return states.apply_marker(
        header.producer_id,
        header.producer_epoch,
        marker.coordinator_epoch,
        committed=marker.type is MarkerType.COMMIT,
        offset=header.base_offset,
        timestamp_ms=header.max_timestamp,
    )
