"""Partitions that are added to an output topic are written to while the query runs, as by every Kafka producer: when
metadata is older than metadata.max.age.ms."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

import semel
from semel.client.cluster import Cluster as ClientCluster
from semel.client.producer.handle import TransactionHandle
from semel.spark import sink as sink_module
from semel.spark.encoding import Targets
from semel.spark.ledger import MicroBatch
from semel.spark.sink import PlainSink, Sink
from semel.spark.sink_options import SinkOptions
from semel.spark.writing import Report
from tests.support.broker import Cluster
from tests.support.reading import read_values

pytestmark = pytest.mark.parametrize("cluster", ["semel"], indirect=True)


def options_of(cluster: Cluster, age_ms: int, guarantee: str = "exactly_once") -> SinkOptions:
    made = SinkOptions(
        cluster.bootstrap,
        cluster.unique("growing"),
        topic=cluster.unique("growing-out"),
        guarantee=guarantee,
        client={"metadata.max.age.ms": age_ms},
    )
    with semel.Admin({"bootstrap.servers": cluster.bootstrap}) as admin:
        admin.create_topic(str(made.topic), 1)
    return made


def add_partition(options: SinkOptions) -> None:
    with semel.Admin({"bootstrap.servers": options.bootstrap_servers}) as admin:
        admin.create_partitions(str(options.topic), 2)


def batch_of(number: int) -> MicroBatch:
    return MicroBatch("query", number, [None], [f'{{"logOffset":{number}}}'])


@pytest.mark.parametrize(("age_ms", "seen"), [(0, [1, 2]), (300_000, [1, 1])], ids=["old", "fresh"])
def test_the_sink_writes_to_partitions_that_are_new(cluster: Cluster, age_ms: int, seen: list[int]) -> None:
    options, found = options_of(cluster, age_ms), []
    with ClientCluster(options.producer_settings().replace(metadata_max_age_ms=300_000)) as of_a_worker:

        def job(_: Any, __: Any, targets: Targets, batch: MicroBatch, handle: TransactionHandle) -> list[Report]:
            """One row to the last partition, by a worker that has read its metadata long ago."""
            found.append(targets.count)
            topic, partition = targets.place(targets.count - 1)
            with handle.writer(of_a_worker) as writer:
                writer.write(topic, partition, pa.table({"value": [b"%d" % batch.batch_id]}))
                (written,) = writer.finish(30)
            return [
                Report(targets.count - 1, 1, 0, written.first_offset, written.last_offset, written.last_sequence, 1)
            ]

        sink = Sink(options)
        sink.job, sink._run = job, SimpleNamespace(run_id="run", is_stateful=lambda: False)  # type: ignore[assignment]
        sink.transaction.own()
        sink._attempt(None, batch_of(0), 1)
        add_partition(options)
        sink._attempt(None, batch_of(1), 1)
        sink.close()
    assert found == seen
    assert [p for p, _, _ in read_values(cluster.bootstrap, str(options.topic))] == [count - 1 for count in seen]


def test_a_sink_without_transactions_writes_to_partitions_that_are_new(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, found = options_of(cluster, 0, "at_least_once"), []
    monkeypatch.setattr(sink_module, "plain_job", lambda _, __, targets, *___: found.append(targets.count) or [])
    sink = PlainSink(options)
    sink._batch(None, batch_of(0))
    add_partition(options)
    sink._batch(None, batch_of(1))
    sink.close()
    assert found == [1, 2]
