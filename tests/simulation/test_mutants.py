"""Deliberate bugs in the client, the loop and the sink, each of which a workload must find within a minute of CPU time.

Found, with the workload, the seed and the seconds of CPU time that it took:

    ignore_buffer_memory                                        clients     0     0.1
    ignore_buffer_memory_with_acks_0                            clients     0     0.1
    start_each_wait_with_the_whole_timeout                      clients     0     0.1
    leave_a_transaction_open_after_a_failed_commit              clients     0     0.2
    lose_a_wakeup_before_poll                                   clients     0     0.2
    lose_records_at_close_with_acks_0                           clients     0     0.5
    reconnect_without_backoff                                   clients     1     0.6
    end_before_the_first_record                                 clients     0     0.7
    send_the_newest_commit_first                                clients     0     0.4
    show_records_of_aborted_transactions                        clients     1     1.4
    end_with_the_first_error                                    clients     1     1.7
    take_a_commit_without_a_response_for_done                   clients     17    12.1
    acknowledge_every_batch_of_a_response                       clients     4     3.8
    commit_what_an_iteration_has_not_yielded                    clients     1     3.8
    lose_what_an_iteration_has_not_yielded                      clients     0     3.9
    leave_a_transaction_open_when_interrupted                   clients     7     6.4
    stay_initializing_when_interrupted                          clients     3     2.9
    keep_the_coordinator_of_assigned_partitions                 clients     4     2.9
    wait_for_a_broker_that_does_not_respond                     clients     4     17.0
    fail_the_transaction_after_its_batch                        clients     23    19.5
    write_batches_again_after_a_timeout_under_a_new_sequence    producer    0     0.1
    commit_after_the_output                                     processing  0     0.7
    commit_offsets_beside_the_transaction                       processing  0     1.0
    go_back_to_where_the_unit_began                             processing  0     1.3
    commit_before_delivery                                      processing  1     1.3
    go_on_where_the_unit_ended                                  processing  0     2.4
    go_on_without_settling                                      processing  0     3.1
    take_a_commit_in_doubt_for_done                             processing  29    39.4
    commit_the_entry_before_the_offsets                         sink        0     0.4
    start_a_batch_without_the_ledger                            sink        0     1.1
    renew_without_the_expected_epoch                            sink        0     1.5
    write_without_the_opening_handshake                         sink        1     3.0
    commit_without_the_count_audit                              sink        2     3.7
    decide_by_the_number_of_the_batch                           sink        4     5.9
    take_an_unknown_end_for_a_commit                            sink        11    13.2
    report_rows_that_are_not_acknowledged                       sink        0     17.0
    run_again_without_a_look_at_the_ledger                      sink        22    24.5

Those of the broker and of the cores alone are in `test_core_mutants.py` and in the files of their workloads;
`docs/simulation.md` says which of them were real bugs. Those under `OPEN` were not shown to be found, or not within a
minute.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from semel.client.cluster_calls import ReconnectBackoff
from semel.client.connection import BrokerConnection
from semel.client.consumer import decode
from semel.client.consumer.base import ConsumerBase
from semel.client.consumer.commits import CommitsCore, PendingCommit
from semel.client.consumer.engine import CommitDriver
from semel.client.consumer.reader import Iteration
from semel.client.errors import CommitUncertainError, KafkaError
from semel.client.producer.accumulator import Accumulator, PartitionQueue
from semel.client.producer.batches import ProducerBatch
from semel.client.producer.coordinator import EndUnknownError
from semel.client.producer.core import ProducerCore
from semel.client.producer.handle import PartitionWriter, TransactionOwner
from semel.client.producer.producer import ProducerTransaction
from semel.client.producer.sender import Sender
from semel.client.producer.transaction import TransactionCore
from semel.client.timing import Deadline
from semel.patterns.process import IdleClock, Processor
from semel.patterns.process_modes import AtLeastOnce, AtMostOnce, ExactlyOnce, Mode
from semel.spark import ledger, sink_options
from semel.spark.transaction import BatchTransaction
from tests.simulation import operating_system
from tests.simulation.client_workload import clients
from tests.simulation.hunting import Hunt, hunt_within_a_minute
from tests.simulation.processing_workload import processing
from tests.simulation.sink_workload import sink
from tests.simulation.workloads import producer_and_broker

Patch = pytest.MonkeyPatch


# --- the producer ---
def fail_the_transaction_after_its_batch(patch: Patch) -> None:
    """A commit that looks in between goes on without the batch."""
    late: list[tuple[ProducerCore, KafkaError]] = []

    def fail(core: ProducerCore, queue: PartitionQueue, batch: ProducerBatch, error: KafkaError) -> None:
        queue.drop(batch)
        batch.finish(-1, -1, error)
        core._release(batch)
        late.append((core, error))

    advance = ProducerCore.advance

    def advance_and_fail(core: ProducerCore, now_s: float) -> Any:
        for waiting in [each for each in late if each[0] is core]:
            late.remove(waiting)
            core.identity.failed(waiting[1])
        return advance(core, now_s)

    patch.setattr(ProducerCore, "_fail", fail)
    patch.setattr(ProducerCore, "advance", advance_and_fail)


def lose_records_at_close_with_acks_0(patch: Patch) -> None:
    flushed = Sender.flushed

    async def not_waited_for(sender: Sender, deadline: Deadline) -> bool:
        return sender.settings.acks_number == 0 or await flushed(sender, deadline)

    patch.setattr(Sender, "flushed", not_waited_for)


def ignore_buffer_memory(patch: Patch) -> None:
    patch.setattr(Accumulator, "has_memory", lambda *_: True)


def ignore_buffer_memory_with_acks_0(patch: Patch) -> None:
    wait_for_memory = Sender._wait_for_memory

    async def unless_acks_0(sender: Sender, *arguments: Any) -> None:
        if sender.settings.acks_number:
            await wait_for_memory(sender, *arguments)

    patch.setattr(Sender, "_wait_for_memory", unless_acks_0)


def leave_a_transaction_open_after_a_failed_commit(patch: Patch) -> None:
    patch.setattr(ProducerTransaction, "_abort", lambda _: None)


def leave_a_transaction_open_when_interrupted(patch: Patch) -> None:
    """`with producer.transaction()`, after a Ctrl-C."""
    abort = ProducerTransaction._abort

    def unless_interrupted(block: ProducerTransaction) -> None:
        if not isinstance(sys.exc_info()[1], KeyboardInterrupt):
            abort(block)

    patch.setattr(ProducerTransaction, "_abort", unless_interrupted)


def stay_initializing_when_interrupted(patch: Patch) -> None:
    failed = TransactionCore.init_failed

    def unless_interrupted(transaction: TransactionCore, error: BaseException) -> None:
        if isinstance(error, Exception):
            failed(transaction, error)

    patch.setattr(TransactionCore, "init_failed", unless_interrupted)


def take_a_commit_without_a_response_for_done(patch: Patch) -> None:
    from semel.client.producer.transactions import TransactionCalls

    commit = TransactionCalls.commit

    async def commit_or_so(transactions: TransactionCalls, deadline: Deadline) -> None:
        try:
            await commit(transactions, deadline)
        except CommitUncertainError:
            transactions.transaction.committed()

    patch.setattr(TransactionCalls, "commit", commit_or_so)


def acknowledge_every_batch_of_a_response(patch: Patch) -> None:
    """Whatever its error says."""
    responded = ProducerCore.responded

    def all_fine(core: ProducerCore, sendings: Any, responses: Any, now_s: float) -> Any:
        for part in responses.values():
            part.error_code = 0
        return responded(core, sendings, responses, now_s)

    patch.setattr(ProducerCore, "responded", all_fine)


def write_batches_again_after_a_timeout_under_a_new_sequence(patch: Patch) -> None:
    lost = ProducerCore.lost

    def restart(core: ProducerCore, sendings: Any, error: Any, now_s: float) -> Any:
        moved = lost(core, sendings, error, now_s)
        for queue, _ in sendings:
            queue.restarting = True
        return moved

    patch.setattr(ProducerCore, "lost", restart)


# --- connections and timeouts ---
def start_each_wait_with_the_whole_timeout(patch: Patch) -> None:
    patch.setattr(Deadline, "remaining_s", lambda deadline: deadline.total_s)
    patch.setattr(Deadline, "expired", property(lambda deadline: False))


def wait_for_a_broker_that_does_not_respond(patch: Patch) -> None:
    patch.setattr(BrokerConnection, "_expire", lambda _: None)


def reconnect_without_backoff(patch: Patch) -> None:
    patch.setattr(ReconnectBackoff, "check", lambda *_: None)


def ignore_the_throttle_time(patch: Patch) -> None:
    """Looked for with less time to take notice than a slow process is given."""
    patch.setattr(operating_system, "THROTTLE_NOTICED_S", 0.2)
    patch.setattr(BrokerConnection, "_throttle", lambda *_: None)


# --- the consumer ---
def keep_the_coordinator_of_assigned_partitions(patch: Patch) -> None:
    """After a connection to it has failed."""

    def keep(driver: CommitDriver[Any], _: str) -> None:
        driver._core.take_doubt()

    patch.setattr(CommitDriver, "_forget_if_in_doubt", keep)


def send_the_newest_commit_first(patch: Patch) -> None:
    def newest(core: CommitsCore, now_s: float) -> PendingCommit | None:
        unsent = [commit for commit in core._queue if not commit.is_sent and commit.retry_at_s <= now_s]
        return unsent[-1] if unsent else None

    patch.setattr(CommitsCore, "next_to_send", newest)


def commit_what_an_iteration_has_not_yielded(patch: Patch) -> None:
    patch.setattr(Iteration, "unprocessed", lambda _: {})


def lose_what_an_iteration_has_not_yielded(patch: Patch) -> None:
    patch.setattr(Iteration, "give_back", lambda *_: None)
    patch.setattr(Iteration, "__iter__", lambda iteration: iter(_shortened(iteration)))


def _shortened(iteration: Iteration) -> list[Any]:
    iteration._yielded = iteration._processed = sum(len(run.records) for run in iteration._runs)
    return [record for run in iteration._runs for record in run.records[:-1] or run.records]


def lose_a_wakeup_before_poll(patch: Patch) -> None:
    """It ends the wait of a poll that is under way, and nothing else."""
    patch.setattr(ConsumerBase, "wakeup", lambda consumer: consumer._engine.wake())


def show_records_of_aborted_transactions(patch: Patch) -> None:
    record_set = decode._record_set
    patch.setattr(decode, "_record_set", lambda chunk, _: record_set(chunk, False))


# --- semel.process ---
def end_before_the_first_record(patch: Patch) -> None:
    """`idle_stop_ms` counts although no broker has said where the partitions end."""

    def is_over(clock: IdleClock, consumer: Any) -> bool:
        if any(consumer.current_lag(partition) for partition in consumer.assignment()):
            clock._idle_since_s = None
            return False
        clock._idle_since_s = clock._clock() if clock._idle_since_s is None else clock._idle_since_s
        return clock._clock() - clock._idle_since_s >= clock._limit_s

    patch.setattr(IdleClock, "is_over", is_over)


def end_with_the_first_error(patch: Patch) -> None:
    """Before the first record a broker that restarts is taken for one that is not there."""
    patch.setattr(Processor, "_is_new", lambda _: False)


def go_back_to_where_the_unit_began(patch: Patch) -> None:
    """Also when the commit that was in doubt has happened."""

    def rewind(mode: Mode) -> None:
        for partition, began in mode.begun.items():
            if partition in mode.consumer.assignment():
                mode.consumer.seek(partition, began)
        mode.begun = {}

    patch.setattr(Mode, "_rewind", rewind)


def go_on_where_the_unit_ended(patch: Patch) -> None:
    patch.setattr(Mode, "_rewind", lambda mode: setattr(mode, "begun", {}))


def commit_offsets_beside_the_transaction(patch: Patch) -> None:
    def settle(mode: ExactlyOnce) -> None:
        if mode.is_working:
            progress = mode._progress()
            mode._commit()
            mode.consumer.commit(progress)
            mode._is_open = False
            mode.begun = {}

    patch.setattr(ExactlyOnce, "settle", settle)


def take_a_commit_in_doubt_for_done(patch: Patch) -> None:
    def commit(mode: ExactlyOnce) -> None:
        try:
            mode.producer.commit_transaction()
        except CommitUncertainError:
            mode.producer.close(timeout_ms=0)
            mode.producer = mode.make_producer()
            mode.producer.init_transactions()

    patch.setattr(ExactlyOnce, "_commit", commit)


def commit_before_delivery(patch: Patch) -> None:
    def settle(mode: AtLeastOnce) -> None:
        if mode.is_working:
            mode.consumer.commit(mode._progress())
            mode._deliveries, mode.begun = [], {}

    patch.setattr(AtLeastOnce, "settle", settle)


def commit_after_the_output(patch: Patch) -> None:
    def take(mode: AtMostOnce, batch: Any, firsts: Any) -> None:
        mode._begin(firsts)
        for delivery in mode._emit(batch):
            delivery.result()
        mode.consumer.commit(mode._progress())
        mode.begun = {}

    patch.setattr(AtMostOnce, "take", take)
    patch.setattr(AtMostOnce, "drop", lambda mode: None)


def take_what_was_read_while_partitions_went(patch: Patch) -> None:
    patch.setattr(Mode, "set_aside", lambda mode, firsts: None)


def go_on_without_settling(patch: Patch) -> None:
    """Units of work end, and their transaction goes on."""
    patch.setattr(Processor, "_settle", lambda processor, mode: setattr(mode, "begun", {}))


# --- the sink ---
def write_without_the_opening_handshake(patch: Patch) -> None:
    init = sink_options.SinkOptions.__post_init__

    def without(options: sink_options.SinkOptions) -> None:
        init(options)
        object.__setattr__(options, "precautions", options.precautions._replace(handshake=False))

    patch.setattr(sink_options.SinkOptions, "__post_init__", without)


def commit_without_the_count_audit(patch: Patch) -> None:
    patch.setattr(BatchTransaction, "audit", lambda *_: None)


def decide_by_the_number_of_the_batch(patch: Patch) -> None:
    def decide(last: Any, batch: Any) -> Any:
        verdict = ledger.Verdict.WRITE if batch.batch_id > last.batch_id else ledger.Verdict.ALREADY_WRITTEN
        return ledger.LedgerDecision(verdict)

    patch.setattr(ledger, "_same_query", decide)


def renew_without_the_expected_epoch(patch: Patch) -> None:
    def renew(owner: TransactionOwner, timeout_s: float | None = None) -> Any:
        owner.identity = owner._coordinator.init(owner.cluster.deadline(timeout_s).remaining_s(), None)
        owner._epoch_used = False
        return owner.identity

    patch.setattr(TransactionOwner, "renew", renew)


def take_an_unknown_end_for_a_commit(patch: Patch) -> None:
    def end(transaction: BatchTransaction, entry: Any) -> None:
        try:
            transaction.owner.end(commit=True)
        except EndUnknownError:
            transaction.owner.renew()
        transaction.last = entry

    patch.setattr(BatchTransaction, "_end", end)


def run_again_without_a_look_at_the_ledger(patch: Patch) -> None:
    def settle(transaction: BatchTransaction, *_: Any) -> bool:
        transaction.renew()
        return False

    patch.setattr(BatchTransaction, "settle", settle)


def commit_the_entry_before_the_offsets(patch: Patch) -> None:
    """Rows and entry in one transaction, the source offsets in the next."""
    from semel.spark import transaction

    write = transaction.write_entry

    def early(handle: Any, application_id: str, entry: Any, owner: TransactionOwner) -> None:
        write(handle, application_id, entry, owner)
        owner.end(commit=True)
        owner.begin([])

    patch.setattr(transaction, "write_entry", early)


def report_rows_that_are_not_acknowledged(patch: Patch) -> None:
    patch.setattr(PartitionWriter, "flush", lambda writer, timeout_s=None: writer._raise_if_failed())


def start_a_batch_without_the_ledger(patch: Patch) -> None:
    patch.setattr(BatchTransaction, "is_written", lambda *_: False)


EXACTLY, AT_LEAST, AT_MOST = (
    partial(processing, guarantee=name) for name in ("exactly_once", "at_least_once", "at_most_once")
)
HUNTS = [
    Hunt(fail_the_transaction_after_its_batch, clients),
    Hunt(lose_records_at_close_with_acks_0, clients),
    Hunt(ignore_buffer_memory, clients),
    Hunt(ignore_buffer_memory_with_acks_0, clients),
    Hunt(leave_a_transaction_open_after_a_failed_commit, clients),
    Hunt(acknowledge_every_batch_of_a_response, clients),
    Hunt(write_batches_again_after_a_timeout_under_a_new_sequence, producer_and_broker),
    Hunt(start_each_wait_with_the_whole_timeout, clients),
    Hunt(reconnect_without_backoff, clients),
    Hunt(go_on_where_the_unit_ended, EXACTLY),
    Hunt(commit_offsets_beside_the_transaction, EXACTLY),
    Hunt(send_the_newest_commit_first, clients),
    Hunt(commit_what_an_iteration_has_not_yielded, clients),
    Hunt(lose_a_wakeup_before_poll, clients),
    Hunt(leave_a_transaction_open_when_interrupted, clients),
    Hunt(stay_initializing_when_interrupted, clients),
    Hunt(ignore_the_throttle_time, clients),
    Hunt(keep_the_coordinator_of_assigned_partitions, clients),
    Hunt(end_before_the_first_record, clients),
    Hunt(end_with_the_first_error, clients),
    Hunt(take_a_commit_without_a_response_for_done, clients),
    Hunt(wait_for_a_broker_that_does_not_respond, clients),
    Hunt(lose_what_an_iteration_has_not_yielded, clients),
    Hunt(show_records_of_aborted_transactions, clients),
    Hunt(renew_without_the_expected_epoch, sink),
    Hunt(go_back_to_where_the_unit_began, EXACTLY),
    Hunt(take_a_commit_in_doubt_for_done, EXACTLY),
    Hunt(go_on_without_settling, EXACTLY),
    Hunt(commit_before_delivery, AT_LEAST),
    Hunt(commit_after_the_output, AT_MOST),
    Hunt(write_without_the_opening_handshake, sink),
    Hunt(commit_without_the_count_audit, sink),
    Hunt(decide_by_the_number_of_the_batch, sink),
    Hunt(take_an_unknown_end_for_a_commit, sink),
    Hunt(run_again_without_a_look_at_the_ledger, sink),
    Hunt(commit_the_entry_before_the_offsets, sink),
    Hunt(report_rows_that_are_not_acknowledged, sink),
    Hunt(start_a_batch_without_the_ledger, sink),
]
OPEN = [
    Hunt(take_what_was_read_while_partitions_went, partial(EXACTLY, long_units=True)),
]


@pytest.mark.full
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize(
    "hunt",
    [*HUNTS, *(pytest.param(hunt, marks=pytest.mark.xfail(reason="not shown yet", strict=False)) for hunt in OPEN)],
    ids=lambda hunt: hunt.mutant.__name__,
)
def test_a_mutant_is_found_within_a_minute(hunt: Hunt, tmp_path: Path, monkeypatch: Patch) -> None:
    hunt_within_a_minute(hunt, tmp_path, monkeypatch)
