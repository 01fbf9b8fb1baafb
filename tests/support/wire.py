"""One connection and the bare protocol: requests go out as they are, answers come back in order."""

from __future__ import annotations

import socket
import struct
from typing import Any

from semel.protocol.apis import api_of
from semel.protocol.schema import Struct


class Wire:
    """A socket to a broker. `send` and `receive` are apart, so that a request can wait for its answer."""

    def __init__(self, bootstrap: str, client_id: str | None = "wire", timeout_s: float = 30) -> None:
        host, _, port = bootstrap.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout_s)
        self._client_id = client_id
        self._sent: list[tuple[int, int]] = []  # (api key, version) of requests without an answer yet
        self._correlation_id = 0

    def call(self, api_key: int, request: Struct, version: int) -> Any:
        self.send(api_key, request, version)
        return self.receive()

    def send(self, api_key: int, request: Struct, version: int) -> None:
        self._correlation_id += 1
        frame = api_of(api_key).frame_request(request, version, self._correlation_id, self._client_id)
        self._socket.sendall(b"".join(frame))
        self._sent.append((api_key, version))

    def receive(self) -> Any:
        """The answer to the oldest request that has none."""
        api_key, version = self._sent.pop(0)
        (size,) = struct.unpack(">i", self._read(4))
        correlation_id, response = api_of(api_key).read_response(self._read(size), version)
        assert correlation_id == self._correlation_id - len(self._sent)
        return response

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            chunk = self._socket.recv(count - len(data))
            assert chunk, "the broker closed the connection"
            data += chunk
        return data

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
