"""What `semel prove` changes in a running broker: faults armed by files, the clock, a full disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from semel.local.brokers import BrokerFailedError, SemelBroker
from semel.prove.checker.reading import create_topics
from semel.prove.injection import Control
from tests.support.broker import faulty_semel
from tests.support.waiting import PATIENCE_S, until


def produce(bootstrap: str, topic: str, value: bytes, timeout_s: float = PATIENCE_S) -> int:
    """How many were not stored in time."""
    producer = Producer({"bootstrap.servers": bootstrap, "message.timeout.ms": int(timeout_s * 1000), "log_level": 0})
    producer.produce(topic, value)
    return int(producer.flush(timeout_s + 5))


def test_fault_is_armed_by_a_file_while_the_broker_runs(tmp_path: Path) -> None:
    faults = tmp_path / "faults"
    faults.mkdir()
    with SemelBroker(tmp_path / "broker", semel=faulty_semel(f"@{faults}")) as broker:
        create_topics(broker.bootstrap, {"t": 1})
        assert produce(broker.bootstrap, "t", b"1") == 0
        (faults / "Produce.before_response").write_text("kill:2")
        assert produce(broker.bootstrap, "t", b"2") == 0
        assert (faults / "Produce.before_response").exists(), "the first one passes"
        produce(broker.bootstrap, "t", b"3", timeout_s=2)
        assert broker.process is not None
        broker.process.wait_for_line("fault fired: Produce.before_response", PATIENCE_S)
        broker.process.wait(PATIENCE_S)
        assert (faults / "Produce.before_response.fired").exists()
        broker.start()
        assert produce(broker.bootstrap, "t", b"4") == 0, "it acts once"


def test_full_disk_refuses_writes_and_a_start_and_lets_them_pass_when_it_is_free_again(tmp_path: Path) -> None:
    control = Control.create(tmp_path / "control")
    with SemelBroker(tmp_path / "broker", semel=faulty_semel(control=tmp_path / "control")) as broker:
        create_topics(broker.bootstrap, {"t": 1})
        assert produce(broker.bootstrap, "t", b"1") == 0
        control.set(disk_is_full=True)
        producer = Producer({"bootstrap.servers": broker.bootstrap, "log_level": 0})
        producer.produce("t", b"2")
        assert producer.flush(1) == 1, "it waits for space"
        consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "g"})
        assert consumer.get_watermark_offsets(TopicPartition("t", 0)) == (0, 1)
        broker.kill()
        with pytest.raises(BrokerFailedError, match=r"no space is left on the disk of .*free some space and start"):
            broker.start()
        control.set(disk_is_full=False)
        broker.start()
        assert producer.flush(PATIENCE_S) == 0
        assert consumer.get_watermark_offsets(TopicPartition("t", 0)) == (0, 2)
        consumer.close()


def test_clock_steps_forward_past_a_transactions_timeout(tmp_path: Path) -> None:
    control = Control.create(tmp_path / "control")
    with SemelBroker(tmp_path / "broker", semel=faulty_semel(control=tmp_path / "control")) as broker:
        create_topics(broker.bootstrap, {"t": 1})
        producer = Producer(
            {"bootstrap.servers": broker.bootstrap, "transactional.id": "p", "transaction.timeout.ms": 60_000}
        )
        producer.init_transactions(20)
        producer.begin_transaction()
        producer.produce("t", b"1")
        assert producer.flush(20) == 0
        control.set(clock_offset_ms=120_000)
        consumer = Consumer(
            {"bootstrap.servers": broker.bootstrap, "group.id": "g", "isolation.level": "read_committed"}
        )
        until(
            lambda: consumer.get_watermark_offsets(TopicPartition("t", 0))[1] >= 2,  # the record and the abort marker
            "the coordinator did not see the step",
            timeout_s=30,  # less than the transaction's timeout, which would come without a step too
        )
        consumer.close()
        with pytest.raises(KafkaException):
            producer.commit_transaction(10)
