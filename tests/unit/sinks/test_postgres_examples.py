"""The examples of docs/postgres.md run as they stand."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from semel.local.brokers import SemelBroker
from tests.support.reading import read_topic

EXAMPLES = Path(__file__).parents[3] / "examples"


def run(name: str, *words: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_bank_keeps_every_cent(shared_semel_broker: SemelBroker, dsn: str) -> None:
    told = run("bank_to_postgres.py", shared_semel_broker.bootstrap, dsn)
    assert re.search(r"1000 transfers, \d+ refused, 200000 cents", told), told


def test_the_shop_announces_what_it_sold(shared_semel_broker: SemelBroker, dsn: str) -> None:
    told = run("outbox.py", shared_semel_broker.bootstrap, dsn)
    assert "50 sold, 50 announced" in told
    announced = [json.loads(seen.value or b"") for seen in read_topic(shared_semel_broker.bootstrap, "sold")]
    assert len({each["customer"] for each in announced}) == len(announced) == 50
    with psycopg.connect(dsn) as connection:
        assert connection.execute("SELECT sum(n) FROM stock").fetchone() == (0,)


def test_what_is_booked_is_announced(shared_semel_broker: SemelBroker, dsn: str) -> None:
    told = run("topics_and_postgres.py", shared_semel_broker.bootstrap, dsn)
    booked = [json.loads(seen.value or b"") for seen in read_topic(shared_semel_broker.bootstrap, "booked")]
    assert len({each["id"] for each in booked}) == len(booked) == 500
    assert f"500 deposits, {sum(each['cents'] for each in booked)} cents" in told


@pytest.mark.full
@pytest.mark.timeout(300)
def test_every_order_is_in_the_table(shared_semel_broker: SemelBroker, dsn: str, tmp_path: Path) -> None:
    told = run("orders_to_postgres.py", shared_semel_broker.bootstrap, dsn, str(tmp_path))
    assert f"1000 orders, {sum(range(100, 1_100))} cents" in told


@pytest.mark.full
@pytest.mark.timeout(300)
def test_every_order_has_its_receipt(shared_semel_broker: SemelBroker, dsn: str, tmp_path: Path) -> None:
    told = run("orders_and_receipts.py", shared_semel_broker.bootstrap, dsn, str(tmp_path))
    assert f"1000 orders, {sum(range(100, 1_100))} cents" in told
    receipts = [json.loads(seen.value or b"") for seen in read_topic(shared_semel_broker.bootstrap, "shop.receipts")]
    assert sorted(each["id"] for each in receipts) == list(range(1_000))


def test_examples_fit_on_a_screen() -> None:
    names = ("bank_to_postgres", "orders_to_postgres", "orders_and_receipts", "outbox", "topics_and_postgres")
    for name in (f"{each}.py" for each in names):
        assert len((EXAMPLES / name).read_text().splitlines()) <= 60
