"""A thousand topics of ten partitions and ten million records: every view within a second."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pytest

from semel.client import Producer
from semel.client.admin import Admin
from semel.client.admin.calls import NewTopic
from semel.local.brokers import SemelBroker
from tests.browser.conftest import Site
from tests.browser.test_access import ask

TOPICS, PARTITIONS, RECORDS = 1_000, 10, 10_000_000
CHUNK = 500_000
LOOKS = 20
LIMIT_S = 1.0


@pytest.mark.full
@pytest.mark.timeout(900)
def test_every_view_of_a_large_cluster_comes_within_a_second(tmp_path: Path) -> None:
    with (
        SemelBroker(tmp_path / "broker", "--fsync", "os") as broker,
        Admin(bootstrap_servers=broker.bootstrap) as admin,
    ):
        for first in range(0, TOPICS, 100):
            names = [NewTopic(f"topic-{number:04d}", PARTITIONS, 1) for number in range(first, first + 100)]
            admin.create_topics(names, timeout_ms=120_000)
        with Producer(bootstrap_servers=broker.bootstrap) as producer:
            table = pa.table({"value": [b"0123456789"] * CHUNK})
            for number in range(RECORDS // CHUNK):
                producer.send_table(f"topic-{number % TOPICS:04d}", table)
        with Producer(bootstrap_servers=broker.bootstrap, transactional_id="holder") as holder:
            holder.init_transactions()
            holder.begin_transaction()
            holder.send("topic-0500", b"open").result()
            for number in range(0, TOPICS, 4):
                admin.alter_group_offsets(f"group-{number}", {(f"topic-{number:04d}", index): 0 for index in range(10)})
            site = Site(broker.bootstrap)
            try:
                _look(site)
            finally:
                site.close()


def _look(site: Site) -> None:
    views = {
        "overview": "/api/overview",
        "topics": "/api/topics?page={n}",
        "search": "/api/topics?q=" + quote("topic-09") + "&page={n}",
        "held": "/api/topics?held=1",
        "topic": "/api/topic?name=topic-00{n:02d}",
        "records": "/api/records?topic=topic-0000&partition=0&offset={n}000",
        "transactions": "/api/transactions",
        "transaction": "/api/transaction?id=holder",
        "producers": "/api/producers",
        "groups": "/api/groups",
        "group": "/api/group?id=group-0",
        "applications": "/api/applications",
        "doctor": "/api/doctor",
    }
    ask(site.url, path="/api/doctor")  # the first examination is read while nobody waits: the page shows the rest
    slow = {}
    for name, path in views.items():
        took_s = []
        for number in range(LOOKS):
            started_s = time.monotonic()
            status, _, said = ask(site.url, path=path.format(n=number))
            took_s.append(time.monotonic() - started_s)
            assert status == 200, said
        p95_s = statistics.quantiles(took_s, n=20)[-1]
        print(f"{name:<14} median {statistics.median(took_s) * 1000:6.0f} ms, p95 {p95_s * 1000:6.0f} ms")
        is_quiet = os.getloadavg()[0] <= (os.cpu_count() or 1) + 1  # else the wait is for others on the machine
        if (p95_s if is_quiet else statistics.median(took_s)) > LIMIT_S:
            slow[name] = p95_s
    assert slow == {}
