"""A thousand topics of ten partitions and ten million records: every view within a second."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pytest

from benchmarks.produce_cpu import cpu_us
from semel.client import Producer
from semel.client.admin import Admin
from semel.client.admin.calls import NewTopic
from semel.local.brokers import SemelBroker
from tests.browser.conftest import Site
from tests.browser.test_access import ask
from tests.support.machine import is_quiet

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
            assert broker.process is not None
            try:
                _look(site, broker.process.pid)
            finally:
                site.close()


def _look(site: Site, broker_pid: int) -> None:
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
        took_s, computed_s = [], []
        for number in range(LOOKS):
            before_us, started_s = cpu_us(site.process.pid) + cpu_us(broker_pid), time.monotonic()
            status, _, said = ask(site.url, path=path.format(n=number))
            took_s.append(time.monotonic() - started_s)
            computed_s.append((cpu_us(site.process.pid) + cpu_us(broker_pid) - before_us) / 1e6)
            assert status == 200, said
        took, computed = p95(took_s), p95(computed_s)
        print(f"{name:<14} p95 {took * 1000:6.0f} ms, {computed * 1000:6.0f} ms of processor time")
        if (took if is_quiet() else computed) > LIMIT_S:  # else the wait is for others on the machine
            slow[name] = took
    assert slow == {}


def p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]
