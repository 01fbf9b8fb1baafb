"""A4: a gap is refused with OUT_OF_ORDER_SEQUENCE_NUMBER; inside a transaction it forces an abort."""

from __future__ import annotations

from semel.protocol.errors import ErrorCode, Recovery
from semel.protocol.messages.transactions import (
    ADD_PARTITIONS_TO_TXN,
    END_TXN,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnTopic,
    EndTxnRequest,
)
from tests.support.broker import Cluster
from tests.support.direct import DirectClient, batch_of
from tests.support.reading import read_values
from tests.support.waiting import eventually


def test_a_gap_is_refused_and_changes_nothing(cluster: Cluster) -> None:
    topic = cluster.unique("a4")
    with DirectClient(cluster.bootstrap) as client:
        client.create_topic(topic)
        pid, epoch = client.new_producer()
        assert client.produce(topic, batch_of([b"0"], pid=pid, epoch=epoch, sequence=0)) == (0, 0)
        gap = client.produce(topic, batch_of([b"2"], pid=pid, epoch=epoch, sequence=2))
        assert gap[0] is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        assert client.produce(topic, batch_of([b"1"], pid=pid, epoch=epoch, sequence=1)) == (0, 1)
    assert [value for _, _, value in read_values(cluster.bootstrap, topic)] == [b"0", b"1"]


def test_a_gap_in_a_transaction_asks_for_an_abort_after_which_nothing_is_visible(cluster: Cluster) -> None:
    topic, txn = cluster.unique("a4"), cluster.unique("a4-txn")
    with DirectClient(cluster.bootstrap) as client:
        client.create_topic(topic)
        pid, epoch = client.new_producer(txn)
        add = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=txn,
            v3_and_below_producer_id=pid,
            v3_and_below_producer_epoch=epoch,
            v3_and_below_topics=[AddPartitionsToTxnTopic(name=topic, partitions=[0])],
        )
        assert eventually(
            lambda: client.call(ADD_PARTITIONS_TO_TXN, add, 3), lambda r: _added(r) not in (51, 14, 15, 16)
        )
        first = batch_of([b"0"], pid=pid, epoch=epoch, sequence=0, transactional=True)
        assert (
            eventually(lambda: client.produce(topic, first, transactional_id=txn), lambda r: not r[0].retriable)[0] == 0
        )
        gap = batch_of([b"5"], pid=pid, epoch=epoch, sequence=5, transactional=True)
        code, _ = client.produce(topic, gap, transactional_id=txn)
        assert code is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        assert code.recovery is Recovery.ABORT
        end = EndTxnRequest(transactional_id=txn, producer_id=pid, producer_epoch=epoch, committed=False)
        assert eventually(lambda: client.call(END_TXN, end, 3).error_code, lambda code: code != 51) == 0
    assert read_values(cluster.bootstrap, topic) == []


def _added(answer) -> int:
    return answer.results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code
