"""Apache Kafka reads what semel wrote: its own tools without complaint, its own broker from a copy of the folder."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from semel.local.apache_kafka import ApacheKafka, java_tool, quick_jvm
from semel.storage import PartitionLog
from semel.storage.cleaner import clean, plan, swap
from tests.support.waiting import PATIENCE_S
from tests.unit.storage.helpers import START_MS, Folder, all_records, append, append_in_transaction

pytestmark = pytest.mark.kafka

DUMP = "org.apache.kafka.tools.DumpLogSegments"
COMPLAINTS = re.compile(
    r"mismatch|out of order|not found|corrupt|not valid|isvalid: false|exception|error", re.IGNORECASE
)


def written_log(folder: Folder, **settings: object) -> PartitionLog:
    """Every kind of file: several segments, compression, idempotent and transactional data, aborts, an open end."""
    log = folder.log(segment_bytes=3000, index_interval_bytes=200, **settings)
    for number in range(40):
        append(
            log,
            values=[b"p%d-%d" % (number, part) for part in range(3)],
            keys=[b"key%d" % (number % 5)] * 3,
            producer_id=9,
            epoch=0,
            sequence=number * 3,
            timestamp_ms=START_MS + number * 10,
            compression=number % 5,
        )
        producer_id = 1 + number % 2
        append_in_transaction(log, producer_id, number // 2, [b"t%d" % number])
        log.append_marker(producer_id, 0, 0, commit=producer_id == 1, now_ms=START_MS + number * 10)
    return log


def dump(*paths: Path, deep: bool = False) -> str:
    options = ["--deep-iteration", "--print-data-log"] if deep else []
    done = java_tool(DUMP, *options, "--files", ",".join(str(path) for path in paths))
    assert not COMPLAINTS.search(done.stdout + done.stderr), done.stdout + done.stderr
    return done.stdout


def files_of(folder: Folder, suffix: str) -> list[Path]:
    found = sorted(folder.partition_path.glob("*" + suffix))
    assert found
    return found


def test_dump_log_segments_reads_every_file(folder: Folder, kafka_installation: Path) -> None:
    log = written_log(folder)
    append_in_transaction(log, 3, 0, [b"open"])
    end, segments = log.end_offset, len(log.segments)
    folder.data_dir.close()
    text = dump(*files_of(folder, ".log"), deep=True)
    offsets = [int(match) for match in re.findall(r"^\| offset: (\d+)", text, re.MULTILINE)]
    assert offsets == list(range(end))
    assert text.count("endTxnMarker: COMMIT") == 20
    assert text.count("endTxnMarker: ABORT") == 20
    assert segments > 2
    assert dump(*files_of(folder, ".index")).count("offset: ") > 10
    assert dump(*files_of(folder, ".timeindex")).count("timestamp: ") >= segments
    aborted = dump(*files_of(folder, ".txnindex"))
    assert aborted.count("producerId: 2") == 20
    snapshots = dump(files_of(folder, ".snapshot")[-1])
    assert "producerId: 9 producerEpoch: 0" in snapshots
    assert "lastSequence: 119" in snapshots
    assert re.search(r"producerId: 3 .*currentTxnFirstOffset: (OptionalLong\[)?200", snapshots)


def test_dump_log_segments_reads_a_recovered_and_a_compacted_log(folder: Folder, kafka_installation: Path) -> None:
    log = written_log(folder, cleanup_policy=frozenset({"compact"}))
    made = plan(log, START_MS, force=True)
    assert made is not None
    assert swap(log, clean(made), START_MS)
    for number in range(40):
        append(log, values=[None], keys=[b"key%d" % (number % 5)])
    made = plan(log, START_MS, force=True)
    assert made is not None
    assert swap(log, clean(made), START_MS)
    log = folder.restart(clean=False)
    offsets = [record.offset for record in all_records(log)]
    log.close()
    text = dump(*files_of(folder, ".log"), deep=True)
    data = re.findall(r"^\| offset: (\d+) (?!.*endTxnMarker)", text, re.MULTILINE)
    assert [int(offset) for offset in data] == offsets
    derived = [
        p for p in folder.partition_path.iterdir() if p.suffix in (".index", ".timeindex", ".txnindex", ".snapshot")
    ]
    dump(*sorted(path for path in derived if path.stat().st_size))


@pytest.mark.full  # tests/kafka/test_on_disk_layout has a node serve the folder of a broker
def test_apache_kafka_serves_a_copy_of_the_folder(folder: Folder, kafka_installation: Path, tmp_path: Path) -> None:
    log = written_log(folder)
    expected = {record.offset: record.value for record in all_records(log)}
    aborted = {offset for offset, value in expected.items() if value.startswith(b"t") and int(value[1:]) % 2 == 1}
    folder.data_dir.close()
    with ApacheKafka(tmp_path / "kafka", jvm=quick_jvm()) as kafka:
        admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
        topic = NewTopic("t", 1, config={"retention.ms": "-1"})
        for future in admin.create_topics([topic]).values():
            future.result(PATIENCE_S)
        kafka.stop()
        (target,) = (path for path in (tmp_path / "kafka").rglob("t-0") if path.is_dir())
        for path in target.iterdir():
            if path.name != "partition.metadata":
                path.unlink()
        for path in folder.partition_path.iterdir():
            if path.name != "partition.metadata":
                shutil.copy(path, target / path.name)
        kafka.start()
        for isolation, wanted in (
            ("read_uncommitted", expected),
            ("read_committed", {offset: value for offset, value in expected.items() if offset not in aborted}),
        ):
            assert consumed(kafka.bootstrap, isolation, len(wanted)) == wanted


def consumed(bootstrap: str, isolation: str, count: int) -> dict[int, bytes]:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": isolation, "isolation.level": isolation})
    consumer.assign([TopicPartition("t", 0, 0)])
    found: dict[int, bytes] = {}
    while len(found) < count:
        message = consumer.poll(PATIENCE_S)
        assert message is not None, f"only {len(found)} of {count} records came"
        assert message.error() is None
        found[message.offset()] = message.value()
    consumer.close()
    return found
