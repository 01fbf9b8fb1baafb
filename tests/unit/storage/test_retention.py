"""What goes when: by time, by size, by DeleteRecords; never what readers could not see yet."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from semel.protocol.errors import ErrorCode
from semel.storage import StorageError
from semel.storage.checkpoints import RECOVERY_POINTS, read_offsets
from tests.unit.storage.helpers import (
    START_MS,
    Folder,
    all_records,
    append,
    append_in_transaction,
    find_producer,
    newest_record,
)

FOREVER = -1


def fill(folder: Folder, count: int = 40, **settings: object):
    log = folder.log(segment_bytes=500, **settings)
    for number in range(count):
        append(log, values=[b"x" * 50], timestamp_ms=START_MS + number * 1000)
    return log


def test_segments_older_than_retention_ms_go(folder: Folder) -> None:
    log = fill(folder, retention_ms=10_000)
    bases = [segment.base_offset for segment in log.segments]
    now_ms = START_MS + 25_000
    kept = [base for base, after in zip(bases, [*bases[1:], 40], strict=True) if after - 1 >= 15]
    assert log.apply_retention(now_ms) == len(bases) - len(kept)
    assert log.start_offset == kept[0]
    assert [record.offset for record in all_records(log)] == list(range(kept[0], 40))
    with pytest.raises(StorageError) as refused:
        log.read(0, 100)
    assert refused.value.code is ErrorCode.OFFSET_OUT_OF_RANGE


def test_everything_too_old_leaves_an_empty_log_that_goes_on(folder: Folder) -> None:
    log = fill(folder, retention_ms=10_000)
    log.apply_retention(START_MS + 10**9)
    assert (log.start_offset, log.end_offset, log.size_bytes) == (40, 40, 0)
    assert log.apply_retention(START_MS + 10**9) == 0
    for clean in (False, True):
        log = folder.restart(clean=clean)
        assert (log.start_offset, log.end_offset) == (40, 40)
    assert append(log).base_offset == 40


def test_segments_beyond_retention_bytes_go(folder: Folder) -> None:
    log = fill(folder, retention_ms=FOREVER, retention_bytes=1500)
    log.apply_retention(START_MS)
    assert 1500 <= log.size_bytes < 2000
    assert log.end_offset == 40


def test_retention_is_off_when_negative_and_for_compacted_topics(folder: Folder) -> None:
    log = fill(folder, retention_ms=FOREVER, retention_bytes=-1)
    assert log.apply_retention(START_MS + 10**12) == 0
    log.config = replace(log.config, cleanup_policy=frozenset({"compact"}), retention_ms=1, retention_bytes=1)
    assert log.apply_retention(START_MS + 10**12) == 0


def test_delete_records_raises_the_start_and_frees_segments(folder: Folder) -> None:
    log = fill(folder, retention_ms=FOREVER)
    assert log.delete_records(17) == 17
    assert log.delete_records(5) == 17
    assert next(record.offset for record in all_records(log)) == 17
    assert log.apply_retention(START_MS) > 0
    assert log.segments[0].base_offset <= 17 < log.segments[1].base_offset
    with pytest.raises(StorageError) as refused:
        log.delete_records(41)
    assert refused.value.code is ErrorCode.OFFSET_OUT_OF_RANGE
    assert log.delete_records(-1) == 40


@pytest.mark.parametrize("segment_bytes", [500, 1 << 20])
def test_highest_timestamp_is_one_of_those_that_are_left(folder: Folder, segment_bytes: int) -> None:
    log = folder.log(segment_bytes=segment_bytes, retention_ms=FOREVER)
    for after_ms in (0, 9000, 1000, 3000, 2000, 3000):
        append(log, values=[b"x" * 50], timestamp_ms=START_MS + after_ms)
    left = []
    for start in range(7):
        log.delete_records(start)
        newest = newest_record(log)
        left.append(None if newest is None else (newest.timestamp_ms - START_MS, newest.offset))
    assert left == [(9000, 1), (9000, 1), (3000, 3), (3000, 3), (3000, 5), (3000, 5), None]


@pytest.mark.parametrize("clean", [True, False])
def test_deleted_records_stay_deleted_after_a_restart(folder: Folder, clean: bool) -> None:
    log = fill(folder, retention_ms=FOREVER)
    log.delete_records(17)
    folder.data_dir.checkpoint()
    log = folder.restart(clean=clean)
    assert log.start_offset == 17


def test_a_checkpoint_that_was_taken_earlier_does_not_bring_deleted_records_back(folder: Folder) -> None:
    log = fill(folder, retention_ms=FOREVER)
    log.delete_records(5)
    write = folder.data_dir.take_checkpoint()
    log.delete_records(17)
    write()  # a thread that had to wait for the disk
    assert folder.restart(clean=False).start_offset == 17


def test_a_checkpoint_on_its_way_does_not_give_a_new_partition_the_offsets_of_a_deleted_one(folder: Folder) -> None:
    log = fill(folder, retention_ms=FOREVER)
    log.recovery_point = log.end_offset  # as after a sync
    write = folder.data_dir.take_checkpoint()
    folder.data_dir.delete("t", 0)
    fresh = folder.log()
    folder.data_dir.drop_stale_checkpoints()
    write()  # a thread that had to wait for the disk
    assert fresh.recovery_point == 0
    assert not read_offsets(str(folder.path / RECOVERY_POINTS)).get(("t", 0))


def test_files_are_renamed_at_once_and_removed_later(folder: Folder) -> None:
    log = fill(folder, retention_ms=10_000, file_delete_delay_ms=60_000)
    now_ms = START_MS + 10**9
    count = log.apply_retention(now_ms)
    doomed = list(folder.partition_path.glob("*.deleted"))
    assert len(doomed) >= 3 * count
    list(folder.data_dir.garbage_removal(now_ms + 59_999))
    assert len(list(folder.partition_path.glob("*.deleted"))) == len(doomed)
    list(folder.data_dir.garbage_removal(now_ms + 60_000))
    assert not list(folder.partition_path.glob("*.deleted"))


def test_leftover_deleted_files_are_removed_at_the_next_start(folder: Folder) -> None:
    log = fill(folder, retention_ms=10_000)
    log.apply_retention(START_MS + 10**9)
    assert list(folder.partition_path.glob("*.deleted"))
    assert folder.restart(clean=False).is_open
    assert not list(folder.partition_path.glob("*.deleted"))


def test_what_is_not_yet_visible_is_not_deleted(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "data", fsync="commit")
    log = fill(folder, retention_ms=1)
    assert log.high_watermark == 0
    assert log.apply_retention(START_MS + 10**9) == 0
    log.flush()
    assert log.apply_retention(START_MS + 10**9) > 0
    folder.data_dir.crash()


def test_producers_and_transactions_survive_the_deletion_of_their_segments(folder: Folder) -> None:
    log = folder.log(segment_bytes=500, retention_ms=FOREVER)
    append(log, producer_id=1, epoch=0, sequence=0)
    append_in_transaction(log, 2, 0)
    for _ in range(30):
        append(log, values=[b"x" * 50])
    log.delete_records(20)
    log.apply_retention(START_MS)
    assert log.last_stable_offset == 20  # the transaction is still open, its data is gone
    assert append(log, producer_id=1, epoch=0, sequence=0).duplicate
    log = folder.restart(clean=False)
    assert append(log, producer_id=1, epoch=0, sequence=0).duplicate
    log.append_marker(2, 0, 0, commit=False, now_ms=START_MS)
    assert log.last_stable_offset == log.end_offset


def test_upkeep_covers_every_log_and_writes_the_checkpoints(folder: Folder) -> None:
    log = fill(folder, retention_ms=10_000, producer_id_expiration_ms=1000)
    append(log, producer_id=1, epoch=0, sequence=0, timestamp_ms=START_MS + 10**7, now_ms=START_MS + 10**7)
    folder.maintain(START_MS + 10**7)
    assert log.start_offset > 0
    assert find_producer(log, 1) is not None
    folder.maintain(START_MS + 10**7 + 1000)
    assert find_producer(log, 1) is None
    lines = (folder.path / "log-start-offset-checkpoint").read_text().splitlines()
    assert lines == ["0", "1", f"t 0 {log.start_offset}"]
    assert (folder.path / "replication-offset-checkpoint").read_text() == f"0\n1\nt 0 {log.high_watermark}\n"


def test_retention_while_a_sync_runs_closes_no_file_under_it(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "data", fsync="commit")

    async def scenario() -> None:
        log = fill(folder, retention_ms=10_000)
        await folder.data_dir._sync.wait(log, log.end_offset)
        append(log, timestamp_ms=START_MS + 40_000)
        log.opened.roll(START_MS)
        job = log.begin_sync()
        log.apply_retention(START_MS + 10**9)
        assert log.run_sync(job) is None
        assert log.end_sync(job, None) is None
        assert log.high_watermark == log.end_offset == 41
        await folder.data_dir._sync.close()

    asyncio.run(scenario())
    folder.data_dir.crash()


@pytest.mark.parametrize("entry", [bytes(12), struct.pack(">qi", START_MS - 10**6, 0)], ids=["zeros", "too early"])
def test_a_damaged_time_index_makes_no_segment_old(folder: Folder, entry: bytes) -> None:
    log = folder.log(segment_bytes=400, retention_ms=1000)
    for number in range(20):
        append(log, values=[b"%d" % number])
    folder.data_dir.close()
    damaged = 0
    for path in folder.partition_path.glob("*.timeindex"):
        damaged += path.stat().st_size
        path.write_bytes(entry * (path.stat().st_size // 12))
    assert damaged, "the fault did not fire"
    folder.data_dir = folder._open()
    log = folder.log()
    assert log.apply_retention(START_MS + 900) == 0
    assert len(all_records(log)) == 20
    assert log.apply_retention(START_MS + 5000) > 0
