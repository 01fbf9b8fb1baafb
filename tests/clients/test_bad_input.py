"""Whatever a client sends, it gets a Kafka error or a closed connection; nobody else notices, and memory is bounded."""

from __future__ import annotations

import os
import random
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from semel.local.brokers import SemelBroker
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.cluster import (
    API_VERSIONS,
    METADATA,
    ApiVersionsRequest,
    MetadataRequest,
    MetadataRequestTopic,
)
from semel.protocol.messages.records import FETCH, PRODUCE, FetchPartition, FetchRequest, FetchTopic
from tests.support.direct import DirectClient, batch_of, produce_request
from tests.support.waiting import STALL_S, until

PRODUCE_KEY, METADATA_KEY, API_VERSIONS_KEY = 0, 3, 18
UNSENT_BUDGET_MB = 256


@pytest.fixture
def broker(shared_semel_broker: SemelBroker) -> SemelBroker:
    return shared_semel_broker


@pytest.fixture
def neighbour(broker: SemelBroker) -> Iterator[DirectClient]:
    """A client with a connection of its own; afterwards it must still be served on it, and promptly."""
    with DirectClient(broker.bootstrap) as client:
        client.call(API_VERSIONS, ApiVersionsRequest("x", "1"), 4)
        yield client
        started_s = time.monotonic()
        assert client.call(METADATA, MetadataRequest([]), 12).brokers
        assert time.monotonic() - started_s < STALL_S


def connect(broker: SemelBroker) -> socket.socket:
    host, port = broker.bootstrap.rsplit(":", 1)
    return socket.create_connection((host, int(port)), 20)


def is_closed(sock: socket.socket) -> bool:
    """True once the broker closed the connection without a word."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def frame(api_key: int, version: int, body: bytes = b"", *, client_id: bytes = b"x") -> bytes:
    header = struct.pack(">hhih", api_key, version, 1, len(client_id)) + client_id
    return struct.pack(">i", len(header) + len(body)) + header + body


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", id="http"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), id="tls"),
        pytest.param(struct.pack(">i", -1), id="negative length"),
        pytest.param(struct.pack(">i", 2**31 - 1), id="length of 2 GB"),
        pytest.param(struct.pack(">i", 0), id="empty frame"),
        pytest.param(struct.pack(">i", 3) + b"abc", id="three bytes"),
        pytest.param(frame(METADATA_KEY, 12), id="no body"),
        pytest.param(frame(METADATA_KEY, 99), id="version from the future"),
        pytest.param(frame(METADATA_KEY, -1), id="negative version"),
        pytest.param(frame(PRODUCE_KEY, 2), id="produce version that Kafka 4 no longer serves"),
        pytest.param(frame(9999, 0), id="unknown API"),
        pytest.param(frame(METADATA_KEY, 12, b"\0\xff\xff\xff\xff\x0f"), id="array of four billion topics"),
        pytest.param(frame(METADATA_KEY, 1, struct.pack(">i", 2**31 - 1)), id="array of two billion topics"),
        pytest.param(frame(METADATA_KEY, 1, struct.pack(">ih", 1, 5) + b"\xff\xfe\xfd\xfc\xfb"), id="not UTF-8"),
        pytest.param(frame(API_VERSIONS_KEY, 3, b"\xff" * 40), id="endless varint"),
    ],
)
def test_garbage_closes_the_connection(broker: SemelBroker, neighbour: DirectClient, data: bytes) -> None:
    with connect(broker) as sock:
        sock.sendall(data)
        assert is_closed(sock)


def test_random_garbage_closes_the_connection(broker: SemelBroker, neighbour: DirectClient) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(200):
        body = rng.randbytes(rng.randrange(0, 60))
        key, version = rng.choice([0, 1, 2, 3, 8, 10, 11, 18, 19, 22, 32, 44]), rng.randrange(0, 8)
        data = frame(key, version, body) if rng.random() < 0.7 else rng.randbytes(rng.randrange(1, 200))
        with connect(broker) as sock:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while not is_closed(sock):
                pass


def test_api_versions_from_the_future_names_the_version_to_use(broker: SemelBroker) -> None:
    with connect(broker) as sock:
        sock.sendall(frame(API_VERSIONS_KEY, 77, b"\0who knows what"))
        (size,) = struct.unpack(">i", sock.recv(4, socket.MSG_WAITALL))
        answer = sock.recv(size, socket.MSG_WAITALL)
        _, response = API_VERSIONS.read_response(answer, 0)
        assert response.error_code == ErrorCode.UNSUPPORTED_VERSION
        assert [(api.api_key, api.min_version, api.max_version) for api in response.api_keys] == [(18, 0, 4)]
        sock.sendall(frame(API_VERSIONS_KEY, 0))
        assert len(sock.recv(4, socket.MSG_WAITALL)) == 4, "the connection is good for another try"


def test_half_a_request_waits_for_its_other_half(broker: SemelBroker) -> None:
    data = b"".join(METADATA.frame_request(MetadataRequest([]), 12, 5, "slow"))
    with DirectClient(broker.bootstrap) as client:
        for byte in data:
            client.socket.sendall(bytes([byte]))
        assert client.receive(METADATA, 12).brokers


def test_half_a_request_and_then_nothing_harms_nobody(broker: SemelBroker, neighbour: DirectClient) -> None:
    sockets = [connect(broker) for _ in range(50)]
    for sock in sockets:
        sock.sendall(struct.pack(">i", 100 << 20) + b"only the beginning")
    assert neighbour.call(METADATA, MetadataRequest([]), 12).brokers
    assert resident_mb(broker) < 400, "memory was taken for bytes that never came"
    for sock in sockets:
        sock.close()


def test_a_request_up_to_the_limit_is_taken_and_a_larger_one_closes_the_connection(tmp_path: Path) -> None:
    with SemelBroker(tmp_path / "b", "--set", "socket.request.max.bytes=100000") as broker:
        with DirectClient(broker.bootstrap) as client:
            client.create_topic("t")
            assert client.produce("t", batch_of([b"x" * 90_000]))[0] == ErrorCode.NONE
            with pytest.raises((EOFError, OSError)):
                client.produce("t", batch_of([b"x" * 110_000]))
        with DirectClient(broker.bootstrap) as client:
            assert client.fetch("t").high_watermark == 1


def test_produce_with_acks_0_that_fails_closes_the_connection(broker: SemelBroker, neighbour: DirectClient) -> None:
    request = produce_request("no-such-topic-anywhere", batch_of([b"x"]))
    request.acks = 0
    with DirectClient(broker.bootstrap) as client:
        client.send(PRODUCE, request, 9)
        assert is_closed(client.socket)


def test_clients_that_never_read_do_not_fill_the_memory(tmp_path: Path) -> None:
    with SemelBroker(tmp_path / "b", "--fsync", "os") as broker:
        with DirectClient(broker.bootstrap) as writer:
            writer.create_topic("big")
            for _ in range(40):
                assert writer.produce("big", batch_of([os.urandom(1_000_000)]))[0] == ErrorCode.NONE
        ask = FetchPartition(0, fetch_offset=0, partition_max_bytes=64 << 20)
        request = FetchRequest(
            max_wait_ms=0, min_bytes=1, max_bytes=64 << 20, topics=[FetchTopic("big", partitions=[ask])]
        )
        greedy = [DirectClient(broker.bootstrap) for _ in range(40)]
        for client in greedy:
            for _ in range(10):
                client.send(FETCH, request, 12)
        with DirectClient(broker.bootstrap) as other:
            assert other.call(METADATA, MetadataRequest([MetadataRequestTopic(name="big")]), 12).topics[0].partitions
        assert resident_mb(broker) < UNSENT_BUDGET_MB + 250, "40 greedy clients asked for 16 GB"
        for client in greedy:
            client.socket.close()


def test_a_flood_of_requests_without_reading_is_held_back(broker: SemelBroker, neighbour: DirectClient) -> None:
    data = b"".join(METADATA.frame_request(MetadataRequest(None), 12, 5, "flood"))
    with connect(broker) as sock:
        sock.setblocking(False)
        sent = 0
        deadline_s = time.monotonic() + 3
        try:
            while sent < 64 << 20 and time.monotonic() < deadline_s:
                sent += sock.send(data * 1000)
        except BlockingIOError:
            pass  # the broker stopped reading: that is what this test is about
        else:
            pytest.fail(f"the broker took {sent} bytes of requests whose answers nobody read")
    assert resident_mb(broker) < 400


def test_more_connections_than_allowed_are_closed(tmp_path: Path) -> None:
    with SemelBroker(tmp_path / "b", "--set", "max.connections=3") as broker:
        first = [DirectClient(broker.bootstrap) for _ in range(3)]
        for client in first:
            assert client.call(METADATA, MetadataRequest([]), 12).brokers
        with connect(broker) as sock:
            assert is_closed(sock)
        first[0].socket.close()

        def is_let_in() -> bool:
            with connect(broker) as sock:
                sock.sendall(frame(API_VERSIONS_KEY, 0))
                return not is_closed(sock)

        until(is_let_in, "one more was allowed, and none was let in")


def test_idle_connections_are_closed(tmp_path: Path) -> None:
    with SemelBroker(tmp_path / "b", "--set", "connections.max.idle.ms=300") as broker, connect(broker) as sock:
        started_s = time.monotonic()
        assert is_closed(sock)
        assert 0.2 < time.monotonic() - started_s < STALL_S


def resident_mb(broker: SemelBroker) -> int:
    assert broker.process is not None
    status = Path(f"/proc/{broker.process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) // 1024
