"""Every duration that a public call takes is in milliseconds, and its name says so."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import semel
from semel.client.producer.deliveries import Delivery, TableDelivery
from semel.client.producer.producer import ProducerTransaction
from semel.client.settings import ClientSettings, ConsumerSettings, ProducerSettings

RETURNED = (Delivery, TableDelivery, ProducerTransaction)  # by public calls
SETTINGS = (ClientSettings, ConsumerSettings, ProducerSettings)
DURATION = re.compile(
    r"timeout|interval|backoff|linger|wait|delay|period|_age|(^|_)ttl|deadline|seconds|_(s|ms|us|minutes)(_|$)"
)


def public_calls() -> Iterator[tuple[str, Callable[..., Any]]]:
    for owner in [*(getattr(semel, name) for name in semel._LAZY), *RETURNED]:
        if not inspect.isclass(owner):
            yield owner.__name__, owner
            continue
        for name, member in inspect.getmembers(owner, inspect.isroutine):
            if not name.startswith("_") or name == "__init__":
                yield f"{owner.__name__}.{name}", member


def durations() -> Iterator[tuple[str, str]]:
    for call, function in public_calls():
        try:
            parameters = inspect.signature(function).parameters
        except ValueError:  # a method of a built-in type
            continue
        yield from ((call, name) for name in parameters if DURATION.search(name))


def test_every_duration_of_a_public_call_is_named_in_milliseconds() -> None:
    found = list(durations())
    assert len(found) > 50
    assert ("Delivery.result", "timeout_ms") in found
    assert ("Broker.__init__", "start_timeout_ms") in found
    assert [(call, name) for call, name in found if not name.endswith("_ms")] == []


def test_every_duration_among_the_options_is_named_in_milliseconds() -> None:
    named = {name for settings in SETTINGS for name in settings.__dataclass_fields__ if DURATION.search(name)}
    assert len(named) > 15
    assert [name for name in sorted(named) if not name.endswith("_ms")] == []


PRODUCER = semel.Producer(bootstrap_servers="localhost:1")
CONSUMER = semel.Consumer(bootstrap_servers="localhost:1")
IN_SECONDS: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
    (PRODUCER.flush, (5,), {}),
    (PRODUCER.flush, (), {"timeout": 5}),
    (PRODUCER.close, (), {"timeout": 5}),
    (PRODUCER.partitions_for, ("topic", 5), {}),
    (PRODUCER.init_transactions, (5,), {}),
    (PRODUCER.commit_transaction, (5,), {}),
    (PRODUCER.abort_transaction, (5,), {}),
    (PRODUCER.send_offsets_to_transaction, ({}, "group", 5), {}),
    (CONSUMER.poll, (), {"timeout": 5}),
    (CONSUMER.poll_table, (), {"timeout": 5}),
    (CONSUMER.commit, (), {"timeout": 5}),
    (CONSUMER.close, (), {"timeout_s": 5}),
    (Delivery.result, (None, 5), {}),
    (Delivery.get, (None,), {"timeout": 5}),
    (Delivery.exception, (None, 5), {}),
    (TableDelivery.result, (None, 5), {}),
    (TableDelivery.places, (None,), {"timeout": 5}),
    (semel.Broker, (), {"start_timeout_s": 5}),
    (semel.Broker.stop, (None,), {"timeout_s": 5}),
    (semel.Broker.start, (None, 5), {}),
]


@pytest.mark.parametrize(("call", "args", "keywords"), IN_SECONDS)
def test_seconds_are_refused_by_the_name_that_they_have_here(
    call: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    with pytest.raises(TypeError, match=r"milliseconds.*timeout_ms=5000"):
        call(*args, **keywords)


def test_any_other_wrong_keyword_is_pythons_own_error() -> None:
    with pytest.raises(TypeError, match="timeouts"):
        PRODUCER.flush(timeouts=5)  # type: ignore[call-arg]
