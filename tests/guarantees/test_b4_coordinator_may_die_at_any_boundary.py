"""B4: a coordinator that dies at ANY boundary finishes what was prepared; one that dies with an open transaction lets
its producer go on. Every boundary of commit and of abort, both generations, by kill -9 and by a power cut."""

from __future__ import annotations

from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition

from semel.prove.injection import BROKER_POINTS
from tests.support.crashes import GROUP, SOURCE, TOPICS, MortalBroker, Persistent
from tests.support.reading import read_topic

# In the order in which a transaction meets them. `:n` is the n-th visit since it was armed.
BEFORE_THE_END = [
    "init.before_log",
    "init.after_log",
    "InitProducerId.before_response",
    "InitProducerId.after_response",
    "add.before_log",
    "add.after_log",
    "Produce.before_response",
    "Produce.after_response",
    "add.before_log:2",
    "add.after_log:2",
    "TxnOffsetCommit.before_response",
    "TxnOffsetCommit.after_response",
]
ONLY_V1 = [
    "AddPartitionsToTxn.before_response",
    "AddPartitionsToTxn.after_response",
    "AddOffsetsToTxn.before_response",
    "AddOffsetsToTxn.after_response",
]
THE_END = [
    "prepare_{end}.before_log",
    "prepare_{end}.after_log",
    "EndTxn.before_response",
    "EndTxn.after_response",
    "marker.before",
    "marker.after",
    "marker.before:2",
    "marker.after:2",
    "marker.before:3",
    "marker.after:3",
    "markers.durable",
    "complete_{end}.before_log",
    "complete_{end}.after_log",
]


def boundaries(is_v2: bool, commit: bool) -> list[str]:
    end = "commit" if commit else "abort"
    return [point.format(end=end) for point in [*BEFORE_THE_END, *([] if is_v2 else ONLY_V1), *THE_END]]


def test_no_boundary_is_left_out():
    """Every point of a transaction's life in the table of faults is crashed at by the tests below."""
    crashed = {point.partition(":")[0] for v2 in (True, False) for c in (True, False) for point in boundaries(v2, c)}
    apis = ("InitProducerId.", "AddPartitionsToTxn.", "AddOffsetsToTxn.", "TxnOffsetCommit.", "EndTxn.", "Produce.")
    own = ("init.", "add.", "prepare_", "complete_", "marker")
    assert crashed == {point for point in BROKER_POINTS if point.startswith((*apis, *own))}


CASES = [
    pytest.param(power, is_v2, commit, id=f"{'power cut' if power else 'kill -9'}-TV{1 + is_v2}-{end}")
    for power in (False, True)
    for is_v2 in (False, True)
    for commit, end in ((True, "commit"), (False, "abort"))
]
SHORT = ("kill -9-TV1-abort", "power cut-TV2-commit")  # all of them in the long form below


@pytest.mark.parametrize(("power", "is_v2", "commit"), [case for case in CASES if case.id in SHORT])
def test_transaction_ends_as_decided_when_the_coordinator_dies_at_its_end(
    tmp_path: Path, power: bool, is_v2: bool, commit: bool
):
    run(tmp_path, power, is_v2, commit, [point for point in boundaries(is_v2, commit) if not is_before_the_end(point)])


@pytest.mark.parametrize("is_v2", [pytest.param(False, id="TV1", marks=pytest.mark.full), pytest.param(True, id="TV2")])
def test_open_transaction_goes_on_when_the_coordinator_dies(tmp_path: Path, is_v2: bool):
    run(tmp_path, False, is_v2, True, [point for point in boundaries(is_v2, True) if is_before_the_end(point)])


@pytest.mark.full
@pytest.mark.parametrize(("power", "is_v2", "commit"), CASES)
def test_transaction_ends_as_decided_wherever_the_coordinator_dies(
    tmp_path: Path, power: bool, is_v2: bool, commit: bool
):
    run(tmp_path, power, is_v2, commit, boundaries(is_v2, commit))


def is_before_the_end(point: str) -> bool:
    return point in BEFORE_THE_END or point in ONLY_V1


def run(folder: Path, power: bool, is_v2: bool, commit: bool, points: list[str]) -> None:
    with MortalBroker(folder / "broker", power=power) as broker:
        producer = Persistent(broker, is_v2)
        for topic in (*TOPICS, SOURCE):
            producer.client.create_topic(topic)
        producer.run("id", b"before", 1, commit=True)
        producer.client.settled("id")  # a restart that has to write its markers would meet the fault
        for number, point in enumerate(points):
            name, _, visit = point.partition(":")
            broker.arm(f"{name}:kill:{visit or 1}")
            broker.deaths = 0
            producer = Persistent(broker, is_v2, name)
            producer.run("id", point.encode(), 100 + number, commit=commit)
            assert broker.deaths == 1, f"{point} was not reached"
            state = producer.client.settled("id").transaction_state
            assert state == ("CompleteCommit" if commit else "CompleteAbort"), point
        check(broker.bootstrap, [b"before", *(point.encode() for point in points if commit)], 99 + len(points), commit)


def check(bootstrap: str, expected: list[bytes], last_position: int, commit: bool) -> None:
    """Through a client that we did not write: every committed record once, in order, everywhere; and the position."""
    for topic in TOPICS:
        assert [seen.value for seen in read_topic(bootstrap, topic)] == expected
    reader = Consumer({"bootstrap.servers": bootstrap, "group.id": GROUP, "isolation.level": "read_committed"})
    (position,) = reader.committed([TopicPartition(SOURCE, 0)], 20)
    reader.close()
    assert position.offset == (last_position if commit else 1)
