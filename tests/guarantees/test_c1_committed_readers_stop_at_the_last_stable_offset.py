"""C1: read_committed stops at the last stable offset (LSO); read_uncommitted goes to the high watermark."""

from __future__ import annotations

from pathlib import Path

import pytest
from confluent_kafka import Producer

from benchmarks.peers.raw_client import RawClient
from semel.local.brokers import SemelBroker
from semel.protocol.errors import ErrorCode as E
from tests.support.crashes import MortalBroker
from tests.support.reading import create_topic, read_topic, settle
from tests.support.transactional import transactional, write
from tests.support.waiting import PATIENCE_S


def committed(bootstrap: str) -> list[bytes | None]:
    return [seen.value for seen in read_topic(bootstrap, "t")]


def uncommitted(bootstrap: str) -> list[bytes | None]:
    return [seen.value for seen in read_topic(bootstrap, "t", "read_uncommitted")]


@pytest.mark.parametrize("kill", [False, True], ids=["", "over kill -9"])
def test_earliest_open_transaction_holds_committed_readers_back(semel_broker: SemelBroker, kill: bool):
    bootstrap = semel_broker.bootstrap
    create_topic(bootstrap, "t")
    plain = Producer({"bootstrap.servers": bootstrap})
    write(plain, [b"before"], "t")
    early, late = transactional(bootstrap, "early"), transactional(bootstrap, "late")
    early.begin_transaction()
    write(early, [b"early"], "t")
    late.begin_transaction()
    write(late, [b"late"], "t")
    write(plain, [b"after"], "t")
    late.commit_transaction(30)
    if kill:
        semel_broker.kill()
        semel_broker.start()
    assert committed(bootstrap) == [b"before"], "the late one is committed, but behind an open one"
    assert uncommitted(bootstrap) == [b"before", b"early", b"late", b"after"]
    early.commit_transaction(30)
    assert committed(bootstrap) == [b"before", b"early", b"late", b"after"]


@pytest.mark.parametrize("point", ["marker.before", "marker.after", "prepare_commit.before_log"])
def test_decided_transaction_shows_when_its_markers_are_written_and_not_before(tmp_path: Path, point: str):
    with MortalBroker(tmp_path / "broker") as broker:
        create_topic(broker.bootstrap, "t")
        broker.arm(f"{point}:stop")
        with RawClient(broker.bootstrap) as client:
            owner = client.init("id")
            who = ("id", owner.producer_id, owner.epoch)
            client.add_partitions(*who, [("t", 0)])
            assert client.produce(*who, ("t", 0), [b"value"]).error is E.NONE
            fetched = client.fetch(("t", 0))
            assert (fetched.values, fetched.last_stable_offset, fetched.high_watermark) == ([], 0, 1)
            from semel.protocol.messages.transactions import EndTxnRequest

            client.send(26, 3, EndTxnRequest(*who, True))
            broker.freeze_and_return(point)
            assert E.of(client.receive(26, 3).error_code) is E.NONE
            client.settled("id")
            fetched = client.fetch(("t", 0))
            assert (fetched.values, fetched.last_stable_offset) == ([b"value"], fetched.high_watermark)
        assert committed(broker.bootstrap) == [b"value"]


def test_offsets_by_time_and_end_follow_the_isolation_level(semel_broker: SemelBroker):
    """ListOffsets through confluent-kafka: the end is the LSO for one reader and the high watermark for the other."""
    from confluent_kafka import IsolationLevel, TopicPartition
    from confluent_kafka.admin import AdminClient, OffsetSpec

    bootstrap = semel_broker.bootstrap
    create_topic(bootstrap, "t")
    producer = transactional(bootstrap, "id")
    producer.begin_transaction()
    write(producer, [b"one", b"two"], "t")

    def end(level: IsolationLevel) -> int:
        admin = AdminClient({"bootstrap.servers": bootstrap})
        asked = admin.list_offsets({TopicPartition("t", 0): OffsetSpec.latest()}, isolation_level=level)
        return int(next(iter(asked.values())).result(PATIENCE_S).offset)

    for restart in (False, True):
        if restart:
            semel_broker.kill()
            semel_broker.start()
        assert (end(IsolationLevel.READ_COMMITTED), end(IsolationLevel.READ_UNCOMMITTED)) == (0, 2)
    producer.commit_transaction(30)
    settle(bootstrap)
    assert (end(IsolationLevel.READ_COMMITTED), end(IsolationLevel.READ_UNCOMMITTED)) == (3, 3)
