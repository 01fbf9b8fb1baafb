"""`semel topic`, `semel group` and `semel txn` on a real broker."""

from __future__ import annotations

import json

import pytest

from semel.client.consumer import Consumer
from semel.client.producer import Producer
from semel.local.brokers import SemelBroker
from tests.unit.cli.test_records import Run, run, ten, topic

__all__ = ["run", "ten", "topic"]  # fixtures


def objects(done) -> list[dict]:
    assert done.code == 0, done
    return [json.loads(line) for line in done.lines]


# --- topics ---


def test_topics_are_created_described_altered_and_deleted(run: Run, topic: str) -> None:
    name = f"{topic}-made"
    assert objects(run("topic", "create", name, "-p", "2", "--config", "retention.ms=5000", "-J")) == [
        {"topic": name, "created": True}
    ]
    assert run("topic", "create", name).code == 1
    assert run("topic", "create", name, "--if-not-exists").out == f"{name}: was there already\n".encode()
    (described,) = objects(run("topic", "describe", name, "-J"))
    assert len(described["partitions"]) == 2
    assert described["configs"]["retention.ms"] == "5000"
    assert run("topic", "alter", name, "-p", "4", "--unset", "retention.ms").code == 0
    (described,) = objects(run("topic", "describe", name, "-J"))
    assert len(described["partitions"]) == 4
    assert "retention.ms" not in described["configs"]
    assert {"topic": name} in objects(run("topic", "list", "-J"))
    assert run("topic", "delete", name).code == 0
    assert run("topic", "delete", name).code == 1
    assert run("topic", "delete", name, "--if-exists").code == 0


def test_description_for_people_is_a_table(run: Run, ten: str) -> None:
    head, columns, row = run("topic", "describe", ten).out.decode().splitlines()
    assert head.startswith(f"{ten}: 1 partitions")
    assert columns.split() == ["partition", "leader", "replicas", "in", "sync", "first", "end"]
    assert row.split()[-2:] == ["0", "10"]


@pytest.mark.parametrize("action", [["delete"], ["alter", "-p", "9"], ["alter", "--config", "retention.ms=1"]])
def test_topics_that_are_not_there_are_named_before_others_change(run: Run, topic: str, action: list[str]) -> None:
    done = run("topic", action[0], topic, "no-such-topic", *action[1:])
    assert done.code == 1
    assert done.err == "semel: there is no topic 'no-such-topic'; `semel topic list` shows what there is\n"
    described = json.loads(run("topic", "describe", topic, "-J").out)
    assert len(described["partitions"]) < 9
    assert "retention.ms" not in described["configs"]


def test_altering_nothing_is_wrong_usage(run: Run, topic: str) -> None:
    assert run("topic", "alter", topic).code == 2
    assert run("topic", "create", f"{topic}-x", "--config", "novalue").code == 2
    assert run("topic").code == 2


# --- groups ---


@pytest.fixture
def group(run: Run, ten: str) -> str:
    """A group that has read 6 of 10."""
    name = f"{ten}-group"
    assert run("consume", ten, "-G", name, "-c", "6").code == 0
    return name


def test_lag_is_shown(run: Run, ten: str, group: str) -> None:
    (described,) = objects(run("group", "describe", group, "-J"))
    (offset,) = described["offsets"]
    assert (offset["topic"], offset["committed"], offset["end"], offset["lag"]) == (ten, 6, 10, 4)
    assert f"{group}: Empty, 0 members" in run("group", "describe", group).out.decode()
    assert group in {entry["group_id"] for entry in objects(run("group", "list", "-J"))}


@pytest.mark.parametrize(
    ("to", "expected"),
    [
        (["--to-earliest"], 0),
        (["--to-latest"], 10),
        (["--to-offset", "3"], 3),
        (["--to-offset", "300"], 10),
        (["--shift-by", "-2"], 4),
        (["--shift-by", "-20"], 0),
        (["--to-time", "1"], 0),
        (["--to-time", "2100-01-01T00:00:00"], 10),
    ],
)
def test_offsets_are_moved(run: Run, ten: str, group: str, to: list[str], expected: int) -> None:
    (told,) = objects(run("group", "reset", group, *to, "-J", "--dry-run"))
    assert (told["before"], told["after"]) == (6, expected)
    (described,) = objects(run("group", "describe", group, "-J"))
    assert described["offsets"][0]["committed"] == 6, "a dry run changes nothing"
    assert run("group", "reset", group, "--topic", f"{ten}:0", *to).code == 0
    (described,) = objects(run("group", "describe", group, "-J"))
    assert described["offsets"][0]["committed"] == expected


def test_group_in_use_is_not_moved_or_deleted(run: Run, ten: str, group: str, shared_semel_broker: SemelBroker) -> None:
    with Consumer(bootstrap_servers=shared_semel_broker.bootstrap, group_id=group) as consumer:
        consumer.subscribe([ten])
        while not consumer.assignment():
            consumer.poll(100)
        for command in (["reset", group, "--to-earliest"], ["delete", group]):
            done = run("group", *command)
            assert done.code == 1
            assert "has members" in done.err
    assert run("group", "delete", group).code == 0
    assert run("group", "delete", group).code == 1
    assert "no group" in run("group", "describe", group).err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["reset", "{group}", "--to-earliest", "--to-latest"], 2),
        (["reset", "{group}"], 2),
        (["reset", "{group}", "--topic", "{topic}:x", "--to-earliest"], 2),
        (["reset", "{group}", "--topic", "{topic}:9", "--to-earliest"], 1),
        (["reset", "{group}", "--topic", "nope", "--to-earliest"], 1),
        (["reset", "no-such-group", "--to-earliest"], 1),
        (["reset", "{group}", "--to-time", "noon"], 2),
    ],
)
def test_impossible_resets_are_refused(run: Run, ten: str, group: str, arguments: list[str], code: int) -> None:
    done = run("group", *(argument.format(group=group, topic=ten) for argument in arguments))
    assert done.code == code, done
    assert done.err.strip()


# --- transactions ---


def test_open_transaction_is_listed_described_and_aborted(
    run: Run, topic: str, shared_semel_broker: SemelBroker
) -> None:
    with Producer(bootstrap_servers=shared_semel_broker.bootstrap, transactional_id=f"{topic}-t") as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(topic, b"x").result()
        listed = objects(run("txn", "list", "--state", "Ongoing", "-J"))
        assert f"{topic}-t" in {entry["transactional_id"] for entry in listed}
        (described,) = objects(run("txn", "describe", f"{topic}-t", "-J"))
        assert (described["state"], described["partitions"]) == ("Ongoing", [[topic, 0]])
        assert "Ongoing for" in run("txn", "describe", f"{topic}-t").out.decode()
        assert run("txn", "abort", f"{topic}-t").code == 0
        (described,) = objects(run("txn", "describe", f"{topic}-t", "-J"))
        assert described["partitions"] == []
    assert run("txn", "list", "--two-phase").out.count(b"\n") == 1, "this broker does not have any"
    assert run("txn", "describe", "nobody").code == 1
    assert run("txn", "abort").code == 2
    assert run("txn", "abort", "--topic", topic).code == 2
    assert "no open transaction" in run("txn", "abort", "--topic", topic, "--partition", "0", "--start-offset", "0").err
