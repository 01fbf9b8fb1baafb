"""KIP-939 in the coordinator: a prepared transaction has no end but its owner's, whoever that is by then."""

from __future__ import annotations

import pytest

from semel.broker.transactions.coordinator import NOTHING_KEPT, TransactionCoordinator
from semel.broker.transactions.records import decode_value, decode_value_by_table, encode_value
from semel.broker.transactions.states import (
    LAST_CLIENT_EPOCH,
    MAX_EPOCH,
    NO_EPOCH,
    NO_PRODUCER_ID,
    NO_TIMEOUT_MS,
    EventFields,
    Transaction,
    TransactionEvent,
    TxnState,
    decide,
)
from semel.protocol.errors import ErrorCode as E
from tests.unit.broker_transactions.stand_in import StandInBroker, idle
from tests.unit.broker_transactions.test_coordinator import ID, TIMEOUT_MS, A, B, in_loop, running

YEAR_MS = 365 * 86_400_000


async def opened(coordinator: TransactionCoordinator) -> tuple[int, int]:
    owner = await coordinator.init(ID, TIMEOUT_MS, None, two_phase_commit=True)
    assert owner.error is E.NONE
    assert await coordinator.add(ID, owner.producer_id, owner.epoch, (A,), client_version=2) is E.NONE
    return owner.producer_id, owner.epoch


async def kept(coordinator: TransactionCoordinator) -> tuple[tuple[int, int], tuple[int, int]]:
    owner, ongoing = await coordinator.init_keeping(ID, TIMEOUT_MS, None, two_phase_commit=True)
    assert owner.error is E.NONE
    return (owner.producer_id, owner.epoch), ongoing


@in_loop
async def test_a_two_phase_transaction_never_times_out_and_its_id_never_expires():
    broker = StandInBroker()
    async with running(broker) as coordinator:
        await opened(coordinator)
        assert (await coordinator.init("classic", TIMEOUT_MS, None)).error is E.NONE
        broker.clock.advance_ms(YEAR_MS)
        assert await coordinator.abort_timed_out() == 0
        assert await coordinator.forget_unused() == 1  # the classic one, which shows that the clock counts
        found = coordinator.ids.find(ID)
        assert found is not None
        assert found.state is TxnState.ONGOING
        assert found.timeout_ms == NO_TIMEOUT_MS


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("is_v2", [True, False])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_new_owner_ends_what_its_predecessor_prepared(commit: bool, is_v2: bool, restarts: bool):
    @in_loop
    async def test() -> None:
        broker = StandInBroker()
        async with running(broker) as coordinator:
            first = await opened(coordinator)
            owner, ongoing = await kept(coordinator)
            assert ongoing == first
            assert owner == (first[0], first[1] + 1)
        if restarts:
            broker.log.crash()
        async with running(broker) as coordinator:
            ended = await coordinator.end(ID, *owner, commit=commit, is_v2=is_v2)
            assert ended.error is E.NONE
            await idle(coordinator)
            marker_epoch = first[1] + (1 if is_v2 else 0)
            assert broker.markers == [(A, first[0], marker_epoch, commit)]
            assert (ended.producer_id, ended.epoch) == (owner[0], owner[1] + (1 if is_v2 else 0))
            # The next transaction of the owner goes on under the identity that the response named.
            assert await coordinator.add(ID, ended.producer_id, ended.epoch, (B,), client_version=2) is E.NONE

    test()


@in_loop
async def test_the_predecessor_is_fenced_and_the_new_owner_can_only_end_it():
    broker = StandInBroker()
    async with running(broker) as coordinator:
        first = await opened(coordinator)
        owner, _ = await kept(coordinator)
        for commit in (True, False):
            refused = await coordinator.end(ID, *first, commit=commit, is_v2=True)
            assert refused.error is E.PRODUCER_FENCED
        assert await coordinator.add(ID, *first, (A,), client_version=2) is E.PRODUCER_FENCED
        assert coordinator.verify(ID, *first, A) is E.PRODUCER_FENCED
        assert await coordinator.add(ID, *owner, (A,), client_version=2) is E.INVALID_TXN_STATE
        assert await coordinator.add(ID, *owner, (B,), client_version=2) is E.INVALID_TXN_STATE
        assert coordinator.verify(ID, *owner, A) is E.INVALID_TXN_STATE
        assert not broker.markers


@in_loop
async def test_every_owner_that_keeps_it_fences_the_one_before():
    broker = StandInBroker()
    async with running(broker) as coordinator:
        first = await opened(coordinator)
        owners = [(await kept(coordinator)) for _ in range(4)]
        assert [ongoing for _, ongoing in owners] == [first] * 4
        assert [owner[1] for owner, _ in owners] == [first[1] + n for n in (1, 2, 3, 4)]
        assert (await coordinator.end(ID, *owners[2][0], commit=False, is_v2=True)).error is E.PRODUCER_FENCED
        last = owners[-1][0]
        assert (await coordinator.end(ID, *last, commit=True, is_v2=True)).error is E.NONE
        await idle(coordinator)
        # A lost response: the same end again is answered in the same way, the other one is refused.
        again = await coordinator.end(ID, *last, commit=True, is_v2=True)
        assert again == (E.NONE, last[0], last[1] + 1)
        assert (await coordinator.end(ID, *last, commit=False, is_v2=True)).error is E.INVALID_TXN_STATE
        assert broker.markers == [(A, first[0], first[1] + 1, True)]


@pytest.mark.parametrize("is_kept", [False, True])
def test_an_owner_that_does_not_keep_it_aborts_it(is_kept: bool):
    @in_loop
    async def test() -> None:
        broker = StandInBroker()
        async with running(broker) as coordinator:
            first = await opened(coordinator)
            last = (await kept(coordinator))[0] if is_kept else first
            refused = await coordinator.init(ID, TIMEOUT_MS, None, two_phase_commit=True)
            assert refused.error is E.CONCURRENT_TRANSACTIONS
            await idle(coordinator)
            assert broker.markers == [(A, first[0], first[1] + 1, False)]
            owner = await coordinator.init(ID, TIMEOUT_MS, None, two_phase_commit=True)
            assert owner == (E.NONE, last[0], last[1] + 2)
            assert (await coordinator.end(ID, *last, commit=True, is_v2=True)).error is E.PRODUCER_FENCED

    test()


@in_loop
async def test_without_an_open_transaction_nothing_is_kept():
    broker = StandInBroker()
    async with running(broker) as coordinator:
        owner, ongoing = await kept(coordinator)
        assert ongoing == NOTHING_KEPT
        assert await coordinator.add(ID, *owner, (A,), client_version=2) is E.NONE
        assert (await coordinator.end(ID, *owner, commit=True, is_v2=True)).error is E.NONE
        await idle(coordinator)
        again, ongoing = await kept(coordinator)
        assert (again[0], ongoing) == (owner[0], NOTHING_KEPT)


def kept_transaction(**changes: object) -> Transaction:
    made = Transaction(
        4000, 4000, 4000, 7, NO_EPOCH, NO_TIMEOUT_MS, TxnState.ONGOING, frozenset({A}), 5, 6, 2, next_epoch=9
    )
    return made._replace(**changes)  # type: ignore[arg-type]


def test_epochs_run_out_while_it_is_kept():
    fresh = EventFields(now_ms=10, fresh_producer_id=7000, keep_prepared=True)
    worn = kept_transaction(
        epoch=LAST_CLIENT_EPOCH, next_producer_id=NO_PRODUCER_ID, next_epoch=NO_EPOCH
    )  # not kept yet
    decision = decide(worn, TransactionEvent.INIT, fresh)
    assert decision.takes_producer_id
    assert decision.to is not None
    assert (decision.to.owner_id, decision.to.owner_epoch) == (7000, 0)
    assert (decision.to.producer_id, decision.to.epoch) == (4000, LAST_CLIENT_EPOCH)
    ended = decide(decision.to, TransactionEvent.COMMIT_V2, EventFields(7000, 0, now_ms=11)).to
    assert ended is not None
    assert (ended.producer_id, ended.epoch) == (4000, MAX_EPOCH)
    done = decide(ended, TransactionEvent.MARKERS_WRITTEN, EventFields(now_ms=12)).to
    assert done is not None
    assert (done.producer_id, done.epoch, done.next_epoch) == (7000, 1, NO_EPOCH)


def test_epochs_of_the_keeper_run_out():
    txn = kept_transaction(next_epoch=LAST_CLIENT_EPOCH)
    fields = EventFields(4000, LAST_CLIENT_EPOCH, now_ms=11, fresh_producer_id=7000)
    decision = decide(txn, TransactionEvent.COMMIT_V2, fields)
    assert decision.takes_producer_id
    assert decision.to is not None
    done = decide(decision.to, TransactionEvent.MARKERS_WRITTEN, EventFields(now_ms=12)).to
    assert done is not None
    assert (done.producer_id, done.epoch) == (7000, 0)
    retried = decide(done, TransactionEvent.COMMIT_V2, fields._replace(fresh_producer_id=NO_PRODUCER_ID))
    assert retried.error is E.NONE
    assert retried.to is None


def test_the_record_has_the_next_epoch_in_kafkas_tag():
    txn = kept_transaction()
    assert decode_value(encode_value(txn)) == decode_value_by_table(encode_value(txn)) == txn
    assert b"\x03\x02\x00\x09" in encode_value(txn)  # tag 3, two bytes, epoch 9
    assert b"\x03\x02" not in encode_value(txn._replace(next_epoch=NO_EPOCH))
