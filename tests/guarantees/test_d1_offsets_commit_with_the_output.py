"""D1: input positions are committed inside the output's transaction: a consume-process-produce program that is killed,
and whose broker dies at the worst moments, reads every record once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from benchmarks.peers.raw_client import RawClient
from semel.local.processes import Process
from tests.support.crashes import MortalBroker
from tests.support.reading import create_topic, read_topic
from tests.support.transactional import write

RECORDS = 60


def start_member(bootstrap: str) -> Process:
    module = "tests.guarantees.pipeline_member"
    return Process([sys.executable, "-m", module, bootstrap, "member", "g", "in", "out"], stdin=True)


def fill(bootstrap: str) -> list[bytes]:
    for topic in ("in", "out"):
        create_topic(bootstrap, topic)
    values = [b"%03d" % number for number in range(RECORDS)]
    write(Producer({"bootstrap.servers": bootstrap}), values, "in")
    return values


def check(bootstrap: str, values: list[bytes]) -> None:
    assert [seen.value for seen in read_topic(bootstrap, "out")] == values
    reader = Consumer({"bootstrap.servers": bootstrap, "group.id": "g", "isolation.level": "read_committed"})
    (position,) = reader.committed([TopicPartition("in", 0)], 20)
    reader.close()
    assert position.offset == len(values)


@pytest.mark.parametrize(
    "point",
    [
        "TxnOffsetCommit.before_response",
        "prepare_commit.before_log",
        "prepare_commit.after_log",
        "marker.after",
        "complete_commit.after_log",
    ],
)
def test_every_record_is_processed_once_when_broker_and_program_die(tmp_path: Path, point: str):
    with MortalBroker(tmp_path / "broker") as broker:
        values = fill(broker.bootstrap)
        broker.arm(f"{point}:kill:3")
        with start_member(broker.bootstrap) as member:
            broker.die_and_return(point)
            member.kill()  # it dies with the broker, its transaction open or decided
        with RawClient(broker.bootstrap) as client:
            client.settled("member")
        left = RECORDS - len(read_topic(broker.bootstrap, "out"))
        assert 0 < left < RECORDS
        with start_member(broker.bootstrap) as new_member:
            new_member.wait_for_line(rf"^committed {left}$", 60)
        check(broker.bootstrap, values)
