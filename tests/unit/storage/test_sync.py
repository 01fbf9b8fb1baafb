"""Group commit, and what happens when the disk says no."""

from __future__ import annotations

import asyncio
import errno
import threading
from pathlib import Path

import pytest

from semel.protocol.errors import ErrorCode
from semel.storage import AppendResult, PartitionLog, StorageError
from semel.storage.files import DiskFiles
from tests.support.waiting import PATIENCE_S
from tests.unit.storage.helpers import (
    START_MS,
    Folder,
    all_records,
    append,
    append_in_transaction,
    batch,
    committed_values,
)


class FaultyFiles(DiskFiles):
    """Files on a disk that can be slow, full or broken. Counts what fired."""

    def __init__(self) -> None:
        self.sync_gate: threading.Event | None = None
        self.at_the_gate = threading.Event()
        self.failing_syncs = 0
        self.free_bytes: int | None = None
        self.file_syncs = 0
        self.fired = 0
        self.write_at = self._write_at  # type: ignore[method-assign]

    def sync_file(self, fd: int, path: str) -> None:
        if self.sync_gate is not None and path.endswith(".log"):
            self.at_the_gate.set()
            self.sync_gate.wait(PATIENCE_S)
        self.file_syncs += 1
        if self.failing_syncs and path.endswith(".log"):
            self.failing_syncs -= 1
            self.fired += 1
            raise OSError(errno.EIO, "simulated")
        super().sync_file(fd, path)

    def _write_at(self, fd: int, content: bytes | bytearray | memoryview, position: int) -> int:
        if self.free_bytes is not None:
            if len(content) > self.free_bytes:
                content = memoryview(content)[: self.free_bytes]
                self.fired += 1
            if not len(content):
                raise OSError(errno.ENOSPC, "No space left on device")
            self.free_bytes -= len(content)
        return DiskFiles.write_at(fd, content, position)


@pytest.fixture
def disk() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def slow(tmp_path: Path, disk: FaultyFiles) -> Folder:
    return Folder(tmp_path / "data", fsync="commit", files=lambda: disk)


async def acknowledge(folder: Folder, log: PartitionLog, result: AppendResult) -> None:
    await folder.data_dir._sync.wait(log, result.last_offset + 1)


def test_nothing_is_visible_before_it_is_on_the_disk(slow: Folder, disk: FaultyFiles) -> None:
    async def scenario() -> None:
        log = slow.log()
        disk.sync_gate = threading.Event()
        woken: list[int] = []
        log.on_advance = lambda advanced: woken.append(advanced.high_watermark)
        result = append(log)
        waiting = slow.data_dir._sync.wait(log, result.last_offset + 1)
        assert await asyncio.to_thread(disk.at_the_gate.wait, PATIENCE_S)
        assert not waiting.done()
        assert (log.end_offset, log.high_watermark, woken) == (1, 0, [])
        assert log.read(0, 1000).records == b""
        assert log.read(0, 1000, up_to="last_stable").records == b""
        disk.sync_gate.set()
        await asyncio.wait_for(waiting, PATIENCE_S)
        assert (log.high_watermark, woken) == (1, [1])
        assert len(log.read(0, 1000).records)
        await slow.data_dir._sync.close()

    asyncio.run(scenario())


def test_many_waiting_appends_share_one_fsync(slow: Folder, disk: FaultyFiles) -> None:
    async def scenario() -> None:
        log = slow.log()
        sync = slow.data_dir._sync
        await acknowledge(slow, log, append(log))
        disk.sync_gate = threading.Event()
        logs_before = sync.synced_logs
        first = sync.wait(log, append(log).last_offset + 1)
        assert await asyncio.to_thread(disk.at_the_gate.wait, PATIENCE_S)
        others = [sync.wait(log, append(log).last_offset + 1) for _ in range(500)]
        disk.sync_gate.set()
        await asyncio.wait_for(asyncio.gather(first, *others), PATIENCE_S)
        assert sync.synced_logs - logs_before == 2
        assert log.high_watermark == 502
        await sync.close()

    asyncio.run(scenario())


def test_a_duplicate_waits_for_the_first_time_it_was_written(slow: Folder, disk: FaultyFiles) -> None:
    async def scenario() -> None:
        log = slow.log()
        disk.sync_gate = threading.Event()
        append(log, producer_id=1, epoch=0, sequence=0)
        again = append(log, producer_id=1, epoch=0, sequence=0)
        assert again.duplicate
        waiting = slow.data_dir._sync.wait(log, again.last_offset + 1)
        assert await asyncio.to_thread(disk.at_the_gate.wait, PATIENCE_S)
        assert not waiting.done()
        disk.sync_gate.set()
        await asyncio.wait_for(waiting, PATIENCE_S)
        await slow.data_dir._sync.close()

    asyncio.run(scenario())


def test_a_transaction_is_not_stable_before_its_marker_is_on_the_disk(slow: Folder, disk: FaultyFiles) -> None:
    """Else a power cut would take the marker back, and readers would have seen undecided data."""

    async def scenario() -> None:
        log = slow.log()
        await acknowledge(slow, log, append_in_transaction(log, 1, 0, [b"a"]))
        assert (log.high_watermark, log.last_stable_offset) == (1, 0)
        disk.sync_gate = threading.Event()
        marker = log.append_marker(1, 0, 0, commit=True, now_ms=START_MS)
        assert not log.has_open_transaction(1)
        assert log.last_stable_offset == 0
        assert committed_values(log) == []
        disk.sync_gate.set()
        await acknowledge(slow, log, marker)
        assert log.last_stable_offset == 2
        assert committed_values(log) == [b"a"]
        await slow.data_dir._sync.close()

    asyncio.run(scenario())


def test_a_failed_fsync_is_never_success_and_what_it_covered_is_discarded(slow: Folder, disk: FaultyFiles) -> None:
    async def scenario() -> None:
        log = slow.log()
        await acknowledge(slow, log, append(log, values=[b"safe"], producer_id=1, epoch=0, sequence=0))
        disk.failing_syncs = 1
        lost = [append(log, values=[b"lost"], producer_id=1, epoch=0, sequence=number) for number in (1, 2)]
        outcomes = await asyncio.gather(*(acknowledge(slow, log, result) for result in lost), return_exceptions=True)
        assert disk.fired == 1
        for outcome in outcomes:
            assert isinstance(outcome, StorageError)
            assert outcome.code is ErrorCode.KAFKA_STORAGE_ERROR
        # The producer sends again; the log recovered itself and knows nothing of the lost batches.
        again = append(log, values=[b"again"], producer_id=1, epoch=0, sequence=1)
        assert not again.duplicate
        await acknowledge(slow, log, again)
        assert [record.value for record in all_records(log)] == [b"safe", b"again"]
        await slow.data_dir._sync.close()

    asyncio.run(scenario())


def test_a_log_stays_offline_while_the_disk_is_broken(slow: Folder, disk: FaultyFiles) -> None:
    async def scenario() -> None:
        log = slow.log()
        await acknowledge(slow, log, append(log, values=[b"safe"]))
        disk.failing_syncs = 3
        result = append(log, values=[b"lost"])
        with pytest.raises(StorageError):
            await acknowledge(slow, log, result)
        for _ in range(2):
            with pytest.raises(StorageError) as refused:
                append(log)
            assert refused.value.code is ErrorCode.KAFKA_STORAGE_ERROR
        assert disk.fired == 3
        await acknowledge(slow, log, append(log, values=[b"back"]))
        assert [record.value for record in all_records(log)] == [b"safe", b"back"]
        await slow.data_dir._sync.close()

    asyncio.run(scenario())


def test_full_disk_refuses_and_goes_on_when_there_is_space_again(
    slow: Folder, disk: FaultyFiles, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        log = slow.log()
        await acknowledge(slow, log, append(log, values=[b"before"], producer_id=1, epoch=0, sequence=0))
        size = log.size_bytes
        for free_bytes in (0, 1, 30, 60, 70):
            disk.free_bytes = free_bytes
            with pytest.raises(StorageError) as refused:
                append(log, values=[b"x" * 100], producer_id=1, epoch=0, sequence=1)
            assert refused.value.code is ErrorCode.KAFKA_STORAGE_ERROR
            assert (folder_size(log), log.size_bytes, log.end_offset) == (size, size, 1)
        assert disk.fired
        (said,) = [record for record in caplog.records if "No space left on device" in record.getMessage()]
        assert said.levelname == "ERROR", "said once, not at each of the tries"
        disk.free_bytes = None
        await acknowledge(slow, log, append(log, values=[b"after"], producer_id=1, epoch=0, sequence=1))
        assert [record.value for record in all_records(log)] == [b"before", b"after"]
        await slow.data_dir._sync.close()
        assert [record.value for record in all_records(slow.restart(clean=False))] == [b"before", b"after"]

    asyncio.run(scenario())


def folder_size(log: PartitionLog) -> int:
    return Path(log.segments[-1].log.path).stat().st_size


def test_full_disk_while_rolling_or_aborting_leaves_the_log_as_it_was(slow: Folder, disk: FaultyFiles) -> None:
    async def scenario() -> None:
        log = slow.log(segment_bytes=400)
        append_in_transaction(log, 2, 0, [b"t" * 100])
        append(log, values=[b"x" * 100])
        disk.free_bytes = 0
        with pytest.raises(StorageError):
            append(log, values=[b"y" * 200])  # needs a new segment, and its snapshot
        with pytest.raises(StorageError):
            log.append_marker(2, 0, 0, commit=False, now_ms=START_MS)
        disk.free_bytes = 40  # enough for the index entry, not for the marker
        with pytest.raises(StorageError):
            log.append_marker(2, 0, 0, commit=False, now_ms=START_MS)
        assert log.opened.segments.aborted_in(0, 100) == []
        assert log.has_open_transaction(2)
        disk.free_bytes = None
        await acknowledge(slow, log, append(log, values=[b"y" * 200]))
        await acknowledge(slow, log, log.append_marker(2, 0, 0, commit=False, now_ms=START_MS))
        assert committed_values(log) == [b"x" * 100, b"y" * 200]
        await slow.data_dir._sync.close()
        assert committed_values(slow.restart(clean=False)) == [b"x" * 100, b"y" * 200]

    asyncio.run(scenario())


def test_retention_frees_a_full_disk_although_all_records_are_too_old(slow: Folder, disk: FaultyFiles) -> None:
    """The last segment goes once there is space for a new one, which needs a snapshot."""
    log = slow.log(segment_bytes=400, retention_ms=1000)
    for _ in range(4):
        append(log, values=[b"x" * 200])
    log.flush()
    disk.free_bytes = 0
    assert log.apply_retention(START_MS + 10**9) == 3
    assert [segment.base_offset for segment in log.segments] == [3]
    with pytest.raises(StorageError):
        log.apply_retention(START_MS + 10**9)
    disk.free_bytes = None
    assert log.apply_retention(START_MS + 10**9) == 1
    assert (log.start_offset, log.end_offset) == (4, 4)


def test_fsync_os_acknowledges_at_once_and_syncs_finished_segments(tmp_path: Path, disk: FaultyFiles) -> None:
    async def scenario() -> None:
        folder = Folder(tmp_path / "data", fsync="os", files=lambda: disk)
        log = folder.log(segment_bytes=400)
        for number in range(10):
            result = append(log, values=[b"x" * 100])
            assert log.high_watermark == number + 1
            assert folder.data_dir._sync.wait(log, result.last_offset + 1).done()
        await folder.data_dir._sync.close()
        assert log.recovery_point == log.segments[-1].base_offset > 0
        assert disk.file_syncs
        folder.data_dir.crash()

    asyncio.run(scenario())


def test_two_hundred_logs_are_synced_once_each(slow: Folder) -> None:
    async def scenario() -> None:
        logs = [slow.log(f"topic{number}") for number in range(200)]
        sync = slow.data_dir._sync
        await asyncio.gather(*(sync.wait(log, append(log).last_offset + 1) for log in logs))
        assert sync.synced_logs == 200
        assert all(log.high_watermark == 1 for log in logs)
        await sync.close()

    asyncio.run(scenario())


def test_waiting_for_a_deleted_partition_ends_with_an_error(slow: Folder, disk: FaultyFiles) -> None:
    async def scenario() -> None:
        log = slow.log()
        disk.sync_gate = threading.Event()
        waiting = slow.data_dir._sync.wait(log, append(log).last_offset + 1)
        assert await asyncio.to_thread(disk.at_the_gate.wait, PATIENCE_S)
        slow.data_dir.delete("t", 0)
        with pytest.raises(StorageError) as refused:
            await waiting
        assert refused.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        disk.sync_gate.set()
        await slow.data_dir._sync.close()

    asyncio.run(scenario())


def test_few_open_files_serve_many_logs(tmp_path: Path) -> None:
    from semel.storage import DataDir, LogConfig, SyncGroup
    from tests.unit.storage.helpers import TOPIC_ID

    async def scenario() -> None:
        data_dir = DataDir.open(tmp_path / "data", sync=SyncGroup("commit"), open_files_max=8)
        logs = [data_dir.create(f"t{number}", 0, TOPIC_ID, LogConfig()) for number in range(50)]
        for number in range(3):
            results = [log.append(memoryview(batch([b"%d" % number])), now_ms=START_MS) for log in logs]
            await asyncio.gather(
                *(data_dir._sync.wait(log, r.last_offset + 1) for log, r in zip(logs, results, strict=True))
            )
        for log in logs:
            assert [record.value for record in all_records(log)] == [b"0", b"1", b"2"]
        assert len(logs[0]._shared.cache._open) <= 8
        await data_dir._sync.close()
        data_dir.close()

    asyncio.run(scenario())


def test_a_late_request_does_not_reopen_a_closed_or_deleted_log(slow: Folder) -> None:
    async def scenario() -> None:
        deleted, closed = slow.log("deleted"), slow.log("closed")
        for log in (deleted, closed):
            await acknowledge(slow, log, append(log))
        slow.data_dir.delete("deleted", 0)
        new = slow.log("deleted")
        assert new.end_offset == 0
        with pytest.raises(StorageError) as refused:
            append(deleted)
        assert refused.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        with pytest.raises(StorageError):
            await slow.data_dir._sync.wait(deleted, 5)
        await slow.data_dir._sync.close()
        slow.data_dir.close()
        with pytest.raises(StorageError) as refused:
            closed.read(0, 100)
        assert refused.value.code is ErrorCode.KAFKA_STORAGE_ERROR

    asyncio.run(scenario())


def test_a_callback_that_fails_does_not_stop_the_syncing(slow: Folder) -> None:
    async def scenario() -> None:
        bad, good = slow.log("bad"), slow.log("good")

        def fail(_: PartitionLog) -> None:
            raise RuntimeError("simulated")

        bad.on_advance = fail
        append(bad)
        for _ in range(3):
            await asyncio.wait_for(acknowledge(slow, good, append(good)), PATIENCE_S)
        await slow.data_dir._sync.close()  # waits for the sync of each
        assert bad.high_watermark == 1

    asyncio.run(scenario())


def test_no_file_handles_left_is_a_storage_error_not_a_standstill(slow: Folder, disk: FaultyFiles) -> None:
    async def scenario() -> None:
        log, other = slow.log(), slow.log("other")
        result = append(log)
        log._shared.cache.close(log.segments[-1].log)
        real_open = disk.open

        def no_handles(path: str, *, create: bool = True) -> int:
            if path.startswith(log.folder):
                disk.fired += 1
                raise OSError(errno.EMFILE, "simulated")
            return real_open(path, create=create)

        disk.open = no_handles  # type: ignore[method-assign]
        with pytest.raises(StorageError) as refused:
            await asyncio.wait_for(acknowledge(slow, log, result), PATIENCE_S)
        assert refused.value.code is ErrorCode.KAFKA_STORAGE_ERROR
        assert disk.fired
        await asyncio.wait_for(acknowledge(slow, other, append(other)), PATIENCE_S)
        disk.open = real_open  # type: ignore[method-assign]
        await asyncio.wait_for(acknowledge(slow, log, append(log)), PATIENCE_S)
        await slow.data_dir._sync.close()

    asyncio.run(scenario())


def test_flush_messages_syncs_in_the_background_under_fsync_os(tmp_path: Path, disk: FaultyFiles) -> None:
    async def scenario() -> None:
        folder = Folder(tmp_path / "data", fsync="os", files=lambda: disk)
        log = folder.log(flush_messages=3)
        append(log)
        append(log)
        await folder.data_dir._sync.close()
        before = disk.file_syncs
        append(log)
        await folder.data_dir._sync.close()
        assert disk.file_syncs > before
        folder.data_dir.crash()

    asyncio.run(scenario())


def test_one_broken_partition_does_not_keep_the_others_from_starting(slow: Folder, disk: FaultyFiles) -> None:
    for topic in ("broken", "sound"):
        append(slow.log(topic))
        slow.log(topic).flush()
    slow.data_dir.crash()
    folder = slow.path / "broken-0"
    folder.chmod(0o000)
    real_scandir_fails = not _can_list(folder)
    if not real_scandir_fails:  # root may read everything: break it another way
        folder.chmod(0o755)
        segment = folder / f"{0:020d}.log"
        segment.unlink()
        segment.symlink_to(folder / "nowhere" / "at" / "all")
    slow.data_dir = slow._open()
    assert slow.log("sound").end_offset == 1
    slow.data_dir.crash()
    folder.chmod(0o755)


def _can_list(folder: Path) -> bool:
    try:
        list(folder.iterdir())
    except PermissionError:
        return False
    return True
