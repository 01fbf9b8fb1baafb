"""A connection answers in order, works on one request at a time, and finishes what it began when the client leaves."""

from __future__ import annotations

import asyncio
import gc
import struct
import weakref
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from semel.broker.connection import MAX_PENDING, Connection
from semel.broker.dispatch import TABLE, Dispatcher, Served
from semel.broker.receive_buffer import SharedBuffer
from semel.protocol.messages.cluster import METADATA, MetadataRequest, MetadataResponse
from semel.protocol.messages.records import FETCH, PRODUCE, FetchRequest, FetchResponse, ProduceRequest, ProduceResponse
from tests.support.waiting import PATIENCE_S


class Transport:
    """Takes down what is written; stands still when told so."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.is_open = True
        self.is_reading = True

    def write(self, data: bytes) -> None:
        self.written += data

    def writelines(self, parts: list[bytes]) -> None:
        self.written += b"".join(parts)

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def abort(self) -> None:
        self.is_open = False

    close = abort

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 1234) if name != "socket" else None

    def set_write_buffer_limits(self, high: int) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def answered(self) -> list[int]:
        """Correlation ids of the answers, in order."""
        found, at = [], 0
        while at < len(self.written):
            size, correlation_id = struct.unpack_from(">ii", self.written, at)
            found.append(correlation_id)
            at += 4 + size
        return found


class Server:
    """What a connection needs of its server, with handlers of the test."""

    broker = SimpleNamespace(quotas=SimpleNamespace(is_active=False))
    max_request_bytes = 1 << 20
    read_buffer = SharedBuffer()
    is_stopping = False
    bytes_in = bytes_out = 0

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.dispatcher = Dispatcher(lambda name: False)
        self.started: list[int] = []
        for key in (0, 1, 3):
            self.dispatcher.served[key] = Served(TABLE[key])

    def handle(self, key: int, handler: Callable[..., Any]) -> None:
        self.dispatcher.served[key].handler = handler

    def tune(self, sock: Any) -> None: ...

    def admit(self, connection: Connection) -> bool:
        return True

    def forget(self, connection: Connection) -> None: ...

    def on_stuck(self, connection: Connection) -> None: ...

    def on_unstuck(self, connection: Connection) -> None: ...


def connect(server: Server) -> tuple[Connection, Transport]:
    connection, transport = Connection(server), Transport()  # type: ignore[arg-type]
    connection.connection_made(transport)  # type: ignore[arg-type]
    return connection, transport


def receive(connection: Connection, data: bytes, step: int = 1 << 20) -> None:
    while data:
        buffer = connection.get_buffer(-1)
        taken = min(step, len(buffer), len(data))
        buffer[:taken] = data[:taken]
        data = data[taken:]
        connection.buffer_updated(taken)


def request(api: Any, correlation_id: int) -> bytes:
    body, version = {
        PRODUCE: (ProduceRequest(), 9),
        FETCH: (FetchRequest(), 12),
        METADATA: (MetadataRequest(), 12),
    }[api]
    return b"".join(api.frame_request(body, version, correlation_id, "test"))


async def until_idle() -> None:
    """Until all that is ready has run."""
    for _ in range(20):
        await asyncio.sleep(0)


def run(body: Callable[[Server], Awaitable[None]]) -> None:
    async def go() -> None:
        await body(Server())

    asyncio.run(go())


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_frames_are_found_however_they_are_cut(step: int) -> None:
    async def body(server: Server) -> None:
        server.handle(3, lambda *_: MetadataResponse())
        connection, transport = connect(server)
        receive(connection, b"".join(request(METADATA, number) for number in range(50)), step)
        assert transport.answered() == list(range(50))

    run(body)


def test_a_large_frame_is_taken_whole_and_its_memory_given_back() -> None:
    async def body(server: Server) -> None:
        sizes = []

        def handler(_broker: Any, _context: Any, asked: ProduceRequest) -> ProduceResponse:
            sizes.append(len(asked.transactional_id or ""))
            return ProduceResponse()

        server.handle(0, handler)
        connection, transport = connect(server)
        large = ProduceRequest(transactional_id="x" * 900_000)
        data = b"".join(PRODUCE.frame_request(large, 9, 1, "test"))
        receive(connection, data, 5000)
        assert sizes == [900_000]
        assert transport.answered() == [1]
        assert connection._received.capacity_bytes == 0

    run(body)


def test_produce_requests_start_while_earlier_ones_wait_and_are_answered_in_order() -> None:
    async def body(server: Server) -> None:
        waiting: list[asyncio.Future[Any]] = []

        def handler(*_: Any) -> asyncio.Future[Any]:
            waiting.append(server.loop.create_future())
            return waiting[-1]

        server.handle(0, handler)
        connection, transport = connect(server)
        receive(connection, request(PRODUCE, 1) + request(PRODUCE, 2) + request(PRODUCE, 3))
        assert len(waiting) == 3
        waiting[2].set_result(ProduceResponse())
        waiting[1].set_result(ProduceResponse())
        await asyncio.sleep(0)
        assert transport.answered() == []
        waiting[0].set_result(ProduceResponse())
        await asyncio.sleep(0)
        assert transport.answered() == [1, 2, 3]

    run(body)


THROTTLED = SimpleNamespace(quotas=SimpleNamespace(is_active=True, charge=lambda *_: 2**31 - 1))


def test_throttled_connection_whose_requests_wait_is_idle() -> None:
    """It is not read from, so nobody sees that its client has left: the idle time has to end it, as in Kafka."""

    async def body(server: Server) -> None:
        server.broker = THROTTLED
        server.handle(0, lambda *_: ProduceResponse())
        connection, transport = connect(server)
        receive(connection, b"".join(request(PRODUCE, number) for number in range(MAX_PENDING + 1)))
        assert (transport.answered(), transport.is_reading) == ([0], False)
        assert connection.is_idle
        connection.connection_lost(None)

    run(body)


def test_connection_that_is_lost_while_it_is_throttled_is_forgotten_at_once() -> None:
    async def body(server: Server) -> None:
        server.broker = THROTTLED
        waiting = server.loop.create_future()
        responses: list[Any] = [ProduceResponse(), waiting]
        server.handle(0, lambda *_: responses.pop(0))
        connection, transport = connect(server)
        receive(connection, request(PRODUCE, 1))
        assert transport.answered() == [1]
        connection._unmute()
        receive(connection, request(PRODUCE, 2))
        assert not responses
        connection.connection_lost(None)
        waiting.set_result(ProduceResponse())  # it is written all the same
        left = weakref.ref(connection)
        del connection, waiting
        await until_idle()
        gc.collect()
        assert left() is None

    run(body)


def test_any_other_request_waits_for_those_before_it() -> None:
    async def body(server: Server) -> None:
        waiting: list[asyncio.Future[Any]] = []
        asked: list[str] = []

        def produce(*_: Any) -> asyncio.Future[Any]:
            waiting.append(server.loop.create_future())
            asked.append("produce")
            return waiting[-1]

        def metadata(*_: Any) -> MetadataResponse:
            asked.append("metadata")
            return MetadataResponse()

        server.handle(0, produce)
        server.handle(3, metadata)
        connection, transport = connect(server)
        receive(connection, request(PRODUCE, 1) + request(METADATA, 2) + request(PRODUCE, 3))
        assert asked == ["produce"]
        waiting[0].set_result(ProduceResponse())
        await asyncio.sleep(0)
        assert asked == ["produce", "metadata", "produce"]
        assert transport.answered() == [1, 2]

    run(body)


def test_a_coroutine_that_began_goes_on_to_its_end_when_the_client_leaves() -> None:
    async def body(server: Server) -> None:
        go_on, ended = asyncio.Event(), asyncio.Event()

        async def handler(*_: Any) -> MetadataResponse:
            await go_on.wait()
            ended.set()
            return MetadataResponse()

        server.handle(3, handler)
        connection, transport = connect(server)
        receive(connection, request(METADATA, 1))
        await asyncio.sleep(0)
        connection.connection_lost(None)
        go_on.set()
        await asyncio.wait_for(ended.wait(), PATIENCE_S)
        await asyncio.sleep(0)
        assert transport.answered() == []

    run(body)


def test_what_waits_without_acknowledgement_is_written_although_the_client_left() -> None:
    """With acks=0 a client is done once its requests are written, and closes. One that waits for a response sends its
    requests again instead."""

    async def body(server: Server) -> None:
        written: list[int] = []
        turns = [server.loop.create_future() for _ in range(4)]

        async def handler(_: object, __: object, produce: ProduceRequest) -> ProduceResponse | None:
            number = produce.timeout_ms
            await turns[number]
            written.append(number)
            return None if produce.acks == 0 else ProduceResponse()

        server.handle(0, handler)
        connection, _ = connect(server)
        for number, acks in enumerate((0, 0, -1, 0)):
            asked = ProduceRequest(acks=acks, timeout_ms=number)
            receive(connection, b"".join(PRODUCE.frame_request(asked, 9, number, "test")))
        connection.connection_lost(None)
        assert written == []
        for turn in turns:
            turn.set_result(None)
            await until_idle()
        assert written == [0, 1, 3]

    run(body)


def test_a_waiting_fetch_is_given_up_when_the_client_leaves() -> None:
    async def body(server: Server) -> None:
        waiting: asyncio.Future[FetchResponse] = server.loop.create_future()
        server.handle(1, lambda *_: waiting)
        connection, _ = connect(server)
        receive(connection, request(FETCH, 1))
        connection.connection_lost(None)
        assert waiting.cancelled()

    run(body)


def test_a_client_that_does_not_read_is_not_served_until_it_does() -> None:
    async def body(server: Server) -> None:
        server.handle(3, lambda *_: MetadataResponse())
        connection, transport = connect(server)
        connection.pause_writing()
        assert not transport.is_reading
        receive(connection, request(METADATA, 1) + request(METADATA, 2))
        assert transport.answered() == []
        connection.resume_writing()
        assert transport.answered() == [1, 2]
        assert transport.is_reading

    run(body)


def test_a_client_with_too_many_unanswered_requests_is_not_read() -> None:
    async def body(server: Server) -> None:
        waiting: list[asyncio.Future[Any]] = []

        def handler(*_: Any) -> asyncio.Future[Any]:
            waiting.append(server.loop.create_future())
            return waiting[-1]

        server.handle(0, handler)
        connection, transport = connect(server)
        receive(connection, b"".join(request(PRODUCE, number) for number in range(MAX_PENDING)))
        assert not transport.is_reading
        for future in waiting:
            future.set_result(ProduceResponse())
        await asyncio.sleep(0)
        assert transport.is_reading
        assert transport.answered() == list(range(MAX_PENDING))

    run(body)


def test_a_handler_that_fails_closes_only_its_connection() -> None:
    async def body(server: Server) -> None:
        def broken(*_: Any) -> None:
            raise ZeroDivisionError

        async def broken_later(*_: Any) -> None:
            raise ZeroDivisionError

        for handler in (broken, broken_later):
            server.handle(3, handler)
            connection, transport = connect(server)
            receive(connection, request(METADATA, 1))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not transport.is_open
            assert connection._transport is None

    run(body)
