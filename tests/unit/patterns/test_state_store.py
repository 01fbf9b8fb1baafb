"""The local copy of a partition's state: never ahead, never of something else, never half written."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec
import pytest

from semel.patterns import state
from semel.patterns.state import StateError, StateStore, StoreIdentity

IDENTITY = StoreIdentity("app", "counts", 1, 0, "topic-1")


def opened(folder: Path, identity: StoreIdentity = IDENTITY) -> StateStore:
    return StateStore(folder / "0.sqlite", identity)


def test_values_and_their_changelog_offset_are_there_after_a_restart(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.advance({b"a": b"1", b"b": b"2"}, 2)
    store.advance({b"a": None, b"c": b""}, 5)
    store.close()
    again = opened(tmp_path)
    assert (again.offset, again.get(b"a"), again.get(b"b"), again.get(b"c")) == (5, None, b"2", b"")
    assert again.get_many([b"a", b"b", b"c", b"d"]) == {b"a": None, b"b": b"2", b"c": b"", b"d": None}
    assert sorted(again.scan(b"b", b"c")) == [(b"b", b"2")]


def test_what_was_not_written_when_the_process_died_is_neither_in_the_values_nor_in_the_offset(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.advance({b"a": b"1"}, 2)
    store.write()
    store.advance({b"a": b"2", b"b": b"2"}, 4)
    store.close(write=False)  # as by kill -9
    again = opened(tmp_path)
    assert (again.offset, again.get(b"a"), again.get(b"b")) == (2, b"1", None)


def test_committed_values_are_written_before_they_take_much_memory(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(state, "MAX_UNWRITTEN", 10)
    store = opened(tmp_path)
    for number in range(100):
        store.advance({b"%d" % number: b"v"}, number + 1)
    assert len(store._unwritten) + len(store._written) <= 22
    assert all(value == b"v" for value in store.get_many([b"%d" % number for number in range(100)]).values())
    large = {b"%d" % number: bytes(1 << 20) for number in range(20)}
    store.advance(large, 120)
    assert not store._unwritten


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"application_id": "other"}, "another directory"),
        ({"partition": 1}, "another directory"),
        ({"topic_id": "topic-2"}, "only copy"),
        ({"version": 2}, "version was changed"),
        ({"format": 7}, "not of this version"),
    ],
)
def test_a_file_of_something_else_is_refused_and_kept(tmp_path: Path, changes: dict, message: str) -> None:
    store = opened(tmp_path, msgspec.structs.replace(IDENTITY, **changes))
    store.advance({b"a": b"1"}, 2)
    store.close()
    before = (tmp_path / "0.sqlite").read_bytes()
    with pytest.raises(StateError, match=message):
        opened(tmp_path)
    assert (tmp_path / "0.sqlite").read_bytes() == before


def test_a_file_that_is_no_database_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "0.sqlite").write_bytes(b"notes of the user, " * 100)
    with pytest.raises(StateError, match="not a database"):
        opened(tmp_path)
    assert (tmp_path / "0.sqlite").read_bytes() == b"notes of the user, " * 100


def test_values_without_an_owner_are_refused(tmp_path: Path) -> None:
    opened(tmp_path).close(write=False)
    with sqlite3.connect(tmp_path / "0.sqlite") as file:
        file.execute("INSERT INTO state VALUES (x'61', x'62')")
    file.close()
    with pytest.raises(StateError, match="whose"):
        opened(tmp_path)


def test_what_is_moved_aside_is_kept_and_a_second_time_too(tmp_path: Path) -> None:
    for number in (b"1", b"2"):
        store = opened(tmp_path)
        assert store.is_empty()
        store.advance({b"a": number}, 9)
        store.write()
        fresh = store.move_aside("it was ahead")
        assert (fresh.offset, fresh.is_empty()) == (0, True)
        fresh.close(write=False)
    for number in (1, 2):
        with sqlite3.connect(tmp_path / f"0.sqlite.aside-{number}") as file:
            assert file.execute("SELECT value FROM state").fetchall() == [(b"%d" % number,)]
        file.close()


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.advance({b"a": b"1"}, 2)
    store.write()
    store._file.execute("PRAGMA max_page_count = 20")
    store._unwritten = {b"%d" % number: bytes(1000) for number in range(1000)}
    with pytest.raises(StateError, match="full"):
        store.write()
    store.close(write=False)
    again = opened(tmp_path)
    assert (again.offset, again.get(b"a"), again.get(b"7")) == (2, b"1", None)
