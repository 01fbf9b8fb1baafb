"""The registry of topics: durable, and one with the data folder after every crash."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest

from semel.broker.settings import Settings
from semel.broker.store import FILE_NAME, NEXT_PRODUCER_ID, Store
from semel.broker.topics import TopicError, Topics, name_problem
from semel.broker.turns import at_once
from semel.protocol.errors import ErrorCode
from semel.protocol.rows import Record, encode_batch
from semel.prove.powercut import JournaledFiles, cut_power
from semel.storage import DataDir, DiskFiles, FsyncMode, LogConfig, SyncGroup
from semel.storage.producer_state import encode_snapshot


class World:
    """Store, data folder and registry, as a broker opens them."""

    def __init__(self, folder: Path, *, fsync: FsyncMode = "os", files: DiskFiles | None = None) -> None:
        self.data_dir = DataDir.open(folder, sync=SyncGroup(fsync), files=files)
        self.store = Store(folder, files=self.data_dir.files)
        self.topics = Topics(self.store, self.data_dir, Settings())
        self.topics.load()

    def crash(self) -> None:
        self.data_dir.crash()


def in_loop(body: Callable[[], None]) -> None:
    async def go() -> None:
        body()

    asyncio.run(go())


def append(world: World, topic: str, partition: int = 0, *, producer_id: int = -1) -> None:
    log = world.topics.find_log(topic, partition)
    assert log is not None
    producer = {"producer_id": producer_id, "producer_epoch": 0, "base_sequence": 0} if producer_id >= 0 else {}
    assert not log.append(encode_batch([Record(0, 1, None, b"v")], **producer), now_ms=1).duplicate


def test_topics_survive_a_crash(tmp_path: Path) -> None:
    def go() -> None:
        world = World(tmp_path)
        topic = world.topics.create("orders", 3, {"retention.ms": "5"})
        append(world, "orders", 2)
        at_once(world.topics.addition(topic, 4))
        world.topics.set_configs(topic, {"retention.ms": "6"})
        world.crash()
        again = World(tmp_path).topics
        found = again.get("orders")
        assert found is not None
        assert (found.id, len(found.partitions), found.configs) == (topic.id, 4, {"retention.ms": "6"})
        assert again.by_id(topic.id) is found
        assert found.partitions[2].log.end_offset == 1
        assert found.partitions[3].log.config.retention_ms == 6

    in_loop(go)


def test_deleted_topics_stay_deleted(tmp_path: Path) -> None:
    def go() -> None:
        world = World(tmp_path)
        topic = world.topics.create("gone", 2)
        append(world, "gone")
        at_once(world.topics.deletion([topic]))
        assert world.topics.get("gone") is None
        world.crash()
        world = World(tmp_path)
        assert world.topics.get("gone") is None
        assert not [key for key in world.data_dir.logs if key[0] == "gone"]
        new = world.topics.create("gone", 1)
        assert new.id != topic.id
        assert new.partitions[0].log.end_offset == 0

    in_loop(go)


def test_folders_of_a_creation_that_was_never_acknowledged_are_deleted(tmp_path: Path) -> None:
    def go() -> None:
        world = World(tmp_path)
        world.topics.create("kept", 1)
        before = (tmp_path / FILE_NAME).read_bytes()
        world.topics.create("half", 2)
        world.crash()
        (tmp_path / FILE_NAME).write_bytes(before)  # as if the power went before the store was written
        again = World(tmp_path)
        assert [topic.name for topic in again.topics] == ["kept"]
        assert list(again.data_dir.logs) == [("kept", 0)]

    in_loop(go)


def test_without_a_store_the_folders_are_taken_over(tmp_path: Path) -> None:
    def go() -> None:
        world = World(tmp_path)
        topic = world.topics.create("precious", 2)
        append(world, "precious", 1)
        world.crash()
        (tmp_path / FILE_NAME).unlink()
        found = World(tmp_path).topics.get("precious")
        assert found is not None
        assert found.id == topic.id
        assert [part.log.end_offset for part in found.partitions] == [0, 1]

    in_loop(go)


def test_a_folder_that_was_copied_in_becomes_a_topic(tmp_path: Path) -> None:
    def go() -> None:
        source = World(tmp_path / "source")
        topic = source.topics.create("restored", 2)
        append(source, "restored", 0)
        source.data_dir.close()
        World(tmp_path / "target").crash()
        for index in range(2):
            shutil.copytree(tmp_path / f"source/restored-{index}", tmp_path / f"target/restored-{index}")
        found = World(tmp_path / "target").topics.get("restored")
        assert found is not None
        assert (found.id, [part.log.end_offset for part in found.partitions]) == (topic.id, [1, 0])

    in_loop(go)


def test_a_deletion_that_a_crash_cut_short_is_finished_by_the_next_start(tmp_path: Path) -> None:
    def go() -> None:
        world = World(tmp_path)
        doomed = world.topics.create("doomed", 2)
        append(world, "doomed", 1)
        folder = tmp_path / "doomed-1"
        shutil.copytree(folder, tmp_path / "copy")
        at_once(world.topics.deletion([doomed]))
        world.crash()
        (tmp_path / "copy").rename(folder)  # as if the crash came before the folder was renamed
        again = World(tmp_path)
        assert again.topics.get("doomed") is None
        assert not folder.exists()
        again.crash()
        assert World(tmp_path).topics.get("doomed") is None

    in_loop(go)


def next_producer_id(world: World) -> int:
    return world.store.get(NEXT_PRODUCER_ID) or 0


@pytest.mark.parametrize("where", ["state", "snapshot", "log"])
def test_producer_ids_of_folders_that_become_topics_are_not_used_again(tmp_path: Path, where: str) -> None:
    """A new producer's first batch was taken for a retry of one that is in the folder: acknowledged, not stored."""

    def go() -> None:
        world = World(tmp_path)
        world.topics.create("orders", 2)
        append(world, "orders", 1, producer_id=6)
        append(world, "orders", 1, producer_id=4)
        if where == "state":
            world.crash()
        else:
            world.data_dir.close()
            snapshot = next((tmp_path / "orders-1").glob("*.snapshot"))
            if where == "log":
                snapshot.write_bytes(encode_snapshot([]))  # expired: only the batches tell
            else:
                truncate_log(tmp_path / "orders-1")  # retention took the batches: only the snapshot tells
        (tmp_path / FILE_NAME).unlink()
        again = World(tmp_path)
        assert next_producer_id(again) == 7
        append(again, "orders", 1, producer_id=next_producer_id(again))
        again.crash()
        assert next_producer_id(World(tmp_path)) >= 7

    in_loop(go)


def truncate_log(folder: Path) -> None:
    for path in folder.glob("0*.*"):
        if path.suffix != ".snapshot":
            path.unlink()
    (folder / "00000000000000000002.log").touch()


def test_a_reservation_of_producer_ids_that_a_power_cut_took_is_found_in_the_logs(tmp_path: Path) -> None:
    """With fsync=os the store's last line may be gone while batches of the ids that it reserved are there."""

    def go() -> None:
        world = World(tmp_path)
        world.topics.create("orders", 1)
        append(world, "orders", producer_id=1234)
        world.crash()
        again = World(tmp_path)
        assert next_producer_id(again) == 1235

    in_loop(go)


def test_an_invented_producer_id_does_not_use_up_the_ids(tmp_path: Path) -> None:
    def go() -> None:
        world = World(tmp_path)
        world.topics.create("orders", 1)
        append(world, "orders", producer_id=2**63 - 1)
        append(world, "orders", producer_id=5)
        world.crash()
        (tmp_path / FILE_NAME).unlink()
        assert next_producer_id(World(tmp_path)) == 6

    in_loop(go)


def stored_records(folder: Path) -> list[Path]:
    """Every file with batches in it, wherever it lies in the data folder."""
    return [path for path in folder.rglob("*.log") if path.stat().st_size]


@pytest.mark.parametrize("damage", ["rubbish", "", "version: 0\ntopic_id: !!", None])
@pytest.mark.parametrize("clean", [True, False])
def test_an_unreadable_partition_metadata_costs_no_record(tmp_path: Path, damage: str | None, clean: bool) -> None:
    def go() -> None:
        world = World(tmp_path)
        topic = world.topics.create("orders", 2)
        for _ in range(3):
            append(world, "orders", 1)
        if clean:
            world.data_dir.close()
        else:
            world.crash()
        metadata = tmp_path / "orders-1" / "partition.metadata"
        sound = metadata.read_text()
        metadata.unlink()
        if damage is not None:
            metadata.write_text(damage)
        again = World(tmp_path).topics
        log = again.find_log("orders", 1)
        assert log is not None
        assert (log.topic_id.bytes, log.end_offset) == (topic.id, 3)
        assert metadata.read_text() == sound

    in_loop(go)


def test_a_folder_in_the_way_of_a_new_topic_is_moved_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def go() -> None:
        world = World(tmp_path)
        world.topics.create("orders", 1)
        append(world, "orders")
        world.crash()
        (tmp_path / "orders-0" / "partition.metadata").write_text("rubbish")
        (tmp_path / FILE_NAME).unlink()
        again = World(tmp_path)
        assert again.topics.get("orders") is None
        assert again.topics.create("orders", 1).partitions[0].log.end_offset == 0
        assert [path.parent.name[-6:] for path in stored_records(tmp_path)] == ["-stray"]
        list(again.data_dir.garbage_removal(10**15))
        again.crash()
        list(World(tmp_path).data_dir.garbage_removal(10**15))
        assert len(stored_records(tmp_path)) == 1

    in_loop(go)
    assert "moved aside" in caplog.text


def test_records_of_another_topic_id_are_moved_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As after a folder of another data folder was copied over the topic's own."""

    def go() -> None:
        for name in ("a", "b"):
            world = World(tmp_path / name)
            world.topics.create("orders", 1)
            append(world, "orders")
            world.crash()
        shutil.rmtree(tmp_path / "a" / "orders-0")
        shutil.copytree(tmp_path / "b" / "orders-0", tmp_path / "a" / "orders-0")
        again = World(tmp_path / "a")
        log = again.topics.find_log("orders", 0)
        assert log is not None
        assert log.end_offset == 0
        list(again.data_dir.garbage_removal(10**15))
        assert [path.parent.name[-6:] for path in stored_records(tmp_path / "a")] == ["-stray"]

    in_loop(go)
    assert "moved aside" in caplog.text


def test_folders_of_two_topics_under_one_name_are_never_mixed(tmp_path: Path) -> None:
    """One of them becomes the topic; the other's records stay on the disk."""

    def go() -> None:
        for name in ("a", "b"):
            world = World(tmp_path / name)
            world.topics.create("orders", 2)
            append(world, "orders", 0)
            append(world, "orders", 1)
            world.crash()
        (tmp_path / "c").mkdir()
        shutil.copytree(tmp_path / "a" / "orders-0", tmp_path / "c" / "orders-0")
        shutil.copytree(tmp_path / "b" / "orders-1", tmp_path / "c" / "orders-1")
        again = World(tmp_path / "c")
        ends = [partition.log.end_offset for partition in again.topics.get("orders").partitions]  # type: ignore[union-attr]
        assert sorted(ends) == [0, 1] or ends == [1]
        list(again.data_dir.garbage_removal(10**15))
        assert len(stored_records(tmp_path / "c")) == 2

    in_loop(go)


def test_a_copied_partition_beyond_the_last_keeps_its_records(tmp_path: Path) -> None:
    def go() -> None:
        world = World(tmp_path)
        topic = world.topics.create("orders", 3)
        append(world, "orders", 2)
        before = (tmp_path / FILE_NAME).read_bytes()
        at_once(world.topics.addition(topic, 5))
        append(world, "orders", 4)
        world.crash()
        (tmp_path / FILE_NAME).write_bytes(before)  # restored from a copy
        again = World(tmp_path)
        found = again.topics.get("orders")
        assert found is not None
        assert [partition.log.end_offset for partition in found.partitions] == [0, 0, 1, 0, 1]

    in_loop(go)


def test_a_topic_that_is_created_again_keeps_no_offset_of_the_deleted_one(tmp_path: Path) -> None:
    def go() -> None:
        world = World(tmp_path)
        topic = world.topics.create("orders", 1)
        for _ in range(5):
            append(world, "orders")
        topic.partitions[0].log.delete_records(4)
        world.data_dir.checkpoint()
        at_once(world.topics.deletion([topic]))
        world.crash()
        world = World(tmp_path)
        world.topics.create("orders", 1)
        for _ in range(9):
            append(world, "orders")
        world.crash()
        log = World(tmp_path).topics.find_log("orders", 0)
        assert log is not None
        assert (log.start_offset, log.end_offset) == (0, 9)

    in_loop(go)


def test_kafkas_own_metadata_folder_is_left_alone(tmp_path: Path) -> None:
    def go() -> None:
        world = World(tmp_path)
        world.data_dir.create("__cluster_metadata", 0, uuid4(), LogConfig())
        world.crash()
        again = World(tmp_path)
        assert len(again.topics) == 0
        assert (tmp_path / "__cluster_metadata-0").exists()

    in_loop(go)


def test_internal_topics_are_created_compacted_on_first_use(tmp_path: Path) -> None:
    def go() -> None:
        topics = World(tmp_path).topics
        offsets = topics.internal("__consumer_offsets")
        assert offsets is topics.internal("__consumer_offsets")
        assert offsets.is_internal
        assert len(offsets.partitions) == 50
        assert offsets.partitions[0].log.config.compact

    in_loop(go)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("orders-1.v_2", None),
        ("x" * 249, None),
        ("", "the empty string"),
        (".", "'.' is not allowed"),
        ("..", "'..' is not allowed"),
        ("x" * 250, "longer than the max allowed length 249"),
        ("a b", "characters other than"),
        ("a/b", "characters other than"),
        ("ä", "characters other than"),
        ("a\n", "characters other than"),
    ],
)
def test_names(name: str, problem: str | None) -> None:
    found = name_problem(name)
    assert found is None if problem is None else problem in (found or "")


def test_refused_topics_leave_nothing_behind(tmp_path: Path) -> None:
    def go() -> None:
        world = World(tmp_path)
        for name, count, configs, code in (
            ("a b", 1, {}, ErrorCode.INVALID_TOPIC_EXCEPTION),
            ("a", 0, {}, ErrorCode.INVALID_PARTITIONS),
            ("a", 1, {"nope": "1"}, ErrorCode.INVALID_CONFIG),
        ):
            with pytest.raises(TopicError) as refused:
                world.topics.create(name, count, configs)
            assert refused.value.code is code
        assert not world.data_dir.logs
        assert len(world.topics) == 0

    in_loop(go)


def test_a_full_disk_refuses_changes_and_nothing_is_half_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def go() -> None:
        world = World(tmp_path)
        kept = world.topics.create("kept", 1, {"retention.ms": "5"})
        fired = []

        def full(*_: object) -> None:
            fired.append(1)
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("semel.broker.store.write_fully", full)
            for change in (
                lambda: at_once(world.topics.creation([("new", 2, {}), ("newer", 1, {})])),
                lambda: at_once(world.topics.addition(kept, 3)),
                lambda: world.topics.set_configs(kept, {"retention.ms": "6"}),
                lambda: at_once(world.topics.deletion([kept])),
            ):
                with pytest.raises(TopicError, match="No space left") as refused:
                    change()
                assert refused.value.code is ErrorCode.KAFKA_STORAGE_ERROR
        assert len(fired) == 4, "the fault did not fire"
        for topics in (world.topics, reopened(world, tmp_path).topics):
            assert [(topic.name, len(topic.partitions), topic.configs) for topic in topics] == [
                ("kept", 1, {"retention.ms": "5"})
            ]

    in_loop(go)


def reopened(world: World, folder: Path) -> World:
    world.topics.create("after", 1)  # there is space again
    at_once(world.topics.deletion([topic for topic in world.topics if topic.name == "after"]))
    world.crash()
    return World(folder)


def test_leaders_of_a_later_start_have_a_higher_epoch(tmp_path: Path) -> None:
    """So that a client which read what a power cut took back finds out (OffsetForLeaderEpoch), as by Kafka."""

    def go() -> None:
        seen = []
        for start in range(3):
            world = World(tmp_path)
            topic = world.topics.get("orders") or world.topics.create("orders", 1)
            append(world, "orders")
            log = topic.partitions[0].log
            seen.append(log.leader_epoch)
            assert log.epoch_end_offset(seen[0]) == (0, 1)
            assert log.epoch_end_offset(log.leader_epoch) == (log.leader_epoch, start + 1)
            world.crash()
        assert seen == [0, 2, 4]

    in_loop(go)


def test_a_folder_that_was_copied_in_goes_on_with_a_higher_epoch(tmp_path: Path) -> None:
    def go() -> None:
        world = World(tmp_path / "a")
        world.topics.create("orders", 1)
        append(world, "orders")
        world.crash()
        for _ in range(3):
            World(tmp_path / "a").crash()
        world = World(tmp_path / "a")
        append(world, "orders")
        log = world.topics.find_log("orders", 0)
        assert log is not None
        before = log.leader_epoch
        world.crash()
        shutil.copytree(tmp_path / "a" / "orders-0", tmp_path / "b" / "orders-0")
        copied = World(tmp_path / "b").topics.find_log("orders", 0)
        assert copied is not None
        assert copied.leader_epoch > before == 8

    in_loop(go)


class WatchedFiles(DiskFiles):
    """Notes what is synced."""

    def __init__(self) -> None:
        self.synced: list[str] = []

    def sync_file(self, fd: int, path: str) -> None:
        self.synced.append(Path(path).name)

    def sync_dir(self, path: str) -> None:
        self.synced.append(path)

    def sync_all(self, folder: str) -> None:
        self.synced.append("everything")


def test_a_change_of_topics_waits_for_the_store_alone(tmp_path: Path) -> None:
    """These run on the event loop: hundreds of folders, or the whole file system, would stop every client."""

    def go() -> None:
        files = WatchedFiles()
        world = World(tmp_path, fsync="commit", files=files)
        files.synced.clear()
        topic = world.topics.create("wide", 50)
        assert files.synced == [FILE_NAME]
        at_once(world.topics.addition(topic, 80))
        at_once(world.topics.deletion([topic]))
        assert files.synced == [FILE_NAME] * 3

    in_loop(go)


@pytest.mark.parametrize("seed", range(20))
def test_acknowledged_changes_of_topics_survive_a_power_cut(tmp_path: Path, seed: int) -> None:
    folder = tmp_path / "data"

    def powered() -> World:
        return World(folder, fsync="commit", files=JournaledFiles(folder, real_sync=False))

    def go() -> None:
        world = powered()
        gone = world.topics.create("gone", 2)
        again = world.topics.create("again", 2)
        for name in ("gone", "again"):
            append(world, name, 1)
            flush(world, name, 1)
        gone.partitions[1].log.delete_records(1)
        world.topics.partition("again", 1).log.delete_records(1)  # type: ignore[union-attr]
        world.data_dir.checkpoint()
        at_once(world.topics.deletion([gone]))
        at_once(world.topics.deletion([again]))
        new = world.topics.create("again", 3)
        for index in (1, 2):
            append(world, "again", index)
            flush(world, "again", index)
        wide = world.topics.create("wide", 12)
        append(world, "wide", 7)
        flush(world, "wide", 7)
        world.crash()
        for _ in range(2):
            cut_power(folder, random.Random(seed))
            world = powered()
            logs = {topic.name: [partition.log for partition in topic.partitions] for topic in world.topics}
            assert {name: [log.end_offset for log in found] for name, found in logs.items()} == {
                "again": [0, 1, 1],
                "wide": [0] * 7 + [1] + [0] * 4,
            }
            assert {log.start_offset for found in logs.values() for log in found} == {0}
            assert {log.topic_id.bytes for found in logs.values() for log in found} == {new.id, wide.id}
            world.crash()

    in_loop(go)


def flush(world: World, topic: str, partition: int) -> None:
    log = world.topics.find_log(topic, partition)
    assert log is not None
    log.flush()


def test_a_folder_that_cannot_be_renamed_does_not_keep_topics_half_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A topic that is deleted in the store must not take records any more: the next start would remove them."""

    def go() -> None:
        world = World(tmp_path)
        doomed = [world.topics.create(name, 2) for name in ("a", "b")]
        append(world, "a", 1)
        real, fired = world.data_dir.files.rename, []

        def rename(old: str, new: str) -> None:
            if old.endswith("a-0"):
                fired.append(old)
                raise OSError(5, "Input/output error")
            real(old, new)

        with monkeypatch.context() as patch:
            patch.setattr(world.data_dir.files, "rename", rename)
            at_once(world.topics.deletion(doomed))
        assert fired, "the fault did not fire"
        for registry in (world, reopened(world, tmp_path)):
            assert len(registry.topics) == 0
            assert not registry.data_dir.logs

    in_loop(go)


def test_a_missing_folder_is_reported_and_its_checkpoints_are_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def go() -> None:
        world = World(tmp_path)
        world.topics.create("orders", 2)
        for _ in range(5):
            append(world, "orders")
        world.topics.find_log("orders", 0).delete_records(4)  # type: ignore[union-attr]
        world.data_dir.close()
        shutil.rmtree(tmp_path / "orders-0")
        world = World(tmp_path)
        for _ in range(9):
            append(world, "orders")
        world.crash()
        log = World(tmp_path).topics.find_log("orders", 0)
        assert log is not None
        assert (log.start_offset, log.end_offset) == (0, 9)

    in_loop(go)
    assert [record.partition for record in caplog.records if "is missing" in record.message] == [0]  # type: ignore[attr-defined]
