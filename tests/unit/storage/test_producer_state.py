"""The append rules, case by case, in their order. Pure code: no files, no clock."""

from __future__ import annotations

import pytest

from semel.protocol.errors import ErrorCode
from semel.storage.producer_state import EPOCH_MAX, NO_OFFSET, BatchInfo, DataBatch, MarkerBatch, ProducerStates
from semel.storage.results import StorageError

SEQUENCE_MAX = 2**31 - 1
PID = 7


class Partition:
    """Producer states behind a log that only counts offsets."""

    def __init__(self) -> None:
        self.states = ProducerStates()
        self.end = 0

    def send(
        self, first: int, last: int | None = None, *, epoch: int = 0, txn: bool = False, guard: object | None = None
    ) -> BatchInfo | None:
        last = first if last is None else last
        data = DataBatch(PID, epoch, first, last, txn, 1000)
        duplicate = self.states.check_client_batch(data, guard)
        if duplicate is None:
            count = (last - first) % (SEQUENCE_MAX + 1) + 1
            self.states.apply_data(data, self.end, self.end + count - 1, now_ms=1000)
            self.end += count
        return duplicate

    def send_verified(self, first: int, *, epoch: int = 0, bump: bool = False) -> BatchInfo | None:
        guard = self.states.start_verification(PID, epoch, first, supports_epoch_bump=bump, now_ms=0)
        return self.send(first, epoch=epoch, txn=True, guard=guard)

    def mark(self, *, epoch: int = 0, coordinator_epoch: int = 0, commit: bool = True, version: int = 1) -> bool:
        marker = MarkerBatch(PID, epoch, coordinator_epoch, commit, 2000)
        self.states.check_marker(marker, version)
        completed = self.states.apply_marker(marker, self.end)
        self.end += 1
        return completed is not None

    @property
    def entry(self):
        return self.states.producers[PID]


@pytest.fixture
def partition() -> Partition:
    return Partition()


def refused(code: ErrorCode):
    class _Refused:
        def __enter__(self):
            self._raises = pytest.raises(StorageError)
            self.info = self._raises.__enter__()

        def __exit__(self, *exc):
            result = self._raises.__exit__(*exc)
            assert self.info.value.code is code
            return result

    return _Refused()


# Rule 1: retries


def test_retried_batch_returns_original_offset(partition: Partition) -> None:
    partition.send(0, 9)
    assert partition.send(0, 9) == BatchInfo(0, 9, 0, 9, 1000)
    assert partition.end == 10


def test_each_of_the_last_five_batches_is_recognised_and_the_sixth_is_not(partition: Partition) -> None:
    for number in range(6):
        partition.send(number)
    for number in range(1, 6):
        duplicate = partition.send(number)
        assert duplicate is not None
        assert duplicate.base_offset == number
    with refused(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER):
        partition.send(0)


def test_a_retry_with_another_range_is_not_a_duplicate(partition: Partition) -> None:
    partition.send(0, 4)
    with refused(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER):
        partition.send(0, 3)
    with refused(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER):
        partition.send(0, 5)


def test_a_retry_is_recognised_before_its_old_transaction_is_missed(partition: Partition) -> None:
    """Rule 1 comes before rule 2: the transaction ended, but the batch is there."""
    partition.send_verified(0)
    partition.mark()
    assert partition.send(0, txn=True) is not None


def test_the_same_sequences_in_another_epoch_are_not_a_retry(partition: Partition) -> None:
    partition.send(0, epoch=0)
    assert partition.send(0, epoch=1) is None
    with refused(ErrorCode.INVALID_PRODUCER_EPOCH):
        partition.send(0, epoch=0)


# Rule 2: transactions are verified


def test_transactional_batch_without_open_or_verified_transaction_is_refused(partition: Partition) -> None:
    with refused(ErrorCode.INVALID_TXN_STATE):
        partition.send(0, txn=True)
    assert partition.states.producers == {}


def test_guard_opens_a_transaction_and_later_batches_need_none(partition: Partition) -> None:
    partition.send_verified(0)
    assert partition.send(1, txn=True) is None
    assert partition.states.start_verification(PID, 0, 2, supports_epoch_bump=False, now_ms=0) is None


def test_a_marker_makes_an_earlier_guard_void(partition: Partition) -> None:
    """A late confirmation of a coordinator must not open a transaction that nobody will end."""
    guard = partition.states.start_verification(PID, 0, 0, supports_epoch_bump=False, now_ms=0)
    partition.mark(commit=False)
    with refused(ErrorCode.INVALID_TXN_STATE):
        partition.send(0, txn=True, guard=guard)


def test_a_foreign_object_is_no_guard(partition: Partition) -> None:
    partition.states.start_verification(PID, 0, 0, supports_epoch_bump=False, now_ms=0)
    with refused(ErrorCode.INVALID_TXN_STATE):
        partition.send(0, txn=True, guard=object())


def test_a_later_batch_does_not_overtake_one_that_waits_for_verification(partition: Partition) -> None:
    guard = partition.states.start_verification(PID, 0, 5, supports_epoch_bump=False, now_ms=0)
    partition.states.start_verification(PID, 0, 3, supports_epoch_bump=False, now_ms=0)
    with refused(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER):
        partition.send(5, txn=True, guard=guard)
    assert partition.send(3, txn=True, guard=guard) is None


def test_a_new_epoch_resets_what_waits_for_verification(partition: Partition) -> None:
    guard = partition.states.start_verification(PID, 0, 3, supports_epoch_bump=False, now_ms=0)
    partition.states.start_verification(PID, 1, 4, supports_epoch_bump=False, now_ms=0)
    assert partition.send(4, epoch=1, txn=True, guard=guard) is None


# Rule 3: epochs


def test_zombie_epoch_is_refused_and_changes_nothing(partition: Partition) -> None:
    partition.send(0, epoch=5)
    with refused(ErrorCode.INVALID_PRODUCER_EPOCH):
        partition.send(1, epoch=4)
    assert partition.entry.epoch == 5
    assert partition.entry.last_sequence == 0


def test_epoch_carried_by_a_marker_fences_too(partition: Partition) -> None:
    partition.send_verified(0, epoch=0)
    partition.mark(epoch=1, commit=False)
    with refused(ErrorCode.INVALID_PRODUCER_EPOCH):
        partition.send(1, epoch=0)


# Rule 4: where sequences start


def test_new_epoch_must_start_at_zero(partition: Partition) -> None:
    partition.send(0)
    with refused(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER):
        partition.send(1, epoch=1)
    assert partition.send(0, epoch=1) is None


def test_unknown_producer_may_start_at_any_sequence(partition: Partition) -> None:
    assert partition.send(17) is None
    assert partition.send(18) is None


def test_unknown_producer_that_speaks_tv2_must_start_at_zero(partition: Partition) -> None:
    with refused(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER):
        partition.send_verified(3, bump=True)
    assert partition.send_verified(0, bump=True) is None


def test_epoch_change_clears_the_history(partition: Partition) -> None:
    for number in range(4):
        partition.send(number)
    partition.send(0, epoch=1)
    assert [info.first_sequence for info in partition.entry.batches] == [0]


def test_marker_with_a_new_epoch_clears_the_history(partition: Partition) -> None:
    partition.send_verified(0)
    partition.mark(epoch=1)
    assert partition.entry.batches == []
    assert partition.send_verified(0, epoch=1) is None


def test_marker_with_the_same_epoch_keeps_the_history(partition: Partition) -> None:
    partition.send_verified(0)
    partition.mark(epoch=0)
    assert partition.send_verified(1) is None


def test_producer_known_by_a_marker_alone_must_start_at_zero(partition: Partition) -> None:
    partition.mark(epoch=3)
    with refused(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER):
        partition.send(4, epoch=3)
    assert partition.send(0, epoch=3) is None


# Rule 5: the next sequence


@pytest.mark.parametrize("sequence", [0, 2, 3, 100])
def test_a_gap_or_a_repetition_is_refused(partition: Partition, sequence: int) -> None:
    partition.send(5)
    partition.send(6, 9)
    with refused(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER):
        partition.send(sequence)
    assert partition.send(10) is None


def test_sequence_after_the_highest_is_zero(partition: Partition) -> None:
    partition.send(SEQUENCE_MAX)
    with refused(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER):
        partition.send(1)
    assert partition.send(0) is None


def test_a_batch_may_wrap_in_its_middle_and_its_retry_is_recognised(partition: Partition) -> None:
    partition.send(SEQUENCE_MAX - 2)
    partition.send(SEQUENCE_MAX - 1, 3)  # 2^31-2, 2^31-1, 0, 1, 2, 3
    assert partition.send(SEQUENCE_MAX - 1, 3) is not None
    assert partition.send(4) is None


# Rule 6: no plain data inside a transaction


def test_plain_batch_inside_an_open_transaction_is_refused(partition: Partition) -> None:
    partition.send_verified(0)
    with refused(ErrorCode.INVALID_TXN_STATE):
        partition.send(1)
    partition.mark()
    assert partition.send(1) is None


def test_order_of_the_rules_epoch_before_sequence_before_mixing(partition: Partition) -> None:
    partition.send_verified(0, epoch=2)
    with refused(ErrorCode.INVALID_PRODUCER_EPOCH):
        partition.send(9, epoch=1)
    with refused(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER):
        partition.send(9, epoch=2)
    with refused(ErrorCode.INVALID_TXN_STATE):
        partition.send(1, epoch=2)


# Markers


def test_marker_ends_the_transaction_and_returns_its_first_offset(partition: Partition) -> None:
    partition.send_verified(0)
    assert partition.entry.txn_first_offset == 0
    assert partition.mark()
    assert partition.entry.txn_first_offset == NO_OFFSET
    assert not partition.mark()


def test_marker_of_an_older_epoch_is_refused(partition: Partition) -> None:
    partition.send_verified(0, epoch=2)
    with refused(ErrorCode.INVALID_PRODUCER_EPOCH):
        partition.mark(epoch=1)
    assert partition.entry.txn_first_offset == 0


def test_marker_of_an_older_coordinator_is_refused(partition: Partition) -> None:
    partition.mark(coordinator_epoch=4)
    with refused(ErrorCode.TRANSACTION_COORDINATOR_FENCED):
        partition.mark(coordinator_epoch=3)
    assert partition.mark(coordinator_epoch=4) is False


def test_tv2_marker_must_carry_the_next_epoch(partition: Partition) -> None:
    partition.send_verified(0, epoch=3)
    with refused(ErrorCode.INVALID_PRODUCER_EPOCH):
        partition.mark(epoch=3, version=2)
    assert partition.mark(epoch=4, version=2)


def test_tv2_marker_that_repeats_itself_is_taken_again(partition: Partition) -> None:
    partition.send_verified(0, epoch=3)
    assert partition.mark(epoch=4, version=2)
    assert not partition.mark(epoch=4, version=2)


def test_tv2_marker_at_the_last_epoch_is_taken(partition: Partition) -> None:
    """The epoch can't grow any further: the coordinator fences with the same one."""
    partition.send_verified(0, epoch=EPOCH_MAX)
    assert partition.mark(epoch=EPOCH_MAX, version=2)


# What readers may see


def test_first_unstable_offset_is_the_earliest_open_transaction() -> None:
    states = ProducerStates()
    for producer_id, offset in ((1, 10), (2, 20), (3, 30)):
        states.start_verification(producer_id, 0, 0, supports_epoch_bump=False, now_ms=0)
        states.apply_data(DataBatch(producer_id, 0, 0, 0, True, 0), offset, offset, now_ms=0)
    assert states.first_unstable_offset() == 10
    states.apply_marker(MarkerBatch(2, 0, 0, True, 0), 40)
    states.settle(41)
    assert states.first_unstable_offset() == 10
    completed = states.apply_marker(MarkerBatch(1, 0, 0, False, 0), 41)
    assert completed is not None
    assert completed.last_stable_offset == 30
    states.settle(42)
    assert states.first_unstable_offset() == 30


def test_a_decided_transaction_stays_unstable_until_its_marker_is_durable() -> None:
    states = ProducerStates()
    states.apply_data(DataBatch(1, 0, 0, 0, True, 0), 10, 10, now_ms=0)
    states.apply_marker(MarkerBatch(1, 0, 0, True, 0), 20)
    assert states.first_unstable_offset() == 10
    states.settle(20)
    assert states.first_unstable_offset() == 10
    states.settle(21)
    assert states.first_unstable_offset() is None


# Expiry


def test_idle_producers_expire_but_never_with_an_open_transaction() -> None:
    states = ProducerStates()
    states.apply_data(DataBatch(1, 0, 0, 0, False, 0), 0, 0, now_ms=1000)
    states.apply_data(DataBatch(2, 0, 0, 0, True, 0), 1, 1, now_ms=1000)
    states.apply_data(DataBatch(3, 0, 0, 0, False, 0), 2, 2, now_ms=5000)
    assert states.expire(now_ms=5500, expiration_ms=4000) == 1
    assert sorted(states.producers) == [2, 3]


def test_expiry_counts_from_the_brokers_clock_not_from_the_records_time() -> None:
    """A producer that replays old data is alive."""
    states = ProducerStates()
    ancient_ms = 5
    states.apply_data(DataBatch(1, 0, 0, 0, False, ancient_ms), 0, 0, now_ms=1_000_000)
    assert states.expire(now_ms=1_000_001, expiration_ms=1000) == 0


def test_coordinator_batches_have_no_sequence_but_epoch_and_transaction_are_checked(partition: Partition) -> None:
    guard = partition.states.start_verification(PID, 2, -1, supports_epoch_bump=False, now_ms=0)
    data = DataBatch(PID, 2, -1, -1, True, 0)
    with refused(ErrorCode.INVALID_TXN_STATE):
        partition.states.check_coordinator_batch(data, None)
    partition.states.check_coordinator_batch(data, guard)
    partition.states.apply_data(data, 0, 0, now_ms=0)
    partition.states.check_coordinator_batch(data, None)
    with refused(ErrorCode.INVALID_PRODUCER_EPOCH):
        partition.states.check_coordinator_batch(data._replace(epoch=1), None)


def test_an_open_transaction_does_not_let_another_epoch_in(partition: Partition) -> None:
    guard = partition.states.start_verification(PID, 2, 0, supports_epoch_bump=False, now_ms=0)
    data = DataBatch(PID, 2, 0, 0, True, 0)
    assert partition.states.check_client_batch(data, guard) is None
    partition.states.apply_data(data, 0, 0, now_ms=0)
    assert partition.states.start_verification(PID, 2, 1, supports_epoch_bump=False, now_ms=0) is None
    assert partition.states.start_verification(PID, 3, 0, supports_epoch_bump=False, now_ms=0) is not None
    with refused(ErrorCode.INVALID_TXN_STATE):
        partition.states.check_client_batch(data._replace(epoch=3), None)
    with refused(ErrorCode.INVALID_PRODUCER_EPOCH):
        partition.states.start_verification(PID, 1, 0, supports_epoch_bump=False, now_ms=0)
