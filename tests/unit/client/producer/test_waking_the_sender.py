"""The thread that sends is woken for everything that is added, also where Ctrl-C comes while it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from semel.client import Producer
from semel.local.brokers import SemelBroker
from tests.support.reading import create_topic
from tests.support.waiting import PATIENCE_S, until

PATIENCE_MS = PATIENCE_S * 1000


@pytest.fixture(scope="module")
def broker() -> Iterator[SemelBroker]:
    with SemelBroker() as broker:
        yield broker


@pytest.fixture
def topic(broker: SemelBroker, request: pytest.FixtureRequest) -> str:
    return create_topic(broker.bootstrap, f"waking-{abs(hash(request.node.name))}")


@pytest.fixture
def asleep(broker: SemelBroker, topic: str) -> Iterator[Producer]:
    """A producer whose thread has nothing to do for a while."""
    with Producer(bootstrap_servers=broker.bootstrap, linger_ms=0) as producer:
        producer.send(topic, b"1").result(timeout_ms=PATIENCE_MS)
        until(lambda: producer._sender._asleep)
        yield producer


def interrupted_once(owner: Any, name: str) -> None:
    """Ctrl-C comes as the method begins."""
    method = getattr(owner, name)

    def interrupt() -> None:
        setattr(owner, name, method)
        raise KeyboardInterrupt

    setattr(owner, name, interrupt)


def test_ctrl_c_while_the_sender_is_woken_does_not_let_it_sleep_for_good(asleep: Producer, topic: str) -> None:
    """Nobody woke it any more: flush, commit and abort waited for their whole timeout, and records expired."""
    interrupted_once(asleep._sender._waker, "wake")
    with pytest.raises(KeyboardInterrupt):
        asleep._sender.wake()
    assert asleep.send(topic, b"2").result(timeout_ms=PATIENCE_MS).offset == 1


def send(producer: Producer, topic: str) -> None:
    producer.send(topic, b"2")


def send_small_table(producer: Producer, topic: str) -> None:
    producer.send_table(topic, pa.table({"value": [b"2"]}))


def send_large_table(producer: Producer, topic: str) -> None:
    producer.send_table(topic, pa.table({"value": [b"2" * 900_000]}))


@pytest.mark.parametrize("add", [send, send_small_table, send_large_table])
def test_what_was_added_when_ctrl_c_came_is_sent(
    asleep: Producer, topic: str, add: Callable[[Producer, str], None]
) -> None:
    """It stayed in its batch, and so did the records that joined it."""
    interrupted_once(asleep._sender, "wake")
    with pytest.raises(KeyboardInterrupt):
        add(asleep, topic)
    until(lambda: asleep.metrics().record_send_total == 2)


def test_ctrl_c_in_a_flush_does_not_end_lingering(asleep: Producer) -> None:
    interrupted_once(asleep._sender, "wake")
    with pytest.raises(KeyboardInterrupt):
        asleep.flush()
    assert not asleep._sender._accumulator.flushing
