"""The store keeps what was committed, whatever the crash."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from semel.broker.store import FILE_NAME, Store, StoreCorruptError
from semel.prove.powercut import JournaledFiles, cut_power
from semel.storage import DiskFiles


def test_committed_changes_survive(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.is_new
    store.put("topic/a", {"id": 1})
    store.put("topic/b", {"id": 2})
    store.commit()
    store.put("topic/a", None)
    store.put("other", [1, 2])
    store.commit()
    again = Store(tmp_path)  # without close: as after kill -9
    assert not again.is_new
    assert dict(again.items("topic/")) == {"b": {"id": 2}}
    assert again.get("other") == [1, 2]
    assert again.get("topic/a") is None


def test_changes_without_commit_are_lost(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put("a", 1)
    assert Store(tmp_path).get("a") is None


@pytest.mark.parametrize("cut", range(2, 30))
def test_torn_last_change_is_dropped_and_the_rest_is_kept(tmp_path: Path, cut: int) -> None:
    store = Store(tmp_path)
    store.put("kept", "x" * 10)
    store.commit()
    store.put("torn", "y" * 10)
    store.commit()
    path = tmp_path / FILE_NAME
    path.write_bytes(path.read_bytes()[:-cut])
    again = Store(tmp_path)
    assert again.get("kept") == "x" * 10
    assert again.get("torn") is None
    again.put("new", 1)
    again.commit()
    assert Store(tmp_path).get("new") == 1


def test_damage_before_the_end_is_not_taken_for_a_torn_tail(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for name in ("a", "b", "c"):
        store.put(name, name)
        store.commit()
    path = tmp_path / FILE_NAME
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(StoreCorruptError, match=r"line \d+ .* is damaged"):
        Store(tmp_path)


class FullDisk(DiskFiles):
    """A disk with space for five more bytes."""

    def __init__(self) -> None:
        self.is_full = False
        self.refused = 0
        self.write_at = self._write

    def _write(self, fd: int, content: bytes | bytearray | memoryview, position: int) -> int:
        if not self.is_full:
            return os.pwrite(fd, content, position)
        self.refused += 1
        if self.refused == 1:
            return os.pwrite(fd, content[:5], position)
        raise OSError(28, "No space left on device")


def test_a_failed_write_leaves_no_half_change_behind(tmp_path: Path) -> None:
    disk = FullDisk()
    store = Store(tmp_path, files=disk)
    store.put("before", 1)
    store.commit()
    store.put("during", 2)
    disk.is_full = True
    with pytest.raises(OSError, match="No space"):
        store.commit()
    assert disk.refused == 2, "the fault did not fire"
    disk.is_full = False
    assert Store(tmp_path).get("during") is None
    store.close()


def test_a_power_cut_takes_no_committed_change(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    store = Store(folder, files=JournaledFiles(folder, real_sync=False))
    store.put("kept", 1)
    store.commit()
    store.put("lost", 2)
    cut_power(folder)
    again = Store(folder)
    assert (again.get("kept"), again.get("lost")) == (1, None)


def test_a_power_cut_takes_what_was_written_but_not_synced(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    store = Store(folder, files=JournaledFiles(folder, real_sync=False), fsync=False)
    store.put("lost", 2)
    store.commit()
    assert cut_power(folder) > 0
    assert Store(folder).get("lost") is None


def test_every_start_is_counted(tmp_path: Path) -> None:
    assert [Store(tmp_path).starts for _ in range(3)] == [1, 2, 3]


class FailingDisk(DiskFiles):
    """Fails the next write or the next sync."""

    def __init__(self, step: str) -> None:
        self.step = step
        self.due = False
        self.failed = 0
        self.write_at = self._write

    def _fail(self, step: str) -> None:
        if self.due and step == self.step:
            self.failed += 1
            raise OSError(5, "Input/output error")

    def _write(self, fd: int, content: bytes | bytearray | memoryview, position: int) -> int:
        self._fail("write")
        return os.pwrite(fd, content, position)

    def sync_file(self, fd: int, path: str) -> None:
        self._fail("sync")
        super().sync_file(fd, path)


@pytest.mark.parametrize("step", ["write", "sync"])
def test_a_failed_commit_changes_nothing(tmp_path: Path, step: str) -> None:
    disk = FailingDisk(step)
    store = Store(tmp_path, files=disk)
    store.put("a", "old")
    store.put("gone", 1)
    store.commit()
    store.put("a", "new")
    store.put("gone", None)
    store.put("b", 2)
    assert (store.get("a"), store.get("gone"), dict(store.items("b"))) == ("new", None, {"": 2})
    disk.due = True
    with pytest.raises(OSError, match="Input/output"):
        store.commit()
    assert disk.failed == 1, "the fault did not fire"
    disk.due = False
    after_a_crash = dict(Store(tmp_path).items(""))
    assert {key: after_a_crash.get(key) for key in ("a", "gone", "b")} == {"a": "old", "gone": 1, "b": None}
    store = Store(tmp_path, files=disk)
    store.put("a", "new")
    disk.due = True
    with pytest.raises(OSError, match="Input/output"):
        store.commit()
    disk.due = False
    assert store.get("a") == "old"
    store.put("b", 2)
    store.commit()
    expected = {"a": "old", "gone": 1, "b": 2}
    for found in (store, Store(tmp_path)):
        assert {key: found.get(key) for key in expected} == expected
