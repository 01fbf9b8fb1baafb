"""One client connection: frames in, responses out in the order of the requests.

As in Kafka a connection's requests are worked on one after the other, so that each sees what the one before it did.
Only Produce does not wait for the Produce before it to be durable, just to be appended.

A request's record sets are views into the receive buffer. They are valid until the handler returns or first suspends;
a handler that needs them longer takes a copy.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections import Counter, deque
from collections.abc import Coroutine
from functools import cache, partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

from semel import faults
from semel.broker.broker import BrokerNode
from semel.broker.dispatch import Dispatcher, RequestContext
from semel.broker.quotas import CONSUMER_BYTE_RATE, PRODUCER_BYTE_RATE
from semel.broker.receive_buffer import FrameSizeError, ReceiveBuffer, SharedBuffer
from semel.broker.turns import MANY, DoneAtOnce, start_now
from semel.protocol.api import API_VERSIONS_KEY, FLEXIBLE_FROM, RequestHeader, read_request_header
from semel.protocol.errors import ProtocolError, UnsupportedVersionError
from semel.protocol.produce_size import has_more_partitions
from semel.protocol.schema import Buffer, Struct, fields_of

if TYPE_CHECKING:
    from semel.broker.dispatch import HandlerResult, Served

log = logging.getLogger(__name__)

MAX_PENDING = 64  # requests taken off the socket before their responses are out
MAX_QUEUED_BYTES = 1 << 20  # frames that wait for their turn
WRITE_HIGH_BYTES = 1 << 20  # beyond this the client must read before it is served again
JOIN_BELOW_BYTES = 16 << 10  # small responses are cheaper as one buffer
LARGE_REQUEST_BYTES = 16 << 10  # beyond this a request is decoded by a thread
LARGE_PRODUCE_BYTES = 64 << 10  # the same of Produce, unless most of it is records
_PRODUCE, _FETCH = 0, 1


class ResponseSlot:
    """The place of a response in the order of the connection."""

    __slots__ = ("charged", "correlation_id", "future", "is_done", "parts", "served", "started_s", "version")

    def __init__(self, served: Served, version: int, correlation_id: int) -> None:
        self.served = served
        self.version = version
        self.correlation_id = correlation_id
        self.parts: list[Any] | None = None
        self.is_done = False
        self.started_s = perf_counter()
        self.future: asyncio.Future[Any] | None = None
        self.charged: tuple[str, int] | None = None  # where there are quotas: client id, size of the request


class Connection(asyncio.BufferedProtocol):
    """A client, from its first byte to its last."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._broker = server.broker
        self._loop = server.loop
        self._transport: asyncio.Transport | None = None
        self._received = ReceiveBuffer(server.max_request_bytes, server.read_buffer)
        self._slots: deque[ResponseSlot] = deque()
        self._queue: deque[bytearray] = deque()
        self._queued_bytes = 0
        self._barrier = False  # a request is under way that the next one has to wait for
        self._is_reading = True
        self._is_writable = True
        self._is_muted = False  # over its quota: its requests wait
        self._muted_until_s = 0.0
        self._unmuting: asyncio.TimerHandle | None = None
        self._is_corked = False
        self._outbox: list[Any] = []
        self._outbox_bytes = 0
        self.client_host = ""
        self.local_address: tuple[str, int] = ("", 0)
        self.last_active_s = 0.0
        self.stuck_since_s: float | None = None

    # -- life ----------------------------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)  # uvloop's is not a subclass
        self._transport = transport
        peer = transport.get_extra_info("peername") or ("", 0)
        self.client_host = f"/{peer[0]}"
        self.local_address = (transport.get_extra_info("sockname") or ("", 0))[:2]
        self.last_active_s = self._loop.time()
        transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        self._server.tune(transport.get_extra_info("socket"))
        if not self._server.admit(self):
            transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._queue = deque(frame for frame in self._queue if self._is_unacknowledged(frame))
        if self._unmuting is not None:
            self._unmuting.cancel()  # it would keep the connection in memory, for weeks at worst
        self._server.forget(self)
        for slot in self._slots:
            if slot.future is not None and slot.served.cancel_on_disconnect:
                slot.future.cancel()
        self._slots = deque(slot for slot in self._slots if slot.future is not None and not slot.future.cancelled())
        self._work_off()

    def _is_unacknowledged(self, frame: bytearray) -> bool:
        """Whether it is a Produce request with acks=0. Its client is done once it is written, and may have gone away
        since: as in Kafka, that takes nothing back."""
        if len(frame) < 2 or frame[0] or frame[1]:
            return False
        try:
            header = read_request_header(frame, FLEXIBLE_FROM)
            served = self._server.dispatcher.find(header.api_key, header.version)
            request: Any = served.decode(frame, header.version, header.body_at)
        except ProtocolError:
            return False
        return bool(request.acks == 0)

    def _work_off(self, done: ResponseSlot | None = None) -> None:
        """After the end of the connection: what is left in the queue, each when the one before it is done."""
        if done is not None and done in self._slots:
            self._slots.remove(done)
        while self._queue and not self._slots:
            self._handle(self._queue.popleft())

    def close(self, reason: str, *, level: int = logging.INFO) -> None:
        """Ends the connection at once, without a response to what is under way."""
        if self._transport is not None:
            log.log(level, "connection closed", extra={"client": self.client_host, "reason": reason})
            self._transport.abort()
            self._transport = None

    @property
    def is_idle(self) -> bool:
        """Nothing is under way. While it is throttled, nothing is read either: the client may have left."""
        return not self._slots and (not self._queue or self._is_muted)

    @property
    def unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def finish(self) -> None:
        """Takes no more requests; closes once the responses that are under way were sent."""
        self._queue.clear()
        if self._transport is not None:
            self._pause_reading()
            if not self._slots:
                self._transport.close()

    # -- bytes in ------------------------------------------------------------------------------------------------------
    def get_buffer(self, sizehint: int) -> memoryview:
        return self._received.writable()

    def buffer_updated(self, nbytes: int) -> None:
        """Works on every whole frame that has come; their responses leave together."""
        self._received.add(nbytes)
        self.last_active_s = self._loop.time()
        self._server.bytes_in += nbytes
        self._is_corked = True
        try:
            while self._transport is not None and (frame := self._received.next_frame()) is not None:
                self._on_frame(frame)
        except FrameSizeError as error:
            self.close(str(error))
        finally:
            self._is_corked = False
            if self._outbox:
                self._flush()

    def eof_received(self) -> bool:
        return False  # close; responses to a client that went away are of no use

    # -- requests ------------------------------------------------------------------------------------------------------
    def _on_frame(self, frame: memoryview) -> None:
        if self._queue or not self._may_start(frame):
            self._queue.append(bytearray(frame))
            self._queued_bytes += len(frame)
        else:
            self._handle(frame)
        if self._queued_bytes > MAX_QUEUED_BYTES or len(self._slots) + len(self._queue) >= MAX_PENDING:
            self._pause_reading()

    def _may_start(self, frame: memoryview | bytearray) -> bool:
        if self._is_muted:
            return False
        if not self._slots:
            return self._is_writable
        if len(frame) < 2:
            return False
        return self._is_writable and not self._barrier and not frame[0] and not frame[1]  # Produce behind Produce

    def _handle(self, frame: memoryview | bytearray) -> None:
        try:
            header = read_request_header(frame, FLEXIBLE_FROM)
            served = self._server.dispatcher.find(header.api_key, header.version)
            is_large = len(frame) > LARGE_REQUEST_BYTES and _has_many_parts(frame, header)
            request = None if is_large else served.decode(frame, header.version, header.body_at)
        except UnsupportedVersionError as error:
            self._refuse_version(frame, error)
            return
        except ProtocolError as error:
            self.close(str(error))
            return
        context = RequestContext(header.api_key, header.version, header.client_id, self.client_host, self)
        slot = ResponseSlot(served, header.version, header.correlation_id)
        self._slots.append(slot)
        if self._broker.quotas.is_active:
            slot.charged = (header.client_id or "", len(frame))
        if is_large:
            self._run_eagerly(slot, self._work_on_large(slot, context, bytes(frame), header.body_at))
            return
        try:
            result = served.handler(self._broker, context, request)
        except Exception as error:
            self._on_bug(served, error)
            return
        self._settle(slot, result)

    async def _work_on_large(
        self, slot: ResponseSlot, context: RequestContext, frame: bytes, body_at: int
    ) -> Struct | None:
        """A request of very many entries: a thread decodes it, handlers take turns."""
        served = slot.served
        try:
            request = await self._loop.run_in_executor(self._broker.codec, served.decode, frame, slot.version, body_at)
        except ProtocolError as error:
            self.close(str(error))
            return None
        response: Any = served.handler(self._broker, context, request)
        while response is not None and not isinstance(response, Struct):
            response = await response
        return response

    def _settle(self, slot: ResponseSlot, result: HandlerResult) -> None:
        """Sends a response that is there, or waits for one that is not."""
        if result is None or isinstance(result, Struct):
            self._complete(slot, result)
        elif isinstance(result, asyncio.Future):
            self._barrier = not slot.served.pipelined
            self._await(slot, result)
        else:
            self._run_eagerly(slot, result)

    def _run_eagerly(self, slot: ResponseSlot, work: Coroutine[Any, Any, Struct | None]) -> None:
        """Most responses have nothing to wait for: they cost no task, and leave before what they set going."""
        try:
            step = start_now(work, self._loop.create_task)
        except Exception as error:
            self._on_bug(slot.served, error)
            return
        if isinstance(step, DoneAtOnce):
            self._settle(slot, step.value)
        else:
            self._barrier = True
            self._await(slot, step)

    def _await(self, slot: ResponseSlot, future: asyncio.Future[Any]) -> None:
        slot.future = future
        future.add_done_callback(lambda future: self._on_response(slot, future))

    def _on_response(self, slot: ResponseSlot, future: asyncio.Future[Struct | None]) -> None:
        if self._transport is None:
            self._work_off(slot)
            return
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            self._on_bug(slot.served, error)
            return
        response = future.result()
        if isinstance(response, asyncio.Future):  # what has to be done is done; only the response waits
            self._barrier = not slot.served.pipelined
            self._await(slot, response)
        else:
            self._complete(slot, response)
        self._go_on()

    def _complete(self, slot: ResponseSlot, response: Struct | None) -> None:
        slot.served.latencies.add(perf_counter() - slot.started_s)
        if slot.charged is not None:
            self._charge(slot.served.api.key, *slot.charged, response)
        if response is not None:
            may_be_large = slot.future is not None or slot.served.api.key != _PRODUCE  # one that is large takes turns
            if may_be_large and has_many_entries(response):
                frame = partial(slot.served.api.frame_response, response, slot.version, slot.correlation_id)
                slot.future = self._loop.run_in_executor(self._broker.codec, frame)
                slot.future.add_done_callback(lambda future: self._on_framed(slot, future))
                return
            try:
                slot.parts = slot.served.api.frame_response(response, slot.version, slot.correlation_id)
            except ProtocolError as error:
                self._on_bug(slot.served, error)
                return
        self._on_ready(slot)

    def _on_framed(self, slot: ResponseSlot, future: asyncio.Future[list[Any]]) -> None:
        """A thread encoded a large response."""
        if self._transport is None:
            self._work_off(slot)
            return
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            self._on_bug(slot.served, error, "response not encoded")
            return
        slot.parts = future.result()
        self._on_ready(slot)
        self._go_on()

    def _on_ready(self, slot: ResponseSlot) -> None:
        slot.is_done = True
        if faults.armed:
            faults.hit(f"{slot.served.name}.before_response")
        self._send_done()
        if faults.armed:
            self._flush()
            self._after_response(slot)

    def _after_response(self, slot: ResponseSlot) -> None:
        """The fault point, once the response has left: uvloop writes at the end of its turn."""
        if self._transport is not None and self._is_writable and self._transport.get_write_buffer_size():
            self._loop.call_soon(self._after_response, slot)
        else:
            faults.hit(f"{slot.served.name}.after_response")

    def _charge(self, api_key: int, client_id: str, size_bytes: int, response: Struct | None) -> None:
        """Counts a produce request or the records of a fetch; a client over its quota is throttled."""
        if api_key == _PRODUCE:
            wait_ms = self._broker.quotas.charge(PRODUCER_BYTE_RATE, client_id, size_bytes)
        elif api_key == _FETCH and response is not None:
            wait_ms = self._broker.quotas.charge(CONSUMER_BYTE_RATE, client_id, _records_bytes(response))
        else:
            return
        if wait_ms and self._transport is not None:
            if response is not None:
                response.throttle_time_ms = wait_ms  # type: ignore[attr-defined]
            self._is_muted = True
            self._muted_until_s = max(self._muted_until_s, self._loop.time() + wait_ms / 1000)
            if self._unmuting is not None:
                self._unmuting.cancel()
            self._unmuting = self._loop.call_at(self._muted_until_s, self._unmute)

    def _unmute(self) -> None:
        self._is_muted = False
        self._go_on()

    def _on_bug(self, served: Served, error: BaseException, what: str = "handler failed") -> None:
        log.error(what, exc_info=error, extra={"api": served.name, "client": self.client_host})
        self.close(f"a bug in the handler of {served.name}", level=logging.ERROR)

    def _refuse_version(self, frame: memoryview | bytearray, error: UnsupportedVersionError) -> None:
        """Kafka closes the connection, except for ApiVersions, whose response lists what the client may request."""
        from semel.broker.handlers.cluster import refuse_version

        api_key, version, correlation_id = struct.unpack_from(">hhi", frame)
        if api_key != API_VERSIONS_KEY:
            self.close(str(error))
            return
        slot = ResponseSlot(self._server.dispatcher.find(api_key, 0), 0, correlation_id)
        self._slots.append(slot)
        self._complete(slot, refuse_version(version))

    def _go_on(self) -> None:
        """Starts what waited for its turn."""
        if not self._slots:
            self._barrier = False
        while self._queue and self._transport is not None and self._may_start(self._queue[0]):
            frame = self._queue.popleft()
            self._queued_bytes -= len(frame)
            self._handle(frame)
        is_ready = self._is_writable and not self._is_muted and not self._queue
        if not self._is_reading and is_ready and not self._server.is_stopping:
            self._resume_reading()

    # -- bytes out -----------------------------------------------------------------------------------------------------
    def _send_done(self) -> None:
        """Moves the responses whose turn it is to the outbox, and sends it unless more are on their way."""
        slots = self._slots
        while slots and slots[0].is_done:
            parts = slots.popleft().parts
            if parts is not None:
                self._outbox += parts
                self._outbox_bytes += sum(map(len, parts))
        if self._outbox and (not self._is_corked or self._outbox_bytes > JOIN_BELOW_BYTES):
            self._flush()
        if self._server.is_stopping and not slots and self._transport is not None:
            self._flush()
            self._transport.close()

    def _flush(self) -> None:
        parts, size = self._outbox, self._outbox_bytes
        self._outbox, self._outbox_bytes = [], 0
        if self._transport is None or not parts:
            return
        self._server.bytes_out += size
        self.last_active_s = self._loop.time()
        if size <= JOIN_BELOW_BYTES:
            self._transport.write(b"".join(parts))
        else:
            self._transport.writelines(parts)

    def pause_writing(self) -> None:
        self._is_writable = False
        self._pause_reading()
        self.stuck_since_s = self._loop.time()
        self._server.on_stuck(self)

    def resume_writing(self) -> None:
        self._is_writable = True
        self.stuck_since_s = None
        self._server.on_unstuck(self)
        self._go_on()

    def _pause_reading(self) -> None:
        if self._is_reading and self._transport is not None:
            self._is_reading = False
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._transport is not None:
            self._is_reading = True
            self._transport.resume_reading()


def _has_many_parts(frame: Buffer, header: RequestHeader) -> bool:
    """Whether decoding a request of many bytes takes long. Produce is mostly records, which are not decoded."""
    if header.api_key != _PRODUCE:
        return True
    return len(frame) > LARGE_PRODUCE_BYTES and has_more_partitions(frame, header.version, header.body_at, MANY)


def has_many_entries(response: Struct) -> bool:
    """Whether a response is so long that encoding it would hold up others."""
    count = 0
    for name in _arrays_of(type(response)):
        entries = getattr(response, name)
        if entries:
            count += len(entries)
            if isinstance(entries[0], Struct):
                if count > MANY:
                    return True
                names = _arrays_of(type(entries[0]))
                for entry in entries:
                    for inner in names:
                        count += len(getattr(entry, inner) or ())
    return count > MANY


@cache
def _arrays_of(kind: type[Struct]) -> tuple[str, ...]:
    return tuple(field.name for field in fields_of(kind) if field.is_array)


def _records_bytes(response: Any) -> int:
    parts = [part.records or b"" for topic in response.responses for part in topic.partitions]
    return sum(sum(map(len, part)) if isinstance(part, list) else len(part) for part in parts)


# --- The listening socket and its connections: limits, idle time, slow readers, a graceful end ---


UNSENT_BUDGET_BYTES = 256 << 20  # what clients that do not read may hold in memory, all together
STOP_GRACE_S = 5.0


class Server:
    """All connections of the broker."""

    def __init__(self, broker: BrokerNode) -> None:
        settings = broker.settings
        self.broker = broker
        self.loop = asyncio.get_running_loop()
        self.dispatcher = Dispatcher(broker.settings.__getitem__)
        self.max_request_bytes: int = settings["socket.request.max.bytes"]
        self.read_buffer = SharedBuffer()
        self.is_stopping = False
        self.bytes_in = self.bytes_out = 0
        self.connections: set[Connection] = set()
        self._per_host: Counter[str] = Counter()
        self._stuck: dict[Connection, int] = {}
        self._listener: asyncio.Server | None = None
        self._sockets = (settings["socket.send.buffer.bytes"], settings["socket.receive.buffer.bytes"])

    async def listen(self, sock: socket.socket) -> None:
        """Accepts connections from now on."""
        self._listener = await self.loop.create_server(lambda: Connection(self), sock=sock)

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Takes no more requests, responds to those under way, closes."""
        self.is_stopping = True
        if self._listener is not None:
            self._listener.close()
        self.broker.fetches.finish_all()
        for connection in tuple(self.connections):
            connection.finish()
        deadline_s = self.loop.time() + grace_s
        while self.connections and self.loop.time() < deadline_s:
            await asyncio.sleep(0.005)
        for connection in tuple(self.connections):
            connection.close("the broker stops")

    # -- connections ---------------------------------------------------------------------------------------------------
    def tune(self, sock: socket.socket) -> None:
        send_bytes, receive_bytes = self._sockets
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if send_bytes > 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
        if receive_bytes > 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)

    def admit(self, connection: Connection) -> bool:
        """Counts a new connection in. False: there are too many."""
        settings = self.broker.settings
        self.connections.add(connection)
        self._per_host[connection.client_host] += 1
        if self.is_stopping or len(self.connections) > settings["max.connections"]:
            return False
        limit: int = settings["max.connections.per.ip"]
        return self._per_host[connection.client_host] <= limit

    def forget(self, connection: Connection) -> None:
        if connection in self.connections:
            self.connections.discard(connection)
            self._per_host[connection.client_host] -= 1
            if not self._per_host[connection.client_host]:
                del self._per_host[connection.client_host]
        self._stuck.pop(connection, None)

    def on_stuck(self, connection: Connection) -> None:
        """A client reads too slowly. Together such clients may hold so much memory; the longest stuck one goes."""
        self._stuck[connection] = connection.unsent_bytes
        while sum(self._stuck.values()) > UNSENT_BUDGET_BYTES:
            longest = next(iter(self._stuck))
            del self._stuck[longest]
            longest.close("it does not read its responses", level=logging.WARNING)

    def on_unstuck(self, connection: Connection) -> None:
        self._stuck.pop(connection, None)

    def close_idle(self) -> int:
        """Ends connections without traffic for connections.max.idle.ms. Returns how many."""
        limit_ms: int = self.broker.settings["connections.max.idle.ms"]
        if limit_ms < 0:
            return 0
        oldest_s = self.loop.time() - limit_ms / 1000
        idle = [c for c in self.connections if c.last_active_s < oldest_s and (c.is_idle or c.stuck_since_s)]
        for connection in idle:
            connection.close("idle")
        return len(idle)
