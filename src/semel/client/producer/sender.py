"""Sends batches and takes their responses: one `step` at a time, in a thread of the producer's own or in the caller's.

A step closes what has lingered, encodes, sends all that may be sent, waits for the network (or to be woken), and
settles what has a response. The queues decide about order and retries, the gate about identity and transaction.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import time
from itertools import islice
from typing import Protocol

from semel.client.cluster import Cluster, Leader, NodeTarget
from semel.client.connection import BrokerConnection, poll
from semel.client.errors import ConnectionFailedError, DeliveryTimedOutError, FatalError, KafkaError, error_of
from semel.client.producer.accumulator import Accumulator, Place
from semel.client.producer.batches import NO_IDENTITY, Identity, ProducerBatch
from semel.client.producer.coordinator import new_identity
from semel.client.producer.partition_queue import MAX_UNACKED, FailedBatchAction, PartitionQueue
from semel.client.settings import ProducerSettings
from semel.client.timing import Deadline
from semel.client.wire import Pending
from semel.protocol.errors import DecodeError, EncodeError, ErrorCode, Recovery
from semel.protocol.messages.records import (
    PRODUCE,
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    TopicProduceData,
)

log = logging.getLogger("semel.client")

LANE = "produce"
NAMES_UP_TO = 12  # later versions of Produce name topics by id
IDLE_S = 10.0
# The broker is still finishing something of ours: it takes milliseconds, so retry soon.
SHORT_WAITS = frozenset({ErrorCode.CONCURRENT_TRANSACTIONS, ErrorCode.NOT_ENOUGH_REPLICAS})
SHORT_WAIT_S = 0.001
# Says that another leader must be found.
MOVED = frozenset(
    {
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.LEADER_NOT_AVAILABLE,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.FENCED_LEADER_EPOCH,
        ErrorCode.UNKNOWN_LEADER_EPOCH,
        ErrorCode.NETWORK_EXCEPTION,
        ErrorCode.KAFKA_STORAGE_ERROR,
    }
)

Sending = tuple[PartitionQueue, ProducerBatch]


class SendGate(Protocol):
    """What the sender must know about the producer's identity. Methods that may do I/O are called without the lock."""

    transactional_id: str | None

    def identity(self) -> Identity | None:
        """The producer's identity, or None while nothing may be sent."""

    def prepare(self) -> None:
        """Gets an identity if there is none and one may be requested. I/O."""

    def produce_version(self) -> tuple[int, int]:
        """(lowest, highest) version of Produce that may be used now."""

    def admit(self, places: list[Place]) -> None:
        """Makes partitions part of the transaction before they are written (TV1). I/O."""

    def raise_epoch(self, stale: Identity) -> Identity | None:
        """The next epoch, if `stale` is still the current identity. None: not now."""

    def failed(self, error: KafkaError) -> None:
        """A batch fails: the transaction cannot be committed any more. Called with the accumulator's lock held, in the
        same step that finishes the batch: no thread sees the batch done and the transaction sound. Must not wait."""

    def stored(self, batch: ProducerBatch) -> None:
        """The broker has a batch. Called with the accumulator's lock held, so it must not wait."""

    def giving_up(self) -> KafkaError | None:
        """Why nothing is worth sending any more: the transaction is being aborted, or the producer fenced."""


class Sender:
    """The engine behind a producer."""

    def __init__(self, settings: ProducerSettings, cluster: Cluster, gate: SendGate) -> None:
        self.settings = settings
        self.cluster = cluster
        self.gate = gate
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_out, False)
        os.set_blocking(self._wake_in, False)
        self._asleep = False
        self.accumulator = Accumulator(settings, self.wake)
        self._request_s = settings.request_timeout_ms / 1000
        self._backoff_s = settings.retry_backoff_ms / 1000
        self._backoff_max_s = settings.retry_backoff_max_ms / 1000
        self._setup_s = settings.socket_connection_setup_timeout_ms / 1000
        self._max_in_flight = settings.max_in_flight_requests_per_connection
        self._max_unacked = min(MAX_UNACKED, self._max_in_flight) if settings.is_idempotent else self._max_in_flight
        self._setbacks = 0  # in a row, of the gate
        self._used: set[BrokerConnection] = set()  # those that produce requests were sent on
        self._finished: list[ProducerBatch] = []  # whose callbacks are due

    def wake(self) -> None:
        """Ends the wait of a step that is under way in another thread."""
        if self._asleep:
            self._asleep = False
            with contextlib.suppress(OSError):  # closed, or full of wake-ups already
                os.write(self._wake_in, b"\0")

    def interrupt(self) -> None:
        """Ends the wait of a step, whether it has begun or not."""
        with contextlib.suppress(OSError):  # closed, or full of wake-ups already
            os.write(self._wake_in, b"\0")

    def close(self) -> None:
        pipe = self._wake_out, self._wake_in
        self._wake_out = self._wake_in = -1  # a late wake-up must not be written to a file that got the number
        for fd in pipe:
            os.close(fd)

    # --- the loop ---

    def step(self, max_wait_s: float = IDLE_S) -> None:
        """One turn. Takes no longer than `max_wait_s`, unless a broker must be connected to or called."""
        self._give_up_on_late()
        seen = self._encode_heads()
        blocked_until_s = self._send_ready()
        self._run_callbacks()
        connections = list(self._used)
        wait_s = min(max_wait_s, self._wait_s(connections, blocked_until_s, seen))
        done = poll(connections, wait_s, self._wake_out)
        self._asleep = False
        self._drain_wakeups()
        for connection in connections:
            done += connection.check_deadlines()
            if connection.closed:
                self._used.discard(connection)
                if self.settings.acks_number == 0:  # the only way in which a broker can say that it is not the leader
                    self._forget_leaders()
        self._settle(done)
        self._run_callbacks()

    def _forget_leaders(self) -> None:
        for queue in list(self.accumulator.queues.values()):
            self.cluster.forget(Leader(queue.topic, queue.partition))

    def _wait_s(self, connections: list[BrokerConnection], blocked_until_s: float, seen: int) -> float:
        """How long nothing can happen but responses and wake-ups."""
        self._asleep = True  # from here on, adding a batch wakes this thread
        with self.accumulator.changed:
            at_s = min(self.accumulator.next_event_s(), blocked_until_s)
            if self.accumulator.additions != seen:
                return 0.0
        at_s = min([at_s, *(connection.next_deadline_s() for connection in connections)])
        return max(0.0, at_s - time.monotonic())

    def _drain_wakeups(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_out, 4096):
                pass

    # --- before sending ---

    def _give_up_on_late(self) -> None:
        """Fails what is past delivery.timeout.ms; everything that waits, if the transaction is lost."""
        now_s = time.monotonic()
        with self.accumulator.changed:
            lost = self.gate.giving_up()  # with the lock held: no record of the next transaction can be here yet
            if lost is not None:
                self._finished += self.accumulator.fail_waiting(lost)
                return
            for queue in self.accumulator.queues.values():
                oldest = next(queue.batches(), None)
                if oldest is None or oldest.deadline_s > now_s:
                    continue
                for batch in queue.expired(now_s):
                    self._fail(queue, batch, _late(batch, self.settings))

    def _encode_heads(self) -> int:
        """Closes what has lingered and encodes what comes next; the state of the accumulator that this saw."""
        with self.accumulator.changed:
            seen = self.accumulator.additions
            self.accumulator.close_lingering(time.monotonic())
            heads = [
                batch
                for queue in self.accumulator.queues.values()
                for batch in islice(queue.queued, self._max_unacked)
                if batch.data is None
            ]
        for batch in heads:
            self._encode(batch)
        return seen

    def _encode(self, batch: ProducerBatch) -> None:
        try:
            batch.encode(self.settings.compression)
        except EncodeError as error:
            failure = FatalError(f"records for {batch.topic}-{batch.partition} cannot be encoded: {error}")
            with self.accumulator.changed:
                self._fail(self.accumulator.queues[batch.topic, batch.partition], batch, failure)

    def _ready_queues(self, identity: Identity) -> list[PartitionQueue]:
        now_s = time.monotonic()
        with self.accumulator.changed:
            queues = list(self.accumulator.queues.values())
            for queue in queues:
                if queue.wants_restart():
                    fresh = self.gate.raise_epoch(identity) if queue.identity == identity else identity
                    if fresh is not None:
                        identity = fresh
                        queue.restart(fresh)
            return [queue for queue in queues if queue.can_send(now_s, identity, self._max_unacked)]

    # --- sending ---

    def _send_ready(self) -> float:
        """Sends all that may be sent; when to look again if something stood in the way."""
        if not any(not queue.is_empty for queue in list(self.accumulator.queues.values())):
            return float("inf")
        try:
            self.gate.prepare()
        except KafkaError as error:
            return self._not_ready(error)
        identity = self.gate.identity()
        if identity is None:
            return float("inf")
        queues = self._ready_queues(identity)
        current = self.gate.identity()
        if current is None:
            return 0.0  # the last epoch was used up, or the transaction ends: the next step finds out
        identity = current  # the epoch may have been raised
        by_node = self._by_leader(queues)
        try:
            self.gate.admit([(queue.topic, queue.partition) for group in by_node.values() for queue in group])
        except KafkaError as error:
            return self._not_ready(error)
        return min([self._send_to(node, group, identity) for node, group in by_node.items()], default=float("inf"))

    def _not_ready(self, error: KafkaError) -> float:
        """No identity, or the partitions could not be added to the transaction."""
        if error.recovery is not Recovery.RETRY:
            with self.accumulator.changed:
                self.gate.failed(error)
                self._finished += self.accumulator.fail_waiting(error)
            return float("inf")
        self._setbacks += 1
        return time.monotonic() + self._pause_s(self._setbacks)

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
                self._cannot_reach([each for each in queues if each.topic == queue.topic], error)
        return groups

    def _cannot_reach(self, queues: list[PartitionQueue], error: KafkaError) -> None:
        """No leader or no connection: later again, or never."""
        retry = error.recovery is Recovery.RETRY
        with self.accumulator.changed:
            for queue in queues:
                queue.last_error = error
                if retry:
                    queue.retries += 1
                    pause_s = getattr(error, "retry_after_s", 0.0) or self._pause_s(queue.retries)
                    queue.retry_at_s = time.monotonic() + pause_s
                    continue
                for batch in [each for each in queue.batches() if not each.sent]:
                    self._fail(queue, batch, error)

    def _send_to(self, node: int, queues: list[PartitionQueue], identity: Identity) -> float:
        try:
            connection = self.cluster.connect(NodeTarget(node), Deadline(self._setup_s), LANE)
            version = connection.capabilities.version_of(PRODUCE, *reversed(self.gate.produce_version()))
        except KafkaError as error:
            for queue in queues:
                self.cluster.forget(Leader(queue.topic, queue.partition))
            self._cannot_reach(queues, error)
            return float("inf")
        if connection.retiring:
            return float("inf")  # it is replaced when its last response is there
        if connection.is_throttled:
            return connection.throttled_until_s
        while connection.in_flight < self._max_in_flight and not connection.closed:
            sendings = self._take(queues, identity)
            if not sendings:
                break
            self._send(connection, sendings, version)
            queues = queues[1:] + queues[:1]  # no queue is always first
        return float("inf")

    def _take(self, queues: list[PartitionQueue], identity: Identity) -> list[Sending]:
        """One batch of each partition, as many as one request may hold."""
        taken: list[Sending] = []
        room = self.settings.max_request_size
        now_s = time.monotonic()
        with self.accumulator.changed:
            if self.gate.identity() != identity:
                return []  # the transaction ends: what is not on its way by now must not follow its end
            for queue in queues:
                if taken and queue.next_bytes() > room:
                    continue
                batch = queue.next_to_send(now_s, identity, self._max_unacked)
                if batch is not None and batch.data is not None:
                    batch.sent = True
                    batch.attempts += 1
                    room -= len(batch.data)
                    taken.append((queue, batch))
        return taken

    def _send(self, connection: BrokerConnection, sendings: list[Sending], version: int) -> None:
        topics: dict[str, TopicProduceData] = {}
        for queue, batch in sendings:
            topic = topics.get(queue.topic) or topics.setdefault(queue.topic, TopicProduceData(queue.topic))
            topic.partition_data.append(PartitionProduceData(queue.partition, batch.data))
        request = ProduceRequest(
            self.gate.transactional_id,
            self.settings.acks_number,
            self.settings.request_timeout_ms,
            list(topics.values()),
        )
        left_s = min(batch.deadline_s for _, batch in sendings) - time.monotonic()
        pending = connection.send(
            PRODUCE,
            request,
            version=version,
            timeout_s=min(self._request_s, max(0.1, left_s)),
            context=sendings,
            response=self.settings.acks_number != 0,
        )
        self._used.add(connection)
        if connection.closed:  # with it, everything that was on its way there
            failed = connection.take_unreported()
            self._settle(failed if pending in failed else [*failed, pending])

    # --- responses ---

    def _settle(self, done: list[Pending]) -> None:
        for pending in done:
            if pending.api is not PRODUCE:
                continue
            responses, failure = _responses(pending)
            with self.accumulator.changed:
                for queue, batch in pending.context:
                    if pending.written:  # acks=0: this is all that will ever be known
                        self._ack(queue, batch, -1, -1)
                        continue
                    response = responses.get((queue.topic, queue.partition))
                    if response is not None and response.error_code in (
                        ErrorCode.NONE,
                        ErrorCode.DUPLICATE_SEQUENCE_NUMBER,
                    ):
                        self._ack(queue, batch, response.base_offset, response.log_append_time_ms)
                    else:
                        self._refuse(queue, batch, response, failure)

    def _ack(self, queue: PartitionQueue, batch: ProducerBatch, base_offset: int, log_append_time: int) -> None:
        self._setbacks = 0
        queue.acked(batch, base_offset, log_append_time)
        self.gate.stored(batch)
        self.accumulator.release([batch])
        self._finished.append(batch)

    def _refuse(
        self,
        queue: PartitionQueue,
        batch: ProducerBatch,
        response: PartitionProduceResponse | None,
        failure: KafkaError | None,
    ) -> None:
        """Not stored, or not known to be: again, or never."""
        code = ErrorCode.NETWORK_EXCEPTION if response is None else ErrorCode.of(response.error_code)
        what = f"writing {batch.count} records to {batch.topic}-{batch.partition}"
        error = failure or error_of(
            code if response is None else response.error_code, what, response.error_message if response else None
        )
        if code in MOVED:
            self.cluster.forget(Leader(queue.topic, queue.partition))
        queue.last_error = error
        pause_s = SHORT_WAIT_S * min(queue.retries + 1, 12) if code in SHORT_WAITS else self._pause_s(queue.retries + 1)
        verdict = queue.refused(batch, code, time.monotonic() + pause_s)
        if verdict is FailedBatchAction.FAIL or (
            verdict is FailedBatchAction.RETRY and batch.attempts > self.settings.retries
        ):
            self._fail(queue, batch, error)

    def _fail(self, queue: PartitionQueue, batch: ProducerBatch, error: KafkaError) -> None:
        self.gate.failed(error)  # first: a commit goes on as soon as it sees the batch done
        queue.drop(batch)
        batch.finish(-1, -1, error)
        self.accumulator.release([batch])
        self._finished.append(batch)

    def fail_all(self, error: KafkaError) -> None:
        """Fails everything, on its way or not: nothing more will be sent or received."""
        with self.accumulator.changed:
            self.gate.failed(error)
            self._finished += self.accumulator.fail_all(error)
        self._run_callbacks()

    def _run_callbacks(self) -> None:
        if not self._finished:
            return
        with self.accumulator.changed:
            finished, self._finished = self._finished, []
        for batch in finished:
            for done in batch.finished():
                callbacks, done.callbacks = done.callbacks, None
                for callback in callbacks or ():
                    try:
                        callback(done)
                    except Exception:
                        log.exception("a delivery callback failed")

    def _pause_s(self, attempt: int) -> float:
        pause_s: float = min(self._backoff_s * 2 ** min(attempt - 1, 16), self._backoff_max_s)
        return pause_s * (0.8 + 0.4 * random.random())


def _responses(pending: Pending) -> tuple[dict[Place, PartitionProduceResponse], KafkaError | None]:
    """A Produce response by partition; nothing and the failure if there is none that can be read."""
    try:
        response = pending.result()
        if response is None:
            return {}, None
    except DecodeError as error:
        return {}, ConnectionFailedError(f"a malformed response to Produce: {error}", ErrorCode.NETWORK_EXCEPTION, True)
    except KafkaError as error:
        return {}, error
    return {(topic.name, part.index): part for topic in response.responses for part in topic.partition_responses}, None


def _late(batch: ProducerBatch, settings: ProducerSettings) -> DeliveryTimedOutError:
    fate = "it is unknown whether they were stored" if batch.attempts else "they were not sent"
    return DeliveryTimedOutError(
        f"{batch.count} records for {batch.topic}-{batch.partition} were not acknowledged within delivery.timeout.ms "
        f"({settings.delivery_timeout_ms}) after {batch.attempts} tries; {fate}; "
        "check the brokers, or raise the timeout",
        ErrorCode.REQUEST_TIMED_OUT,
    )


# Gates: a producer without an id, one with an id, or the owner of a transaction.
LAST_EPOCH = 0x7FFF


class PlainGate:
    """Without idempotence: a retry may store a record twice."""

    transactional_id: str | None = None

    def identity(self) -> Identity | None:
        return NO_IDENTITY

    def prepare(self) -> None:
        """Nothing to get."""

    def produce_version(self) -> tuple[int, int]:
        return 3, NAMES_UP_TO

    def admit(self, places: list[Place]) -> None:
        """Nothing to join."""

    def raise_epoch(self, stale: Identity) -> Identity | None:
        return None

    def failed(self, error: KafkaError) -> None:
        """The delivery has the error; nothing else is lost."""

    def stored(self, batch: ProducerBatch) -> None:
        """Nothing to note."""

    def giving_up(self) -> KafkaError | None:
        return None


class IdempotentGate(PlainGate):
    """With a producer id from the cluster, got at the first send. The epoch is raised here, without a request:
    no other producer has this id."""

    def __init__(self, cluster: Cluster, timeout_s: float) -> None:
        self._cluster = cluster
        self._timeout_s = timeout_s
        self._identity: Identity | None = None

    def identity(self) -> Identity | None:
        return self._identity

    def prepare(self) -> None:
        if self._identity is None:
            self._identity = new_identity(self._cluster, self._timeout_s, LANE)

    def raise_epoch(self, stale: Identity) -> Identity | None:
        if self._identity == stale:
            if stale.epoch >= LAST_EPOCH:
                self._identity = None  # `prepare` gets a new id
            else:
                self._identity = Identity(stale.producer_id, stale.epoch + 1)
        return self._identity


class FixedGate(PlainGate):
    """Writes with an identity that is given and never changes: that of a transaction which another process owns."""

    def __init__(self, transactional_id: str | None, identity: Identity, produce_version: tuple[int, int]) -> None:
        self.transactional_id = transactional_id
        self._identity = identity
        self._produce_version = produce_version
        self._error: KafkaError | None = None

    def identity(self) -> Identity | None:
        return self._identity

    def produce_version(self) -> tuple[int, int]:
        return self._produce_version

    def failed(self, error: KafkaError) -> None:
        if self._error is None:
            self._error = error

    def giving_up(self) -> KafkaError | None:
        return self._error
