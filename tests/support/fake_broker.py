"""A server that says to a client whatever a test wants: for what a real broker cannot be made to do."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from semel.client.connection import BrokerConnection
from semel.client.settings import ClientSettings
from semel.protocol.api import FLEXIBLE_FROM, Api, read_request_header
from semel.protocol.messages.cluster import (
    API_VERSIONS,
    METADATA,
    ApiVersion,
    ApiVersionsResponse,
    FinalizedFeatureKey,
)

Behave = Callable[[socket.socket], None]


@contextmanager
def server(behave: Behave) -> Iterator[str]:
    """A server that calls a function with each connection, in a thread of its own."""
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(client,), daemon=True).start()

    def serve(client: socket.socket) -> None:
        with client, suppress(OSError, EOFError):
            behave(client)

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()


def read_exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def read_request(sock: socket.socket) -> tuple[int, int, int]:
    """(api key, version, correlation id)"""
    frame = read_exactly(sock, int.from_bytes(read_exactly(sock, 4), "big"))
    header = read_request_header(frame, FLEXIBLE_FROM)
    return header.api_key, header.version, header.correlation_id


def versions_answer(*apis: tuple[Api, int, int]) -> ApiVersionsResponse:
    return ApiVersionsResponse(
        api_keys=[ApiVersion(api.key, low, high) for api, low, high in apis],
        finalized_features_epoch=1,
        finalized_features=[FinalizedFeatureKey("transaction.version", 2, 0)],
    )


def open_connection(address: str, **options: object) -> BrokerConnection:
    host, port = address.split(":")
    return BrokerConnection.open(host, int(port), ClientSettings.of(bootstrap_servers=address, **options))


def as_kafka(then: Behave) -> Behave:
    """Answers ApiVersions, then goes on as told."""

    def behave(sock: socket.socket) -> None:
        _, version, correlation_id = read_request(sock)
        answer = versions_answer((API_VERSIONS, 0, 4), (METADATA, 0, 13))
        sock.sendall(b"".join(API_VERSIONS.frame_response(answer, version, correlation_id)))
        then(sock)

    return behave


Answer = Callable[[Any, int], Any]  # request, version -> response


@contextmanager
def scripted(answers: Mapping[Api, Answer]) -> Iterator[str]:
    """A broker whose response to each request is what a function returns. It has all versions of these APIs.

    An exception in a function closes the connection, as a broker that fails does.
    """
    by_key = {api.key: (api, answer) for api, answer in answers.items()}
    ranges = [(api, api.request.valid.low, api.request.valid.high) for api, _ in by_key.values()]
    versions = versions_answer((API_VERSIONS, 0, 4), *ranges)
    by_key[API_VERSIONS.key] = (API_VERSIONS, lambda request, version: versions)

    def serve(sock: socket.socket) -> None:
        while True:
            frame = read_exactly(sock, int.from_bytes(read_exactly(sock, 4), "big"))
            header = read_request_header(frame, FLEXIBLE_FROM)
            api, answer = by_key[header.api_key]
            request = api.request.decode(frame, header.version, header.body_at)
            response = answer(request, header.version)
            sock.sendall(b"".join(api.frame_response(response, header.version, header.correlation_id)))

    with server(serve) as address:
        yield address
