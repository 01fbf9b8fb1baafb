"""The log of manifests: one writer wins each number, nobody commits without having seen every commit before."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from semel.client.errors import ConfigError
from semel.client.types import TopicPartition
from semel.prove.checker.sinks import folder_content
from semel.sinks.files import manifests
from semel.sinks.files.errors import FolderError, FolderTakenError, UnfitRowError
from semel.sinks.files.folder import FolderWriter, Unit
from semel.sinks.files.formats import JsonLines, Parquet, rows_of
from semel.sinks.files.reading import compact, folder_state, read_files
from semel.sinks.files.settings import Files, local_folder

PLACE = TopicPartition("t", 0)


def writer(folder: Path) -> FolderWriter:
    made = FolderWriter(folder, "test")
    made.open()
    return made


def claim(one: FolderWriter, *places: TopicPartition) -> int:
    return one.claim(places or [PLACE], "app", "jsonl").number


def commit(one: FolderWriter, generation: int, *numbers: int, place: TopicPartition = PLACE) -> None:
    entries = one.write(Unit(JsonLines().of_rows([{"n": number} for number in numbers]), []), JsonLines())
    one.commit({place: generation}, add=entries)


def numbers_in(folder: Path) -> list[int]:
    return read_files(folder)["n"].to_pylist()


def test_threads_that_commit_at_once_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two loops and a compaction, with checkpoints all the time."""
    monkeypatch.setattr(manifests, "CHECKPOINT_EVERY", 7)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    failures: list[BaseException] = []
    done = threading.Event()

    def guarded(work: Any, *words: Any) -> None:
        try:
            work(*words)
        except BaseException as error:
            failures.append(error)

    def loop(place: TopicPartition, first: int) -> None:
        one = writer(tmp_path)
        generation = claim(one, place)
        for number in range(first, first + 25):
            commit(one, generation, number, place=place)

    def compactions() -> None:
        while not done.is_set():
            compact(tmp_path, target_bytes=100)

    claim(writer(tmp_path))
    loops = [
        threading.Thread(target=guarded, args=(loop, TopicPartition("t", number), number * 100)) for number in (1, 2)
    ]
    other = threading.Thread(target=guarded, args=(compactions,))
    for thread in (*loops, other):
        thread.start()
    for thread in loops:
        thread.join()
    done.set()
    other.join()
    sys.setswitchinterval(interval_s)
    assert failures == []
    found = numbers_in(tmp_path)
    assert [n for n in found if n < 200] == list(range(100, 125))
    assert [n for n in found if n >= 200] == list(range(200, 225))
    assert sum(folder_content(tmp_path).files.values()) == 50


def test_a_writer_that_was_replaced_is_refused_and_its_files_are_removed(tmp_path: Path) -> None:
    old, new = writer(tmp_path), writer(tmp_path)
    generation = claim(old)
    commit(old, generation, 1)
    commit(new, claim(new), 2)
    with pytest.raises(FolderTakenError, match=r"t-0 belongs to generation 3 \(test\) now, this instance has 1"):
        commit(old, generation, 3)
    assert numbers_in(tmp_path) == [1, 2]
    assert len(list(tmp_path.glob("semel-*"))) == 2


@pytest.mark.parametrize("seen", [0, 1, 2])
def test_a_writer_that_slept_through_a_checkpoint_cannot_use_a_number_again(tmp_path: Path, seen: int) -> None:
    """Its next number is free: the manifest that had it is deleted."""
    old, new = writer(tmp_path), writer(tmp_path)
    if seen:
        generation = claim(old)
    for _ in range(seen - 1):
        commit(old, generation, 0)
    mine = claim(new)
    for number in range(1, 6):
        commit(new, mine, number)
    new.write_checkpoint()
    assert not (tmp_path / "_semel" / f"manifest-{seen + 1:020d}.json").exists()
    if seen:
        with pytest.raises(FolderTakenError):
            commit(old, generation, 9)
    else:
        assert claim(old) == new.state.number + 1
    assert [n for n in numbers_in(tmp_path) if n] == [1, 2, 3, 4, 5]
    assert len(list((tmp_path / "_semel").glob("manifest-*"))) == (1 if seen else 2)


def test_everything_is_on_the_disk_before_what_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    fsync, link, rename = os.fsync, os.link, Path.rename

    def noted(handle: int) -> None:
        target = os.readlink(f"/proc/self/fd/{handle}")
        steps.append(f"sync {os.path.relpath(target, tmp_path).split('-')[0]}")
        fsync(handle)

    one = writer(tmp_path)
    generation = claim(one)
    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "link", lambda *paths: (steps.append("link"), link(*paths))[1])
    monkeypatch.setattr(Path, "rename", lambda path, to: (steps.append("rename"), rename(path, to))[1])
    commit(one, generation, 1)
    assert steps == ["sync .semel", "rename", "sync .", "sync _semel/.manifest", "link", "sync _semel"]


def test_a_sweep_leaves_files_of_writers_that_may_still_commit(tmp_path: Path) -> None:
    alive, dead, last = writer(tmp_path), writer(tmp_path), writer(tmp_path)
    other = TopicPartition("t", 1)
    generation = claim(alive)
    claim(dead, other)
    entries = alive.write(Unit(JsonLines().of_rows([{"n": 1}]), []), JsonLines())
    dead.write(Unit(JsonLines().of_rows([{"n": 2}]), []), JsonLines())
    claim(last, other)
    (tmp_path / "_semel" / f".manifest-{dead.id}.tmp").write_text("{}")
    assert last.sweep() == 2
    alive.commit({PLACE: generation}, add=entries)
    assert numbers_in(tmp_path) == [1]


def test_a_folder_that_goes_back_while_it_is_in_use_is_noticed(tmp_path: Path) -> None:
    one = writer(tmp_path)
    generation = claim(one)
    commit(one, generation, 1)
    for path in (tmp_path / "_semel").iterdir():
        path.unlink()
    with pytest.raises(FolderError, match="ends before manifest 2, which was there"):
        commit(one, generation, 2)


def test_what_is_no_folder_of_semel_is_not_compacted(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text("{}")
    with pytest.raises(FolderError, match="no manifest"):
        compact(tmp_path)
    with pytest.raises(FolderError, match="no manifest"):
        folder_state(tmp_path / "nowhere")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.jsonl"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"format": "csv"}, "must be one of parquet, jsonl"),
        ({"when_behind": "hope"}, "must be one of refuse"),
        ({"format": "jsonl", "schema": {"a": "int64"}}, "have no types"),
        ({"schema": {"a": "no such type"}}, "expected names of Arrow types"),
        ({"schema": 7}, "expected a pyarrow.Schema"),
        ({"schema": {"a": "int64"}, "partition_by": "day"}, "the schema has a"),
    ],
)
def test_bad_settings_are_refused(options: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Files("folder", **options)


def test_rows_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    import pyarrow as pa

    parquet = Parquet(pa.schema([pa.field("a", pa.int64(), nullable=False), pa.field("b", pa.string())]))
    for row in ({"a": "x"}, {"b": "x"}, {"a": 1, "c": 2}, {"a": 2**70}):
        with pytest.raises(UnfitRowError):
            parquet.of_rows([row])
    with pytest.raises(UnfitRowError, match="floating"):
        Parquet(pa.schema([("f", pa.float64())]), ["f"]).of_rows([{"f": 1.0}])
    with pytest.raises(UnfitRowError, match="no JSON"):
        JsonLines().of_rows([{"a": object()}])
    with pytest.raises(UnfitRowError, match="partition_by"):
        JsonLines(["day"]).of_rows([{"a": 1}])
    with pytest.raises(ConfigError, match="returned int"):
        rows_of(7)
    assert local_folder("file:///x/y") == Path("/x/y")
