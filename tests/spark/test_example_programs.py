"""The programs in examples/ that run on Spark need nothing but a broker: one as the README starts it, the other one in
the session that the tests share."""

from __future__ import annotations

import runpy
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import semel
from semel.local.brokers import SemelBroker
from semel.local.processes import Process
from tests.support.broker import ROOT
from tests.support.reading import read_topic
from tests.support.waiting import PATIENCE_S, until

EXAMPLES = ROOT / "examples"
# Spark's default is 200, which are as many tasks and state stores for a batch of one row.
FEW_TASKS = {"PYSPARK_SUBMIT_ARGS": "--conf spark.sql.shuffle.partitions=2 pyspark-shell"}
pytestmark = pytest.mark.timeout(300)


def what_it_rejects(brokers: str, source: str, rejected: str, runs: Callable[[], bool]) -> list[bytes | None]:
    """What is in the topic after a record that no program can take."""
    with semel.Admin(bootstrap_servers=brokers) as admin:
        until(lambda: rejected in admin.list_topics() or not runs(), "there are no topics")
    assert runs()
    with semel.Producer(bootstrap_servers=brokers, allow_auto_create_topics=False) as producer:
        producer.send(source, b"no JSON").result()
    until(lambda: read_topic(brokers, rejected) or not runs(), "nothing was written")
    return [seen.value for seen in read_topic(brokers, rejected)]


def test_the_bank_needs_nothing_but_a_broker(semel_broker: SemelBroker, tmp_path: Path) -> None:
    """Its one command in the README failed: topic 'bank.statements' cannot be written."""
    brokers = semel_broker.bootstrap
    with Process([sys.executable, str(EXAMPLES / "bank.py"), brokers, str(tmp_path)], env=FEW_TASKS) as program:
        found = what_it_rejects(brokers, "bank.transfers", "bank.rejected", lambda: program.running)
        assert found == [b"no JSON"], program.output


def test_ad_views_need_nothing_but_a_broker(session: Any, semel_broker: SemelBroker, tmp_path: Path) -> None:
    main = runpy.run_path(str(EXAMPLES / "ad_views.py"))["main"]
    program = threading.Thread(target=main, args=(semel_broker.bootstrap, str(tmp_path / "checkpoint")))
    program.start()
    try:
        assert what_it_rejects(semel_broker.bootstrap, "ads.views", "ads.rejected", program.is_alive) == [b"no JSON"]
    finally:
        for query in session.streams.active:
            query.stop()
        program.join(PATIENCE_S)
    assert not program.is_alive()
