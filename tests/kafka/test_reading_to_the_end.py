"""Who reads up to the end and then stops reads all that was committed before: the end of a transaction is acknowledged
before its markers are written. On semel's broker, whose markers can be made late."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

import semel
from semel.spark.source import BatchReader, ReadAllAvailable, StreamReader
from tests.support.crashes import MortalBroker
from tests.support.reading import create_topic

LATE_MS = 1_500


def by_process(brokers: str, topic: str) -> int:
    options = {"bootstrap_servers": brokers, "application_id": topic, "stop_at_end": True}
    return semel.process(topic, "copy", lambda record: record, **options).records_in


def by_batch_query(brokers: str, topic: str) -> int:
    reader = BatchReader({"kafka.bootstrap.servers": brokers, "subscribe": topic})
    with closing(reader.cluster):
        return sum(len(table) for task in reader.partitions() for table in reader.read(task))


def by_available_now(brokers: str, topic: str) -> int:
    reader = StreamReader({"kafka.bootstrap.servers": brokers, "subscribe": topic, "startingOffsets": "earliest"})
    with closing(reader.cluster):
        reader.prepareForTriggerAvailableNow()
        start = reader.initialOffset()
        tasks = reader.partitions(start, reader.latestOffset(start, ReadAllAvailable()))
        return sum(len(table) for task in tasks for table in reader.read(task))


def by_command(brokers: str, topic: str) -> int:
    command = [sys.executable, "-m", "semel", "consume", "-b", brokers, topic, "-e"]
    return len(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.splitlines())


READERS: dict[str, Callable[[str, str], int]] = {
    "read_table": lambda brokers, topic: semel.read_table(topic, bootstrap_servers=brokers).num_rows,
    "process": by_process,
    "spark.read": by_batch_query,
    "availableNow": by_available_now,
    "consume": by_command,
}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MortalBroker]:
    with MortalBroker(Path(tmp_path_factory.mktemp("late-markers")) / "broker") as broker:
        create_topic(broker.bootstrap, "copy")
        yield broker


@pytest.mark.parametrize("reader", READERS)
def test_what_was_committed_before_is_read_although_its_marker_is_late(broker: MortalBroker, reader: str) -> None:
    topic = create_topic(broker.bootstrap, reader.replace(".", "-"))
    with semel.Producer(bootstrap_servers=broker.bootstrap, transactional_id=topic) as producer:
        producer.init_transactions()
        with producer.transaction():
            producer.send(topic, b"one")
            broker.arm(f"marker.before:delay={LATE_MS}")
        with semel.Consumer(bootstrap_servers=broker.bootstrap) as consumer:
            assert consumer.end_offsets([(topic, 0)]) == {(topic, 0): 0}, "the marker was not late"
        assert READERS[reader](broker.bootstrap, topic) == 1


def test_open_transactions_are_not_waited_for(broker: MortalBroker) -> None:
    topic = create_topic(broker.bootstrap, "open")
    with semel.Producer(bootstrap_servers=broker.bootstrap) as producer:
        producer.send(topic, b"visible").result()
    with semel.Producer(bootstrap_servers=broker.bootstrap, transactional_id="open") as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(topic, b"open")
        producer.flush()
        assert semel.read_table(topic, bootstrap_servers=broker.bootstrap).column("value").to_pylist() == [b"visible"]
        producer.abort_transaction()
