"""The store keeps what was committed, whatever the crash."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from semel.broker.store import FILE_NAME, Store, StoreCorruptError


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
    with pytest.raises(StoreCorruptError, match=r"line 2 .* is damaged"):
        Store(tmp_path)


def test_a_failed_write_leaves_no_half_change_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    store.put("before", 1)
    store.commit()
    real_write, calls = os.write, []

    def full_disk(fd: int, data: Any) -> int:
        calls.append(len(data))
        if len(calls) == 1:
            return real_write(fd, data[:5])
        raise OSError(28, "No space left on device")

    store.put("during", 2)
    monkeypatch.setattr(os, "write", full_disk)
    with pytest.raises(OSError, match="No space"):
        store.commit()
    assert len(calls) == 2, "the fault did not fire"
    monkeypatch.undo()
    assert Store(tmp_path).get("during") is None
    store.close()
