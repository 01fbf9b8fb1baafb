"""The transaction coordinator. Every method reads: decide, journal, apply, complete.

`states` decides, the journal (`__transaction_state`) remembers, and only then the answer goes out. A transition runs as
a task of its own: a client that goes away in the middle of one must not stop it half-way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Coroutine
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from semel import mutants
from semel.broker import faults
from semel.broker.coordinators import TRANSACTION_STATE, TopicPartition
from semel.broker.eager import Done, start_now
from semel.broker.transactions.errors import append_error, journal_error
from semel.broker.transactions.ledger import Entry, Ledger
from semel.broker.transactions.producer_ids import ProducerIds
from semel.broker.transactions.records import decode_key, decode_value, encode_key, encode_value
from semel.broker.transactions.states import (
    NO_EPOCH,
    NO_PRODUCER_ID,
    PREPARED,
    Ask,
    Decision,
    Event,
    State,
    Transaction,
    decide,
    new_transaction,
)
from semel.protocol.errors import ErrorCode
from semel.storage import StorageError

if TYPE_CHECKING:
    from semel.broker.broker import Broker
    from semel.broker.journal import Journal

log = logging.getLogger(__name__)

SETTLE_LIMIT_S = 0.1  # how long a request waits for the id's pending transition before it gets CONCURRENT_TRANSACTIONS
RETRY_S = 1.0  # between two tries to write a marker or to read the journal
REPLAY_STEP = 1000  # batches; between two steps requests get their turn
EXPIRY_CHUNK = 2000  # ids that one batch of tombstones forgets
_ANSWERS_EARLY = "answer_before_journal" in mutants.ACTIVE

_FAULT_POINTS = {
    State.EMPTY: "init",
    State.ONGOING: "add",
    State.PREPARE_COMMIT: "prepare_commit",
    State.PREPARE_ABORT: "prepare_abort",
    State.COMPLETE_COMMIT: "complete_commit",
    State.COMPLETE_ABORT: "complete_abort",
}
_END_EVENTS = {
    (False, True): Event.COMMIT_V1,
    (False, False): Event.ABORT_V1,
    (True, True): Event.COMMIT_V2,
    (True, False): Event.ABORT_V2,
}


class Owner(NamedTuple):
    """An answer that says who owns an id now."""

    error: ErrorCode
    producer_id: int = NO_PRODUCER_ID
    epoch: int = NO_EPOCH


class TransactionCoordinator:
    """All transactional ids of this broker."""

    def __init__(self, broker: Broker, journal: Journal | None = None) -> None:
        self._broker = broker
        if journal is None:
            from semel.broker.journal import Journal

            journal = Journal(broker, TRANSACTION_STATE)
        self._journal = journal
        self._ledger = Ledger()
        self._ids = ProducerIds(broker.reserve_producer_ids)
        self._partition_of = lru_cache(maxsize=4096)(journal.partition_for)
        self._unknown: dict[int, list[Entry]] = {}  # partition of the journal: ids whose last write may be lost
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def ids(self) -> Ledger:
        """Every id, to look at."""
        return self._ledger

    # --- life ---------------------------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Reloads the journal and finishes what was prepared. What was open stays open, with its time-out running."""
        self._replay()
        for entry in self._ledger.busy():
            if entry.txn.state in PREPARED:
                self._ledger.hold(entry)
                self._spawn(self._finish(entry, recovered=True))
        settings = self._broker.settings
        self._every(settings["transaction.abort.timed.out.transaction.cleanup.interval.ms"], self.abort_timed_out)
        self._every(settings["transaction.remove.expired.transaction.cleanup.interval.ms"], self.forget_unused)

    async def stop(self) -> None:
        """Ends the timers. A transaction whose markers are still under way is finished by the next start."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _replay(self) -> None:
        for partition in range(self._journal.partition_count):
            for header, records in self._journal.replay(partition):
                if not header.is_control:
                    for record in records:
                        self._load(record.key, record.value)

    def _load(self, key: bytes | None, value: bytes | None) -> None:
        transactional_id = decode_key(key) if key is not None else None
        if transactional_id is None:
            return
        txn = decode_value(value) if value is not None else None
        if txn is not None:
            self._ids.skip_to(max(txn.producer_id, txn.next_producer_id) + 1)
        self._ledger.load(transactional_id, txn)

    def _every(self, interval_ms: int, work: Any) -> None:
        async def repeat() -> None:
            while True:
                await asyncio.sleep(interval_ms / 1000)
                try:
                    await work()
                except Exception:
                    log.exception("background work of the transaction coordinator failed; it is tried again")

        self._spawn(repeat())

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the transaction coordinator ended with an error", exc_info=error)

    # --- requests -----------------------------------------------------------------------------------------------------
    def new_producer_id(self) -> int:
        """For a producer without a transactional id."""
        return self._ids.take()

    async def init(self, transactional_id: str, timeout_ms: int, expected: tuple[int, int] | None) -> Owner:
        """InitProducerId: the caller becomes the owner. `expected` is who it thinks it is (KIP-360)."""
        if not transactional_id:
            return Owner(ErrorCode.INVALID_REQUEST)
        if not 0 < timeout_ms <= self._broker.settings["transaction.max.timeout.ms"]:
            return Owner(ErrorCode.INVALID_TRANSACTION_TIMEOUT)
        producer_id, epoch = expected or (NO_PRODUCER_ID, NO_EPOCH)
        entry = await self._settled_entry(transactional_id)
        if entry is None:
            entry = Entry(transactional_id, new_transaction(self._ids.take(), timeout_ms, self._now_ms()))
        ask = self._ask(producer_id=producer_id, epoch=epoch, timeout_ms=timeout_ms)
        decision = self._decide(entry, Event.INIT, ask)
        error = await self._carry_out(entry, decision)
        if error is not ErrorCode.NONE or decision.to is None:
            return Owner(error)
        return Owner(error, decision.to.producer_id, decision.to.epoch)

    async def add(
        self,
        transactional_id: str,
        producer_id: int,
        epoch: int,
        partitions: Collection[TopicPartition],
        client_version: int = 0,
    ) -> ErrorCode:
        """AddPartitionsToTxn, AddOffsetsToTxn, and what TV2 does by writing."""
        if not transactional_id:
            return ErrorCode.INVALID_REQUEST
        entry = await self._settled_entry(transactional_id)
        if entry is None:
            return ErrorCode.INVALID_PRODUCER_ID_MAPPING
        ask = self._ask(
            producer_id=producer_id, epoch=epoch, partitions=frozenset(partitions), client_version=client_version
        )
        return await self._carry_out(entry, self._decide(entry, Event.ADD, ask))

    def verify(self, transactional_id: str, producer_id: int, epoch: int, partition: TopicPartition) -> ErrorCode:
        """Whether a partition is in the id's open transaction."""
        if not transactional_id:
            return ErrorCode.INVALID_REQUEST
        entry = self._ledger.entry(transactional_id)
        if entry is None:
            return ErrorCode.INVALID_PRODUCER_ID_MAPPING
        ask = Ask(producer_id=producer_id, epoch=epoch, partitions=frozenset((partition,)))
        return decide(entry.txn, Event.VERIFY, ask, is_pending=entry.is_pending).error

    async def end(self, transactional_id: str, producer_id: int, epoch: int, *, commit: bool, is_v2: bool) -> Owner:
        """EndTxn. Answered when the decision is durable; the markers follow."""
        if not transactional_id:
            return Owner(ErrorCode.INVALID_REQUEST)
        entry = self._ledger.entry(transactional_id)
        if entry is None:
            return Owner(ErrorCode.INVALID_PRODUCER_ID_MAPPING)
        decision = self._decide(entry, _END_EVENTS[is_v2, commit], self._ask(producer_id=producer_id, epoch=epoch))
        error = await self._carry_out(entry, decision)
        if error is not ErrorCode.NONE:
            return Owner(error)
        after = entry.txn if decision.to is None else _completed(decision.to, self._now_ms())
        return Owner(error, after.producer_id, after.epoch)

    async def allow_append(
        self,
        transactional_id: str | None,
        producer_id: int,
        producer_epoch: int,
        partitions: Collection[TopicPartition],
        produce_version: int,
    ) -> dict[TopicPartition, ErrorCode]:
        """Whether a producer may write its first batch of a transaction to partitions (KIP-890)."""
        is_v2 = produce_version >= 12
        id_ = transactional_id or ""
        if is_v2:
            error = await self.add(id_, producer_id, producer_epoch, partitions, client_version=2)
            return dict.fromkeys(partitions, append_error(error, is_v2=True, knows_abortable=True))
        return {
            partition: append_error(
                self.verify(id_, producer_id, producer_epoch, partition),
                is_v2=False,
                knows_abortable=produce_version >= 11,
            )
            for partition in partitions
        }

    # --- time ---------------------------------------------------------------------------------------------------------
    async def abort_timed_out(self) -> int:
        """Aborts transactions that are open longer than their time-out and fences their producers. Returns how many."""
        started = []
        for entry in self._ledger.busy():
            decision = self._decide(entry, Event.TIMEOUT, self._ask())
            if decision.to is not None:
                log.info("transaction timed out", extra={"transactional_id": entry.id})
                started.append(self._begin(entry, decision.to))
        await asyncio.gather(*(step for step in started if not isinstance(step, Done)))
        return len(started)

    async def forget_unused(self) -> int:
        """Forgets ids that were not used for transactional.id.expiration.ms. Returns how many."""
        expiration_ms = self._broker.settings["transactional.id.expiration.ms"]
        now_ms = self._now_ms()
        forgotten = 0
        chunk: list[Entry] = []
        for transactional_id in self._ledger.unused_since(now_ms - expiration_ms):
            entry = self._ledger.entry(transactional_id)
            if entry is not None and self._decide(entry, Event.EXPIRE, self._ask(expiration_ms=expiration_ms)).to:
                chunk.append(entry)
            if len(chunk) == EXPIRY_CHUNK:
                forgotten += await self._bury(chunk)
                chunk = []
        return forgotten + (await self._bury(chunk) if chunk else 0)

    async def _bury(self, entries: list[Entry]) -> int:
        """Tombstones for a chunk of ids, one batch for each partition of the journal."""
        by_partition: dict[int, list[Entry]] = {}
        for entry in entries:
            self._ledger.hold(entry)
            by_partition.setdefault(self._partition_of(entry.id), []).append(entry)
        if faults.armed:
            await faults.reach("expire.before_journal")
        forgotten = 0
        for partition, members in by_partition.items():
            try:
                await self._journal.append(partition, [(encode_key(entry.id), None) for entry in members])
            except Exception:
                log.exception("cannot forget unused transactional ids; it is tried again")
                for entry in members:
                    self._reread_later(entry)
                continue
            for entry in members:
                self._ledger.forget(entry)
            forgotten += len(members)
        if faults.armed:
            await faults.reach("expire.after_journal")
        return forgotten

    # --- decide, journal, apply, complete -----------------------------------------------------------------------------
    def _now_ms(self) -> int:
        return self._broker.clock.now_ms()

    def _ask(self, **fields: Any) -> Ask:
        return Ask(now_ms=self._now_ms(), broker_version=self._broker.settings["transaction.version"], **fields)

    async def _settled_entry(self, transactional_id: str) -> Entry | None:
        """The id, after a short wait if a transition is pending: mostly the markers of the last transaction."""
        entry = self._ledger.entry(transactional_id)
        if entry is None or not entry.is_pending:
            return entry
        clock = asyncio.get_running_loop().time
        deadline_s = clock() + SETTLE_LIMIT_S
        while entry is not None and entry.is_pending and (remaining_s := deadline_s - clock()) > 0:
            await asyncio.wait((entry.settled(),), timeout=remaining_s)
            entry = self._ledger.entry(transactional_id)
        return entry

    def _decide(self, entry: Entry, event: Event, ask: Ask) -> Decision:
        if entry.txn.exhausted:
            try:
                ask = ask._replace(fresh_producer_id=self._ids.peek())
            except StorageError as error:
                log.error("no producer id", extra={"transactional_id": entry.id, "error": str(error)})
                return Decision(error.code)
        decision = decide(entry.txn, event, ask, is_pending=entry.is_pending)
        if decision.takes_producer_id:
            self._ids.take()
        return decision

    async def _carry_out(self, entry: Entry, decision: Decision) -> ErrorCode:
        """Journals and applies a decision that changes something; the answer for the client."""
        if decision.to is None:
            return decision.error
        step = self._begin(entry, decision.to)
        failure = step.value if isinstance(step, Done) else await asyncio.shield(step)
        return failure or decision.error

    def _begin(self, entry: Entry, to: Transaction) -> Done[ErrorCode | None] | asyncio.Task[ErrorCode | None]:
        """Starts a step at once, so that no other request gets between the decision and its journal record."""
        self._ledger.hold(entry)
        return start_now(self._transition(entry, to), self._spawn)

    async def _transition(self, entry: Entry, to: Transaction) -> ErrorCode | None:
        """One step of an id that is held. Afterwards it is settled, or its markers are on their way."""
        try:
            failure = await self._write(entry, to)
        except Exception:
            log.exception("a transition failed", extra={"transactional_id": entry.id})
            self._reread_later(entry)
            return ErrorCode.UNKNOWN_SERVER_ERROR
        if failure is None:
            self._go_on_from(entry, to)
        return failure

    def _go_on_from(self, entry: Entry, txn: Transaction) -> None:
        """What the journal says of an id that is held: its markers are due, or the transition is over."""
        entry.txn = txn
        if txn.state in PREPARED:
            self._spawn(self._finish(entry))
        else:
            self._ledger.settle(entry)

    async def _write(self, entry: Entry, to: Transaction) -> ErrorCode | None:
        """Makes a value durable. An error: the id is settled as it was, now or when the journal was read again."""
        point = _FAULT_POINTS[to.state]
        if faults.armed:
            await faults.reach(f"{point}.before_journal")
        try:
            durable = self._journal.append(self._partition_of(entry.id), [(encode_key(entry.id), encode_value(to))])
        except StorageError as error:  # nothing was written
            log.error("cannot write to the transaction log", extra={"transactional_id": entry.id, "error": str(error)})
            self._undo(entry)
            return journal_error(error.code)
        try:
            if _ANSWERS_EARLY:
                self._spawn(durable)
            else:
                await durable
        except StorageError as error:
            log.error("fsync of the transaction log failed", extra={"transactional_id": entry.id, "error": str(error)})
            self._reread_later(entry)
            return journal_error(error.code)
        if faults.armed:
            await faults.reach(f"{point}.after_journal")
        return None

    def _undo(self, entry: Entry) -> None:
        if entry.txn.epoch == NO_EPOCH:
            self._ledger.forget(entry)
        elif entry.txn.state in PREPARED:
            pass  # decided, with markers written: the completion stays due and is tried again
        else:
            self._ledger.settle(entry)

    def _reread_later(self, entry: Entry) -> None:
        """After a failed fsync nobody knows whether a record is on the disk: the id must not move until that is known.

        The log cuts off what was not synced when it is used again; then the journal says what the id's value is.
        """
        if entry.txn.state in PREPARED:
            return  # decided, with markers written: the completion stays due and is tried again
        partition = self._partition_of(entry.id)
        waiting = self._unknown.setdefault(partition, [])
        waiting.append(entry)
        if len(waiting) == 1:
            self._spawn(self._reread(partition))

    async def _reread(self, partition: int) -> None:
        waiting = self._unknown.pop(partition)
        while True:
            try:
                values = await self._values_of({entry.id for entry in waiting}, partition)
                break
            except Exception as error:
                log.error("the transaction log cannot be read yet; trying again", extra={"error": str(error)})
                await asyncio.sleep(RETRY_S)
        for entry in waiting:
            txn = values.get(entry.id)
            if txn is None:
                self._ledger.forget(entry)
            else:
                self._go_on_from(entry, txn)
        log.info("the transaction log was read again", extra={"transactional_ids": len(waiting)})

    async def _values_of(self, ids: set[str], partition: int) -> dict[str, Transaction | None]:
        """The last value in the journal of each id that has one. The ids are held: nobody writes them meanwhile."""
        values: dict[str, Transaction | None] = {}
        for number, (header, records) in enumerate(self._journal.replay(partition), 1):
            if not header.is_control:
                for record in records:
                    id_ = decode_key(record.key) if record.key is not None else None
                    if id_ in ids:
                        values[id_] = decode_value(record.value) if record.value is not None else None
            if number % REPLAY_STEP == 0:
                await asyncio.sleep(0)
        return values

    async def _finish(self, entry: Entry, *, recovered: bool = False) -> None:
        """From a durable decision to its end, whatever happens: nothing else ends the transaction."""
        if recovered and faults.armed:
            await faults.reach("recovery.before_markers")
        while True:
            try:
                await self._write_markers(entry)
                to = _completed(entry.txn, self._now_ms())
                while await self._write(entry, to) is not None:
                    await asyncio.sleep(RETRY_S)
                break
            except Exception:
                log.exception("a transaction cannot be finished; trying again", extra={"transactional_id": entry.id})
            await asyncio.sleep(RETRY_S)
        entry.txn = to
        self._ledger.settle(entry)

    async def _write_markers(self, entry: Entry) -> None:
        txn = entry.txn
        commit = txn.state is State.PREPARE_COMMIT
        coordinator_epoch = self._journal.log(self._partition_of(entry.id)).leader_epoch
        missing: Collection[TopicPartition] = sorted(txn.partitions)
        while missing:
            results = await self._broker.write_markers(
                missing, txn.producer_id, txn.epoch, coordinator_epoch, commit, max(txn.client_version, 1)
            )
            missing = [partition for partition, code in results.items() if code not in _MARKER_NEEDED_NO_MORE]
            if missing:
                log.error("markers cannot be written; trying again", extra={"transactional_id": entry.id})
                await asyncio.sleep(RETRY_S)
        if faults.armed:
            await faults.reach("markers.durable")


# The topic is gone, or the partition has already seen a later epoch: in both cases nothing is open there any more.
_MARKER_NEEDED_NO_MORE = frozenset(
    {
        ErrorCode.NONE,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.INVALID_PRODUCER_EPOCH,
        ErrorCode.TRANSACTION_COORDINATOR_FENCED,
    }
)


def _completed(txn: Transaction, now_ms: int) -> Transaction:
    to = decide(txn, Event.MARKERS_WRITTEN, Ask(now_ms=now_ms)).to
    assert to is not None
    return to
