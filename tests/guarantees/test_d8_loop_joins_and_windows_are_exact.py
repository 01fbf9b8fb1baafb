"""D8: windows and joins of the processing loop are exact through lost commits and restarts.

Faults: requests and responses of EndTxn are lost and their connections cut; the loop starts again on an empty disk.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import semel
from semel.client.producer import Producer
from tests.support.broker import KAFKA_IN_FULL, Cluster
from tests.support.lossy_loop import BASE_MS, run_with_faults

COUNT = 120
pytestmark = pytest.mark.parametrize("cluster", ["semel", KAFKA_IN_FULL], indirect=True)


def test_windows_are_written_once_and_whole(cluster: Cluster) -> None:
    fed = [0]

    def feed(producer: Producer, topics: list[str]) -> None:
        """Time goes on with the second call; then a record far ahead closes all windows of its partition."""
        for number in range(fed[0], fed[0] + COUNT):
            for partition in (0, 1):
                producer.send(topics[0], b"", key=b"k", partition=partition, timestamp=BASE_MS + 100 * number)
        fed[0] += COUNT
        if fed[0] == 2 * COUNT:
            for partition in (0, 1):
                producer.send(topics[0], b"", key=b"end", partition=partition, timestamp=BASE_MS + 10_000_000)

    count = semel.windowed(size_ms=1_000, grace_ms=500, add=lambda so_far, _: (so_far or 0) + 1)
    rows = run_with_faults(cluster, count, feed)
    counts = Counter((row.partition, dict(row.headers)["window.start"], row.value) for row in rows)
    assert set(counts.values()) == {2}, "the windows of both partitions, which go to one by their key"
    assert {int(value or 0) for _, _, value in counts} == {10}
    assert len(counts) == 2 * COUNT // 10


def test_each_pair_is_joined_once(cluster: Cluster) -> None:
    fed = [0]

    def feed(producer: Producer, topics: list[str]) -> None:
        for number in range(fed[0], fed[0] + COUNT):
            for topic in topics:
                producer.send(topic, b"%d" % number, key=b"k%d" % number, timestamp=BASE_MS + number)
        fed[0] += COUNT

    def pair(left: Any, right: Any) -> bytes:
        assert (left.topic[-2:], right.topic[-2:]) == (".0", ".1")
        return bytes(left.value + b"=" + right.value)

    stem = cluster.unique("d8")
    join = semel.join_within(left=f"{stem}.0", within_ms=1_000, grace_ms=600_000, join=pair)
    found = Counter(row.value for row in run_with_faults(cluster, join, feed, sources=2, stem=stem))
    assert found == Counter(b"%d=%d" % (number, number) for number in range(2 * COUNT))
