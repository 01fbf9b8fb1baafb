"""What semel writes to the disk is what Kafka writes: Kafka's dump tool reads it, and Kafka itself serves it."""

from __future__ import annotations

import random
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

import semel
from benchmarks.peers.raw_client import RawClient
from semel.local.apache_kafka import ApacheKafka, java_tool, quick_jvm
from semel.local.brokers import SemelBroker
from semel.protocol.errors import ErrorCode
from tests.support.reading import create_topic
from tests.support.waiting import PATIENCE_S, eventually

TOPIC, COMPACTED, GROUP, PARTITIONS = "mixed", "compacted", "readers", 2
SEGMENTS = {"segment.bytes": str(1 << 20), "index.interval.bytes": "1024"}
OPTIONS = (
    *("--set", "offsets.topic.num.partitions=3"),
    *("--set", "transaction.state.log.num.partitions=3"),
    *("--set", "log.cleaner.backoff.ms=100"),
)
TRANSACTIONS = 6  # every second one is aborted

# Everything that DumpLogSegments says about files in order. A complaint is a line of another kind. (It remarks on the
# first record of every segment but a partition's first, of Kafka's own too, that it does not follow offset -1.)
IN_ORDER = re.compile(
    r"""Dumping\ \S+$
    | Log\ starting\ offset:\ \d+$
    | baseOffset:\ .*\ isvalid:\ true$
    | \|\ offset:\ \d+\ .*
    | offset:\ \d+\ position:\ \d+$
    | timestamp:\ \d+\ offset:\ \d+$
    | version:\ 0\ producerId:\ \d+\ firstOffset:\ \d+\ lastOffset:\ \d+\ lastStableOffset:\ \d+$
    | producerId:\ \d+\ producerEpoch:\ \d+\ coordinatorEpoch:\ .*
    | \S+\ passed\ sanity\ check\.$
    | Non-consecutive\ offsets\ in\ \S+$
    | \ \ -1\ is\ followed\ by\ \d+$""",
    re.VERBOSE,
)


def dump(*words: str | Path, files: list[Path]) -> list[str]:
    assert files
    done = java_tool("DumpLogSegments", *words, "--files", ",".join(map(str, files)))
    return [*done.stdout.splitlines(), *done.stderr.splitlines()]


def complaints(lines: list[str]) -> list[str]:
    return [line for line in lines if not IN_ORDER.match(line)]


# -- a mixed load ------------------------------------------------------------------------------------------------------


@dataclass
class Written:
    """A data folder after a load and a clean stop, and what a reader saw in it before that."""

    folder: Path
    committed: list[Any] = field(default_factory=list)
    uncommitted: list[Any] = field(default_factory=list)
    offsets_at: dict[int, list[int]] = field(default_factory=dict)  # by timestamp
    replayed: tuple[int, int] = (-1, -1)  # the offset that a batch of the idempotent producer got, its producer id

    def files(self, suffix: str, topic: str = TOPIC) -> list[Path]:
        return sorted(path for path in self.folder.glob(f"{topic}-*/*{suffix}") if path.stat().st_size)


@pytest.fixture(scope="module")
def written(kafka_installation: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    result = Written(tmp_path_factory.mktemp("layout") / "semel")
    with SemelBroker(result.folder, *OPTIONS) as broker:
        create_topics(broker.bootstrap)
        for compression in ("none", "gzip", "snappy", "lz4", "zstd"):
            write_plainly(broker.bootstrap, compression)
        write_transactions(broker.bootstrap)
        commit_positions(broker.bootstrap)
        result.replayed = write_with_a_sequence(broker.bootstrap)
        write_until_compacted(broker)
        result.committed = read_all(broker.bootstrap, "read_committed")
        result.uncommitted = read_all(broker.bootstrap, "read_uncommitted")
        result.offsets_at = offsets_by_time(broker.bootstrap, result.committed)
        broker.stop()
    return result


def create_topics(bootstrap: str) -> None:
    compacted = {**SEGMENTS, "cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.01"}
    topics = [NewTopic(TOPIC, PARTITIONS, 1, config=SEGMENTS), NewTopic(COMPACTED, 1, 1, config=compacted)]
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    for future in admin.create_topics(topics).values():
        future.result(PATIENCE_S)


def write_plainly(bootstrap: str, compression: str) -> None:
    """Keys and values that may be null, headers, batches of all sizes; with gzip, not idempotent."""
    settings = {"compression.type": compression, "enable.idempotence": compression != "gzip", "linger.ms": 2}
    producer = Producer({"bootstrap.servers": bootstrap, "log_level": 0, **settings})
    rng = random.Random(compression)
    for number in range(1_200):
        producer.produce(
            TOPIC,
            None if number % 50 == 7 else text(rng, 1_000),
            key=b"key %d" % number if number % 3 else None,
            headers=[("trace", b"%d" % number), ("nothing", None)] if number % 5 == 0 else None,
            partition=number % PARTITIONS,
        )
        if number % 100 == 99:
            assert producer.flush(PATIENCE_S) == 0


def text(rng: random.Random, length_max: int) -> bytes:
    """The dump tool prints values as they are: no line breaks, please."""
    return rng.randbytes(rng.randint(0, length_max // 2)).hex().encode()


def write_transactions(bootstrap: str) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": "payments", "log_level": 0})
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "in-a-transaction", "log_level": 0})
    producer.init_transactions(PATIENCE_S)
    for transaction in range(TRANSACTIONS):
        producer.begin_transaction()
        for number in range(20):
            producer.produce(TOPIC, b"%d in %d" % (number, transaction), partition=number % PARTITIONS)
        assert producer.flush(PATIENCE_S) == 0  # an abort would take back what was not sent yet
        position = TopicPartition(TOPIC, 0, transaction)
        producer.send_offsets_to_transaction([position], consumer.consumer_group_metadata(), PATIENCE_S)
        if transaction % 2:
            producer.abort_transaction(PATIENCE_S)
        else:
            producer.commit_transaction(PATIENCE_S)
    consumer.close()


def commit_positions(bootstrap: str) -> None:
    settings = {"group.id": GROUP, "auto.offset.reset": "earliest", "enable.auto.commit": False, "log_level": 0}
    consumer = Consumer({"bootstrap.servers": bootstrap, **settings})
    consumer.subscribe([TOPIC])
    assert consumer.consume(100, PATIENCE_S), "the group got nothing to read"
    consumer.commit(asynchronous=False)
    consumer.close()


def write_with_a_sequence(bootstrap: str) -> tuple[int, int]:
    with RawClient(bootstrap) as client:
        producer_id = client.init(None).producer_id
        appended = client.produce(None, producer_id, 0, (TOPIC, 0), [b"once"], sequence=0, transactional=False)
        assert appended.error is ErrorCode.NONE
        return appended.offset, producer_id


def write_until_compacted(broker: SemelBroker) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap, "log_level": 0, "batch.size": 20_000})
    rng = random.Random(1)
    for number in range(3_000):
        producer.produce(COMPACTED, text(rng, 1_800) if number % 10 else None, key=b"%d" % (number % 100))
        if len(producer) > 500:
            producer.flush(PATIENCE_S)
    assert producer.flush(PATIENCE_S) == 0
    first = broker.directory / f"{COMPACTED}-0" / f"{0:020d}.log"
    eventually(
        lambda: first.stat().st_size if first.exists() else 500_000,  # it is not there while it is replaced
        lambda size: size < 500_000,
        otherwise="the first segment was not compacted",
    )


def read_all(bootstrap: str, isolation: str, topic: str = TOPIC, partitions: int = PARTITIONS) -> list[Any]:
    """Every record with all that a client can see of it."""
    settings = {"group.id": "check", "isolation.level": isolation, "enable.partition.eof": True, "log_level": 0}
    consumer = Consumer({"bootstrap.servers": bootstrap, "check.crcs": True, **settings})
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(partitions)])
    seen, ended = [], 0
    deadline = time.monotonic() + PATIENCE_S
    while ended < partitions:
        assert time.monotonic() < deadline, f"{topic} could not be read to its end; {len(seen)} records came"
        for message in consumer.consume(1_000, 0.2):
            if message.error() is not None:
                assert message.error().code() == KafkaError._PARTITION_EOF, message.error()
                ended += 1
            else:
                place = (message.partition(), message.offset(), message.timestamp())
                seen.append((*place, message.key(), message.value(), message.headers()))
    consumer.close()
    return sorted(seen, key=lambda record: record[:2])


def offsets_by_time(bootstrap: str, records: list[Any]) -> dict[int, list[int]]:
    """The answers to "where does this time start", which come from the time index."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "check", "log_level": 0})
    times = sorted({record[2][1] for record in records})
    answers = {}
    for time_ms in times[:: max(1, len(times) // 20)]:
        asked = [TopicPartition(TOPIC, partition, time_ms) for partition in range(PARTITIONS)]
        answers[time_ms] = [found.offset for found in consumer.offsets_for_times(asked, PATIENCE_S)]
    consumer.close()
    return answers


# -- Kafka's dump tool -------------------------------------------------------------------------------------------------


def test_the_load_made_every_kind_of_file(written: Written) -> None:
    assert len(written.files(".log")) >= 2 * PARTITIONS, "the topic should have rolled"
    assert len(written.files(".index")) >= PARTITIONS
    assert len(written.files(".timeindex")) >= PARTITIONS
    assert len(written.files(".txnindex")) >= PARTITIONS
    assert len(written.files(".snapshot")) >= 2 * PARTITIONS
    aborted = [record for record in written.uncommitted if record not in written.committed]
    assert len(aborted) == 20 * TRANSACTIONS // 2


@pytest.mark.parametrize("topic", [TOPIC, COMPACTED])
def test_dump_tool_reads_every_record(written: Written, topic: str) -> None:
    lines = dump("--deep-iteration", "--print-data-log", files=written.files(".log", topic))
    gaps = r"  \d+ is followed by \d+" if topic == COMPACTED else "no gaps"
    assert [line for line in complaints(lines) if not re.match(gaps, line)] == []
    records = [line for line in lines if line.startswith("| offset:") and "endTxnMarker" not in line]
    if topic == TOPIC:
        assert len(records) == len(written.uncommitted)
        assert sum("headerKeys: [trace,nothing]" in line for line in records) == sum(
            bool(record[5]) for record in written.uncommitted
        )
        markers = [line for line in lines if "endTxnMarker" in line]
        assert len(markers) == PARTITIONS * TRANSACTIONS
        assert sum("endTxnMarker: COMMIT" in line for line in markers) == PARTITIONS * TRANSACTIONS // 2
    else:
        assert 100 <= len(records) < 3_000


@pytest.mark.parametrize("check", ["--deep-iteration", "--verify-index-only", "--index-sanity-check"])
def test_dump_tool_finds_the_indexes_true_to_their_logs(written: Written, check: str) -> None:
    topics = (TOPIC, COMPACTED, "__consumer_offsets", "__transaction_state")
    indexes = [path for topic in topics for suffix in (".index", ".timeindex") for path in written.files(suffix, topic)]
    lines = dump(check, files=indexes)
    assert complaints(lines) == []
    assert sum(line.startswith("Dumping") for line in lines) == len(indexes)
    if check == "--index-sanity-check":
        assert sum("passed sanity check" in line for line in lines) == len(indexes)


def test_dump_tool_reads_aborted_transactions_and_producer_snapshots(written: Written) -> None:
    lines = dump(files=[*written.files(".txnindex"), *written.files(".snapshot")])
    assert complaints(lines) == []
    assert sum(line.startswith("version: 0") for line in lines) == PARTITIONS * TRANSACTIONS // 2
    offset, producer_id = written.replayed
    (replayed,) = [line for line in lines if line.startswith(f"producerId: {producer_id} ")]
    assert f"lastSequence: 0 lastOffset: {offset} " in replayed


def test_dump_tool_decodes_the_offsets_of_groups(written: Written) -> None:
    lines = dump("--offsets-decoder", files=written.files(".log", "__consumer_offsets"))
    assert complaints(lines) == []
    text = "\n".join(lines)
    assert f'"group":"{GROUP}","topic":"{TOPIC}","partition":' in text  # of whichever it got to read
    assert f'"group":"in-a-transaction","topic":"{TOPIC}","partition":0' in text
    assert '"protocolType":"consumer"' in text


def test_dump_tool_decodes_the_states_of_transactions(written: Written) -> None:
    lines = dump("--transaction-log-decoder", files=written.files(".log", "__transaction_state"))
    assert complaints(lines) == []
    records = [line for line in lines if '"transactionalId":"payments"' in line]
    for status, times in {"1": None, "2": TRANSACTIONS // 2, "3": TRANSACTIONS // 2, "4": None, "5": None}.items():
        found = sum(f'"transactionStatus":{status},' in line for line in records)
        assert found == times if times is not None else found > 0, f"status {status} is there {found} times"


def test_complaints_are_noticed(written: Written, tmp_path: Path) -> None:
    """The tests above mean something: one wrong entry in an index, one flipped bit in a log, one torn tail."""
    partition = tmp_path / f"{TOPIC}-0"
    shutil.copytree(written.folder / f"{TOPIC}-0", partition)
    log, index = partition / f"{0:020d}.log", partition / f"{0:020d}.index"
    whole = index.read_bytes()
    index.write_bytes(whole[:3] + bytes([whole[3] ^ 1]) + whole[4:])
    assert complaints(dump("--verify-index-only", files=[index]))
    data = log.read_bytes()
    log.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    assert complaints(dump(files=[log]))
    log.write_bytes(data[:-1])
    assert complaints(dump(files=[log]))


# -- Apache Kafka ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["after a clean stop", pytest.param("after a crash", marks=pytest.mark.full)])
def kafka(request: pytest.FixtureRequest, written: Written, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Apache Kafka on a copy of the topics' folders: it trusts indexes and snapshots, or, after a crash, recovers."""
    with ApacheKafka(tmp_path_factory.mktemp("layout-kafka") / "node", jvm=quick_jvm()) as node:
        create_topics(node.bootstrap)
        node.stop()
        data = node.directory / "data"
        for folder in (*data.glob(f"{TOPIC}-*"), *data.glob(f"{COMPACTED}-*")):
            adopt(written.folder / folder.name, folder)
        if request.param == "after a crash":
            (data / ".kafka_cleanshutdown").unlink()
        node.start()
        yield node.bootstrap


def adopt(ours: Path, theirs: Path) -> None:
    """Puts semel's files in the place of Kafka's; only the topic's id stays, as Kafka's metadata knows it."""
    metadata = (theirs / "partition.metadata").read_text()
    shutil.rmtree(theirs)
    shutil.copytree(ours, theirs)
    (theirs / "partition.metadata").write_text(metadata)


def test_kafka_serves_the_same_records(written: Written, kafka: str) -> None:
    assert read_all(kafka, "read_committed") == written.committed
    assert read_all(kafka, "read_uncommitted") == written.uncommitted
    assert offsets_by_time(kafka, written.committed) == written.offsets_at


def test_kafka_remembers_what_semels_producers_wrote(written: Written, kafka: str) -> None:
    """A batch that semel acknowledged is sent again, to Kafka: it is known there, from semel's snapshot."""
    offset, producer_id = written.replayed
    with RawClient(kafka) as client:
        again = client.produce(None, producer_id, 0, (TOPIC, 0), [b"once"], sequence=0, transactional=False)
        assert (again.error, again.offset) == (ErrorCode.NONE, offset)
        gap = client.produce(None, producer_id, 0, (TOPIC, 0), [b"gap"], sequence=5, transactional=False)
        assert gap.error is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert read_all(kafka, "read_committed") == written.committed


def test_kafka_serves_a_topic_that_semel_compacted(written: Written, kafka: str) -> None:
    with SemelBroker(written.folder, *OPTIONS) as broker:
        ours = read_all(broker.bootstrap, "read_committed", COMPACTED, 1)
        broker.stop()
    theirs = read_all(kafka, "read_committed", COMPACTED, 1)
    assert len(theirs) < 3_000
    latest = [{record[3]: record[4] for record in records} for records in (ours, theirs)]
    assert latest[0] == latest[1]


@pytest.mark.full
def test_kafka_reads_a_transaction_that_a_new_owner_keeps(kafka_installation: Path, tmp_path: Path) -> None:
    """KIP-939: no timeout, and the identity of the new owner beside that of the records."""
    two_phase = ("--set", "transaction.two.phase.commit.enable=true")
    with SemelBroker(tmp_path, *OPTIONS, *two_phase) as broker:
        create_topic(broker.bootstrap, TOPIC)
        for _ in range(2):  # the second one keeps what the first one prepared
            owner = semel.Producer(bootstrap_servers=broker.bootstrap, transactional_id="x", two_phase_commit=True)
            with owner as producer:
                if producer.init_transactions(keep_prepared=True) is None:
                    producer.begin_transaction()
                    producer.send(TOPIC, b"v")
                    producer.prepare_transaction()
        broker.stop()
    files = sorted(path for path in tmp_path.glob("__transaction_state-*/*.log") if path.stat().st_size)
    lines = dump("--transaction-log-decoder", files=files)
    assert complaints(lines) == []
    last = [line for line in lines if "payload" in line][-1]
    for field_of_it in ('"producerEpoch":0', '"nextProducerEpoch":1', '"transactionTimeoutMs":2147483647'):
        assert field_of_it in last
