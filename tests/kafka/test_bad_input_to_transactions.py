"""Wrong, empty and strange requests about transactions: Kafka and semel give the same codes, and nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.raw_client import NOT_READY, RawClient, eventually
from semel.local.apache_kafka import ApacheKafka
from semel.local.brokers import SemelBroker
from semel.protocol.messages.transactions import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnTopic,
    AddPartitionsToTxnTransaction,
    DescribeTransactionsRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    ListTransactionsRequest,
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
    WritableTxnMarker,
    WritableTxnMarkerTopic,
    WriteTxnMarkersRequest,
)

pytestmark = pytest.mark.kafka
OWNER, IDLE, TOPIC, OTHER, GROUP = "bad-input-owner", "bad-input-idle", "bad-input", "bad-input-2", "bad-input-group"
NO_ONES = 12_345_678  # producer id: tests that share the brokers have written with the first few


class Stage:
    """One broker, with an id that has a transaction open and one that has none."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self.client = client = RawClient(bootstrap)
        for topic in (TOPIC, OTHER):
            client.create_topic(topic)
        for id_ in (OWNER, IDLE):
            client.ready(id_, GROUP)
        self.owner = eventually(lambda: client.init(OWNER), done=lambda owner: owner.error not in NOT_READY)
        self.owner = client.init(OWNER)  # so that there is an epoch before its own
        self.idle = eventually(lambda: client.init(IDLE), done=lambda owner: owner.error not in NOT_READY)
        client.add_partitions(OWNER, self.owner.producer_id, self.owner.epoch, [(TOPIC, 0)])
        client.produce(OWNER, self.owner.producer_id, self.owner.epoch, (TOPIC, 0), [b"open"])

    @property
    def who(self) -> tuple[str, int, int]:
        return OWNER, self.owner.producer_id, self.owner.epoch

    def state(self) -> Any:
        txn, other = self.client.describe(OWNER), self.client.describe(IDLE)
        fetched = self.client.fetch((TOPIC, 0))
        return (
            (txn.transaction_state, txn.producer_epoch, [(t.topic, t.partitions) for t in txn.topics]),
            (other.transaction_state, other.producer_epoch),
            (fetched.values, fetched.high_watermark, fetched.last_stable_offset),
        )


def offsets(who: tuple[str, int, int], group: str, topic: str, metadata: str = "", **member: Any) -> Any:
    id_, producer_id, epoch = who
    partition = TxnOffsetCommitRequestPartition(0, 5, committed_metadata=metadata)
    topics = [TxnOffsetCommitRequestTopic(topic, [partition])]
    return TxnOffsetCommitRequest(id_, group, producer_id, epoch, topics=topics, **member)


def marker(producer_id: int, epoch: int, *topics: str, coordinator_epoch: int = 0) -> WriteTxnMarkersRequest:
    named = [WritableTxnMarkerTopic(topic, [0]) for topic in topics]
    return WriteTxnMarkersRequest([WritableTxnMarker(producer_id, epoch, False, named, coordinator_epoch)])


def marker_codes(answer: Any) -> Any:
    return [[(t.name, [p.error_code for p in t.partitions]) for t in result.topics] for result in answer.markers]


def many(version: int, *transactions: AddPartitionsToTxnTransaction) -> Callable[[Stage], Any]:
    def ask(stage: Stage) -> Any:
        answer = stage.client.call(24, version, AddPartitionsToTxnRequest(transactions=list(transactions)))
        return answer.error_code, [
            (
                r.transactional_id,
                [(t.name, [p.partition_error_code for p in t.results_by_partition]) for t in r.topic_results],
            )
            for r in answer.results_by_transaction
        ]

    return ask


def init(
    version: int, id_: str | None, timeout_ms: int = 60_000, pid: int = -1, epoch: int = -1
) -> Callable[[Stage], Any]:
    def ask(stage: Stage) -> Any:
        answer = stage.client.call(22, version, InitProducerIdRequest(id_, timeout_ms, pid, epoch))
        return answer.error_code, answer.producer_id >= 0, answer.producer_epoch

    return ask


def listed(**filters: Any) -> Callable[[Stage], Any]:
    def ask(stage: Stage) -> Any:
        answer = stage.client.call(66, 2, ListTransactionsRequest(**filters))
        ours = [t for t in answer.transaction_states if t.transactional_id in (OWNER, IDLE)]
        found = sorted((t.transactional_id, t.transaction_state) for t in ours)
        return answer.error_code, answer.unknown_state_filters, found

    return ask


def described(*ids: str) -> Callable[[Stage], Any]:
    def ask(stage: Stage) -> Any:
        answer = stage.client.call(65, 0, DescribeTransactionsRequest(list(ids)))
        return [(t.transactional_id, t.error_code, t.transaction_state) for t in answer.transaction_states]

    return ask


def topics_of(answer: Any) -> Any:
    return [(t.name, [p.error_code for p in t.partitions]) for t in answer.topics]


CASES: dict[str, Callable[[Stage], Any]] = {
    **{f"init without id v{v}": init(v, None, 0) for v in range(6)},
    **{f"init with an empty id v{v}": init(v, "") for v in range(6)},
    **{f"init with timeout {t}": init(4, OWNER, t) for t in (0, -1, 900_001, 2**31 - 1)},
    "init with only a producer id": init(4, OWNER, pid=5),
    "init with only an epoch": init(4, OWNER, epoch=5),
    "init without id but with only an epoch": init(4, None, epoch=5),
    "init with a foreign producer id": init(4, OWNER, pid=NO_ONES, epoch=0),
    "init with a foreign producer id, old client": init(3, OWNER, pid=NO_ONES, epoch=0),
    **{
        f"end of {id_!r} v{v}": lambda s, v=v, id_=id_: s.client.call(26, v, EndTxnRequest(id_, 1, 0, True)).error_code
        for v in (1, 3, 5)
        for id_ in ("", "nobody")
    },
    **{
        f"end of nothing v{v} commit={c}": lambda s, v=v, c=c: (
            s.client.end(IDLE, s.idle.producer_id, s.idle.epoch, commit=c, version=v).error.name
        )
        for v in (1, 3, 4)
        for c in (True, False)
    },
    "commit of nothing v5": lambda s: s.client.end(IDLE, s.idle.producer_id, s.idle.epoch, commit=True, version=5)[0],
    **{f"add nothing v{v}": lambda s, v=v: s.client.add_partitions(*s.who, [], version=v) for v in (0, 3)},
    **{
        f"add to {id_!r}": lambda s, id_=id_: list(s.client.add_partitions(id_, 1, 0, [(TOPIC, 0)]).values())
        for id_ in ("", "nobody")
    },
    "add an unknown partition": lambda s: sorted(s.client.add_partitions(*s.who, [(TOPIC, 7), (OTHER, 0)]).items()),
    "add a negative partition": lambda s: sorted(s.client.add_partitions(*s.who, [(TOPIC, -1)]).items()),
    **{
        f"add offsets, id {id_!r}, group {group!r}": lambda s, id_=id_, group=group: (
            s.client.call(25, 3, AddOffsetsToTxnRequest(id_, 1, 0, group)).error_code
        )
        for id_ in ("", "nobody")
        for group in ("", GROUP)
    },
    **{
        f"offsets to {what} v{v}": lambda s, v=v, request=request: topics_of(s.client.call(28, v, request(s)))
        for v in (0, 3, 4, 5)
        for what, request in {
            "an unknown topic": lambda s: offsets(s.who, GROUP, "no-such-topic"),
            "an empty group": lambda s: offsets(s.who, "", TOPIC),
            "a group from an empty id": lambda s: offsets(("", NO_ONES, 0), GROUP, TOPIC),
            "a group from an unknown id": lambda s: offsets(("nobody", NO_ONES, 0), GROUP, TOPIC),
            "a group with an older epoch": lambda s: offsets((*s.who[:2], s.owner.epoch - 1), GROUP, TOPIC),
            "a group with a foreign epoch": lambda s: offsets((*s.who[:2], 9), GROUP, TOPIC),
        }.items()
    },
    "add in bulk, unknown id": many(
        4, AddPartitionsToTxnTransaction("nobody", 1, 0, False, [AddPartitionsToTxnTopic(TOPIC, [0])])
    ),
    "verify in bulk, unknown id": many(
        5, AddPartitionsToTxnTransaction("nobody", 1, 0, True, [AddPartitionsToTxnTopic(TOPIC, [0])])
    ),
    "add in bulk, two ids, unknown topic": many(
        5,
        AddPartitionsToTxnTransaction("nobody", 1, 0, False, [AddPartitionsToTxnTopic("no-such-topic", [0])]),
        AddPartitionsToTxnTransaction("nobody-2", 1, 0, True, [AddPartitionsToTxnTopic(TOPIC, [0])]),
    ),
    "marker to an unknown topic": lambda s: marker_codes(s.client.call(27, 1, marker(1, 0, "no-such-topic"))),
    "marker with an old epoch": lambda s: marker_codes(
        s.client.call(27, 1, marker(s.owner.producer_id, s.owner.epoch - 1, TOPIC))
    ),
    "markers of nobody": lambda s: marker_codes(s.client.call(27, 1, WriteTxnMarkersRequest([]))),
    "write without an id": lambda s: (
        s.client.produce(None, s.owner.producer_id, s.owner.epoch, (OTHER, 0), [b"x"]).error.name
    ),
    **{
        f"write with id {id_!r} v{v}": lambda s, v=v, id_=id_: (
            s.client.produce(id_, s.owner.producer_id, s.owner.epoch, (OTHER, 0), [b"x"], version=v).error.name
        )
        for v in (9, 11, 12)
        for id_ in ("", "nobody", IDLE)
    },
    **{
        f"write to a partition that was not added v{v}": lambda s, v=v: (
            s.client.produce(*s.who, (OTHER, 0), [b"x"], version=v).error.name
        )
        for v in (3, 9, 10, 11)
    },
    "write outside of a transaction while one is open": lambda s: s.client.produce(
        None, s.owner.producer_id, s.owner.epoch, (TOPIC, 0), [b"x"], sequence=1, transactional=False
    )[0],
    "describe nothing": described(),
    "describe strange ids": described("", "nobody", OWNER),
    "list all": listed(),
    "list unknown states": listed(state_filters=["Ongoing", "Sleeping"]),
    "list ongoing": listed(state_filters=["Ongoing"]),
    "list a producer id": lambda s: listed(producer_id_filters=[s.owner.producer_id])(s),
    "list long ones": listed(duration_filter=3_600_000),
    "list any duration": listed(duration_filter=0),
    "list by pattern": listed(transactional_id_pattern="bad-input-o.*"),
    "list by part of a name": listed(transactional_id_pattern="owner"),
    "list by an empty pattern": listed(transactional_id_pattern=""),
    "list by a pattern that is none": listed(transactional_id_pattern="(("),
}


@pytest.fixture(scope="module")
def stages(kafka_installation: Path, apache_kafka: ApacheKafka, shared_semel_broker: SemelBroker) -> list[Stage]:
    return [Stage(apache_kafka.bootstrap), Stage(shared_semel_broker.bootstrap)]


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_answered_as_kafka_does_and_changes_nothing(case: str, stages: list[Stage]):
    before = [stage.state() for stage in stages]
    assert before[0] == before[1]
    answers = []
    for stage in stages:
        try:
            answers.append(CASES[case](stage))
        except EOFError:
            answers.append("connection closed")
            stage.client = RawClient(stage.bootstrap)
    assert answers[0] == answers[1], f"kafka {answers[0]}, semel {answers[1]}"
    assert [stage.state() for stage in stages] == before
