"""What the producers for threads and for asyncio have in common: their settings, how a record becomes a row, which
partition it goes to, and their words."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from semel.client.cluster_calls import ClusterCalls
from semel.client.errors import ClosedError, ConfigError, IllegalStateError, KafkaError, TimedOutError
from semel.client.metrics import ProducerMetrics
from semel.client.producer.accumulator import StickyPartitioner
from semel.client.producer.batches import RecordPacker, Row
from semel.client.producer.coordinator import CoordinatorCalls
from semel.client.producer.core import ProducerCore
from semel.client.producer.identities import IdempotentIdentity, WriteIdentity
from semel.client.producer.sending import BatchSender
from semel.client.producer.transaction import PreparedTransaction, TransactionCore
from semel.client.producer.transaction_states import ProducerTxnState
from semel.client.producer.transactions import TransactionCalls
from semel.client.settings import ProducerSettings
from semel.client.timing import Deadline, timeout_in_ms
from semel.protocol.partitioning import partition_for_key

if TYPE_CHECKING:
    from semel.client.producer.tables import TableEncoder

ABORTED_AT_CLOSE = frozenset({ProducerTxnState.IN_TRANSACTION, ProducerTxnState.ABORTABLE, ProducerTxnState.ABORTING})
UNFINISHED_STATES = ABORTED_AT_CLOSE | {
    ProducerTxnState.PREPARING,
    ProducerTxnState.PREPARED,  # stays as it is at close: whoever stored it decides
    ProducerTxnState.COMMITTING,
}

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Driver = TypeVar("Driver", bound=BatchSender[Any])

log = logging.getLogger("semel.client")


class ProducerBase:
    """A producer without its driver. Public calls are coroutines here, under names that begin with _."""

    _sender: BatchSender[Any]
    _calls: ClusterCalls[Any]

    def __init__(
        self,
        options: Mapping[str, Any] | ProducerSettings | None,
        key_serializer: Any,
        value_serializer: Any,
        keywords: dict[str, Any],
    ) -> None:
        self.settings = _settings(options, keywords)
        self._packer = RecordPacker(key_serializer, value_serializer, self.settings.max_request_size)
        self._sticky = StickyPartitioner(self.settings.batch_size, random.randrange)
        self._partition_counts: dict[str, tuple[int, float]] = {}  # topic: partitions, good until
        self._transactions: TransactionCalls | None = None
        self._transaction_began_s = 0.0
        self._closed = False

    def __getstate__(self) -> object:
        name = type(self).__name__
        article = "an" if name[0] in "AEIOU" else "a"
        raise TypeError(f"{article} {name} cannot be pickled; send its `settings` and make one in each process")

    # --- records ---
    def _known_count(self, topic: str, now_s: float) -> int | None:
        """How many partitions a topic has, if it was looked up a short while ago."""
        counted = self._partition_counts.get(topic)
        return counted[0] if counted is not None and now_s < counted[1] else None

    def _remember_count(self, topic: str, count: int, now_s: float) -> int:
        self._partition_counts[topic] = (count, now_s + self.settings.metadata_max_age_ms / 1000)
        return count

    def _forget_count(self) -> Callable[[str], object]:
        """For the sender, which must not hold the producer: a topic, or a partition of it, is not there any more."""
        counts = self._partition_counts
        return lambda topic: counts.pop(topic, None)

    def _partition_of(self, topic: str, row: Row, size_bytes: int, count: int) -> int:
        """The key's partition, as the Java client hashes it; without a key one that is kept until a batch is full."""
        return self._sticky.partition(topic, count, size_bytes) if row[0] is None else partition_for_key(row[0], count)

    def _table_encoder(self, topic: str, table: Any, count: int) -> TableEncoder:
        from semel.client.producer.tables import TableEncoder

        return TableEncoder(
            table,
            count,
            lambda size_bytes: self._sticky.partition(topic, count, size_bytes),
            self.settings,
            self.settings.batch_size,
            sealed=False,  # the stamp changes the header, and computes the CRC
        )

    def _make_sender(
        self, calls: ClusterCalls[Any], sender_of: Callable[[WriteIdentity, CoordinatorCalls | None], Driver]
    ) -> Driver:
        """The driver of this producer, and the calls of its transactions if it has a transactional id."""
        self._calls = calls
        id_ = self.settings.transactional_id
        if id_ is None:
            return sender_of(IdempotentIdentity() if self.settings.is_idempotent else WriteIdentity(), None)
        coordinator, transaction = CoordinatorCalls(calls, self.settings, id_), TransactionCore(id_)
        sender = sender_of(transaction, coordinator)
        self._transactions = TransactionCalls(transaction, coordinator, sender)
        return sender

    @timeout_in_ms
    async def _flush(self, *, timeout_ms: float | None = None) -> None:
        """Waits until all that was sent before is acknowledged or has failed; each delivery says which."""
        self._check_open()
        deadline = self._longest(timeout_ms)
        if not await self._sender.flushed(deadline):
            raise TimedOutError(
                f"not everything was acknowledged within {deadline.total_s:.3g} s; it is still on its way: "
                "call flush() again, or see delivery.timeout.ms"
            )

    @timeout_in_ms
    async def _partitions_for(self, topic: str, *, timeout_ms: float | None = None) -> int:
        """How many partitions a topic has."""
        self._check_open()
        return len(await self._calls.partitions(topic, self._block_s(timeout_ms)))

    # --- transactions ---
    @timeout_in_ms
    async def _init_transactions(
        self, *, keep_prepared: bool = False, timeout_ms: float | None = None
    ) -> PreparedTransaction | None:
        """Once, before the first transaction: fences earlier producers with this transactional.id and finishes what
        they left. Can be called again if it timed out or was cancelled.

        With `keep_prepared` (two-phase commit) what they left stays open and is returned, None if there is nothing:
        `complete_transaction` ends it, and nothing else is possible before."""
        self._check_two_phase("init_transactions(keep_prepared=True)", keep_prepared)
        return await self._transactional().init(self._block_s(timeout_ms), keep_prepared)

    async def _begin_transaction(self) -> None:
        """Everything sent from here on becomes visible together, at commit."""
        transactions = self._transactional()
        self._start()
        await transactions.begin(self._block_s(None))
        self._transaction_began_s = time.monotonic()

    def _start(self) -> None:
        """Starts what sends, if it does not run."""
        raise NotImplementedError

    @timeout_in_ms
    async def _prepare_transaction(
        self, *, may_time_out: bool = False, timeout_ms: float | None = None
    ) -> PreparedTransaction:
        """Two-phase commit: waits until the broker has everything of the transaction, which accepts nothing more and
        does not time out. Store what it returns where the decision is made, then call `complete_transaction`.

        `may_time_out`: also without two-phase commit. The coordinator then aborts the transaction at its timeout."""
        self._check_two_phase("prepare_transaction()", not may_time_out)
        return await self._transactional().prepare(Deadline(self._block_s(timeout_ms)))

    @timeout_in_ms
    async def _complete_transaction(
        self, decided: PreparedTransaction | None, *, timeout_ms: float | None = None
    ) -> bool:
        """Commits the prepared transaction if it is the decided one, and aborts it if another one or none (None) was
        decided. Returns whether it was committed. After a timeout call it again."""
        self._check_two_phase("complete_transaction()")
        return await self._transactional().complete(decided, Deadline(self._block_s(timeout_ms)))

    @timeout_in_ms
    async def _commit_transaction(self, *, timeout_ms: float | None = None) -> None:
        """Waits for all records of the transaction, then commits. After `CommitUncertainError`, or if it was cancelled,
        call it again, which settles whether it was committed."""
        await self._transactional().commit(Deadline(self._block_s(timeout_ms)))

    @timeout_in_ms
    async def _abort_transaction(self, *, timeout_ms: float | None = None) -> None:
        """Nothing of the transaction becomes visible. After a timeout or a cancellation call it again."""
        await self._transactional().abort(Deadline(self._block_s(timeout_ms)))

    async def _finish_work(self, deadline: Deadline) -> None:
        """At the end: aborts the open transaction, or else waits for what is on its way."""
        transactions = self._transactions
        if transactions is not None and transactions.state in ABORTED_AT_CLOSE:
            try:
                await transactions.abort(deadline)
            except KafkaError as error:
                log.warning("the open transaction could not be aborted at close; the broker will: %s", error)
        elif not await self._sender.flushed(deadline):
            log.warning("records were not acknowledged before the producer was closed")

    def _transactional(self) -> TransactionCalls:
        self._check_open()
        if self._transactions is None:
            raise IllegalStateError("transactions need the option transactional.id; this producer has none")
        return self._transactions

    def _check_two_phase(self, call: str, is_needed: bool = True) -> None:
        if is_needed and not self.settings.transaction_two_phase_commit_enable:
            raise IllegalStateError(
                f"{call} needs a producer with the option transaction.two.phase.commit.enable=true: without it the "
                "coordinator aborts the transaction at its timeout, whatever was decided elsewhere"
            )

    def written_offsets(self) -> dict[tuple[str, int], int]:
        """The first offset of the open transaction in each partition that has acknowledged some of it."""
        return self._transactional().transaction.written()

    @property
    def transaction_version(self) -> int:
        """The generation of the protocol: 1 or 2 (TV1, TV2). Known after `init_transactions`."""
        return self._transactional().transaction.generation

    def _transaction_open_ms(self) -> float | None:
        if self._transactions is None or self._transactions.state not in UNFINISHED_STATES:
            return None
        return (time.monotonic() - self._transaction_began_s) * 1000

    def _metrics(self, core: ProducerCore) -> ProducerMetrics:
        settings, counters = core.settings, core.counters
        return ProducerMetrics(
            client_id=settings.client_id,
            transactional_id=settings.transactional_id,
            record_send_total=counters.records,
            record_error_total=counters.errors,
            record_retry_total=counters.retries,
            record_duplicate_total=counters.duplicates,
            request_total=counters.requests,
            outgoing_byte_total=counters.outgoing_bytes,
            requests_in_flight=0 if self._closed else counters.in_flight,
            buffer_used_bytes=core.accumulator.used_bytes,
            buffer_total_bytes=settings.buffer_memory,
            transaction_open_ms=self._transaction_open_ms(),
        )

    # --- time and errors ---
    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this producer is closed; make a new one")

    def _block_s(self, timeout_ms: float | None) -> float:
        return (self.settings.max_block_ms if timeout_ms is None else timeout_ms) / 1000

    def _longest(self, timeout_ms: float | None) -> Deadline:
        """Nothing takes longer than its delivery timeout; a little more for the response to get here."""
        return Deadline(self.settings.delivery_timeout_ms / 1000 + 5 if timeout_ms is None else timeout_ms / 1000)


class TransactionBlock:
    """What the blocks of both producers know of their transaction."""

    def __init__(self, producer: ProducerBase) -> None:
        self._producer = producer
        self._core = producer._sender.core
        self._number: int | None = None  # of its transaction, once that has begun

    async def _enter(self) -> None:
        if self._producer._transactional().state is ProducerTxnState.ABORTING:  # the last block's abort timed out
            await self._producer._abort_transaction()
        await self._producer._begin_transaction()
        self._number = self._core.transaction_number

    async def _leave(self, error: BaseException | None) -> None:
        if error is not None:
            await self._abort()
            return
        try:
            await self._producer._commit_transaction()
        except BaseException:  # not in time, failed, Ctrl-C, cancelled: this transaction must be ended here
            await self._abort()
            raise

    async def _abort(self) -> None:
        """As far as possible: the error that led here is the one to see. A commit that may have happened is left as it
        is; its `CommitUncertainError` says how to settle it."""
        if self._producer._closed or self._producer._transactional().state not in ABORTED_AT_CLOSE:
            return
        try:
            await self._producer._abort_transaction()
        except KafkaError as failure:
            log.warning("the transaction could not be aborted; the broker will at its timeout: %s", failure)

    def _of_block(self, call: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        """A call of the producer, for this transaction only: one that comes late must not get into the next one."""

        def checked(*args: Parameters.args, **keywords: Parameters.kwargs) -> Result:
            if self._number is not None:
                self._core.check_transaction(self._number)
            return call(*args, **keywords)

        return checked


def unknown_partition(topic: str, partition: int, count: int) -> ConfigError:
    return ConfigError(f"{topic!r} has no partition {partition!r}; it has 0 to {count - 1}")


def _settings(options: Mapping[str, Any] | ProducerSettings | None, keywords: dict[str, Any]) -> ProducerSettings:
    """Options by Kafka's names, as the constructors of the producers take them."""
    if isinstance(options, ProducerSettings):
        return options.replace(**keywords) if keywords else options
    return ProducerSettings.of(options, **keywords)
