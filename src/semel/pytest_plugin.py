"""Fixtures for pytest, there as soon as semel is installed.

def test_orders(semel_broker):
    producer = confluent_kafka.Producer({"bootstrap.servers": semel_broker.bootstrap})
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from semel.local.brokers import Broker


@pytest.fixture
def semel_broker() -> Iterator[Broker]:
    """A fresh, empty broker for one test. It may be killed and restarted at will."""
    from semel.local.brokers import Broker

    with Broker() as broker:
        yield broker


@pytest.fixture(scope="session")
def semel_session_broker() -> Iterator[Broker]:
    """One broker for all tests of the session; use your own topics, and leave it alive."""
    from semel.local.brokers import Broker

    with Broker() as broker:
        yield broker
