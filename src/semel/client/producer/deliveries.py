"""What a program holds of what it sent: deliveries, which wait for the place of a record or of a table's rows."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator
from threading import RLock, get_ident
from typing import Any, NamedTuple, Self, TypeVar

from semel.client.errors import IllegalStateError, KafkaError, TimedOutError
from semel.client.producer.batches import BatchMetadata, ProducerBatch, RecordMetadata
from semel.client.timing import Deadline, timeout_in_ms
from semel.client.waiting import LastingCondition

# --- What makes a delivery a future: `await`, `concurrent.futures.wait` and `as_completed` ---
#
# `concurrent.futures` asks a future for `_condition`, `_state` and `_waiters` and relies on these: while it holds the
# conditions of its futures, no state changes, and a waiter that it adds then is called once. A delivery has them from
# the first time that they are used, so that those that nobody waits for in this way cost nothing. One lock serves all
# deliveries: `concurrent.futures` takes the locks of many futures at once, in an order of its own.


RUNNING, FINISHED = "RUNNING", "FINISHED"  # as concurrent.futures writes them
CONDITION = RLock()  # taken before the lock of a producer, never after it; nothing waits for it to be notified


class Waiting:
    """What `concurrent.futures` knows of one delivery."""

    __slots__ = ("state", "waiters")

    def __init__(self) -> None:
        self.state = RUNNING
        self.waiters: list[Any] = []

    def finish(self, delivery: DeliveryFuture) -> None:
        with CONDITION:
            self.state = FINISHED
            failed = delivery.exception() is not None
            for waiter in self.waiters:
                waiter.add_exception(delivery) if failed else waiter.add_result(delivery)


class DeliveryFuture:
    """The methods of a future that deliveries share."""

    __slots__ = ("_waiting",)  # empty until somebody waits with concurrent.futures

    def done(self) -> bool:
        raise NotImplementedError

    def result(self) -> Any:
        raise NotImplementedError

    def exception(self) -> BaseException | None:
        raise NotImplementedError

    def add_done_callback(self, function: Callable[[Self], Any]) -> None:
        raise NotImplementedError

    def running(self) -> bool:
        return not self.done()

    def cancel(self) -> bool:
        """Always False: what was given to the producer is sent. In a transaction, abort_transaction() takes it back."""
        return False

    def cancelled(self) -> bool:
        """Always False, see `cancel`."""
        return False

    # --- asyncio ---
    def __await__(self) -> Generator[Any, None, Any]:
        """Waits without blocking the event loop. Cancelling the task that waits does not take the records back."""
        if not self.done():
            from asyncio import get_running_loop

            loop = get_running_loop()
            woken = loop.create_future()

            def wake() -> None:
                if not woken.done():  # the task may have been cancelled
                    woken.set_result(None)

            def wake_loop(_: object) -> None:  # in the sender's thread
                with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                    loop.call_soon_threadsafe(wake)

            self.add_done_callback(wake_loop)
            yield from woken
        return self.result()

    # --- concurrent.futures ---
    @property
    def _condition(self) -> Any:
        return CONDITION

    @property
    def _state(self) -> str:
        return self._awaited().state

    @property
    def _waiters(self) -> list[Any]:
        return self._awaited().waiters

    def _awaited(self) -> Waiting:
        with CONDITION:
            known: Waiting | None = getattr(self, "_waiting", None)
            if known is not None:
                return known
            waiting = self._waiting = Waiting()
        self.add_done_callback(waiting.finish)
        return waiting


Value = TypeVar("Value")


class DeliveryCondition(LastingCondition):  # type: ignore[misc]  # as there
    """Notified when batches are done; of use only in the process whose thread sends them, and not in that thread, which
    runs the callbacks of deliveries: it would wait for itself."""

    def __init__(self) -> None:
        super().__init__()
        self._owner_pid = os.getpid()
        self.sending_thread: int | None = None  # its identifier, while it runs

    def wait_for(self, predicate: Callable[[], Value], timeout_s: float | None = None) -> Value:
        if timeout_s != 0 and get_ident() == self.sending_thread and not predicate():
            raise IllegalStateError(
                "a callback of a delivery cannot wait for the producer: it runs in the thread that sends; let another "
                "thread do it"
            )
        return super().wait_for(predicate, timeout_s)

    def check_process(self) -> None:
        if os.getpid() != self._owner_pid:
            raise IllegalStateError(
                "this delivery was made before the process was forked, and only the parent gets its result: wait for "
                "it there, or send from a producer of this process"
            )


class Delivery(DeliveryFuture):
    """What `send` returns: the place of one record, once it is known. `await` it, call `result`, or give it to
    `concurrent.futures.wait` or `as_completed`."""

    __slots__ = ("_batch", "_changed", "_index", "_timestamp")

    def __init__(self, batch: ProducerBatch, index: int, timestamp: int, changed: DeliveryCondition) -> None:
        self._batch = batch
        self._index = index
        self._timestamp = timestamp
        self._changed = changed

    def done(self) -> bool:
        return self._batch.done

    @timeout_in_ms
    def result(self, *, timeout_ms: float | None = None) -> RecordMetadata:
        """Waits for the broker's word: the record's place, or the error that kept it from being stored."""
        wait_done(self._batch, self._changed, timeout_ms)
        return self._place()

    def _place(self) -> RecordMetadata:
        """Once the batch is done."""
        batch, index = self._batch.part_with(self._index)
        error = batch.error_of(index)
        if error is not None:
            raise without_traceback(error)
        offset = batch.base_offset + index if batch.base_offset >= 0 else -1
        stamped = batch.log_append_time if batch.log_append_time >= 0 else self._timestamp
        return RecordMetadata(batch.topic, batch.partition, offset, stamped)

    get = result  # as kafka-python's futures say

    @timeout_in_ms
    def exception(self, *, timeout_ms: float | None = None) -> KafkaError | None:
        """Waits; the error, or None if the record was stored."""
        wait_done(self._batch, self._changed, timeout_ms)
        batch, index = self._batch.part_with(self._index)
        return batch.error_of(index)

    @property
    def is_refused_alone(self) -> bool:
        """Once it has failed: whether the broker refused this very record, and not another one of its batch."""
        batch, index = self._batch.part_with(self._index)
        return index in (batch.refused or ())

    def add_done_callback(self, function: Callable[[Delivery], Any]) -> None:
        """Calls the function with this delivery when it is done: in the sender's thread, so it must not block."""
        self._changed.check_process()
        with self._changed:
            is_done = self._batch.done
            if not is_done:
                self._batch.call_when_done(lambda _batch: function(self))
        if is_done:
            function(self)


class TableShare(NamedTuple):
    """Rows of a table in a batch, which may hold rows of other tables before and after them."""

    batch: ProducerBatch
    first: int  # the place of the first one in the batch
    row_count: int
    rows: Any  # which rows of the table they are, in order


class TableDelivery(DeliveryFuture):
    """What `send_table` returns: where each row of the table was stored, once it is known. A future, as `Delivery`."""

    __slots__ = ("_batches", "_changed", "_row_count", "_shares")

    def __init__(self, shares: list[TableShare], row_count: int, changed: DeliveryCondition) -> None:
        self._shares = shares
        self._batches = [share.batch for share in shares]
        self._row_count = row_count
        self._changed = changed

    def __len__(self) -> int:
        return self._row_count

    def done(self) -> bool:
        return all(batch.done for batch in self._batches)

    @timeout_in_ms
    def result(self, *, timeout_ms: float | None = None) -> list[BatchMetadata]:
        """Waits for all of them; one entry per stored batch. Raises the first error."""
        error = self.exception(timeout_ms=timeout_ms)
        if error is not None:
            raise without_traceback(error)
        return [run for share in self._shares for run in share.batch.metadata(share.first, share.row_count)]

    get = result

    @timeout_in_ms
    def exception(self, *, timeout_ms: float | None = None) -> KafkaError | None:
        """Waits; the first error, or None if every row was stored."""
        deadline = None if timeout_ms is None else Deadline(timeout_ms / 1000)
        for batch in self._batches:
            wait_done(batch, self._changed, timeout_ms, deadline)
        return next((batch.error for batch in self._batches if batch.error is not None), None)

    def add_done_callback(self, function: Callable[[TableDelivery], Any]) -> None:
        """Calls the function with this delivery when all its rows are done: in the sender's thread, so it must not
        block."""
        pending: set[ProducerBatch] = set()

        def one_is_done(batch: ProducerBatch) -> None:
            with self._changed:
                pending.discard(batch)
                is_last = not pending
            if is_last:
                function(self)

        self._changed.check_process()
        with self._changed:
            pending.update(batch for batch in self._batches if not batch.done)
            is_done = not pending
            for batch in pending:
                batch.call_when_done(one_is_done)
        if is_done:
            function(self)

    @timeout_in_ms
    def places(self, *, timeout_ms: float | None = None) -> tuple[Any, Any]:
        """(partition, offset) of every row of the table, as numpy arrays in the order of the rows."""
        import numpy as np

        self.result(timeout_ms=timeout_ms)
        partitions = np.empty(self._row_count, np.int32)
        offsets = np.empty(self._row_count, np.int64)
        for share in self._shares:
            runs = share.batch.metadata(share.first, share.row_count)
            partitions[share.rows] = share.batch.partition
            offsets[share.rows] = np.concatenate([_offsets_of(run) for run in runs])
        return partitions, offsets


def _offsets_of(run: BatchMetadata) -> Any:
    import numpy as np

    if run.base_offset < 0:  # acks=0: not known
        return np.full(run.record_count, -1, np.int64)
    return np.arange(run.base_offset, run.base_offset + run.record_count)


def without_traceback(error: KafkaError) -> KafkaError:
    """The error of a batch is raised for each of its records, and would keep the frames of all who got it."""
    return error.with_traceback(None)


def wait_done(
    batch: ProducerBatch, changed: DeliveryCondition, timeout_ms: float | None, deadline: Deadline | None = None
) -> ProducerBatch:
    """Up to the timeout, or to the deadline of a call that waits for several batches and has this timeout."""
    if not batch.done:
        changed.check_process()
        limit_s = None if timeout_ms is None else timeout_ms / 1000
        with changed:
            if not changed.wait_for(lambda: batch.done, limit_s if deadline is None else deadline.remaining_s()):
                raise TimedOutError(
                    f"no response yet for a record sent to {batch.topic}-{batch.partition} after {timeout_ms:g} ms of "
                    "waiting; it is still on its way: wait longer, or see delivery.timeout.ms"
                )
    return batch
