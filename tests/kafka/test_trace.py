"""A real transaction is shown step by step, on semel's broker by its events, on Apache Kafka by its log."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

import semel
from semel.cli import main
from semel.client import Producer
from semel.client.admin import Admin
from semel.client.immediate import run
from semel.doctor.timeline import NAMES, Timeline, timeline
from tests.support.broker import Cluster
from tests.support.waiting import until

EVENTS = pytest.mark.parametrize("cluster", ["semel"], indirect=True)


@pytest.fixture
def admin(cluster: Cluster) -> Iterator[Admin]:
    with Admin(bootstrap_servers=cluster.bootstrap) as made:
        yield made


def traced(admin: Admin, id_: str) -> Timeline:
    return run(timeline(admin.calls, id_))


def commit_one(cluster: Cluster, admin: Admin, id_: str, topic: str) -> None:
    admin.create_topic(topic, partitions=2)
    with Producer(bootstrap_servers=cluster.bootstrap, transactional_id=id_, client_id="traced") as producer:
        producer.init_transactions()
        with producer.transaction():
            producer.send(topic, b"x", partition=0).result()
            producer.send(topic, b"y", partition=1).result()
            producer.send_offsets_to_transaction({(topic, 0): 1}, semel.client.GroupMetadata("traced"))
    until(lambda: admin.describe_transaction(id_).state == "CompleteCommit", "the transaction is not complete")


def test_a_committed_transaction_has_its_steps_in_order(cluster: Cluster, admin: Admin) -> None:
    id_, topic = cluster.unique("traced"), cluster.unique("steps")
    commit_one(cluster, admin, id_, topic)
    found = traced(admin, id_)
    assert found.now.state == "CompleteCommit"
    shown = [step.step for step in found.steps[found.last :] if step.source != "partition"]
    if cluster.name == "semel":
        assert found.has_events
        # with the second generation partitions are added by writing, and offsets by committing them
        assert shown == ["1", "2", "3", "4.2", "4.2", "4.4", "5.1", "5.1a", "5.2", "5.3"]
    else:
        assert not found.has_events
        assert [shown[0], shown[1], shown[-2], shown[-1]] == ["2", "3", "5.1a", "5.3"]
        assert set(shown[2:-2]) == {"4.1"}
    times = [step.time_ms for step in found.steps if step.time_ms >= 0 and step.source != "partition"]
    assert times == sorted(times)
    markers = [step.text for step in found.steps if step.source == "partition"]
    assert f"{topic}-0: COMMIT at offset 1, epoch {found.now.epoch}" in markers
    assert f"{topic}-1: COMMIT at offset 1, epoch {found.now.epoch}" in markers
    assert {step.step for step in found.steps} <= set(NAMES)


@EVENTS
def test_semels_broker_says_who_asked_and_what_was_refused(cluster: Cluster, admin: Admin) -> None:
    id_, topic = cluster.unique("watched"), cluster.unique("steps")
    commit_one(cluster, admin, id_, topic)
    (first,) = [step for step in traced(admin, id_).steps if step.step == "2"]
    assert first.client.startswith("traced /127.0.0.1")
    assert "as a new owner" in first.text
    with Producer(bootstrap_servers=cluster.bootstrap, transactional_id=id_) as zombie:
        zombie.init_transactions()
        zombie.begin_transaction()
        zombie.send(topic, b"z", partition=0).result()
        admin.abort_transaction(id_)
        with pytest.raises(semel.FencedError):
            zombie.commit_transaction()
    steps = traced(admin, id_).steps
    assert [step.text for step in steps if "new owner" in step.text and step.step == "5.1a"] == [
        f"{topic}-0; PrepareAbort, decided by new owner"
    ]
    assert [step.error for step in steps if step.step == "5.1"][-1] == "PRODUCER_FENCED"


def test_an_open_transaction_is_shown_where_it_holds_back_readers(cluster: Cluster, admin: Admin) -> None:
    id_, topic = cluster.unique("opened"), cluster.unique("steps")
    admin.create_topic(topic, partitions=1)
    with Producer(bootstrap_servers=cluster.bootstrap, transactional_id=id_) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(topic, b"x").result()
        found = traced(admin, id_)
        assert found.now.state == "Ongoing"
        assert [step.text for step in found.steps if step.source == "partition"] == [f"{topic}-0: open since offset 0"]
        assert not any(step.step.startswith("5") for step in found.steps)


def test_the_command_prints_the_steps(cluster: Cluster, admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    id_, topic = cluster.unique("printed"), cluster.unique("steps")
    commit_one(cluster, admin, id_, topic)
    assert main(["trace", "--transactional-id", id_, "-b", cluster.bootstrap]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{id_}: CompleteCommit, producer ")
    assert ("not available" in text) == (cluster.name != "semel")
    assert "  3                  begin" in text
    assert main(["trace", "--transactional-id", id_, "-b", cluster.bootstrap, "--json", "--all"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["step"] for line in lines} >= {"2", "3", "5.1a", "5.3"}
    assert main(["trace", "--transactional-id", "nobody", "-b", cluster.bootstrap]) == 1
    assert "there is no transactional id 'nobody'" in capsys.readouterr().err
