"""F2: files are written aside and renamed, and become visible together with their offsets, through a manifest.

Faults: kill -9 between any two steps of a commit, a claim and a compaction; SIGSTOP of an instance that comes back when
another one has its partitions; a full disk; manifests that are missing or damaged; a folder or a topic that is older
than the other. The folder is read with json and pyarrow, by a checker that shares no code with the sink.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

import semel
from semel.cli import main as semel_command
from semel.prove.checker.sinks import check_folder, folder_content, folder_rows
from semel.prove.injection import COMPACTION_POINTS, FILES_POINTS
from semel.sinks.files.reading import compact
from tests.guarantees.files_member import start
from tests.support.broker import KAFKA_IN_FULL, Cluster
from tests.support.prove import prove
from tests.support.reading import create_topic
from tests.support.waiting import PATIENCE_S, until

PARTITIONS = 2
SCHEMA = {"topic": "string", "partition": "int32", "offset": "int64", "key": "string", "value": "string"}


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Cluster:
    name = getattr(request, "param", "semel")
    return Cluster(name, request.getfixturevalue({"semel": "shared_semel_broker"}.get(name, name)))


def row(record: Any) -> dict[str, Any]:
    place = {"topic": record.topic, "partition": record.partition, "offset": record.offset}
    return {**place, "key": "", "value": record.value.decode()}


class Archive:
    """A topic of numbers, and the folder that it goes to."""

    def __init__(self, cluster: Cluster, tmp_path: Path) -> None:
        self.bootstrap = cluster.bootstrap
        self.topic = create_topic(self.bootstrap, cluster.unique("archive"), PARTITIONS)
        self.application_id = cluster.unique("archiver")
        self.folder = tmp_path / "files"
        self._output = tmp_path / "output"
        self.sent = 0

    def send(self, count: int) -> None:
        producer = Producer({"bootstrap.servers": self.bootstrap})
        for number in range(self.sent, self.sent + count):
            producer.produce(self.topic, b"%d" % number, b"", partition=number % PARTITIONS)
        assert producer.flush(PATIENCE_S) == 0
        self.sent += count

    def process(self, function: Any = row, **options: Any) -> Any:
        sink = options.pop("sink", None) or semel.Files(self.folder, schema=SCHEMA)
        options = {"stop_at_end": True, "application_id": self.application_id, "max_records": 20, **options}
        return semel.process(self.topic, sink, function, bootstrap_servers=self.bootstrap, **options)

    def start(self, fault: str = "", **more: Any) -> Any:
        options = {
            "sink": None,
            "producer": None,
            "delay_ms": 0,
            "source": self.topic,
            "folder": str(self.folder),
            "application_id": self.application_id,
            "bootstrap_servers": self.bootstrap,
            "instance": "a",
            "max_records": 20,
            "commit_interval_ms": 100,
            **more,
        }
        return start("files", options, self._output, fault)

    def output(self) -> str:
        return self._output.read_text() if self._output.exists() else ""

    def check(self) -> None:
        """The folder equals the topic, and holds nothing else."""
        assert check_folder(self.folder, {str(number): 1 for number in range(self.sent)}) == []
        on_disk = {path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*semel-*")}
        assert on_disk == set(folder_content(self.folder).files)


@pytest.fixture
def archive(cluster: Cluster, tmp_path: Path) -> Archive:
    return Archive(cluster, tmp_path)


def test_rows_and_offsets_are_in_the_folder_and_a_restart_goes_on_from_it_alone(archive: Archive) -> None:
    archive.send(60)
    assert archive.process().records_out == 60
    admin, group = AdminClient({"bootstrap.servers": archive.bootstrap}), archive.application_id
    admin.delete_consumer_groups([group])[group].result(PATIENCE_S)
    archive.send(10)
    assert archive.process().records_in == 10
    archive.check()
    assert sum(folder_content(archive.folder).offsets.values()) == 70
    assert sorted(map(int, semel.read_files(archive.folder)["value"].to_pylist())) == list(range(70))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("cluster", ["semel", KAFKA_IN_FULL], indirect=True)
def test_kill_9_between_any_two_steps_loses_and_doubles_nothing(archive: Archive) -> None:
    seen = 0
    for point in FILES_POINTS:
        archive.send(200)
        nth = 1 if point == "files.claimed" else 2
        process = archive.start(f"{point}:kill:{nth}")
        process.join(PATIENCE_S)
        assert process.exitcode == -signal.SIGKILL, f"{point}: {archive.output()}"
        assert f"fault fired: {point}" in archive.output()
        values = [int(each["value"]) for each in folder_rows(archive.folder)]
        assert len(set(values)) == len(values) >= seen, f"{point}: what was visible stays, once"
        seen = len(values)
    assert seen < archive.sent
    archive.process(instance="a")
    archive.check()


def test_a_zombie_adds_nothing(archive: Archive) -> None:
    """It is frozen with its files in place and its manifest unwritten; another one takes its partitions meanwhile."""
    archive.send(200)
    zombie = archive.start("files.renamed:stop:3")
    until(lambda: "fault fired: files.renamed" in archive.output())
    until(lambda: Path(f"/proc/{zombie.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    archive.process(instance="a")
    assert check_folder(archive.folder, {str(number): 1 for number in range(archive.sent)}) == []
    os.kill(zombie.pid, signal.SIGCONT)
    until(lambda: "another one took over" in archive.output())
    zombie.terminate()
    zombie.join(PATIENCE_S)
    archive.check()


def test_compaction_is_atomic_and_may_be_killed(archive: Archive, tmp_path: Path) -> None:
    archive.send(200)
    archive.process()
    before = len(folder_content(archive.folder).files)
    process = start("compactor", {"folder": str(archive.folder)}, tmp_path / "compactor", "files.compacted:kill:1")
    process.join(PATIENCE_S)
    assert process.exitcode == -signal.SIGKILL, (tmp_path / "compactor").read_text()
    assert "fault fired: files.compacted" in (tmp_path / "compactor").read_text()
    assert set(COMPACTION_POINTS) == {"files.compacted"}
    assert check_folder(archive.folder, {str(number): 1 for number in range(200)}) == []
    archive.send(40)
    archive.process()
    done = compact(archive.folder)
    assert (done.files_after, before > 2) == (1, True)
    archive.check()
    assert len(list((archive.folder / "_semel").iterdir())) == 2, "a checkpoint, and the last manifest"
    archive.send(10)
    assert archive.process().records_in == 10
    archive.check()


def test_the_example_of_the_page_and_the_command_work(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    topic = create_topic(cluster.bootstrap, cluster.unique("orders"))
    producer = Producer({"bootstrap.servers": cluster.bootstrap})
    for number in range(6):
        producer.produce(topic, json.dumps({"id": number, "day": f"2026-03-0{number % 2 + 1}", "cents": 5}))
    assert producer.flush(PATIENCE_S) == 0
    page = Path(__file__).parents[2] / "docs/files.md"
    block = page.read_text().partition("```python\n")[2].partition("```")[0]
    code = block.replace("localhost:9092", cluster.bootstrap).replace('"orders"', repr(topic))
    exec(compile(code.replace('"archiver"', repr(topic)), str(page), "exec"), {})
    assert "6 rows" in capsys.readouterr().out
    assert semel_command(["files", "compact", "archive/orders"]) == 0
    assert semel_command(["files", "list", "archive/orders"]) == 0
    assert len(capsys.readouterr().out.split("day=")) == 3
    assert semel_command(["files", "status", "archive/orders", "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["rows"], status["partitions"][0]["next_offset"]) == (6, 6)
    assert semel_command(["files", "status", "nowhere"]) == 1


# --- bad input ---


def test_records_that_do_not_fit_are_dead_letters_under_the_same_manifest(archive: Archive) -> None:
    archive.send(20)

    def odd(record: Any) -> Any:
        number = int(record.value)
        if number == 7:
            raise ValueError("seven")
        return {**row(record), "offset": "much" if number == 8 else record.offset}

    with pytest.raises(semel.RecordError, match=r"Files\(dead_letters=True\)"):
        archive.process(odd)
    assert folder_rows(archive.folder) == []
    stats = archive.process(odd, sink=semel.Files(archive.folder, schema=SCHEMA, dead_letters=True))
    assert (stats.dead_letters, stats.records_out) == (2, 18)
    letters = semel.read_files(archive.folder, dead_letters=True).to_pylist()
    assert {each["reason"].partition(":")[0] for each in letters} == {"ValueError", "UnfitRowError"}
    assert sorted(each["offset"] for each in letters) == [3, 4]


def test_tables_and_subfolders(archive: Archive) -> None:
    archive.send(50)

    def parity(table: Any) -> Any:
        numbers = [int(value) for value in table["value"].to_pylist()]
        return pa.table({"number": numbers, "parity": ["odd" if n % 2 else None for n in numbers]})

    sink = semel.Files(archive.folder, partition_by="parity")
    assert archive.process(parity, sink=sink, tables=True, max_records=100).records_out == 50
    places = {name.partition("/")[0] for name in folder_content(archive.folder).files}
    assert places == {"parity=odd", "parity=__HIVE_DEFAULT_PARTITION__"}
    assert sorted(semel.read_files(archive.folder)["number"].to_pylist()) == list(range(50))
    compact(archive.folder)
    assert len(semel.committed_files(archive.folder)) == 2


def test_bad_records_of_tables_without_a_schema_are_dead_letters_or_what_on_error_makes_of_them(
    archive: Archive,
) -> None:
    """They ended the loop with an AttributeError, and each record was one where the function returned no table."""
    archive.send(10)

    def halved(table: Any) -> Any:
        numbers = [int(value) for value in table["value"].to_pylist()]
        if set(numbers) & {4, 6, 8}:
            raise ValueError("bad")
        return pa.record_batch({"half": pa.array([number // 2 for number in numbers], pa.int32())})

    def instead(table: Any, error: Exception) -> Any:
        number = int(table["value"][0].as_py())
        if number == 4:
            raise error
        return {"half": -number} if number == 6 else pa.table({"half": pa.array([-8], pa.int32())})

    sink = semel.Files(archive.folder, dead_letters=True)
    with pytest.raises(semel.ConfigError, match=r"the function returned list; .* expected None or a pyarrow.Table"):
        archive.process(lambda table: [{"half": 1}], sink=sink, tables=True)
    stats = archive.process(halved, sink=sink, tables=True, on_error=instead)
    assert (stats.dead_letters, stats.records_out) == (1, 9)
    assert sorted(semel.read_files(archive.folder)["half"].to_pylist()) == [-8, -6, 0, 0, 1, 1, 2, 3, 4]
    assert semel.read_files(archive.folder, dead_letters=True)["reason"].to_pylist() == ["ValueError: bad"]


def test_json_lines(archive: Archive) -> None:
    archive.send(30)
    archive.process(lambda record: {"n": int(record.value)}, sink=semel.Files(archive.folder, format="jsonl"))
    compact(archive.folder)
    (path,) = semel.committed_files(archive.folder)
    assert sorted(json.loads(line)["n"] for line in Path(path).read_text().splitlines()) == list(range(30))
    with pytest.raises(semel.FolderError, match=r"belongs to application .* with format 'jsonl'"):
        archive.process()


def test_a_full_disk_ends_the_loop_and_nothing_of_the_unit_is_visible(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive.send(100)
    synced = []

    def fsync(handle: int) -> None:
        synced.append(handle)
        if len(synced) == 12:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(semel.FolderError, match="No space left on device; free space"):
        archive.process()
    assert len(synced) == 12
    monkeypatch.undo()
    archive.process()
    archive.check()


def test_a_folder_with_foreign_files_is_refused_and_they_are_left_alone(archive: Archive, caplog: Any) -> None:
    archive.send(20)
    archive.folder.mkdir()
    stranger = archive.folder / "report.csv"
    stranger.write_text("mine")
    with pytest.raises(semel.FolderError, match=r"holds report\.csv: semel did not write that"):
        archive.process()
    stranger.unlink()
    archive.process()
    stranger.write_text("mine")
    alike = archive.folder / f"semel-{'0' * 32}-00000001.parquet"  # of a writer that this folder never had
    alike.write_text("also mine")
    archive.send(20)
    archive.process()
    assert (stranger.read_text(), alike.read_text()) == ("mine", "also mine")
    assert "2 files that semel did not write" in caplog.text
    assert semel.read_files(archive.folder).num_rows == 40


def test_a_folder_or_a_topic_that_was_restored_is_refused_with_both_offsets(archive: Archive, tmp_path: Path) -> None:
    archive.send(20)
    archive.process()
    shutil.copytree(archive.folder, tmp_path / "backup")
    archive.send(20)
    archive.process()
    shutil.rmtree(archive.folder)
    shutil.copytree(tmp_path / "backup", archive.folder)
    with pytest.raises(semel.OlderFolderError, match=r"committed offset 20, the manifests of .* has 10.*reprocess"):
        archive.process()
    archive.process(sink=semel.Files(archive.folder, schema=SCHEMA, when_behind="reprocess"))
    archive.check()
    admin = AdminClient({"bootstrap.servers": archive.bootstrap})
    admin.delete_topics([archive.topic])[archive.topic].result(PATIENCE_S)
    create_topic(archive.bootstrap, archive.topic, PARTITIONS)
    archive.send(100)
    with pytest.raises(semel.OlderFolderError, match=r"at 20 of the topic with the id .* created anew"):
        archive.process()


def test_manifests_that_are_missing_or_damaged_are_refused(archive: Archive) -> None:
    archive.send(60)
    archive.process()
    manifests = sorted((archive.folder / "_semel").glob("manifest-*.json"))
    content = manifests[1].read_bytes()
    for damage, words in ((content[:-10], "cannot be read"), (None, "manifest 2 is missing")):
        manifests[1].unlink()
        if damage is not None:
            manifests[1].write_bytes(damage)
        with pytest.raises(semel.FolderError, match=words):
            archive.process()
        with pytest.raises(semel.FolderError, match=words):
            semel.read_files(archive.folder)
    manifests[1].write_bytes(content)
    archive.process()
    archive.check()


@pytest.mark.parametrize(
    ("folder", "words"),
    [("s3://bucket/x", "table format"), ("gs://bucket/x", "table format"), ("hdfs://node/x", "HDFS is not supported")],
)
def test_object_stores_and_hdfs_are_refused(folder: str, words: str) -> None:
    with pytest.raises(semel.ConfigError, match=words):
        semel.Files(folder)


# --- campaigns ---


@pytest.mark.timeout(300)
def test_short_campaign_violates_nothing(tmp_path: Path) -> None:
    proof = prove(tmp_path, "--workload", "files", "--rounds", "1", "--seed", "3")
    assert (proof.violations, proof.code) == ([], 0), proof.told
    assert proof.result["faults_fired"] >= 3, proof.told


@pytest.mark.full
@pytest.mark.timeout(3_600)
def test_long_campaign_of_300_kills_violates_nothing_and_hits_every_point(tmp_path: Path) -> None:
    options = ("--workload", "files", "--rounds", "96", "--faults-per-round", "12", "--seed", "2024")
    proof = prove(tmp_path, *options, timeout_s=3_400)
    assert (proof.violations, proof.code) == ([], 0), proof.told
    kills = sum(count for what, count in proof.result["faults_by_kind"].items() if what.startswith("kill "))
    assert kills >= 300, proof.told
    assert set(proof.result["boundaries"]) >= {*FILES_POINTS, *COMPACTION_POINTS}, proof.told
