"""The state machine pair by pair: every (state, event), legal and illegal, for both generations of clients."""

from __future__ import annotations

import itertools

import pytest

from semel.broker.transactions.states import (
    CELLS,
    CHECKS,
    IDLE,
    LAST_CLIENT_EPOCH,
    MAX_EPOCH,
    NO_EPOCH,
    NO_PARTITIONS,
    NO_PRODUCER_ID,
    NO_TIME,
    EventFields,
    Transaction,
    TransactionEvent,
    TxnDecision,
    TxnState,
    decide,
    new_transaction,
)
from semel.protocol.errors import ErrorCode as E

S = TxnState
PID, OLD_PID, FRESH_PID = 4000, 3999, 7000
EPOCH = 7
NOW_MS = 1_000_000
TIMEOUT_MS = 60_000
DAY_MS = 86_400_000
A, B = ("a", 0), ("b", 1)
SEEN = (S.EMPTY, S.ONGOING, S.PREPARE_COMMIT, S.PREPARE_ABORT, S.COMPLETE_COMMIT, S.COMPLETE_ABORT)
ENDS = (TransactionEvent.COMMIT_V1, TransactionEvent.ABORT_V1, TransactionEvent.COMMIT_V2, TransactionEvent.ABORT_V2)


def txn(state: TxnState, **changes: object) -> Transaction:
    busy = state in (S.ONGOING, S.PREPARE_COMMIT, S.PREPARE_ABORT)
    made = Transaction(
        producer_id=PID,
        previous_producer_id=PID,
        next_producer_id=NO_PRODUCER_ID,
        epoch=EPOCH,
        last_epoch=EPOCH - 1,
        timeout_ms=TIMEOUT_MS,
        state=state,
        partitions=frozenset({A}) if busy else NO_PARTITIONS,
        started_ms=NO_TIME if state is S.EMPTY else NOW_MS - 1000,
        updated_ms=NOW_MS - 500,
        client_version=0,
    )
    return made._replace(**changes)  # type: ignore[arg-type]


def fields(**changes: object) -> EventFields:
    asked = EventFields(
        producer_id=PID,
        epoch=EPOCH,
        now_ms=NOW_MS,
        partitions=frozenset({A}),
        timeout_ms=TIMEOUT_MS,
        fresh_producer_id=FRESH_PID,
        expiration_ms=DAY_MS,
    )
    return asked._replace(**changes)  # type: ignore[arg-type]


def outcome(decision: TxnDecision) -> tuple[E, TxnState | None]:
    return decision.error, decision.to.state if decision.to else None


# What the owner of the id, with the right producer id and epoch, gets in every state.
OWNER = {
    TransactionEvent.INIT: {
        S.EMPTY: (E.NONE, S.EMPTY),
        S.ONGOING: (E.CONCURRENT_TRANSACTIONS, S.PREPARE_ABORT),
        S.PREPARE_COMMIT: (E.CONCURRENT_TRANSACTIONS, None),
        S.PREPARE_ABORT: (E.CONCURRENT_TRANSACTIONS, None),
        S.COMPLETE_COMMIT: (E.NONE, S.EMPTY),
        S.COMPLETE_ABORT: (E.NONE, S.EMPTY),
    },
    TransactionEvent.ADD: {
        S.EMPTY: (E.NONE, S.ONGOING),
        S.ONGOING: (E.NONE, None),  # the partition is in it already
        S.PREPARE_COMMIT: (E.CONCURRENT_TRANSACTIONS, None),
        S.PREPARE_ABORT: (E.CONCURRENT_TRANSACTIONS, None),
        S.COMPLETE_COMMIT: (E.NONE, S.ONGOING),
        S.COMPLETE_ABORT: (E.NONE, S.ONGOING),
    },
    TransactionEvent.VERIFY: {
        S.EMPTY: (E.TRANSACTION_ABORTABLE, None),
        S.ONGOING: (E.NONE, None),
        S.PREPARE_COMMIT: (E.CONCURRENT_TRANSACTIONS, None),
        S.PREPARE_ABORT: (E.CONCURRENT_TRANSACTIONS, None),
        S.COMPLETE_COMMIT: (E.TRANSACTION_ABORTABLE, None),
        S.COMPLETE_ABORT: (E.TRANSACTION_ABORTABLE, None),
    },
    TransactionEvent.COMMIT_V1: {
        S.EMPTY: (E.INVALID_TXN_STATE, None),
        S.ONGOING: (E.NONE, S.PREPARE_COMMIT),
        S.PREPARE_COMMIT: (E.CONCURRENT_TRANSACTIONS, None),
        S.PREPARE_ABORT: (E.INVALID_TXN_STATE, None),
        S.COMPLETE_COMMIT: (E.NONE, None),
        S.COMPLETE_ABORT: (E.INVALID_TXN_STATE, None),
    },
    TransactionEvent.ABORT_V1: {
        S.EMPTY: (E.INVALID_TXN_STATE, None),
        S.ONGOING: (E.NONE, S.PREPARE_ABORT),
        S.PREPARE_COMMIT: (E.INVALID_TXN_STATE, None),
        S.PREPARE_ABORT: (E.CONCURRENT_TRANSACTIONS, None),
        S.COMPLETE_COMMIT: (E.INVALID_TXN_STATE, None),
        S.COMPLETE_ABORT: (E.NONE, None),
    },
    TransactionEvent.COMMIT_V2: {
        S.EMPTY: (E.INVALID_TXN_STATE, None),
        S.ONGOING: (E.NONE, S.PREPARE_COMMIT),
        S.PREPARE_COMMIT: (E.PRODUCER_FENCED, None),
        S.PREPARE_ABORT: (E.PRODUCER_FENCED, None),
        S.COMPLETE_COMMIT: (E.INVALID_TXN_STATE, None),
        S.COMPLETE_ABORT: (E.INVALID_TXN_STATE, None),
    },
    TransactionEvent.ABORT_V2: {
        S.EMPTY: (E.NONE, S.PREPARE_ABORT),
        S.ONGOING: (E.NONE, S.PREPARE_ABORT),
        S.PREPARE_COMMIT: (E.PRODUCER_FENCED, None),
        S.PREPARE_ABORT: (E.PRODUCER_FENCED, None),
        S.COMPLETE_COMMIT: (E.NONE, S.PREPARE_ABORT),
        S.COMPLETE_ABORT: (E.NONE, S.PREPARE_ABORT),
    },
    TransactionEvent.TIMEOUT: dict.fromkeys(SEEN, (E.INVALID_TXN_STATE, None)),  # nothing is overdue
    TransactionEvent.MARKERS_WRITTEN: {
        S.EMPTY: (E.INVALID_TXN_STATE, None),
        S.ONGOING: (E.INVALID_TXN_STATE, None),
        S.PREPARE_COMMIT: (E.NONE, S.COMPLETE_COMMIT),
        S.PREPARE_ABORT: (E.NONE, S.COMPLETE_ABORT),
        S.COMPLETE_COMMIT: (E.INVALID_TXN_STATE, None),
        S.COMPLETE_ABORT: (E.INVALID_TXN_STATE, None),
    },
    TransactionEvent.EXPIRE: dict.fromkeys(SEEN, (E.INVALID_TXN_STATE, None)),  # used a moment ago
}

# The retry of a TV2 end: its epoch is the one before the server's.
RETRY_V2 = {
    TransactionEvent.COMMIT_V2: {
        S.EMPTY: (E.PRODUCER_FENCED, None),
        S.ONGOING: (E.PRODUCER_FENCED, None),
        S.PREPARE_COMMIT: (E.CONCURRENT_TRANSACTIONS, None),
        S.PREPARE_ABORT: (E.INVALID_TXN_STATE, None),
        S.COMPLETE_COMMIT: (E.NONE, None),
        S.COMPLETE_ABORT: (E.INVALID_TXN_STATE, None),
    },
    TransactionEvent.ABORT_V2: {
        S.EMPTY: (E.PRODUCER_FENCED, None),
        S.ONGOING: (E.PRODUCER_FENCED, None),
        S.PREPARE_COMMIT: (E.INVALID_TXN_STATE, None),
        S.PREPARE_ABORT: (E.CONCURRENT_TRANSACTIONS, None),
        S.COMPLETE_COMMIT: (E.INVALID_TXN_STATE, None),
        S.COMPLETE_ABORT: (E.NONE, None),
    },
}

PAIRS = list(itertools.product(SEEN, TransactionEvent))


def test_every_pair_has_a_cell_and_nothing_else_has():
    assert set(CELLS) == set(PAIRS)
    assert set(CHECKS) == set(TransactionEvent)


@pytest.mark.parametrize(("state", "event"), PAIRS, ids=lambda value: value.name)
def test_the_owner_gets_what_the_protocol_says(state: TxnState, event: TransactionEvent):
    assert outcome(decide(txn(state), event, fields())) == OWNER[event][state]


@pytest.mark.parametrize(("state", "event"), list(itertools.product(SEEN, RETRY_V2)), ids=lambda value: value.name)
def test_a_retried_v2_end_is_recognised_by_its_epoch(state: TxnState, event: TransactionEvent):
    assert outcome(decide(txn(state), event, fields(epoch=EPOCH - 1))) == RETRY_V2[event][state]


@pytest.mark.parametrize(("state", "event"), list(itertools.product(SEEN, ENDS)), ids=lambda value: value.name)
@pytest.mark.parametrize("epoch", [EPOCH - 2, EPOCH + 1, NO_EPOCH, MAX_EPOCH])
def test_no_end_with_a_wrong_epoch_changes_anything(state: TxnState, event: TransactionEvent, epoch: int):
    assert outcome(decide(txn(state), event, fields(epoch=epoch))) == (E.PRODUCER_FENCED, None)


@pytest.mark.parametrize("state", SEEN, ids=lambda value: value.name)
@pytest.mark.parametrize("event", [TransactionEvent.ADD, TransactionEvent.VERIFY, *ENDS], ids=lambda value: value.name)
def test_a_wrong_producer_id_is_an_invalid_mapping(state: TxnState, event: TransactionEvent):
    assert outcome(decide(txn(state), event, fields(producer_id=1))) == (E.INVALID_PRODUCER_ID_MAPPING, None)


@pytest.mark.parametrize("state", SEEN, ids=lambda value: value.name)
@pytest.mark.parametrize("event", [TransactionEvent.ADD, TransactionEvent.VERIFY], ids=lambda value: value.name)
@pytest.mark.parametrize("epoch", [EPOCH - 1, EPOCH + 1])
def test_adding_and_verifying_need_the_epoch(state: TxnState, event: TransactionEvent, epoch: int):
    assert outcome(decide(txn(state), event, fields(epoch=epoch))) == (E.PRODUCER_FENCED, None)


# --- pending ---


@pytest.mark.parametrize("state", SEEN, ids=lambda value: value.name)
@pytest.mark.parametrize(
    "event",
    [event for event in TransactionEvent if event not in (TransactionEvent.VERIFY, TransactionEvent.MARKERS_WRITTEN)],
    ids=lambda v: v.name,
)
def test_while_a_transition_is_pending_everybody_waits(state: TxnState, event: TransactionEvent):
    assert outcome(decide(txn(state), event, fields(), is_pending=True)) == (E.CONCURRENT_TRANSACTIONS, None)


@pytest.mark.parametrize("event", [TransactionEvent.COMMIT_V1, TransactionEvent.ABORT_V1])
def test_a_v1_end_asks_who_it_is_before_it_waits(event: TransactionEvent):
    assert decide(txn(S.ONGOING), event, fields(epoch=3), is_pending=True).error is E.PRODUCER_FENCED
    assert decide(txn(S.ONGOING), event, fields(producer_id=3), is_pending=True).error is E.INVALID_PRODUCER_ID_MAPPING


@pytest.mark.parametrize(
    "event", [TransactionEvent.ADD, TransactionEvent.INIT, TransactionEvent.COMMIT_V2, TransactionEvent.ABORT_V2]
)
def test_the_others_wait_before_they_are_asked_who_they_are(event: TransactionEvent):
    for wrong in (fields(epoch=3), fields(producer_id=3)):
        assert decide(txn(S.ONGOING), event, wrong, is_pending=True).error is E.CONCURRENT_TRANSACTIONS


def test_verifying_does_not_wait_for_a_pending_transition():
    assert decide(txn(S.ONGOING), TransactionEvent.VERIFY, fields(), is_pending=True).error is E.NONE


# --- InitProducerId ---

NOBODY = {"producer_id": NO_PRODUCER_ID, "epoch": NO_EPOCH}


def test_the_first_owner_gets_epoch_zero():
    fresh = new_transaction(FRESH_PID, TIMEOUT_MS, NOW_MS)
    to = decide(fresh, TransactionEvent.INIT, fields(**NOBODY)).to
    assert to is not None
    assert (to.producer_id, to.epoch, to.last_epoch, to.state) == (FRESH_PID, 0, NO_EPOCH, S.EMPTY)


def test_a_first_owner_with_an_expectation_gets_epoch_zero_too():
    """Its id expired: it recovers, under another producer id."""
    to = decide(new_transaction(FRESH_PID, TIMEOUT_MS, NOW_MS), TransactionEvent.INIT, fields()).to
    assert to is not None
    assert (to.producer_id, to.epoch) == (FRESH_PID, 0)


@pytest.mark.parametrize("state", sorted(IDLE), ids=lambda value: value.name)
def test_the_next_owner_gets_the_next_epoch_and_no_retry_of_the_old_one_counts(state: TxnState):
    to = decide(txn(state), TransactionEvent.INIT, fields(**NOBODY, timeout_ms=5)).to
    assert to is not None
    assert (to.producer_id, to.epoch, to.last_epoch) == (PID, EPOCH + 1, NO_EPOCH)
    assert (to.timeout_ms, to.partitions, to.started_ms, to.updated_ms) == (5, NO_PARTITIONS, NO_TIME, NOW_MS)
    assert decide(to, TransactionEvent.INIT, fields()).error is E.PRODUCER_FENCED


@pytest.mark.parametrize("state", sorted(IDLE), ids=lambda value: value.name)
def test_a_bump_with_the_expected_epoch_and_its_retries_give_the_same_epoch(state: TxnState):
    bumped = decide(txn(state), TransactionEvent.INIT, fields()).to
    assert bumped is not None
    assert (bumped.epoch, bumped.last_epoch) == (EPOCH + 1, EPOCH)
    again = decide(bumped, TransactionEvent.INIT, fields()).to
    assert again is not None
    assert (again.producer_id, again.epoch, again.last_epoch) == (PID, EPOCH + 1, EPOCH)
    assert outcome(decide(bumped, TransactionEvent.INIT, fields(epoch=EPOCH - 1))) == (E.PRODUCER_FENCED, None)


def test_an_unknown_producer_id_is_fenced():
    for state in SEEN:
        assert outcome(decide(txn(state), TransactionEvent.INIT, fields(producer_id=1))) == (E.PRODUCER_FENCED, None)


def test_a_new_owner_fences_an_open_transaction_and_must_come_again():
    decision = decide(txn(S.ONGOING), TransactionEvent.INIT, fields(**NOBODY))
    assert outcome(decision) == (E.CONCURRENT_TRANSACTIONS, S.PREPARE_ABORT)
    assert decision.to is not None
    assert (decision.to.epoch, decision.to.partitions, decision.to.client_version) == (EPOCH + 1, frozenset({A}), 2)
    done = decide(decision.to, TransactionEvent.MARKERS_WRITTEN, fields()).to
    assert done is not None
    owner = decide(done, TransactionEvent.INIT, fields(**NOBODY)).to
    assert owner is not None
    assert (owner.epoch, owner.last_epoch) == (EPOCH + 2, NO_EPOCH)


def test_a_v1_broker_fences_without_a_way_back_for_the_old_owner():
    to = decide(txn(S.ONGOING), TransactionEvent.INIT, fields(**NOBODY, broker_version=1)).to
    assert to is not None
    assert (to.epoch, to.last_epoch, to.client_version) == (EPOCH + 1, NO_EPOCH, 0)


def test_a_zombie_cannot_abort_the_new_owners_transaction():
    assert outcome(decide(txn(S.ONGOING), TransactionEvent.INIT, fields(epoch=EPOCH - 1))) == (E.PRODUCER_FENCED, None)


# --- adding ---


@pytest.mark.parametrize("state", sorted(IDLE), ids=lambda value: value.name)
@pytest.mark.parametrize("client_version", [0, 2])
def test_the_first_partition_starts_the_clock(state: TxnState, client_version: int):
    to = decide(txn(state), TransactionEvent.ADD, fields(client_version=client_version)).to
    assert to is not None
    assert (to.state, to.partitions, to.started_ms) == (S.ONGOING, frozenset({A}), NOW_MS)
    assert (to.epoch, to.last_epoch, to.client_version) == (EPOCH, EPOCH - 1, client_version)


def test_later_partitions_join_and_leave_the_clock_alone():
    to = decide(txn(S.ONGOING), TransactionEvent.ADD, fields(partitions=frozenset({A, B}))).to
    assert to is not None
    assert (to.partitions, to.started_ms) == (frozenset({A, B}), NOW_MS - 1000)


def test_a_partition_that_is_not_in_the_transaction_is_not_verified():
    decision = decide(txn(S.ONGOING), TransactionEvent.VERIFY, fields(partitions=frozenset({B})))
    assert outcome(decision) == (E.TRANSACTION_ABORTABLE, None)


# --- ending ---


@pytest.mark.parametrize("event", [TransactionEvent.COMMIT_V1, TransactionEvent.ABORT_V1])
def test_a_v1_end_keeps_the_epoch(event: TransactionEvent):
    to = decide(txn(S.ONGOING), event, fields()).to
    assert to is not None
    done = decide(to, TransactionEvent.MARKERS_WRITTEN, fields()).to
    assert done is not None
    assert (done.producer_id, done.epoch, done.partitions) == (PID, EPOCH, NO_PARTITIONS)


@pytest.mark.parametrize("event", [TransactionEvent.COMMIT_V2, TransactionEvent.ABORT_V2])
def test_a_v2_end_bumps_the_epoch_and_its_markers_carry_it(event: TransactionEvent):
    to = decide(txn(S.ONGOING), event, fields()).to
    assert to is not None
    assert (to.epoch, to.last_epoch, to.client_version) == (EPOCH + 1, EPOCH, 2)
    done = decide(to, TransactionEvent.MARKERS_WRITTEN, fields()).to
    assert done is not None
    assert (done.producer_id, done.epoch, done.last_epoch) == (PID, EPOCH + 1, EPOCH)


@pytest.mark.parametrize("state", sorted(IDLE), ids=lambda value: value.name)
def test_a_v2_abort_of_nothing_bumps_too(state: TxnState):
    to = decide(txn(state), TransactionEvent.ABORT_V2, fields()).to
    assert to is not None
    assert (to.epoch, to.partitions, to.started_ms) == (EPOCH + 1, NO_PARTITIONS, NOW_MS)


# --- the last epochs of a producer id ---


def test_epochs_run_out_and_a_new_producer_id_takes_over():
    worn = txn(S.EMPTY, epoch=LAST_CLIENT_EPOCH)
    for who, last in ((NOBODY, NO_EPOCH), ({"epoch": LAST_CLIENT_EPOCH}, LAST_CLIENT_EPOCH)):
        decision = decide(worn, TransactionEvent.INIT, fields(**who))
        assert decision.to is not None
        assert (decision.to.producer_id, decision.to.epoch, decision.to.last_epoch) == (FRESH_PID, 0, last)
        assert decision.to.previous_producer_id == PID
        assert decision.takes_producer_id


def test_the_retry_of_a_bump_that_changed_the_producer_id_gets_the_new_one_again_and_again():
    rotated = decide(txn(S.EMPTY, epoch=LAST_CLIENT_EPOCH), TransactionEvent.INIT, fields(epoch=LAST_CLIENT_EPOCH)).to
    assert rotated is not None
    for _ in range(3):
        rotated = decide(rotated, TransactionEvent.INIT, fields(epoch=LAST_CLIENT_EPOCH)).to
        assert rotated is not None
        assert (rotated.producer_id, rotated.epoch) == (FRESH_PID, 0)


def test_the_retry_of_the_last_bump_is_still_a_retry():
    worn = txn(S.EMPTY, epoch=LAST_CLIENT_EPOCH, last_epoch=LAST_CLIENT_EPOCH - 1)
    to = decide(worn, TransactionEvent.INIT, fields(epoch=LAST_CLIENT_EPOCH - 1)).to
    assert to is not None
    assert (to.producer_id, to.epoch) == (PID, LAST_CLIENT_EPOCH)


@pytest.mark.parametrize("event", [TransactionEvent.COMMIT_V2, TransactionEvent.ABORT_V2])
def test_a_v2_end_at_the_last_epoch_moves_to_a_new_producer_id_after_the_markers(event: TransactionEvent):
    decision = decide(txn(S.ONGOING, epoch=LAST_CLIENT_EPOCH), event, fields(epoch=LAST_CLIENT_EPOCH))
    to = decision.to
    assert to is not None
    assert decision.takes_producer_id
    assert (to.producer_id, to.epoch, to.next_producer_id) == (PID, MAX_EPOCH, FRESH_PID)
    done = decide(to, TransactionEvent.MARKERS_WRITTEN, fields()).to
    assert done is not None
    assert (done.producer_id, done.epoch, done.previous_producer_id) == (FRESH_PID, 0, PID)
    assert outcome(decide(done, event, fields(epoch=LAST_CLIENT_EPOCH))) == (E.NONE, None)


def test_fencing_at_the_last_epoch_stays_within_16_bits():
    for broker_version in (1, 2):
        to = decide(
            txn(S.ONGOING, epoch=LAST_CLIENT_EPOCH),
            TransactionEvent.INIT,
            fields(**NOBODY, broker_version=broker_version),
        ).to
        assert to is not None
        assert to.epoch == MAX_EPOCH


def test_other_transitions_use_no_producer_id():
    for state, event in PAIRS:
        assert not decide(txn(state), event, fields()).takes_producer_id


# --- time ---


def test_a_transaction_times_out_after_its_time_and_fences_its_owner():
    open_ = txn(S.ONGOING, started_ms=NOW_MS - TIMEOUT_MS - 1)
    assert (
        outcome(decide(open_._replace(started_ms=NOW_MS - TIMEOUT_MS), TransactionEvent.TIMEOUT, fields()))[1] is None
    )
    for broker_version in (1, 2):
        to = decide(open_, TransactionEvent.TIMEOUT, fields(broker_version=broker_version)).to
        assert to is not None
        assert (to.state, to.epoch) == (S.PREPARE_ABORT, EPOCH + 1)


@pytest.mark.parametrize("state", SEEN, ids=lambda value: value.name)
def test_only_idle_ids_expire(state: TxnState):
    old = txn(state, updated_ms=NOW_MS - DAY_MS)
    expected = (E.NONE, S.DEAD) if state in IDLE else (E.INVALID_TXN_STATE, None)
    assert outcome(decide(old, TransactionEvent.EXPIRE, fields())) == expected
    assert outcome(decide(old._replace(updated_ms=NOW_MS - DAY_MS + 1), TransactionEvent.EXPIRE, fields()))[1] is None
