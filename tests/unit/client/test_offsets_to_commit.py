"""Offsets and partitions that a program gives: numbers of any kind, and nothing that a client could not go on from."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import numpy as np
import pytest

from semel.aio import AsyncProducer
from semel.client.errors import ConfigError, IllegalStateError
from semel.client.producer import Producer
from semel.client.types import OffsetAndMetadata, TopicPartition, checked_offsets, checked_partitions, timestamp_ms
from semel.local.brokers import SemelBroker
from tests.support.reading import create_topic

PLACE = TopicPartition("orders", 3)
NOWHERE = {"bootstrap_servers": "localhost:1", "transactional_id": "billing"}


@pytest.mark.parametrize("at", [7, np.int64(7), (7,), (np.int64(7), "note"), OffsetAndMetadata(7, "note", 2)])
def test_an_offset_is_a_number_alone_or_with_its_metadata(at: Any) -> None:
    ((place, offset),) = checked_offsets({("orders", np.int32(3)): at}).items()
    assert (place, offset.offset) == (PLACE, 7)
    assert type(place.partition) is type(offset.offset) is int
    assert offset.metadata == ("" if at in (7, (7,)) else "note")


@pytest.mark.parametrize("at", [-1, "7", 7.0, None, 2**63, OffsetAndMetadata(-1)])
def test_what_is_no_offset_fails_no_transaction(at: Any) -> None:
    """An offset of -1 would be stored, and read as none: the group would begin where auto.offset.reset says."""
    producer = Producer(NOWHERE)
    with pytest.raises(ConfigError, match="a committed offset is that of the next record to read"):
        producer.send_offsets_to_transaction({PLACE: at}, "billing")
    producer.close()

    async def send() -> None:
        async with AsyncProducer(NOWHERE) as producer:
            await producer.send_offsets_to_transaction({PLACE: at}, "billing")

    with pytest.raises(ConfigError, match="a committed offset is that of the next record to read"):
        asyncio.run(send())


@pytest.mark.parametrize(
    ("at", "message"),
    [
        ((7, b"note"), "the metadata of a committed offset is text"),
        ((7, "note", "2"), "leader epoch"),
        ((7, "note", 2**31), "leader epoch"),
        ((7, "note", None), "leader epoch"),
    ],
)
def test_metadata_that_no_request_can_hold_is_named(at: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked_offsets({PLACE: at})
    assert checked_offsets({PLACE: (7, None)})[PLACE].offset == 7


def test_numbers_of_columns_name_partitions_and_times() -> None:
    assert checked_partitions([("orders", np.int32(3))]) == [PLACE]
    assert timestamp_ms(np.int64(5)) == 5
    for partition in (-1, "3", 3.0, None):
        with pytest.raises(IllegalStateError, match="partition number from 0 up"):
            checked_partitions([("orders", partition)])  # type: ignore[list-item]


def test_what_is_no_partition_fails_no_producer(shared_semel_broker: SemelBroker) -> None:
    """A float, as a column with gaps has it, reached the sending thread and ended it."""
    topic = create_topic(shared_semel_broker.bootstrap, "odd-partitions", 2)
    with Producer(bootstrap_servers=shared_semel_broker.bootstrap) as producer:
        for partition in (2, -1, 1.0, 0.5, float("nan"), "1", [1]):
            with pytest.raises(ConfigError, match=re.escape(f"has no partition {partition!r}; it has 0 to 1")):
                producer.send(topic, b"x", partition=partition)  # type: ignore[arg-type]
        place = producer.send(topic, b"x", partition=np.int64(1)).result()
        assert (place.partition, type(place.partition)) == (1, int)
