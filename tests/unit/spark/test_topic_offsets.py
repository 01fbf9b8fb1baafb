"""Lookups while the cluster changes: a leader or controller that has moved, a broker that does not know a topic yet."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from semel.client.cluster import Cluster as ClientCluster
from semel.client.errors import error_of
from semel.client.log_reading import last_sequences
from semel.client.metadata import BrokerAddress
from semel.client.producer.batches import Identity
from semel.client.settings import ClientSettings
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.topics import CREATE_TOPICS, CreatableTopicResult, CreateTopicsResponse
from semel.spark.ledger import MicroBatch, topic_of
from semel.spark.ledger_topic import create
from semel.spark.sink import PlainSink
from semel.spark.sink_options import SinkOptions
from semel.spark.topics import LATEST_OFFSET, is_here, list_offsets
from tests.support.broker import Cluster
from tests.support.direct import DirectClient

pytestmark = pytest.mark.parametrize("cluster", ["semel"], indirect=True)
GONE = 99  # a broker that led the partition


@pytest.fixture
def topic(cluster: Cluster) -> str:
    name = cluster.unique("looked-up")
    with DirectClient(cluster.bootstrap) as client:
        client.create_topic(name, 1)
    return name


@pytest.fixture
def client(cluster: Cluster) -> Iterator[ClientCluster]:
    settings = ClientSettings.of(bootstrap_servers=cluster.bootstrap, allow_auto_create_topics=False)
    with ClientCluster(settings) as made:
        yield made


@pytest.fixture
def dead_port() -> Iterator[int]:
    with socket.socket() as nobody_listens:
        nobody_listens.bind(("127.0.0.1", 0))
        yield nobody_listens.getsockname()[1]


def move_leader(client: ClientCluster, topic: str, port: int) -> None:
    """As of the metadata that the client has, a broker leads the partition that is not there any more."""
    found = client.topic(topic)
    client.metadata.brokers[GONE] = BrokerAddress(GONE, "127.0.0.1", port, None)
    client.metadata.topics[topic].partitions[0] = found.partitions[0]._replace(leader=GONE)


def test_offsets_are_looked_up_at_the_new_leader(client: ClientCluster, topic: str, dead_port: int) -> None:
    move_leader(client, topic, dead_port)
    assert list_offsets(client, {(topic, 0): LATEST_OFFSET}, True) == {topic: {0: 0}}


def test_last_sequences_are_read_at_the_new_leader(client: ClientCluster, topic: str, dead_port: int) -> None:
    move_leader(client, topic, dead_port)
    assert last_sequences(client, [(topic, 0)], Identity(1, 0), client.deadline().remaining_s()) == {}


def unknown_at_first(client: ClientCluster, monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    real, left = client.topic, [times]

    def topic(name: str, *given: Any, **named: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise error_of(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"looking up topic {name!r}")
        return real(name, *given, **named)

    monkeypatch.setattr(client, "topic", topic)
    return left


def test_a_topic_that_is_not_known_once_may_be_here(
    client: ClientCluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = unknown_at_first(client, monkeypatch, 2)
    assert not is_here(client, topic)
    assert is_here(client, topic, wait_s=60)
    assert left == [0]


def test_at_most_once_stores_the_offsets_of_a_topic_that_is_not_known_once(
    cluster: Cluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = SinkOptions(cluster.bootstrap, cluster.unique("once"), topic=topic, guarantee="at_most_once")
    sink = PlainSink(options)
    stored: list[Any] = []
    monkeypatch.setattr(PlainSink, "_at_most_once", lambda _, __, ___, offsets: stored.append(set(offsets)))
    left = unknown_at_first(sink._cluster, monkeypatch, 1)
    sink._batch(None, MicroBatch("query", 0, [None], [f'{{"{topic}":{{"0":5}}}}']))
    sink.close()
    assert left == [0]
    assert stored == [{(topic, 0)}]


@pytest.mark.parametrize("code", [ErrorCode.NOT_CONTROLLER, ErrorCode.REQUEST_TIMED_OUT])
def test_a_ledger_is_created_although_the_controller_changes(
    cluster: Cluster, client: ClientCluster, monkeypatch: pytest.MonkeyPatch, code: ErrorCode
) -> None:
    application_id, real, refused = cluster.unique("moving"), client.call, list[ErrorCode]()

    def call(target: Any, api: Any, request: Any, **named: Any) -> Any:
        if api is CREATE_TOPICS and not refused:
            refused.append(code)
            result = CreatableTopicResult(name=topic_of(application_id), error_code=code.value)
            return CreateTopicsResponse(topics=[result])
        return real(target, api, request, **named)

    monkeypatch.setattr(client, "call", call)
    create(client, application_id)
    assert refused == [code]
    assert is_here(client, topic_of(application_id))
