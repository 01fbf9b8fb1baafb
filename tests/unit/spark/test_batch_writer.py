"""A batch job and a query do not share an application id: the job is refused before it takes anything over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql.types import BinaryType, StructField, StructType

import semel
from semel.client.errors import FencedError
from semel.client.producer.handle import TransactionOwner
from semel.local.brokers import SemelBroker
from semel.spark.batch_writer import AlreadyDoneError, BatchWriter, QueryIdError
from semel.spark.ledger import LedgerEntry, topic_of
from semel.spark.ledger_topic import create
from semel.spark.sink_options import SinkOptions
from semel.spark.transaction import write_entry
from tests.support.broker import Cluster, faulty_semel

pytestmark = pytest.mark.parametrize("cluster", ["semel"], indirect=True)
SCHEMA = StructType([StructField("value", BinaryType())])
QUERY = "0c5ef1c8-6e0d-4d2f-8a55-fd4d3c3f3f5a"


@pytest.fixture
def options(cluster: Cluster) -> SinkOptions:
    found = SinkOptions(cluster.bootstrap, cluster.unique("nightly"), topic=cluster.unique("nightly-out"))
    with semel.Admin({"bootstrap.servers": cluster.bootstrap}) as admin:
        admin.create_topic(str(found.topic), 1)
    return found


@pytest.fixture
def owner(options: SinkOptions) -> Iterator[TransactionOwner]:
    """A query that owns the id."""
    with TransactionOwner(options.producer_settings()) as made:
        create(made.cluster, options.application_id)
        made.own()
        yield made


def commit_entry(owner: TransactionOwner, application_id: str, sequence: int, query_id: str) -> None:
    handle = owner.begin([(topic_of(application_id), 0)])
    write_entry(handle, application_id, LedgerEntry(sequence, query_id, "run", sequence, [None], ["{}"]), owner)
    owner.end(commit=True)


def job_of(options: SinkOptions, **more: str) -> BatchWriter:
    given = {"kafka.bootstrap.servers": options.bootstrap_servers, "applicationId": options.application_id}
    return BatchWriter({**given, "topic": str(options.topic), **more}, SCHEMA)


def test_a_job_under_the_id_of_a_query_is_refused_and_the_query_goes_on(
    options: SinkOptions, owner: TransactionOwner
) -> None:
    commit_entry(owner, options.application_id, 0, QUERY)
    with pytest.raises(QueryIdError, match=f"(?s){QUERY}.*batch 0.*another applicationId"):
        job_of(options)
    commit_entry(owner, options.application_id, 1, QUERY)  # nobody has fenced it


def test_a_query_whose_first_entry_has_no_marker_yet_is_seen(cluster: Cluster, tmp_path: Path) -> None:
    """The end of a transaction is answered before its markers are written."""
    late = faulty_semel("marker.before:delay=1500")
    with SemelBroker(tmp_path / "broker", semel=late) as broker:
        options = SinkOptions(broker.bootstrap, "nightly", topic="nightly-out")
        with semel.Admin({"bootstrap.servers": broker.bootstrap}) as admin:
            admin.create_topic("nightly-out", 1)
        with TransactionOwner(options.producer_settings()) as query:
            create(query.cluster, options.application_id)
            query.own()
            commit_entry(query, options.application_id, 0, QUERY)
            with pytest.raises(QueryIdError, match=QUERY):
                job_of(options)
        assert "fault fired: marker.before" in broker.logs()


def test_a_job_that_came_before_the_query_does_not_hide_it(options: SinkOptions, owner: TransactionOwner) -> None:
    for sequence, query_id in enumerate(["job:first", QUERY, "batch"]):
        commit_entry(owner, options.application_id, sequence, query_id)
    with pytest.raises(QueryIdError, match=QUERY):
        job_of(options)


def test_jobs_under_one_id_follow_each_other(options: SinkOptions, owner: TransactionOwner) -> None:
    commit_entry(owner, options.application_id, 0, "job:first")
    with pytest.raises(AlreadyDoneError):
        job_of(options, jobId="first")
    second = job_of(options, jobId="second")
    assert second.last is not None
    assert second.last.sequence == 0
    second.abort([])
    with pytest.raises(FencedError):  # the fault of the first test: a job takes the id from whoever has it
        owner.renew()
