"""The transaction coordinator: `states` decides, the runtime writes the record and replays it, the response follows.

A transition runs as a task of its own: a client that disconnects in the middle of one must not stop it half-way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from semel import faults
from semel.broker.clock import Clock
from semel.broker.coordinator_runtime import CoordinatorRuntime, InternalTopic, client_error
from semel.broker.counters import Counters
from semel.broker.settings import Settings
from semel.broker.transactions.events import TraceStep, TransactionEvents
from semel.broker.transactions.records import ActiveId, ProducerIds, TransactionalIds, TransactionRecord
from semel.broker.transactions.states import (
    NO_EPOCH,
    NO_PRODUCER_ID,
    NO_TIMEOUT_MS,
    PREPARED,
    EventFields,
    TopicPartition,
    Transaction,
    TransactionEvent,
    TxnDecision,
    TxnState,
    decide,
    new_transaction,
)
from semel.broker.turns import DoneAtOnce, start_now
from semel.protocol.errors import ErrorCode
from semel.storage import StorageError

log = logging.getLogger(__name__)

SETTLE_LIMIT_S = 0.1  # how long a request waits for the id's pending transition before it gets CONCURRENT_TRANSACTIONS
RETRY_S = 1.0  # between two attempts to write a marker
EXPIRY_CHUNK = 2000  # ids that one batch of tombstones forgets
COMPLETED_TOGETHER = 16  # transactions whose end one batch says: ids may take 32 KB, and a batch must not exceed 1 MB

_FAULT_POINTS = {
    TxnState.EMPTY: "init",
    TxnState.ONGOING: "add",
    TxnState.PREPARE_COMMIT: "prepare_commit",
    TxnState.PREPARE_ABORT: "prepare_abort",
    TxnState.COMPLETE_COMMIT: "complete_commit",
    TxnState.COMPLETE_ABORT: "complete_abort",
}
_END_EVENTS = {
    (False, True): TransactionEvent.COMMIT_V1,
    (False, False): TransactionEvent.ABORT_V1,
    (True, True): TransactionEvent.COMMIT_V2,
    (True, False): TransactionEvent.ABORT_V2,
}


class Owner(NamedTuple):
    """A response with the producer id and epoch of an id's owner."""

    error: ErrorCode
    producer_id: int = NO_PRODUCER_ID
    epoch: int = NO_EPOCH


NOTHING_KEPT = (NO_PRODUCER_ID, NO_EPOCH)
_Step = tuple[ActiveId, Transaction]  # an id that is held, and its next value
_WhichTransaction = tuple[int, int, int]  # producer id, epoch, start
WriteMarkers = Callable[..., Awaitable[dict[TopicPartition, ErrorCode]]]


class TransactionCoordinator:
    """All transactional ids of this broker."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        topic: InternalTopic,
        reserve_producer_ids: Callable[[int], range],
        write_markers: WriteMarkers,
        counters: Counters | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._write_markers = write_markers
        self.events = TransactionEvents(clock.now_ms, counters or Counters())
        self._producer_ids = ProducerIds(reserve_producer_ids)
        self.ids = TransactionalIds(self._producer_ids)
        self._runtime = CoordinatorRuntime(topic, self.ids)
        self._partition_of = lru_cache(maxsize=4096)(self._runtime.partition_for)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._decided: list[ActiveId] = []  # their markers are due at the end of this turn of the event loop
        self._marked: list[_Step] = []  # their last records are
        self._open_since: dict[str, tuple[_WhichTransaction, float]] = {}  # monotonic: when first looked at

    # --- life ---------------------------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Replays the log and finishes what was prepared. What was open stays open, with its timeout running."""
        self._runtime.load()
        for active in self.ids.active():
            if active.txn.state in PREPARED:
                self.ids.hold(active)
                self._spawn(self._finish(active, recovered=True))
        settings = self._settings
        self._every(settings["transaction.abort.timed.out.transaction.cleanup.interval.ms"], self.abort_timed_out)
        self._every(settings["transaction.remove.expired.transaction.cleanup.interval.ms"], self.forget_unused)

    async def stop(self) -> None:
        """Ends the timers. A transaction whose markers are still under way is finished by the next start."""
        self._decided, self._marked = [], []
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._runtime.stop()

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
        return self._producer_ids.take()

    async def init(
        self,
        transactional_id: str,
        timeout_ms: int,
        expected: tuple[int, int] | None,
        *,
        two_phase_commit: bool = False,
    ) -> Owner:
        """InitProducerId: the caller becomes the owner. `expected` is who it thinks it is (KIP-360).

        `two_phase_commit`: its transactions have no timeout (KIP-939).
        """
        owner, _ = await self._init(transactional_id, timeout_ms, expected, two_phase_commit, keep_prepared=False)
        return owner

    async def init_keeping(
        self, transactional_id: str, timeout_ms: int, expected: tuple[int, int] | None, *, two_phase_commit: bool
    ) -> tuple[Owner, tuple[int, int]]:
        """The same, but what is open stays open, with its producer id and epoch, and can only be ended (KIP-939)."""
        return await self._init(transactional_id, timeout_ms, expected, two_phase_commit, keep_prepared=True)

    async def _init(
        self,
        transactional_id: str,
        timeout_ms: int,
        expected: tuple[int, int] | None,
        two_phase_commit: bool,
        keep_prepared: bool,
    ) -> tuple[Owner, tuple[int, int]]:
        if not transactional_id:
            return Owner(ErrorCode.INVALID_REQUEST), NOTHING_KEPT
        if two_phase_commit:
            timeout_ms = NO_TIMEOUT_MS
        elif not 0 < timeout_ms <= self._settings["transaction.max.timeout.ms"]:
            return Owner(ErrorCode.INVALID_TRANSACTION_TIMEOUT), NOTHING_KEPT
        producer_id, epoch = expected or (NO_PRODUCER_ID, NO_EPOCH)
        await self.settle(transactional_id)
        active = self.ids.get(transactional_id)
        if active is None:
            active = ActiveId(
                transactional_id, new_transaction(self._producer_ids.take(), timeout_ms, self._clock.now_ms())
            )
        fields = self._fields(producer_id=producer_id, epoch=epoch, timeout_ms=timeout_ms, keep_prepared=keep_prepared)
        decision = self._decide(active, TransactionEvent.INIT, fields)
        error = await self._carry_out(active, decision, TransactionEvent.INIT)
        to = decision.to
        if error is not ErrorCode.NONE or to is None:
            return Owner(error), NOTHING_KEPT
        kept = (to.producer_id, to.epoch) if to.is_kept else NOTHING_KEPT
        return Owner(error, to.owner_id, to.owner_epoch), kept

    async def add(
        self,
        transactional_id: str,
        producer_id: int,
        epoch: int,
        partitions: Collection[TopicPartition],
        client_version: int = 0,
    ) -> ErrorCode:
        """AddPartitionsToTxn, AddOffsetsToTxn, and what TV2 does by committing offsets."""
        await self.settle(transactional_id)
        return await self._add(transactional_id, producer_id, epoch, partitions, client_version)

    async def _add(
        self,
        transactional_id: str,
        producer_id: int,
        epoch: int,
        partitions: Collection[TopicPartition],
        client_version: int,
    ) -> ErrorCode:
        if not transactional_id:
            return ErrorCode.INVALID_REQUEST
        active = self.ids.get(transactional_id)
        if active is None:
            return ErrorCode.INVALID_PRODUCER_ID_MAPPING
        fields = self._fields(
            producer_id=producer_id, epoch=epoch, partitions=frozenset(partitions), client_version=client_version
        )
        decision = self._decide(active, TransactionEvent.ADD, fields)
        return await self._carry_out(active, decision, TransactionEvent.ADD)

    def verify(self, transactional_id: str, producer_id: int, epoch: int, partition: TopicPartition) -> ErrorCode:
        """Whether a partition is in the id's open transaction."""
        if not transactional_id:
            return ErrorCode.INVALID_REQUEST
        active = self.ids.get(transactional_id)
        if active is None:
            return ErrorCode.INVALID_PRODUCER_ID_MAPPING
        fields = EventFields(producer_id=producer_id, epoch=epoch, partitions=frozenset((partition,)))
        return decide(active.txn, TransactionEvent.VERIFY, fields, is_pending=active.is_pending).error

    async def end(self, transactional_id: str, producer_id: int, epoch: int, *, commit: bool, is_v2: bool) -> Owner:
        """EndTxn. Returns when the decision is durable; the markers follow."""
        if not transactional_id:
            return Owner(ErrorCode.INVALID_REQUEST)
        active = self.ids.get(transactional_id)
        if active is None:
            return Owner(ErrorCode.INVALID_PRODUCER_ID_MAPPING)
        event = _END_EVENTS[is_v2, commit]
        decision = self._decide(active, event, self._fields(producer_id=producer_id, epoch=epoch))
        error = await self._carry_out(active, decision, event)
        if error is not ErrorCode.NONE:
            return Owner(error)
        after = active.txn if decision.to is None else _completed(decision.to, self._clock.now_ms())
        return Owner(error, after.producer_id, after.epoch)

    async def allow_append(
        self,
        transactional_id: str | None,
        producer_id: int,
        producer_epoch: int,
        partitions: Collection[TopicPartition],
        produce_version: int,
    ) -> dict[TopicPartition, ErrorCode]:
        """Whether a producer may write its first batch of a transaction to partitions (KIP-890).

        Under TV2 call `settle` first. A guard from before it is void: the last transaction's markers end verifications.
        """
        is_v2 = produce_version >= 12
        id_ = transactional_id or ""
        if is_v2:
            error = await self._add(id_, producer_id, producer_epoch, partitions, client_version=2)
            return dict.fromkeys(partitions, write_error(error, is_v2=True, knows_abortable=True))
        errors = {partition: self.verify(id_, producer_id, producer_epoch, partition) for partition in partitions}
        knows_abortable = produce_version >= 11
        return {
            partition: write_error(error, is_v2=False, knows_abortable=knows_abortable)
            for partition, error in errors.items()
        }

    # --- time ---------------------------------------------------------------------------------------------------------
    async def abort_timed_out(self) -> int:
        """Aborts transactions that are open longer than their timeout and fences their producers. Returns how many."""
        started = []
        open_before, self._open_since = self._open_since, {}
        for active in self.ids.active():
            decision = self._decide(active, TransactionEvent.TIMEOUT, self._timeout_fields(active, open_before))
            if decision.to is not None:
                log.info("transaction timed out", extra={"transactional_id": active.id})
                started.append(self._begin(active, decision.to, TransactionEvent.TIMEOUT))
        await asyncio.gather(*(step for step in started if not isinstance(step, DoneAtOnce)))
        return len(started)

    def _timeout_fields(
        self, active: ActiveId, open_before: Mapping[str, tuple[_WhichTransaction, float]]
    ) -> EventFields:
        """Start and timeout are in wall time. Where the wall clock was set back, the time since a transaction was first
        looked at counts: else it would stay open, and hold back readers, for as long as the clock was set back."""
        fields, now_s = self._fields(), self._clock.monotonic_s()
        which = (active.txn.producer_id, active.txn.epoch, active.txn.started_ms)
        known, since_s = open_before.get(active.id, (which, now_s))
        since_s = since_s if known == which else now_s
        self._open_since[active.id] = (which, since_s)
        return fields._replace(now_ms=max(fields.now_ms, active.txn.started_ms + round((now_s - since_s) * 1000)))

    async def forget_unused(self) -> int:
        """Forgets ids that were not used for transactional.id.expiration.ms. Returns how many."""
        expiration_ms = self._settings["transactional.id.expiration.ms"]
        now_ms = self._clock.now_ms()
        forgotten = 0
        chunk: list[ActiveId] = []
        for transactional_id in self.ids.unused_since(now_ms - expiration_ms):
            active = self.ids.get(transactional_id)
            request = self._fields(expiration_ms=expiration_ms)
            if active is not None and self._decide(active, TransactionEvent.EXPIRE, request).to:
                chunk.append(active)
            if len(chunk) == EXPIRY_CHUNK:
                forgotten += await self._write_tombstones(chunk)
                chunk = []
        return forgotten + (await self._write_tombstones(chunk) if chunk else 0)

    async def _write_tombstones(self, chunk: list[ActiveId]) -> int:
        """One batch for each partition of the log. Returns how many ids are gone."""
        by_partition: dict[int, list[ActiveId]] = {}
        for active in chunk:
            self.ids.hold(active)
            by_partition.setdefault(self._partition_of(active.id), []).append(active)
        if faults.armed:
            await faults.reach("expire.before_log")
        forgotten = 0
        for partition, members in by_partition.items():
            try:
                code = await self._runtime.commit(partition, [TransactionRecord(active.id, None) for active in members])
            except Exception:
                log.exception("unused transactional ids cannot be forgotten; it is tried again")
                code = ErrorCode.UNKNOWN_SERVER_ERROR
            forgotten += len(members) if code is ErrorCode.NONE else 0
            for active in members:
                self._go_on(active)
        if faults.armed:
            await faults.reach("expire.after_log")
        return forgotten

    # --- decide, write, replay, complete -----------------------------------------------------------------------------
    def _fields(self, **fields: Any) -> EventFields:
        return EventFields(now_ms=self._clock.now_ms(), broker_version=self._settings["transaction.version"], **fields)

    async def settle(self, transactional_id: str) -> bool:
        """Waits a little if a transition of the id is pending: mostly the markers of the last transaction. Whether it
        waited; the id may be pending still."""
        active = self.ids.get(transactional_id)
        if active is None or not active.is_pending:
            return False
        clock = asyncio.get_running_loop().time
        deadline_s = clock() + SETTLE_LIMIT_S
        while active is not None and active.is_pending and (remaining_s := deadline_s - clock()) > 0:
            await asyncio.wait((active.settled(),), timeout=remaining_s)
            active = self.ids.get(transactional_id)
        return True

    def _decide(self, active: ActiveId, event: TransactionEvent, fields: EventFields) -> TxnDecision:
        if active.txn.exhausted:
            try:
                fields = fields._replace(fresh_producer_id=self._producer_ids.peek())
            except StorageError as error:
                log.error("no producer id", extra={"transactional_id": active.id, "error": str(error)})
                return TxnDecision(error.code)
        decision = decide(active.txn, event, fields, is_pending=active.is_pending)
        if decision.takes_producer_id:
            self._producer_ids.take()
        return decision

    async def _carry_out(self, active: ActiveId, decision: TxnDecision, event: TransactionEvent) -> ErrorCode:
        """Writes what a decision changes; returns the error code of the response."""
        if decision.to is None:
            return decision.error
        step = self._begin(active, decision.to, event)
        failure = step.value if isinstance(step, DoneAtOnce) else await asyncio.shield(step)
        return failure or decision.error

    def _begin(
        self, active: ActiveId, to: Transaction, event: TransactionEvent
    ) -> DoneAtOnce[ErrorCode | None] | asyncio.Task[ErrorCode | None]:
        """Starts a step at once, so that no other request gets between the decision and its record."""
        self.ids.hold(active)
        return start_now(self._transition(active, to, event), self._spawn)

    async def _transition(self, active: ActiveId, to: Transaction, event: TransactionEvent) -> ErrorCode | None:
        """One step of an id that is held. Returns the error if the value could not be made durable."""
        try:
            failure = await self._write(((active, to),))
        except Exception:
            log.exception("a transition failed", extra={"transactional_id": active.id})
            failure = ErrorCode.UNKNOWN_SERVER_ERROR
        if failure is None:
            self.events.transition(active.id, event, to)
        self._go_on(active)
        return failure

    def _go_on(self, active: ActiveId) -> None:
        """After a write, whatever came of it: the markers are due, or the transition is over.

        After a failed fsync the id does not move until its state was rebuilt.
        """
        rebuilds = self._runtime.rebuilds
        if rebuilds and (rebuild := rebuilds.get(self._partition_of(active.id))) is not None:
            rebuild.add_done_callback(lambda _: self._go_on(active))
        elif active.txn.state in PREPARED:
            if not self._decided:
                asyncio.get_running_loop().call_soon(self._finish_decided)
            self._decided.append(active)
        else:
            self.ids.release(active)

    async def _write(self, steps: Sequence[_Step]) -> ErrorCode | None:
        """Makes values of one partition durable, as one batch; the runtime replays them. An error: nothing changed."""
        points = [_FAULT_POINTS[to.state] for _, to in steps] if faults.armed else ()
        for point in points:
            await faults.reach(f"{point}.before_log")
        partition = self._partition_of(steps[0][0].id)
        try:
            written = self._runtime.write(partition, [TransactionRecord(active.id, to) for active, to in steps])
            failure = None if written is None else await written
        except StorageError as error:
            failure = error
        if failure is not None:
            ids = ", ".join(active.id for active, _ in steps)
            log.error("transaction log not written", extra={"transactional_id": ids, "error": str(failure)})
            return client_error(failure)
        for point in points:
            await faults.reach(f"{point}.after_log")
        return None

    # --- markers, and the end -----------------------------------------------------------------------------------------
    def _finish_decided(self) -> None:
        """Markers of what was decided in this turn of the event loop. Its responses have left."""
        decided, self._decided = self._decided, []
        for active in decided:
            start_now(self._finish(active), self._spawn)
        self._complete_marked()

    async def _finish(self, active: ActiveId, *, recovered: bool = False) -> None:
        """From a durable decision to its markers, whatever happens: nothing else ends the transaction."""
        if recovered and faults.armed:
            await faults.reach("recovery.before_markers")
        while True:
            try:
                await self._mark_partitions(active)
                step = active, _completed(active.txn, self._clock.now_ms())
                break
            except Exception:
                log.exception("a transaction cannot be finished; trying again", extra={"transactional_id": active.id})
            await asyncio.sleep(RETRY_S)
        if not self._marked:
            asyncio.get_running_loop().call_soon(self._complete_marked)
        self._marked.append(step)

    def _complete_marked(self) -> None:
        """The last record of all transactions whose markers became durable in this turn: one batch per partition."""
        marked, self._marked = self._marked, []
        chunks: dict[int, list[_Step]] = {}
        for step in marked:
            partition = self._partition_of(step[0].id)
            chunk = chunks.setdefault(partition, [])
            chunk.append(step)
            if len(chunk) == COMPLETED_TOGETHER:
                start_now(self._complete(chunks.pop(partition)), self._spawn)
        for chunk in chunks.values():
            start_now(self._complete(chunk), self._spawn)

    async def _complete(self, steps: list[_Step]) -> None:
        """Until it is durable: a client can begin its next transaction only then."""
        while True:
            try:
                if await self._write(steps) is None:
                    break
            except Exception:
                log.exception("the ends of transactions cannot be written; trying again")
            await asyncio.sleep(RETRY_S)
            if len(steps) > 1:  # one by one from here on: together they may be too large
                for step in steps:
                    self._spawn(self._complete([step]))
                return
        for active, to in steps:
            self.events.transition(active.id, TransactionEvent.MARKERS_WRITTEN, to)
            self.ids.release(active)

    async def _mark_partitions(self, active: ActiveId) -> None:
        txn = active.txn
        commit = txn.state is TxnState.PREPARE_COMMIT
        coordinator_epoch = self._runtime.topic.leader_epoch(self._partition_of(active.id))
        missing: Collection[TopicPartition] = sorted(txn.partitions)
        while missing:
            results = await self._write_markers(
                missing, txn.producer_id, txn.epoch, coordinator_epoch, commit, max(txn.client_version, 1)
            )
            missing = [partition for partition, code in results.items() if code not in _MARKER_NEEDED_NO_MORE]
            if missing:
                log.error("markers cannot be written; trying again", extra={"transactional_id": active.id})
                await asyncio.sleep(RETRY_S)
        self.events.add(TraceStep.MARKERS, active.id, txn.producer_id, txn.epoch, partitions=txn.partitions)
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
    to = decide(txn, TransactionEvent.MARKERS_WRITTEN, EventFields(now_ms=now_ms)).to
    assert to is not None
    return to


def write_error(error: ErrorCode, *, is_v2: bool, knows_abortable: bool) -> ErrorCode:
    """The error of Produce or TxnOffsetCommit, from that of adding or verifying the partition of its write."""
    if error is ErrorCode.PRODUCER_FENCED:
        return ErrorCode.INVALID_PRODUCER_EPOCH
    if error is ErrorCode.TRANSACTION_ABORTABLE and not knows_abortable:
        return ErrorCode.INVALID_TXN_STATE
    if error is ErrorCode.CONCURRENT_TRANSACTIONS and not is_v2:
        return ErrorCode.NOT_ENOUGH_REPLICAS  # the retriable error that every producer knows
    return error
