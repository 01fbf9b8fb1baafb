"""A client that waits for a broker says so long before its timeout."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import semel
from semel.client import cluster_calls
from semel.client.cluster import Cluster
from semel.client.cluster_calls import Outages
from semel.client.errors import (
    ConnectionFailedError,
    DeliveryTimedOutError,
    KafkaError,
    RetriableError,
    TimedOutError,
)
from semel.client.settings import ClientSettings
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.cluster import (
    METADATA,
    MetadataResponse,
    MetadataResponseBroker,
    MetadataResponsePartition,
    MetadataResponseTopic,
)
from semel.protocol.messages.records import PRODUCE, PartitionProduceResponse, ProduceResponse, TopicProduceResponse
from tests.support.fake_broker import scripted


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_failure_that_lasts_is_logged_after_2_s_and_every_10_s(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    found = Outages(clock)
    logged_at = []
    for second in range(45):
        clock.now_s = 100.0 + second
        before = len(caplog.records)
        found.failed("b:9092", ConnectionFailedError("cannot connect to b:9092"))
        if len(caplog.records) > before:
            logged_at.append(second)
    assert logged_at == [2, 12, 22, 32, 42]
    assert caplog.records[1].getMessage().startswith("cannot connect to b:9092; retried for 12 s")
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_short_failures_and_those_far_apart_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    found = Outages(clock)
    for _ in range(10):
        found.failed("b:9092", ConnectionFailedError("x"))
        clock.now_s += 1.5
        found.failed("b:9092", ConnectionFailedError("x"))
        found.over("b:9092")
        clock.now_s += 1.5
    for _ in range(10):
        found.failed("b:9092", ConnectionFailedError("x"))
        clock.now_s += 61
    assert not caplog.records


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An address that refuses connections, and a first message at once."""
    monkeypatch.setattr(cluster_calls, "FIRST_S", 0.0)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # bound, not listening: nobody else gets the port
        yield f"127.0.0.1:{sock.getsockname()[1]}"


LIMITS = {"request.timeout.ms": 300, "default.api.timeout.ms": 600}


def produce(address: str) -> None:
    options = {"bootstrap.servers": address, **LIMITS, "delivery.timeout.ms": 600, "linger.ms": 0, "max.block.ms": 600}
    with semel.Producer(options) as producer:
        producer.send("t", b"x").result(timeout_ms=30_000)


def consume(address: str) -> None:
    with semel.Consumer({"bootstrap.servers": address, **LIMITS, "group.id": "g"}) as consumer:
        consumer.subscribe(["t"])
        for _ in range(3):
            consumer.poll(300)


def administrate(address: str) -> None:
    with semel.Admin({"bootstrap.servers": address, **LIMITS}) as admin:
        admin.list_topics()


@pytest.mark.parametrize("use", [produce, consume, administrate])
def test_every_client_logs_that_its_broker_is_down(
    use: Callable[[str], Any], nobody: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(KafkaError):
        use(nobody)
    said = [record.getMessage() for record in caplog.records if record.name == "semel.client"]
    assert any(f"cannot connect to {nobody}" in text and "retried for" in text for text in said), said


def test_a_refusal_that_a_producer_retries_is_logged_and_named_when_it_gives_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a broker whose disk is full."""
    monkeypatch.setattr(cluster_calls, "FIRST_S", 0.0)
    place: list[tuple[str, int]] = []

    def metadata(request: Any, version: int) -> MetadataResponse:
        partition = MetadataResponsePartition(leader_epoch=0, replica_nodes=[0], isr_nodes=[0])
        topic = MetadataResponseTopic(name="t", partitions=[partition])
        return MetadataResponse(brokers=[MetadataResponseBroker(0, *place[0])], controller_id=0, topics=[topic])

    def refuse(request: Any, version: int) -> ProduceResponse:
        part = PartitionProduceResponse(0, ErrorCode.KAFKA_STORAGE_ERROR, error_message="No space left on device")
        return ProduceResponse([TopicProduceResponse("t", partition_responses=[part])])

    with scripted({METADATA: metadata, PRODUCE: refuse}) as address:
        host, port = address.split(":")
        place.append((host, int(port)))
        limits = {"request.timeout.ms": 300, "delivery.timeout.ms": 400, "linger.ms": 0, "retry.backoff.ms": 10}
        options = {"bootstrap.servers": address, **limits, "enable.idempotence": False}
        with semel.Producer(options) as producer, pytest.raises(DeliveryTimedOutError) as failure:
            producer.send("t", b"x").result(timeout_ms=30_000)
    assert "the last try: writing 1 records to t-0" in str(failure.value)
    assert "No space left on device" in str(failure.value)
    assert re.search("KAFKA_STORAGE_ERROR.*No space left.*; retried for", caplog.text)


def test_error_codes_that_are_retried_are_logged_with_what_the_call_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cluster_calls, "FIRST_S", 0.0)
    with Cluster(ClientSettings.of({"bootstrap.servers": "127.0.0.1:1", "retry.backoff.ms": 1})) as cluster:

        def attempt() -> None:
            raise RetriableError("the coordinator is loading")

        with pytest.raises(TimedOutError):
            cluster.retry(attempt, "waiting for it", cluster.deadline(0.2))
        assert "the coordinator is loading; retried for" in caplog.text
        assert not cluster.outages._open
