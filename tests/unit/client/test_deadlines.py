"""Every call ends at its timeout, whatever the broker, other requests or other threads do meanwhile.

The timeouts that a call must not wait for (request.timeout.ms and the like) are minutes here."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from semel.client.admin import Admin
from semel.client.consumer import Consumer
from semel.client.consumer.reader import ChunkReader
from semel.client.errors import (
    AbortableError,
    BufferFullError,
    ConnectionFailedError,
    KafkaError,
    RequestTimedOutError,
    TimedOutError,
)
from semel.client.producer import Producer
from semel.client.types import OffsetAndMetadata
from semel.local.brokers import SemelBroker
from semel.protocol.messages.cluster import METADATA, MetadataRequest, MetadataResponse
from tests.support.fake_broker import as_kafka, open_connection, read_request, server
from tests.support.reading import create_topic
from tests.support.waiting import PATIENCE_S, STALL_S, until

NEVER_MS = 600_000
SHORT_S = 0.5
LONG_S = 300.0


def in_time(call: Callable[[], Any]) -> Any:
    """Runs a call that must end soon; its result or the error that it raised."""
    started_s = time.monotonic()
    try:
        return call()
    except KafkaError as error:
        return error
    finally:
        assert time.monotonic() - started_s < STALL_S


# --- one connection ---


def silent_after(answers: int, seen: list[tuple[int, int, int]]) -> Callable[[socket.socket], None]:
    """Answers so many Metadata requests as `seen` says, then reads on in silence."""

    def behave(sock: socket.socket) -> None:
        while True:
            request = read_request(sock)
            seen.append(request)
            if len(seen) <= answers:
                sock.sendall(b"".join(METADATA.frame_response(MetadataResponse(), request[1], request[2])))

    return behave


def test_a_short_request_behind_a_long_one_ends_at_its_own_timeout_without_spinning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with server(as_kafka(silent_after(0, []))) as address:
        connection = open_connection(address)
        long = connection.send(METADATA, MetadataRequest(), timeout_s=LONG_S)
        waits: list[float] = []
        wait_for_io = connection._wait_for_io
        monkeypatch.setattr(
            connection, "_wait_for_io", lambda timeout_s: (waits.append(timeout_s), wait_for_io(timeout_s))
        )
        error = in_time(lambda: connection.call(METADATA, MetadataRequest(), SHORT_S))
        assert isinstance(error, RequestTimedOutError)
        assert error.maybe_sent
        assert "still busy with Metadata" in str(error)
        assert len(waits) < 10, "it must sleep, not look again and again"
        assert (connection.closed, long.done) == (False, False), "the long one may take its time"
        connection.close()


def test_an_answer_that_comes_after_its_timeout_is_dropped_and_the_next_is_matched() -> None:
    go = threading.Event()

    def behave(sock: socket.socket) -> None:
        requests = [read_request(sock) for _ in range(2)]
        go.wait(PATIENCE_S)
        requests.append(read_request(sock))
        for number, (_, version, correlation_id) in enumerate(requests):
            answer = MetadataResponse(controller_id=number)
            sock.sendall(b"".join(METADATA.frame_response(answer, version, correlation_id)))
        sock.recv(1)

    with server(as_kafka(behave)) as address:
        connection = open_connection(address)
        first = connection.send(METADATA, MetadataRequest(), timeout_s=LONG_S)
        late = connection.send(METADATA, MetadataRequest(), timeout_s=0.05)
        connection.wait(late)
        assert isinstance(late.error, RequestTimedOutError)
        go.set()
        third = connection.send(METADATA, MetadataRequest(), timeout_s=LONG_S)
        connection.wait(third)
        assert (first.result().controller_id, third.result().controller_id) == (0, 2)
        assert connection.take_unreported() == [first], "the late one was reported once, to its caller"
        assert connection.in_flight == 0
        connection.close()


def test_a_late_request_at_the_head_closes_the_connection() -> None:
    with server(as_kafka(silent_after(0, []))) as address:
        connection = open_connection(address)
        behind = [connection.send(METADATA, MetadataRequest(), timeout_s=t) for t in (LONG_S, 0.05)]
        connection.wait(behind[1])
        last = connection.send(METADATA, MetadataRequest(), timeout_s=0.05)
        connection.wait(last)
        assert not connection.closed
        behind[0].deadline_s = 0.0
        assert connection.next_deadline_s() == 0.0
        assert connection.check_deadlines() == [behind[0]]
        assert connection.closed


def test_a_call_does_not_wait_longer_for_another_thread_than_its_timeout() -> None:
    with server(as_kafka(silent_after(0, []))) as address:
        connection = open_connection(address)
        errors: list[KafkaError] = []

        def long_call() -> None:
            try:
                connection.call(METADATA, MetadataRequest(), LONG_S)
            except KafkaError as error:
                errors.append(error)

        other = threading.Thread(target=long_call)
        other.start()
        until(lambda: connection.in_flight)
        error = in_time(lambda: connection.call(METADATA, MetadataRequest(), SHORT_S))
        assert isinstance(error, RequestTimedOutError)
        assert not error.maybe_sent
        in_time(connection.close)
        other.join(STALL_S)
        assert not other.is_alive(), "close() ends the call of another thread"
        assert isinstance(errors[0], ConnectionFailedError)
        assert "closed by this client" in str(errors[0])


def test_closing_ends_a_poll_of_another_thread() -> None:
    with server(as_kafka(silent_after(0, []))) as address:
        connection = open_connection(address)
        entered, ended = threading.Event(), threading.Event()

        def wait() -> None:
            poller = select.poll()
            for fd, events in connection.waits_for().items():
                poller.register(fd, events)
            entered.set()
            poller.poll(LONG_S * 1000)
            ended.set()

        threading.Thread(target=wait, daemon=True).start()
        assert entered.wait(PATIENCE_S)
        connection.close()
        assert ended.wait(STALL_S)


# --- a frozen broker ---


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SemelBroker]:
    """A broker that each test freezes once it has what it needs."""
    with SemelBroker(tmp_path_factory.mktemp("frozen") / "broker") as broker:
        create_topic(broker.bootstrap, "known")
        yield broker


PATIENT = {
    "request_timeout_ms": NEVER_MS,
    "default_api_timeout_ms": NEVER_MS,
    "socket_connection_setup_timeout_ms": NEVER_MS,
}
ADMIN_CALLS: dict[str, Callable[[Admin, float], Any]] = {
    "list_topics": lambda admin, ms: admin.list_topics(timeout_ms=ms),
    "describe_topics": lambda admin, ms: admin.describe_topics(["known"], timeout_ms=ms),
    "create_topic": lambda admin, ms: admin.create_topic("new", timeout_ms=ms),
    "delete_topics": lambda admin, ms: admin.delete_topics(["known"], timeout_ms=ms),
    "list_offsets": lambda admin, ms: admin.list_offsets({("known", 0): -1}, timeout_ms=ms),
    "list_groups": lambda admin, ms: admin.list_groups(timeout_ms=ms),
    "describe_cluster": lambda admin, ms: admin.describe_cluster(timeout_ms=ms),
    "list_transactions": lambda admin, ms: admin.list_transactions(timeout_ms=ms),
}


@pytest.mark.parametrize("warm", [True, False], ids=["connected", "not connected"])
def test_admin_calls_end_at_their_timeout(frozen: SemelBroker, warm: bool) -> None:
    admin = Admin(bootstrap_servers=frozen.bootstrap, **PATIENT)
    if warm:
        admin.describe_topics(["known"])
        admin.list_groups()
    frozen.pause()
    try:
        for name, call in ADMIN_CALLS.items():
            error = in_time(lambda call=call: call(admin, SHORT_S * 1000))  # type: ignore[misc]
            assert isinstance(error, TimedOutError), (name, error)
        in_time(admin.close)
    finally:
        frozen.resume()


def test_an_admin_call_in_another_thread_does_not_hold_up_a_short_one(frozen: SemelBroker) -> None:
    admin = Admin(bootstrap_servers=frozen.bootstrap, **PATIENT)
    admin.list_topics()
    frozen.pause()
    try:
        ended = threading.Event()

        def long_call() -> None:
            in_doubt = pytest.raises(KafkaError)
            with in_doubt:
                admin.list_topics(timeout_ms=NEVER_MS)
            ended.set()

        threading.Thread(target=long_call, daemon=True).start()
        until(lambda: any(connection.in_flight for connection in admin._cluster.connections("main")))
        assert isinstance(in_time(lambda: admin.list_topics(timeout_ms=SHORT_S * 1000)), TimedOutError)
        in_time(admin.close)
        assert ended.wait(STALL_S), "close() ends the calls of other threads"
    finally:
        frozen.resume()


def test_producer_calls_end_at_their_timeout(frozen: SemelBroker) -> None:
    producer = Producer(bootstrap_servers=frozen.bootstrap, max_block_ms=500, delivery_timeout_ms=NEVER_MS, **PATIENT)
    producer.send("known", b"x").result(timeout_ms=PATIENCE_S * 1000)
    frozen.pause()
    try:
        delivery = producer.send("known", b"y")
        assert isinstance(in_time(lambda: delivery.result(timeout_ms=SHORT_S * 1000)), TimedOutError)
        assert isinstance(in_time(lambda: producer.flush(timeout_ms=SHORT_S * 1000)), TimedOutError)
        assert isinstance(in_time(lambda: producer.partitions_for("new", timeout_ms=SHORT_S * 1000)), TimedOutError)
        assert isinstance(in_time(lambda: producer.send("new", b"z")), TimedOutError)
        in_time(lambda: producer.close(timeout_ms=SHORT_S * 1000))
        assert delivery.exception(timeout_ms=0) is not None
    finally:
        frozen.resume()


def test_transactional_calls_end_at_their_timeout(frozen: SemelBroker) -> None:
    options = {"max_block_ms": 500, "delivery_timeout_ms": NEVER_MS, "bootstrap_servers": frozen.bootstrap, **PATIENT}
    producer = Producer(options, transactional_id="frozen")
    until(lambda: in_time(lambda: producer.init_transactions(timeout_ms=PATIENCE_S * 1000)) is None)
    producer.begin_transaction()
    producer.send("known", b"x").result(timeout_ms=PATIENCE_S * 1000)
    late = Producer(options, transactional_id="late")
    frozen.pause()
    try:
        assert isinstance(in_time(lambda: late.init_transactions(timeout_ms=SHORT_S * 1000)), TimedOutError)
        in_time(lambda: late.close(timeout_ms=SHORT_S * 1000))
        producer.send("known", b"y")
        assert isinstance(in_time(lambda: producer.commit_transaction(timeout_ms=SHORT_S * 1000)), TimedOutError)
        offsets = {("known", 0): OffsetAndMetadata(1)}
        assert isinstance(
            in_time(lambda: producer.send_offsets_to_transaction(offsets, "g", timeout_ms=SHORT_S * 1000)),
            TimedOutError,
        )
        refused = in_time(lambda: producer.commit_transaction(timeout_ms=SHORT_S * 1000))
        assert isinstance(refused, AbortableError), "the offsets may not be part of the transaction"
        assert isinstance(in_time(lambda: producer.abort_transaction(timeout_ms=SHORT_S * 1000)), TimedOutError)
        in_time(lambda: producer.close(timeout_ms=SHORT_S * 1000))
    finally:
        frozen.resume()


def test_closing_does_not_wait_for_a_connection_that_is_being_opened(frozen: SemelBroker) -> None:
    """The sender's thread waits for the handshake of a frozen broker."""
    producer = Producer(bootstrap_servers=frozen.bootstrap, delivery_timeout_ms=NEVER_MS, **PATIENT)
    producer.partitions_for("known")
    frozen.pause()
    try:
        delivery = producer.send("known", b"x")
        until(lambda: producer._thread is not None and producer._thread.is_alive())
        in_time(lambda: producer.close(timeout_ms=SHORT_S * 1000))
        assert delivery.exception(timeout_ms=0) is not None
    finally:
        frozen.resume()


def test_full_memory_ends_at_max_block_ms(frozen: SemelBroker) -> None:
    options = {"buffer_memory": 1000, "max_block_ms": 500, "delivery_timeout_ms": NEVER_MS}
    producer = Producer(bootstrap_servers=frozen.bootstrap, **options, **PATIENT)
    producer.send("known", b"x").result(timeout_ms=PATIENCE_S * 1000)
    frozen.pause()
    try:
        producer.send("known", b"y" * 800)
        assert isinstance(in_time(lambda: producer.send("known", b"y" * 800)), BufferFullError)
        in_time(lambda: producer.close(timeout_ms=SHORT_S * 1000))
    finally:
        frozen.resume()


# --- a consumer ---


def test_a_poll_ends_although_more_and_more_aborted_records_come(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_visible(self: ChunkReader, *_: object) -> list[Any]:
        return []

    with SemelBroker() as broker:
        topic = create_topic(broker.bootstrap, "all-aborted")
        with Producer(bootstrap_servers=broker.bootstrap) as producer:
            producer.send(topic, b"1")
        with Consumer(bootstrap_servers=broker.bootstrap, auto_offset_reset="earliest") as consumer:
            consumer.assign([(topic, 0)])
            monkeypatch.setattr(ChunkReader, "take", nothing_visible)
            assert in_time(lambda: consumer.poll(SHORT_S * 1000)) == []
            assert consumer._reader.has_records, "there was something at hand all the time"
