"""The driver of a producer's core in an event loop. One task does what the thread of the blocking driver does.

A step encodes, sends all that may be sent, and waits until the core's next event or until it is woken: by a new batch,
or by a response, which the core gets at once. What that means is decided by `client/producer/core.py`. Nothing else
runs between two lines without an `await`, so there is no lock; the core is never called across one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Generator
from contextvars import Context
from typing import TYPE_CHECKING, Any, cast

from semel.aio.cluster import AsyncCluster, LoopGuard
from semel.aio.connection import AsyncConnection
from semel.client.errors import ClosedError, FatalError, IllegalStateError, KafkaError
from semel.client.producer.batches import FEW_ROWS, ProducerBatch, RecordMetadata, Row
from semel.client.producer.coordinator import CoordinatorCalls
from semel.client.producer.core import NEVER_S, Produce
from semel.client.producer.deliveries import Delivery, DeliveryCondition, TableDelivery
from semel.client.producer.identities import WriteIdentity
from semel.client.producer.sender import run_callbacks
from semel.client.producer.sending import BatchSender
from semel.client.settings import ProducerSettings
from semel.client.timing import Deadline
from semel.client.wire import Pending
from semel.protocol.batch import HEADER_SIZE
from semel.protocol.messages.records import PRODUCE

if TYPE_CHECKING:
    from semel.client.producer.tables import TablePart

log = logging.getLogger("semel.client")

LANE = "produce"
ENCODED_HERE_BYTES = 32 * 1024  # what is larger is encoded by a thread of the loop's executor
COLUMN_CODEC = "semel.client.producer.tables"  # which takes long to load


class LoopState:
    """Stands where threads have a lock with a condition: notified when batches are done, or a transaction's state has
    changed."""

    def __init__(self, guard: LoopGuard) -> None:
        self.guard = guard
        self._waiters: set[asyncio.Future[None]] = set()

    def __enter__(self) -> LoopState:
        return self

    def __exit__(self, *_: object) -> None: ...

    def notify_all(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_until(self, is_over: Callable[[], bool], timeout_s: float) -> bool:
        deadline = Deadline(timeout_s)
        while not is_over():
            waiter: asyncio.Future[None] = self.guard.loop.create_future()
            self._waiters.add(waiter)
            try:
                async with asyncio.timeout(deadline.remaining_s()):
                    await waiter
            except TimeoutError:
                return is_over()
            finally:
                self._waiters.discard(waiter)
        return True

    # --- what deliveries call ---
    def check_process(self) -> None:
        self.guard.check()

    def wait_for(self, is_over: Callable[[], bool], timeout_s: float | None = None) -> bool:
        if not is_over():
            raise IllegalStateError("this delivery has no result yet: await it, which lets the event loop send")
        return True


class AsyncDelivery(Delivery):
    """What `send` returns: the place of one record, once it is known. `await` it; `result()` has it afterwards.

    asyncio takes it for a future of its own, so that `gather`, `wait` and `wait_for` need no task for it. A `gather`
    that is cancelled cancels its deliveries, and so does `wait_for` before Python 3.12, also at its timeout: they have
    no result then, but their records are sent. Since 3.12 `wait_for` cancels only the task that waits."""

    __slots__ = ("_callbacks", "_is_cancelled")  # both empty until they are needed

    _asyncio_future_blocking = (
        False  # by which asyncio knows a future; nothing sets it, because `await` does not yield it
    )
    # What `gather` and `shield` read of a future that was cancelled or has failed.
    _cancel_message = None
    _source_traceback = None

    def __await__(self) -> Generator[Any, None, Any]:
        """Cancelling the task that waits does not take the record back, and does not cancel the delivery."""
        yield from _wait_for([self._batch], self._loop_state())
        return self.result()

    def _loop_state(self) -> LoopState:
        return cast("LoopState", self._changed)

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop_state().guard.loop

    _loop = property(get_loop)  # so does `shield`

    def done(self) -> bool:
        return self._batch.done or self.cancelled()

    def result(self, *, timeout_ms: float | None = None) -> RecordMetadata:
        """The record's place, or the error that kept it from being stored."""
        if self.cancelled():
            raise self._make_cancelled_error()
        return self._place() if self._batch.done else super().result(timeout_ms=timeout_ms)

    get = result

    def exception(self, *, timeout_ms: float | None = None) -> KafkaError | None:
        """The error, or None if the record was stored."""
        if self.cancelled():
            raise self._make_cancelled_error()
        batch = self._batch
        if batch.done and batch.halves is None:
            return batch.error_of(self._index)
        return super().exception(timeout_ms=timeout_ms)

    def cancelled(self) -> bool:
        return hasattr(self, "_is_cancelled")

    def cancel(self, msg: Any = None) -> bool:
        """Ends what waits for it; the record is sent. In a transaction, abort_transaction() takes it back."""
        if self.done():
            return False
        self._is_cancelled = True
        self._call_back(self._batch)
        return True

    def _make_cancelled_error(self) -> asyncio.CancelledError:
        """`asyncio.gather` calls it."""
        return asyncio.CancelledError()

    def add_done_callback(self, function: Callable[[Any], Any], *, context: Context | None = None) -> None:
        """The loop calls the function with this delivery when it is done."""
        if self.done():
            self.get_loop().call_soon(function, self, context=context)
            return
        if not hasattr(self, "_callbacks"):
            self._callbacks: list[tuple[Callable[[Any], Any], Context | None]] = []
            self._batch.call_when_done(self._call_back)
        self._callbacks.append((function, context))

    def remove_done_callback(self, function: Callable[[Any], Any]) -> int:
        before = getattr(self, "_callbacks", None)
        if before is None:
            return 0
        self._callbacks = [each for each in before if each[0] != function]
        return len(before) - len(self._callbacks)

    def _call_back(self, _: ProducerBatch) -> None:
        callbacks, self._callbacks = getattr(self, "_callbacks", []), []
        for function, context in callbacks:
            self.get_loop().call_soon(function, self, context=context)


class AsyncTableDelivery(TableDelivery):
    """What `send_table` returns: where each row of the table was stored, once it is known. `await` it; `places()` has
    the rows afterwards."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, Any]:
        yield from _wait_for(self._batches, cast("LoopState", self._changed))
        return self.result()


def forgettable(task: asyncio.Task[None]) -> None:
    """A loop that is closed without cancelling this task does not warn of it: its producer was not closed."""
    task._log_destroy_pending = False  # type: ignore[attr-defined]


def _wait_for(batches: list[ProducerBatch], state: LoopState) -> Generator[Any, None, None]:
    for batch in batches:
        if not batch.done:
            woken: asyncio.Future[None] = state.guard.loop.create_future()
            batch.call_when_done(lambda _, woken=woken: woken.done() or woken.set_result(None))  # type: ignore[misc]
            yield from woken


class AsyncSender(BatchSender[LoopState]):
    """The engine behind a producer."""

    def __init__(
        self,
        settings: ProducerSettings,
        cluster: AsyncCluster,
        identity: WriteIdentity,
        coordinator: CoordinatorCalls | None = None,
        forget_count: Callable[[str], object] | None = None,
    ) -> None:
        super().__init__(settings, cluster, identity, coordinator, LoopState(cluster.guard), forget_count)
        self.cluster = cluster
        self.task: asyncio.Task[None] | None = None
        self.crash: BaseException | None = None
        self._woken = asyncio.Event()
        self._is_waiting_for_step = False  # a batch was added since the last one
        self._finishing = False  # nobody holds the producer any more: what is left is sent

    def wake(self) -> None:
        self._woken.set()

    def condition(self) -> DeliveryCondition:
        """For deliveries, which are written for threads."""
        return cast("DeliveryCondition", self.changed)

    # --- records ---
    async def append(self, topic: str, partition: int, row: Row, size_bytes: int, transaction: int) -> AsyncDelivery:
        """Adds a row of a transaction (by its number) to the open batch of its partition. Waits while memory is full,
        up to max.block.ms."""
        self.core.check_transaction(transaction)
        batch = self._accumulator.append(topic, partition, row, size_bytes)
        if batch is None:
            await self._wait_for_memory(size_bytes + HEADER_SIZE, transaction)
            batch = self._accumulator.append(topic, partition, row, size_bytes)  # another task may have opened it
            if batch is None:
                batch = self._accumulator.append_new(topic, partition, row, size_bytes, time.monotonic())
            self.wake()
        return AsyncDelivery(batch, batch.count - 1, row[2], self.condition())

    async def append_table(
        self, topic: str, partition: int, part: TablePart, transaction: int
    ) -> tuple[ProducerBatch, int]:
        """Adds rows of a small table to the open batch of their partition: the batch, and where they begin in it."""
        self.core.check_transaction(transaction)
        batch = self._accumulator.append_table(topic, partition, part)
        if batch is None:
            await self._wait_for_memory(part.size_bytes + HEADER_SIZE, transaction)
            batch = self._accumulator.append_table(topic, partition, part)
            if batch is None:
                batch = self._accumulator.append_new_table(topic, partition, part, time.monotonic())
            self.wake()
        return batch, batch.count - part.row_count

    async def add(
        self, topic: str, partition: int, data: bytearray | memoryview, record_count: int, transaction: int
    ) -> ProducerBatch:
        """Adds encoded records behind what their partition has. Waits while memory is full, up to max.block.ms."""
        await self._wait_for_memory(len(data), transaction)
        batch = self.new_batch(topic, partition, data, record_count)
        if self._accumulator.add(batch):
            self.wake()
        return batch

    async def _wait_for_memory(self, size_bytes: int, transaction: int) -> None:
        """Gives way to the task that sends before another batch is opened: a program that only sends must not keep the
        loop until memory is full. What is cancelled here was not added."""
        if self._is_waiting_for_step:
            await asyncio.sleep(0)
        self._is_waiting_for_step = True
        await super()._wait_for_memory(size_bytes, transaction)

    async def wait_until(self, is_over: Callable[[], bool], timeout_s: float) -> bool:
        return await self.changed.wait_until(is_over, timeout_s)

    def fail_all(self, error: KafkaError) -> None:
        """Fails everything, on its way or not: nothing more will be sent or received."""
        self.core.fail_all(error)
        self.changed.notify_all()
        self._announce()

    # --- the task ---
    def start(self) -> None:
        if self.task is None:
            self.task = self.cluster.guard.loop.create_task(self._run(), name="semel-producer")
            forgettable(self.task)

    async def stop(self) -> None:
        """Ends the task, wherever it is."""
        task, self.task = self.task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    def finish(self) -> None:
        """The task sends what is left and ends. Called by the garbage collector, in any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop_of_task().call_soon_threadsafe(self._finish)

    def _loop_of_task(self) -> asyncio.AbstractEventLoop:
        assert self.task is not None
        return self.task.get_loop()

    def _finish(self) -> None:
        self._finishing = True
        self._accumulator.start_flush()
        self.wake()

    async def _run(self) -> None:
        end: KafkaError = ClosedError("the producer was closed before this record was acknowledged")
        try:
            while not self._finishing or self._accumulator.used_bytes:
                await self._step()
        except asyncio.CancelledError:
            if not self.cluster.closed and self._accumulator.used_bytes:
                log.warning("records were not acknowledged before the event loop ended; close the producer first")
            raise
        except ClosedError:
            pass
        except BaseException as error:
            self.crash = error
            end = FatalError(f"the task that sends ended: {error!r}")
            log.exception("the task that sends ended")
        finally:
            self.fail_all(end)
            if self._finishing:
                self.cluster.close()

    async def _step(self) -> None:
        self._woken.clear()
        self._is_waiting_for_step = False
        self._forget_closed()
        heads = self.core.advance(time.monotonic())
        self._announce()
        await self._encode(heads)
        blocked_until_s = await self._send_ready()
        self._announce()
        if not self._woken.is_set():
            await self._sleep(min(self.core.next_event_s(), blocked_until_s) - time.monotonic())

    async def _sleep(self, seconds: float) -> None:
        """Until it is woken, at most so long."""
        alarm = None
        if seconds != NEVER_S:
            alarm = self.cluster.guard.loop.call_later(max(0.0, seconds), self._woken.set)
        try:
            await self._woken.wait()
        finally:
            if alarm is not None:
                alarm.cancel()

    def _announce(self) -> None:
        if self.core.has_finished:
            finished = self.core.take_finished()
            self.changed.notify_all()
            run_callbacks(finished)

    async def _encode(self, heads: list[ProducerBatch]) -> None:
        """Small batches here, others in a thread: hundreds of kilobytes take milliseconds, and the column codec is
        loaded at its first use."""
        for batch in heads:
            try:
                is_loaded = batch.count <= FEW_ROWS or COLUMN_CODEC in sys.modules
                if is_loaded and batch.size_bytes <= ENCODED_HERE_BYTES:
                    batch.encode(self.settings.compression)
                else:
                    await self.cluster.guard.loop.run_in_executor(None, batch.encode, self.settings.compression)
            except Exception as error:  # it fails, and no other one
                self._encode_failed(batch, error)
            if batch.done:  # failed meanwhile, with its transaction
                batch.data = None

    # --- requests and responses ---
    def _send(self, connection: AsyncConnection, produce: Produce, version: int) -> None:
        connection.send(
            PRODUCE,
            produce.request,
            self._settle,
            version=version,
            timeout_s=produce.timeout_s,
            context=produce.sendings,
            response=self.settings.acks_number != 0,
        )

    def _settle(self, pending: Pending) -> None:
        super()._settle(pending)
        self.wake()
