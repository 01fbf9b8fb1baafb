"""Transactions by confluent-kafka, and what such a client says when it is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from confluent_kafka import KafkaException, Producer

# What librdkafka calls it when somebody newer owns the id: its own code, the broker's new one, the broker's old one.
FENCED = frozenset({-144, 90, 47})


def transactional(bootstrap: str, id_: str, **settings: Any) -> Any:
    """A producer that owns a transactional id and comes back quickly after the broker did."""
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "transactional.id": id_,
            "reconnect.backoff.ms": 10,
            "reconnect.backoff.max.ms": 100,
            "retry.backoff.ms": 20,
            "retry.backoff.max.ms": 100,
            "linger.ms": 0,
            "log_level": 0,
            **settings,
        }
    )
    persist(lambda: producer.init_transactions(30))
    return producer


def persist(step: Callable[[], Any]) -> None:
    """Repeats a step of a transaction as its error says: after a lost response the request is repeated."""
    for _ in range(20):
        try:
            step()
            return
        except KafkaException as error:
            if not error.args[0].retriable():
                raise
    raise AssertionError("the step was retried 20 times and its answer was still lost")


def write(producer: Any, values: Iterable[bytes], *topics: str, partition: int = 0) -> None:
    """The same values to every topic, acknowledged."""
    for value in values:
        for topic in topics:
            producer.produce(topic, value, partition=partition)
    assert producer.flush(30) == 0


def code_of(step: Callable[[], Any]) -> int:
    """The code of the error that a step ends with; 0 if it does not."""
    try:
        step()
    except KafkaException as error:
        return int(error.args[0].code())
    return 0
