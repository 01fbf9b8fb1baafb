"""B9: the six failure rules, each with its fault, by confluent-kafka."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaException, Producer

from benchmarks.peers.raw_client import RawClient, eventually
from semel.local.processes import Process
from tests.support.crashes import MortalBroker
from tests.support.reading import create_topic, read_topic
from tests.support.transactional import FENCED, code_of, persist, transactional, write
from tests.support.waiting import PATIENCE_S

SCAN = "transaction.abort.timed.out.transaction.cleanup.interval.ms=100"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[MortalBroker]:
    with MortalBroker(tmp_path / "broker", SCAN) as broker:
        create_topic(broker.bootstrap, "t")
        yield broker


def values(broker: MortalBroker) -> list[bytes | None]:
    return [seen.value for seen in read_topic(broker.bootstrap, "t")]


def during(work: Any, broker: MortalBroker, point: str) -> None:
    """Does something that meets the armed fault, while the broker dies and returns."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    worker = threading.Thread(target=run)
    worker.start()
    broker.die_and_return(point)
    worker.join(PATIENCE_S)
    assert not worker.is_alive()
    if failures:
        raise failures[0]


def test_1_begin_times_out_so_the_same_id_is_used_again(broker: MortalBroker):
    broker.arm("InitProducerId.before_response:kill")
    producer = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": "id", "log_level": 0})
    with pytest.raises(KafkaException) as timed_out:
        producer.init_transactions(0.8)
    assert timed_out.value.args[0].retriable()
    during(lambda: persist(lambda: producer.init_transactions(30)), broker, "InitProducerId.before_response")
    producer.begin_transaction()
    write(producer, [b"value"], "t")
    producer.commit_transaction(30)
    assert values(broker) == [b"value"]


def test_2_broker_fault_while_sending_leaves_the_commit_possible(broker: MortalBroker):
    broker.arm("Produce.before_response:kill")
    producer = transactional(broker.bootstrap, "id")
    producer.begin_transaction()
    during(lambda: write(producer, [b"one", b"two"], "t"), broker, "Produce.before_response")
    persist(lambda: producer.commit_transaction(30))
    assert values(broker) == [b"one", b"two"]


def test_3_timeout_passed_so_a_new_instance_aborts_and_does_it_again(broker: MortalBroker):
    producer = transactional(broker.bootstrap, "id", **{"transaction.timeout.ms": 1000})
    producer.begin_transaction()
    write(producer, [b"value"], "t")
    with RawClient(broker.bootstrap) as client:
        eventually(lambda: client.describe("id"), done=lambda txn: txn.transaction_state == "CompleteAbort")
    assert code_of(lambda: producer.commit_transaction(30)) in FENCED
    again = transactional(broker.bootstrap, "id")
    again.begin_transaction()
    write(again, [b"value"], "t")
    again.commit_transaction(30)
    assert values(broker) == [b"value"]


@pytest.mark.parametrize("point", ["EndTxn.before_response", "prepare_commit.before_log", "prepare_commit.after_log"])
def test_4_commit_answer_lost_so_it_is_asked_for_again(broker: MortalBroker, point: str):
    broker.arm(f"{point}:kill")
    producer = transactional(broker.bootstrap, "id")
    producer.begin_transaction()
    write(producer, [b"value"], "t")
    during(lambda: persist(lambda: producer.commit_transaction(30)), broker, point)
    assert values(broker) == [b"value"]
    producer.begin_transaction()
    write(producer, [b"next"], "t")
    producer.commit_transaction(30)
    assert values(broker) == [b"value", b"next"]


def test_5_network_cut_so_the_timeout_aborts(broker: MortalBroker):
    command = [sys.executable, "-m", "tests.guarantees.frozen_producer", broker.bootstrap, "id", "t", "1000"]
    with Process(command, stdin=True) as cut_off:
        cut_off.wait_for_line("^open$", 40)
        cut_off.kill()  # gone without a word
    assert b"frozen" in [seen.value for seen in read_topic(broker.bootstrap, "t", "read_uncommitted")]
    with RawClient(broker.bootstrap) as client:
        eventually(lambda: client.describe("id"), done=lambda txn: txn.transaction_state == "CompleteAbort")
        assert client.fetch(("t", 0)).last_stable_offset == client.fetch(("t", 0)).high_watermark
    assert values(broker) == []


def test_6_coordinator_failover_leaves_nothing_to_do_for_the_user(broker: MortalBroker):
    broker.arm("add.after_log:kill:2")  # the second topic of the transaction
    create_topic(broker.bootstrap, "u")
    producer = transactional(broker.bootstrap, "id")
    producer.begin_transaction()
    write(producer, [b"one"], "t")
    during(lambda: write(producer, [b"two"], "u"), broker, "add.after_log")
    write(producer, [b"three"], "t")
    producer.commit_transaction(30)
    assert values(broker) == [b"one", b"three"]
    assert [seen.value for seen in read_topic(broker.bootstrap, "u")] == [b"two"]
