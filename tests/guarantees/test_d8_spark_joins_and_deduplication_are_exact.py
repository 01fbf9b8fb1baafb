"""D8, D6: joins and deduplication on Spark are exact after a crash between EndTxn and Spark's commit log.

One driver runs a stream-static join, a stream-stream outer join, `dropDuplicates`, `dropDuplicatesWithinWatermark` and
a query whose source is in another cluster. It is killed when each of them is between the two commits, and started
again.
What must be in each output follows from the input.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from confluent_kafka import Producer

from semel.local.brokers import SemelBroker
from semel.local.processes import Process
from semel.spark.source import HAS_ADMISSION_CONTROL
from tests.spark.stateful_driver import PER_BATCH, QUERIES
from tests.support.broker import Cluster
from tests.support.reading import committed_offset, create_topic, read_values

ORDERS = 3 * PER_BATCH
EVENTS = ORDERS // 2  # each comes twice, the second time in a later batch
PAID_LATER = 20  # payments stand so far behind their orders: some are in the next batch
CRASH_AT = 2 if HAS_ADMISSION_CONTROL else 1  # PySpark 4.1 reads everything at once
PARTITIONS = 2
SECOND = 1_000  # of the first order; a row of second 0 is late at once, because the first watermark is there

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]


class Site(NamedTuple):
    cluster: Cluster
    other: SemelBroker
    topics: dict[str, str]
    folder: Path

    def driver(self, crash_at: int) -> Process:
        job = {
            "brokers": self.cluster.bootstrap,
            "other": self.other.bootstrap,
            "topics": self.topics,
            "folder": str(self.folder),
            "crash_at": crash_at,
        }
        return Process([sys.executable, "-m", "tests.spark.stateful_driver", json.dumps(job)])

    def found(self, query: str) -> Counter[str]:
        values = read_values(self.cluster.bootstrap, self.topics[query])
        return Counter((value or b"").decode() for _, _, value in values)


def fill(bootstrap: str, topic: str, rows: list[dict[str, Any]]) -> None:
    create_topic(bootstrap, topic, PARTITIONS)
    producer = Producer({"bootstrap.servers": bootstrap, "log_level": 0})
    for number, row in enumerate(rows):
        producer.produce(topic, json.dumps(row).encode(), partition=number % PARTITIONS)
    assert producer.flush(60) == 0


def order(number: int) -> dict[str, Any]:
    return {"id": number, "customer": number % 7, "second": SECOND + number}


def is_paid(number: int) -> bool:
    return number % 3 != 0


@pytest.fixture
def site(cluster: Cluster, tmp_path: Path) -> Iterator[Site]:
    topics = {name: cluster.unique(name) for name in ("orders", "payments", "events", *QUERIES)}
    early = [{"order": -1, "second": SECOND}] * PAID_LATER
    paid = [{"order": number, "second": SECOND + number + 5} for number in range(ORDERS) if is_paid(number)]
    fill(cluster.bootstrap, topics["orders"], [order(number) for number in range(ORDERS)])
    fill(cluster.bootstrap, topics["payments"], [*early, *paid])
    events = [{"id": number % EVENTS, "second": number} for number in range(2 * EVENTS)]
    fill(cluster.bootstrap, topics["events"], events)
    for name in QUERIES:
        create_topic(cluster.bootstrap, topics[name], PARTITIONS)
    with SemelBroker(tmp_path / "other") as other:
        fill(other.bootstrap, topics["orders"], [order(1_000 + number) for number in range(ORDERS)])
        yield Site(cluster, other, topics, tmp_path / "checkpoints")


@pytest.mark.parametrize("cluster", ["semel", pytest.param("apache_kafka", marks=pytest.mark.kafka)], indirect=True)
def test_a_crash_between_the_two_commits_neither_loses_nor_doubles(site: Site) -> None:
    with site.driver(CRASH_AT) as driver:
        driver.wait_for_line("fault fired: all are committed", timeout_s=240)
        assert driver.wait(timeout_s=60) == -9
    with site.driver(0) as driver:
        driver.wait_for_line("^done$", timeout_s=240)
        for name in QUERIES:  # the replay was noticed
            assert json.loads(driver.wait_for_line(rf"^verdicts {name} (.*)$")[1])[0] == "already written"

    assert site.found("stream_static") == Counter(f"{number}:name-{number % 7}" for number in range(ORDERS))
    assert site.found("deduplicated") == Counter(map(str, range(EVENTS)))
    assert site.found("within_watermark") == Counter(map(str, range(EVENTS)))
    check_outer_join(site.found("stream_stream"))

    assert site.found("other_cluster") == Counter(str(1_000 + number) for number in range(ORDERS))
    group = site.topics["other_cluster"]  # a topic with the name of the source is here too, and is not meant
    assert committed_offset(site.cluster.bootstrap, group, site.topics["orders"]) < 0


def check_outer_join(found: Counter[str]) -> None:
    """Every payment found its order; orders without one came out when the watermark had passed them, each once."""
    assert Counter({value: n for value, n in found.items() if value.endswith(":paid")}) == Counter(
        f"{number}:paid" for number in range(ORDERS) if is_paid(number)
    )
    unpaid = sorted(int(value.partition(":")[0]) for value in found.elements() if value.endswith(":unpaid"))
    assert unpaid == [number for number in range(unpaid[-1] + 1) if not is_paid(number)]
    assert unpaid[-1] >= ORDERS - 60
