"""The classic programs in examples/ run as they stand, twice, and fit on a screen. Those with a database or Spark alone
are run by tests next to these."""

from __future__ import annotations

import argparse
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

import semel
from semel.cli import consume
from semel.client import read_table as client
from semel.client.producer.transactions import TransactionCalls
from semel.local.brokers import SemelBroker
from tests.support.broker import KAFKA_IN_FULL, Cluster
from tests.support.reading import read_topic, settle

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TOLD = {
    "by_hand.py": r"100 numbers squared",
    "bank_producer.py": r"512 orders, 1200000 cents",
    "page_views.py": r"alice \d+, bob \d+, carol \d+ of 500",
    "purchases.py": r"60 purchases, 15 from Turku, 15 from nobody",
    "ip_hits.py": r"alarms: 10\.0\.0\.2 with 30 hits\n",
    "orders_and_stock.py": r"\d+ pieces shipped, \d+ left, of 60",
    "chain.py": r"parser: 120 in, 117 out, 3 set aside\npricer: 117 in.*\nbiller: 117 in, 117 out, 0 set aside",
}


def read_table(topic: str, bootstrap_servers: str) -> pa.Table:
    """A transaction is over a moment before its markers are there and readers see it: on a busy machine, too late."""
    settle(bootstrap_servers)
    return client.read_table(topic, bootstrap_servers=bootstrap_servers)


@pytest.mark.parametrize("cluster", ["semel", KAFKA_IN_FULL], indirect=True)
@pytest.mark.parametrize("name", TOLD)
def test_an_example_does_what_it_says(
    name: str, cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(semel, "read_table", read_table)
    runpy.run_path(str(EXAMPLES / name))["main"](cluster.bootstrap)
    told = capsys.readouterr().out
    assert re.search(TOLD[name], told), told
    if name == "orders_and_stock.py":
        shipped, left = map(int, re.findall(r"(\d+) (?:pieces|left)", told))
        assert shipped + left == 60
    if name == "by_hand.py":
        values = [int(seen.value or b"") for seen in read_topic(cluster.bootstrap, "hand.squares")]
        assert sorted(values) == [number**2 for number in range(100)]


def test_by_hand_aborts_and_reads_again_what_was_not_committed(
    shared_semel_broker: SemelBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a transaction that fails before its commit."""
    step = runpy.run_path(str(EXAMPLES / "by_hand.py"))["one_transaction"]
    bootstrap = shared_semel_broker.bootstrap
    with semel.Admin(bootstrap_servers=bootstrap) as admin:
        for topic in ("hand.more", "hand.squares"):
            admin.create_topic(topic, 1, if_not_exists=True)
    with semel.Producer(bootstrap_servers=bootstrap) as producer:
        for number in range(10):
            producer.send("hand.more", b"%d" % (number + 1000))
    options = {"group_id": "by-hand-more", "auto_offset_reset": "earliest", "enable_auto_commit": False}
    fired = []

    async def failing(self: TransactionCalls, _: object) -> None:
        monkeypatch.undo()
        fired.append(self)
        raise semel.AbortableError("aborted")

    monkeypatch.setattr(TransactionCalls, "commit", failing)
    with (
        semel.Consumer(bootstrap_servers=bootstrap, **options) as consumer,
        semel.Producer(bootstrap_servers=bootstrap, transactional_id="by-hand-more") as producer,
    ):
        producer.init_transactions()
        consumer.subscribe(["hand.more"])
        done = 0
        while done < 10:
            records = consumer.poll(500)
            done += step(consumer, producer, records) if records else 0
        assert len(fired) == 1
    squares = [int(seen.value or b"") for seen in read_topic(bootstrap, "hand.squares")]
    assert sorted(value for value in squares if value >= 10**6) == [number**2 for number in range(1000, 1010)]


@pytest.mark.full
@pytest.mark.timeout(240)
def test_the_sql_pipeline_runs_on_a_broker_of_its_own() -> None:
    command = [sys.executable, str(EXAMPLES / "sql_pipeline.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert "100 large orders" in done.stdout, done.stderr[-2000:]


def test_examples_fit_on_a_screen_and_say_how_to_run_them() -> None:
    for name in (*TOLD, "sql_pipeline.py"):
        text = (EXAMPLES / name).read_text()
        assert len(text.splitlines()) <= 60, name
        assert f"python examples/{name}" in text
        for line in re.findall(r"^ *semel (consume .*)#", text, re.MULTILINE):
            parser = argparse.ArgumentParser()
            consume.configure(parser)
            assert parser.parse_args(line.split()[1:]).exit


def test_the_table_has_one_command_for_each_example() -> None:
    table = (EXAMPLES / "README.md").read_text()
    missing = [path.name for path in EXAMPLES.glob("*.py") if f"python examples/{path.name}" not in table]
    assert missing == []
