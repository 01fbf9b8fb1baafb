"""A thread reads large answers: what it brings is what was sent, and nothing that happens meanwhile makes it hang."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from semel.client.connection import LARGE_RESPONSE_BYTES, BrokerConnection
from semel.client.errors import ConnectionFailedError, RequestTimedOutError
from semel.client.wire import Pending
from semel.protocol.messages.cluster import (
    METADATA,
    MetadataRequest,
    MetadataRequestTopic,
    MetadataResponse,
    MetadataResponseBroker,
)
from tests.support.fake_broker import as_kafka, open_connection, read_request, server
from tests.support.waiting import PATIENCE_S, STALL_S, until

HOST_BYTES = 30_000
LARGE, SMALL = LARGE_RESPONSE_BYTES // HOST_BYTES + 1, 1  # brokers in a response
Then = Callable[[socket.socket, bytes], None]


def answer(sock: socket.socket, broker_count: int) -> bytes:
    """The answer to the next request, with that many brokers; the first has the request's number as its port."""
    _, version, correlation_id = read_request(sock)
    brokers = [MetadataResponseBroker(n, f"{n}" * HOST_BYTES, correlation_id) for n in range(broker_count)]
    return b"".join(METADATA.frame_response(MetadataResponse(brokers=brokers), version, correlation_id))


@contextmanager
def reading_ahead(then: Then, **options: float) -> Iterator[tuple[BrokerConnection, Pending]]:
    """A connection whose thread has begun to read the second large answer; the server goes on as `then` says."""

    def behave(sock: socket.socket) -> None:
        sock.sendall(answer(sock, LARGE))
        then(sock, answer(sock, LARGE))

    with server(as_kafka(behave)) as address:
        connection = open_connection(address)
        connection.call(METADATA, MetadataRequest())
        pending = connection.send(METADATA, MetadataRequest(), timeout_s=options.get("timeout_s", 30))
        connection.read_ahead()
        assert connection._ahead is not None
        assert connection._ahead.busy
        yield connection, pending
        connection.close()
        until(lambda: not threads(), "the thread outlived its connection")


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "semel-read-ahead"]


def half(hold: threading.Event) -> Then:
    """Sends half of the answer, and holds the rest back until told."""

    def then(sock: socket.socket, data: bytes) -> None:
        sock.sendall(data[: len(data) // 2])
        hold.wait(2 * PATIENCE_S)  # longer than a test waits for a thread to end without the rest of the answer
        sock.sendall(data[len(data) // 2 :])
        sock.recv(1)

    return then


def half_then_cut(sock: socket.socket, data: bytes) -> None:
    sock.sendall(data[: len(data) // 2])


def number_of(pending: Pending) -> int:
    return int(pending.result().brokers[0].port)


@pytest.mark.parametrize("piece_bytes", [1, 3, 70_000, 10_000_000])
def test_an_answer_in_any_pieces_is_the_one_that_was_sent(piece_bytes: int) -> None:
    def then(sock: socket.socket, data: bytes) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, 5 * piece_bytes, piece_bytes):
            sock.sendall(data[at : at + piece_bytes])
            time.sleep(0.001)
        sock.sendall(data[5 * piece_bytes :])
        sock.recv(1)

    with reading_ahead(then) as (connection, pending):
        connection.wait(pending)
        brokers = pending.result().brokers
        assert [broker.host for broker in brokers] == [f"{n}" * HOST_BYTES for n in range(LARGE)]
        assert number_of(pending) == pending.correlation_id


def test_small_answers_are_read_without_the_thread() -> None:
    def behave(sock: socket.socket) -> None:
        for size in (SMALL, SMALL, LARGE, SMALL, SMALL):
            sock.sendall(answer(sock, size))
        sock.recv(1)

    with server(as_kafka(behave)) as address:
        connection = open_connection(address)
        read_by_thread = []
        for _ in range(5):
            pending = connection.send(METADATA, MetadataRequest())
            connection.read_ahead()
            read_by_thread.append(connection._ahead is not None and connection._ahead.busy)
            connection.wait(pending)
            assert number_of(pending) == pending.correlation_id
        assert read_by_thread == [False, False, False, True, False], "only after a large one"
        connection.close()
        until(lambda: not threads(), "the thread outlived its connection")


def test_requests_behind_the_one_that_is_read_get_their_answers_in_order() -> None:
    def then(sock: socket.socket, data: bytes) -> None:
        sock.sendall(data + answer(sock, SMALL) + answer(sock, LARGE) + answer(sock, SMALL))
        sock.recv(1)

    with reading_ahead(then) as (connection, first):
        others = [connection.send(METADATA, MetadataRequest()) for _ in range(3)]
        connection.wait(others[-1])
        assert [number_of(each) for each in (first, *others)] == [each.correlation_id for each in (first, *others)]


def test_a_request_too_large_for_the_socket_leaves_while_the_thread_reads() -> None:
    go_on = threading.Event()

    def then(sock: socket.socket, data: bytes) -> None:
        sock.sendall(data[: len(data) // 2])
        go_on.wait(PATIENCE_S)
        second = answer(sock, SMALL)  # reads all of the large request; only then the rest of the first answer leaves
        sock.sendall(data[len(data) // 2 :] + second)
        sock.recv(1)

    topics = [MetadataRequestTopic(name="x" * 30_000) for _ in range(600)]
    with reading_ahead(then) as (connection, _):
        late = connection.send(METADATA, MetadataRequest(topics=topics), timeout_s=2 * STALL_S)
        assert connection.wants_write, "the request must not fit into the socket's buffers"
        go_on.set()
        started_s = time.monotonic()
        connection.wait(late)
        assert time.monotonic() - started_s < STALL_S, "it waited until the timeout for a chance to write"
        assert number_of(late) == late.correlation_id


def test_a_cut_in_the_middle_of_an_answer_fails_it_and_the_connection() -> None:
    with reading_ahead(half_then_cut) as (connection, pending):
        connection.wait(pending)
        assert connection._frames.is_inside_large, "the cut was to come in the middle"
        with pytest.raises(ConnectionFailedError, match="closed the connection") as failed:
            pending.result()
        assert failed.value.maybe_sent
        assert connection.closed


def test_a_response_that_stops_in_the_middle_is_given_up_at_its_timeout() -> None:
    hold = threading.Event()
    started_s = time.monotonic()
    with reading_ahead(half(hold), timeout_s=0.3) as (connection, pending):
        connection.wait(pending)
        assert 0.3 <= time.monotonic() - started_s < STALL_S
        with pytest.raises(RequestTimedOutError, match="did not respond to Metadata"):
            pending.result()
        assert connection._frames.is_inside_large, "the answer was to stop in the middle"
        assert connection.closed
        until(lambda: not threads(), "the thread was not freed")
        hold.set()


def test_close_in_the_middle_of_an_answer_waits_for_nobody() -> None:
    hold = threading.Event()
    with reading_ahead(half(hold)) as (connection, pending):
        until(lambda: connection._frames.is_inside_large, "half of the answer did not come")
        started_s = time.monotonic()
        connection.close()
        assert time.monotonic() - started_s < STALL_S
        until(lambda: not threads(), "the thread was not freed")
        with pytest.raises(ConnectionFailedError, match="was closed"):
            pending.result()
        hold.set()


def test_a_connection_that_is_dropped_without_close_takes_its_thread_along() -> None:
    hold = threading.Event()

    def behave(sock: socket.socket) -> None:
        sock.sendall(answer(sock, LARGE))
        half(hold)(sock, answer(sock, LARGE))

    def drop_while_it_reads(address: str) -> None:
        connection = open_connection(address)
        connection.call(METADATA, MetadataRequest())
        connection.send(METADATA, MetadataRequest())
        connection.read_ahead()
        until(lambda: connection._frames.is_inside_large, "half of the answer did not come")
        assert threads()

    with server(as_kafka(behave)) as address, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # as for any socket that nobody closed
        drop_while_it_reads(address)
        gc.collect()
        until(lambda: not threads(), "the thread outlived its connection")
        hold.set()


def test_a_forked_child_that_drops_the_connection_does_not_cut_it() -> None:
    hold = threading.Event()
    with reading_ahead(half(hold)) as (connection, pending):
        until(lambda: connection._frames.is_inside_large, "half of the answer did not come")
        child = os.fork()
        if not child:
            assert connection._end_ahead is not None
            connection._end_ahead()
            os._exit(0 if not connection._end_ahead.alive else 1)
        assert os.waitpid(child, 0)[1] == 0, "the child has let go of the connection"
        hold.set()
        connection.wait(pending)
        assert number_of(pending) == pending.correlation_id


def test_without_a_thread_to_be_had_the_answer_is_read_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def behave(sock: socket.socket) -> None:
        for _ in range(2):
            sock.sendall(answer(sock, LARGE))
        sock.recv(1)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with server(as_kafka(behave)) as address:
        connection = open_connection(address)
        connection.call(METADATA, MetadataRequest())
        before = set(os.listdir("/dev/fd"))
        monkeypatch.setattr(threading.Thread, "start", refuse)
        pending = connection.send(METADATA, MetadataRequest())
        connection.read_ahead()
        assert connection._ahead is None
        assert set(os.listdir("/dev/fd")) == before, "no descriptor stays open"
        connection.wait(pending)
        assert number_of(pending) == pending.correlation_id
        connection.close()
