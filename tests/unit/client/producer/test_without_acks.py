"""acks=0: a record is done when it is written to the connection, neither before nor long after."""

from __future__ import annotations

import socket
import threading
from itertools import count
from pathlib import Path

import pyarrow as pa

from semel.client.errors import BufferFullError, RequestTimedOutError
from semel.client.producer import Producer
from semel.local.brokers import SemelBroker
from semel.protocol.messages.cluster import METADATA, MetadataRequest
from semel.protocol.messages.records import PRODUCE
from tests.support.direct import batch_of, produce_request
from tests.support.fake_broker import as_kafka, open_connection, read_exactly, server
from tests.support.reading import create_topic, read_topic
from tests.support.waiting import PATIENCE_S, eventually, until

MORE_THAN_SOCKETS_HOLD = 64 * 1024 * 1024
_numbers = count(1)


def test_a_request_without_an_answer_is_done_when_its_last_byte_is_written() -> None:
    reads = threading.Event()

    def behave(sock: socket.socket) -> None:
        reads.wait(PATIENCE_S)
        read_exactly(sock, int.from_bytes(read_exactly(sock, 4), "big"))

    with server(as_kafka(behave)) as address:
        connection = open_connection(address)
        request = produce_request("orders", bytes(MORE_THAN_SOCKETS_HOLD))
        request.acks = 0
        pending = connection.send(PRODUCE, request, version=9, timeout_s=PATIENCE_S, response=False)
        connection.progress()
        assert (pending.done, connection.in_flight) == (False, 1)
        reads.set()
        connection.wait(pending)
        assert (pending.result(), connection.in_flight) == (None, 0)
        connection.close()


def test_a_request_without_an_answer_that_cannot_be_written_fails_in_time() -> None:
    with server(as_kafka(lambda sock: threading.Event().wait(PATIENCE_S) and None)) as address:
        connection = open_connection(address)
        request = produce_request("orders", bytes(MORE_THAN_SOCKETS_HOLD))
        pending = connection.send(PRODUCE, request, version=9, timeout_s=0.2, response=False)
        connection.wait(pending)
        assert isinstance(pending.error, RequestTimedOutError)
        assert connection.closed


def test_small_requests_are_told_apart_in_one_write() -> None:
    """Two without a response beside one with a response: each is done for its own reason."""

    def behave(sock: socket.socket) -> None:
        while sock.recv(65536):
            pass

    with server(as_kafka(behave)) as address:
        connection = open_connection(address)
        request = produce_request("orders", batch_of([b"x"]))
        first = connection.send(PRODUCE, request, version=9, response=False)
        asked = connection.send(METADATA, MetadataRequest())
        second = connection.send(PRODUCE, request, version=9, response=False)
        assert connection.take_unreported() == [first, second]
        assert (first.written, second.written, asked.done, connection.in_flight) == (True, True, False, 1)
        connection.close()


def test_many_batches_need_no_event_from_the_broker(shared_semel_broker: SemelBroker) -> None:
    """Without answers nothing else wakes the sender: it must not sleep while there is something to send."""
    topic = create_topic(shared_semel_broker.bootstrap, f"unacked-{next(_numbers)}")
    with Producer(bootstrap_servers=shared_semel_broker.bootstrap, acks=0, batch_size=1000, linger_ms=0) as producer:
        for _ in range(300):
            producer.send(topic, b"x" * 900)
        producer.flush(timeout_ms=PATIENCE_S * 1000)
    eventually(lambda: len(read_topic(shared_semel_broker.bootstrap, topic)), lambda found: found == 300)


def test_memory_is_kept_and_nothing_is_lost_at_close_while_the_broker_does_not_read(tmp_path: Path) -> None:
    with SemelBroker(tmp_path / "broker") as broker:
        topic = create_topic(broker.bootstrap, "unacked")
        options = {"acks": 0, "buffer_memory": 2_000_000, "max_block_ms": 1000, "max_request_size": 1_000_000}
        producer = Producer(bootstrap_servers=broker.bootstrap, **options)
        table = pa.table({"value": [b"x" * 10_000] * 50})
        producer.send_table(topic, table).result(timeout_ms=PATIENCE_S * 1000)
        broker.pause()
        sent = 1 + _fill(producer, topic, table)
        assert producer._sender.used_bytes <= 2_000_000
        ended = threading.Event()
        threading.Thread(target=lambda: (producer.close(), ended.set())).start()
        until(lambda: producer._closed)
        broker.resume()
        assert ended.wait(PATIENCE_S)
        eventually(lambda: len(read_topic(broker.bootstrap, topic)), lambda found: found >= sent * 50)


def _fill(producer: Producer, topic: str, table: pa.Table) -> int:
    """Writes a table until memory is full; how often it went in whole."""
    for times in range(MORE_THAN_SOCKETS_HOLD // table.nbytes):
        try:
            producer.send_table(topic, table)
        except BufferFullError:
            return times
    raise AssertionError("buffer.memory was never full")
