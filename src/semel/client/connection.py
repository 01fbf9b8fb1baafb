"""One connection to one broker: TCP, TLS, ApiVersions, SASL, then any number of requests in flight.

`send` queues a request and writes what the kernel takes; `progress` reads and writes what is possible now; `call` and
`wait` block until a response or a deadline. Threads may share a connection for `call`: they take turns, and one whose
turn does not come in time raises. All else is for one thread, except `close`. `read_ahead` lends the reading of a large
response to a thread of its own.
Any failure closes it and fails all that was pending, each error saying whether the broker may have got the request.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Iterable
from typing import Any, TypeVar

from semel.client.errors import ConnectionFailedError, KafkaError, RequestTimedOutError
from semel.client.frames import Frames, ReadAhead
from semel.client.handshake import (
    attempts,
    closed_by_broker,
    copied,
    failed,
    not_connected,
    not_encodable,
    not_encrypted,
    opening,
    refused_certificate,
    timed_out,
    tls_context,
)
from semel.client.settings import ClientSettings
from semel.client.timing import Deadline
from semel.client.wire import Capabilities, Pending, Wire
from semel.protocol.api import Api
from semel.protocol.errors import EncodeError, ErrorCode
from semel.protocol.schema import Struct

Request = TypeVar("Request", bound=Struct)
Response = TypeVar("Response", bound=Struct)

log = logging.getLogger("semel.client")

MAX_BUFFERS_PER_WRITE = 64
LARGE_RESPONSE_BYTES = 1024 * 1024  # where one came, the next one is worth a thread


class ConnectionBase:
    """What the connections of threads and of event loops have in common: requests, deadlines, throttling."""

    capabilities: Capabilities

    def __init__(self, host: str, port: int, settings: ClientSettings) -> None:
        self.host = host
        self.port = port
        self.closed = False
        self.session_ends_s = float("inf")  # on time.monotonic(): when SASL's session must be renewed
        self.throttled_until_s = 0.0  # on time.monotonic(): the broker throttles requests until then
        self._settings = settings
        self._wire = Wire(settings.client_id)
        self._frames = Frames()

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def in_flight(self) -> int:
        """Requests that are not done: without a response, or (acks=0) not written."""
        return self._wire.in_flight

    @property
    def is_throttled(self) -> bool:
        """Whether requests are held back because the broker throttles this client (a quota is used up)."""
        return time.monotonic() < self.throttled_until_s

    @property
    def retiring(self) -> bool:
        """Whether no new request should be sent because the SASL session ends soon."""
        return time.monotonic() >= self.session_ends_s

    def _throttle(self, throttle_ms: int) -> None:
        log.debug("%s throttles for %s ms: a quota is used up", self.address, throttle_ms)
        self.throttled_until_s = max(self.throttled_until_s, time.monotonic() + throttle_ms / 1000)

    def _queue(
        self,
        api: Api[Request, Response],
        request: Request,
        version: int | None,
        timeout_s: float | None,
        context: Any,
        response: bool,
    ) -> Pending:
        """A request behind those in flight, to be written; done, with an error, if the connection is closed. Raises
        only for what can never be sent."""
        limit_s = self._settings.request_timeout_ms / 1000 if timeout_s is None else timeout_s
        if version is None:
            version = self.capabilities.version_of(api)
        deadline_s = time.monotonic() + limit_s
        if self.closed:
            pending = Pending(api, version, 0, deadline_s, context)
            pending.error = failed(self.address, "the connection is closed")
            return pending
        try:
            pending = self._wire.send(api, request, version, deadline_s, context, response)
        except EncodeError as error:
            raise not_encodable(api.name, self.address, error) from error
        pending.on_throttle = self._throttle
        return pending

    def next_deadline_s(self) -> float:
        """On time.monotonic(): when the deadlines are to be checked."""
        return min([self._resumes_s(), *(pending.deadline_s for pending in self._wire.waiting())])

    def _resumes_s(self) -> float:
        """On time.monotonic(): when requests that are held back may be written."""
        return self.throttled_until_s if self._wire.outgoing and self.is_throttled else float("inf")

    def _fail_late(self) -> list[Pending]:
        """Fails what is late (see `Wire.late`), with the oldest request all of it; those that failed alone."""
        oldest, late, why = self._wire.late(time.monotonic(), self.is_throttled)
        if oldest is not None:
            self._fail_all(timed_out(self.address, oldest, why))
            return []
        for pending in late:
            pending.error = timed_out(self.address, pending, why)
        return late

    def _fail_all(self, error: KafkaError) -> None:
        """Closes the connection; all that was pending fails."""
        raise NotImplementedError


class BrokerConnection(ConnectionBase):
    """An open connection. Make one with `BrokerConnection.open`."""

    def __init__(self, sock: socket.socket, host: str, port: int, settings: ClientSettings) -> None:
        super().__init__(host, port, settings)
        self._socket = sock
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._tls_wants_write = False
        self._flags = 0 if self._tls else socket.MSG_DONTWAIT  # the socket itself blocks, as `read_ahead` needs it
        self._ahead: ReadAhead | None = None
        self._end_ahead: weakref.finalize[..., BrokerConnection] | None = None
        self._unreported: list[Pending] = []
        self._turn = threading.RLock()  # held by the thread that sends, reads, or waits in a call
        self._closing = False  # another thread has called close()

    def __repr__(self) -> str:
        return f"Connection({self.address}{', closed' if self.closed else ''}, {len(self._wire.pending)} pending)"

    # --- opening ---
    @classmethod
    def open(cls, host: str, port: int, settings: ClientSettings, timeout_s: float | None = None) -> BrokerConnection:
        """Connects, encrypts and authenticates as the settings say, and gets the broker's API versions."""
        deadline = setup_deadline(settings, timeout_s)
        self = cls(_connect(host, port, settings, deadline), host, port, settings)
        try:
            self._open(deadline)
        except BaseException:
            self.close()
            raise
        return self

    def _open(self, deadline: Deadline) -> None:
        steps = opening(self, self._settings, time.monotonic)
        step = next(steps)
        while True:
            pending = self.send(step.api, step.request, version=step.version, timeout_s=deadline.remaining_s())
            self.wait(pending)
            try:
                step = steps.send(pending)
            except StopIteration:
                return

    # --- requests ---
    @property
    def wants_write(self) -> bool:
        return (bool(self._wire.outgoing) and not self.is_throttled) or self._tls_wants_write

    def waits_for(self) -> dict[int, int]:
        """File descriptors and the events with which it can go on, for select.poll."""
        with self._turn:
            if self.closed:
                return {}
            write = select.POLLOUT if self.wants_write else 0
            if self._ahead is None or not self._ahead.busy:
                return {self._socket.fileno(): select.POLLIN | write}
            return {self._ahead.fd: select.POLLIN} | ({self._socket.fileno(): write} if write else {})

    def send(
        self,
        api: Api[Request, Response],
        request: Request,
        *,
        version: int | None = None,
        timeout_s: float | None = None,
        context: Any = None,
        response: bool = True,
    ) -> Pending:
        """Sends a request behind those in flight and returns at once. Raises only for what can never be sent.

        A connection that fails here or later marks the request with an error.
        """
        with self._turn:
            try:
                pending = self._queue(api, request, version, timeout_s, context, response)
            except KafkaError:
                raise
            except BaseException:
                self._interrupted()
                raise
            if not pending.done:
                self._write()
        return pending

    def call(
        self, api: Api[Request, Response], request: Request, timeout_s: float | None = None, version: int | None = None
    ) -> Response:
        """Sends a request and waits for its response, after the calls of other threads; no longer than its timeout."""
        deadline = Deadline(self._settings.request_timeout_ms / 1000 if timeout_s is None else timeout_s)
        if not self._turn.acquire(timeout=min(deadline.remaining_s(), threading.TIMEOUT_MAX)):
            raise RequestTimedOutError(
                f"{api.name} was not sent to {self.address}: a request of another thread on the same connection took "
                f"longer than {deadline.total_s:.3g} s",
                ErrorCode.REQUEST_TIMED_OUT,
            )
        try:
            pending = self.send(api, request, version=version, timeout_s=deadline.remaining_s())
            self.wait(pending)
        finally:
            self._turn.release()
        response: Response = pending.result()
        return response

    def wait(self, pending: Pending) -> None:
        """Blocks until the request has a response or an error; its own deadline bounds the wait."""
        with self._turn:
            while not pending.done:
                self._wait_for_io(max(0.0, min(pending.deadline_s, self._resumes_s()) - time.monotonic()))
                self._unreported += self._advance()
                self._expire()
                if not pending.done and self.closed:
                    pending.error = self._failed("the connection was closed")
            if pending in self._unreported:
                self._unreported.remove(pending)  # its caller has it; `progress` reports the others

    def _wait_for_io(self, timeout_s: float) -> None:
        if not self.closed:
            poller = select.poll()
            for fd, events in self.waits_for().items():
                poller.register(fd, events)
            poller.poll(min(timeout_s, 3600.0) * 1000)

    def read_ahead(self) -> None:
        """Lets a thread read the next response, if the last one was large, so that the caller can work meanwhile."""
        if self._tls or self.closed or self._frames.last_bytes < LARGE_RESPONSE_BYTES:
            return
        if self._ahead is None:
            try:
                self._ahead = ReadAhead(self._socket, self._frames)
            except (RuntimeError, OSError) as error:  # no thread or no descriptor to be had: it goes without
                log.debug("reading without a thread: %s", error)
                return
            self._end_ahead = weakref.finalize(self, self._ahead.stop)
        if not self._ahead.busy:
            self._ahead.start()

    def notice_closing(self) -> None:
        """Finds out, without waiting, whether the broker has closed a connection that was idle for a while."""
        if self._turn.acquire(blocking=False):  # else it is in use
            try:
                self._unreported += self._advance()
            finally:
                self._turn.release()

    # --- progress ---
    def progress(self) -> list[Pending]:
        """Reads and writes what is possible without waiting; the requests that got their response or an error."""
        with self._turn:
            return self._advance() + self.take_unreported()

    def take_unreported(self) -> list[Pending]:
        """Requests that are done and were not reported yet: they failed with the connection, or got their response
        while another one was waited for."""
        done, self._unreported = self._unreported, []
        return done

    def _advance(self) -> list[Pending]:
        try:
            if not self.closed:
                self._write()
            return [] if self.closed else self._read()
        except BaseException:
            self._interrupted()
            raise

    def check_deadlines(self) -> list[Pending]:
        """Fails the requests that waited too long; what is done and was not reported."""
        with self._turn:
            if not self.closed:
                self._write()  # what was held back
            self._expire()
            return self.take_unreported()

    def _expire(self) -> None:
        if self.next_deadline_s() <= time.monotonic():
            self._unreported += self._fail_late()

    def close(self) -> None:
        """Closes the socket and fails what was pending. May be called twice, and by any thread: one that waits for an
        response notices at once, and closes the socket itself."""
        self._closing = True
        if not self._turn.acquire(blocking=False):
            with contextlib.suppress(OSError):  # it is closed already
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # also below TLS, whose state is the other's
            return
        try:
            if not self.closed:
                self._fail_all(ConnectionFailedError(f"the connection to {self.address} was closed"))
        finally:
            self._turn.release()

    def _write(self) -> None:
        wire = self._wire
        if self.is_throttled:
            return
        try:
            while wire.outgoing and not self.closed:
                if self._tls:
                    count = self._socket.send(wire.outgoing[0])
                else:
                    buffers = [wire.outgoing[i] for i in range(min(len(wire.outgoing), MAX_BUFFERS_PER_WRITE))]
                    count = self._socket.sendmsg(buffers, (), self._flags)
                self._unreported += wire.written(count)
            self._tls_wants_write = False
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return
        except ConnectionError:
            self._fail_all(self._failed(self._closed_by_broker()))
        except OSError as error:
            self._fail_all(self._failed(f"cannot write: {error}"))
        except BaseException:
            self._interrupted()
            raise

    def _read(self) -> list[Pending]:
        done: list[Pending] = []
        try:
            if self._ahead is not None and self._ahead.busy:
                done.extend(self._wire.match(self._ahead.take()))
                if self._ahead.busy:
                    return done
            while not self.closed:
                space = self._frames.space()
                count = self._socket.recv_into(space, len(space), self._flags)
                if not count:
                    self._fail_all(self._failed(self._closed_by_broker()))
                    break
                done.extend(self._wire.match(self._frames.filled(count)))
                if count < len(space) and not self._tls:
                    break
        except (BlockingIOError, ssl.SSLWantReadError):
            pass
        except ssl.SSLWantWriteError:
            self._tls_wants_write = True
        except ConnectionError:
            self._fail_all(self._failed(self._closed_by_broker()))
        except ssl.SSLError as error:  # with TLS 1.3 the broker's verdict on the client's certificate comes this late
            self._fail_all(refused_certificate(error, self.address) or self._failed(f"cannot read: {error}"))
        except OSError as error:
            self._fail_all(self._failed(f"cannot read: {error}"))
        except ConnectionFailedError as error:
            self._fail_all(self._failed(str(error)))
        return done

    def _interrupted(self) -> None:
        """Ctrl-C came while bytes were on their way to or from the socket: how many is not known any more."""
        self._fail_all(self._failed("a call was interrupted while it wrote or read"))

    def _closed_by_broker(self) -> str:
        if self._closing:
            return "the connection was closed by this client"
        return closed_by_broker(self._settings, hasattr(self, "capabilities"))

    def _failed(self, cause: str) -> ConnectionFailedError:
        return failed(self.address, cause)

    def _fail_all(self, error: KafkaError) -> None:
        self.closed = True
        log.debug("%s", error)
        failed = self._wire.clear()
        self._unreported += failed
        for pending in failed:
            pending.error = copied(error)
        if self._end_ahead is not None:
            self._end_ahead()
        if self._closing:  # another thread may wait for this socket
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        with contextlib.suppress(OSError):  # nothing more can be done for it
            self._socket.close()


def poll(connections: Iterable[BrokerConnection], timeout_s: float, wakeup: int | None = None) -> list[Pending]:
    """Waits until one of the connections can go on, or `wakeup` (a file descriptor) is readable; what got done."""
    watched = list(connections)
    early = [pending for connection in watched for pending in connection.take_unreported()]
    owners: dict[int, BrokerConnection] = {}
    poller = select.poll()
    for connection in watched:
        for fd, events in connection.waits_for().items():
            poller.register(fd, events)
            owners[fd] = connection
    if wakeup is not None:
        poller.register(wakeup, select.POLLIN)
    done: list[Pending] = []
    for fd, _ in poller.poll(0 if early else min(timeout_s, 3600.0) * 1000):
        if fd in owners:
            done += owners[fd].progress()
    return done + early


def setup_deadline(settings: ClientSettings, timeout_s: float | None) -> Deadline:
    limit_s = settings.socket_connection_setup_timeout_ms / 1000
    return Deadline(limit_s if timeout_s is None else min(timeout_s, limit_s))


def set_options(sock: socket.socket, settings: ClientSettings) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    buffers = {socket.SO_SNDBUF: settings.send_buffer_bytes, socket.SO_RCVBUF: settings.receive_buffer_bytes}
    for option, size in buffers.items():
        if size > 0:
            sock.setsockopt(socket.SOL_SOCKET, option, size)


def _connect(host: str, port: int, settings: ClientSettings, deadline: Deadline) -> socket.socket:
    address = f"{host}:{port}"
    try:
        sock = _connected(host, port, deadline)
    except (OSError, UnicodeError) as error:
        raise not_connected(error, address, deadline.total_s) from None
    try:
        set_options(sock, settings)
        if settings.uses_tls:
            sock.settimeout(max(deadline.remaining_s(), 0.001))
            sock = _encrypted(sock, host, address, settings)
        sock.setblocking(not settings.uses_tls)  # without TLS every call says by itself that it must not block
    except BaseException:
        sock.close()
        raise
    return sock


def _connected(host: str, port: int, deadline: Deadline) -> socket.socket:
    """To the first address of the host that can be reached."""
    failure: OSError | None = None
    for (*_, place), limit_s in attempts(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM), deadline):
        try:
            return socket.create_connection((_with_zone(*place), place[1]), timeout=limit_s)
        except OSError as error:
            failure = error
    assert failure is not None
    raise failure


def _with_zone(host: str, _port: int, _flow: int = 0, zone: int = 0) -> str:
    """A link-local address of IPv6 says nothing without its interface."""
    return f"{host}%{zone}" if zone else host


def _encrypted(sock: socket.socket, host: str, address: str, settings: ClientSettings) -> ssl.SSLSocket:
    try:
        return tls_context(settings).wrap_socket(sock, server_hostname=host)
    except OSError as error:
        raise not_encrypted(error, address) from None
