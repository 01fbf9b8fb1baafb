"""kill -9 leaves the page cache alive; a power cut does not. What was acknowledged under fsync=commit survives both."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from semel import faults
from semel.prove.injection import Injection, ProcessInjector
from semel.prove.powercut import JournaledFiles, cut_power, side_folder
from semel.storage import LogConfig, PartitionLog, StorageError
from semel.storage.files import DiskFiles, files_for
from tests.simulation.disk import SimulatedDisk
from tests.unit.storage.helpers import START_MS, Folder, all_records, append, append_in_transaction, committed_values


class OutageFiles(JournaledFiles):
    """From the outage on nothing reaches the disk, whatever the dying process still tries."""

    outage = False

    def sync_file(self, fd: int, path: str) -> None:
        if not self.outage:
            super().sync_file(fd, path)

    def sync_dir(self, path: str) -> None:
        if not self.outage:
            super().sync_dir(path)


class HastyFiles(OutageFiles):
    """The mutant: says that it synced, and did not."""

    def sync_file(self, fd: int, path: str) -> None:
        return


def commit_folder(path: Path, files: type[JournaledFiles] = OutageFiles) -> Folder:
    return Folder(path, fsync="commit", files=lambda: files(path, real_sync=False))


def restart_after_cut(folder: Folder, luck: random.Random | None = None) -> tuple[PartitionLog, int]:
    folder.data_dir.crash()
    lost_bytes = cut_power(folder.path, luck)
    folder.data_dir = folder._open()
    return folder.log(), lost_bytes


async def load(folder: Folder, luck: random.Random, sent: int) -> int:
    """Appends for a while, acknowledging some; returns how many records are acknowledged."""
    log = folder.log(segment_bytes=1200, index_interval_bytes=100)
    acknowledged = log.high_watermark
    for _ in range(luck.randint(5, 40)):
        append(log, values=[b"%d" % sent], producer_id=1, epoch=0, sequence=sent)
        sent += 1
        if luck.random() < 0.3:
            await folder.data_dir._sync.wait(log, sent)
            acknowledged = sent
        if luck.random() < 0.1:
            folder.data_dir.checkpoint()
    folder.data_dir.files.outage = True  # type: ignore[attr-defined]
    return acknowledged


def campaign(path: Path, files: type[OutageFiles], rounds: int, seed: int) -> tuple[int, int]:
    """Rounds of load and power cut. Returns (acknowledged records lost, bytes taken back by the cuts)."""
    luck = random.Random(seed)
    folder = commit_folder(path, files)
    folder.log()
    folder.data_dir.sync_namespace()
    lost_records = taken_bytes = sent = 0
    for _ in range(rounds):
        acknowledged = asyncio.run(load(folder, luck, sent))
        log, lost_bytes = restart_after_cut(folder, luck if luck.random() < 0.5 else None)
        taken_bytes += lost_bytes
        values = [record.value for record in all_records(log)]
        lost_records += max(0, acknowledged - len(values))
        assert values == [b"%d" % number for number in range(len(values))], "doubled or out of order"
        sent = len(values)
        if lost_records:
            break
    folder.data_dir.crash()
    return lost_records, taken_bytes


def test_acknowledged_records_survive_power_cuts(tmp_path: Path) -> None:
    outcomes = [campaign(tmp_path / f"data{seed}", OutageFiles, rounds=10, seed=seed) for seed in range(5)]
    assert all(taken_bytes > 0 for _, taken_bytes in outcomes), "a cut that takes nothing shows nothing"
    assert [lost for lost, _ in outcomes] == [0] * 5


def test_a_broker_that_answers_before_the_fsync_is_caught(tmp_path: Path) -> None:
    lost, _ = campaign(tmp_path / "data", HastyFiles, rounds=10, seed=1)
    assert lost > 0


def test_what_a_failed_fsync_left_in_the_page_cache_is_written_again(tmp_path: Path) -> None:
    """The run that saw the failure is killed; the next one finds the records, shows them, and must have them stored."""
    path = tmp_path / "data"
    disk = SimulatedDisk(path, lambda _: None)
    folder = Folder(path, fsync="commit", files=lambda: disk.files(path))
    log = folder.log()
    folder.data_dir.sync_namespace()
    append(log, values=[b"stored"])
    log.flush()
    append(log, values=[b"in doubt"])
    disk.failing_syncs = 1
    with pytest.raises(StorageError):
        log.flush()
    assert disk.failures == 1
    folder.data_dir.crash()
    folder.data_dir = folder._open()
    assert [record.value for record in all_records(folder.log())] == [b"stored", b"in doubt"]
    folder.data_dir.crash()
    disk.cut_power(None)
    folder.data_dir = folder._open()
    assert [record.value for record in all_records(folder.log())] == [b"stored", b"in doubt"]


def test_fsync_os_loses_what_was_not_synced(tmp_path: Path) -> None:
    """What the setting says: it survives kill -9, not a power cut."""
    path = tmp_path / "data"
    folder = Folder(path, fsync="os", files=lambda: JournaledFiles(path))
    append(folder.log())
    folder.data_dir.sync_namespace()
    log, lost_bytes = restart_after_cut(folder)
    assert lost_bytes > 0
    assert log.end_offset == 0


def test_the_first_batch_of_a_new_partition_makes_the_partition_durable(tmp_path: Path) -> None:
    """Nobody called sync_namespace: still nothing that was acknowledged may vanish with its folder."""
    folder = commit_folder(tmp_path / "data")
    append(folder.log(), values=[b"first"])
    folder.log().flush()
    folder.data_dir.files.outage = True  # type: ignore[attr-defined]
    log, _ = restart_after_cut(folder)
    assert [record.value for record in all_records(log)] == [b"first"]
    folder.data_dir.crash()


def test_a_transaction_is_decided_or_open_after_a_power_cut_but_never_half(tmp_path: Path) -> None:
    async def scenario(folder: Folder, luck: random.Random) -> list[bytes]:
        log = folder.log(segment_bytes=900)
        folder.data_dir.sync_namespace()
        promised: list[bytes] = []
        for number in range(30):
            values = [b"%d-%d" % (number, part) for part in range(luck.randint(1, 4))]
            result = append_in_transaction(log, 100 + number, 0, values)
            if luck.random() < 0.8:
                commit = luck.random() < 0.6
                result = log.append_marker(100 + number, 0, 0, commit=commit, now_ms=START_MS)
                if luck.random() < 0.5:
                    await folder.data_dir._sync.wait(log, result.last_offset + 1)
                    promised += values if commit else []
        folder.data_dir.files.outage = True  # type: ignore[attr-defined]
        return promised

    for seed in range(10):
        path = tmp_path / f"data{seed}"
        folder = commit_folder(path)
        luck = random.Random(seed)
        promised = asyncio.run(scenario(folder, luck))
        log, _ = restart_after_cut(folder, luck)
        decided = committed_values(log)
        for info in list(log.states.producers.values()):
            if info.txn_first_offset >= 0:
                log.append_marker(info.producer_id, info.epoch, 1, commit=False, now_ms=START_MS)
        log.flush()
        seen = committed_values(log)
        assert seen[: len(decided)] == decided
        assert set(promised) <= set(seen)
        for number in range(30):
            whole = [value for value in seen if value is not None and value.startswith(b"%d-" % number)]
            assert whole == [b"%d-%d" % (number, part) for part in range(len(whole))]
        folder.data_dir.crash()


def test_replaced_and_removed_files_come_back_if_their_folder_was_not_synced(tmp_path: Path) -> None:
    root = tmp_path / "data"
    root.mkdir()
    (root / "old").write_bytes(b"first")
    files = JournaledFiles(root)
    files.write_whole(str(root / "old"), b"second", sync=False)
    files.write_whole(str(root / "new"), b"third", sync=False)
    (root / "kept-stranger").write_bytes(b"not ours")
    cut_power(root)
    assert {path.name: path.read_bytes() for path in root.iterdir()} == {"old": b"first", "kept-stranger": b"not ours"}
    files = JournaledFiles(root)
    files.write_whole(str(root / "old"), b"fourth")
    files.remove(str(root / "kept-stranger"))
    cut_power(root)
    assert {path.name: path.read_bytes() for path in root.iterdir()} == {"old": b"fourth", "kept-stranger": b"not ours"}
    files = JournaledFiles(root)
    files.make_dir(str(root / "sub"))
    files.write_whole(str(root / "sub" / "file"), b"x")
    cut_power(root)
    assert not (root / "sub").exists()


def test_renamed_folder_goes_back_if_its_parent_was_not_synced(tmp_path: Path) -> None:
    root = tmp_path / "data"
    folder = commit_folder(root)
    append(folder.log())
    folder.data_dir.sync_namespace()
    folder.log().flush()
    folder.data_dir.delete("t", 0)
    log, _ = restart_after_cut(folder)
    assert log.end_offset == 1
    folder.data_dir.delete("t", 0)
    folder.data_dir.sync_namespace()
    folder.data_dir.crash()
    cut_power(root)
    assert not (root / "t-0").exists()
    folder.data_dir = folder._open()


CHILD = """
import asyncio, sys
from uuid import UUID
from semel.prove.injection import Injection
from semel.storage import DataDir, LogConfig, SyncGroup
from semel.protocol.rows import Record, encode_batch

async def main(path):
    sync = SyncGroup("commit")
    data_dir = DataDir.open(path, sync=sync, config_of=lambda _: LogConfig(segment_bytes=4000))
    log = data_dir.get("t", 0) or data_dir.create("t", 0, UUID(int=1), LogConfig(segment_bytes=4000))
    data_dir.sync_namespace()
    while True:
        for _ in range(3):
            number = log.end_offset
            batch = encode_batch([Record(0, 1_700_000_000_000, b"k", b"%d" % number)], producer_id=1, producer_epoch=0,
                                 base_sequence=number)
            log.append(memoryview(batch), now_ms=1_700_000_000_000)
        print(log.high_watermark, flush=True)  # safe, while the three batches above are not
        await sync.wait(log, log.end_offset)

Injection(power_cut=True).install()
asyncio.run(main(sys.argv[1]))
"""


def test_a_killed_process_and_a_power_cut_lose_nothing_acknowledged(tmp_path: Path) -> None:
    """A real process, kill -9, then its unsynced bytes are taken back."""
    path = tmp_path / "data"
    luck = random.Random(3)
    acknowledged = taken_bytes = 0
    for _ in range(5):
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        for _ in range(luck.randint(5, 60)):
            acknowledged = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read().split()
        child.wait()
        acknowledged = max([acknowledged, *map(int, rest)])
        assert side_folder(path).exists()
        taken_bytes += cut_power(path)
        folder = Folder(path)
        folder.config = LogConfig(segment_bytes=4000)
        values = [record.value for record in all_records(folder.log())]
        assert values == [b"%d" % number for number in range(len(values))]
        assert len(values) >= acknowledged
        folder.data_dir.crash()
    assert taken_bytes > 0


def test_the_journal_is_off_unless_it_is_injected(tmp_path: Path) -> None:
    assert type(files_for(tmp_path)) is DiskFiles
    assert DiskFiles.write_at is os.pwrite
    assert DiskFiles.read_at is os.pread
    assert not side_folder(tmp_path).exists()
    faults.install(ProcessInjector(Injection(power_cut=True)))
    try:
        assert type(files_for(tmp_path)) is JournaledFiles
    finally:
        faults.install(None)
    shutil.rmtree(side_folder(tmp_path))
