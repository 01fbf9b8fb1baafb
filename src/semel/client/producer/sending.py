"""What every driver of a producer's core does alike: memory, flushing, and sending all that may be sent.

Coroutines over the connections of a driver, as the calls of a cluster are (`cluster_calls.py`). The core is only called
with `changed` held, and never across an `await` that may wait, but for `wait_until`, which gives it back meanwhile.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from semel.client.cluster_calls import ClusterCalls, Leader, NodeTarget
from semel.client.errors import BufferFullError, ConnectionFailedError, KafkaError
from semel.client.producer.accumulator import PartitionQueue
from semel.client.producer.batches import Place, ProducerBatch
from semel.client.producer.coordinator import CoordinatorCalls, request_identity
from semel.client.producer.core import NEVER_S, Produce, ProducerCore, Sending
from semel.client.producer.identities import WriteIdentity
from semel.client.settings import ProducerSettings
from semel.client.timing import Deadline
from semel.client.wire import Pending
from semel.protocol.errors import DecodeError, ErrorCode, Recovery
from semel.protocol.messages.records import PRODUCE, PartitionProduceResponse

LANE = "produce"


class StateCondition(Protocol):
    """Held while the state is looked at or changed; notified when it has changed."""

    def __enter__(self) -> object: ...

    def __exit__(self, *_: Any) -> object: ...

    def notify_all(self) -> None: ...


Changed = TypeVar("Changed", bound=StateCondition)


class BatchSender(Generic[Changed]):
    """Sends the batches of a core. A driver adds how it waits, how it is woken and when it takes steps."""

    def __init__(
        self,
        settings: ProducerSettings,
        calls: ClusterCalls[Any],
        identity: WriteIdentity,
        coordinator: CoordinatorCalls | None,
        changed: Changed,
        forget_count: Callable[[str], object] | None,
    ) -> None:
        self.settings = settings
        self._forget_count = forget_count  # called with a topic that is not there, or has fewer partitions than before
        self.core = ProducerCore(settings, identity, random.random)
        self.changed = changed  # guards the core; notified when batches are done, or a transaction's state changes
        self._calls = calls
        self._coordinator = coordinator  # of the transaction
        self._accumulator = self.core.accumulator
        self._used: dict[Any, None] = {}  # connections that Produce requests were sent on, in that order
        self._request_s = settings.request_timeout_ms / 1000
        self._setup_s = settings.socket_connection_setup_timeout_ms / 1000
        self._max_block_s = settings.max_block_ms / 1000
        self._max_in_flight = settings.max_in_flight_requests_per_connection

    # --- a driver's ---
    def wake(self) -> None:
        """There may be something to send."""
        raise NotImplementedError

    async def wait_until(self, is_over: Callable[[], bool], timeout_s: float) -> bool:
        """With `changed` held, which is given back meanwhile; whether it is over."""
        raise NotImplementedError

    def _announce(self) -> None:
        """Wakes those that wait for a batch, for memory or for a transaction. `changed` is held."""
        raise NotImplementedError

    def _send(self, connection: Any, produce: Produce, version: int) -> None:
        raise NotImplementedError

    # --- records ---
    def new_batch(self, topic: str, partition: int, data: bytearray | memoryview, record_count: int) -> ProducerBatch:
        """A batch of encoded records, which is to be added."""
        batch = self._accumulator.new_batch(topic, partition, time.monotonic())
        batch.data, batch.count = data, record_count
        batch.size_bytes, batch.compression = len(data), self.settings.compression
        return batch

    async def _wait_for_memory(self, size_bytes: int, transaction: int) -> None:
        """Returns when there is memory and records of this transaction are accepted. `changed` is held."""
        core, accumulator = self.core, self._accumulator
        core.check_transaction(transaction)
        core.check_accepts()
        if accumulator.has_memory(size_bytes):
            return
        self.wake()
        await self.wait_until(lambda: accumulator.has_memory(size_bytes) or core.ended is not None, self._max_block_s)
        core.check_transaction(transaction)
        core.check_accepts()
        if not accumulator.has_memory(size_bytes):
            raise BufferFullError(
                f"buffer.memory is full: {accumulator.used_bytes} of {accumulator.memory_bytes} bytes wait to be sent "
                f"and nothing got free within max.block.ms ({self.settings.max_block_ms:.0f}); is the broker "
                "reachable? send slower, or raise buffer.memory"
            )

    async def flushed(self, deadline: Deadline) -> bool:
        """Waits until everything that was here at the call is done; whether that happened in time."""
        with self.changed:
            waiting = list(self._accumulator.batches())[::-1]
            self._accumulator.start_flush()
            try:
                self.wake()
                return await self.wait_until(lambda: all_done(waiting), deadline.remaining_s())
            finally:
                self._accumulator.flushing -= 1

    # --- sending ---
    async def _send_ready(self) -> float:
        """Sends all that may be sent; when to look again if a connection stood in the way."""
        with self.changed:
            wants_identity = self.core.wants_identity(time.monotonic())
        if wants_identity and not await self._get_identity():
            return NEVER_S
        with self.changed:
            queues = self.core.ready(time.monotonic())
        if not queues:
            return NEVER_S
        by_node = await self._by_leader(queues)
        if not await self._add_partitions([queue for group in by_node.values() for queue in group]):
            return NEVER_S
        return min([await self._send_to(node, group) for node, group in by_node.items()], default=NEVER_S)

    async def _get_identity(self) -> bool:
        try:
            identity = await request_identity(self._calls, self._request_s, LANE)
        except KafkaError as error:
            self._not_ready(error)
            return False
        with self.changed:
            self.core.identity_received(identity)
        return True

    async def _add_partitions(self, queues: list[PartitionQueue]) -> bool:
        """TV1: makes partitions part of the transaction before they are written."""
        with self.changed:
            places = self.core.partitions_to_add(queues)
            identity = self.core.identity.current
        if not places:
            return True
        assert self._coordinator is not None
        assert identity is not None
        added: list[Place] = []
        try:
            await self._coordinator.add_partitions(identity, places, self._request_s, LANE)
            added = places
        except KafkaError as error:
            self._not_ready(error)
        finally:
            with self.changed:
                self.core.partitions_added(added)
                self.changed.notify_all()
        return bool(added)

    async def _by_leader(self, queues: list[PartitionQueue]) -> dict[int, list[PartitionQueue]]:
        groups: dict[int, list[PartitionQueue]] = {}
        failed_topics: set[str] = set()
        for queue in queues:
            if queue.topic in failed_topics:
                continue
            try:
                deadline = Deadline(self._request_s)
                leader = (await self._calls.partition(queue.topic, queue.partition, deadline, LANE)).leader
                groups.setdefault(leader, []).append(queue)
            except KafkaError as error:
                failed_topics.add(queue.topic)
                if error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION and self._forget_count is not None:
                    self._forget_count(queue.topic)
                self._unreachable([each for each in queues if each.topic == queue.topic], error)
        return groups

    async def _send_to(self, node: int, queues: list[PartitionQueue]) -> float:
        try:
            connection = await self._calls.connect(NodeTarget(node), Deadline(self._setup_s), LANE)
            lowest, highest = self.core.identity.produce_versions
            version = connection.capabilities.version_of(PRODUCE, highest, lowest)
        except KafkaError as error:
            self._forget([(queue.topic, queue.partition) for queue in queues])
            self._unreachable(queues, error)
            return NEVER_S
        if connection.retiring:
            return NEVER_S  # it is replaced when its last response is there
        if connection.is_throttled:
            throttled_until_s: float = connection.throttled_until_s
            return throttled_until_s
        while connection.in_flight < self._max_in_flight and not connection.closed:
            with self.changed:
                produce = self.core.take(queues, time.monotonic())
            if produce is None:
                break
            self._used[connection] = None
            self._send(connection, produce, version)
            queues = queues[1:] + queues[:1]  # no queue is always first
        return NEVER_S

    def _not_ready(self, error: KafkaError) -> None:
        with self.changed:
            self.core.not_ready(error, time.monotonic())
            self._announce()

    def _unreachable(self, queues: list[PartitionQueue], error: KafkaError) -> None:
        with self.changed:
            self.core.unreachable(queues, error, time.monotonic())
            self._announce()

    def _encode_failed(self, batch: ProducerBatch, error: Exception) -> None:
        with self.changed:
            self.core.encode_failed(batch, error)
            self._announce()

    # --- responses ---
    def _settle(self, pending: Pending) -> None:
        """A Produce request is done."""
        core, moved = self.core, []
        responses = None if pending.written else produce_responses(pending)
        with self.changed:
            if responses is None:
                core.written(pending.context)
            elif isinstance(responses, KafkaError):
                moved = core.lost(pending.context, responses, time.monotonic())
            else:
                moved = core.responded(pending.context, responses, time.monotonic())
            self._announce()
        self._log_refusals(pending.context)
        self._forget(moved)

    def _log_refusals(self, sendings: list[Sending]) -> None:
        """Says what a broker keeps refusing, long before delivery.timeout.ms."""
        outages = self._calls.outages
        for queue, _ in sendings:
            name = f"writing to {queue.topic}-{queue.partition}"
            if queue.setback is None:
                outages.over(name)
            elif queue.setback.recovery is Recovery.RETRY:
                outages.failed(name, queue.setback)

    def _forget(self, places: list[Place]) -> None:
        for place in places:
            self._calls.forget(Leader(*place))

    def _forget_closed(self) -> None:
        """With acks=0 a closed connection is the only way in which a broker can say that it is not the leader."""
        closed = [connection for connection in self._used if connection.closed]
        for connection in closed:
            del self._used[connection]
        if closed and self.settings.acks_number == 0:
            self._forget([*self._accumulator.queues])


def produce_responses(pending: Pending) -> dict[Place, PartitionProduceResponse] | KafkaError:
    """A Produce response by partition; why there is none that can be read."""
    try:
        response = pending.result()
    except DecodeError as error:
        return ConnectionFailedError(f"a malformed response to Produce: {error}", ErrorCode.NETWORK_EXCEPTION, True)
    except KafkaError as error:
        return error
    return {(topic.name, part.index): part for topic in response.responses for part in topic.partition_responses}


def all_done(batches: list[ProducerBatch]) -> bool:
    """Also takes the done ones off the end, so that they are not looked at again."""
    while batches and batches[-1].done:
        batches.pop()
    return not batches
