"""What a program holds of what it sent: deliveries, which wait for the place of a record or of a table's rows."""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import get_ident
from typing import Any, NamedTuple, TypeVar

from semel.client.errors import IllegalStateError, KafkaError, TimedOutError
from semel.client.producer.batches import BatchMetadata, ProducerBatch, RecordMetadata
from semel.client.producer.futures import DeliveryFuture
from semel.client.timeouts import timeout_in_ms
from semel.client.timing import Deadline
from semel.client.waiting import LastingCondition

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
        if batch.error is not None:
            raise without_traceback(batch.error)
        offset = batch.base_offset + index if batch.base_offset >= 0 else -1
        stamped = batch.log_append_time if batch.log_append_time >= 0 else self._timestamp
        return RecordMetadata(batch.topic, batch.partition, offset, stamped)

    get = result  # as kafka-python's futures say

    @timeout_in_ms
    def exception(self, *, timeout_ms: float | None = None) -> KafkaError | None:
        """Waits; the error, or None if the record was stored."""
        wait_done(self._batch, self._changed, timeout_ms)
        return self._batch.part_with(self._index)[0].error

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
