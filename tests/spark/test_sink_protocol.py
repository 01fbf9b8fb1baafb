"""The sink's protocol without Spark: a job is a function of the test that writes into the transaction."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pyarrow as pa
import pytest

import semel
from semel.client.cluster import Cluster as ClientCluster
from semel.client.errors import FencedError, KafkaError, error_of
from semel.client.producer.batches import Identity
from semel.client.settings import ClientSettings
from semel.local.brokers import SemelBroker
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.topics import CREATE_TOPICS, CreatableTopicResult, CreateTopicsResponse
from semel.spark import ledger_topic, owners
from semel.spark import sink as sink_module
from semel.spark.base_sink import SinkError
from semel.spark.checkpoint import short_lived
from semel.spark.failures import Cancelled
from semel.spark.ledger import LostLedgerError, MicroBatch, topic_of
from semel.spark.ledger_topic import create, last_entry
from semel.spark.sink import PlainSink, Sink
from semel.spark.sink_options import SinkOptions
from semel.spark.transaction import FencedSinkError, RefusedError
from semel.spark.writing import Report
from tests.support.broker import Cluster
from tests.support.reading import read_values
from tests.support.sinks import SinkRun, micro_batch
from tests.support.waiting import until

SEMEL = pytest.mark.parametrize("cluster", ["semel"], indirect=True)
BOTH = pytest.mark.parametrize(
    "cluster", ["semel", pytest.param("apache_kafka", marks=[pytest.mark.kafka, pytest.mark.full])], indirect=True
)


class Frame:
    """A DataFrame: rows for one partition, and nothing else."""

    def __init__(self, *values: str) -> None:
        self.values = values
        self.write = MagicMock()  # of Spark's DataFrameWriter: what goes to noop


class Application:
    """One application id, whose sinks read topic `source` and write topic `output`, of one partition each."""

    def __init__(self, cluster: Cluster) -> None:
        self.bootstrap = cluster.bootstrap
        self.id, self.source, self.output = (cluster.unique(f"sink-{stem}") for stem in ("app", "in", "out"))
        self.sinks: list[Sink] = []
        self.admin = semel.Admin({"bootstrap.servers": self.bootstrap})
        self.admin.create_topic(self.source, 1)
        self.admin.create_topic(self.output, 1)

    def sink(self, stateful: bool = False, run_id: str | None = None, **options: Any) -> Sink:
        made = Sink(SinkOptions(self.bootstrap, self.id, topic=self.output, **options))
        made._run = SinkRun(run_id, stateful)  # type: ignore[assignment]
        made.job = write
        self.sinks.append(made)
        return made

    def batch(self, number: int, start: int, end: int, query: str = "q") -> MicroBatch:
        return micro_batch(self.source, number, start, end, query)

    @property
    def ledger(self) -> str:
        return topic_of(self.id)

    def delete_ledger(self) -> None:
        self.admin.delete_topics([self.ledger])
        until(lambda: self.ledger not in self.admin.list_topics(), "the ledger topic stayed")

    def values(self) -> list[str]:
        return [(value or b"").decode() for _, _, value in read_values(self.bootstrap, self.output)]

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()
        self.admin.close()


def write(df: Any, options: Any, targets: Any, batch: MicroBatch, handle: Any) -> list[Report]:
    rows = pa.table({"value": pa.array([value.encode() for value in df.values], pa.binary())})
    with handle.writer() as writer:
        writer.write(*targets.place(0), rows)
        return [
            Report(0, w.record_count, 0, w.first_offset, w.last_offset, w.last_sequence, 0) for w in writer.finish()
        ]


@pytest.fixture
def app(cluster: Cluster) -> Iterator[Application]:
    made = Application(cluster)
    yield made
    made.close()


@pytest.fixture
def client(app: Application) -> Iterator[ClientCluster]:
    with ClientCluster(ClientSettings.of(bootstrap_servers=app.bootstrap, allow_auto_create_topics=False)) as made:
        yield made


@BOTH
def test_zombie_does_not_take_the_id_back_from_an_owner_whose_producer_id_was_rotated(app: Application) -> None:
    zombie = app.sink()
    zombie._batch(Frame("a"), app.batch(0, 0, 1))
    owner = app.sink()
    owner._batch(Frame("b"), app.batch(1, 1, 2))

    # After 32,766 epochs the owner gets another producer id; to the coordinator the zombie's is any other one then.
    assert owner.transaction.owner.identity is not None
    zombie.transaction.owner.identity = Identity(owner.transaction.owner.identity.producer_id + 1_000, 5)
    zombie.transaction.owner._epoch_used = False
    zombie.transaction.last = owner.transaction.last
    refused: list[ErrorCode | None] = []

    def fails(*args: Any) -> list[Report]:
        try:
            return write(*args)
        except FencedError as error:
            refused.append(error.code)
            raise

    zombie.job = fails
    with pytest.raises(FencedSinkError, match="taken over by another driver"):
        zombie._batch(Frame("c"), app.batch(2, 2, 3))
    assert refused == [ErrorCode.INVALID_PRODUCER_ID_MAPPING]
    owner._batch(Frame("d"), app.batch(2, 2, 3))
    assert app.values() == ["a", "b", "d"]


@SEMEL
def test_a_sink_that_is_made_and_not_used_fences_no_query_that_waits_for_its_first_row(app: Application) -> None:
    waiting = app.sink()
    app.sink()  # a cell of a notebook that runs again
    waiting._batch(Frame("a"), app.batch(0, 0, 1))
    assert app.values() == ["a"]


@SEMEL
def test_an_entry_has_no_checksum_of_other_rows_than_were_written(app: Application) -> None:
    sink = app.sink()
    sink._observed = lambda df: SimpleNamespace(frame=df, checksum=lambda: "spark:2:7:9")  # type: ignore[assignment]
    for number, values, checksum in ((0, ["a", "b"], "spark:2:7:9"), (1, ["c"], "")):
        sink._batch(Frame(*values), app.batch(number, number, number + 1))
        assert sink.transaction.last is not None
        assert sink.transaction.last.checksum == checksum


@BOTH
def test_ledger_that_was_lost_is_not_taken_for_a_new_one(app: Application, client: ClientCluster) -> None:
    app.sink()._batch(Frame("a"), app.batch(0, 0, 1))
    app.delete_ledger()
    with pytest.raises(LostLedgerError, match="committed offsets"):
        last_entry(client, app.id)  # what startingOffsets=committed reads
    for _ in range(2):  # the first one creates the topic anew
        with pytest.raises(LostLedgerError, match="committed offsets") as refused:
            app.sink()
    assert json.dumps({app.source: {"0": 1}}) in str(refused.value)
    app.sink(adopt_checkpoint=True)._batch(Frame("b"), app.batch(1, 1, 2))
    app.sink()._batch(Frame("c"), app.batch(2, 2, 3))
    assert app.values() == ["a", "b", "c"]


@SEMEL
def test_ledger_whose_entries_were_deleted_is_not_taken_for_a_new_one(app: Application) -> None:
    first = app.sink(source_cluster_is_other=True)
    first._batch(Frame("a"), app.batch(0, 0, 1))
    ledger_topic.wait_for_markers(first.transaction.owner.cluster, app.id)
    assert not app.admin.group_offsets(app.id)
    app.admin.alter_configs({"cleanup.policy": "delete"}, topic=app.ledger)
    app.admin.delete_records({(app.ledger, 0): -1})
    app.admin.alter_configs({"cleanup.policy": "compact"}, topic=app.ledger)
    with pytest.raises(LostLedgerError, match="log starts at offset 2"):
        app.sink(source_cluster_is_other=True)


@BOTH
def test_ledger_that_was_lost_is_known_by_the_last_transaction_where_no_offsets_are_stored(app: Application) -> None:
    first = app.sink(source_cluster_is_other=True)
    first._batch(Frame("a"), app.batch(0, 0, 1))
    assert not app.admin.group_offsets(app.id)
    app.delete_ledger()
    for _ in range(2):
        with pytest.raises(LostLedgerError, match="was committed"):
            app.sink(source_cluster_is_other=True)


@SEMEL
def test_first_batch_that_was_aborted_leaves_a_new_ledger(app: Application) -> None:
    first = app.sink()
    handle = first.transaction.owner.begin([(app.output, 0)])
    write(Frame("a"), None, first.transaction.targets, app.batch(0, 0, 1), handle)
    first.transaction.owner.end(commit=False)
    app.sink()._batch(Frame("a"), app.batch(0, 0, 1))
    assert app.values() == ["a"]


@SEMEL
@pytest.mark.parametrize("policy", ["delete", "compact,delete"])
def test_ledger_that_would_be_deleted_by_retention_is_refused(app: Application, policy: str) -> None:
    app.admin.create_topic(app.ledger, 1, configs={"cleanup.policy": policy})
    with pytest.raises(LostLedgerError, match=f"cleanup.policy={policy}"):
        app.sink()
    app.admin.alter_configs({"cleanup.policy": "compact"}, topic=app.ledger)
    app.sink()._batch(Frame("a"), app.batch(0, 0, 1))
    assert app.values() == ["a"]


@SEMEL
def test_one_unknown_topic_response_is_not_an_empty_ledger(
    app: Application, client: ClientCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    app.sink(source_cluster_is_other=True)._batch(Frame("a"), app.batch(0, 0, 1))
    real, unknown = client.topic, [2]

    def topic(name: str, *args: Any, **named: Any) -> Any:
        if unknown[0]:
            unknown[0] -= 1
            raise error_of(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"looking up topic {name!r}")
        return real(name, *args, **named)

    monkeypatch.setattr(client, "topic", topic)
    found = last_entry(client, app.id)
    assert unknown == [0]
    assert found is not None
    assert found.batch_id == 0


@SEMEL
def test_first_entry_whose_marker_comes_after_the_offsets_is_waited_for(
    app: Application, client: ClientCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    app.sink()._batch(Frame("a"), app.batch(0, 0, 1))
    until(lambda: app.admin.group_offsets(app.id), "the group got no offsets")
    real, waited = ledger_topic._read_last, list[bool]()

    def late(cluster: ClientCluster, name: str) -> Any:
        return real(cluster, name) if waited else (0, None)

    monkeypatch.setattr(ledger_topic, "_read_last", late)
    monkeypatch.setattr(ledger_topic, "wait_for_markers", lambda *_: waited.append(True))
    found = last_entry(client, app.id)
    assert waited
    assert found is not None


@SEMEL
def test_ledger_made_beforehand_needs_no_right_to_create_it(
    app: Application, client: ClientCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = client.call

    def call(target: Any, api: Any, request: Any, **named: Any) -> Any:
        if api is not CREATE_TOPICS:
            return real(target, api, request, **named)
        code = ErrorCode.TOPIC_AUTHORIZATION_FAILED.value
        return CreateTopicsResponse(topics=[CreatableTopicResult(name=app.ledger, error_code=code)])

    monkeypatch.setattr(client, "call", call)
    with pytest.raises(KafkaError, match="CREATE on topic"):
        create(client, app.id)
    app.admin.create_topic(app.ledger, 1, configs={"cleanup.policy": "compact"})
    create(client, app.id)


@SEMEL
def test_second_sink_of_the_same_run_and_id_is_refused_and_its_rows_do_not_vanish(app: Application) -> None:
    app.sink()._batch(Frame("a"), app.batch(0, 0, 1))
    first, second = app.sink(run_id="run"), app.sink(run_id="run")
    first._batch(Frame("b"), app.batch(1, 1, 2))
    with pytest.raises(SinkError, match="another sink of this query"):
        second._batch(Frame("c"), app.batch(1, 1, 2))
    assert app.values() == ["a", "b"]


@SEMEL
def test_second_sink_of_the_same_run_and_id_is_refused_at_most_once_too(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_module, "plain_job", lambda *_: [Report(0, 1, 0, 0, 0, 0, 0)])
    monkeypatch.setattr(sink_module, "settled", nullcontext)

    def sink(run_id: str) -> PlainSink:
        made = PlainSink(SinkOptions(app.bootstrap, app.id, topic=app.output, guarantee="at_most_once"))
        made._run = SinkRun(run_id)  # type: ignore[assignment]
        return made

    with closing(sink("run")) as first, closing(sink("run")) as second, closing(sink("another")) as restarted:
        first._batch(Frame("a"), app.batch(0, 0, 1))
        with pytest.raises(SinkError, match="another sink of this query"):
            second._batch(Frame("b"), app.batch(0, 0, 1))
        restarted._batch(Frame("a"), app.batch(0, 0, 1))
        assert [report.verdict for report in restarted.reports] == ["already tried"]


@SEMEL
def test_second_query_with_a_copied_application_id_is_refused_and_the_first_goes_on(app: Application) -> None:
    first = app.sink()
    first._batch(Frame("a"), app.batch(0, 0, 1))
    second = app.sink()
    with pytest.raises(RefusedError, match="Give each query its own application id"):
        second._batch(Frame("x"), app.batch(0, 0, 5, query="copied"))
    first._batch(Frame("b"), app.batch(1, 1, 2))
    assert app.values() == ["a", "b"]


@SEMEL
@pytest.mark.parametrize("is_first_batch", [True, False])
def test_query_that_continues_is_refused_while_the_owner_is_seen_writing(
    app: Application, monkeypatch: pytest.MonkeyPatch, is_first_batch: bool
) -> None:
    monkeypatch.setattr(owners, "QUIET_S", 60.0)  # a busy machine may stall the writer
    monkeypatch.setattr(owners, "LONGEST_S", 0.3)
    first = app.sink()
    number = 0 if is_first_batch else 1
    if not is_first_batch:
        first._batch(Frame("a"), app.batch(0, 0, 1))
    opened, stop = threading.Event(), threading.Event()

    def writes_on(df: Any, options: Any, targets: Any, batch: MicroBatch, handle: Any) -> list[Report]:
        with handle.writer() as writer:
            while not stop.is_set():
                writer.write(*targets.place(0), pa.table({"value": pa.array([b"b"], pa.binary())}))
                writer.flush()
                opened.set()
            (w,) = writer.finish()
        return [Report(0, w.record_count, 0, w.first_offset, w.last_offset, w.last_sequence, 0)]

    first.job = writes_on
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(first._batch, Frame(), app.batch(number, number, number + 1))
        try:
            assert opened.wait(60)
            with pytest.raises(RefusedError, match="is in use"):
                app.sink()._batch(Frame("x"), app.batch(0, number, number + 1, query="copy"))
        finally:
            stop.set()
        running.result(60)
    assert set(app.values()) <= {"a", "b"}


@SEMEL
def test_new_checkpoint_takes_over_from_a_driver_that_died_in_a_batch(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owners, "QUIET_S", 0.3)
    dead = app.sink()
    dead._batch(Frame("a"), app.batch(0, 0, 1))
    handle = dead.transaction.owner.begin([(app.output, 0)])
    write(Frame("b"), None, dead.transaction.targets, app.batch(1, 1, 2), handle)
    assert app.admin.describe_transaction(app.id).state == "Ongoing"
    app.sink()._batch(Frame("c"), app.batch(0, 1, 2, query="new"))
    assert app.values() == ["a", "c"]


@SEMEL
def test_refusal_names_a_temporary_checkpoint_as_the_cause(app: Application) -> None:
    app.sink()._batch(Frame("a"), app.batch(0, 0, 1))
    again = app.sink()
    assert again._run is not None
    again._run.short_lived = short_lived(f"file:/tmp/temporary-{uuid.uuid4()}", None, None)
    with pytest.raises(RefusedError, match="has no option checkpointLocation, so its checkpoint is temporary"):
        again._batch(Frame("x"), app.batch(0, 0, 1, query="other"))


def test_checkpoints_that_the_next_start_does_not_find_are_told_apart() -> None:
    unique = str(uuid.uuid4())
    assert short_lived(f"file:/tmp/temporary-{unique}", None, None)
    assert "queryName" in short_lived(f"file:/data/all/{unique}", None, "/data/all")
    assert not short_lived("file:/data/all/payments", "payments", "/data/all")
    assert not short_lived(f"hdfs://nn/data/{unique}", None, None)  # the user's own choice


class Observed:
    """Stands for Spark's sums: the rows themselves."""

    def __init__(self, df: Frame, options: Any) -> None:
        self.frame = df

    def checksum(self) -> str:
        return f"spark:{len(self.frame.values)}:{''.join(sorted(self.frame.values))}"


@SEMEL
def test_stateful_batch_that_gives_other_rows_when_it_runs_again_is_refused(
    app: Application, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("semel.spark.sink.Observed", Observed)
    monkeypatch.setattr("semel.spark.sink.hashed_columns", lambda df, options: ["value"])
    app.sink(stateful=True)._batch(Frame("a", "b"), app.batch(0, 0, 2))
    app.sink(stateful=True)._batch(Frame("b", "a"), app.batch(0, 0, 2))  # the order does not count
    with pytest.raises(RefusedError, match="gave other rows than it had written"):
        app.sink(stateful=True)._batch(Frame("a", "c"), app.batch(0, 0, 2))
    app.sink()._batch(Frame("a", "c"), app.batch(0, 0, 2))  # nothing depends on what a query without state gives
    app.sink(stateful=True, accept_lost_state=True)._batch(Frame("a", "c"), app.batch(0, 0, 2))
    assert "gave other rows" in caplog.text
    assert app.values() == ["a", "b"]


@pytest.mark.parametrize("generation", [1, 2])
def test_what_a_task_still_writes_after_its_query_was_stopped_never_becomes_visible(
    tmp_path: Path, generation: int
) -> None:
    """Brokers before Kafka 3.6, and later ones without verification, take a write of a transaction that has ended. Only
    a newer epoch in the partition refuses it."""
    version, unverified = f"transaction.version={generation}", "transaction.partition.verification.enable=false"
    with SemelBroker(tmp_path, "--set", version, "--set", unverified) as broker:
        app = Application(Cluster("semel", broker))
        stopped, writers = app.sink(), list[Any]()

        def cancelled(df: Any, options: Any, targets: Any, batch: MicroBatch, handle: Any) -> list[Report]:
            writers.append(handle.writer())
            writers[0].write(*targets.place(0), pa.table({"value": [b"a"]}))
            writers[0].finish()
            raise Cancelled

        stopped.job = cancelled
        with pytest.raises(Cancelled):
            stopped._batch(Frame(), app.batch(0, 0, 1))
        with suppress(KafkaError):  # Spark has not killed the task yet
            writers[0].write(*stopped.transaction.targets.place(0), pa.table({"value": [b"late"]}))
        with pytest.raises(KafkaError):
            writers[0].finish()
        writers[0].close()
        app.sink()._batch(Frame("a"), app.batch(0, 0, 1))
        assert app.values() == ["a"]
        app.close()
