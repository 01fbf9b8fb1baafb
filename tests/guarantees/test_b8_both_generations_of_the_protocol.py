"""B8: both generations of the protocol: classic (TV1) and KIP-890 (TV2, the epoch is bumped on every end)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from confluent_kafka import Producer

from benchmarks.peers.raw_client import RawClient
from semel.local.apache_kafka import start_tool
from semel.local.brokers import SemelBroker
from semel.protocol.errors import ErrorCode as E
from tests.support.broker import faulty_semel
from tests.support.crashes import MortalBroker
from tests.support.reading import create_topic, read_topic
from tests.support.transactional import transactional, write

RECORDS = 300


def epoch_of(bootstrap: str, id_: str) -> int:
    with RawClient(bootstrap) as client:
        return client.settled(id_).producer_epoch


def test_classic_client_keeps_its_epoch_over_kill_9(semel_broker: SemelBroker):
    bootstrap = semel_broker.bootstrap
    create_topic(bootstrap, "t")
    producer = transactional(bootstrap, "classic")
    first = epoch_of(bootstrap, "classic")
    for number in range(4):
        producer.begin_transaction()
        write(producer, [b"%d" % number], "t")
        if number == 2:
            semel_broker.kill()
            semel_broker.start()
        producer.commit_transaction(30)
    assert epoch_of(bootstrap, "classic") == first
    assert [seen.value for seen in read_topic(bootstrap, "t")] == [b"0", b"1", b"2", b"3"]


@pytest.mark.kafka
def test_java_client_bumps_its_epoch_with_every_end_and_survives_kill_9(
    semel_broker: SemelBroker, kafka_installation: Path
):
    """Kafka's own copier, with aborts at random: consume, process, produce and positions in one transaction."""
    bootstrap = semel_broker.bootstrap
    create_topic(bootstrap, "in")
    create_topic(bootstrap, "out")
    source = Producer({"bootstrap.servers": bootstrap})  # without transactions: the copier takes markers for records
    write(source, [b"%04d" % n for n in range(RECORDS)], "in")
    with start_tool(
        "org.apache.kafka.tools.TransactionalMessageCopier",
        "--broker-list", bootstrap, "--input-topic", "in", "--input-partition", "0", "--output-topic", "out",
        "--consumer-group", "copier", "--transactional-id", "java", "--transaction-size", "10",
        "--enable-random-aborts",
    ) as copier:  # fmt: skip
        copier.wait_for_line(r'"consumed":\s*"?\d\d', 60)
        semel_broker.kill()
        semel_broker.start()
        assert copier.wait(120) == 0, copier.output[-2000:]
    assert [seen.value for seen in read_topic(bootstrap, "out")] == [b"%04d" % n for n in range(RECORDS)]
    ends = RECORDS // 10
    assert epoch_of(bootstrap, "java") >= ends, "every commit and every abort took an epoch"
    assert re.search(r'"remaining":\s*"?0', copier.output)


@pytest.mark.parametrize("is_v2", [False, True], ids=["TV1", "TV2"])
def test_lost_response_of_an_end_is_found_out_after_a_death(tmp_path: Path, is_v2: bool):
    version = 5 if is_v2 else 3
    with MortalBroker(tmp_path / "broker") as broker:
        create_topic(broker.bootstrap, "t")
        broker.arm("EndTxn.before_response:kill")
        with RawClient(broker.bootstrap) as client:
            owner = client.init("id")
            who = ("id", owner.producer_id, owner.epoch)
            client.add_partitions(*who, [("t", 0)])
            assert client.produce(*who, ("t", 0), [b"value"]).error is E.NONE
            with pytest.raises(EOFError):
                client.end(*who, commit=True, version=version)
        broker.die_and_return("EndTxn.before_response")
        with RawClient(broker.bootstrap) as client:
            client.settled("id")
            again = client.end(*who, commit=True, version=version)
            assert again == (E.NONE, owner.producer_id, owner.epoch + is_v2)
            assert client.end(*who, commit=False, version=version).error is E.INVALID_TXN_STATE
        assert [seen.value for seen in read_topic(broker.bootstrap, "t")] == [b"value"]


def test_next_transaction_may_write_while_the_markers_of_the_last_one_are_on_their_way(tmp_path: Path):
    """An EndTxn is answered before its markers. A TV2 producer may then write to a partition that still lacks one."""
    late = faulty_semel("marker.before:delay=50")
    with SemelBroker(tmp_path / "broker", semel=late) as broker, RawClient(broker.bootstrap) as client:
        create_topic(broker.bootstrap, "t")
        owner = client.init("id")
        for value in (b"first", b"second"):
            who = ("id", owner.producer_id, owner.epoch)
            assert client.produce(*who, ("t", 0), [value], version=12).error is E.NONE
            owner = client.end(*who, commit=True, version=5)
        broker.process.wait_for_line("fault fired: marker.before")
        assert [seen.value for seen in read_topic(broker.bootstrap, "t")] == [b"first", b"second"]
