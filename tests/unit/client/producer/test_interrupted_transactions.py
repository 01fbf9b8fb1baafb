"""A call of a transaction that times out or is interrupted (Ctrl-C) leaves a state from which the producer goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest

from semel.client.errors import CommitUncertainError, IllegalStateError, TimedOutError
from semel.client.immediate import run
from semel.client.producer import Producer
from semel.client.producer.transaction_states import ProducerTxnState
from semel.local.brokers import SemelBroker
from semel.protocol.messages.records import PRODUCE
from semel.protocol.messages.transactions import END_TXN
from semel.prove.proxy import Effect, Proxy, Rule
from tests.support.reading import create_topic, read_topic
from tests.support.waiting import PATIENCE_S, eventually

_numbers = count(1)
Make = Callable[..., Producer]


@pytest.fixture
def topic(shared_semel_broker: SemelBroker) -> str:
    return create_topic(shared_semel_broker.bootstrap, f"interrupted-{next(_numbers)}")


@pytest.fixture
def make(shared_semel_broker: SemelBroker, topic: str) -> Iterator[Make]:
    made: list[Producer] = []

    def make(bootstrap: str = shared_semel_broker.bootstrap, **options: Any) -> Producer:
        made.append(Producer(bootstrap_servers=bootstrap, transactional_id=topic, linger_ms=0, **options))
        return made[-1]

    yield make
    for producer in made:
        producer.close(timeout_ms=5000)


def committed(broker: SemelBroker, topic: str, *values: bytes) -> None:
    eventually(lambda: [row.value for row in read_topic(broker.bootstrap, topic)], lambda found: found == [*values])


def interrupt_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after_it: bool = False) -> list[str]:
    """Ctrl-C comes in the middle of a call: before it has done anything, or when its work is done."""
    call, fired = getattr(owner, name), []

    def interrupted(*arguments: Any, **keywords: Any) -> Any:
        if fired:
            return call(*arguments, **keywords)
        fired.append(name)
        if after_it:
            run(call(*arguments, **keywords))
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupted)
    return fired


@pytest.mark.parametrize("after_it", [False, True])
@pytest.mark.parametrize("step", ["generation", "init"])
def test_init_transactions_can_be_called_again_after_an_interrupt(
    shared_semel_broker: SemelBroker,
    topic: str,
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    after_it: bool,
) -> None:
    producer = make()
    fired = interrupt_once(monkeypatch, producer._transactional().coordinator, step, after_it)
    with pytest.raises(KeyboardInterrupt):
        producer.init_transactions(timeout_ms=PATIENCE_S * 1000)
    assert fired
    producer.init_transactions(timeout_ms=PATIENCE_S * 1000)
    with producer.transaction() as txn:
        txn.send(topic, b"x")
    committed(shared_semel_broker, topic, b"x")


def test_the_with_block_does_not_leave_a_transaction_open_whose_commit_was_not_sent_in_time(
    shared_semel_broker: SemelBroker, topic: str, make: Make
) -> None:
    with Proxy(shared_semel_broker.bootstrap) as proxy:
        producer = make(proxy.bootstrap, max_block_ms=4_000, request_timeout_ms=5_000)
        producer.init_transactions(timeout_ms=PATIENCE_S * 1000)
        fault = proxy.add(Rule(PRODUCE, Effect.SILENCE_RESPONSE))
        with pytest.raises(TimedOutError), producer.transaction() as txn:
            txn.send(topic, b"not in time")
        fault.assert_fired()
        assert producer._transactional().state in (ProducerTxnState.READY, ProducerTxnState.ABORTING)

        def again() -> bool:
            try:
                with producer.transaction() as txn:
                    txn.send(topic, b"again")
            except TimedOutError:  # a busy machine
                return False
            return True

        eventually(again, bool)
    committed(shared_semel_broker, topic, b"again")


def test_the_error_of_a_block_is_not_hidden_by_a_producer_that_was_closed_in_it(topic: str, make: Make) -> None:
    producer = make()
    producer.init_transactions(timeout_ms=PATIENCE_S * 1000)

    def run_program() -> None:
        with producer.transaction() as txn:
            txn.send(topic, b"x")
            producer.close()
            raise ValueError("of the program")

    with pytest.raises(ValueError, match="of the program"):
        run_program()


@pytest.mark.parametrize("commit_sent", [False, True])
def test_an_interrupted_commit_is_aborted_unless_it_may_have_happened(
    shared_semel_broker: SemelBroker, topic: str, make: Make, monkeypatch: pytest.MonkeyPatch, commit_sent: bool
) -> None:
    producer = make()
    producer.init_transactions(timeout_ms=PATIENCE_S * 1000)
    calls = producer._transactional()
    owner, step = (calls.coordinator, "end") if commit_sent else (producer._sender, "wait_until")
    fired = interrupt_once(monkeypatch, owner, step, after_it=commit_sent)
    with pytest.raises(KeyboardInterrupt), producer.transaction() as txn:
        txn.send(topic, b"first").result(timeout_ms=PATIENCE_S * 1000)
    assert fired
    if commit_sent:
        assert calls.state is ProducerTxnState.COMMITTING
        producer.commit_transaction(timeout_ms=PATIENCE_S * 1000)  # settles it
    assert calls.state is ProducerTxnState.READY
    with producer.transaction() as txn:
        txn.send(topic, b"second")
    committed(shared_semel_broker, topic, *([b"first"] if commit_sent else []), b"second")


def test_the_with_block_leaves_a_commit_in_doubt_to_be_settled(
    shared_semel_broker: SemelBroker, topic: str, make: Make
) -> None:
    with Proxy(shared_semel_broker.bootstrap) as proxy:
        producer = make(proxy.bootstrap, max_block_ms=1000, request_timeout_ms=500)
        producer.init_transactions(timeout_ms=PATIENCE_S * 1000)
        fault = proxy.add(Rule(END_TXN, Effect.SILENCE_RESPONSE, times=1000))
        with pytest.raises(CommitUncertainError), producer.transaction() as txn:
            txn.send(topic, b"in doubt").result(timeout_ms=PATIENCE_S * 1000)
        fault.assert_fired()
        proxy.clear()
        producer.commit_transaction(timeout_ms=PATIENCE_S * 1000)
    committed(shared_semel_broker, topic, b"in doubt")


def test_a_record_that_waited_in_a_thread_does_not_get_into_the_next_transaction(
    shared_semel_broker: SemelBroker, make: Make, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = make()
    producer.init_transactions()
    looked_up, may_go_on = threading.Event(), threading.Event()
    count_partitions = producer._count_partitions

    def slowly(*arguments: Any) -> int:
        looked_up.set()
        assert may_go_on.wait(PATIENCE_S)
        return count_partitions(*arguments)

    monkeypatch.setattr(producer, "_count_partitions", slowly)
    with ThreadPoolExecutor() as threads:
        with pytest.raises(ZeroDivisionError), producer.transaction() as first:  # noqa: PT012
            late = threads.submit(first.send, topic, b"of the aborted one")
            assert looked_up.wait(PATIENCE_S)
            raise ZeroDivisionError
        with producer.transaction() as second:
            may_go_on.set()
            with pytest.raises(IllegalStateError, match="has ended"):
                late.result(PATIENCE_S)
            with pytest.raises(IllegalStateError, match="has ended"):
                first.send(topic, b"after its block")
            second.send(topic, b"committed")
    committed(shared_semel_broker, topic, b"committed")
