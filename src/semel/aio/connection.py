"""One connection to one broker in an event loop: TCP, TLS, ApiVersions, SASL, then any number of requests in flight.

`send` never waits: the request is written when the transport takes it, and `then` is called once it has a response or
an error. `call` waits; a caller that is cancelled leaves its request, whose response is dropped. Any failure closes the
connection and fails all that was pending, each error saying whether the broker may have got the request.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

from semel.client.connection import ConnectionBase, set_options, setup_deadline
from semel.client.errors import ConnectionFailedError, KafkaError
from semel.client.handshake import (
    Address,
    Opening,
    OpeningRequest,
    attempts,
    closed_by_broker,
    copied,
    failed,
    not_connected,
    not_encrypted,
    opening,
    refused_certificate,
    tls_context,
)
from semel.client.settings import ClientSettings
from semel.client.timing import Deadline
from semel.client.wire import Pending
from semel.protocol.api import Api
from semel.protocol.schema import Struct

Request = TypeVar("Request", bound=Struct)
Response = TypeVar("Response", bound=Struct)

log = logging.getLogger("semel.client")

LOOK_EVERY_S = 0.01  # below TLS no event says that all is written


class AsyncConnection(ConnectionBase, asyncio.BufferedProtocol):
    """An open connection. Make one with `AsyncConnection.open`."""

    def __init__(self, host: str, port: int, settings: ClientSettings, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(host, port, settings)
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._plain: asyncio.Transport | None = None  # below TLS
        self._is_full = False  # the transport holds more than it should; it says when it takes more
        self._handed_bytes = 0  # of `outgoing`, to the transport, which may not have written them
        self._then: dict[Pending, Callable[[Pending], None]] = {}
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_s = float("inf")

    def __repr__(self) -> str:
        return f"AsyncConnection({self.address}{', closed' if self.closed else ''}, {self.in_flight} in flight)"

    # --- opening ---
    @classmethod
    async def open(
        cls, host: str, port: int, settings: ClientSettings, timeout_s: float | None = None
    ) -> AsyncConnection:
        """Connects, encrypts and authenticates as the settings say, and gets the broker's API versions."""
        deadline = setup_deadline(settings, timeout_s)
        loop = asyncio.get_running_loop()
        self = cls(host, port, settings, loop)
        try:
            await self._connect(deadline)
            await self._negotiate(deadline)
        except BaseException:
            self.close()
            raise
        return self

    async def _connect(self, deadline: Deadline) -> None:
        try:
            async with asyncio.timeout(max(deadline.remaining_s(), 0.001)):
                sock = await self._connected(deadline)
                await self._loop.create_connection(lambda: self, sock=sock)
        except (OSError, UnicodeError) as error:
            raise not_connected(error, self.address, deadline.total_s) from None
        set_options(sock, self._settings)
        if self._settings.uses_tls:
            await self._encrypt(deadline)

    async def _connected(self, deadline: Deadline) -> socket.socket:
        """To the first address of the host that can be reached."""
        failure: OSError | None = None
        for address, limit_s in attempts(await self._addresses(), deadline):
            try:
                async with asyncio.timeout(limit_s):
                    return await self._connected_to(address)
            except OSError as error:
                failure = error
        assert failure is not None
        raise failure

    async def _addresses(self) -> Iterable[Address]:
        where, kind = (self.host, self.port), socket.SOCK_STREAM
        try:
            return socket.getaddrinfo(*where, type=kind, flags=socket.AI_NUMERICHOST)  # needs no look-up
        except socket.gaierror:
            return await self._loop.getaddrinfo(*where, type=kind)

    async def _connected_to(self, address: Address) -> socket.socket:
        family, kind, protocol, _, place = address
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            await self._loop.sock_connect(sock, place)
        except BaseException:
            sock.close()
            raise
        return sock

    async def _encrypt(self, deadline: Deadline) -> None:
        context = await self._loop.run_in_executor(None, tls_context, self._settings)  # it reads files
        plain = cast("asyncio.Transport", self._transport)
        limit_s = max(deadline.remaining_s(), 0.001)
        try:
            async with asyncio.timeout(limit_s):
                encrypted = await self._loop.start_tls(
                    plain, self, context, server_hostname=self.host, ssl_handshake_timeout=limit_s + 1
                )
        except OSError as error:
            raise not_encrypted(error, self.address) from None
        if encrypted is None:
            raise failed(self.address, "the connection was closed during the handshake of TLS")
        self._plain, self._transport = plain, encrypted

    async def _negotiate(self, deadline: Deadline) -> None:
        steps = opening(self, self._settings, time.monotonic)
        step: OpeningRequest | None = next(steps)
        while step is not None:
            done = await self._wait(step.api, step.request, step.version, deadline.remaining_s())
            if self._settings.uses_sasl:  # SCRAM computes thousands of hashes
                step = await self._loop.run_in_executor(None, _advanced, steps, done)
            else:
                step = _advanced(steps, done)

    # --- requests ---
    def send(
        self,
        api: Api[Request, Response],
        request: Request,
        then: Callable[[Pending], None],
        *,
        version: int | None = None,
        timeout_s: float | None = None,
        context: Any = None,
        response: bool = True,
    ) -> Pending:
        """Sends a request behind those in flight. `then` gets it when it is done, never from within this call. Raises
        only for what can never be sent."""
        pending = self._queue(api, request, version, timeout_s, context, response)
        if pending.done:
            self._loop.call_soon(then, pending)
            return pending
        self._then[pending] = then
        self._write()
        self._set_alarm(pending.deadline_s)
        return pending

    async def call(
        self, api: Api[Request, Response], request: Request, timeout_s: float, version: int | None = None
    ) -> Response:
        """Sends a request and waits for its response."""
        response: Response = (await self._wait(api, request, version, timeout_s)).result()
        return response

    async def _wait(self, api: Api[Any, Any], request: Any, version: int | None, timeout_s: float) -> Pending:
        done: asyncio.Future[Pending] = self._loop.create_future()
        self.send(api, request, lambda pending: _fill(done, pending), version=version, timeout_s=timeout_s)
        return await done

    def _throttle(self, throttle_ms: int) -> None:
        super()._throttle(throttle_ms)
        self._set_alarm(self.throttled_until_s)

    def _write(self) -> None:
        wire, transport = self._wire, self._transport
        if self.closed or self._is_full or self._handed_bytes or transport is None or self.is_throttled:
            return
        if not wire.outgoing:
            return
        if wire.without_response and self._plain is None:
            transport.set_write_buffer_limits(high=0)  # it says when it holds nothing any more
        parts = list(wire.outgoing)
        transport.writelines(parts)
        self._handed_bytes = sum(map(len, parts))
        self._take_written()

    def _take_written(self) -> None:
        """What was handed over is written. A request without a response (acks=0) is done with that, so not before the
        transport holds nothing of it any more: what it holds is lost when the connection is closed."""
        handed_bytes = self._handed_bytes
        if self.closed or not handed_bytes:
            return
        if self._wire.without_response and self._is_holding():
            if self._plain is not None:
                self._loop.call_later(LOOK_EVERY_S, self._take_written)
            return
        self._handed_bytes = 0
        self._finish(self._wire.written(handed_bytes))
        self._write()

    def _is_holding(self) -> bool:
        layers = (self._transport, self._plain)
        return any(layer.get_write_buffer_size() for layer in layers if layer is not None)

    def _finish(self, done: Iterable[Pending]) -> None:
        for pending in done:
            then = self._then.pop(pending, None)
            if then is not None:
                self._loop.call_soon(then, pending)

    # --- deadlines ---
    def _set_alarm(self, at_s: float) -> None:
        if at_s < self._alarm_s and not self.closed:
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm_s = at_s
            self._alarm = self._loop.call_later(max(0.0, at_s - time.monotonic()), self._check_deadlines)

    def _check_deadlines(self) -> None:
        self._alarm, self._alarm_s = None, float("inf")
        self._write()  # what was held back
        self._finish(self._fail_late())
        self._set_alarm(self.next_deadline_s())

    # --- what asyncio calls ---
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._take_written()
        self._write()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._frames.space()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            self._finish(self._wire.match(self._frames.filled(nbytes)))
        except ConnectionFailedError as error:
            self._fail_all(failed(self.address, str(error)))

    def connection_lost(self, exc: Exception | None) -> None:
        if self.closed:
            return
        if exc is None or isinstance(exc, ConnectionError):
            cause = closed_by_broker(self._settings, hasattr(self, "capabilities"))
            self._fail_all(failed(self.address, cause))
        elif isinstance(exc, ssl.SSLError):  # with TLS 1.3 the broker's verdict on the certificate comes this late
            refused = refused_certificate(exc, self.address)
            self._fail_all(refused or failed(self.address, f"cannot read: {exc}"))
        else:
            self._fail_all(failed(self.address, f"cannot read or write: {exc}"))

    # --- end ---
    def close(self) -> None:
        """Closes the socket and fails what was pending. May be called twice."""
        if not self.closed:
            self._fail_all(ConnectionFailedError(f"the connection to {self.address} was closed"))

    def _fail_all(self, error: KafkaError) -> None:
        self.closed = True
        log.debug("%s", error)
        left = self._wire.clear()
        for pending in left:
            pending.error = copied(error)
        if self._alarm is not None:
            self._alarm.cancel()
        if self._loop.is_closed():  # nobody waits any more, and the transport cannot be closed in its own way
            self._then.clear()
            return
        self._finish(left)
        self._then.clear()
        if self._transport is not None:
            self._transport.abort()


def _fill(future: asyncio.Future[Pending], pending: Pending) -> None:
    if not future.done():  # the caller may have been cancelled
        future.set_result(pending)


def _advanced(steps: Opening, done: Pending) -> OpeningRequest | None:
    """The next request of the opening; None at its end. A future cannot take StopIteration."""
    try:
        return steps.send(done)
    except StopIteration:
        return None
