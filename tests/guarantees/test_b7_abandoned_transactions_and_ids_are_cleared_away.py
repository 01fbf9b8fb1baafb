"""B7: an abandoned transaction is aborted after transaction.timeout.ms and its owner fenced. Ids unused for
transactional.id.expiration.ms are forgotten, so one-time ids do not eat the memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.peers.raw_client import RawClient, eventually
from semel.local.brokers import SemelBroker
from semel.local.processes import Process
from semel.protocol.errors import ErrorCode as E
from tests.support.reading import create_topic, read_topic
from tests.support.transactional import FENCED, transactional, write
from tests.support.waiting import STALL_S

TIMEOUT_MS = 1500


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[SemelBroker]:
    scan = "transaction.abort.timed.out.transaction.cleanup.interval.ms=100"
    with SemelBroker(tmp_path / "broker", "--set", scan) as broker:
        yield broker


@pytest.mark.parametrize("kill", [False, True], ids=["", "the broker is killed meanwhile"])
def test_frozen_producers_transaction_is_aborted_and_the_producer_fenced(broker: SemelBroker, kill: bool):
    bootstrap = broker.bootstrap
    create_topic(bootstrap, "t")
    command = [sys.executable, "-m", "tests.guarantees.frozen_producer", bootstrap, "id", "t", str(TIMEOUT_MS)]
    with Process(command, stdin=True) as frozen:
        frozen.wait_for_line("^open$", 40)
        opened_s = time.monotonic()
        frozen.pause()
        if kill:
            broker.kill()
            broker.start()
        with RawClient(bootstrap) as client:
            state = eventually(lambda: client.describe("id"), done=lambda txn: txn.transaction_state == "CompleteAbort")
            assert state.producer_epoch > 0, "the epoch moved on"
        assert time.monotonic() - opened_s < TIMEOUT_MS / 1000 + STALL_S
        plain = transactional(bootstrap, "another")
        plain.begin_transaction()
        write(plain, [b"another"], "t")
        plain.commit_transaction(30)
        assert [seen.value for seen in read_topic(bootstrap, "t")] == [b"another"], "readers are not held up"
        frozen.resume()
        frozen.write("go\n")
        refused = frozen.wait_for_line(r"^(committed|refused (-?\d+))$", 60)
        assert refused[2] is not None, refused[0]
        assert int(refused[2]) in FENCED
    assert [seen.value for seen in read_topic(bootstrap, "t")] == [b"another"]


def test_transaction_within_its_time_is_left_alone(broker: SemelBroker):
    with RawClient(broker.bootstrap) as client:
        client.create_topic("t")
        owner = client.init("id", timeout_ms=60_000)
        client.add_partitions("id", owner.producer_id, owner.epoch, [("t", 0)])
        short = client.init("short", timeout_ms=300)
        client.add_partitions("short", short.producer_id, short.epoch, [("t", 0)])
        eventually(lambda: client.describe("short"), done=lambda txn: txn.transaction_state == "CompleteAbort")
        assert client.describe("id").transaction_state == "Ongoing"


@pytest.mark.parametrize("kill", [False, True], ids=["", "after kill -9"])
def test_unused_ids_are_forgotten(tmp_path: Path, kill: bool):
    options = (
        "--set", "transactional.id.expiration.ms=1000",
        "--set", "transaction.remove.expired.transaction.cleanup.interval.ms=100",
    )  # fmt: skip
    with SemelBroker(tmp_path / "broker", *options) as broker:
        client = RawClient(broker.bootstrap)
        client.create_topic("t")
        open_ = client.init("open")
        client.add_partitions("open", open_.producer_id, open_.epoch, [("t", 0)])
        owners = {f"once-{n}": client.init(f"once-{n}") for n in range(20)}
        if kill:
            broker.kill()
            broker.start()
            client = RawClient(broker.bootstrap)
        for id_ in owners:
            eventually(
                lambda id_=id_: client.describe(id_).error_code, done=lambda code: code == E.TRANSACTIONAL_ID_NOT_FOUND
            )
        assert client.describe("open").transaction_state == "Ongoing", "an open transaction never expires"
        broker.kill()
        broker.start()
        client = RawClient(broker.bootstrap)
        for id_, owner in owners.items():
            assert client.describe(id_).error_code == E.TRANSACTIONAL_ID_NOT_FOUND, "forgotten for good"
            added = client.add_partitions(id_, owner.producer_id, owner.epoch, [("t", 0)])
            assert added == {("t", 0): E.INVALID_PRODUCER_ID_MAPPING}
        again = client.init("once-0")
        assert (again.error, again.epoch) == (E.NONE, 0)
        assert again.producer_id not in {owner.producer_id for owner in owners.values()}
