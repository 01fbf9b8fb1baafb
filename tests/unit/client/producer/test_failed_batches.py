"""No transaction commits without one of its batches, however the batch fails and whoever looks at that moment."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from semel.client.errors import AbortableError, KafkaError
from semel.client.producer import Producer
from semel.client.producer.batches import Identity, ProducerBatch
from semel.client.producer.core import ProducerCore
from semel.client.producer.identities import FixedIdentity
from semel.client.producer.sender import Sender
from semel.client.producer.transaction_states import ProducerTxnState
from semel.client.settings import ProducerSettings
from semel.local.brokers import SemelBroker
from semel.protocol.errors import EncodeError
from semel.protocol.messages.records import PRODUCE
from semel.protocol.messages.transactions import END_TXN
from semel.prove.proxy import Effect, Proxy, Rule
from tests.support.reading import create_topic, read_topic
from tests.support.waiting import PATIENCE_S, until

MAX_MESSAGE_BYTES = 2000
TOO_LARGE = b"x" * (2 * MAX_MESSAGE_BYTES)


@pytest.fixture
def narrow(shared_semel_broker: SemelBroker, request: pytest.FixtureRequest) -> str:
    """A topic that refuses large records."""
    name = re.sub(r"\W", "-", request.node.name)
    return create_topic(shared_semel_broker.bootstrap, name, partitions=2, max_message_bytes=str(MAX_MESSAGE_BYTES))


@contextmanager
def transactional(bootstrap: str, name: str, **options: Any) -> Iterator[Producer]:
    defaults = {"bootstrap_servers": bootstrap, "transactional_id": name, "linger_ms": 0, "retry_backoff_ms": 10}
    producer = Producer({**defaults, **options})
    try:
        producer.init_transactions(timeout_ms=PATIENCE_S * 1000)
        yield producer
    finally:
        producer.close(timeout_ms=5000)


@contextmanager
def quick_switching() -> Iterator[None]:
    """Threads take turns as often as the interpreter can."""
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(usual_s)


def seen_at_failure(producer: Producer, monkeypatch: pytest.MonkeyPatch, hold: Callable[[], Any]) -> list[bool]:
    """For each call of `failed`: whether any batch of the producer was done before. `hold` runs at that point."""
    transaction, sender = producer._transactional().transaction, producer._sender
    failed, seen = transaction.failed, []
    batches = list(sender.core.accumulator.batches())

    def failing(error: KafkaError) -> None:
        hold()
        assert sender.lock._is_owned(), "a commit can look at the batches right now"
        seen.append(any(batch.done and batch.error for batch in batches))
        failed(error)

    monkeypatch.setattr(transaction, "failed", failing)
    return seen


def test_a_commit_that_waits_for_a_refused_batch_never_sends_its_end(
    shared_semel_broker: SemelBroker, narrow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender is held at the exact point where it has the broker's refusal and tells the transaction."""
    with Proxy(shared_semel_broker.bootstrap) as proxy, transactional(proxy.bootstrap, narrow) as producer:
        end = proxy.add(Rule(END_TXN, Effect.DELAY_RESPONSE, delay_ms=0))
        seen = seen_at_failure(producer, monkeypatch, lambda: end.fired.wait(1.0))
        producer.begin_transaction()
        kept = producer.send(narrow, b"kept", partition=0)
        producer.send(narrow, TOO_LARGE, partition=1)
        with pytest.raises(AbortableError, match="MESSAGE_TOO_LARGE"):
            producer.commit_transaction(timeout_ms=PATIENCE_S * 1000)
        assert seen == [False]
        assert kept.exception(timeout_ms=PATIENCE_S * 1000) is None
        assert END_TXN.key not in proxy.seen
        producer.abort_transaction(timeout_ms=PATIENCE_S * 1000)


def test_no_transaction_commits_without_its_refused_record_however_threads_take_turns(
    shared_semel_broker: SemelBroker, narrow: str
) -> None:
    with transactional(shared_semel_broker.bootstrap, narrow) as producer, quick_switching():
        for number in range(60):
            producer.begin_transaction()
            producer.send(narrow, b"%d" % number, partition=0)
            producer.send(narrow, TOO_LARGE, partition=1)
            with pytest.raises(AbortableError):
                producer.commit_transaction(timeout_ms=PATIENCE_S * 1000)
            producer.abort_transaction(timeout_ms=PATIENCE_S * 1000)
    assert read_topic(shared_semel_broker.bootstrap, narrow) == []


# --- every other way in which a batch fails ---


def expires(producer: Producer, proxy: Proxy, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = proxy.add(Rule(PRODUCE, Effect.SILENCE_RESPONSE, times=1000))
    producer.send(topic, b"late")
    assert fault.fired.wait(PATIENCE_S)


def cannot_be_encoded(producer: Producer, proxy: Proxy, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(batch: ProducerBatch, compression: int) -> None:
        raise EncodeError("made up")

    monkeypatch.setattr(ProducerBatch, "encode", encode)
    producer.send(topic, b"strange")


def sender_crashes(producer: Producer, proxy: Proxy, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(sender: Sender) -> int:
        raise MemoryError("made up")

    monkeypatch.setattr(Sender, "_prepare", crash)
    with suppress(KafkaError):
        producer.send(topic, b"never sent")


def is_closed(producer: Producer, proxy: Proxy, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread, while this one commits."""
    proxy.add(Rule(PRODUCE, Effect.SILENCE_RESPONSE, times=1000))
    producer.send(topic, b"on its way")
    calls = producer._transactional()

    def close() -> None:
        until(lambda: calls.state is ProducerTxnState.COMMITTING)
        producer.close(timeout_ms=0)

    threading.Thread(target=close).start()


WAYS = [expires, cannot_be_encoded, sender_crashes, is_closed]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_batch_that_fails_fails_its_transaction_in_the_same_step(
    way: Any, shared_semel_broker: SemelBroker, narrow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"delivery_timeout_ms": 5_000, "request_timeout_ms": 1_000} if way is expires else {}
    with (
        Proxy(shared_semel_broker.bootstrap) as proxy,
        transactional(proxy.bootstrap, narrow, **options) as producer,
    ):
        producer.begin_transaction()
        producer.send(narrow, b"kept", partition=0).result(timeout_ms=PATIENCE_S * 1000)
        seen = seen_at_failure(producer, monkeypatch, lambda: None)
        way(producer, proxy, narrow, monkeypatch)
        with pytest.raises(AbortableError):
            producer.commit_transaction(timeout_ms=PATIENCE_S * 1000)
        assert seen
        assert not any(seen)
        assert END_TXN.key not in proxy.seen


def test_records_of_the_next_transaction_do_not_fail_for_the_end_of_the_last_one(
    shared_semel_broker: SemelBroker, narrow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender is held where it looks whether a transaction is lost, while none is open."""
    with transactional(shared_semel_broker.bootstrap, narrow) as producer:
        with producer.transaction() as txn:
            txn.send(narrow, b"first")
        transaction, sent, held = producer._transactional().transaction, threading.Event(), threading.Event()
        lost = transaction.lost

        def slow() -> KafkaError | None:
            found = lost()
            if transaction.state is ProducerTxnState.READY and not held.is_set():
                held.set()
                sent.wait(1.0)
            return found

        monkeypatch.setattr(transaction, "lost", slow)
        until(lambda: (producer._sender.interrupt(), held.is_set())[1])
        producer.begin_transaction()
        delivery = producer.send(narrow, b"second")
        sent.set()
        producer.commit_transaction(timeout_ms=PATIENCE_S * 1000)
        assert delivery.result(timeout_ms=PATIENCE_S * 1000).offset >= 0


def test_nothing_is_taken_for_sending_once_the_transaction_ends() -> None:
    """The driver has looked which partitions are ready; then the transaction ends."""
    identity = FixedIdentity("owner", Identity(7, 1), (3, 12))
    core = ProducerCore(ProducerSettings.of(bootstrap_servers="nowhere:1"), identity, lambda: 0.5)
    batch = core.accumulator.append_new("orders", 0, (None, b"value", 0, ()), 40, 0.0)
    core.accumulator.close_all()
    batch.encode(0)
    queues = core.ready(0.0)
    identity._identity = None  # type: ignore[assignment]
    assert core.take(queues, 0.0) is None
    identity._identity = Identity(7, 1)
    produce = core.take(queues, 0.0)
    assert produce is not None
    assert produce.sendings == [(queues[0], batch)]


def test_no_transaction_commits_without_the_offsets_that_another_thread_adds(
    shared_semel_broker: SemelBroker, narrow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other thread is held where the coordinator has refused the offsets and the transaction does not know yet."""
    with Proxy(shared_semel_broker.bootstrap) as proxy, transactional(proxy.bootstrap, narrow) as producer:
        coordinator, refused = producer._transactional().coordinator, threading.Event()
        end = proxy.add(Rule(END_TXN, Effect.DELAY_RESPONSE, delay_ms=0))

        async def commit_offsets(*_: Any) -> None:
            refused.set()
            end.fired.wait(1.0)
            raise AbortableError("made up: the group was rebalanced")

        def add_offsets() -> None:
            with suppress(AbortableError):
                producer.send_offsets_to_transaction({(narrow, 0): 1}, "group", timeout_ms=PATIENCE_S * 1000)

        monkeypatch.setattr(coordinator, "commit_offsets", commit_offsets)
        producer.begin_transaction()
        producer.send(narrow, b"x").result(timeout_ms=PATIENCE_S * 1000)
        other = threading.Thread(target=add_offsets)
        other.start()
        assert refused.wait(PATIENCE_S)
        with pytest.raises(AbortableError, match="made up"):
            producer.commit_transaction(timeout_ms=PATIENCE_S * 1000)
        assert END_TXN.key not in proxy.seen
        other.join()
        producer.abort_transaction(timeout_ms=PATIENCE_S * 1000)
