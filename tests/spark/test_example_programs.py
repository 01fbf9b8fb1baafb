"""The programs in examples/ that run on Spark need nothing but a broker. They run in the session that tests share."""

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
PROGRAMS = [("bank.py", ("bank.transfers", "bank.rejected")), ("ad_views.py", ("ads.views", "ads.rejected"))]
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


@pytest.mark.full  # the same, as the README starts them
@pytest.mark.parametrize(("name", "topics"), PROGRAMS)
def test_a_program_is_started_with_one_command(
    name: str, topics: tuple[str, str], semel_broker: SemelBroker, tmp_path: Path
) -> None:
    """It failed: topic 'bank.statements' cannot be written."""
    brokers = semel_broker.bootstrap
    with Process([sys.executable, str(EXAMPLES / name), brokers, str(tmp_path)]) as program:
        assert what_it_rejects(brokers, *topics, lambda: program.running) == [b"no JSON"], program.output


@pytest.mark.parametrize(("name", "topics"), PROGRAMS)
def test_a_program_needs_nothing_but_a_broker(
    name: str, topics: tuple[str, str], session: Any, semel_broker: SemelBroker, tmp_path: Path
) -> None:
    main = runpy.run_path(str(EXAMPLES / name))["main"]
    program = threading.Thread(target=main, args=(semel_broker.bootstrap, str(tmp_path / "checkpoint")))
    program.start()
    try:
        assert what_it_rejects(semel_broker.bootstrap, *topics, program.is_alive) == [b"no JSON"]
    finally:
        for query in session.streams.active:
            query.stop()
        program.join(PATIENCE_S)
    assert not program.is_alive()
