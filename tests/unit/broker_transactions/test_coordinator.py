"""The coordinator: nothing is answered before it is durable, and a restart finishes what was decided."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import wraps

import pytest

from semel.broker.transactions.coordinator import COMPLETED_TOGETHER, SETTLE_LIMIT_S, TransactionCoordinator
from semel.broker.transactions.records import TransactionRecord
from semel.broker.transactions.states import LAST_CLIENT_EPOCH, TxnState
from semel.protocol.errors import ErrorCode as E
from tests.support.waiting import PATIENCE_S
from tests.unit.broker_transactions.stand_in import StandInBroker, idle

ID = "orders"
A, B = ("a", 0), ("b", 1)
TIMEOUT_MS = 60_000


def in_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    @wraps(test)
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), PATIENCE_S))

    del run.__wrapped__  # type: ignore[attr-defined]  # pytest would look at its signature
    return run


@asynccontextmanager
async def running(broker: StandInBroker) -> AsyncIterator[TransactionCoordinator]:
    coordinator = broker.coordinator()
    await coordinator.start()
    try:
        yield coordinator
    finally:
        await coordinator.stop()


async def begun(coordinator: TransactionCoordinator, *partitions: tuple[str, int]) -> tuple[int, int]:
    owner = await coordinator.init(ID, TIMEOUT_MS, None)
    assert owner.error is E.NONE
    assert await coordinator.add(ID, owner.producer_id, owner.epoch, partitions or (A,)) is E.NONE
    return owner.producer_id, owner.epoch


@in_loop
async def test_a_transaction_leaves_its_whole_life_in_the_journal():
    broker = StandInBroker()
    async with running(broker) as coordinator:
        pid, epoch = await begun(coordinator, A, B)
        assert (await coordinator.end(ID, pid, epoch, commit=True, is_v2=False)).error is E.NONE
        await idle(coordinator)
        states = [txn.state for txn in broker.log.history(ID) if txn]
        assert states == [TxnState.EMPTY, TxnState.ONGOING, TxnState.PREPARE_COMMIT, TxnState.COMPLETE_COMMIT]
        assert sorted(broker.markers) == [(A, pid, epoch, True), (B, pid, epoch, True)]


@pytest.mark.parametrize("step", ["init", "add", "end"])
def test_nothing_is_answered_before_it_is_durable(step: str):
    @in_loop
    async def test() -> None:
        broker = StandInBroker()
        async with running(broker) as coordinator:
            requests = {
                "init": lambda pid, epoch: coordinator.init("other", TIMEOUT_MS, None),
                "add": lambda pid, epoch: coordinator.add(ID, pid, epoch, [B]),
                "end": lambda pid, epoch: coordinator.end(ID, pid, epoch, commit=True, is_v2=True),
            }
            pid, epoch = await begun(coordinator)
            broker.log.gate.clear()
            before = coordinator.ids.find(ID)
            answer = asyncio.ensure_future(requests[step](pid, epoch))
            for _ in range(20):
                await asyncio.sleep(0)
            assert not answer.done()
            assert coordinator.ids.find(ID) == before
            assert not broker.markers
            broker.log.gate.set()
            await answer

    test()


@in_loop
async def test_while_a_transition_is_pending_others_get_a_retriable_error():
    broker = StandInBroker()
    async with running(broker) as coordinator:
        pid, epoch = await begun(coordinator)
        broker.log.gate.clear()
        pending = asyncio.ensure_future(coordinator.add(ID, pid, epoch, [B]))
        await asyncio.sleep(0)
        others = await asyncio.gather(
            coordinator.init(ID, TIMEOUT_MS, None),
            coordinator.end(ID, pid, epoch, commit=True, is_v2=False),
            coordinator.end(ID, pid, epoch, commit=False, is_v2=True),
        )
        assert {owner.error for owner in others} == {E.CONCURRENT_TRANSACTIONS}
        assert await coordinator.add(ID, pid, epoch, [("c", 0)]) is E.CONCURRENT_TRANSACTIONS
        broker.log.gate.set()
        assert await pending is E.NONE


@in_loop
async def test_a_commit_is_answered_while_its_markers_are_on_their_way():
    broker = StandInBroker()
    async with running(broker) as coordinator:
        pid, epoch = await begun(coordinator)
        broker.marker_gate.clear()
        owner = await coordinator.end(ID, pid, epoch, commit=True, is_v2=True)
        assert owner == (E.NONE, pid, epoch + 1)
        txn = coordinator.ids.find(ID)
        assert txn is not None
        assert txn.state is TxnState.PREPARE_COMMIT
        started = asyncio.get_running_loop().time()
        assert await coordinator.add(ID, pid, epoch + 1, [A], 2) is E.CONCURRENT_TRANSACTIONS
        assert asyncio.get_running_loop().time() - started >= SETTLE_LIMIT_S * 0.9
        waiting = asyncio.ensure_future(coordinator.add(ID, pid, epoch + 1, [A], 2))
        await asyncio.sleep(0)
        broker.marker_gate.set()
        assert await waiting is E.NONE  # the next transaction begins as soon as the markers are written


@in_loop
async def test_a_client_that_goes_away_does_not_stop_its_commit_half_way():
    broker = StandInBroker()
    async with running(broker) as coordinator:
        pid, epoch = await begun(coordinator)
        broker.log.gate.clear()
        request = asyncio.ensure_future(coordinator.end(ID, pid, epoch, commit=True, is_v2=False))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        request.cancel()
        await asyncio.sleep(0)
        broker.log.gate.set()
        await idle(coordinator)
        txn = coordinator.ids.find(ID)
        assert txn is not None
        assert txn.state is TxnState.COMPLETE_COMMIT


@in_loop
async def test_parallel_first_writes_of_a_v2_transaction_all_get_in():
    broker = StandInBroker()
    async with running(broker) as coordinator:
        owner = await coordinator.init(ID, TIMEOUT_MS, None)

        async def write(number: int) -> dict[tuple[str, int], E]:
            await coordinator.settle(ID)
            return await coordinator.allow_append(ID, owner.producer_id, owner.epoch, [("t", number)], 12)

        answers = await asyncio.gather(*(write(number) for number in range(8)))
        assert all(set(answer.values()) == {E.NONE} for answer in answers)
        txn = coordinator.ids.find(ID)
        assert txn is not None
        assert txn.partitions == {("t", n) for n in range(8)}


@in_loop
async def test_a_write_to_a_partition_that_was_not_added_is_refused_in_words_that_its_version_knows():
    broker = StandInBroker()
    async with running(broker) as coordinator:
        pid, epoch = await begun(coordinator, A)

        async def ask(partition: tuple[str, int], version: int, **who: int) -> E:
            found = await coordinator.allow_append(
                ID, who.get("pid", pid), who.get("epoch", epoch), [partition], version
            )
            return found[partition]

        assert await ask(A, 9) is E.NONE
        assert await ask(B, 10) is E.INVALID_TXN_STATE
        assert await ask(B, 11) is E.TRANSACTION_ABORTABLE
        assert await ask(A, 9, epoch=epoch + 1) is E.INVALID_PRODUCER_EPOCH
        assert await ask(A, 12, epoch=epoch - 1) is E.INVALID_PRODUCER_EPOCH
        assert await ask(A, 12, pid=99_999) is E.INVALID_PRODUCER_ID_MAPPING
        assert await ask(B, 12) is E.NONE
        broker.marker_gate.clear()
        await coordinator.end(ID, pid, epoch, commit=False, is_v2=False)
        assert await ask(A, 9) is E.NOT_ENOUGH_REPLICAS
        assert await ask(A, 12) is E.CONCURRENT_TRANSACTIONS
        broker.marker_gate.set()


# --- restart ---


@in_loop
async def test_a_restart_finishes_what_was_prepared():
    broker = StandInBroker()
    broker.marker_gate.clear()
    async with running(broker) as coordinator:
        pid, epoch = await begun(coordinator, A, B)
        assert (await coordinator.end(ID, pid, epoch, commit=True, is_v2=True)).error is E.NONE
    broker.log.crash()
    broker.marker_gate.set()
    async with running(broker) as coordinator:
        await idle(coordinator)
        txn = coordinator.ids.find(ID)
        assert txn is not None
        assert txn.state is TxnState.COMPLETE_COMMIT
        assert sorted(broker.markers) == [(A, pid, epoch + 1, True), (B, pid, epoch + 1, True)]
        # the client that never got its answer asks again, in both ways that it can
        assert await coordinator.end(ID, pid, epoch, commit=True, is_v2=True) == (E.NONE, pid, epoch + 1)
        assert await coordinator.init(ID, TIMEOUT_MS, (pid, epoch)) == (E.NONE, pid, epoch + 1)


@in_loop
async def test_a_decision_that_was_not_durable_never_happened():
    broker = StandInBroker()
    async with running(broker) as coordinator:
        pid, epoch = await begun(coordinator)
        broker.log.gate.clear()
        request = asyncio.ensure_future(coordinator.end(ID, pid, epoch, commit=True, is_v2=False))
        for _ in range(5):
            await asyncio.sleep(0)
        request.cancel()
    broker.log.crash()
    broker.log.gate.set()
    async with running(broker) as coordinator:
        txn = coordinator.ids.find(ID)
        assert txn is not None
        assert txn.state is TxnState.ONGOING
        assert not broker.markers
        assert (await coordinator.end(ID, pid, epoch, commit=True, is_v2=False)).error is E.NONE


@in_loop
async def test_an_open_transaction_lives_on_and_its_timeout_still_counts_from_its_start():
    broker = StandInBroker()
    async with running(broker) as coordinator:
        await begun(coordinator)
    broker.clock.advance_ms(TIMEOUT_MS)
    async with running(broker) as coordinator:
        assert await coordinator.abort_timed_out() == 0
        broker.clock.advance_ms(1)
        assert await coordinator.abort_timed_out() == 1


@in_loop
async def test_the_retry_of_a_bump_is_known_after_a_restart():
    broker = StandInBroker()
    async with running(broker) as coordinator:
        owner = await coordinator.init(ID, TIMEOUT_MS, None)
        bumped = await coordinator.init(ID, TIMEOUT_MS, (owner.producer_id, owner.epoch))
        assert bumped.epoch == owner.epoch + 1
    async with running(broker) as coordinator:
        assert await coordinator.init(ID, TIMEOUT_MS, (owner.producer_id, owner.epoch)) == bumped


@in_loop
async def test_no_producer_id_is_given_out_twice():
    broker = StandInBroker()
    seen: list[int] = []
    for _ in range(3):
        async with running(broker) as coordinator:
            seen += [coordinator.new_producer_id() for _ in range(1500)]
            seen += [(await coordinator.init(f"id-{len(seen)}", TIMEOUT_MS, None)).producer_id]
    assert len(set(seen)) == len(seen)
    broker.next_producer_id = 0  # the store is lost, the journal is not
    async with running(broker) as coordinator:
        assert coordinator.new_producer_id() > max(seen[-1], 0)


# --- time ---


@in_loop
async def test_a_timed_out_transaction_is_aborted_and_its_owner_fenced():
    broker = StandInBroker()
    async with running(broker) as coordinator:
        pid, epoch = await begun(coordinator)
        broker.clock.advance_ms(TIMEOUT_MS + 1)
        assert await coordinator.abort_timed_out() == 1
        await idle(coordinator)
        assert broker.markers == [(A, pid, epoch + 1, False)]
        assert (await coordinator.end(ID, pid, epoch, commit=True, is_v2=False)).error is E.PRODUCER_FENCED
        assert await coordinator.add(ID, pid, epoch, [B]) is E.PRODUCER_FENCED


@in_loop
async def test_a_transaction_times_out_although_the_wall_clock_was_set_back():
    broker = StandInBroker()
    async with running(broker) as coordinator:
        await begun(coordinator)
        assert await coordinator.abort_timed_out() == 0
        broker.clock.set_wall_ms(-3_600_000)
        broker.clock.advance_ms(TIMEOUT_MS)
        assert await coordinator.abort_timed_out() == 0
        broker.clock.advance_ms(1)
        assert await coordinator.abort_timed_out() == 1


@in_loop
async def test_unused_ids_are_forgotten_and_stay_forgotten():
    broker = StandInBroker()
    async with running(broker) as coordinator:
        for number in range(5000):
            await coordinator.init(f"once-{number}", TIMEOUT_MS, None)
        await begun(coordinator)
        broker.clock.advance_ms(7 * 86_400_000)
        await coordinator.init("young", TIMEOUT_MS, None)
        assert await coordinator.forget_unused() == 5000
        assert len(coordinator.ids) == 2
        assert coordinator.ids.find(ID) is not None  # an open transaction never expires
        assert broker.log.history("once-7")[-1] is None
        assert await coordinator.add("once-7", 7, 0, [A]) is E.INVALID_PRODUCER_ID_MAPPING
    async with running(broker) as coordinator:
        assert len(coordinator.ids) == 2


# --- trouble ---


@in_loop
async def test_a_refused_journal_write_leaves_the_id_as_it_was():
    broker = StandInBroker()
    async with running(broker) as coordinator:
        pid, epoch = await begun(coordinator)
        before = coordinator.ids.find(ID)
        broker.log.refuse = E.KAFKA_STORAGE_ERROR
        owner = await coordinator.end(ID, pid, epoch, commit=True, is_v2=False)
        assert owner.error is E.NOT_COORDINATOR
        assert (await coordinator.init("never", TIMEOUT_MS, None)).error is E.NOT_COORDINATOR
        assert coordinator.ids.find("never") is None
        assert coordinator.ids.find(ID) == before
        broker.log.refuse = None
        assert (await coordinator.end(ID, pid, epoch, commit=True, is_v2=False)).error is E.NONE


@in_loop
async def test_after_a_failed_fsync_the_id_does_not_move_while_the_log_cannot_be_read():
    broker = StandInBroker()
    async with running(broker) as coordinator:
        pid, epoch = await begun(coordinator)
        broker.log.fail_sync = True
        assert (await coordinator.end(ID, pid, epoch, commit=True, is_v2=False)).error is E.NOT_COORDINATOR
        assert broker.log.failed_syncs == 1, "the fault did not fire"
        owner = await coordinator.end(ID, pid, epoch, commit=False, is_v2=False)
        assert owner.error is E.CONCURRENT_TRANSACTIONS
        assert not broker.markers


@pytest.mark.parametrize("step", ["init", "add", "commit", "abort", "timeout"])
def test_after_a_failed_fsync_the_id_can_be_used_as_soon_as_the_log_is_sound(step: str, monkeypatch):
    monkeypatch.setattr("semel.broker.coordinator_runtime.RETRY_S", 0.01)

    @in_loop
    async def run():
        broker = StandInBroker()
        async with running(broker) as coordinator:
            pid, epoch = await begun(coordinator)
            steps = {
                "init": lambda: coordinator.init("new", TIMEOUT_MS, None),
                "add": lambda: coordinator.add(ID, pid, epoch, (B,)),
                "commit": lambda: coordinator.end(ID, pid, epoch, commit=True, is_v2=True),
                "abort": lambda: coordinator.end(ID, pid, epoch, commit=False, is_v2=True),
                "timeout": coordinator.abort_timed_out,
            }
            if step == "timeout":
                broker.clock.advance_ms(TIMEOUT_MS + 1)
            before = coordinator.ids.find(ID)
            broker.log.fail_sync = True
            await steps[step]()
            assert broker.log.failed_syncs == 1, "the fault did not fire"
            assert not broker.markers
            broker.log.fail_sync = False
            await idle(coordinator)
            assert coordinator.ids.find(ID) == before
            assert coordinator.ids.find("new") is None
            result = await steps[step]()
            assert getattr(result, "error", result) in (E.NONE, 1)
            await idle(coordinator)
            if step in ("commit", "abort", "timeout"):
                assert [commit for _, _, _, commit in broker.markers] == [step == "commit"]

    run()


@in_loop
async def test_a_tombstone_whose_fsync_failed_leaves_its_id_as_it_was():
    broker = StandInBroker()
    async with running(broker) as coordinator:
        owner = await coordinator.init(ID, TIMEOUT_MS, None)
        broker.clock.advance_ms(broker.settings["transactional.id.expiration.ms"] + 1)
        broker.log.fail_sync = True
        assert await coordinator.forget_unused() == 0
        assert broker.log.failed_syncs == 1, "the fault did not fire"
        assert (await coordinator.end(ID, owner.producer_id, owner.epoch, commit=True, is_v2=False)).error is (
            E.CONCURRENT_TRANSACTIONS
        )
        broker.log.fail_sync = False
        await idle(coordinator)
        assert await coordinator.forget_unused() == 1
        assert coordinator.ids.find(ID) is None


@in_loop
async def test_an_unexpected_error_does_not_keep_a_decision_from_its_markers():
    broker = StandInBroker()
    real, failures = broker.write_markers, []

    async def broken_once(*args: object):
        if not failures:
            failures.append(1)
            raise RuntimeError("a bug of the test")
        return await real(*args)  # type: ignore[arg-type]

    broker.write_markers = broken_once  # type: ignore[method-assign,assignment]
    async with running(broker) as coordinator:
        pid, epoch = await begun(coordinator)
        assert (await coordinator.end(ID, pid, epoch, commit=True, is_v2=False)).error is E.NONE
        await idle(coordinator)
        assert failures, "the fault did not fire"
        assert [commit for _, _, _, commit in broker.markers] == [True]
        txn = coordinator.ids.find(ID)
        assert txn is not None
        assert txn.state is TxnState.COMPLETE_COMMIT


@in_loop
async def test_an_unexpected_error_in_a_transition_does_not_block_its_id():
    broker = StandInBroker()
    async with running(broker) as coordinator:
        pid, epoch = await begun(coordinator)
        real = broker.log.append

        def broken(*_: object) -> tuple[int, bool]:
            broker.log.append = real  # type: ignore[method-assign]
            raise RuntimeError("a bug of the test")

        broker.log.append = broken  # type: ignore[method-assign]
        owner = await coordinator.end(ID, pid, epoch, commit=True, is_v2=False)
        assert owner.error is E.UNKNOWN_SERVER_ERROR
        await idle(coordinator)
        assert (await coordinator.end(ID, pid, epoch, commit=True, is_v2=False)).error is E.NONE


@in_loop
async def test_markers_of_deleted_topics_and_of_fenced_partitions_do_not_hold_a_transaction_up():
    broker = StandInBroker()
    broker.marker_codes = {A: E.UNKNOWN_TOPIC_OR_PARTITION, B: E.INVALID_PRODUCER_EPOCH}
    async with running(broker) as coordinator:
        pid, epoch = await begun(coordinator, A, B)
        await coordinator.end(ID, pid, epoch, commit=True, is_v2=False)
        await idle(coordinator)
        txn = coordinator.ids.find(ID)
        assert txn is not None
        assert txn.state is TxnState.COMPLETE_COMMIT


@in_loop
async def test_bad_input_changes_nothing():
    broker = StandInBroker()
    async with running(broker) as coordinator:
        assert (await coordinator.init("", TIMEOUT_MS, None)).error is E.INVALID_REQUEST
        for timeout_ms in (0, -1, 900_001):
            assert (await coordinator.init(ID, timeout_ms, None)).error is E.INVALID_TRANSACTION_TIMEOUT
        assert await coordinator.add("", 1, 0, [A]) is E.INVALID_REQUEST
        assert await coordinator.add("nobody", 1, 0, [A]) is E.INVALID_PRODUCER_ID_MAPPING
        assert (await coordinator.end("", 1, 0, commit=True, is_v2=False)).error is E.INVALID_REQUEST
        assert (await coordinator.end("nobody", 1, 0, commit=True, is_v2=True)).error is E.INVALID_PRODUCER_ID_MAPPING
        assert coordinator.verify("", 1, 0, A) is E.INVALID_REQUEST
        assert coordinator.verify("nobody", 1, 0, A) is E.INVALID_PRODUCER_ID_MAPPING
        assert len(coordinator.ids) == 0
        assert not any(broker.log.records)


@in_loop
async def test_sixteen_bits_of_epoch_are_enough():
    """The last epochs of a producer id, over a restart: the id moves to a new producer id and goes on."""
    broker = StandInBroker()
    async with running(broker) as coordinator:
        owner = await coordinator.init(ID, TIMEOUT_MS, None)
        txn = coordinator.ids.find(ID)
        assert txn is not None
        record = TransactionRecord(ID, txn._replace(epoch=LAST_CLIENT_EPOCH - 1))
        coordinator.ids.replay(0, 0, record, None)
        pid, epoch = owner.producer_id, LAST_CLIENT_EPOCH - 1
        seen = []
        for _ in range(4):
            assert await coordinator.add(ID, pid, epoch, [A], 2) is E.NONE
            ended = await coordinator.end(ID, pid, epoch, commit=True, is_v2=True)
            assert ended.error is E.NONE
            pid, epoch = ended.producer_id, ended.epoch
            seen.append((pid, epoch))
            await idle(coordinator)
        fresh = seen[-1][0]
        assert fresh != owner.producer_id
        assert seen == [(owner.producer_id, LAST_CLIENT_EPOCH), (fresh, 0), (fresh, 1), (fresh, 2)]
        assert max(epoch for _, _, epoch, _ in broker.markers) == LAST_CLIENT_EPOCH + 1


async def _end_at_once(broker: StandInBroker, coordinator: TransactionCoordinator, names: list[str]) -> None:
    """All of them begin, and are committed in one turn of the event loop."""
    owners = [await coordinator.init(name, TIMEOUT_MS, None) for name in names]
    for name, owner in zip(names, owners, strict=True):
        assert await coordinator.add(name, owner.producer_id, owner.epoch, (A,)) is E.NONE
    broker.log.batches.clear()
    ends = [
        coordinator.end(name, owner.producer_id, owner.epoch, commit=True, is_v2=True)
        for name, owner in zip(names, owners, strict=True)
    ]
    assert all(ended.error is E.NONE for ended in await asyncio.gather(*ends))
    await idle(coordinator)


def _ids_of_one_partition(broker: StandInBroker, count: int) -> list[str]:
    names = (f"id-{number}" for number in range(1_000))
    return [name for name in names if broker.log.partition_for(name) == 0][:count]


@in_loop
async def test_transactions_that_end_in_one_turn_share_the_batch_of_their_last_records():
    broker = StandInBroker()
    names = _ids_of_one_partition(broker, COMPLETED_TOGETHER + 3)
    async with running(broker) as coordinator:
        await _end_at_once(broker, coordinator, names)
        assert broker.log.batches == [1] * len(names) + [COMPLETED_TOGETHER, 3]
        for name in names:
            states = [txn.state for txn in broker.log.history(name) if txn]
            assert states[-2:] == [TxnState.PREPARE_COMMIT, TxnState.COMPLETE_COMMIT]


@in_loop
async def test_ends_that_do_not_fit_one_batch_are_written_one_by_one():
    from semel.broker.transactions import coordinator as module

    before, module.RETRY_S = module.RETRY_S, 0.001
    try:
        broker = StandInBroker()
        broker.log.most_records = 1
        names = _ids_of_one_partition(broker, 3)
        async with running(broker) as coordinator:
            await _end_at_once(broker, coordinator, names)
            assert broker.log.batches == [1] * 6
            assert all(coordinator.ids.find(name).state is TxnState.COMPLETE_COMMIT for name in names)
    finally:
        module.RETRY_S = before
