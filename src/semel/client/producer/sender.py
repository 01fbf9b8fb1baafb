"""The driver of a producer's core: its lock, its connections, its waits. One `step` at a time, in a thread of the
producer's own or in the caller's.

A step encodes, sends all that may be sent, waits for the network (or to be woken), and hands in what came back. What
that means is decided by `core.py`. The lock is held for every call of the core, and never while something takes time:
encoding, connecting, calling a broker, waiting, callbacks.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING

from semel.client.aside import Waker
from semel.client.cluster import Cluster, Leader, NodeTarget
from semel.client.connection import BrokerConnection, poll
from semel.client.errors import BufferFullError, ConnectionFailedError, KafkaError
from semel.client.producer.accumulator import Accumulator
from semel.client.producer.batches import Place, ProducerBatch, Row
from semel.client.producer.coordinator import CoordinatorClient, new_identity
from semel.client.producer.core import NEVER_S, Produce, ProducerCore
from semel.client.producer.deliveries import Delivery, DeliveryCondition
from semel.client.producer.identities import WriteIdentity
from semel.client.producer.partition_queue import PartitionQueue
from semel.client.settings import ProducerSettings
from semel.client.timing import Deadline
from semel.client.wire import Pending
from semel.protocol.batch import HEADER_SIZE
from semel.protocol.errors import DecodeError, EncodeError, ErrorCode
from semel.protocol.messages.records import PRODUCE, PartitionProduceResponse

if TYPE_CHECKING:
    from semel.client.producer.tables import TablePart

log = logging.getLogger("semel.client")

LANE = "produce"
IDLE_S = 10.0


class Sender:
    """The engine behind a producer. Threads may share all but `step`."""

    def __init__(
        self,
        settings: ProducerSettings,
        cluster: Cluster,
        identity: WriteIdentity,
        coordinator: CoordinatorClient | None = None,
    ) -> None:
        self.settings = settings
        self.cluster = cluster
        self.core = ProducerCore(settings, identity, random.random)
        self.lock = Lock()  # guards the core
        self.changed = DeliveryCondition(
            self.lock
        )  # notified when batches are done, or the state of a transaction changes
        self._coordinator = coordinator  # of the transaction
        self._accumulator = self.core.accumulator
        self._waker = Waker()
        self._asleep = False
        self._request_s = settings.request_timeout_ms / 1000
        self._setup_s = settings.socket_connection_setup_timeout_ms / 1000
        self._max_block_s = settings.max_block_ms / 1000
        self._max_in_flight = settings.max_in_flight_requests_per_connection
        self._used: set[BrokerConnection] = set()  # those that produce requests were sent on

    def wake(self) -> None:
        """Ends the wait of a step that is under way in another thread."""
        if self._asleep:
            self._asleep = False
            self._waker.wake()

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

    def append(self, topic: str, partition: int, row: Row, size_bytes: int) -> Delivery:
        """Adds a row to the open batch of its partition. Blocks while memory is full, up to max.block.ms."""
        with self.lock:
            batch = self._accumulator.append(topic, partition, row, size_bytes)
            is_new = batch is None
            if batch is None:
                self._wait_for_memory(size_bytes + HEADER_SIZE)
                batch = self._accumulator.append(topic, partition, row, size_bytes)  # another thread may have opened it
                if batch is None:
                    batch = self._accumulator.append_new(topic, partition, row, size_bytes, time.monotonic())
            delivery = Delivery(batch, batch.count - 1, row[2], self.changed)
        if is_new:
            self.wake()
        return delivery

    def append_table(self, topic: str, partition: int, part: TablePart) -> tuple[ProducerBatch, int]:
        """Adds rows of a small table to the open batch of their partition: the batch, and where they begin in it."""
        with self.lock:
            batch = self._accumulator.append_table(topic, partition, part)
            is_new = batch is None
            if batch is None:
                self._wait_for_memory(part.size_bytes + HEADER_SIZE)
                batch = self._accumulator.append_table(topic, partition, part)
                if batch is None:
                    batch = self._accumulator.append_new_table(topic, partition, part, time.monotonic())
            first = batch.count - part.row_count
        if is_new:
            self.wake()
        return batch, first

    def new_batch(self, topic: str, partition: int, data: bytearray | memoryview, record_count: int) -> ProducerBatch:
        """A batch of encoded records, which is to be added."""
        batch = self._accumulator.new_batch(topic, partition, time.monotonic())
        batch.data, batch.count = data, record_count
        batch.size_bytes, batch.compression = len(data), self.settings.compression
        return batch

    def add(self, batch: ProducerBatch) -> None:
        """Adds an encoded batch behind what its partition has. Blocks while memory is full, up to max.block.ms."""
        with self.lock:
            self._wait_for_memory(batch.size_bytes)
            is_news = self._accumulator.add(batch)
        if is_news:
            self.wake()

    def _wait_for_memory(self, size_bytes: int) -> None:
        """Returns when there is memory and records are accepted."""
        core, accumulator = self.core, self._accumulator
        core.check_accepts()
        if accumulator.has_memory(size_bytes):
            return
        self.wake()
        self.changed.wait_for(lambda: accumulator.has_memory(size_bytes) or core.ended is not None, self._max_block_s)
        core.check_accepts()
        if not accumulator.has_memory(size_bytes):
            raise buffer_full(accumulator, self._max_block_s)

    def flush(self, deadline: Deadline) -> bool:
        """Waits until everything that was here at the call is done; whether that happened in time."""
        with self.lock:
            waiting = list(self._accumulator.batches())[::-1]
            self._accumulator.start_flush()
            self.wake()
            try:
                return self.changed.wait_for(lambda: all_done(waiting), deadline.remaining_s())
            finally:
                self._accumulator.flushing -= 1

    async def wait_until(self, is_over: Callable[[], bool], timeout_s: float) -> bool:
        """For the calls of a transaction: with the lock held, which is given back meanwhile."""
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
        blocked_until_s = self._send_ready()
        self._run_callbacks()
        connections = list(self._used)
        wait_s = min(max_wait_s, self._wait_s(connections, blocked_until_s, seen))
        done = poll(connections, wait_s, self._waker.fd)
        self._asleep = False
        self._waker.drain()
        for connection in connections:
            done += connection.check_deadlines()
            if connection.closed:
                self._used.discard(connection)
                if self.settings.acks_number == 0:  # the only way in which a broker can say that it is not the leader
                    self._forget([*self._accumulator.queues])
        self._settle(done)
        self._run_callbacks()

    def _forget(self, places: list[Place]) -> None:
        for place in places:
            self.cluster.forget(Leader(*place))

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
            except EncodeError as error:
                self._report(lambda batch=batch, error=error: self.core.encode_failed(batch, error))  # type: ignore[misc]
        return seen

    def _report(self, event: Callable[[], object]) -> None:
        """Tells the core of something that may end batches."""
        with self.lock:
            event()
            self._announce()

    def _announce(self) -> None:
        """Wakes those that wait for a batch, for memory or for a transaction. The lock is held."""
        if self.core.has_finished:
            self.changed.notify_all()

    # --- sending ---
    def _send_ready(self) -> float:
        """Sends all that may be sent; when to look again if a connection stood in the way."""
        with self.lock:
            wants_identity = self.core.wants_identity(time.monotonic())
        if wants_identity and not self._get_identity():
            return NEVER_S
        with self.lock:
            queues = self.core.ready(time.monotonic())
        if not queues:
            return NEVER_S
        by_node = self._by_leader(queues)
        if not self._add_partitions([queue for group in by_node.values() for queue in group]):
            return NEVER_S
        return min([self._send_to(node, group) for node, group in by_node.items()], default=NEVER_S)

    def _get_identity(self) -> bool:
        try:
            identity = new_identity(self.cluster, self._request_s, LANE)
        except KafkaError as error:
            self._not_ready(error)
            return False
        with self.lock:
            self.core.identity_received(identity)
        return True

    def _add_partitions(self, queues: list[PartitionQueue]) -> bool:
        """TV1: makes partitions part of the transaction before they are written."""
        with self.lock:
            places = self.core.partitions_to_add(queues)
            identity = self.core.identity.current
        if not places:
            return True
        assert self._coordinator is not None
        assert identity is not None
        added: list[Place] = []
        try:
            self._coordinator.add_partitions(identity, places, self._request_s, LANE)
            added = places
        except KafkaError as error:
            self._not_ready(error)
        finally:
            with self.lock:
                self.core.partitions_added(added)
                self.changed.notify_all()
        return bool(added)

    def _not_ready(self, error: KafkaError) -> None:
        self._report(lambda: self.core.not_ready(error, time.monotonic()))

    def _by_leader(self, queues: list[PartitionQueue]) -> dict[int, list[PartitionQueue]]:
        groups: dict[int, list[PartitionQueue]] = {}
        failed_topics: set[str] = set()
        for queue in queues:
            if queue.topic in failed_topics:
                continue
            try:
                deadline = Deadline(self._request_s)
                leader = self.cluster.partition(queue.topic, queue.partition, deadline, LANE).leader
                groups.setdefault(leader, []).append(queue)
            except KafkaError as error:
                failed_topics.add(queue.topic)
                self._unreachable([each for each in queues if each.topic == queue.topic], error)
        return groups

    def _unreachable(self, queues: list[PartitionQueue], error: KafkaError) -> None:
        self._report(lambda: self.core.unreachable(queues, error, time.monotonic()))

    def _send_to(self, node: int, queues: list[PartitionQueue]) -> float:
        try:
            connection = self.cluster.connect(NodeTarget(node), Deadline(self._setup_s), LANE)
            lowest, highest = self.core.identity.produce_versions
            version = connection.capabilities.version_of(PRODUCE, highest, lowest)
        except KafkaError as error:
            self._forget([(queue.topic, queue.partition) for queue in queues])
            self._unreachable(queues, error)
            return NEVER_S
        if connection.retiring:
            return NEVER_S  # it is replaced when its last response is there
        if connection.is_throttled:
            return connection.throttled_until_s
        while connection.in_flight < self._max_in_flight and not connection.closed:
            with self.lock:
                produce = self.core.take(queues, time.monotonic())
            if produce is None:
                break
            self._send(connection, produce, version)
            queues = queues[1:] + queues[:1]  # no queue is always first
        return NEVER_S

    def _send(self, connection: BrokerConnection, produce: Produce, version: int) -> None:
        pending = connection.send(
            PRODUCE,
            produce.request,
            version=version,
            timeout_s=produce.timeout_s,
            context=produce.sendings,
            response=self.settings.acks_number != 0,
        )
        self._used.add(connection)
        if connection.closed:  # with it, everything that was on its way there
            failed = connection.take_unreported()
            self._settle(failed if pending in failed else [*failed, pending])

    # --- responses ---
    def _settle(self, done: list[Pending]) -> None:
        for pending in done:
            if pending.api is PRODUCE:
                self._settle_one(pending)

    def _settle_one(self, pending: Pending) -> None:
        core, moved = self.core, []
        responses = None if pending.written else produce_responses(pending)
        with self.lock:
            if responses is None:
                core.written(pending.context)
            elif isinstance(responses, KafkaError):
                moved = core.lost(pending.context, responses, time.monotonic())
            else:
                moved = core.responded(pending.context, responses, time.monotonic())
            self._announce()
        self._forget(moved)

    def _run_callbacks(self) -> None:
        if not self.core.has_finished:
            return
        with self.lock:
            finished = self.core.take_finished()
        run_callbacks(finished)


def produce_responses(pending: Pending) -> dict[Place, PartitionProduceResponse] | KafkaError:
    """A Produce response by partition; why there is none that can be read."""
    try:
        response = pending.result()
    except DecodeError as error:
        return ConnectionFailedError(f"a malformed response to Produce: {error}", ErrorCode.NETWORK_EXCEPTION, True)
    except KafkaError as error:
        return error
    return {(topic.name, part.index): part for topic in response.responses for part in topic.partition_responses}


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


def buffer_full(accumulator: Accumulator, max_block_s: float) -> BufferFullError:
    return BufferFullError(
        f"buffer.memory is full: {accumulator.used_bytes} of {accumulator.memory_bytes} bytes wait to be sent "
        f"and nothing got free within max.block.ms ({max_block_s * 1000:.0f}); is the broker reachable? "
        "send slower, or raise buffer.memory"
    )


def all_done(batches: list[ProducerBatch]) -> bool:
    """Also takes the done ones off the end, so that they are not looked at again."""
    while batches and batches[-1].done:
        batches.pop()
    return not batches
