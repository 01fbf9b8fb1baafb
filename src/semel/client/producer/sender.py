"""The driver of a producer's core for threads: its lock, its connections, its waits. One `step` at a time, in a thread
of the producer's own or in the caller's.

A step encodes, sends all that may be sent, waits for the network (or to be woken), and hands in what came back. What
that means is decided by `core.py`. The lock is held for every call of the core, and never while something takes time:
encoding, connecting, calling a broker, waiting, callbacks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from semel.client.cluster import Cluster
from semel.client.connection import BrokerConnection, poll
from semel.client.errors import KafkaError
from semel.client.immediate import run
from semel.client.producer.batches import ProducerBatch, Row
from semel.client.producer.coordinator import CoordinatorCalls
from semel.client.producer.core import Produce
from semel.client.producer.deliveries import Delivery, DeliveryCondition
from semel.client.producer.identities import WriteIdentity
from semel.client.producer.sending import BatchSender
from semel.client.settings import ProducerSettings
from semel.client.waiting import Waker
from semel.client.wire import Pending
from semel.protocol.batch import HEADER_SIZE
from semel.protocol.messages.records import PRODUCE

if TYPE_CHECKING:
    from semel.client.producer.tables import TablePart

log = logging.getLogger("semel.client")

IDLE_S = 10.0


class Sender(BatchSender[DeliveryCondition]):
    """The engine behind a producer. Threads may share all but `step`."""

    def __init__(
        self,
        settings: ProducerSettings,
        cluster: Cluster,
        identity: WriteIdentity,
        coordinator: CoordinatorCalls | None = None,
        forget_count: Callable[[str], object] | None = None,
    ) -> None:
        self.cluster = cluster
        self.lock = DeliveryCondition()  # guards the core
        super().__init__(settings, cluster.calls, identity, coordinator, self.lock, forget_count)
        self._waker = Waker()
        self._asleep = False

    def wake(self) -> None:
        """Ends the wait of a step that is under way in another thread."""
        if self._asleep:
            self._asleep = False
            try:
                self._waker.wake()
            except BaseException:  # Ctrl-C came before it: all who come later take the thread for awake
                self._waker.wake()
                raise

    def _wake_after(self) -> None:
        """For what was added: it is there, also if Ctrl-C comes now."""
        try:
            self.wake()
        except BaseException:
            self.wake()
            raise

    def interrupt(self) -> None:
        """Ends the wait of a step, whether it has begun or not."""
        self._waker.wake()

    def close(self) -> None:
        self._waker.close()

    # --- records ---
    @property
    def used_bytes(self) -> int:
        """How much of buffer.memory is taken."""
        return self._accumulator.used_bytes

    def append(self, topic: str, partition: int, row: Row, size_bytes: int, transaction: int) -> Delivery:
        """Adds a row of a transaction (by its number) to the open batch of its partition. Blocks while memory is full,
        up to max.block.ms."""
        is_new = False
        try:
            with self.lock:
                if transaction != self.core.identity.transaction_number:  # without the cost of a call
                    self.core.check_transaction(transaction)
                batch = self._accumulator.append(topic, partition, row, size_bytes)
                if batch is None:
                    is_new = True
                    run(self._wait_for_memory(size_bytes + HEADER_SIZE, transaction))
                    # Another thread may have opened it.
                    batch = self._accumulator.append(topic, partition, row, size_bytes)
                    if batch is None:
                        batch = self._accumulator.append_new(topic, partition, row, size_bytes, time.monotonic())
                return Delivery(batch, batch.count - 1, row[2], self.changed)
        finally:
            if is_new:
                self._wake_after()

    def append_table(self, topic: str, partition: int, part: TablePart, transaction: int) -> tuple[ProducerBatch, int]:
        """Adds rows of a small table to the open batch of their partition: the batch, and where they begin in it."""
        is_new = False
        try:
            with self.lock:
                self.core.check_transaction(transaction)
                batch = self._accumulator.append_table(topic, partition, part)
                if batch is None:
                    is_new = True
                    run(self._wait_for_memory(part.size_bytes + HEADER_SIZE, transaction))
                    batch = self._accumulator.append_table(topic, partition, part)
                    if batch is None:
                        batch = self._accumulator.append_new_table(topic, partition, part, time.monotonic())
                return batch, batch.count - part.row_count
        finally:
            if is_new:
                self._wake_after()

    def add(self, batch: ProducerBatch, transaction: int = 0) -> None:
        """Adds an encoded batch behind what its partition has. Blocks while memory is full, up to max.block.ms."""
        is_news = True
        try:
            with self.lock:
                run(self._wait_for_memory(batch.size_bytes, transaction))
                is_news = self._accumulator.add(batch)
        finally:
            if is_news:
                self._wake_after()

    async def wait_until(self, is_over: Callable[[], bool], timeout_s: float) -> bool:
        return self.changed.wait_for(is_over, timeout_s)

    def start_flush(self) -> None:
        """From here on nothing lingers."""
        with self.lock:
            self._accumulator.start_flush()

    def fail_all(self, error: KafkaError) -> None:
        """Fails everything, on its way or not: nothing more will be sent or received."""
        with self.lock:
            self.core.fail_all(error)
            self.changed.notify_all()
        self._run_callbacks()

    # --- the loop ---
    def step(self, max_wait_s: float = IDLE_S) -> None:
        """One turn. Takes no longer than `max_wait_s`, unless a broker must be connected to or called."""
        seen = self._prepare()
        blocked_until_s = run(self._send_ready())
        self._run_callbacks()
        connections: list[BrokerConnection] = list(self._used)
        wait_s = min(max_wait_s, self._wait_s(connections, blocked_until_s, seen))
        done = poll(connections, wait_s, self._waker.fd)
        self._asleep = False
        self._waker.drain()
        for connection in connections:
            done += connection.check_deadlines()
        self._forget_closed()
        self._settle_all(done)
        self._run_callbacks()

    def _wait_s(self, connections: list[BrokerConnection], blocked_until_s: float, seen: int) -> float:
        """How long nothing can happen but responses and wake-ups."""
        self._asleep = True  # from here on, adding a batch wakes this thread
        now_s = time.monotonic()
        with self.lock:
            at_s = min(self.core.next_event_s(), blocked_until_s)
            if self._accumulator.additions != seen:
                return 0.0
        at_s = min([at_s, *(connection.next_deadline_s() for connection in connections)])
        return max(0.0, at_s - now_s)

    # --- before sending ---
    def _prepare(self) -> int:
        """Fails what is late and encodes what comes next; the state of the accumulator that this saw."""
        with self.lock:
            seen = self._accumulator.additions
            heads = self.core.advance(time.monotonic())
            self._announce()
        for batch in heads:
            try:
                batch.encode(self.settings.compression)
            except Exception as error:  # it fails, and no other one
                self._encode_failed(batch, error)
        return seen

    def _announce(self) -> None:
        if self.core.has_finished:
            self.changed.notify_all()

    # --- requests and responses ---
    def _send(self, connection: BrokerConnection, produce: Produce, version: int) -> None:
        pending = connection.send(
            PRODUCE,
            produce.request,
            version=version,
            timeout_s=produce.timeout_s,
            context=produce.sendings,
            response=self.settings.acks_number != 0,
        )
        if connection.closed:  # with it, everything that was on its way there
            failed = connection.take_unreported()
            self._settle_all(failed if pending in failed else [*failed, pending])

    def _settle_all(self, done: list[Pending]) -> None:
        for pending in done:
            if pending.api is PRODUCE:
                self._settle(pending)

    def _run_callbacks(self) -> None:
        if not self.core.has_finished:
            return
        with self.lock:
            finished = self.core.take_finished()
        run_callbacks(finished)


def run_callbacks(finished: list[ProducerBatch]) -> None:
    """Calls what waits for these batches, and for those that they were a part of."""
    for batch in finished:
        for done in batch.finished():
            callbacks, done.callbacks = done.callbacks, None
            for callback in callbacks or ():
                try:
                    callback(done)
                except Exception:
                    log.exception("a delivery callback failed")
