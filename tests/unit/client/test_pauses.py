"""The pauses that settings and brokers ask for: reconnect.backoff.ms, and the throttle time of responses."""

from __future__ import annotations

import socket
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from semel.client.cluster import BlockingCalls, Cluster
from semel.client.cluster_calls import AnyNode
from semel.client.connection import BrokerConnection, poll
from semel.client.errors import ConnectionFailedError, RequestTimedOutError, TimedOutError
from semel.client.immediate import run
from semel.client.producer import Producer
from semel.client.settings import ClientSettings
from semel.client.timing import Deadline
from semel.client.wire import Wire
from semel.local.brokers import SemelBroker
from semel.protocol.messages.cluster import METADATA, MetadataRequest, MetadataResponse
from semel.protocol.messages.records import PRODUCE
from semel.prove.proxy import Proxy
from tests.support.fake_broker import as_kafka, open_connection, read_request, server
from tests.support.reading import create_topic
from tests.support.waiting import PATIENCE_S, STALL_S

# --- reconnecting ---


def test_an_address_that_cannot_be_reached_is_not_tried_before_its_backoff_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attempts: list[float] = []
    open_it = BrokerConnection.open

    def opening(*arguments: Any) -> BrokerConnection:
        attempts.append(time.monotonic())
        return open_it(*arguments)

    monkeypatch.setattr(BrokerConnection, "open", opening)
    options = {"retry_backoff_ms": 1, "retry_backoff_max_ms": 1}
    settings = ClientSettings.of(
        bootstrap_servers="127.0.0.1:1", reconnect_backoff_ms=200, reconnect_backoff_max_ms=800, **options
    )
    with Cluster(settings) as cluster, pytest.raises(TimedOutError, match="is a broker running there"):
        cluster.call(AnyNode(), METADATA, MetadataRequest(), timeout_s=3)
    gaps = [later - earlier for earlier, later in pairwise(attempts)]
    assert attempts
    assert all(gap >= least for gap, least in zip(gaps, [0.16, 0.32, *[0.64] * 5], strict=False)), gaps


def test_an_attempt_during_the_backoff_fails_at_once_and_says_when_the_next_one_is_due() -> None:
    settings = ClientSettings.of(bootstrap_servers="127.0.0.1:1", reconnect_backoff_ms=60_000)
    calls = BlockingCalls(settings)
    with pytest.raises(ConnectionFailedError, match="is a broker running there") as first:
        run(calls.connect_to("127.0.0.1", 1, Deadline(PATIENCE_S), "main"))
    assert first.value.retry_after_s == 0
    with pytest.raises(ConnectionFailedError, match="is a broker running there") as second:
        run(calls.connect_to("127.0.0.1", 1, Deadline(PATIENCE_S), "main"))
    assert 0 < second.value.retry_after_s <= 72


def test_a_healthy_broker_is_used_while_another_waits_to_be_tried_again(shared_semel_broker: SemelBroker) -> None:
    settings = ClientSettings.of(
        bootstrap_servers=f"127.0.0.1:1,{shared_semel_broker.bootstrap}",
        reconnect_backoff_ms=600_000,
        reconnect_backoff_max_ms=600_000,
    )
    with Cluster(settings) as cluster:
        for number in range(20):
            cluster.connect(AnyNode(), Deadline(STALL_S), lane=f"lane {number}")


def test_a_connection_that_opens_ends_the_backoff(shared_semel_broker: SemelBroker) -> None:
    with Proxy(shared_semel_broker.bootstrap) as proxy:
        host, port = proxy.bootstrap.split(":")
        calls = BlockingCalls(ClientSettings.of(bootstrap_servers=proxy.bootstrap, reconnect_backoff_ms=1))
        for _ in range(2):
            proxy.refuse()
            with pytest.raises(ConnectionFailedError):
                run(calls.connect_to(host, int(port), Deadline(PATIENCE_S), "main"))
            assert calls._reconnects._failures
            proxy.admit()
            time.sleep(0.01)  # longer than the backoff, which is 1.2 ms at most
            run(calls.connect_to(host, int(port), Deadline(PATIENCE_S), "main")).close()
            assert not calls._reconnects._failures


# --- throttling ---

THROTTLE_S = 0.5


def throttling(arrivals: list[float]) -> object:
    """A broker that asks for a pause in every answer and notes when requests arrive."""

    def behave(sock: socket.socket) -> None:
        while True:
            _, version, correlation_id = read_request(sock)
            arrivals.append(time.monotonic())
            answer = MetadataResponse(throttle_time_ms=int(THROTTLE_S * 1000))
            sock.sendall(b"".join(METADATA.frame_response(answer, version, correlation_id)))

    return as_kafka(behave)


def test_calls_wait_as_long_as_the_broker_asked_for() -> None:
    arrivals: list[float] = []
    with server(throttling(arrivals)) as address:  # type: ignore[arg-type]
        connection = open_connection(address)
        for _ in range(3):
            connection.call(METADATA, MetadataRequest(), PATIENCE_S)
        assert all(b - a >= THROTTLE_S for a, b in pairwise(arrivals)), arrivals
        assert len(arrivals) == 3
        connection.close()


def test_polled_requests_are_held_back_too_and_leave_on_their_own() -> None:
    arrivals: list[float] = []
    with server(throttling(arrivals)) as address:  # type: ignore[arg-type]
        connection = open_connection(address)
        connection.call(METADATA, MetadataRequest(), PATIENCE_S)
        pending = connection.send(METADATA, MetadataRequest(), timeout_s=PATIENCE_S)
        assert connection.is_throttled
        assert not connection.wants_write
        end_s, turns = time.monotonic() + PATIENCE_S, 0
        while not pending.done and time.monotonic() < end_s:
            poll([connection], max(0.0, connection.next_deadline_s() - time.monotonic()))
            connection.check_deadlines()
            turns += 1
        assert pending.done
        assert turns < 20, "it must sleep until the pause is over"
        assert arrivals[1] - arrivals[0] >= THROTTLE_S
        connection.close()


def test_a_response_that_comes_after_its_timeout_throttles_too() -> None:
    throttled: list[int] = []
    wire = Wire("late")
    late = wire.send(METADATA, MetadataRequest(), 9, 0.0)
    late.error, late.on_throttle = RequestTimedOutError("no response in time"), throttled.append
    frame = b"".join(METADATA.frame_response(MetadataResponse(throttle_time_ms=300), 9, late.correlation_id))
    assert list(wire.match([memoryview(frame)[4:]])) == []
    assert throttled == [300]


def test_a_request_that_is_held_back_past_its_timeout_fails_alone() -> None:
    with server(throttling([])) as address:  # type: ignore[arg-type]
        connection = open_connection(address)
        connection.call(METADATA, MetadataRequest(), PATIENCE_S)
        connection.throttled_until_s = time.monotonic() + PATIENCE_S
        with pytest.raises(RequestTimedOutError, match="throttles this client"):
            connection.call(METADATA, MetadataRequest(), 0.1)
        assert not connection.closed
        connection.close()


def test_a_throttled_producer_sends_nothing_meanwhile(tmp_path: Path) -> None:
    with SemelBroker(tmp_path / "broker") as broker, Proxy(broker.bootstrap) as proxy:
        topic = create_topic(broker.bootstrap, "throttled")
        with Producer(bootstrap_servers=proxy.bootstrap, linger_ms=0) as producer:
            producer.send(topic, b"first").result(timeout_ms=PATIENCE_S * 1000)
            (connection,) = producer._cluster.connections("produce")
            before = proxy.seen[PRODUCE.key]
            called = threading.Event()
            connection.throttled_until_s = until_s = time.monotonic() + 1.0
            delivery = producer.send(topic, b"second")
            delivery.add_done_callback(lambda _: called.set())
            assert delivery.result(timeout_ms=PATIENCE_S * 1000).offset == 1
            assert time.monotonic() >= until_s
            assert proxy.seen[PRODUCE.key] == before + 1
            assert called.wait(PATIENCE_S)
