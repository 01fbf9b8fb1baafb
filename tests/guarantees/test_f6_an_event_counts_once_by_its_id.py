"""F6: deduplication by an event id, for a stated time, through lost commits and restarts.

Faults: the application produces every event several times; requests and responses of EndTxn are lost and their
connections cut; the loop starts again on an empty disk.
"""

from __future__ import annotations

import json
from collections import Counter

import pytest

import semel
from semel.client.producer import Producer
from tests.support.broker import KAFKA_IN_FULL, Cluster
from tests.support.lossy_loop import BASE_MS, run_with_faults

COUNT = 120
pytestmark = pytest.mark.parametrize("cluster", ["semel", KAFKA_IN_FULL], indirect=True)


def test_an_event_that_was_produced_several_times_is_passed_on_once(cluster: Cluster) -> None:
    def feed(producer: Producer, topics: list[str]) -> None:
        """Each event twice, and all of them again with the second call: an application that retries."""
        for _ in range(2):
            for number in range(COUNT):
                event = json.dumps({"id": number}).encode()
                producer.send(topics[0], event, key=b"k%d" % (number % 5), timestamp=BASE_MS + number)

    once = semel.deduplicate(by=lambda record: str(json.loads(record.value)["id"]), within_ms=60_000)
    found = Counter(json.loads(row.value or b"")["id"] for row in run_with_faults(cluster, once, feed))
    assert found == Counter(range(COUNT))
