"""The data folder: one owner, many partitions, quick to open."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from uuid import UUID

import pytest

from semel.protocol.errors import ErrorCode
from semel.storage import DataDir, DataDirLockedError, LogConfig, StorageError, SyncGroup
from semel.storage.data_dir import parse_folder_name
from tests.unit.storage.helpers import START_MS, TOPIC_ID, Folder, all_records, append

TRY_TO_OPEN = """
import sys
from semel.storage import DataDir, DataDirLockedError, SyncGroup
try:
    DataDir.open(sys.argv[1], sync=SyncGroup("os"))
except DataDirLockedError as error:
    print(error)
    sys.exit(3)
"""


def test_a_second_process_is_refused_with_a_clear_message(folder: Folder) -> None:
    second = subprocess.run(
        [sys.executable, "-c", TRY_TO_OPEN, str(folder.path)], capture_output=True, text=True, check=False
    )
    assert second.returncode == 3, second.stderr
    assert str(folder.path) in second.stdout
    assert "in use by another broker" in second.stdout


def test_a_second_broker_in_this_process_is_refused_too(folder: Folder) -> None:
    with pytest.raises(DataDirLockedError):
        DataDir.open(folder.path, sync=SyncGroup("os"))
    folder.data_dir.close()
    DataDir.open(folder.path, sync=SyncGroup("os")).close()


def test_partitions_are_found_again_with_their_ids_and_settings(folder: Folder) -> None:
    for topic in ("a", "b-with-dash", "c.d_e"):
        folder.data_dir.create(topic, 3, TOPIC_ID, LogConfig())
    folder.config = LogConfig(segment_bytes=777)
    folder.restart(clean=True)
    assert sorted(key for key in folder.data_dir.logs if key != ("t", 0)) == [
        ("a", 3),
        ("b-with-dash", 3),
        ("c.d_e", 3),
    ]
    log = folder.data_dir.logs["b-with-dash", 3]
    assert log.topic_id == TOPIC_ID
    assert log.config.segment_bytes == 777


def test_partition_metadata_is_written_as_kafka_does(folder: Folder) -> None:
    folder.data_dir.create("x", 0, UUID(int=0xFFFE_1234 << 64), LogConfig())
    assert (folder.path / "x-0" / "partition.metadata").read_text() == "version: 0\ntopic_id: AAAAAP_-EjQAAAAAAAAAAA"


@pytest.mark.parametrize("name", ["orders", "orders-", "-1", "orders-x", "orders-1.2", "orders-٣"])
def test_other_folders_are_no_partitions(name: str) -> None:
    assert parse_folder_name(name) is None


def test_folders_that_are_no_partitions_are_left_alone(folder: Folder) -> None:
    for name in ("lost+found", "nometadata-0", "x-1"):
        (folder.path / name).mkdir()
    (folder.path / "x-1" / "partition.metadata").write_text("rubbish")
    folder.data_dir.crash()
    folder.data_dir = folder._open()
    assert folder.data_dir.logs == {}
    assert (folder.path / "nometadata-0").is_dir()


def test_only_what_was_deleted_here_goes_with_the_deletions(folder: Folder) -> None:
    names = ("do-not-delete", "orders-0.backup-delete", "orders-0-delete")
    for name in names:
        (folder.path / name).mkdir()
        (folder.path / name / "00000000000000000000.log").write_bytes(b"precious")
    folder.data_dir.crash()
    folder.data_dir = folder._open()
    folder.maintain(START_MS)
    assert all((folder.path / name).is_dir() for name in names)


def test_create_refuses_what_exists(folder: Folder) -> None:
    folder.log()
    with pytest.raises(StorageError) as refused:
        folder.data_dir.create("t", 0, TOPIC_ID, LogConfig())
    assert refused.value.code is ErrorCode.TOPIC_ALREADY_EXISTS


def test_deleted_partition_is_gone_at_once_and_its_files_later(folder: Folder) -> None:
    append(folder.log())
    folder.data_dir.delete("t", 0)
    assert folder.data_dir.get("t", 0) is None
    assert not folder.partition_path.exists()
    assert [path.name.endswith("-delete") for path in folder.path.iterdir() if path.is_dir()] == [True]
    fresh = folder.log()
    assert fresh.end_offset == 0
    folder.maintain(START_MS + 60_000)
    assert [path.name for path in folder.path.iterdir() if path.is_dir()] == ["t-0"]
    with pytest.raises(StorageError) as refused:
        folder.data_dir.delete("nope", 0)
    assert refused.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_leftovers_of_a_deletion_are_removed_after_a_restart(folder: Folder) -> None:
    append(folder.log())
    folder.data_dir.delete("t", 0)
    folder.data_dir.crash()
    folder.data_dir = folder._open()
    folder.maintain(START_MS)
    assert [path.name for path in folder.path.iterdir() if path.is_dir()] == []


def test_clean_stop_is_marked_and_the_mark_is_used_up(folder: Folder) -> None:
    append(folder.log())
    folder.data_dir.close()
    assert (folder.path / ".kafka_cleanshutdown").exists()
    assert (folder.path / "recovery-point-offset-checkpoint").read_text() == "0\n1\nt 0 1\n"
    folder.data_dir = folder._open()
    assert folder.data_dir.was_clean
    assert not (folder.path / ".kafka_cleanshutdown").exists()
    folder.data_dir.crash()
    folder.data_dir = folder._open()
    assert not folder.data_dir.was_clean


def test_untouched_logs_keep_their_state_through_clean_restarts(folder: Folder) -> None:
    log = folder.log()
    for _ in range(3):
        append(log, producer_id=1, epoch=0, sequence=log.end_offset)
    for _ in range(3):
        assert not folder.restart(clean=True).is_open
    log = folder.log()
    assert (log.end_offset, log.high_watermark) == (3, 3)
    assert append(log, producer_id=1, epoch=0, sequence=2).duplicate


def test_meta_properties_are_kept(folder: Folder) -> None:
    assert folder.data_dir.properties() == {}
    folder.data_dir.init_properties({"cluster.id": "abc", "node.id": "1", "version": "1"})
    folder.restart(clean=False)
    assert folder.data_dir.properties() == {"cluster.id": "abc", "node.id": "1", "version": "1"}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\xff",
        b"0\n5\nt 0 1\n",
        b"1\n1\nt 0 1\n",
        b"0\n1\nt zero 1\n",
        b"0\nx\n",
        b"0\n1\nt 0 --1\n",
        "0\n1\nt 0 \u00b2\n".encode(),
    ],
)
def test_damaged_checkpoints_only_cost_time(folder: Folder, content: bytes) -> None:
    for _ in range(5):
        append(folder.log())
    folder.data_dir.close()
    for name in ("recovery-point-offset-checkpoint", "replication-offset-checkpoint", "log-start-offset-checkpoint"):
        (folder.path / name).write_bytes(content)
    folder.data_dir = folder._open()
    assert len(all_records(folder.log())) == 5


def test_ten_thousand_partitions_open_quickly_and_cost_little(tmp_path: Path) -> None:
    root = tmp_path / "data"
    open_before = len(os.listdir("/proc/self/fd"))
    data_dir = DataDir.open(root, sync=SyncGroup("os"))
    for number in range(10_000):
        data_dir.create(f"topic-{number // 10}", number % 10, TOPIC_ID, LogConfig())
    data_dir.close()
    gc.collect()
    tracemalloc.start()
    config = LogConfig()
    started = time.process_time()  # of this process alone: other programs may use the machine
    data_dir = DataDir.open(root, sync=SyncGroup("os"), config_of=lambda _: config)
    elapsed_s = time.process_time() - started
    closed_bytes = tracemalloc.get_traced_memory()[0]
    for log in data_dir.logs.values():
        assert log.opened
    loaded_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(data_dir.logs) == 10_000
    assert closed_bytes / 10_000 < 4_000
    assert loaded_bytes / 10_000 < 15_000
    assert len(os.listdir("/proc/self/fd")) <= open_before + 2
    data_dir.crash()
    # 2 s is the promise on a quiet machine without tracing (see the benchmarks); this only catches a slip
    assert elapsed_s < 10


def test_storage_starts_without_numpy_and_pyarrow() -> None:
    code = "import sys, semel.storage; print([m for m in ('numpy', 'pyarrow') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def delete_cpu_s(folder: Folder, topic: str) -> float:
    """CPU time for the deletion of partitions."""
    for partition in range(300):
        folder.data_dir.create(topic, partition, TOPIC_ID, LogConfig())
    started_s = time.thread_time()
    for partition in range(300):
        folder.data_dir.delete(topic, partition)
    return time.thread_time() - started_s


def test_a_deletion_costs_the_same_however_many_partitions_were_deleted_before(folder: Folder) -> None:
    """Their folders wait for their removal. At a restart after a crash thousands of deletions come on top of them."""
    first_s = min(delete_cpu_s(folder, f"first-{run}") for run in range(3))
    for number in range(50_000):
        folder.data_dir._remove_later(str(folder.path / f"gone-{number}.{TOPIC_ID.hex}-delete"), 0)
    assert min(delete_cpu_s(folder, f"later-{run}") for run in range(3)) < 5 * first_s


def test_the_removal_of_old_files_never_touches_a_new_partition_of_the_same_name(folder: Folder) -> None:
    log = folder.data_dir.create("again", 0, TOPIC_ID, LogConfig())
    path = Path(log.folder)
    names = [f"{number:020d}.log.deleted" for number in range(3)]
    opened = log.opened  # that removes what an earlier run left
    for name in names:
        (path / name).touch()
    opened._remove_later([str(path / name) for name in names], START_MS)
    removal = folder.data_dir.garbage_removal(START_MS + 10**9)
    next(removal)
    left = [name for name in names if (path / name).exists()]
    assert len(left) == 2
    folder.data_dir.delete("again", 0)
    folder.data_dir.create("again", 0, UUID(int=2), LogConfig())
    for name in left:
        (path / name).touch()
    for _ in removal:
        pass
    assert all((path / name).exists() for name in left)
    list(folder.data_dir.garbage_removal(START_MS + 10**12))
    assert not list(folder.path.glob("again-0.*-delete"))
