"""Compaction keeps the latest of every key, the order, the offsets, and everything that producers and readers need."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from semel.protocol.errors import CorruptBatchError, ErrorCode
from semel.protocol.rows import Record
from semel.prove.powercut import JournaledFiles, cut_power, side_folder
from semel.storage import Compactor, PartitionLog, StorageError
from semel.storage import cleaner as cleaner_module
from semel.storage.cleaner import clean, plan, swap
from semel.storage.segment import CLEANED, SWAP
from tests.unit.storage.helpers import (
    START_MS,
    Folder,
    all_headers,
    all_records,
    append,
    append_in_transaction,
    batch,
    committed_values,
    find_producer,
)

COMPACT = frozenset({"compact"})


def compact(log: PartitionLog, now_ms: int = START_MS) -> bool:
    """Everything but what the last segment holds."""
    made = plan(log, now_ms, force=True)
    return made is not None and swap(log, clean(made), now_ms)


def put(log: PartitionLog, key: bytes, value: bytes | None, **fields: object) -> None:
    append(log, values=[value], keys=[key], **fields)


def view(records: list[Record]) -> dict[bytes, bytes]:
    """What a reader who applies every record ends up with."""
    state: dict[bytes, bytes] = {}
    for record in records:
        assert record.key is not None
        if record.value is None:
            state.pop(record.key, None)
        else:
            state[record.key] = record.value
    return state


def test_latest_record_of_every_key_stays_at_its_offset(folder: Folder) -> None:
    log = folder.log(cleanup_policy=COMPACT, segment_bytes=600)
    for number in range(60):
        put(log, b"key%d" % (number % 7), b"%d" % number)
    before = {record.offset: record for record in all_records(log)}
    latest = view(list(before.values()))
    active = log.segments[-1].base_offset
    assert compact(log)
    after = all_records(log)
    assert view(after) == latest
    assert [record.offset for record in after] == sorted(record.offset for record in after)
    assert all(before[record.offset] == record for record in after)
    below = [record.key for record in after if record.offset < active]
    assert len(below) == len(set(below)) <= 7
    assert log.end_offset == 60
    assert log.cleaned_offset == active
    for offset in range(60):
        first = all_headers_from(log, offset)[0]
        assert first.last_offset >= offset


def all_headers_from(log: PartitionLog, offset: int):
    from semel.protocol.batch import iter_headers

    return [header for _, header in iter_headers(log.read(offset, 1 << 20).records)]


def test_compacted_log_reads_the_same_after_every_kind_of_restart(folder: Folder) -> None:
    log = folder.log(cleanup_policy=COMPACT, segment_bytes=600, index_interval_bytes=100)
    for number in range(60):
        put(log, b"key%d" % (number % 7), b"%d" % number, producer_id=3, epoch=0, sequence=number)
    compact(log)
    expected = all_records(log)
    for clean_stop in (True, False):
        log = folder.restart(clean=clean_stop)
        assert all_records(log) == expected
        assert append(log, values=[b"59"], keys=[b"key3"], producer_id=3, epoch=0, sequence=59).duplicate


def test_sequence_of_a_producer_survives_although_its_records_are_gone(folder: Folder) -> None:
    log = folder.log(cleanup_policy=COMPACT, segment_bytes=400)
    put(log, b"k", b"old", producer_id=3, epoch=1, sequence=0)
    put(log, b"k", b"old", producer_id=3, epoch=1, sequence=1)
    for number in range(20):
        put(log, b"k", b"%d" % number)
    assert compact(log)
    empty = [header for header in all_headers(log) if header.producer_id == 3]
    assert [(header.record_count, header.base_sequence) for header in empty] == [(0, 1)]
    for path in folder.partition_path.glob("*.snapshot"):
        path.unlink()  # only the log can tell
    log = folder.restart(clean=False)
    assert append(log, values=[b"old"], keys=[b"k"], producer_id=3, epoch=1, sequence=1).duplicate
    with pytest.raises(StorageError):
        put(log, b"k", b"x", producer_id=3, epoch=1, sequence=5)


def test_tombstone_stays_for_delete_retention_and_then_goes(folder: Folder) -> None:
    log = folder.log(cleanup_policy=COMPACT, segment_bytes=400, delete_retention_ms=1000)
    put(log, b"gone", b"value")
    put(log, b"gone", None)
    for number in range(10):
        put(log, b"other", b"%d" % number)
    assert compact(log, START_MS)
    kept = [record for record in all_records(log) if record.key == b"gone"]
    assert [(record.value, record.timestamp) for record in kept] == [(None, START_MS)]
    header = next(header for header in all_headers(log) if header.base_offset == 1)
    assert header.has_delete_horizon
    assert header.base_timestamp == START_MS + 1000
    for now_ms, tombstones in ((START_MS + 999, 1), (START_MS + 1000, 0)):
        for number in range(10):
            put(log, b"other", b"%d" % number)
        assert compact(log, now_ms)
        assert sum(record.key == b"gone" for record in all_records(log)) == tombstones


def test_aborted_data_goes_and_committed_data_stays(folder: Folder) -> None:
    log = folder.log(cleanup_policy=COMPACT, segment_bytes=500)
    for number in range(12):
        producer_id = 1 + number % 2
        guard = log.start_verification(producer_id, 0, number // 2, supports_epoch_bump=False)
        data = batch(
            [b"%d" % number],
            keys=[b"key%d" % (number % 4)],
            producer_id=producer_id,
            epoch=0,
            sequence=number // 2,
            transactional=True,
        )
        log.append(memoryview(data), now_ms=START_MS, guard=guard)
        log.append_marker(producer_id, 0, 0, commit=producer_id == 1, now_ms=START_MS)
    for number in range(6):
        put(log, b"tail", b"tail%d" % number)
    assert committed_values(log)[:6] == [b"0", b"2", b"4", b"6", b"8", b"10"]
    assert any(segment.txn_index.count for segment in log.segments[:-1])
    assert compact(log)
    after = committed_values(log)
    assert [value for value in after if not value.startswith(b"tail")] == [b"8", b"10"]
    aborted_values = {b"%d" % number for number in range(1, 12, 2)}
    below = log.segments[-1].base_offset
    assert not aborted_values & {r.value for r in all_records(log) if r.offset < below}
    for clean_stop in (True, False):
        assert committed_values(folder.restart(clean=clean_stop)) == after


def test_an_aborted_value_does_not_push_out_a_committed_one(folder: Folder) -> None:
    log = folder.log(cleanup_policy=COMPACT, segment_bytes=400)
    put(log, b"k", b"good")
    guard = log.start_verification(5, 0, 0, supports_epoch_bump=False)
    data = batch([b"bad"], keys=[b"k"], producer_id=5, epoch=0, sequence=0, transactional=True)
    log.append(memoryview(data), now_ms=START_MS, guard=guard)
    log.append_marker(5, 0, 0, commit=False, now_ms=START_MS)
    for number in range(8):
        put(log, b"other", b"%d" % number)
    assert compact(log)
    assert committed_values(log)[0] == b"good"


def test_nothing_at_or_beyond_an_open_transaction_is_touched(folder: Folder) -> None:
    log = folder.log(cleanup_policy=COMPACT, segment_bytes=300)
    for number in range(10):
        put(log, b"k", b"%d" % number)
    append_in_transaction(log, 9, 0, [b"open"])
    opened_at = log.end_offset - 1
    for number in range(20):
        put(log, b"k2", b"%d" % number)
    beyond = [record for record in all_records(log) if record.offset >= opened_at]
    assert compact(log)
    assert log.cleaned_offset <= opened_at
    assert [record for record in all_records(log) if record.offset >= opened_at] == beyond
    assert log.last_stable_offset == opened_at
    log.append_marker(9, 0, 0, commit=True, now_ms=START_MS)
    assert compact(log)
    assert b"open" in committed_values(log)


def test_markers_go_in_the_end_but_never_before_their_data(folder: Folder) -> None:
    log = folder.log(cleanup_policy=COMPACT, segment_bytes=400, delete_retention_ms=100)
    append_in_transaction(log, 9, 0, [b"a"])  # key "k"
    log.append_marker(9, 0, 0, commit=True, now_ms=START_MS)
    append(log, producer_id=9, epoch=1, sequence=0, values=[b"b"])  # so that the first batch is not the producer's last
    now_ms = START_MS
    seen = []
    for _ in range(5):
        for number in range(8):
            put(log, b"k", b"%d" % number)
        assert compact(log, now_ms)
        now_ms += 200
        headers = [header for header in all_headers(log) if header.producer_id == 9]
        seen.append((any(h.is_transactional and not h.is_control for h in headers), any(h.is_control for h in headers)))
        log = folder.restart(clean=False)
        assert not log.has_open_transaction(9)
    assert seen[-1] == (False, False)
    assert (True, False) not in seen


def test_compressed_batches_are_compacted_too(folder: Folder) -> None:
    log = folder.log(cleanup_policy=COMPACT, segment_bytes=500)
    for number in range(20):
        append(
            log,
            values=[b"%d-%d" % (number, part) for part in range(4)],
            keys=[b"key%d" % (number % 2), b"key2", b"key%d" % (3 + number % 2), b"key5"],
            compression=number % 5,
        )
    latest = view(all_records(log))
    size = log.size_bytes
    assert compact(log)
    assert view(all_records(log)) == latest
    assert log.size_bytes < size


def test_small_segments_are_merged(folder: Folder) -> None:
    log = folder.log(cleanup_policy=COMPACT, segment_bytes=400)
    for number in range(100):
        put(log, b"k%d" % (number % 2), b"%d" % number)
    count = len(log.segments)
    for _ in range(2):  # groups are made by the sizes before: the second pass merges what the first made small
        for number in range(5):
            put(log, b"k%d" % (number % 2), b"%d" % number)
        assert compact(log)
    assert len(log.segments) < count / 2
    assert len(list(folder.partition_path.glob("*.snapshot"))) <= len(log.segments)


def test_dirty_ratio_and_lags_decide_when(folder: Folder) -> None:
    log = folder.log(cleanup_policy=COMPACT, segment_bytes=400, min_cleanable_dirty_ratio=0.5)
    for number in range(20):
        put(log, b"k%d" % number, b"x")
    assert plan(log, START_MS) is not None
    assert swap(log, clean(plan(log, START_MS)), START_MS)  # type: ignore[arg-type]
    put(log, b"new", b"x" * 300)
    put(log, b"new", b"x" * 300)
    assert plan(log, START_MS) is None
    log.config = folder.config = replace(folder.config, max_compaction_lag_ms=1000)
    assert plan(log, START_MS + 1000) is None
    assert plan(log, START_MS + 1001) is not None
    log.config = replace(folder.config, min_compaction_lag_ms=5000, max_compaction_lag_ms=9000)
    assert plan(log, START_MS + 4000, force=True) is None
    assert plan(log, START_MS + 5001, force=True) is not None


def test_more_keys_than_fit_are_cleaned_in_several_passes(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleaner_module, "KEYS_MAX", 10)
    log = folder.log(cleanup_policy=COMPACT, segment_bytes=600)
    for number in range(100):
        put(log, b"key%d" % (number % 33), b"%d" % number)
    latest = view(all_records(log))
    cleaned = []
    while compact(log):
        cleaned.append(log.cleaned_offset)
        assert view(all_records(log)) == latest
    assert len(cleaned) > 5
    assert cleaned == sorted(cleaned)
    below = [record.key for record in all_records(log) if record.offset < log.segments[-1].base_offset]
    assert len(below) == len(set(below))


@pytest.mark.parametrize("seed", range(6))
def test_random_histories_keep_what_readers_see(folder: Folder, seed: int) -> None:
    luck = random.Random(seed)
    delete_retention_ms = 0 if seed % 2 else 10**9
    segment_bytes = luck.choice([500, 1500])
    log = folder.log(cleanup_policy=COMPACT, segment_bytes=segment_bytes, delete_retention_ms=delete_retention_ms)
    sequences = dict.fromkeys(range(1, 5), 0)
    for _ in range(4):
        for _ in range(60):
            match luck.randrange(5):
                case 0 | 1:
                    put(log, b"key%d" % luck.randrange(12), luck.choice([None, b"%d" % luck.randrange(1000)]))
                case 2 | 3:
                    producer = luck.randint(1, 4)
                    guard = log.start_verification(producer, 0, sequences[producer], supports_epoch_bump=False)
                    data = batch(
                        [luck.choice([None, b"t%d" % luck.randrange(1000)])],
                        keys=[b"key%d" % luck.randrange(12)],
                        producer_id=producer,
                        epoch=0,
                        sequence=sequences[producer],
                        transactional=True,
                    )
                    sequences[producer] += 1
                    log.append(memoryview(data), now_ms=START_MS, guard=guard)
                case 4:
                    producer = luck.randint(1, 4)
                    log.append_marker(producer, 0, 0, commit=luck.random() < 0.5, now_ms=START_MS)
        before, stable = committed_view(log), log.last_stable_offset
        compact(log)
        assert committed_view(log) == before
        log = folder.restart(clean=luck.random() < 0.5)
        assert committed_view(log) == before
        assert log.last_stable_offset == stable
        for producer, sequence in sequences.items():
            info = find_producer(log, producer)
            assert (info.last_sequence if info else -1) == sequence - 1


def committed_view(log: PartitionLog) -> dict[bytes, bytes]:
    from tests.support.batches import decode_batches

    aborted = dict.fromkeys(log.opened.segments.aborted_in(log.start_offset, log.end_offset))
    open_aborts: dict[int, bool] = {}
    records: list[Record] = []
    pending = sorted(aborted, key=lambda entry: entry[1])
    offset = log.start_offset
    while offset < log.last_stable_offset:
        data = log.read(offset, 1 << 20, up_to="last_stable").records
        if not len(data):
            break
        for decoded in decode_batches(data):
            header = decoded.header
            offset = header.next_offset
            while pending and pending[0][1] <= header.last_offset:
                open_aborts[pending.pop(0)[0]] = True
            if header.is_control:
                open_aborts.pop(header.producer_id, None)
            elif not (header.is_transactional and header.producer_id in open_aborts):
                records += decoded.records
    return view(records)


def test_crash_at_every_rename_of_the_swap_leaves_a_whole_log(folder: Folder, tmp_path: Path) -> None:
    class Crash(Exception):
        pass

    log = folder.log(cleanup_policy=COMPACT, segment_bytes=800)
    for number in range(24):
        put(log, b"key%d" % (number % 5), b"%d" % number)
        if number % 8 == 0:
            append_in_transaction(log, 1, number // 8, [b"t"])
            log.append_marker(1, 0, 0, commit=False, now_ms=START_MS)
    expected = committed_view(log)
    end = log.end_offset
    folder.data_dir.close()
    stops = 0
    for stop_at in range(1, 200):
        path = tmp_path / "copy"
        shutil.copytree(folder.path, path)
        (path / ".lock").unlink()
        victim = Folder(path)
        log = victim.log(cleanup_policy=COMPACT, segment_bytes=800)
        made = plan(log, START_MS, force=True)
        assert made is not None
        cleaned = clean(made)
        renames = 0
        files = victim.data_dir.files
        real = files.rename

        def rename(old: str, new: str, real=real, stop_at=stop_at) -> None:
            nonlocal renames
            renames += 1
            if renames == stop_at:
                raise Crash
            real(old, new)

        files.rename = rename  # type: ignore[method-assign]
        try:
            swap(log, cleaned, START_MS)
            finished = True
        except Crash:
            finished = False
            stops += 1
        victim.data_dir.crash()
        victim.data_dir = victim._open()
        log = victim.log()
        assert log.end_offset == end
        assert committed_view(log) == expected, f"after rename {stop_at}"
        assert not [p for p in victim.partition_path.iterdir() if p.name.endswith((CLEANED, SWAP))]
        victim.data_dir.crash()
        shutil.rmtree(path)
        if finished:
            break
    assert stops > 10


@pytest.mark.parametrize("garbage_removed", [False, True])
def test_power_cut_during_compaction_loses_nothing(tmp_path: Path, garbage_removed: bool) -> None:
    path = tmp_path / "data"
    folder = Folder(path, fsync="commit", files=lambda: JournaledFiles(path, real_sync=False))
    log = folder.log(cleanup_policy=COMPACT, segment_bytes=500)
    folder.data_dir.sync_namespace()
    for number in range(40):
        put(log, b"once%d" % number if number % 2 else b"often", b"%d" % number)
    log.flush()
    expected = view(all_records(log))
    log.config = replace(log.config, segment_bytes=5000)  # so that one segment takes the place of several
    assert compact(log)
    if garbage_removed:
        list(folder.data_dir.garbage_removal(START_MS + 10**9))
    folder.data_dir.crash()
    for seed in range(40):
        copy = tmp_path / f"copy{seed}"
        shutil.copytree(path, copy)
        shutil.copytree(side_folder(path), side_folder(copy))
        cut_power(copy, random.Random(seed))
        victim = Folder(copy, fsync="commit")
        assert view(all_records(victim.log())) == expected, seed
        victim.data_dir.crash()


def test_swap_changes_nothing_if_retention_was_faster(folder: Folder) -> None:
    log = folder.log(cleanup_policy=frozenset({"compact", "delete"}), segment_bytes=400)
    for number in range(40):
        put(log, b"k%d" % (number % 3), b"%d" % number)
    made = plan(log, START_MS, force=True)
    assert made is not None
    cleaned = clean(made)
    log.delete_records(20)
    log.apply_retention(START_MS)
    expected = all_records(log)
    assert not swap(log, cleaned, START_MS)
    assert all_records(log) == expected


def cleaned_files(log: PartitionLog) -> list[str]:
    return [path.name for path in Path(log.folder).iterdir() if path.name.endswith(CLEANED)]


def test_replacements_that_are_not_used_are_removed(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be as large as the log, and fill a disk for as long as the broker runs."""
    log = folder.log(cleanup_policy=frozenset({"compact", "delete"}), segment_bytes=400, retention_ms=-1)
    for number in range(40):
        put(log, b"k%d" % (number % 3), b"%d" % number)
    real_clean, compactor = cleaner_module.clean, Compactor()

    def clean_while_records_are_deleted(made: cleaner_module.CleaningPlan) -> cleaner_module.CleanedLog:
        cleaned = real_clean(made)
        assert cleaned_files(log)
        log.delete_records(20)
        log.apply_retention(START_MS)
        return cleaned

    monkeypatch.setattr(cleaner_module, "clean", clean_while_records_are_deleted)
    assert asyncio.run(compactor.run_once([log], START_MS)) is None
    compactor.close()
    assert cleaned_files(log) == []
    assert log.segments[0].base_offset > 0


def test_a_full_disk_is_not_kept_full_by_what_was_compacted(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    log = folder.log(cleanup_policy=COMPACT, segment_bytes=400)
    for number in range(100):
        put(log, b"k%d" % number, b"%d" % number)
    made = plan(log, START_MS, force=True)
    assert made is not None
    left = [3]  # files that can still be synced

    def sync_file(fd: int, path: str) -> None:
        left[0] -= 1
        if left[0] < 0:
            assert cleaned_files(log)
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(made.files, "sync_file", sync_file, raising=False)
    expected = all_records(log)
    with pytest.raises(OSError, match="No space"):
        clean(made)
    assert cleaned_files(log) == []
    assert all_records(log) == expected


def test_compactor_takes_the_dirtiest_log_on_its_own_thread(folder: Folder) -> None:
    clean_log = folder.log("a", cleanup_policy=COMPACT, segment_bytes=400)
    put(clean_log, b"k", b"v")
    dirty = folder.log("b")
    plain = folder.data_dir.create("c", 0, dirty.topic_id, replace(folder.config, cleanup_policy=frozenset({"delete"})))
    for number in range(40):
        put(dirty, b"k", b"%d" % number)
        put(plain, b"k", b"%d" % number)

    async def scenario() -> None:
        compactor = Compactor()
        assert await compactor.run_once(folder.data_dir.logs.values(), START_MS) is dirty
        assert await compactor.run_once(folder.data_dir.logs.values(), START_MS) is None
        compactor.close()

    asyncio.run(scenario())
    assert len(all_records(plain)) == 40
    assert len(all_records(dirty)) < 10


def test_a_batch_that_cannot_be_read_is_kept_as_it_is(folder: Folder) -> None:
    """The disk has it from a broker that did not look inside."""
    from semel.protocol.batch import seal_crc

    log = folder.log(segment_bytes=500)
    garbage = batch([b"x" * 30] * 3, keys=[b"k"] * 3, compression=1)
    garbage[80:90] = b"\xff" * 10
    seal_crc(garbage)
    log.append_records(garbage, now_ms=START_MS)
    for number in range(20):
        put(log, b"k", b"%d" % number)
    log.config = folder.config = replace(folder.config, cleanup_policy=frozenset({"compact"}))
    assert compact(log)
    assert bytes(log.read(0, 1).records) == bytes(garbage)
    assert len(all_headers(log)) < 10


def test_log_append_time_survives_compaction(folder: Folder) -> None:
    log = folder.log(cleanup_policy=COMPACT, segment_bytes=500, message_timestamp_type="LogAppendTime")
    for number in range(20):
        append(log, values=[b"a", b"b"], keys=[b"x%d" % (number % 3), b"y"], timestamp_ms=5, now_ms=START_MS + number)
    before = {record.offset: record for record in all_records(log)}
    assert compact(log)
    after = all_records(log)
    assert len(after) < len(before)
    assert all(before[record.offset] == record for record in after)


def put_in_transaction(
    log: PartitionLog, producer_id: int, sequence: int, key: bytes, value: bytes | None, *, commit: bool
) -> None:
    guard = log.start_verification(producer_id, 0, sequence, supports_epoch_bump=False)
    data = batch([value], keys=[key], producer_id=producer_id, epoch=0, sequence=sequence, transactional=True)
    log.append(memoryview(data), now_ms=START_MS, guard=guard)
    log.append_marker(producer_id, 0, 0, commit=commit, now_ms=START_MS)


def test_an_abort_before_the_dirty_part_does_not_count_for_later_commits(folder: Folder) -> None:
    """The tombstone counted as aborted and did not replace the value, which came back when the tombstone expired."""
    log = folder.log(cleanup_policy=COMPACT, segment_bytes=400, delete_retention_ms=1000)
    put_in_transaction(log, 5, 0, b"aborted", b"x", commit=False)
    put(log, b"gone", b"value")
    log.opened.roll(START_MS)
    assert compact(log)
    assert log.cleaned_offset > 2
    assert log.opened.segments.aborted_in(0, log.cleaned_offset), "the abort must still be in the index"
    put_in_transaction(log, 5, 1, b"gone", None, commit=True)
    log.opened.roll(START_MS)
    assert compact(log)
    assert [record.value for record in all_records(log) if record.key == b"gone"] == [None]
    for _ in range(2):
        put(log, b"other", b"1")
        log.opened.roll(START_MS)
        assert compact(log, START_MS + 10_000)
    assert [record.value for record in all_records(log) if record.key == b"gone"] == []


def test_of_two_aborts_of_a_producer_each_counts_for_its_own_data(folder: Folder) -> None:
    log = folder.log(cleanup_policy=COMPACT, segment_bytes=400, delete_retention_ms=10**9)
    for sequence, commit in enumerate([False, True, False, True]):
        put_in_transaction(log, 5, sequence, b"k%d" % sequence, b"%d" % sequence, commit=commit)
        log.opened.roll(START_MS)
        assert compact(log)
    for _ in range(2):
        put(log, b"other", b"1")
        log.opened.roll(START_MS)
        assert compact(log)
        assert committed_view(log) == {b"k1": b"1", b"k3": b"3", b"other": b"1"}


def damage(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize("position", [16, 20, 200], ids=["magic", "crc", "records"])
def test_a_damaged_segment_is_not_compacted_away(folder: Folder, position: int) -> None:
    """What follows the damage in its segment is whole, and the only copy."""
    log = folder.log(cleanup_policy=COMPACT, segment_bytes=2000)
    for number in range(60):
        put(log, b"key%d" % number, b"%d" % number)
    first = folder.partition_path / "00000000000000000000.log"
    damage(first, position)
    before = first.read_bytes()
    made = plan(log, START_MS, force=True)
    assert made is not None
    with pytest.raises(CorruptBatchError, match=r"00000000000000000000\.log"):
        clean(made)
    assert first.read_bytes() == before


def test_a_log_that_cannot_be_compacted_does_not_stop_the_others(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logs = [folder.log(topic, cleanup_policy=COMPACT, segment_bytes=400) for topic in ("damaged", "unplanned", "sound")]
    for number in range(40):
        for log in logs:
            put(log, b"k", b"%d" % number)
    damaged, unplanned, sound = logs
    put(damaged, b"k", b"more, so that it is the dirtiest")
    damage(Path(damaged.folder, "00000000000000000000.log"), 16)
    real_plan, refused = cleaner_module.plan, []

    def failing_plan(log: PartitionLog, now_ms: int) -> object:
        if log is unplanned:
            refused.append(now_ms)
            raise StorageError(ErrorCode.KAFKA_STORAGE_ERROR, "the disk of the test is broken")
        return real_plan(log, now_ms)

    monkeypatch.setattr(cleaner_module, "plan", failing_plan)

    async def scenario() -> None:
        compactor = Compactor()
        assert await compactor.run_once(iter(logs), START_MS) is sound
        assert await compactor.run_once(logs, START_MS) is None
        assert len(refused) == 1, "it is not tried again at once"
        assert await compactor.run_once(logs, START_MS + cleaner_module.RETRY_MS) is None
        assert len(refused) == 2
        compactor.close()

    asyncio.run(scenario())
    assert len(all_records(sound)) < 10
    assert "damaged-0" in caplog.text
    assert "unplanned-0" in caplog.text


def open_files(folder: Folder) -> int:
    """Open files of the partition; other threads of the test process open and close theirs."""
    opened = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum(os.path.realpath(link).startswith(str(folder.partition_path)) for link in opened)


def test_compaction_leaves_no_file_open(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    log = folder.log(cleanup_policy=COMPACT, segment_bytes=600)
    for number in range(100):
        put(log, b"key%d" % number, b"%d" % number)
    open_before = open_files(folder)
    monkeypatch.setattr(cleaner_module, "KEYS_MAX", 10)
    made = plan(log, START_MS, force=True)
    assert made is not None
    clean(made)
    damage(folder.partition_path / "00000000000000000000.log", 16)
    for _ in range(5):
        with pytest.raises(CorruptBatchError):
            clean(made)
    assert open_files(folder) == open_before


def test_what_comes_after_a_cut_log_counts_as_dirty(folder: Folder) -> None:
    """Records at offsets that were compacted before the log was cut are new: their tombstones must replace values."""
    log = folder.log(cleanup_policy=COMPACT, segment_bytes=400)
    put(log, b"k", b"old")
    for number in range(20):
        put(log, b"k%d" % number, b"v")
    assert compact(log)
    folder.data_dir.checkpoint()
    folder.data_dir.crash()
    for path in sorted(folder.partition_path.glob("*.log"))[1:]:
        path.unlink()
    folder.data_dir = folder._open()
    log = folder.log()
    assert log.end_offset < 20
    put(log, b"k", None)
    for number in range(20):
        put(log, b"new%d" % number, b"v")
    assert compact(log)
    assert [record.value for record in all_records(log) if record.key == b"k"] == [None]
