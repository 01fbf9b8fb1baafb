"""Every delivery gets a result, whatever becomes of its producer: collected, closed, crashed, or left at exit."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from semel.client.errors import ClosedError, FatalError, IllegalStateError
from semel.client.producer import Producer
from semel.client.producer.sender import Sender
from semel.local.brokers import SemelBroker
from semel.protocol.messages.records import PRODUCE
from semel.prove.proxy import Effect, Proxy, Rule
from tests.support.reading import create_topic, read_topic
from tests.support.waiting import PATIENCE_S, until

_numbers = count(1)


@pytest.fixture
def topic(shared_semel_broker: SemelBroker) -> str:
    return create_topic(shared_semel_broker.bootstrap, f"lifetime-{next(_numbers)}")


def sender_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "semel-producer"]


@pytest.mark.parametrize("linger_ms", [0, 3_600_000])
def test_a_record_of_a_producer_without_a_variable_is_stored(
    shared_semel_broker: SemelBroker, topic: str, linger_ms: int
) -> None:
    before = set(sender_threads())
    options = {"bootstrap.servers": shared_semel_broker.bootstrap, "linger.ms": linger_ms, "delivery.timeout.ms": 2**31}
    stored = (
        Producer(options).send(topic, b"x").result(timeout_ms=PATIENCE_S * 1000)
    )  # not in an assert, which keeps what it looks at
    assert stored.offset == 0
    gc.collect()
    until(lambda: set(sender_threads()) <= before, "the thread of a collected producer is still there")


def test_a_collected_producer_sends_what_is_left_and_calls_back(shared_semel_broker: SemelBroker, topic: str) -> None:
    producer = Producer(bootstrap_servers=shared_semel_broker.bootstrap, linger_ms=3_600_000, delivery_timeout_ms=2**31)
    called = threading.Event()
    deliveries = [producer.send(topic, b"%d" % i) for i in range(100)]
    deliveries[-1].add_done_callback(lambda _: called.set())
    gone = weakref.ref(producer)
    del producer
    gc.collect()
    assert gone() is None
    assert [delivery.result(timeout_ms=PATIENCE_S * 1000).offset for delivery in deliveries] == list(range(100))
    assert called.wait(PATIENCE_S)


def test_records_of_a_collected_producer_fail_when_their_time_is_over(
    shared_semel_broker: SemelBroker, topic: str
) -> None:
    with Proxy(shared_semel_broker.bootstrap) as proxy:
        fault = proxy.add(Rule(PRODUCE, Effect.SILENCE_RESPONSE, times=1000))
        options = {"request_timeout_ms": 1_000, "delivery_timeout_ms": 5_000, "linger_ms": 0}
        error = (
            Producer(bootstrap_servers=proxy.bootstrap, **options)
            .send(topic, b"x")
            .exception(timeout_ms=PATIENCE_S * 1000)
        )
        assert "delivery.timeout.ms" in str(error)
        fault.assert_fired()


def test_a_program_that_ends_without_close_sends_its_last_records(shared_semel_broker: SemelBroker, topic: str) -> None:
    script = f"""
from semel.client import Producer
producer = Producer(bootstrap_servers={shared_semel_broker.bootstrap!r}, linger_ms=60000)
producer.send({topic!r}, b"last")
"""
    subprocess.run([sys.executable, "-c", script], timeout=PATIENCE_S, check=True)
    assert [row.value for row in read_topic(shared_semel_broker.bootstrap, topic)] == [b"last"]


def closed(producer: Producer, monkeypatch: pytest.MonkeyPatch) -> type[Exception]:
    producer.close()
    return ClosedError


def crashed(producer: Producer, monkeypatch: pytest.MonkeyPatch) -> type[Exception]:
    def crash(sender: Sender) -> None:
        raise MemoryError("made up")

    monkeypatch.setattr(Sender, "_prepare", crash)
    producer._sender.interrupt()
    assert producer._thread is not None
    producer._thread.join(PATIENCE_S)
    return FatalError


@pytest.mark.parametrize("end", [closed, crashed])
def test_a_record_that_comes_as_the_producer_ends_is_refused(
    shared_semel_broker: SemelBroker, topic: str, end: Callable[..., type[Exception]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller is held between the producer's checks and the addition of its record."""
    producer = Producer(bootstrap_servers=shared_semel_broker.bootstrap)
    producer.send(topic, b"first").result(timeout_ms=PATIENCE_S * 1000)
    append = Sender.append
    ends: list[type[Exception]] = []

    def late(sender: Sender, *arguments: Any) -> Any:
        ends.append(end(producer, monkeypatch))
        return append(sender, *arguments)

    monkeypatch.setattr(Sender, "append", late)
    with pytest.raises((ClosedError, FatalError)) as raised:
        producer.send(topic, b"late").result(timeout_ms=PATIENCE_S * 1000)
    assert isinstance(raised.value, ends[0])
    producer.close()


def test_a_caller_that_waits_for_memory_learns_that_the_producer_was_closed(
    shared_semel_broker: SemelBroker, topic: str
) -> None:
    with Proxy(shared_semel_broker.bootstrap) as proxy:
        proxy.add(Rule(PRODUCE, Effect.SILENCE_RESPONSE, times=1000))
        producer = Producer(bootstrap_servers=proxy.bootstrap, buffer_memory=1000, linger_ms=0)
        producer.send(topic, b"x" * 800)
        errors: list[Exception] = []

        def send() -> None:
            try:
                producer.send(topic, b"y" * 800).result(timeout_ms=PATIENCE_S * 1000)
            except Exception as error:
                errors.append(error)

        waiting = threading.Thread(target=send)
        waiting.start()
        until(lambda: producer._sender.changed._sleepers)  # type: ignore[attr-defined]
        producer.close(timeout_ms=0)
        waiting.join(PATIENCE_S)
        assert [type(error) for error in errors] == [ClosedError]


def test_a_wake_up_after_the_end_is_written_nowhere(
    shared_semel_broker: SemelBroker, topic: str, tmp_path: Any
) -> None:
    """The number of the closed pipe may belong to a file of the program by then."""
    producer = Producer(bootstrap_servers=shared_semel_broker.bootstrap)
    producer.send(topic, b"x").result(timeout_ms=PATIENCE_S * 1000)
    pipe = producer._sender._waker._write_fd
    producer.close()
    path = tmp_path / "file"
    files = [path.open("ab", buffering=0) for _ in range(20)]
    try:
        assert pipe in [file.fileno() for file in files], "no file got the number of the pipe"
        producer._sender._asleep = True
        producer._sender.wake()
        producer._sender.interrupt()
        assert path.read_bytes() == b""
    finally:
        for file in files:
            file.close()


def test_a_callback_that_would_wait_for_its_own_thread_is_told_so(shared_semel_broker: SemelBroker, topic: str) -> None:
    raised: list[BaseException] = []
    with Producer(bootstrap_servers=shared_semel_broker.bootstrap, linger_ms=0) as producer:
        called = threading.Event()

        def wait_inside(_: Any) -> None:
            behind = producer.send(topic, b"behind")
            for wait in (behind.result, producer.flush):
                try:
                    wait()
                except IllegalStateError as error:
                    raised.append(error)
            called.set()

        producer.send(topic, b"x").add_done_callback(wait_inside)
        assert called.wait(PATIENCE_S)
        producer.flush(timeout_ms=PATIENCE_S * 1000)
    assert ["callback" in str(error) for error in raised] == [True, True]
    assert [row.value for row in read_topic(shared_semel_broker.bootstrap, topic)] == [b"x", b"behind"]


def test_a_callback_may_close_its_producer(shared_semel_broker: SemelBroker, topic: str) -> None:
    """It cannot wait for what is on its way: that fails."""
    before = set(sender_threads())
    producer = Producer(bootstrap_servers=shared_semel_broker.bootstrap, linger_ms=0)
    left: list[Any] = []

    def close(_: Any) -> None:
        left.append(producer.send(topic, b"behind"))
        producer.close()

    producer.send(topic, b"x").add_done_callback(close)
    until(lambda: set(sender_threads()) <= before, "the thread is still there")
    assert isinstance(left[0].exception(timeout_ms=PATIENCE_S * 1000), ClosedError)


def test_a_send_that_another_thread_s_close_overtakes_starts_no_thread() -> None:
    """It would live on: close() has stopped the one that there was, or none."""
    producer = Producer(bootstrap_servers="127.0.0.1:1")
    producer._check_open()  # of a send() in one thread
    producer.close()
    with pytest.raises(ClosedError):
        producer._start()
    assert producer._thread is None
