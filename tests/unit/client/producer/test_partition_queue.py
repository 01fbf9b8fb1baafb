"""Order, retries and epochs of one partition, without a network."""

from __future__ import annotations

import random

import pytest

from semel.client.producer.accumulator import MAX_UNACKED, FailedBatchAction, PartitionQueue
from semel.client.producer.batches import NO_IDENTITY, Identity, ProducerBatch, encode_rows
from semel.protocol.batch import read_header
from semel.protocol.errors import ErrorCode
from semel.protocol.rows import decode_batch

ME = Identity(7, 0)
NEXT = Identity(7, 1)


def batch(count: int = 2, deadline_s: float = 100.0) -> ProducerBatch:
    made = ProducerBatch("t", 0, 0.0, deadline_s)
    made.rows = [(None, b"%d" % i, 1000 + i, ()) for i in range(count)]
    made.count = count
    made.encode(0)
    return made


def queue_of(count: int, known: bool = True, transactional: bool = False) -> PartitionQueue:
    queue = PartitionQueue("t", 0, transactional)
    if known:
        queue.queued.append(batch(1))
        first = send(queue)[0]
        queue.acked(first, 0, -1)
    queue.queued.extend(batch() for _ in range(count))
    return queue


def send(queue: PartitionQueue, identity: Identity = ME, now_s: float = 0.0) -> list[ProducerBatch]:
    """All that may go now."""
    sent = []
    while (taken := queue.next_to_send(now_s, identity)) is not None:
        taken.sent = True
        sent.append(taken)
    return sent


def sequences(batches: list[ProducerBatch]) -> list[int]:
    return [read_header(each.data).base_sequence for each in batches if each.data is not None]


def test_at_most_five_are_on_their_way_with_rising_sequences() -> None:
    queue = queue_of(7)
    sent = send(queue)
    assert len(sent) == MAX_UNACKED
    assert sequences(sent) == [1, 3, 5, 7, 9]
    queue.acked(sent[0], 10, -1)
    assert sequences(send(queue)) == [11]


def test_the_first_batch_of_a_producer_goes_alone() -> None:
    queue = queue_of(3, known=False)
    first = send(queue)
    assert len(first) == 1
    queue.acked(first[0], 0, -1)
    assert len(send(queue)) == 2


def test_without_an_identity_there_are_no_sequences() -> None:
    queue = queue_of(0, known=False)
    queue.queued.extend([batch(), batch()])
    assert sequences(send(queue, NO_IDENTITY)) == [-1, -1]


def test_after_a_failure_the_rest_is_awaited_then_all_go_again_in_order_with_their_stamps() -> None:
    queue = queue_of(4)
    sent = send(queue)
    stamps = sequences(sent)
    assert queue.refused(sent[0], ErrorCode.NETWORK_EXCEPTION, 1.0) is FailedBatchAction.RETRY
    assert send(queue, now_s=5) == []
    assert queue.refused(sent[1], ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, 1.0) is FailedBatchAction.RETRY
    queue.acked(sent[2], 20, -1)
    assert send(queue, now_s=5) == []
    assert queue.refused(sent[3], ErrorCode.NOT_LEADER_OR_FOLLOWER, 1.0) is FailedBatchAction.RETRY
    assert send(queue, now_s=0.5) == [], "the back-off is kept"
    again = send(queue, now_s=5)
    assert again == [sent[0], sent[1], sent[3]]
    assert sequences(again) == [stamps[0], stamps[1], stamps[3]]


@pytest.mark.parametrize("code", [ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, ErrorCode.UNKNOWN_PRODUCER_ID])
def test_a_gap_before_the_first_batch_asks_for_a_new_epoch_and_starts_at_zero(code: ErrorCode) -> None:
    queue = queue_of(3)
    sent = send(queue)
    assert queue.refused(sent[0], code, 0.0) is FailedBatchAction.RAISE_EPOCH
    assert not queue.wants_restart(), "two are still on their way"
    queue.refused(sent[1], ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, 0.0)
    queue.refused(sent[2], ErrorCode.NETWORK_EXCEPTION, 0.0)
    assert queue.wants_restart()
    assert send(queue, ME) == []
    queue.restart(NEXT)
    again = send(queue, NEXT)
    assert again == sent
    assert sequences(again) == [0, 2, 4]
    assert {each.identity for each in again} == {NEXT}


def test_in_a_transaction_a_gap_fails_the_batch() -> None:
    queue = queue_of(2, transactional=True)
    sent = send(queue)
    assert queue.refused(sent[0], ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, 0.0) is FailedBatchAction.FAIL


def test_an_expired_batch_leaves_a_gap_that_a_later_answer_closes() -> None:
    queue = queue_of(2)
    sent = send(queue)
    queue.refused(sent[0], ErrorCode.NETWORK_EXCEPTION, 0.0)
    queue.refused(sent[1], ErrorCode.NETWORK_EXCEPTION, 0.0)
    queue.drop(sent[0])
    assert not queue.wants_restart(), "the second one's fate tells about the first"
    again = send(queue)
    assert again == [sent[1]]
    queue.acked(sent[1], 5, -1)
    assert not queue.gap
    queue.queued.append(batch())
    assert sequences(send(queue)) == [5]


def test_an_expired_batch_with_nothing_behind_it_needs_a_new_epoch() -> None:
    queue = queue_of(1)
    (sent,) = send(queue)
    queue.refused(sent, ErrorCode.NETWORK_EXCEPTION, 0.0)
    queue.drop(sent)
    queue.queued.append(batch())
    assert send(queue) == [], "its sequence may or may not be taken: it is never used for other data"
    assert queue.wants_restart()
    queue.restart(NEXT)
    assert sequences(send(queue, NEXT)) == [0]


def test_batches_of_the_old_epoch_finish_before_the_new_one_starts() -> None:
    queue = queue_of(1)
    (old,) = send(queue)
    queue.queued.append(batch())
    assert send(queue, NEXT) == []
    queue.acked(old, 1, -1)
    (new,) = send(queue, NEXT)
    assert (new.identity, sequences([new])) == (NEXT, [0])


def test_a_batch_that_is_too_large_is_split_in_its_place() -> None:
    queue = queue_of(0)
    queue.queued.extend([batch(5), batch(2)])
    large, small = send(queue)
    assert queue.refused(large, ErrorCode.MESSAGE_TOO_LARGE, 0.0) is FailedBatchAction.SPLIT
    queue.refused(small, ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, 0.0)
    again = send(queue)
    assert [each.count for each in again] == [2, 3, 2]
    assert sequences(again) == [1, 3, 6]
    values = [record.value for each in again[:2] if each.data is not None for record in decode_batch(each.data).records]
    assert values == [b"%d" % i for i in range(5)]
    queue.acked(again[0], 100, -1)
    assert not large.done
    queue.acked(again[1], 200, -1)
    assert large.done
    assert [large.part_with(i)[0].base_offset + large.part_with(i)[1] for i in range(5)] == [100, 101, 200, 201, 202]


def test_one_record_that_is_too_large_fails() -> None:
    queue = queue_of(0)
    queue.queued.append(batch(1))
    (sent,) = send(queue)
    assert queue.refused(sent, ErrorCode.MESSAGE_TOO_LARGE, 0.0) is FailedBatchAction.FAIL


def test_expired_batches_are_those_past_their_time_without_a_question_open() -> None:
    queue = queue_of(0)
    queue.queued.extend([batch(deadline_s=5), batch(deadline_s=5), batch(deadline_s=50)])
    first = queue.next_to_send(0, ME)
    assert first is not None
    first.sent = True
    assert queue.expired(4) == []
    assert len(queue.expired(6)) == 1
    first.sent = False
    assert len(queue.expired(6)) == 2


@pytest.mark.parametrize("seed", range(30))
def test_a_random_broker_never_sees_a_sequence_with_two_meanings(seed: int) -> None:
    """A model of the broker's rules answers at random, loses answers, and forgets; its log must be the input."""
    rng = random.Random(seed)
    queue = PartitionQueue("t", 0)
    pending = [batch(rng.randrange(1, 4)) for _ in range(40)]
    names = {id(each): number for number, each in enumerate(pending)}
    identity = ME
    log: list[int] = []
    meanings: dict[tuple[Identity | None, int], int] = {}
    last: dict[Identity | None, int] = {}
    on_the_way: list[tuple[ProducerBatch, bool | None]] = []
    now_s = 0.0
    while pending or not queue.is_empty:
        now_s += 1
        if pending and rng.random() < 0.5:
            queue.queued.append(pending.pop(0))
        if queue.wants_restart():
            if queue.identity == identity:
                identity = Identity(identity.producer_id, identity.epoch + 1)
            queue.restart(identity)
        for each in send(queue, identity, now_s):
            name = names[id(each)]
            assert meanings.setdefault((each.identity, each.sequence), name) == name
            on_the_way.append((each, None))
        if not on_the_way:
            continue
        each, _ = on_the_way.pop(0)
        name = names[id(each)]
        if name in log:  # the broker's deduplication
            verdict = True
        elif rng.random() < 0.2:
            verdict = False
        else:
            verdict = each.sequence == (last[each.identity] + 1 if each.identity in last else 0)
            if verdict:
                log.append(name)
                last[each.identity] = each.sequence + each.count - 1
            else:
                queue_says = queue.refused(each, ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, now_s)
                assert queue_says in (FailedBatchAction.RETRY, FailedBatchAction.RAISE_EPOCH)
                continue
        if verdict and rng.random() < 0.8:
            queue.acked(each, name, -1)
        else:
            queue.refused(each, ErrorCode.NETWORK_EXCEPTION, now_s)
    assert log == list(range(40)), f"seed {seed}"


def test_rows_are_encoded_alike_by_rows_and_by_columns() -> None:
    rows = [(b"k%d" % i if i % 3 else None, b"v" * i if i % 5 else None, 1000 + i * 7, ()) for i in range(200)]
    few = [
        record for at in range(0, 200, 10) for record in decode_batch(encode_rows(rows[at : at + 10], 0, False)).records
    ]
    many = decode_batch(encode_rows(rows, 0, False)).records
    assert [(r.key, r.value, r.timestamp) for r in few] == [(r.key, r.value, r.timestamp) for r in many]
    same_time = [(None, b"x", 5, ()) for _ in range(100)]
    assert len(decode_batch(encode_rows(same_time, 4, False)).records) == 100
