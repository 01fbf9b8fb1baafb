"""Deliberate bugs in the cores of the client and in the broker, each of which a workload must find within a minute of
CPU time. `docs/simulation.md` has the table of all mutants."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from semel.broker.broker import CONSUMER_OFFSETS
from semel.broker.coordinator_runtime import CoordinatorRuntime
from semel.broker.groups.classic_group import Group
from semel.broker.groups.commits import Commits
from semel.broker.groups.rebalance import Rebalance
from semel.broker.transactions import states
from semel.broker.transactions.coordinator import TransactionCoordinator
from semel.broker.transactions.states import TxnState
from semel.client.consumer import fetching
from semel.client.consumer.assigned_partitions import AssignedPartitions, ResetTo
from semel.client.consumer.commits import CommitsCore, PendingCommit
from semel.client.consumer.core import Rebalancer
from semel.client.consumer.fetcher import Chunk
from semel.client.consumer.fetching import FetchingCore
from semel.client.errors import KafkaError
from semel.client.producer.accumulator import PartitionQueue
from semel.client.producer.batches import Identity, ProducerBatch
from semel.client.producer.core import ProducerCore
from semel.client.producer.transaction import TransactionCore
from semel.client.settings import ConsumerSettings
from semel.client.types import TopicPartition
from semel.protocol.errors import ErrorCode
from semel.storage import recovery
from semel.storage.open_log import OpenLog
from semel.storage.producer_state import ProducerEntry, ProducerStates
from tests.simulation.client_workload import clients
from tests.simulation.group_workload import consumers
from tests.simulation.hunting import Hunt, hunt_within_a_minute
from tests.simulation.two_phase_workload import two_phase
from tests.simulation.workloads import producer_and_broker, transactions

Patch = pytest.MonkeyPatch


# --- the producer's batches and sequences ---
def forget_that_a_batch_before_may_still_arrive(patch: Patch) -> None:
    """So one that was refused for the gap is written again under a new epoch."""
    drop = PartitionQueue.drop

    def forget(queue: PartitionQueue, batch: ProducerBatch) -> None:
        drop(queue, batch)
        queue._gap_may_close = False

    patch.setattr(PartitionQueue, "drop", forget)


def send_more_than_the_broker_remembers(patch: Patch) -> None:
    patch.setattr(PartitionQueue, "_leave", lambda queue, batch: queue.unacked.remove(batch))


def keep_the_memory_of_batches_that_failed(patch: Patch) -> None:
    release = ProducerCore._release

    def keep(core: ProducerCore, batch: ProducerBatch) -> None:
        release(core, batch)
        core.accumulator.used_bytes += batch.size_bytes if batch.error is not None else 0

    patch.setattr(ProducerCore, "_release", keep)


def number_batches_anew_after_an_error(patch: Patch) -> None:
    refused = PartitionQueue.refused

    def restart(queue: PartitionQueue, *arguments: Any) -> Any:
        verdict = refused(queue, *arguments)
        queue._next_sequence = 0
        return verdict

    patch.setattr(PartitionQueue, "refused", restart)


# --- the broker's log ---
def forget_which_batches_are_stored(patch: Patch) -> None:
    patch.setattr(ProducerEntry, "find", lambda *_: None)
    patch.setattr(ProducerStates, "_check_sequence", lambda *_: None)


def forget_producers_at_a_restart(patch: Patch) -> None:
    patch.setattr(recovery, "_apply", lambda *_: None)


def take_any_sequence(patch: Patch) -> None:
    patch.setattr(ProducerStates, "_check_sequence", lambda *_: None)


def show_records_before_they_are_durable(patch: Patch) -> None:
    appended = OpenLog._appended

    def show(log: OpenLog, segment: Any, base_offset: int, end_offset: int) -> None:
        appended(log, segment, base_offset, end_offset)
        log.advance(end_offset, segment.base_offset, segment.size)

    patch.setattr(OpenLog, "_appended", show)


# --- transactions: the client ---
def write_under_the_old_epoch_after_an_abort(patch: Patch) -> None:
    aborted = TransactionCore.aborted

    def keep(transaction: TransactionCore, identity: Identity | None = None) -> None:
        aborted(transaction, None if identity is None else transaction._identity)

    patch.setattr(TransactionCore, "aborted", keep)


def end_no_transaction_that_was_written_to(patch: Patch) -> None:
    """As if the coordinator did not know of it."""
    end_request = TransactionCore.end_request
    patch.setattr(
        TransactionCore,
        "end_request",
        lambda transaction: end_request(transaction) if len(transaction._written) > 1 else None,
    )


# --- transactions: the broker's coordinator ---
def finish_no_transaction_after_a_restart(patch: Patch) -> None:
    """The decision is durable, its markers are not."""
    finish = TransactionCoordinator._finish

    async def only_fresh(coordinator: TransactionCoordinator, active: Any, *, recovered: bool = False) -> None:
        if not recovered:
            await finish(coordinator, active)

    patch.setattr(TransactionCoordinator, "_finish", only_fresh)


def leave_a_partition_without_its_marker(patch: Patch) -> None:
    mark = TransactionCoordinator._mark_partitions

    async def all_but_one(coordinator: TransactionCoordinator, active: Any) -> None:
        if len(active.txn.partitions) > 1:
            last = max(active.txn.partitions)
            active.txn = active.txn._replace(partitions=active.txn.partitions - {last})
        await mark(coordinator, active)

    patch.setattr(TransactionCoordinator, "_mark_partitions", all_but_one)


def leave_transactions_open_after_their_timeout(patch: Patch) -> None:
    async def none(_: TransactionCoordinator) -> int:
        return 0

    patch.setattr(TransactionCoordinator, "abort_timed_out", none)


def end_the_transaction_of_another_epoch(patch: Patch) -> None:
    end = TransactionCoordinator.end

    async def anyones(
        coordinator: TransactionCoordinator, transactional_id: str, producer_id: int, epoch: int, **how: bool
    ) -> Any:
        active = coordinator.ids.get(transactional_id)
        current = epoch if active is None else active.txn.epoch
        return await end(coordinator, transactional_id, producer_id, current, **how)

    patch.setattr(TransactionCoordinator, "end", anyones)


def write_the_other_marker_after_a_restart(patch: Patch) -> None:
    """A commit that was decided is aborted."""
    finish = TransactionCoordinator._finish

    async def aborting(coordinator: TransactionCoordinator, active: Any, *, recovered: bool = False) -> None:
        if recovered:
            active.txn = active.txn._replace(state=TxnState.PREPARE_ABORT)
        await finish(coordinator, active, recovered=recovered)

    patch.setattr(TransactionCoordinator, "_finish", aborting)


# --- two-phase commit ---
def let_prepared_transactions_time_out(patch: Patch) -> None:
    init = TransactionCoordinator._init

    async def with_timeout(
        coordinator: TransactionCoordinator, id_: str, timeout_ms: int, expected: Any, two_phase: bool, **how: bool
    ) -> Any:
        return await init(coordinator, id_, timeout_ms, expected, False, **how)

    patch.setattr(TransactionCoordinator, "_init", with_timeout)


def abort_what_was_to_be_kept(patch: Patch) -> None:
    init = TransactionCoordinator._init

    async def aborting(coordinator: TransactionCoordinator, *asked: Any, keep_prepared: bool) -> Any:
        return await init(coordinator, *asked, keep_prepared=False)

    patch.setattr(TransactionCoordinator, "_init", aborting)


def forget_at_a_restart_who_keeps_a_transaction(patch: Patch) -> None:
    from semel.broker.transactions import records
    from semel.broker.transactions.states import NO_EPOCH, NO_PRODUCER_ID

    encode = records.encode_value
    patch.setattr(
        records, "encode_value", lambda txn: encode(txn._replace(next_epoch=NO_EPOCH, next_producer_id=NO_PRODUCER_ID))
    )


def write_markers_for_the_keeper(patch: Patch) -> None:
    """They must name the producer whose records are in the log."""
    keep = states.keep

    def under_a_new_id(txn: states.Transaction, fields: states.EventFields, to: TxnState) -> states.Transaction:
        kept = keep(txn, fields, to)
        return kept._replace(producer_id=kept.producer_id + 1_000)

    rules = states.CELLS[TxnState.ONGOING, states.TransactionEvent.INIT]
    wrong = tuple(rule._replace(change=under_a_new_id) if rule.change is keep else rule for rule in rules)
    patch.setitem(states.CELLS, (TxnState.ONGOING, states.TransactionEvent.INIT), wrong)


def commit_whatever_was_kept(patch: Patch) -> None:
    patch.setattr(TransactionCore, "is_to_commit", lambda *_: True)


# --- the group: members ---
def leave_the_assignment_as_it_is_when_a_listener_raises(patch: Patch) -> None:
    """So the member goes on with partitions that others have."""

    async def revoke(rebalancer: Rebalancer, revoked: set[TopicPartition], kept: set[TopicPartition]) -> None:
        if revoked:
            await rebalancer._call(rebalancer._listener.on_partitions_revoked, sorted(revoked))
        rebalancer._assigned.assign(kept)

    patch.setattr(Rebalancer, "_revoke", revoke)


def take_commits_for_done_without_a_response(patch: Patch) -> None:
    responded = CommitsCore.responded

    def fine(core: CommitsCore, commit: PendingCommit, error: KafkaError | None, now_s: float) -> None:
        responded(core, commit, None, now_s)

    patch.setattr(CommitsCore, "responded", fine)


def commit_what_was_read_ahead(patch: Patch) -> None:
    def consumed(assigned: AssignedPartitions) -> dict[TopicPartition, tuple[int, int]]:
        return {state.topic_partition: (state.fetch_offset, state.fetch_epoch) for state in assigned if state.is_ready}

    patch.setattr(AssignedPartitions, "consumed", consumed)


# --- the group: the broker's coordinator ---
def take_commits_of_strangers(patch: Patch) -> None:
    patch.setattr(Commits, "_check_classic", lambda *_: None)


def forget_offsets_at_a_restart(patch: Patch) -> None:
    load = CoordinatorRuntime.load
    patch.setattr(
        CoordinatorRuntime,
        "load",
        lambda runtime: None if runtime.topic.name == CONSUMER_OFFSETS else load(runtime),
    )


def respond_to_commits_before_they_are_durable(patch: Patch) -> None:
    commit = CoordinatorRuntime.commit

    async def at_once(runtime: CoordinatorRuntime[Any], *arguments: Any, **more: Any) -> ErrorCode:
        asyncio.get_running_loop().create_task(commit(runtime, *arguments, **more))
        return ErrorCode.NONE

    patch.setattr(CoordinatorRuntime, "commit", at_once)


def wait_for_members_that_are_dead(patch: Patch) -> None:
    patch.setattr(Rebalance, "_session_over", lambda *_: None)


def give_one_partition_to_two_members(patch: Patch) -> None:
    hand_out = Rebalance._hand_out

    def the_same(rebalance: Rebalance, group: Group) -> None:
        first = min(group.members)
        for member in group.members.values():
            member.assignment = group.members[first].assignment
        hand_out(rebalance, group)

    patch.setattr(Rebalance, "_hand_out", the_same)


# --- fetching ---
def deliver_partitions_that_are_paused(patch: Patch) -> None:
    patch.setattr(Chunk, "is_readable", property(lambda chunk: chunk.is_current))


def start_at_the_end_without_a_committed_offset(patch: Patch) -> None:
    patch.setattr(fetching, "_RESETS", {"earliest": ResetTo.LATEST})


def read_uncommitted_records(patch: Patch) -> None:
    patch.setattr(ConsumerSettings, "isolation", property(lambda _: 0))


def start_behind_the_committed_offset(patch: Patch) -> None:
    found = FetchingCore.committed_found

    def behind(core: FetchingCore, wanted: Any, committed: Any) -> None:
        moved = {place: at._replace(offset=at.offset + 1) for place, at in committed.items()}
        found(core, wanted, moved)

    patch.setattr(FetchingCore, "committed_found", behind)


HUNTS = [
    Hunt(forget_that_a_batch_before_may_still_arrive, producer_and_broker),
    Hunt(send_more_than_the_broker_remembers, producer_and_broker),
    Hunt(keep_the_memory_of_batches_that_failed, producer_and_broker),
    Hunt(number_batches_anew_after_an_error, producer_and_broker),
    Hunt(forget_which_batches_are_stored, producer_and_broker),
    Hunt(forget_producers_at_a_restart, producer_and_broker),
    Hunt(take_any_sequence, producer_and_broker),
    Hunt(show_records_before_they_are_durable, consumers),
    Hunt(write_under_the_old_epoch_after_an_abort, transactions),
    Hunt(end_no_transaction_that_was_written_to, transactions),
    Hunt(finish_no_transaction_after_a_restart, transactions),
    Hunt(leave_a_partition_without_its_marker, transactions),
    Hunt(leave_transactions_open_after_their_timeout, clients),
    Hunt(end_the_transaction_of_another_epoch, transactions),
    Hunt(write_the_other_marker_after_a_restart, transactions),
    Hunt(let_prepared_transactions_time_out, two_phase),
    Hunt(abort_what_was_to_be_kept, two_phase),
    Hunt(forget_at_a_restart_who_keeps_a_transaction, two_phase),
    Hunt(write_markers_for_the_keeper, two_phase),
    Hunt(commit_whatever_was_kept, two_phase),
    Hunt(leave_the_assignment_as_it_is_when_a_listener_raises, consumers),
    Hunt(take_commits_for_done_without_a_response, consumers),
    Hunt(commit_what_was_read_ahead, consumers),
    Hunt(take_commits_of_strangers, consumers),
    Hunt(forget_offsets_at_a_restart, consumers),
    Hunt(respond_to_commits_before_they_are_durable, consumers),
    Hunt(wait_for_members_that_are_dead, consumers),
    Hunt(give_one_partition_to_two_members, consumers),
    Hunt(deliver_partitions_that_are_paused, consumers),
    Hunt(start_at_the_end_without_a_committed_offset, consumers),
    Hunt(read_uncommitted_records, consumers),
    Hunt(start_behind_the_committed_offset, consumers),
]


@pytest.mark.full
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("hunt", HUNTS, ids=lambda hunt: hunt.mutant.__name__)
def test_a_mutant_of_cores_and_broker_is_found_within_a_minute(hunt: Hunt, tmp_path: Path, monkeypatch: Patch) -> None:
    hunt_within_a_minute(hunt, tmp_path, monkeypatch)
