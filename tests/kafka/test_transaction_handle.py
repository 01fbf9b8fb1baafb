"""One transaction written by many processes, on both brokers and in both generations: what the Spark sink rests on."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Iterator
from multiprocessing.pool import Pool

import pyarrow as pa
import pytest

from semel.client.errors import FatalError, FencedError, IllegalStateError, KafkaError
from semel.client.producer.coordinator import EndUnknownError
from semel.client.producer.handle import Opening, PartitionWriter, TransactionHandle, TransactionOwner, WrittenPartition
from semel.client.settings import ProducerSettings
from semel.client.types import OffsetAndMetadata
from semel.local.apache_kafka import kafka_libs, kafka_version
from semel.protocol.columns_encode import ColumnEncoder
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.records import PRODUCE
from semel.protocol.messages.transactions import END_TXN
from semel.prove.proxy import Effect, Proxy, Rule
from semel.spark.encoding import Targets
from semel.spark.sink_options import Precautions
from semel.spark.topics import limits_of
from semel.spark.writing import write_blobs
from tests.support.broker import Cluster
from tests.support.reading import Seen, committed_offset, create_topic, read_topic
from tests.support.waiting import eventually

PARTITIONS = 4


@pytest.fixture
def topic(cluster: Cluster) -> str:
    return create_topic(cluster.bootstrap, cluster.unique("shared"), partitions=PARTITIONS)


@pytest.fixture(params=[1, 2], ids=["TV1", "TV2"])
def settings(cluster: Cluster, request: pytest.FixtureRequest) -> ProducerSettings:
    return ProducerSettings.of(
        bootstrap_servers=cluster.bootstrap,
        transactional_id=cluster.unique("shared-owner"),
        transaction_version_max=request.param,
        retry_backoff_ms=10,
    )


@pytest.fixture
def owner(settings: ProducerSettings) -> Iterator[TransactionOwner]:
    with TransactionOwner(settings) as owner:
        owner.own(30)
        assert owner.generation == settings.transaction_version_max
        yield owner


def rows(prefix: str, count: int) -> pa.Table:
    return pa.table(
        {"value": [f"{prefix}-{i}" for i in range(count)], "timestamp": [1_700_000_000_000 + i for i in range(count)]}
    )


def read_when_there(
    cluster: Cluster, topic: str, count: int, otherwise: str = "the commit did not become visible"
) -> list[Seen]:
    """The rows of the topic, once they are so many: a commit is answered a moment before its markers are written."""
    return eventually(
        lambda: read_topic(cluster.bootstrap, topic),
        lambda rows: len(rows) == count,
        otherwise=f"{otherwise}, {count} rows should be there",
    )


def places(topic: str) -> list[tuple[str, int]]:
    return [(topic, partition) for partition in range(PARTITIONS)]


def write_task(arguments: tuple[bytes, str, int, int, str]) -> tuple[Opening, list[WrittenPartition]]:
    """What a Spark task does: open with its mark, go on only as the owner."""
    pickled, topic, partition, attempt, prefix = arguments
    handle: TransactionHandle = pickle.loads(pickled)
    with handle.writer() as writer:
        opening = writer.open(topic, partition, rows(prefix, 50).slice(0, 1), mark=attempt)
        if not opening.is_owner:
            return opening, []
        writer.write(topic, partition, rows(prefix, 50).slice(1, 20))
        writer.write(topic, partition, rows(prefix, 50).slice(21))
        return opening, writer.finish(30)


@pytest.mark.parametrize("stored", ["zstd", "uncompressed"])
def test_tasks_open_partitions_of_a_topic_whose_batches_the_broker_compresses_again(
    cluster: Cluster, stored: str
) -> None:
    """Kafka gives such a batch another base timestamp, and that is the mark."""
    topic = create_topic(cluster.bootstrap, cluster.unique("compressed"), compression_type=stored)
    settings = ProducerSettings.of(
        bootstrap_servers=cluster.bootstrap, transactional_id=cluster.unique("compressor"), compression_type="gzip"
    )
    blobs = [(0, 1, 0, first_batch(rows(stored, 1))) for _ in range(2)]
    with TransactionOwner(settings) as owner:
        owner.own(30)
        handle = owner.begin([(topic, 0)])
        known = Targets.of(owner.cluster, [topic], limits_of(owner.cluster, [topic]))
        [report] = write_blobs(handle, known, Precautions(), iter(blobs), mark=77)
        assert owner.last_sequences([(topic, 0)]) == {(topic, 0): report.sequence} == {(topic, 0): 1}
        owner.end(True, 30)
        if cluster.name != "semel":  # which keeps the base timestamp
            handle, unknown = owner.begin([(topic, 0)]), Targets.of(owner.cluster, [topic])
            with pytest.raises(FatalError, match=f"stored a batch .* {known.compression(topic)} that was sent in gzip"):
                write_blobs(handle, unknown, Precautions(), iter(blobs), mark=78)
            owner.end(False, 30)
    assert len(read_when_there(cluster, topic, 2)) == 2


def first_batch(table: pa.Table) -> memoryview:
    """A record batch as the first half of a write job encodes it."""
    [[batch]] = ColumnEncoder(table["value"], None, None, table["timestamp"]).encode_groups(None, [1], [0])
    return batch.buffer


@pytest.fixture(scope="module")
def processes() -> Iterator[Pool]:
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        yield pool


def test_processes_write_into_one_transaction_and_of_two_attempts_one_wins(
    cluster: Cluster, topic: str, owner: TransactionOwner, processes: Pool
) -> None:
    expected: set[bytes] = set()
    for number in range(3):
        commit = number != 1
        handle = pickle.dumps(owner.begin(places(topic)))
        jobs = [(handle, topic, p, 1000 * number + p + 1, f"{number}-{p}") for p in range(PARTITIONS)]
        rival = (handle, topic, 0, 1000 * number + 99, f"{number}-rival")
        *outcomes, second = processes.map(write_task, [*jobs, rival], chunksize=1)
        assert [outcomes[0][0].is_owner, second[0].is_owner].count(True) == 1
        assert all(opening.is_owner for opening, _ in outcomes[1:])
        reports = [written for _, report in [*outcomes, second] for written in report]
        assert {(w.topic, w.partition): w.last_sequence for w in reports} == owner.last_sequences(places(topic))
        assert all(w.record_count == 50 and w.last_offset - w.first_offset == 49 for w in reports)
        owner.send_offsets({(topic, 0): OffsetAndMetadata(number + 1)}, owner.settings.transactional_id or "")
        owner.end(commit, 30)
        if commit:
            winner = f"{number}-0" if outcomes[0][0].is_owner else f"{number}-rival"
            for prefix in (winner, *(f"{number}-{p}" for p in range(1, PARTITIONS))):
                expected |= {value.encode() for value in rows(prefix, 50)["value"].to_pylist()}
    seen = read_when_there(cluster, topic, len(expected))
    assert {row.value for row in seen} == expected
    assert {row.timestamp - 1_700_000_000_000 for row in seen} == set(range(50)), "the mark does not move timestamps"
    assert committed_offset(cluster.bootstrap, owner.settings.transactional_id or "", topic) == 3


@pytest.mark.parametrize("is_refused_while_sending", [False, True], ids=["refused later", "refused while sending"])
def test_an_attempt_that_comes_late_learns_whose_the_partition_is(
    topic: str, owner: TransactionOwner, monkeypatch: pytest.MonkeyPatch, is_refused_while_sending: bool
) -> None:
    """A broker keeps five batches of a producer: after more it refuses an opening and does not name the owner."""
    handle = owner.begin(places(topic))
    with handle.writer() as first, handle.writer() as late:
        if is_refused_while_sending:  # the response is there before the writer begins to wait for it
            step = late._sender.step
            monkeypatch.setattr(late._sender, "step", lambda *_: [step(5) for _ in range(2)])
        assert first.open(topic, 0, rows("a", 1), mark=77).is_owner
        for number in range(6):
            first.write(topic, 0, rows(f"b{number}", 1))
            first.flush(30)
        assert late.open(topic, 0, rows("c", 1), mark=88) == Opening(False, -1, 77)
    owner.end(False, 30)


@pytest.mark.parametrize("effect", [Effect.DROP_REQUEST, Effect.DROP_RESPONSE, Effect.TRUNCATE_RESPONSE])
def test_a_writer_behind_a_bad_network_writes_once(
    cluster: Cluster, topic: str, owner: TransactionOwner, effect: Effect
) -> None:
    handle = owner.begin(places(topic))
    with Proxy(cluster.bootstrap) as proxy:
        faults = [proxy.add(Rule(PRODUCE, effect, nth=nth)) for nth in (1, 3, 4)]
        behind = TransactionHandle(
            handle.settings.replace(bootstrap_servers=(proxy.bootstrap,), batch_size=200),
            handle.producer_id,
            handle.epoch,
            handle.generation,
            handle.partitions,
        )
        with behind.writer() as writer:
            opening = writer.open(topic, 0, rows("a", 1), mark=77)
            assert opening == Opening(True, opening.offset, 77)
            writer.write(topic, 0, rows("b", 100))
            (written,) = writer.finish(30)
        for fault in faults:
            fault.assert_fired()
    assert (written.record_count, written.last_sequence) == (101, 100)
    owner.end(True, 30)
    seen = read_when_there(cluster, topic, 101)
    assert [row.value for row in seen] == [b"a-0", *(b"b-%d" % i for i in range(100))]


def _write_and_wait(writer: PartitionWriter, topic: str) -> None:
    writer.write(topic, 0, rows("late", 5))
    writer.flush(30)


def test_a_straggler_of_an_earlier_transaction_is_refused(
    cluster: Cluster, topic: str, owner: TransactionOwner
) -> None:
    old = owner.begin(places(topic))
    with old.writer() as writer:
        writer.write(topic, 0, rows("old", 5))
        writer.finish(30)
        owner.end(False, 30)
        new = owner.begin(places(topic))
        assert new.epoch > old.epoch
        with new.writer() as current:
            current.write(topic, 0, rows("new", 5))
            current.finish(30)
        with pytest.raises(KafkaError) as refused:
            _write_and_wait(writer, topic)
        assert refused.value.code in (
            ErrorCode.INVALID_PRODUCER_EPOCH,
            ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
            ErrorCode.TRANSACTION_ABORTABLE,
            ErrorCode.INVALID_TXN_STATE,
        )
    owner.end(True, 30)
    seen = read_when_there(cluster, topic, 5)
    assert {row.value for row in seen} == {b"new-%d" % i for i in range(5)}


def test_after_an_end_without_an_answer_renewing_tells_whether_the_id_is_ours(
    cluster: Cluster, topic: str, settings: ProducerSettings
) -> None:
    with Proxy(cluster.bootstrap) as proxy:
        slow = settings.replace(bootstrap_servers=(proxy.bootstrap,), request_timeout_ms=300)
        with TransactionOwner(slow) as owner, TransactionOwner(settings) as other:
            owner.own(30)
            handle = owner.begin(places(topic))
            with handle.writer() as writer:
                writer.write(topic, 0, rows("x", 3))
                writer.finish(30)
            fault = proxy.add(Rule(END_TXN, Effect.SILENCE_RESPONSE, times=100))
            with pytest.raises(EndUnknownError) as unknown:
                owner.end(True, 4.0)  # time enough to send it
            fault.assert_fired()
            assert unknown.value.maybe_sent
            proxy.clear()
            # The request is on its way: on a busy machine it may still be.
            read_when_there(cluster, topic, 3, "the broker got EndTxn and did not commit")
            before = owner.identity
            assert before is not None
            assert owner.renew(30).epoch > before.epoch
            assert len(read_topic(cluster.bootstrap, topic)) == 3, "what was decided is in the log"
            other.own(30)
            with pytest.raises(FencedError):
                owner.renew(30)


def test_wrong_use_is_explained(topic: str, settings: ProducerSettings, owner: TransactionOwner) -> None:
    with pytest.raises(IllegalStateError, match=r"own\(\) first"):
        TransactionOwner(settings).begin([])
    handle = owner.begin([(topic, 0)])
    with handle.writer() as writer:
        writer.open(topic, 0, rows("x", 1), mark=1)
        with pytest.raises(IllegalStateError, match="opened before"):
            writer.open(topic, 0, rows("x", 1), mark=2)
        if owner.generation == 1:
            with pytest.raises(IllegalStateError, match=r"the owner must name it in begin\(\)"):
                writer.write(topic, 1, rows("x", 1))
    with pytest.raises(IllegalStateError, match="closed"):
        writer.flush()
    owner.end(False, 30)


def test_an_open_transaction_is_ended_before_the_id_is_renewed_where_kafka_needs_it(
    cluster: Cluster, topic: str, settings: ProducerSettings
) -> None:
    """Kafka before 4.1 takes an owner that does not for another one, and fences it (see `scripts/kafka-matrix`).
    Elsewhere the renewal aborts it, with an epoch that keeps stragglers out of the partitions."""
    is_old = cluster.name == "apache_kafka" and kafka_version(kafka_libs()) < (4, 1)
    with Proxy(cluster.bootstrap) as proxy:
        behind = settings.replace(bootstrap_servers=(proxy.bootstrap,))
        with TransactionOwner(behind) as owner:
            first = owner.own(30)
            write_three(owner, topic)
            assert owner.renew(30).epoch > first.epoch
            assert proxy.seen[END_TXN.key] == int(is_old)
            write_three(owner, topic)
            owner.end(commit=True)
            ends = proxy.seen[END_TXN.key]
            owner.renew(30)
            assert proxy.seen[END_TXN.key] == ends, "nothing was open"
    read_when_there(cluster, topic, 3)


def write_three(owner: TransactionOwner, topic: str) -> None:
    with owner.begin(places(topic)).writer() as writer:
        writer.write(topic, 0, rows("open", 3))
        writer.finish(30)
