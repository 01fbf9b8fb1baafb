"""What a producer decides, in virtual time: no thread, no socket, no clock.

The broker is a model (`tests/simulation/log_model.py`); what comes when is written in the test, or decided by a seed.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from semel.client.errors import (
    AbortableError,
    ClosedError,
    CommitUncertainError,
    ConnectionFailedError,
    DeliveryTimedOutError,
    FencedError,
    IllegalStateError,
    KafkaError,
    RetriableError,
    TimedOutError,
)
from semel.client.producer.accumulator import PartitionQueue
from semel.client.producer.batches import Identity, ProducerBatch
from semel.client.producer.core import MOVED, Produce, ProducerCore
from semel.client.producer.identities import (
    LAST_EPOCH,
    FixedIdentity,
    IdempotentIdentity,
    WriteIdentity,
)
from semel.client.producer.transaction import TransactionCore
from semel.client.producer.transaction_states import ProducerTxnState
from semel.client.settings import ProducerSettings
from semel.protocol.batch import read_header
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.records import PartitionProduceResponse
from tests.simulation.log_model import LogModel
from tests.simulation.virtual_producer import START_S, NetworkFaults, VirtualProducer

ME = Identity(7, 0)
ROW_BYTES = 100
CUT = ConnectionFailedError("cut", ErrorCode.NETWORK_EXCEPTION, maybe_sent=True)


def core_of(identity: WriteIdentity, **options: Any) -> ProducerCore:
    defaults = {"linger_ms": 0, "batch_size": 1000, "retry_backoff_ms": 100, "retry_backoff_max_ms": 1000}
    settings = ProducerSettings.of(bootstrap_servers="nowhere:1", **{**defaults, **options})
    return ProducerCore(settings, identity, lambda: 0.5)


def idempotent(**options: Any) -> ProducerCore:
    core = core_of(IdempotentIdentity(), **options)
    core.identity_received(ME)
    return core


def transactional(generation: int = 2, **options: Any) -> tuple[ProducerCore, TransactionCore]:
    """With an open transaction."""
    transaction = TransactionCore("owner")
    core = core_of(transaction, transactional_id="owner", **options)
    transaction.init()
    transaction.initialized(ME, generation)
    begin(transaction)
    return core, transaction


def begin(transaction: TransactionCore) -> None:
    stale = transaction.begin()
    if stale is not None:
        transaction.renewed(Identity(stale.producer_id, stale.epoch + 1))
    transaction.began()


def add(core: ProducerCore, *values: bytes, partition: int = 0, now_s: float = 0.0) -> list[ProducerBatch]:
    """Each value in a batch of its own."""
    batches = []
    for value in values:
        core.check_accepts()
        batches.append(core.accumulator.append_new("t", partition, (None, value, 1, ()), ROW_BYTES, now_s))
    core.accumulator.close_all()
    return batches


def take(core: ProducerCore, now_s: float = 0.0) -> list[Produce]:
    """Every request that may be sent now."""
    for batch in core.advance(now_s):
        batch.encode(0)
    queues = core.ready(now_s)
    places = core.partitions_to_add(queues)
    if places:
        core.partitions_added(places)
    taken = []
    while (produce := core.take(queues, now_s)) is not None:
        taken.append(produce)
    return taken


def take_known(core: ProducerCore, *values: bytes, now_s: float = 0.0) -> tuple[list[ProducerBatch], list[Produce]]:
    """As `take`, for a partition that has a batch of this producer already."""
    add(core, b"first", now_s=now_s)
    (first,) = take(core, now_s)
    respond(core, first, ErrorCode.NONE, now_s)
    core.take_finished()
    return add(core, *values, now_s=now_s), take(core, now_s)


def respond(core: ProducerCore, produce: Produce, code: ErrorCode, now_s: float = 0.0, offset: int = 0) -> list[Any]:
    answers = {
        (queue.topic, queue.partition): PartitionProduceResponse(queue.partition, int(code), -1 if code else offset)
        for queue, _ in produce.sendings
    }
    return core.responded(produce.sendings, answers, now_s)


def stamps(requests: list[Produce]) -> list[tuple[int, int, int]]:
    """(producer id, epoch, sequence) of every batch."""
    headers = [read_header(batch.data) for produce in requests for _, batch in produce.sendings if batch.data]
    return [(header.producer_id, header.producer_epoch, header.base_sequence) for header in headers]


# --- retries ---


def test_a_batch_whose_response_was_lost_goes_again_with_its_stamp_and_is_stored_once() -> None:
    core, log = idempotent(), LogModel()
    (batch,) = add(core, b"x")
    (produce,) = take(core)
    before = stamps([produce])
    log.produce(produce.request)
    assert core.lost(produce.sendings, CUT, 1.0) == [("t", 0)], "the leader is in doubt"
    assert take(core, 1.05) == []
    assert core.next_event_s() == pytest.approx(1.1)
    (again,) = take(core, 1.1)
    assert stamps([again]) == before
    core.responded(again.sendings, log.produce(again.request), 1.2)
    assert (batch.done, batch.error, batch.base_offset) == (True, None, 0)
    assert log.partition("t", 0).values() == [b"x"]
    assert core.take_finished() == [batch]
    assert core.next_event_s() == float("inf")


def test_five_in_flight_keep_their_order_when_the_first_is_lost() -> None:
    core, log = idempotent(), LogModel()
    batches, sent = take_known(core, *(b"%d" % number for number in range(7)))
    log.partition("t", 0).append(bytes(_first(core)))
    before = stamps(sent)
    assert len(sent) == 5
    core.lost(sent[0].sendings, CUT, 0.0)
    for produce in sent[1:]:
        assert take(core, 5.0) == [], "the others are awaited first"
        core.responded(produce.sendings, log.produce(produce.request), 0.0)
    again = take(core, 5.0)
    assert stamps(again) == before, "in their order, with their stamps"
    while again:
        for produce in again:
            core.responded(produce.sendings, log.produce(produce.request), 5.0)
        again = take(core, 5.0)
    assert log.partition("t", 0).values() == [b"first", *(b"%d" % number for number in range(7))]
    assert [batch.base_offset for batch in batches] == list(range(1, 8))


def test_no_batch_goes_so_far_ahead_that_the_broker_forgets_one_that_is_not_acknowledged() -> None:
    """A broker keeps the last five batches of a producer. One that it has, but has not acknowledged, must stay among
    them: sent again, it would not be recognised, and would be stored twice under the next epoch."""
    core, log = idempotent(), LogModel()
    _, sent = take_known(core, *(b"%d" % number for number in range(12)))
    log.partition("t", 0).append(bytes(_first(core)))
    for produce in sent:
        log.produce(produce.request)
    respond(core, sent[0], ErrorCode.REQUEST_TIMED_OUT)  # it is stored, but replicas are slow
    for produce in sent[1:]:
        respond(core, produce, ErrorCode.NONE)
    again = take(core, 5.0)
    for produce in again:
        log.produce(produce.request)
        core.lost(produce.sendings, CUT, 5.0)
    now_s = 10.0
    while again := take(core, now_s):
        for produce in again:
            core.responded(produce.sendings, log.produce(produce.request), now_s)
        now_s += 5.0
    assert core.accumulator.is_empty
    assert log.partition("t", 0).values() == [b"first", *(b"%d" % number for number in range(12))]


def _first(core: ProducerCore) -> bytearray:
    """The batch that `take_known` has sent."""
    batch = ProducerBatch("t", 0, 0.0, 1.0)
    batch.rows, batch.count = [(None, b"first", 1, ())], 1
    batch.encode(0)
    batch.stamp(ME, 0, False)
    assert isinstance(batch.data, bytearray)
    return batch.data


@pytest.mark.parametrize("code", sorted(MOVED), ids=lambda code: code.name)
def test_a_response_that_says_not_here_puts_the_leader_in_doubt(code: ErrorCode) -> None:
    core = core_of(WriteIdentity())
    add(core, b"x")
    (produce,) = take(core)
    assert respond(core, produce, code) == [("t", 0)]


def test_pauses_double_up_to_their_limit() -> None:
    core = idempotent()
    add(core, b"x")
    now_s, pauses = 0.0, []
    for _ in range(6):
        (produce,) = take(core, now_s)
        core.lost(produce.sendings, CUT, now_s)
        pauses.append(core.next_event_s() - now_s)
        now_s = core.next_event_s()
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0])


def test_a_retry_that_is_on_its_way_is_no_event_to_wake_up_for() -> None:
    core = idempotent()
    add(core, b"x")
    (produce,) = take(core, 0.0)
    core.lost(produce.sendings, CUT, 0.0)
    assert len(take(core, 1.0)) == 1
    assert core.next_event_s() == float("inf"), "a driver that wakes up now would spin until the response"


def test_no_more_than_retries_attempts_are_made() -> None:
    core = core_of(WriteIdentity(), enable_idempotence=False, retries=2)
    (batch,) = add(core, b"x")
    for attempt in range(3):
        assert not batch.done
        (produce,) = take(core, attempt * 10.0)
        core.lost(produce.sendings, CUT, attempt * 10.0)
    assert batch.error is CUT


# --- time ---


def test_a_batch_fails_at_its_delivery_timeout_not_before_and_not_later() -> None:
    core = idempotent(delivery_timeout_ms=2000, request_timeout_ms=500)
    (batch,) = add(core, b"x", now_s=10.0)
    core.unreachable(core.accumulator.queues.values(), RetriableError("no leader"), 10.0)
    now_s = 10.0
    while not batch.done:
        now_s = core.next_event_s()
        assert now_s <= 12.0
        core.advance(now_s)
        core.unreachable(core.accumulator.queues.values(), RetriableError("no leader"), now_s)
    assert now_s == 12.0
    assert isinstance(batch.error, DeliveryTimedOutError)
    assert "they were not sent (the last try: no leader)" in str(batch.error)


def test_a_delivery_timeout_says_what_the_last_try_failed_with() -> None:
    core = idempotent(delivery_timeout_ms=2000, request_timeout_ms=500)
    (batch,), (produce,) = take_known(core, b"1")
    core.lost(produce.sendings, CUT, 1.9)
    core.advance(2.0)
    assert "unknown whether they were stored (the last try: cut); check the brokers" in str(batch.error)
    (batch,) = add(core, b"2", now_s=2.0)
    core.not_ready(RetriableError("no coordinator"), 2.0)
    core.advance(4.0)
    assert "they were not sent (the last try: no coordinator)" in str(batch.error)
    take_known(core, now_s=5.0)
    (batch,) = add(core, b"3", now_s=5.0)
    core.advance(7.0)
    assert "they were not sent; check" in str(batch.error), "what failed before the last success is no cause"


def test_a_request_gets_no_more_time_than_its_batches_have() -> None:
    core = idempotent(delivery_timeout_ms=2000, request_timeout_ms=500)
    add(core, b"x", now_s=0.0)
    (produce,) = take(core, 1.0)
    assert produce.timeout_s == 0.5
    core.lost(produce.sendings, CUT, 1.5)
    (produce,) = take(core, 1.8)
    assert produce.timeout_s == pytest.approx(0.2)


def test_a_batch_on_its_way_is_not_given_up_before_its_request() -> None:
    core = idempotent(delivery_timeout_ms=2000, request_timeout_ms=500)
    (batch,) = add(core, b"x")
    (produce,) = take(core, 1.9)
    core.advance(5.0)
    assert not batch.done
    core.lost(produce.sendings, CUT, 5.0)
    core.advance(5.0)
    assert isinstance(batch.error, DeliveryTimedOutError)
    assert "unknown whether they were stored" in str(batch.error)


def test_an_open_batch_lingers_and_then_goes() -> None:
    core = idempotent(linger_ms=50)
    core.accumulator.append_new("t", 0, (None, b"x", 1, ()), ROW_BYTES, 1.0)
    assert take(core, 1.0) == []
    assert core.next_event_s() == pytest.approx(1.05)
    assert len(take(core, core.next_event_s())) == 1


# --- identity ---


def test_an_identity_is_requested_for_the_first_record_and_again_after_a_pause() -> None:
    core = core_of(IdempotentIdentity())
    assert not core.wants_identity(0.0)
    add(core, b"x")
    assert core.wants_identity(0.0)
    core.not_ready(RetriableError("no broker"), 0.0)
    assert not core.wants_identity(0.05)
    assert core.next_event_s() == pytest.approx(0.1)
    assert core.wants_identity(0.1)
    core.identity_received(ME)
    assert stamps(take(core, 0.1)) == [(7, 0, 0)]


def test_a_gap_raises_the_epoch_and_everything_is_stamped_anew() -> None:
    core = idempotent()
    batches, sent = take_known(core, b"1", b"2", b"3")
    assert stamps(sent) == [(7, 0, 1), (7, 0, 2), (7, 0, 3)]
    for produce in sent:
        respond(core, produce, ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER)
    assert stamps(take(core, 5.0)) == [(7, 1, 0), (7, 1, 1), (7, 1, 2)]
    assert not any(batch.done for batch in batches)


def test_what_follows_a_batch_that_expired_in_doubt_has_a_new_epoch() -> None:
    core = idempotent(delivery_timeout_ms=2000, request_timeout_ms=500)
    (batch,), (produce,) = take_known(core, b"1")
    core.lost(produce.sendings, CUT, 2.0)
    core.advance(2.0)
    assert isinstance(batch.error, DeliveryTimedOutError)
    add(core, b"2", now_s=2.0)
    assert stamps(take(core, 3.0)) == [(7, 1, 0)]


def test_a_batch_that_may_still_arrive_is_not_stamped_anew_behind_one_that_may_still_arrive() -> None:
    """Both requests lie in the socket of a broker that is frozen. The first one expires; the second one, sent again on
    another connection, is refused for the gap. Then the broker reads the old connection: nothing is missing there."""
    core, log = idempotent(delivery_timeout_ms=2000, request_timeout_ms=500), LogModel()
    log.partition("t", 0).append(bytes(_first(core)))
    (expired,), (old_1,) = take_known(core, b"1")
    (doubtful,) = add(core, b"2", now_s=1.0)
    (old_2,) = take(core, 1.0)
    old_requests = [copy.deepcopy(produce.request) for produce in (old_1, old_2)]
    for produce in (old_1, old_2):
        core.lost(produce.sendings, CUT, 1.8)
    (again,) = take(core, 2.2)
    assert isinstance(expired.error, DeliveryTimedOutError)
    core.responded(again.sendings, log.produce(again.request), 2.2)
    for request in old_requests:
        log.produce(request)
    for produce in take(core, 2.9):
        core.responded(produce.sendings, log.produce(produce.request), 2.9)
    assert log.partition("t", 0).values() == [b"first", b"1", b"2"]
    assert doubtful.error is not None
    assert "it is unknown whether they were stored" in str(doubtful.error)
    assert doubtful.error.code is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    add(core, b"3", now_s=3.0)
    assert stamps(take(core, 3.0)) == [(7, 1, 0)], "the producer goes on"


def test_after_the_last_epoch_a_new_producer_id_is_requested() -> None:
    core = core_of(IdempotentIdentity())
    core.identity_received(Identity(7, LAST_EPOCH))
    add(core, b"x")
    (produce,) = take(core)
    respond(core, produce, ErrorCode.UNKNOWN_PRODUCER_ID)
    assert take(core, 1.0) == []
    assert core.wants_identity(1.0)
    assert core.next_event_s() == 1.0, "at once"
    core.identity_received(Identity(8, 0))
    assert stamps(take(core, 1.0)) == [(8, 0, 0)]


def test_a_given_identity_ends_with_its_first_failure() -> None:
    identity = FixedIdentity("owner", ME, (3, 12))
    core = core_of(identity, transactional_id="owner")
    refused, other = *add(core, b"x"), *add(core, b"y", partition=1)
    produce = take(core)[0]
    answers = {("t", 0): PartitionProduceResponse(0, int(ErrorCode.INVALID_TXN_STATE), -1)}
    core.responded(produce.sendings, answers, 0.0)
    assert refused.error is identity.lost()
    core.advance(0.0)
    assert other.error is refused.error


# --- transactions ---


def finished_states(
    core: ProducerCore, transaction: TransactionCore, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[ProducerTxnState, bool]]:
    """At each moment in which a batch gets done: the transaction's state, and whether a commit could go on."""
    seen: list[tuple[ProducerTxnState, bool]] = []
    finish = ProducerBatch.finish

    def finishing(batch: ProducerBatch, *arguments: Any) -> None:
        finish(batch, *arguments)
        seen.append((transaction.state, core.is_drained(transaction)))

    monkeypatch.setattr(ProducerBatch, "finish", finishing)
    return seen


def refuse_while_committing(core: ProducerCore, transaction: TransactionCore) -> None:
    add(core, b"x")
    (produce,) = take(core)
    core.commit(transaction)
    respond(core, produce, ErrorCode.MESSAGE_TOO_LARGE)


def test_a_transaction_with_a_refused_batch_can_only_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    core, transaction = transactional()
    seen = finished_states(core, transaction, monkeypatch)
    refuse_while_committing(core, transaction)
    assert seen == [(ProducerTxnState.ABORTABLE, True)]
    for call in (transaction.raise_if_failed, lambda: core.commit(transaction), core.check_accepts):
        with pytest.raises(AbortableError, match="MESSAGE_TOO_LARGE"):
            call()
    core.abort(transaction)
    assert core.end_request(transaction) == ME


def test_a_batch_that_is_done_before_its_transaction_has_failed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: the order that once let a commit through without one of its batches."""

    def finish_first(core: ProducerCore, queue: PartitionQueue, batch: ProducerBatch, error: KafkaError) -> None:
        queue.drop(batch)
        batch.finish(-1, -1, error)
        core._release(batch)
        core.identity.failed(error)

    monkeypatch.setattr(ProducerCore, "_fail", finish_first)
    core, transaction = transactional()
    seen = finished_states(core, transaction, monkeypatch)
    refuse_while_committing(core, transaction)
    assert seen == [(ProducerTxnState.COMMITTING, True)], "a commit that looks here goes on"


def expire(core: ProducerCore) -> None:
    core.advance(10_000.0)


def fail_encoding(core: ProducerCore) -> None:
    from semel.protocol.errors import EncodeError

    (batch,) = core.advance(0.0)
    core.encode_failed(batch, EncodeError("made up"))


def lose_the_leader(core: ProducerCore) -> None:
    for batch in core.advance(0.0):
        batch.encode(0)
    core.unreachable(core.ready(0.0), AbortableError("made up"), 0.0)


def refuse_the_partition(core: ProducerCore) -> None:
    core.not_ready(AbortableError("made up"), 0.0)


def end_the_producer(core: ProducerCore) -> None:
    core.fail_all(ClosedError("closed"))


@pytest.mark.parametrize(
    "way",
    [expire, fail_encoding, lose_the_leader, refuse_the_partition, end_the_producer],
    ids=lambda way: way.__name__,
)
def test_however_a_batch_fails_its_transaction_has_failed_before(
    way: Callable[[ProducerCore], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    core, transaction = transactional()
    seen = finished_states(core, transaction, monkeypatch)
    (batch,) = add(core, b"x")
    core.commit(transaction)
    way(core)
    assert batch.error is not None
    assert [state for state, _ in seen] == [ProducerTxnState.ABORTABLE]


def test_no_end_while_something_of_the_transaction_is_on_its_way() -> None:
    core, transaction = transactional()
    add(core, b"x")
    transaction.add_offsets()
    (produce,) = take(core)
    core.commit(transaction)
    with pytest.raises(IllegalStateError):
        core.end_request(transaction)
    respond(core, produce, ErrorCode.NONE)
    assert not core.is_drained(transaction), "offsets are on their way"
    transaction.offsets_ended("g", None)
    assert core.end_request(transaction) == ME
    transaction.committed(Identity(7, 1))
    assert transaction.state is ProducerTxnState.READY


def test_offsets_that_were_refused_fail_the_transaction_that_is_being_committed() -> None:
    core, transaction = transactional()
    transaction.add_offsets()
    core.commit(transaction)
    transaction.offsets_ended("g", AbortableError("the group was rebalanced", ErrorCode.ILLEGAL_GENERATION))
    assert transaction.state is ProducerTxnState.ABORTABLE


@pytest.mark.parametrize("outcome", [TimedOutError("no response"), KeyboardInterrupt()], ids=["timeout", "Ctrl-C"])
def test_no_commit_without_offsets_that_may_not_have_arrived(outcome: BaseException) -> None:
    core, transaction = transactional()
    transaction.add_offsets()
    transaction.offsets_ended("g", outcome)
    with pytest.raises(AbortableError, match="for group 'g' timed out or was interrupted"):
        core.commit(transaction)
    transaction.add_offsets()  # the same call once more
    transaction.offsets_ended("g", None)
    core.commit(transaction)
    assert core.end_request(transaction) == ME
    transaction.committed(Identity(7, 1))
    transaction.began()
    core.commit(transaction)


def test_a_commit_that_waits_for_offsets_fails_when_they_are_in_doubt() -> None:
    core, transaction = transactional()
    transaction.add_offsets()
    core.commit(transaction)
    transaction.offsets_ended("g", TimedOutError("no response"))
    assert transaction.state is ProducerTxnState.ABORTABLE


def test_no_record_gets_into_a_transaction_that_is_ending() -> None:
    """Not even into a batch that was open when it began to end."""
    core, transaction = transactional(linger_ms=1000)
    core.accumulator.append_new("t", 0, (None, b"x", 1, ()), ROW_BYTES, 0.0)
    assert core.accumulator.append("t", 0, (None, b"y", 1, ()), ROW_BYTES) is not None
    core.commit(transaction)
    assert core.accumulator.append("t", 0, (None, b"late", 1, ()), ROW_BYTES) is None
    with pytest.raises(IllegalStateError):
        core.check_accepts()
    assert len(take(core)) == 1, "what was there does not linger"


def test_a_fenced_producer_writes_nothing_more_and_ends_nothing() -> None:
    core, transaction = transactional()
    sent, waiting = *add(core, b"x"), *add(core, b"y")
    (produce,) = take(core)
    respond(core, produce, ErrorCode.INVALID_PRODUCER_EPOCH)
    assert transaction.state is ProducerTxnState.FENCED
    assert take(core, 100.0) == []
    assert isinstance(sent.error, FencedError)
    assert isinstance(waiting.error, FencedError)
    for call in (
        core.check_accepts,
        lambda: core.commit(transaction),
        lambda: core.abort(transaction),
        transaction.begin,
    ):
        with pytest.raises(FencedError):
            call()


def test_an_abort_fails_what_waits_and_awaits_what_is_on_its_way() -> None:
    core, transaction = transactional()
    sent, waiting = *add(core, b"x"), *add(core, b"y")
    (produce,) = take(core)
    core.abort(transaction)
    assert isinstance(waiting.error, AbortableError)
    assert not core.is_drained(transaction)
    core.lost(produce.sendings, CUT, 0.0)
    assert take(core, 100.0) == [], "nothing is sent again"
    assert isinstance(sent.error, AbortableError)
    assert core.end_request(transaction) == ME


def test_a_commit_that_was_not_sent_leaves_the_transaction_open() -> None:
    core, transaction = transactional()
    (batch,) = add(core, b"x")
    core.commit(transaction)
    transaction.commit_not_sent()
    add(core, b"y")
    assert transaction.state is ProducerTxnState.IN_TRANSACTION
    assert not batch.done
    assert isinstance(transaction.lost(), type(None))


@pytest.mark.parametrize(("maybe_sent", "error"), [(False, TimedOutError), (True, CommitUncertainError)])
def test_a_commit_in_doubt_can_be_repeated_but_not_aborted(maybe_sent: bool, error: type[KafkaError]) -> None:
    core, transaction = transactional()
    transaction.add_offsets()
    transaction.offsets_ended("g", None)
    core.commit(transaction)
    assert isinstance(transaction.commit_unknown(maybe_sent, "no response", 1.0), error)
    if maybe_sent:
        with pytest.raises(IllegalStateError):
            core.abort(transaction)
        core.commit(transaction)
    else:
        core.abort(transaction)


@pytest.mark.parametrize("is_committed", [True, False, None])
def test_a_commit_that_is_fenced_after_a_lost_response_is_settled_from_the_log(is_committed: bool | None) -> None:
    core, transaction = transactional()
    add(core, b"x")
    (produce,) = take(core)
    respond(core, produce, ErrorCode.NONE, offset=17)
    core.commit(transaction)
    fenced = FencedError("taken over", ErrorCode.PRODUCER_FENCED)
    assert transaction.commit_refused(fenced, was_repeated=True) is None
    assert transaction.first_write() == (("t", 0), 17)
    failure = transaction.commit_found(is_committed, fenced)
    assert type(failure) is {True: type(None), False: FencedError, None: CommitUncertainError}[is_committed]
    assert transaction.state is ProducerTxnState.FENCED


@pytest.mark.parametrize("was_repeated", [False, True])
def test_after_a_repeated_end_in_tv1_the_next_transaction_has_a_new_epoch(was_repeated: bool) -> None:
    core, transaction = transactional(generation=1)
    add(core, b"x")
    (produce,) = take(core)
    respond(core, produce, ErrorCode.NONE)
    core.commit(transaction)
    transaction.committed(ME, was_repeated)
    assert transaction.begin() == (ME if was_repeated else None)


def test_in_tv1_no_partition_is_written_before_it_is_in_the_transaction() -> None:
    """Also not the one that was ready in the last transaction: the driver may still have it in its hands."""
    core, transaction = transactional(generation=1)
    add(core, b"x")
    core.advance(0.0)[0].encode(0)
    queues = core.ready(0.0)
    assert core.take(queues, 0.0) is None
    assert core.partitions_to_add(queues) == [("t", 0)]
    assert core.take(queues, 0.0) is None
    assert not core.is_drained(transaction)
    core.partitions_added([("t", 0)])
    produce = core.take(queues, 0.0)
    assert produce is not None
    respond(core, produce, ErrorCode.NONE)
    core.commit(transaction)
    transaction.committed(ME)
    begin(transaction)
    add(core, b"y")
    core.advance(0.0)[0].encode(0)
    assert core.take(queues, 0.0) is None


# --- memory ---


def test_memory_is_counted_kept_and_given_back() -> None:
    core = idempotent(buffer_memory=2000, batch_size=500)
    producer = VirtualProducer(core, LogModel(), random.Random(1))
    sent = 0
    while producer.send(0, b"x"):
        sent += 1
    assert 0 < core.accumulator.used_bytes <= 2000
    assert producer.run(lambda: core.accumulator.is_empty)
    assert core.accumulator.used_bytes == 0
    assert producer.log.partition("t", 0).values() == [b"x"] * sent


def test_a_record_larger_than_the_memory_goes_alone() -> None:
    core = idempotent(buffer_memory=1000)
    accumulator = core.accumulator
    assert accumulator.has_memory(5000)
    batch = accumulator.append_new("t", 0, (None, b"x", 1, ()), 5000, 0.0)
    assert not accumulator.has_memory(1)
    assert accumulator.append("t", 0, (None, b"y", 1, ()), 1) is None
    (produce,) = take(core)
    respond(core, produce, ErrorCode.NONE)
    assert (batch.error, accumulator.used_bytes) == (None, 0)


def test_a_producer_that_has_ended_takes_nothing() -> None:
    core = idempotent(linger_ms=1000)
    core.accumulator.append_new("t", 0, (None, b"x", 1, ()), ROW_BYTES, 0.0)
    core.fail_all(ClosedError("closed"))
    assert core.accumulator.append("t", 0, (None, b"y", 1, ()), 10) is None
    with pytest.raises(ClosedError):
        core.check_accepts()
    assert core.accumulator.used_bytes == 0


# --- seeds ---

FRESH = 10


def seeds() -> Iterator[int]:
    """Some that are always the same, and fresh ones. The last one that a failing test has printed is the one."""
    for seed in [*range(40), *(random.SystemRandom().randrange(2**32) for _ in range(FRESH))]:
        print(f"seed {seed}")
        yield seed


def test_acknowledged_records_are_stored_once_and_in_order() -> None:
    for seed in seeds():
        check_idempotent(seed)


def check_idempotent(seed: int) -> None:
    rng = random.Random(seed)
    memory_bytes, delivery_s = rng.choice([2000, 20_000]), rng.choice([2.0, 1e6])
    core = core_of(
        IdempotentIdentity(),
        buffer_memory=memory_bytes,
        batch_size=rng.choice([200, 500, 1000]),
        linger_ms=rng.choice([0, 20]),
        delivery_timeout_ms=int(delivery_s * 1000),
        request_timeout_ms=500,
    )
    faults = NetworkFaults(cut=rng.random() * 0.3, refused=rng.random() * 0.2, arrives_late=rng.random())
    producer = VirtualProducer(core, LogModel(), rng, faults)
    sent: list[tuple[ProducerBatch, int, int, bytes]] = []
    for number in range(200):
        partition, value = rng.randrange(3), b"%d" % number
        place = producer.send(partition, value)
        while place is None:
            producer.run_for(0.01)
            place = producer.send(partition, value)
        sent.append((*place, partition, value))
        if rng.random() < 0.3:
            producer.run_for(rng.random() * 0.05)
    assert producer.run(lambda: core.accumulator.is_empty), "everything drains"
    producer.run_for(10.0)  # late requests arrive
    assert producer.most_bytes <= memory_bytes
    assert core.accumulator.used_bytes == 0
    for batch, at_s in producer.finished_at_s.items():
        assert at_s <= batch.deadline_s + 0.6, "delivery.timeout.ms is kept, up to one request"
    _check_log(producer, sent)


def _check_log(producer: VirtualProducer, sent: list[tuple[ProducerBatch, int, int, bytes]]) -> None:
    for partition in range(3):
        stored = producer.log.partition("t", partition).values()
        assert len(stored) == len(set(stored)), "nothing is stored twice"
        mine = [(batch, index, value) for batch, index, to, value in sent if to == partition]
        acknowledged = [value for batch, _, value in mine if batch.error is None]
        assert [value for value in stored if value in set(acknowledged)] == acknowledged, "in the order of sending"
        for batch, index, value in mine:
            if batch.error is None:
                assert stored[batch.base_offset + index] == value
            else:
                assert isinstance(batch.error, DeliveryTimedOutError) or "stored twice" in str(batch.error)


def test_a_committed_transaction_is_whole() -> None:
    outcomes = {outcome for seed in seeds() for outcome in check_transactional(seed)}
    assert outcomes == {True, False}


def check_transactional(seed: int) -> set[bool]:
    """The outcomes that there were."""
    rng = random.Random(seed)
    core, transaction = transactional(generation=rng.choice([1, 2]), batch_size=300, delivery_timeout_ms=1000)
    faults = NetworkFaults(cut=rng.random() * 0.3, refused=rng.random() * 0.1, arrives_late=rng.random())
    producer = VirtualProducer(core, LogModel(), rng, faults)
    committed: list[bytes] = []
    outcomes: set[bool] = set()
    for number in range(20):
        values = _write_some(producer, rng, number)
        is_committed = _end(producer, transaction, commit=rng.random() < 0.8)
        committed += values if is_committed else []
        outcomes.add(is_committed)
        begin(transaction)
    producer.run_for(10.0)
    stored = [value for partition in range(2) for value in producer.log.partition("t", partition).values()]
    for value in committed:
        assert stored.count(value) == 1
    return outcomes


def _write_some(producer: VirtualProducer, rng: random.Random, number: int) -> list[bytes]:
    values = []
    for each in range(rng.randrange(1, 12)):
        value = b"%d-%d" % (number, each)
        try:
            producer.send(rng.randrange(2), value)
        except AbortableError:
            break
        values.append(value)
        if rng.random() < 0.3:
            producer.run_for(rng.random() * 0.5)
        if rng.random() < 0.02:
            producer.log.refusals["t", 0] = ErrorCode.TRANSACTION_ABORTABLE
    return values


def _end(producer: VirtualProducer, transaction: TransactionCore, commit: bool) -> bool:
    """As the blocking driver does it; whether the transaction was committed. Every end raises the epoch."""
    core = producer.core
    try:
        if not commit:
            raise AbortableError("wanted")
        core.commit(transaction)
        assert producer.run(
            lambda: core.is_drained(transaction) or transaction.state is not ProducerTxnState.COMMITTING, 100.0
        )
        transaction.raise_if_failed()
    except AbortableError:
        core.abort(transaction)
        assert producer.run(lambda: core.is_drained(transaction), 100.0)
        commit = False
    identity = core.end_request(transaction)
    producer.log.refusals.clear()
    fresh = None
    if identity is not None:
        fresh = Identity(identity.producer_id, identity.epoch + 1)
        producer.log.fence(fresh)
    if commit:
        transaction.committed(fresh)
    else:
        transaction.aborting()
        transaction.aborted(fresh)
    return commit


def test_a_seed_gives_the_same_run_again() -> None:
    def run() -> list[Any]:
        rng = random.Random(42)
        producer = VirtualProducer(core_of(IdempotentIdentity()), LogModel(), rng, NetworkFaults(cut=0.2, refused=0.1))
        for number in range(100):
            producer.send(rng.randrange(3), b"%d" % number)
            producer.run_for(rng.random() * 0.02)
        producer.run(lambda: producer.core.accumulator.is_empty)
        assert producer.now_s > START_S
        assert producer.cuts
        assert producer.refusals
        return [producer.now_s, producer.cuts, producer.refusals, *producer.finished_at_s.values()]

    assert run() == run()


# --- two-phase commit ---
def test_a_transaction_is_not_prepared_before_everything_is_delivered() -> None:
    core, transaction = transactional()
    add(core, b"x")
    core.prepare(transaction)
    with pytest.raises(IllegalStateError, match="nothing can be added"):
        core.check_accepts()
    assert not core.is_drained(transaction)
    (produce,) = take(core)  # prepare closed the batch, so it goes at once
    respond(core, produce, ErrorCode.NONE)
    assert core.is_drained(transaction)
    assert transaction.is_prepared() == ME
    with pytest.raises(IllegalStateError, match="nothing can be added"):
        core.check_accepts()


def test_a_transaction_that_fails_while_it_is_prepared_can_only_abort() -> None:
    core, transaction = transactional()
    add(core, b"x")
    (produce,) = take(core)
    core.prepare(transaction)
    respond(core, produce, ErrorCode.MESSAGE_TOO_LARGE)
    with pytest.raises(AbortableError, match="MESSAGE_TOO_LARGE"):
        transaction.raise_if_failed()
    transaction.not_prepared()
    assert transaction.state is ProducerTxnState.ABORTABLE
    assert transaction.prepared is None


def test_a_commit_of_a_prepared_transaction_that_was_not_sent_leaves_it_prepared() -> None:
    core, transaction = transactional()
    core.prepare(transaction)
    state = transaction.is_prepared()
    core.commit(transaction)
    transaction.commit_not_sent()
    assert transaction.state is ProducerTxnState.PREPARED
    assert transaction.is_to_commit(state)
    core.commit(transaction)
    assert isinstance(transaction.commit_unknown(False, "made up", 1.0), TimedOutError)
    assert transaction.state is ProducerTxnState.PREPARED


def test_another_decision_than_the_prepared_one_aborts_it() -> None:
    core, transaction = transactional()
    core.prepare(transaction)
    state = transaction.is_prepared()
    assert transaction.is_to_commit(state)
    assert not transaction.is_to_commit(None)
    assert not transaction.is_to_commit(state._replace(epoch=state.epoch + 1))
