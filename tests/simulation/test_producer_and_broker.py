"""The producer's core and the broker's real code under every fault that the simulated world has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from semel.client.producer.accumulator import PartitionQueue
from semel.client.producer.batches import Identity, ProducerBatch
from semel.client.producer.core import ProducerCore
from semel.client.producer.identities import IdempotentIdentity
from semel.protocol.errors import ErrorCode
from semel.storage import PartitionLog, StorageError, SyncGroup
from tests.simulation.two_phase_workload import two_phase
from tests.simulation.workloads import producer_and_broker, transactions
from tests.simulation.world import World

SEEDS = range(10)  # fresh ones are in test_g5
HUNTED = 60  # seeds, in which each deliberate bug must be found


def test_no_promise_is_broken(tmp_path: Path) -> None:
    faults = 0
    for seed in SEEDS:
        print(f'make simulate ARGS="--workload producer --seed {seed}"')
        faults += producer_and_broker(seed, tmp_path / str(seed)).faults
    assert faults > 500


def test_transactions_are_visible_whole_or_not_at_all(tmp_path: Path) -> None:
    faults = 0
    for seed in SEEDS:
        print(f'make simulate ARGS="--workload transactions --seed {seed}"')
        faults += transactions(seed, tmp_path / str(seed)).faults
    assert faults > 80


def test_a_prepared_transaction_ends_as_it_was_decided_and_never_by_itself(tmp_path: Path) -> None:
    faults = 0
    for seed in (0, 1):
        print(f'make simulate ARGS="--workload two_phase --seed {seed}"')
        faults += two_phase(seed, tmp_path / str(seed)).faults
    assert faults > 50


# --- deliberate bugs ---


def acknowledge_before_the_disk_has_it(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SyncGroup, "notify", lambda self, log, offset, on_outcome: on_outcome(None))


def acknowledge_what_a_failed_fsync_lost(patch: pytest.MonkeyPatch) -> None:
    end_sync = PartitionLog.end_sync
    patch.setattr(PartitionLog, "end_sync", lambda log, job, _: end_sync(log, job, None))


def sync_again_after_a_failed_fsync(patch: pytest.MonkeyPatch) -> None:
    """The kernel has dropped the pages: the next fsync of the same bytes succeeds and writes nothing."""

    def fail(log: PartitionLog, error: Exception) -> StorageError:
        log.opened.mark_all_unsynced()
        log._mark_unsynced()
        return StorageError(ErrorCode.KAFKA_STORAGE_ERROR, str(error))

    patch.setattr(PartitionLog, "_fail", fail)


def stamp_a_batch_in_doubt_anew(patch: pytest.MonkeyPatch) -> None:
    lost = ProducerCore.lost

    def forgetful(core: ProducerCore, sendings: Any, error: Any, now_s: float) -> Any:
        moved = lost(core, sendings, error, now_s)
        for queue, _ in sendings:
            queue.restarting = True
        return moved

    patch.setattr(ProducerCore, "lost", forgetful)


def write_without_sequences(patch: pytest.MonkeyPatch) -> None:
    from semel.client.producer.batches import NO_IDENTITY

    patch.setattr(IdempotentIdentity, "received", lambda self, _: setattr(self, "_identity", NO_IDENTITY))


def take_a_lost_response_for_a_stored_batch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ProducerCore, "lost", lambda core, sendings, *_: core.written(sendings) or [])


def retry_behind_newer_batches(patch: pytest.MonkeyPatch) -> None:
    refused = PartitionQueue.refused

    def last(queue: PartitionQueue, batch: ProducerBatch, *arguments: Any) -> Any:
        verdict = refused(queue, batch, *arguments)
        if batch in queue.unacked:
            queue.unacked.remove(batch)
            queue.queued.append(batch)
        return verdict

    patch.setattr(PartitionQueue, "refused", last)


def count_sequences_from_0_after_every_batch(patch: pytest.MonkeyPatch) -> None:
    stamp = ProducerBatch.stamp
    patch.setattr(ProducerBatch, "stamp", lambda batch, identity, _, txn: stamp(batch, Identity(*identity), 0, txn))


def end_before_everything_is_delivered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ProducerCore, "is_drained", lambda *_: True)


def commit_without_a_batch_that_failed(patch: pytest.MonkeyPatch) -> None:
    def fail(core: ProducerCore, queue: PartitionQueue, batch: ProducerBatch, error: Any) -> None:
        queue.drop(batch)
        batch.finish(-1, -1, error)
        core._release(batch)

    patch.setattr(ProducerCore, "_fail", fail)


TRANSACTION_BUGS = [end_before_everything_is_delivered, commit_without_a_batch_that_failed]
BUGS = [
    acknowledge_before_the_disk_has_it,
    acknowledge_what_a_failed_fsync_lost,
    sync_again_after_a_failed_fsync,
    stamp_a_batch_in_doubt_anew,
    write_without_sequences,
    take_a_lost_response_for_a_stored_batch,
    retry_behind_newer_batches,
    count_sequences_from_0_after_every_batch,
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_deliberate_bug_is_found(
    bug: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    assert is_found(producer_and_broker, tmp_path)


@pytest.mark.parametrize("bug", TRANSACTION_BUGS, ids=lambda bug: bug.__name__)
def test_a_deliberate_bug_in_transactions_is_found(
    bug: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    assert is_found(transactions, tmp_path)


def is_found(workload: Callable[..., World], folder: Path) -> bool:
    for seed in range(HUNTED):
        try:
            workload(seed, folder / str(seed))
        except AssertionError as error:
            print(seed, error)
            return True
    return False
