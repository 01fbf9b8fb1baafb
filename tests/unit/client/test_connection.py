"""Connections to servers that are not there, not Kafka, too old, silent, or cut frames in pieces."""

from __future__ import annotations

import socket
import time

import pytest

from semel.client.cluster import Cluster
from semel.client.cluster_calls import AnyNode, NodeTarget
from semel.client.errors import (
    ClosedError,
    ConnectionFailedError,
    RequestTimedOutError,
    TimedOutError,
    UnsupportedByBrokerError,
)
from semel.client.frames import CHUNK_BYTES
from semel.client.settings import ClientSettings
from semel.client.wire import Capabilities, Wire
from semel.protocol.messages.cluster import (
    API_VERSIONS,
    METADATA,
    MetadataRequest,
    MetadataResponse,
    MetadataResponseBroker,
)
from tests.support.fake_broker import as_kafka, open_connection, read_request, server, versions_answer
from tests.support.waiting import STALL_S


def test_nobody_listens() -> None:
    with pytest.raises(ConnectionFailedError, match=r"cannot connect to 127\.0\.0\.1:1: .*is a broker running there"):
        open_connection("127.0.0.1:1")


@pytest.mark.parametrize("name", ["no-such-host.invalid", "two..dots", 64 * "x"])
def test_a_name_that_does_not_exist(name: str) -> None:
    with pytest.raises(ConnectionFailedError, match="check the host name"):
        open_connection(f"{name}:9092")


@pytest.mark.parametrize(
    ("bytes_sent", "message"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "web server"),
        (b"\x15\x03\x03\x00\x02\x02\x46", "security.protocol"),
        (b"\xff\xff\xff\xff", "does not speak Kafka"),
        (b"\x00\x00\x00\x05abcde", "expected 1"),
    ],
)
def test_servers_that_are_not_kafka(bytes_sent: bytes, message: str) -> None:
    def behave(sock: socket.socket) -> None:
        read_request(sock)
        sock.sendall(bytes_sent)
        sock.recv(1)

    with server(behave) as address, pytest.raises(ConnectionFailedError, match=message):
        open_connection(address)


def test_a_server_that_hangs_up_during_the_handshake() -> None:
    with (
        server(lambda sock: None) as address,
        pytest.raises(ConnectionFailedError, match=r"PLAINTEXT.*security\.protocol"),
    ):
        open_connection(address)


def test_a_silent_server_is_given_up_on_in_time() -> None:
    with server(lambda sock: sock.recv(1_000_000) and sock.recv(1) and None) as address:
        started_s = time.monotonic()
        with pytest.raises(RequestTimedOutError, match="ApiVersions"):
            open_connection(address, socket_connection_setup_timeout_ms=200)
        assert time.monotonic() - started_s < STALL_S


@pytest.mark.parametrize("highest", [0, 2, 3])
def test_an_older_broker_is_asked_again_in_its_own_version(highest: int) -> None:
    asked = []

    def behave(sock: socket.socket) -> None:
        while True:
            _, version, correlation_id = read_request(sock)
            asked.append(version)
            answer = versions_answer((API_VERSIONS, 0, highest), (METADATA, 0, 1))
            if version > highest:
                answer.error_code = 35
                sock.sendall(b"".join(API_VERSIONS.frame_response(answer, 0, correlation_id)))
            else:
                sock.sendall(b"".join(API_VERSIONS.frame_response(answer, version, correlation_id)))

    with server(behave) as address:
        connection = open_connection(address)
        assert asked == [4, highest]
        assert connection.capabilities.version_of(METADATA) == 1
        assert connection.capabilities.feature("transaction.version") == (2 if highest >= 3 else 0)
        connection.close()


def test_answers_in_pieces_and_many_at_once_are_matched_in_order() -> None:
    def behave(sock: socket.socket) -> None:
        requests = [read_request(sock) for _ in range(3)]
        data = b""
        for number, (_, version, correlation_id) in enumerate(requests):
            brokers = [MetadataResponseBroker(number, "x" * (CHUNK_BYTES if number == 1 else 5), 1)]
            data += b"".join(METADATA.frame_response(MetadataResponse(brokers=brokers), version, correlation_id))
        for at in range(0, len(data), 7000):
            sock.sendall(data[at : at + 7000])
            time.sleep(0.001)
        sock.recv(1)

    with server(as_kafka(behave)) as address:
        connection = open_connection(address)
        pending = [connection.send(METADATA, MetadataRequest()) for _ in range(3)]
        connection.wait(pending[2])
        assert [each.result().brokers[0].node_id for each in pending] == [0, 1, 2]
        assert connection.take_unreported() == pending[:2], "those that nobody waited for are still to be reported"
        connection.close()


def test_a_cut_connection_fails_all_that_was_on_its_way() -> None:
    def behave(sock: socket.socket) -> None:
        for _ in range(2):
            read_request(sock)

    with server(as_kafka(behave)) as address:
        connection = open_connection(address)
        pending = [connection.send(METADATA, MetadataRequest()) for _ in range(2)]
        connection.wait(pending[0])
        for each in pending:
            with pytest.raises(ConnectionFailedError, match="closed the connection") as failed:
                each.result()
            assert failed.value.maybe_sent
        assert connection.closed
        late = connection.send(METADATA, MetadataRequest())
        assert late.done
        with pytest.raises(ConnectionFailedError):
            late.result()


def test_a_request_without_a_response_closes_the_connection_at_its_timeout() -> None:
    with server(as_kafka(lambda sock: read_request(sock) and sock.recv(1) and None)) as address:
        connection = open_connection(address)
        with pytest.raises(RequestTimedOutError, match="did not respond to Metadata"):
            connection.call(METADATA, MetadataRequest(), timeout_s=0.1)
        assert connection.closed


def test_versions_that_do_not_meet_are_named() -> None:
    capabilities = Capabilities(versions_answer((METADATA, 20, 25)))
    with pytest.raises(UnsupportedByBrokerError, match="versions 20-25, this client needs 0-13"):
        capabilities.version_of(METADATA)
    with pytest.raises(UnsupportedByBrokerError, match="does not have ApiVersions"):
        capabilities.version_of(API_VERSIONS)


def test_a_cluster_that_cannot_be_reached_is_named_within_the_timeout() -> None:
    cluster = Cluster(ClientSettings.of(bootstrap_servers="127.0.0.1:1,127.0.0.1:2"))
    started_s = time.monotonic()
    with pytest.raises(TimedOutError, match=r"127\.0\.0\.1:1.*127\.0\.0\.1:2"):
        cluster.call(AnyNode(), METADATA, MetadataRequest(), timeout_s=0.5)
    assert time.monotonic() - started_s < STALL_S
    cluster.close()
    with pytest.raises(ClosedError):
        cluster.call(AnyNode(), METADATA, MetadataRequest(), timeout_s=0.5)


def test_a_wrong_advertised_address_is_explained() -> None:
    def behave(sock: socket.socket) -> None:
        while True:
            _, version, correlation_id = read_request(sock)
            answer = MetadataResponse(brokers=[MetadataResponseBroker(5, "127.0.0.1", 1)], controller_id=5)
            sock.sendall(b"".join(METADATA.frame_response(answer, version, correlation_id)))

    with (
        server(as_kafka(behave)) as address,
        Cluster(ClientSettings.of(bootstrap_servers=address)) as cluster,
        pytest.raises(TimedOutError, match=r"broker 5 advertises this address.*advertised\.listeners"),
    ):
        cluster.call(NodeTarget(5), METADATA, MetadataRequest(), timeout_s=0.5)


def test_small_parts_of_a_request_leave_in_one_buffer() -> None:
    wire = Wire("me")
    wire.send(METADATA, MetadataRequest(), 12, 0.0)
    assert len(wire.outgoing) == 1
    size = len(wire.outgoing[0])
    wire.written(5)
    assert len(wire.outgoing[0]) == size - 5
    wire.written(size - 5)
    assert not wire.outgoing
