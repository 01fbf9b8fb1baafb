"""Records as semel's own consumer returns them."""

from __future__ import annotations

from typing import Any

from semel.client.consumer import Consumer
from tests.support.broker import Cluster
from tests.support.waiting import PATIENCE_S


def reader(cluster: Cluster, topic: str, *partitions: int, **options: Any) -> Consumer:
    """Reads the given partitions, or the first one, from their start."""
    consumer = Consumer(bootstrap_servers=cluster.bootstrap, **{"auto_offset_reset": "earliest", **options})
    consumer.assign([(topic, number) for number in partitions or (0,)])
    return consumer


def read(consumer: Consumer, count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        batch = consumer.poll(PATIENCE_S * 1000)
        assert batch, f"{len(found)} of {count}"
        found += batch
    return found
