"""C2: aborted ranges are listed in an index file (`.txnindex`, only where there was an abort); clients filter them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from semel.local.brokers import SemelBroker
from tests.support.crashes import MortalBroker, Persistent
from tests.support.reading import create_topic, read_topic
from tests.support.transactional import transactional, write

ENTRY = struct.Struct(">hqqqq")  # version, producer id, first offset, last offset, last stable offset


def entries(folder: Path, topic: str) -> list[tuple[int, int]]:
    """(first, last) offsets of the aborted transactions that the files of a partition list."""
    found = []
    for path in sorted((folder / f"{topic}-0").glob("*.txnindex")):
        found += [(first, last) for _, _, first, last, _ in ENTRY.iter_unpack(path.read_bytes())]
    return found


@pytest.mark.parametrize("kill", [False, True], ids=["", "over kill -9"])
def test_only_aborts_are_listed(semel_broker: SemelBroker, kill: bool):
    bootstrap, folder = semel_broker.bootstrap, semel_broker.directory
    create_topic(bootstrap, "clean")
    create_topic(bootstrap, "mixed")
    producer = transactional(bootstrap, "id")
    for number in range(6):
        producer.begin_transaction()
        write(producer, [b"%d" % number], "mixed", *(["clean"] if number % 2 else []))
        producer.commit_transaction(30) if number % 2 else producer.abort_transaction(30)
    if kill:
        semel_broker.kill()
        semel_broker.start()
    assert [seen.value for seen in read_topic(bootstrap, "mixed")] == [b"1", b"3", b"5"]
    assert [seen.value for seen in read_topic(bootstrap, "clean")] == [b"1", b"3", b"5"]
    semel_broker.stop()
    assert entries(folder, "mixed") == [(0, 1), (4, 5), (8, 9)]
    assert not [path for path in (folder / "clean-0").glob("*.txnindex") if path.stat().st_size]


@pytest.mark.parametrize("point", ["marker.before", "marker.after", "markers.durable"])
@pytest.mark.parametrize("power", [False, True], ids=["kill -9", "power cut"])
def test_abort_that_the_broker_dies_in_is_listed_all_the_same(tmp_path: Path, point: str, power: bool):
    with MortalBroker(tmp_path / "broker", power=power) as broker:
        for topic in ("left", "right", "source"):
            create_topic(broker.bootstrap, topic)
        broker.arm(f"{point}:kill")
        producer = Persistent(broker, is_v2=False, point=point)
        producer.run("id", b"aborted", 1, commit=False)
        producer.client.settled("id")
        assert broker.deaths == 1
        producer.run("id", b"committed", 2, commit=True)
        for topic in ("left", "right"):
            assert [seen.value for seen in read_topic(broker.bootstrap, topic)] == [b"committed"]
        broker.broker.stop()
        for topic in ("left", "right"):
            assert [first for first, _ in entries(broker.broker.directory, topic)] == [0]
