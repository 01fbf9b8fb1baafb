"""D5: chains of services: A -> B -> C, each exactly once, give exactly once end to end.

Faults: kill -9 of a service in the middle of its work, several times, in both links of the chain.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from itertools import pairwise

import pytest

from semel.client.admin import Admin
from semel.client.producer import Producer
from tests.support.broker import KAFKA_IN_FULL, Cluster
from tests.support.process_campaign import Pipeline
from tests.support.reading import read_values
from tests.support.waiting import PATIENCE_S

COUNT = 2500
KILLS = 3


@pytest.mark.parametrize("cluster", ["semel", KAFKA_IN_FULL], indirect=True)
def test_chain_of_services_is_exactly_once_end_to_end(cluster: Cluster) -> None:
    stem = cluster.unique("chain")
    names = [f"{stem}.{letter}" for letter in "abc"]
    with Admin(bootstrap_servers=cluster.bootstrap) as admin:
        for name in names:
            admin.create_topic(name, 4)
        links = [Pipeline(cluster, "exactly_once", source, sink, f"{sink}-service") for source, sink in pairwise(names)]
        try:
            for link in links:
                link.start("one")
            with Producer(bootstrap_servers=cluster.bootstrap) as producer:
                for number in range(COUNT):
                    producer.send(names[0], b"%d" % number, key=b"%d" % number)
            _kill_in_the_middle(links, random.Random(5))
            _await_end(admin, links)
            for link in links:
                link.workers["one"].wait_for_line("^started$", PATIENCE_S)  # the last kill was perhaps just now
                assert link.workers["one"].terminate() == 0
                assert link.outcome.kills >= 1, "no service was killed"
        finally:
            for link in links:
                link.workers["one"].kill()
    assert Counter(value for _, _, value in read_values(cluster.bootstrap, names[2])) == Counter(
        b"%d" % number for number in range(COUNT)
    )


def _kill_in_the_middle(links: list[Pipeline], rng: random.Random) -> None:
    for _ in range(KILLS):
        for link in links:
            worker = link.workers["one"]
            worker.wait_for_line("settled", timeout_s=PATIENCE_S)
            time.sleep(rng.uniform(0.05, 0.3))  # anywhere in a transaction
            link.kill("one")


def _await_end(admin: Admin, links: list[Pipeline]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    for link in links:
        while True:
            link.revive()
            lags = [p.lag for p in admin.group_lag(link.application) if p.topic == link.source]
            if len(lags) == 4 and not any(lag is None or lag for lag in lags):
                break
            assert time.monotonic() < deadline_s, (
                f"{link.sink} hangs with lag {lags}: {link.workers['one'].output[-2000:]}"
            )
            time.sleep(0.1)
