"""Ctrl-C while a group's offsets are sent to a transaction: its end does not wait for them for good."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from semel.client import Producer
from semel.client.types import GroupMetadata
from semel.local.brokers import SemelBroker
from tests.support.reading import create_topic
from tests.support.waiting import PATIENCE_S

PATIENCE_MS = PATIENCE_S * 1000


@pytest.fixture(scope="module")
def broker() -> Iterator[SemelBroker]:
    with SemelBroker() as broker:
        yield broker


def interrupted_in_send_offsets(producer: Producer, topic: str, at: int) -> bool:
    """Ctrl-C comes where the n-th call that `send_offsets` itself makes ends, or within one that it makes of this
    package; whether it did."""
    left = at

    def look(frame: FrameType, event: str, _: Any) -> None:
        nonlocal left
        caller = frame if event == "c_return" else frame.f_back
        if event not in ("call", "c_return") or caller is None:
            return
        if caller.f_code.co_name in ("send_offsets", "_offsets_ended"):
            left -= 1
            if left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        producer.send_offsets_to_transaction({(topic, 0): 1}, GroupMetadata("interrupted"), timeout_ms=PATIENCE_MS)
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def test_a_transaction_ends_after_ctrl_c_in_send_offsets(broker: SemelBroker) -> None:
    """It waited for a request that was never sent."""
    topic = create_topic(broker.bootstrap, "interrupted-offsets")
    with Producer(bootstrap_servers=broker.bootstrap, transactional_id="interrupted") as producer:
        producer.init_transactions(timeout_ms=PATIENCE_MS)
        at = 1
        while True:
            producer.begin_transaction()
            producer.send(topic, b"1")
            was_interrupted = interrupted_in_send_offsets(producer, topic, at)
            producer.abort_transaction(timeout_ms=PATIENCE_MS)
            if not was_interrupted:
                break
            at += 1
        assert at > 1
