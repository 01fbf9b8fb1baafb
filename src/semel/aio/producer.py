"""The producer for asyncio: rows with `send`, Arrow tables with `send_table`, transactions.

    async with AsyncProducer(bootstrap_servers="localhost:9092") as producer:
        place = await (await producer.send("orders", b"value", key=b"key"))

    async with AsyncProducer(bootstrap_servers="localhost:9092", transactional_id="billing") as producer:
        await producer.init_transactions()
        async with producer.transaction() as txn:
            await txn.send("orders", b"value")

A task sends while the program does something else; it starts with the first record and ends with `close`. If the
producer is collected without that, the task sends what is left and ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Self

from semel.aio.cluster import AsyncCluster, LoopGuard, held
from semel.aio.sender import AsyncDelivery, AsyncSender, AsyncTableDelivery, forgettable
from semel.client.errors import ClosedError, FatalError, TimedOutError
from semel.client.metrics import ProducerMetrics
from semel.client.producer.base import (
    ProducerBase,
    TransactionBlock,
    unknown_partition,
)
from semel.client.producer.batches import Headers
from semel.client.producer.deliveries import TableShare
from semel.client.settings import ProducerSettings
from semel.client.timing import Deadline, timeout_in_ms
from semel.client.types import GroupMetadata, OffsetAndMetadata, checked_offsets, number_of

if TYPE_CHECKING:
    from semel.client.producer.tables import TableEncoder

log = logging.getLogger("semel.client")


class AsyncProducer(ProducerBase):
    """Writes records to topics. Tasks of one event loop may share it."""

    def __init__(
        self,
        options: Mapping[str, Any] | ProducerSettings | None = None,
        /,
        *,
        key_serializer: Any = None,
        value_serializer: Any = None,
        **keywords: Any,
    ) -> None:
        """Options and serializers as for `semel.Producer`."""
        super().__init__(options, key_serializer, value_serializer, keywords)
        self._guard = LoopGuard("AsyncProducer")
        self._cluster = AsyncCluster(self.settings, self._guard)
        self._sender: AsyncSender = self._make_sender(
            self._cluster,
            lambda identity, coordinator: AsyncSender(
                self.settings, self._cluster, identity, coordinator, self._forget_count()
            ),
        )
        self._countings: dict[str, asyncio.Lock] = {}  # one task at a time looks a topic up
        self._offset_tasks: set[asyncio.Task[None]] = set()  # go on although their callers were cancelled
        self._finalizer = self._cluster.close_with(self)

    # --- sending ---
    async def send(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        partition: int | None = None,
        timestamp: int | datetime | None = None,
        headers: Headers | None = None,
    ) -> AsyncDelivery:
        """Puts one record on its way; await the delivery for its offset. The arguments are those of
        `semel.Producer.send`.

        Waits up to max.block.ms while memory is full or the topic is not known yet. If it is cancelled there, the
        record is not sent."""
        self._check_usable()
        transaction = self._sender.core.transaction_number
        now_s = time.time()
        row, size = self._packer.pack(topic, value, key, timestamp, headers, now_s)
        count = self._known_count(topic, now_s) or await self._count_partitions(topic, now_s)
        if partition is None:
            partition = self._partition_of(topic, row, size, count)
        elif type(partition) is not int or not 0 <= partition < count:
            partition = await self._checked_partition(topic, partition, count)
        return await self._sender.append(topic, partition, row, size, transaction)

    async def send_table(self, topic: str, table: Any) -> AsyncTableDelivery:
        """Puts a whole Arrow table on its way, as `semel.Producer.send_table`. A thread of the loop's executor encodes
        it, batch by batch. Returns when the last batch is handed over; if it is cancelled before, the batches that
        were handed over are sent."""
        from semel.client.producer.tables import checked_table

        self._check_usable()
        transaction = self._sender.core.transaction_number
        checked = checked_table(table)
        encoder = self._table_encoder(topic, checked, await self._count_partitions(topic, time.time()))
        add = self._share if encoder.is_small else self._hand_over
        shares = await add(topic, encoder, transaction)
        return AsyncTableDelivery(shares, checked.num_rows, self._sender.condition())

    async def _hand_over(self, topic: str, encoder: TableEncoder, transaction: int) -> list[TableShare]:
        """Encodes a table to batches of its own."""
        shares, batches, loop = [], encoder.batches(), self._guard.loop
        while (encoded := await loop.run_in_executor(None, next, batches, None)) is not None:
            batch = await self._sender.add(topic, encoded.partition, encoded.data, encoded.record_count, transaction)
            shares.append(TableShare(batch, 0, batch.count, encoded.rows))
        return shares

    async def _share(self, topic: str, encoder: TableEncoder, transaction: int) -> list[TableShare]:
        """Leaves a small table to linger, so that the next ones go into the same batches."""
        shares = []
        for partition, part, rows in encoder.parts():
            batch, first = await self._sender.append_table(topic, partition, part, transaction)
            shares.append(TableShare(batch, first, part.row_count, rows))
        return shares

    flush = ProducerBase._flush
    partitions_for = ProducerBase._partitions_for
    init_transactions = ProducerBase._init_transactions
    begin_transaction = ProducerBase._begin_transaction
    prepare_transaction = ProducerBase._prepare_transaction
    complete_transaction = ProducerBase._complete_transaction
    commit_transaction = ProducerBase._commit_transaction
    abort_transaction = ProducerBase._abort_transaction

    def metrics(self) -> ProducerMetrics:
        """What it has sent so far, and what is on its way; also after close()."""
        return self._metrics(self._sender.core)

    # --- transactions ---
    @timeout_in_ms
    async def send_offsets_to_transaction(
        self,
        offsets: Mapping[tuple[str, int], OffsetAndMetadata | int],
        group_metadata: GroupMetadata | str,
        *,
        timeout_ms: float | None = None,
    ) -> None:
        """A consumer group's offsets are committed with the transaction. If it is cancelled, the request goes on, and
        the end of the transaction waits for it."""
        group = GroupMetadata.for_transaction(group_metadata)
        transactions = self._transactional()
        sending = self._guard.loop.create_task(
            transactions.send_offsets(checked_offsets(offsets), group, self._block_s(timeout_ms))
        )
        forgettable(sending)
        self._offset_tasks.add(sending)
        sending.add_done_callback(self._offset_tasks.discard)
        try:
            await asyncio.shield(sending)
        except asyncio.CancelledError:
            sending.add_done_callback(lambda task: task.cancelled() or task.exception())  # the transaction has it
            raise

    def transaction(self) -> AsyncProducerTransaction:
        """`async with producer.transaction() as txn:` commits at the end, and aborts if the block raises or is
        cancelled, or the commit could not be sent in time."""
        self._transactional()
        return AsyncProducerTransaction(self)

    # --- end ---
    @timeout_in_ms
    async def close(self, *, timeout_ms: float | None = None) -> None:
        """Sends what is left (up to the timeout), aborts an open transaction, ends the task. May be called twice."""
        if self._closed:
            return
        if self._guard.is_over:  # nothing can be sent any more
            self._closed = True
            self._cluster.close()
            return
        self._guard.check()
        self._closed = True
        deadline = self._longest(timeout_ms)
        try:
            await self._finish_work(deadline)
        finally:
            await self._shut_down()

    async def _shut_down(self) -> None:
        self._finalizer.detach()
        self._cluster.close()  # which ends the calls that the task may wait in
        await self._sender.stop()
        self._sender.fail_all(ClosedError("the producer was closed before this record was acknowledged"))
        if self._offset_tasks:
            await asyncio.wait(self._offset_tasks)

    async def __aenter__(self) -> Self:
        self._check_open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- checks ---
    def _check_open(self) -> None:
        super()._check_open()
        self._guard.check()

    def _check_usable(self) -> None:
        self._check_open()
        if self._transactions is not None:
            self._transactions.transaction.check_accepts()
        if self._sender.task is None:
            self._start()
        elif self._sender.crash is not None:
            raise FatalError(f"the task that sends ended: {self._sender.crash!r}; close this producer") from (
                self._sender.crash
            )

    def _start(self) -> None:
        if self._sender.task is None:
            self._sender.start()
            self._finalizer.detach()
            self._finalizer = weakref.finalize(self, self._sender.finish)
            self._finalizer.atexit = False

    async def _count_partitions(self, topic: str, now_s: float) -> int:
        deadline = Deadline(self._block_s(None))
        too_late = TimedOutError(f"looking up topic {topic!r} did not succeed within {deadline.total_s:.3g} s")
        async with held(self._countings.setdefault(topic, asyncio.Lock()), deadline, too_late):
            known = self._known_count(topic, now_s)  # another task may have looked it up meanwhile
            if known is not None:
                return known
            found = await self._cluster.partitions(topic, deadline.remaining_s())
            return self._remember_count(topic, len(found), now_s)

    async def _checked_partition(self, topic: str, partition: int, count: int) -> int:
        """As that of `semel.Producer`."""
        number = number_of(partition)
        if number >= count:
            self._cluster.metadata.forget(topic)
            self._partition_counts.pop(topic, None)
            count = await self._count_partitions(topic, time.time())
        if 0 <= number < count:
            return number
        raise unknown_partition(topic, partition, count)


class AsyncProducerTransaction(TransactionBlock):
    """One transaction as an `async with` block; what it offers goes to its producer."""

    def __init__(self, producer: AsyncProducer) -> None:
        super().__init__(producer)
        self.send = self._of_block(producer.send)
        self.send_table = self._of_block(producer.send_table)
        self.send_offsets = self._of_block(producer.send_offsets_to_transaction)

    async def __aenter__(self) -> Self:
        await self._enter()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        await self._leave(error)
