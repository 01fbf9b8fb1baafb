"""B2: a transactional id is a lasting identity. The next owner gets a higher epoch, finishes or aborts what its
predecessor left, and the predecessor (a zombie, paused or cut off) is refused everywhere and told so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.peers.raw_client import RawClient, eventually
from semel.local.brokers import SemelBroker
from semel.local.processes import Process
from semel.protocol.errors import ErrorCode as E
from tests.support.crashes import MortalBroker
from tests.support.reading import create_topic, read_topic
from tests.support.transactional import FENCED, transactional, write


@pytest.mark.parametrize("kill", [False, True], ids=["", "the broker is killed too"])
def test_frozen_producer_is_refused_after_another_took_its_id(semel_broker: SemelBroker, kill: bool):
    bootstrap = semel_broker.bootstrap
    create_topic(bootstrap, "t")
    command = [sys.executable, "-m", "tests.guarantees.frozen_producer", bootstrap, "id", "t", "60000"]
    with Process(command, stdin=True) as zombie:
        zombie.wait_for_line("^open$", 40)
        zombie.pause()
        assert b"frozen" in [seen.value for seen in read_topic(bootstrap, "t", "read_uncommitted")]
        owner = transactional(bootstrap, "id")
        owner.begin_transaction()
        write(owner, [b"owner"], "t")
        owner.commit_transaction(30)
        if kill:
            semel_broker.kill()
            semel_broker.start()
        zombie.resume()
        zombie.write("go\n")
        refused = zombie.wait_for_line(r"^(committed|refused (-?\d+))$", 60)
        assert refused[2] is not None, refused[0]
        assert int(refused[2]) in FENCED
    assert [seen.value for seen in read_topic(bootstrap, "t")] == [b"owner"]


@pytest.mark.parametrize("is_v2", [False, True], ids=["TV1", "TV2"])
@pytest.mark.parametrize("kill", [False, True], ids=["", "after kill -9"])
def test_zombie_is_refused_everywhere(semel_broker: SemelBroker, is_v2: bool, kill: bool):
    client = RawClient(semel_broker.bootstrap)
    client.create_topic("t")
    zombie = client.init("id")
    owner = client.init("id")
    assert (owner.producer_id, owner.epoch) == (zombie.producer_id, zombie.epoch + 1)
    assert client.add_partitions("id", owner.producer_id, owner.epoch, [("t", 0)]) == {("t", 0): E.NONE}
    if kill:
        semel_broker.kill()
        semel_broker.start()
        client = RawClient(semel_broker.bootstrap)
    who = ("id", zombie.producer_id, zombie.epoch)
    write_version, end_version, offsets_version = (12, 5, 5) if is_v2 else (11, 3, 3)
    assert client.produce(*who, ("t", 0), [b"zombie"], version=write_version).error is E.INVALID_PRODUCER_EPOCH
    assert client.add_partitions(*who, [("t", 0)]) == {("t", 0): E.PRODUCER_FENCED}
    assert client.add_offsets(*who, "g") is E.PRODUCER_FENCED
    refused = client.commit_offsets(*who, "g", {("t", 0): 1}, version=offsets_version)
    assert refused == {("t", 0): E.INVALID_PRODUCER_EPOCH}
    for commit in (True, False):
        assert client.end(*who, commit=commit, version=end_version).error is E.PRODUCER_FENCED
    assert client.init("id", expected=(zombie.producer_id, zombie.epoch)).error is E.PRODUCER_FENCED
    assert client.describe("id").transaction_state == "Ongoing", "the owner's transaction is still its own"
    assert client.end("id", owner.producer_id, owner.epoch, commit=True).error is E.NONE
    assert read_topic(semel_broker.bootstrap, "t") == []


@pytest.mark.parametrize(
    ("point", "visible"),
    [
        ("prepare_commit.before_log", []),
        ("prepare_commit.after_log", [b"left behind"]),
        ("marker.after", [b"left behind"]),
    ],
)
def test_next_owner_finishes_or_aborts_what_its_predecessor_left(tmp_path: Path, point: str, visible: list[bytes]):
    with MortalBroker(tmp_path / "broker") as broker:
        create_topic(broker.bootstrap, "t")
        broker.arm(f"{point}:kill")
        with RawClient(broker.bootstrap) as client:
            owner = client.init("id")
            who = ("id", owner.producer_id, owner.epoch)
            client.add_partitions(*who, [("t", 0)])
            assert client.produce(*who, ("t", 0), [b"left behind"]).error is E.NONE
            client.send(26, 3, _end(*who))
            broker.die_and_return(point)
        new_owner = transactional(broker.bootstrap, "id")
        new_owner.begin_transaction()
        write(new_owner, [b"new owner"], "t")
        new_owner.commit_transaction(30)
        assert [seen.value for seen in read_topic(broker.bootstrap, "t")] == [*visible, b"new owner"]
        with RawClient(broker.bootstrap) as client:
            epoch = eventually(lambda: client.describe("id"), done=lambda txn: txn.error_code == 0).producer_epoch
            assert epoch > owner.epoch


def _end(id_: str, producer_id: int, epoch: int):
    from semel.protocol.messages.transactions import EndTxnRequest

    return EndTxnRequest(id_, producer_id, epoch, True)
