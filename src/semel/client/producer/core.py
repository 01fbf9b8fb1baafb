"""What a producer decides: which batch goes when and under which stamp, what a response means, when one has failed.

A state machine without a thread, a socket, a clock or a lock. Events and the time are arguments of its methods;
requests, finished batches and the time of the next event come out of them. A driver (`sender.py`) owns the rest:

    heads = core.advance(now_s)               # fails what is late; the driver encodes these, outside of its lock
    if core.wants_identity(now_s): ...        # InitProducerId; then identity_received, or not_ready
    queues = core.ready(now_s)                # partitions whose next batch may go; the driver finds their leaders
    places = core.partitions_to_add(queues)   # AddPartitionsToTxn (TV1); then partitions_added, or not_ready
    produce = core.take(queues, now_s)        # one request for one broker; then responded, lost or written
    core.next_event_s()                       # when to call `advance` again, if nothing else happens
    core.take_finished()                      # batches that were stored or have failed

A batch that fails marks its transaction as failed before it is done itself, within one call: no caller can find the one
without the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import NamedTuple

from semel.client.errors import (
    AbortableError,
    DeliveryTimedOutError,
    FatalError,
    IllegalStateError,
    KafkaError,
    error_of,
)
from semel.client.metrics import ProducerCounters
from semel.client.producer.accumulator import GAP_ERRORS, MAX_UNACKED, Accumulator, FailedBatchAction, PartitionQueue
from semel.client.producer.batches import Identity, Place, ProducerBatch, RefusedRecords
from semel.client.producer.identities import WriteIdentity
from semel.client.producer.transaction import TransactionCore
from semel.client.settings import ProducerSettings
from semel.protocol.errors import ErrorCode, Recovery
from semel.protocol.messages.records import (
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    TopicProduceData,
)

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
STORED = frozenset({ErrorCode.NONE, ErrorCode.DUPLICATE_SEQUENCE_NUMBER})
SHORTEST_REQUEST_S = 0.1  # a request gets this long, however late its batches are
NEVER_S = float("inf")

Sending = tuple[PartitionQueue, ProducerBatch]


class Produce(NamedTuple):
    """One request, and what was taken for it."""

    sendings: list[Sending]
    request: ProduceRequest
    timeout_s: float


class ProducerCore:
    """One producer. `random` returns numbers from 0 to 1, for the length of pauses."""

    def __init__(self, settings: ProducerSettings, identity: WriteIdentity, random: Callable[[], float]) -> None:
        self.settings = settings
        self.identity = identity
        self.accumulator = Accumulator(settings)
        self.ended: KafkaError | None = None  # why nothing is sent any more
        self._random = random
        self._request_s = settings.request_timeout_ms / 1000
        self._backoff_s = settings.retry_backoff_ms / 1000
        self._backoff_max_s = settings.retry_backoff_max_ms / 1000
        in_flight = settings.max_in_flight_requests_per_connection
        self._max_unacked = min(MAX_UNACKED, in_flight) if settings.is_idempotent else in_flight
        self._setbacks = 0  # in a row: no identity, or partitions that could not be added
        self._resumes_s = 0.0  # after the last setback
        self._looked_s = 0.0  # the time of the last `ready`
        self._finished: list[ProducerBatch] = []
        self.counters = ProducerCounters()

    # --- records ---
    def check_accepts(self) -> None:
        if self.ended is not None:
            raise type(self.ended)(str(self.ended))
        self.identity.check_accepts()

    @property
    def transaction_number(self) -> int:
        """Of the transaction that is open, or was last."""
        return self.identity.transaction_number

    def check_transaction(self, number: int) -> None:
        """Raises unless the transaction that a record belongs to is still the last one: the record may have waited for
        memory, or for its topic to be looked up, and the next transaction must not get it."""
        if number != self.identity.transaction_number:
            raise IllegalStateError(
                "the transaction of this record has ended; the record was not sent: let every send() return before the "
                "end of its transaction"
            )

    # --- the end of a transaction ---
    def commit(self, transaction: TransactionCore) -> None:
        """From here on no record is accepted; those that were are sent at once. The end follows when `is_drained`."""
        transaction.commit()
        self.accumulator.close_all()

    def prepare(self, transaction: TransactionCore) -> None:
        """As `commit`, but the end is decided elsewhere. It is prepared when `is_drained`."""
        transaction.prepare()
        self.accumulator.close_all()

    def abort(self, transaction: TransactionCore) -> None:
        """From here on no record is accepted or sent. The end may follow when `is_drained`."""
        transaction.abort()
        lost = transaction.lost()
        if lost is not None:
            self._fail_waiting(lost)

    def is_drained(self, transaction: TransactionCore) -> bool:
        """Whether nothing of the transaction is waiting or on its way: no batch, no partition, no offset."""
        return not (transaction.requests or transaction.offset_requests) and self.accumulator.is_empty

    def end_request(self, transaction: TransactionCore) -> Identity | None:
        """Whose transaction EndTxn is to end now; None if the coordinator knows of none."""
        if not self.is_drained(transaction):
            raise IllegalStateError("a transaction cannot end while something of it is on its way")
        return transaction.end_request()

    # --- before sending ---
    def advance(self, now_s: float) -> list[ProducerBatch]:
        """Fails what is past delivery.timeout.ms, and everything that waits if the transaction is lost; closes what
        has lingered. The batches that are to be encoded."""
        lost = self.identity.lost()
        if lost is not None:
            self._fail_waiting(lost)
        else:
            self._fail_late(now_s)
        self.accumulator.close_lingering(now_s)
        return [
            batch
            for queue in self.accumulator.queues.values()
            for batch in islice(queue.queued, self._max_unacked)
            if batch.data is None
        ]

    def _fail_late(self, now_s: float) -> None:
        for queue in self.accumulator.queues.values():
            oldest = next(queue.batches(), None)
            if oldest is not None and oldest.deadline_s <= now_s:
                for batch in queue.expired(now_s):
                    self._fail(queue, batch, _late(batch, queue.setback, self.settings))

    def encode_failed(self, batch: ProducerBatch, error: Exception) -> None:
        failure = FatalError(f"records for {batch.topic}-{batch.partition} cannot be encoded: {error}")
        if not batch.done:
            self._fail(self.accumulator.queues[batch.topic, batch.partition], batch, failure)

    def wants_identity(self, now_s: float) -> bool:
        """Whether InitProducerId is to be sent: there are records, and no producer id yet."""
        return self.identity.is_wanted and now_s >= self._resumes_s and not self.accumulator.is_empty

    def identity_received(self, identity: Identity) -> None:
        self.identity.received(identity)

    def not_ready(self, error: KafkaError, now_s: float) -> None:
        """No identity, or partitions that could not be added to the transaction: later again, or never."""
        if error.recovery is not Recovery.RETRY:
            self.identity.failed(error)
            self._fail_waiting(error)
        for queue in self.accumulator.queues.values():
            queue.setback = error
        self._setbacks += 1
        self._resumes_s = now_s + self._pause_s(self._setbacks)

    def ready(self, now_s: float) -> list[PartitionQueue]:
        """The partitions whose next batch may be sent now."""
        self._looked_s = now_s
        identity = self.identity.current
        if identity is None or now_s < self._resumes_s:
            return []
        queues = self.accumulator.queues.values()
        for queue in queues:
            if queue.wants_restart():
                fresh = self.identity.raise_epoch(identity) if queue.identity == identity else identity
                if fresh is None:
                    continue
                identity = fresh
                queue.restart(fresh)
        if self.identity.current is None:  # the last epoch was used up
            return []
        return [queue for queue in queues if queue.can_send(now_s, identity, self._max_unacked)]

    def partitions_to_add(self, queues: Iterable[PartitionQueue]) -> list[Place]:
        """Those of them that must be added to the transaction before they are written (TV1)."""
        return self.identity.partitions_to_add([(queue.topic, queue.partition) for queue in queues])

    def partitions_added(self, places: Iterable[Place]) -> None:
        """The outcome of `partitions_to_add`, if that gave any: those that were added, none if the request failed."""
        self.identity.added(places)

    def unreachable(self, queues: Iterable[PartitionQueue], error: KafkaError, now_s: float) -> None:
        """No leader or no connection: later again, or never."""
        for queue in queues:
            if error.recovery is Recovery.RETRY:
                queue.retries += 1
                queue.setback = error
                pause_s = getattr(error, "retry_after_s", 0.0) or self._pause_s(queue.retries)
                queue.retry_at_s = now_s + pause_s
                continue
            for batch in [each for each in queue.batches() if not each.sent]:
                self._fail(queue, batch, error)

    # --- sending ---
    def take(self, queues: Iterable[PartitionQueue], now_s: float) -> Produce | None:
        """A request with one batch of each partition, as many as it may hold; None if there is nothing to send. The
        partitions are those of one leader."""
        identity = self.identity.current
        if identity is None:
            return None  # the transaction ends: what is not on its way by now must not follow its end
        sendings: list[Sending] = []
        left_bytes = self.settings.max_request_size
        for queue in queues:
            if sendings and queue.next_bytes() > left_bytes:
                continue
            if not self.identity.may_write((queue.topic, queue.partition)):
                continue
            batch = queue.next_to_send(now_s, identity, self._max_unacked)
            if batch is not None and batch.data is not None:
                batch.sent = True
                batch.attempts += 1
                left_bytes -= len(batch.data)
                sendings.append((queue, batch))
        if not sendings:
            return None
        self._count_request(sendings)
        left_s = min(batch.deadline_s for _, batch in sendings) - now_s
        return Produce(sendings, self._request(sendings), min(self._request_s, max(SHORTEST_REQUEST_S, left_s)))

    def _count_request(self, sendings: list[Sending]) -> None:
        counters = self.counters
        counters.requests += 1
        counters.in_flight += 1
        for _, batch in sendings:
            counters.outgoing_bytes += len(batch.data or b"")
            counters.retries += batch.count if batch.attempts > 1 else 0

    def _request(self, sendings: list[Sending]) -> ProduceRequest:
        topics: dict[str, TopicProduceData] = {}
        for queue, batch in sendings:
            topic = topics.get(queue.topic) or topics.setdefault(queue.topic, TopicProduceData(queue.topic))
            topic.partition_data.append(PartitionProduceData(queue.partition, batch.data))
        settings = self.settings
        return ProduceRequest(
            self.identity.transactional_id, settings.acks_number, settings.request_timeout_ms, list(topics.values())
        )

    # --- responses ---
    def written(self, sendings: list[Sending]) -> None:
        """acks=0: this is all that will ever be known."""
        self.counters.in_flight -= 1
        for queue, batch in sendings:
            if batch.sent:
                self._ack(queue, batch, -1, -1)

    def responded(
        self, sendings: list[Sending], responses: Mapping[Place, PartitionProduceResponse], now_s: float
    ) -> list[Place]:
        """The response to a request; the partitions whose leader is in doubt. One without a part in the response may
        have been stored or not."""
        self.counters.in_flight -= 1
        moved = []
        for queue, batch in sendings:
            if not batch.sent:
                continue  # it has failed meanwhile, with the producer
            response = responses.get((queue.topic, queue.partition))
            if response is not None and response.error_code in STORED:
                if response.error_code:
                    self.counters.duplicates += batch.count
                self._ack(queue, batch, response.base_offset, response.log_append_time_ms)
                continue
            code = ErrorCode.NETWORK_EXCEPTION if response is None else response.error_code
            detail = None if response is None else response.error_message
            what = f"writing {batch.count} records to {batch.topic}-{batch.partition}"
            refused = {} if response is None else _refused_records(batch, response)
            if self._refuse(queue, batch, ErrorCode.of(code), error_of(code, what, detail), now_s, refused):
                moved.append((queue.topic, queue.partition))
        return moved

    def lost(self, sendings: list[Sending], error: KafkaError, now_s: float) -> list[Place]:
        """No response to a request: the connection broke, it took too long, or it cannot be read. Whether the batches
        were stored is unknown. The partitions whose leader is in doubt."""
        self.counters.in_flight -= 1
        for queue, batch in sendings:
            if batch.sent:
                batch.in_doubt = True
                self._refuse(queue, batch, ErrorCode.NETWORK_EXCEPTION, error, now_s)
        return [(queue.topic, queue.partition) for queue, _ in sendings]

    def _ack(self, queue: PartitionQueue, batch: ProducerBatch, base_offset: int, log_append_time: int) -> None:
        self._setbacks = 0
        queue.acked(batch, base_offset, log_append_time)
        self.identity.stored(batch)
        self._release(batch)

    def _refuse(
        self,
        queue: PartitionQueue,
        batch: ProducerBatch,
        code: ErrorCode,
        error: KafkaError,
        now_s: float,
        refused: RefusedRecords | None = None,
    ) -> bool:
        """Not stored, or not known to be: again, or never. Whether the leader is in doubt."""
        pause_s = SHORT_WAIT_S * min(queue.retries + 1, 12) if code in SHORT_WAITS else self._pause_s(queue.retries + 1)
        queue.setback = error
        verdict = queue.refused(batch, code, now_s + pause_s)
        if verdict is FailedBatchAction.FAIL or (
            verdict is FailedBatchAction.RETRY and batch.attempts > self.settings.retries
        ):
            batch.refused = refused
            is_unknown = code in GAP_ERRORS and batch.in_doubt and not queue.transactional
            self._fail(queue, batch, _unknown(batch, error) if is_unknown else error)
        return code in MOVED

    # --- failing ---
    def _fail(self, queue: PartitionQueue, batch: ProducerBatch, error: KafkaError) -> None:
        self.identity.failed(error)  # first: a commit goes on as soon as it sees the batch done
        queue.drop(batch)
        batch.finish(-1, -1, error)
        self._release(batch)

    def _fail_waiting(self, error: KafkaError) -> None:
        """Fails everything that is not on its way right now. The identity has the error already."""
        for queue in self.accumulator.queues.values():
            for batch in [each for each in queue.batches() if not each.sent]:
                queue.drop(batch)
                batch.finish(-1, -1, error)
                self._release(batch)

    def fail_all(self, error: KafkaError) -> None:
        """Fails everything, on its way or not, and refuses what comes later: nothing more is sent or received."""
        if self.ended is None:
            self.ended = error
            self.accumulator.close_all()  # an open batch would take records without `check_accepts`
        self.identity.failed(error)
        for queue in self.accumulator.queues.values():
            for batch in queue.unacked:
                batch.sent = False
        self._fail_waiting(error)

    def _release(self, batch: ProducerBatch) -> None:
        self.accumulator.used_bytes -= batch.size_bytes
        self._finished.append(batch)
        if batch.error is None:
            self.counters.records += batch.count
        else:
            self.counters.errors += batch.count

    # --- results ---
    @property
    def has_finished(self) -> bool:
        return bool(self._finished)

    def take_finished(self) -> list[ProducerBatch]:
        """The batches that were stored or have failed since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def next_event_s(self) -> float:
        """When `advance` has something to do, or something new may be sent, if nothing else happens before. What was
        due at the last `ready` and is still here waits for something else: a response, a connection."""
        if self.accumulator.is_empty:
            return NEVER_S
        looked_s = self._looked_s
        at_s = self.accumulator.next_event_s(looked_s)
        if looked_s < self._resumes_s:
            return min(at_s, self._resumes_s)
        return looked_s if self.identity.is_wanted else at_s

    def _pause_s(self, attempt: int) -> float:
        pause_s: float = min(self._backoff_s * 2 ** min(attempt - 1, 16), self._backoff_max_s)
        return pause_s * (0.8 + 0.4 * self._random())


def _late(batch: ProducerBatch, setback: KafkaError | None, settings: ProducerSettings) -> DeliveryTimedOutError:
    fate = "it is unknown whether they were stored" if batch.attempts else "they were not sent"
    cause = f" (the last try: {setback})" if setback is not None else ""
    return DeliveryTimedOutError(
        f"{batch.count} records for {batch.topic}-{batch.partition} were not acknowledged within delivery.timeout.ms "
        f"({settings.delivery_timeout_ms}) after {batch.attempts} tries; {fate}{cause}; "
        "check the brokers, or raise the timeout",
        ErrorCode.REQUEST_TIMED_OUT,
    )


def _refused_records(batch: ProducerBatch, response: PartitionProduceResponse) -> RefusedRecords:
    """Those that the broker names; else the only one that there is."""
    named = {each.batch_index: each.batch_index_error_message for each in response.record_errors}
    return named or ({0: None} if batch.count == 1 else {})


def _unknown(batch: ProducerBatch, error: KafkaError) -> AbortableError:
    return AbortableError(
        f"{batch.count} records for {batch.topic}-{batch.partition} were not acknowledged, and others before them were "
        f"given up at delivery.timeout.ms; it is unknown whether they were stored: sent again they could be stored "
        f"twice ({error}); check the brokers, or raise the timeout",
        error.code,
    )
