"""Produce (0): append record batches to partitions.

A batch is appended when its request is read. The response waits until it is durable, and therefore visible; the next
Produce of the connection does not. acks=1 is acks=all where there is one replica. Two kinds of batches wait before they
are appended, and with them the next Produce of the connection: a transaction's first batch on a partition, for the
coordinator; and one that is large when its records are looked at, for the thread that does so.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import struct
import sys
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any, NamedTuple

from semel.broker.broker import BrokerNode
from semel.broker.dispatch import RequestContext
from semel.broker.topics import Partition, Topic
from semel.broker.transactions.events import TraceStep
from semel.broker.turns import MANY, Turns, at_once
from semel.protocol.batch import COMPRESSION_MASK, HEADER_SIZE, LOG_OVERHEAD, TRANSACTIONAL_BIT, read_header
from semel.protocol.errors import CorruptBatchError, ErrorCode
from semel.protocol.messages.records import (
    BatchIndexAndErrorMessage,
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
    TopicProduceResponse,
)
from semel.storage import PARTITION_NAME, AppendResult, HeavyBatch, StorageError

log = logging.getLogger(__name__)

_ATTRIBUTES_AT = 22  # the low byte of a batch's attributes
_PRODUCER_AT = 43  # its producer's id and epoch
_PRODUCER = struct.Struct(">qh")
_ZSTD = 4
_FIRST_WITH_ZSTD = 7
_FIRST_WITH_TOPIC_IDS = 13
_FIRST_OF_TV2 = 12
_ACKS_ALL = -1

Waiting = list[tuple["Partition", int, PartitionProduceResponse]]  # until the log is durable up to an offset


class Heavy(NamedTuple):
    """A batch whose records a thread looks at before it is appended."""

    topic: Topic
    part: PartitionProduceData
    guard: Any
    result: PartitionProduceResponse


def produce(
    broker: BrokerNode, context: RequestContext, request: ProduceRequest
) -> ProduceResponse | asyncio.Future[Any] | Any:
    if request.acks not in (_ACKS_ALL, 0, 1):
        return _refuse(request, ErrorCode.INVALID_REQUIRED_ACKS)
    if _count_partitions(request) > MANY:
        _keep_batches(request)
        return _produce_many(broker, context, request)
    if _has_transactional(request):
        if request.transactional_id is None:
            return _refuse(request, ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
        if not _is_let_in(broker, context, request):
            guards = _Guards(broker, context, request)
            at_once(guards.check_logs())
            if guards.needed:
                _keep_batches(request)
                return guards.produce()
    appends = _Appends(broker, context, {})
    response = appends.at_once(request)
    if appends.heavy:
        return _append_heavy(broker, context, request, response, appends)
    return _respond(broker, context, request, response, appends.waiting)


def _count_partitions(request: ProduceRequest) -> int:
    count = 0
    for data in request.topic_data:
        count += len(data.partition_data)
    return count


async def _produce_many(
    broker: BrokerNode, context: RequestContext, request: ProduceRequest
) -> ProduceResponse | asyncio.Future[Any] | None:
    """A request for very many partitions: others are served in between."""
    guards = _Guards(broker, context, request)
    if _has_transactional(request):
        if request.transactional_id is None:
            return _refuse(request, ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
        await Turns().run(guards.check_logs())
    return await guards.produce()


def _keep_batches(request: ProduceRequest) -> None:
    """Copies the batches of a request that has to wait: the receive buffer will be used again."""
    for data in request.topic_data:
        for part in data.partition_data:
            if part.records is not None:
                part.records = memoryview(bytearray(part.records))  # type: ignore[arg-type]


class _Appends:
    """The batches of one request on their way into the logs. An ErrorCode in place of a guard refuses its batch."""

    __slots__ = ("_broker", "_context", "_guards", "_now_ms", "heavy", "waiting")

    def __init__(self, broker: BrokerNode, context: RequestContext, guards: dict[tuple[bytes, int], Any]) -> None:
        self._broker, self._context, self._guards = broker, context, guards
        self._now_ms = broker.clock.now_ms()
        self.waiting: Waiting = []
        self.heavy: list[Heavy] = []

    def at_once(self, request: ProduceRequest) -> ProduceResponse:
        topics = []
        for data in request.topic_data:
            topic = find_topic(self._broker, self._context.version, data)
            results = [self._append(topic, part) for part in data.partition_data]
            topics.append(TopicProduceResponse(name=data.name, topic_id=data.topic_id, partition_responses=results))
        return ProduceResponse(responses=topics)

    async def in_turns(self, request: ProduceRequest) -> ProduceResponse:
        topics, turns = [], Turns()
        for data in request.topic_data:
            topic = find_topic(self._broker, self._context.version, data)
            results = await turns.map(partial(self._append, topic), data.partition_data)
            topics.append(TopicProduceResponse(name=data.name, topic_id=data.topic_id, partition_responses=results))
        return ProduceResponse(responses=topics)

    def _append(self, topic: Topic | None, part: PartitionProduceData) -> PartitionProduceResponse:
        result = PartitionProduceResponse(index=part.index, base_offset=-1)
        if topic is None or not 0 <= part.index < len(topic.partitions):
            result.error_code = _unknown_topic(self._context.version, topic)
            return result
        guard = self._guards.get((topic.id, part.index)) if self._guards else None
        try:
            _check(self._context, topic, part, guard)
            partition = topic.partitions[part.index]
            done = partition.log.append(part.records, now_ms=self._now_ms, guard=guard, light_only=True)  # type: ignore[arg-type]
        except StorageError as error:
            self._broker.counters.batch_refused(error.code)
            _fill_error(result, _as_kafka_says(error, topic, part))
        except HeavyBatch:
            part.records = memoryview(bytearray(part.records))  # type: ignore[arg-type]  # the buffer is reused
            self.heavy.append(Heavy(topic, part, guard, result))
        else:
            _fill_in(result, done, partition, self.waiting)
            if done.duplicate:
                self._broker.counters.duplicates += 1
        return result


def _fill_in(result: PartitionProduceResponse, done: AppendResult, partition: Partition, waiting: Waiting) -> None:
    result.base_offset = done.base_offset
    result.log_append_time_ms = done.append_time_ms
    result.log_start_offset = done.log_start_offset
    if partition.log.high_watermark <= done.last_offset:
        waiting.append((partition, done.last_offset + 1, result))


async def _append_heavy(
    broker: BrokerNode,
    context: RequestContext,
    request: ProduceRequest,
    response: ProduceResponse,
    appends: _Appends,
) -> ProduceResponse | asyncio.Future[Any] | None:
    """The rest of a request with batches that a thread looks at. Returns when they are appended, with the response or
    a future of it: the next Produce need not wait for that."""
    loop = asyncio.get_running_loop()
    for each in appends.heavy:
        partition = each.topic.partitions[each.part.index]
        batch = each.part.records
        assert isinstance(batch, memoryview)
        try:
            inspection = await loop.run_in_executor(broker.inspectors, partition.log.inspect, batch)
            _freeze_new_modules()
            done = partition.log.append(batch, now_ms=broker.clock.now_ms(), guard=each.guard, inspection=inspection)
        except StorageError as error:
            broker.counters.batch_refused(error.code)
            _fill_error(each.result, _as_kafka_says(error, each.topic, each.part))
        else:
            _fill_in(each.result, done, partition, appends.waiting)
            broker.counters.duplicates += done.duplicate
    return _respond(broker, context, request, response, appends.waiting)


_modules_frozen = 0


def _freeze_new_modules() -> None:
    """What was loaded to look at batches lives on: the garbage collector need not go through it again and again."""
    global _modules_frozen
    if len(sys.modules) != _modules_frozen:
        _modules_frozen = len(sys.modules)
        gc.freeze()


def _check(context: RequestContext, topic: Topic, part: PartitionProduceData, guard: Any) -> None:
    """What is refused before it reaches the log."""
    if isinstance(guard, ErrorCode):
        raise StorageError(guard, "The coordinator did not let this batch into the transaction.")
    if topic.is_internal and context.client_id != "__admin_client":
        raise StorageError(ErrorCode.INVALID_TOPIC_EXCEPTION, f"Cannot append to internal topic {topic.name}")
    records = part.records
    if not records:
        raise StorageError(
            ErrorCode.INVALID_RECORD,
            f"Produce requests with version {context.version} must have at least one record batch per partition",
        )
    if (
        context.version < _FIRST_WITH_ZSTD
        and len(records) > _ATTRIBUTES_AT
        and records[_ATTRIBUTES_AT] & COMPRESSION_MASK == _ZSTD  # type: ignore[operator]
    ):
        raise StorageError(
            ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, "Produce requests below version 7 may not carry zstd"
        )


def _respond(
    broker: BrokerNode, context: RequestContext, request: ProduceRequest, response: ProduceResponse, waiting: Waiting
) -> ProduceResponse | asyncio.Future[Any] | None:
    if request.acks == 0:
        _close_on_error(context, response)
        return None
    if not waiting:
        return response
    return _when_durable(broker, response, waiting)


def _when_durable(broker: BrokerNode, response: ProduceResponse, waiting: Waiting) -> asyncio.Future[Any]:
    """The response, once every batch in it is on the disk."""
    when_durable: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    left = len(waiting)

    def one_done(result: PartitionProduceResponse) -> Callable[[StorageError | None], None]:
        def done(error: StorageError | None) -> None:
            nonlocal left
            if error is not None:
                _fill_error(result, error)
            left -= 1
            if not left and not when_durable.done():
                when_durable.set_result(response)

        return done

    for partition, end_offset, result in waiting:
        broker.sync.notify(partition.log, end_offset, one_done(result))
    return when_durable


def _close_on_error(context: RequestContext, response: ProduceResponse) -> None:
    """With acks=0 there is no response to carry an error, so Kafka closes the connection to be noticed."""
    for topic in response.responses:
        for result in topic.partition_responses:
            if result.error_code and context.connection is not None:
                context.connection.close(f"produce with acks=0 failed: {ErrorCode.of(result.error_code).name}")
                return


def _as_kafka_says(error: StorageError, topic: Topic, part: PartitionProduceData) -> StorageError:
    """A record set without one whole batch is not a corrupt batch to Kafka, but none at all."""
    records = part.records
    if error.record_errors:
        place = f"{topic.name}-{part.index}"
        named = tuple((index, message.replace(PARTITION_NAME, place)) for index, message in error.record_errors)
        return StorageError(error.code, error.message, named)
    if error.code is ErrorCode.CORRUPT_MESSAGE and isinstance(records, memoryview):
        size = int.from_bytes(records[8:12], "big", signed=True) + LOG_OVERHEAD if len(records) > LOG_OVERHEAD else 0
        if len(records) < HEADER_SIZE or size > len(records):
            return StorageError(ErrorCode.INVALID_RECORD, error.message)
    return error


def _fill_error(result: PartitionProduceResponse, error: StorageError) -> None:
    result.error_code, result.error_message = error.code, error.message
    result.record_errors = [BatchIndexAndErrorMessage(*entry) for entry in error.record_errors]
    result.base_offset = result.log_append_time_ms = result.log_start_offset = -1


# -- topics ------------------------------------------------------------------------------------------------------------
def find_topic(broker: BrokerNode, version: int, data: TopicProduceData) -> Topic | None:
    if version >= _FIRST_WITH_TOPIC_IDS:
        return broker.topics.by_id(data.topic_id)
    return broker.topics.get(data.name)


def _unknown_topic(version: int, topic: Topic | None) -> ErrorCode:
    if version >= _FIRST_WITH_TOPIC_IDS and topic is None:
        return ErrorCode.UNKNOWN_TOPIC_ID
    return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def _refuse(request: ProduceRequest, code: ErrorCode) -> ProduceResponse:
    return ProduceResponse(
        responses=[
            TopicProduceResponse(
                name=data.name,
                topic_id=data.topic_id,
                partition_responses=[
                    PartitionProduceResponse(index=part.index, error_code=code, base_offset=-1)
                    for part in data.partition_data
                ],
            )
            for data in request.topic_data
        ]
    )


# -- transactions ------------------------------------------------------------------------------------------------------
def _has_transactional(request: ProduceRequest) -> bool:
    for data in request.topic_data:
        for part in data.partition_data:
            records = part.records
            if records and len(records) > _ATTRIBUTES_AT and records[_ATTRIBUTES_AT] & TRANSACTIONAL_BIT:  # type: ignore[operator]
                return True
    return False


def _is_let_in(broker: BrokerNode, context: RequestContext, request: ProduceRequest) -> bool:
    """Whether every batch belongs to a transaction that is open in its partition: all of them but the first."""
    for data in request.topic_data:
        topic = find_topic(broker, context.version, data)
        for part in data.partition_data:
            if topic is None or not 0 <= part.index < len(topic.partitions):
                return False
            records = part.records
            if not isinstance(records, memoryview) or len(records) < HEADER_SIZE:
                return False
            if not topic.partitions[part.index].log.has_open_transaction(*_producer_of(records)):
                return False
    return True


def _producer_of(records: memoryview) -> tuple[int, int]:
    """(id, epoch) of a batch's producer."""
    return _PRODUCER.unpack_from(records, _PRODUCER_AT)


class _Guards:
    """The permissions that a transactional request needs before its batches may be appended."""

    def __init__(self, broker: BrokerNode, context: RequestContext, request: ProduceRequest) -> None:
        self._broker, self._context, self._request = broker, context, request
        self.needed: dict[tuple[bytes, int], Any] = {}
        self._partitions: dict[tuple[str, int], tuple[bytes, int]] = {}
        self._producers: set[tuple[int, int]] = set()
        self._refused: tuple[int, int] | None = None  # a producer that the log itself refuses

    def check_logs(self) -> Generator[None, None, None]:
        """Finds out what is needed. Yields after each batch."""
        for topic, part in self._transactional_parts():
            self._check_log(topic, part)
            yield

    def _transactional_parts(self) -> Iterator[tuple[Topic, PartitionProduceData]]:
        for data in self._request.topic_data:
            topic = find_topic(self._broker, self._context.version, data)
            for part in data.partition_data:
                if topic is None or topic.is_internal or not 0 <= part.index < len(topic.partitions):
                    continue
                if part.records and len(part.records) >= HEADER_SIZE:
                    yield topic, part

    def _check_log(self, topic: Topic, part: PartitionProduceData) -> None:
        assert isinstance(part.records, memoryview)
        try:
            header = read_header(part.records)
        except CorruptBatchError:
            return  # the append will say so
        if not header.is_transactional:
            return
        key = (topic.id, part.index)
        try:
            guard = topic.partitions[part.index].log.start_verification(
                header.producer_id,
                header.producer_epoch,
                header.base_sequence,
                supports_epoch_bump=self._context.version >= _FIRST_OF_TV2,
            )
        except StorageError as error:
            self.needed[key] = error.code
            self._refused = (header.producer_id, header.producer_epoch)
            return
        if guard is not None:
            self.needed[key] = guard
            self._partitions[topic.name, part.index] = key
            self._producers.add((header.producer_id, header.producer_epoch))

    def _check_logs_again(self) -> None:
        """The markers that were written meanwhile have ended the verifications that began before them."""
        self.needed.clear()
        self._partitions.clear()
        self._producers.clear()
        self._refused = None
        at_once(self.check_logs())

    async def _verify_with_coordinator(self) -> None:
        is_tv2 = self._context.version >= _FIRST_OF_TV2
        if not is_tv2 and not self._broker.settings["transaction.partition.verification.enable"]:
            return  # the client's word is taken for it; under TV2 the partition has to be added all the same
        if is_tv2 and await self._broker.transactions.settle(self._request.transactional_id or ""):
            self._check_logs_again()
        if len(self._producers) > 1:
            verdicts = dict.fromkeys(self._partitions, ErrorCode.INVALID_PRODUCER_ID_MAPPING)
        elif self._producers:
            producer_id, producer_epoch = next(iter(self._producers))
            assert self._request.transactional_id is not None
            verdicts = await self._broker.transactions.allow_append(
                self._request.transactional_id,
                producer_id,
                producer_epoch,
                list(self._partitions),
                self._context.version,
            )
        else:
            verdicts = {}
        for partition, code in verdicts.items():
            if code is not ErrorCode.NONE:
                self.needed[self._partitions[partition]] = code

    async def produce(self) -> ProduceResponse | asyncio.Future[Any] | None:
        """The rest of the request, whose batches were copied."""
        if self.needed:
            await self._verify_with_coordinator()
        broker, context, request = self._broker, self._context, self._request
        appends = _Appends(broker, context, self.needed)
        is_long = _count_partitions(request) > MANY
        response = await appends.in_turns(request) if is_long else appends.at_once(request)
        if appends.heavy:
            responding = await _append_heavy(broker, context, request, response, appends)
        else:
            responding = _respond(broker, context, request, response, appends.waiting)
        if self._producers or self._refused:
            self._trace(response)
        return responding

    def _trace(self, response: ProduceResponse) -> None:
        """The first batch of a transaction in each of these partitions."""
        codes = [code for code in self.needed.values() if isinstance(code, ErrorCode)]
        offsets = [part.base_offset for topic in response.responses for part in topic.partition_responses]
        note = f"first offset {offsets[0]}" if len(offsets) == 1 and offsets[0] >= 0 else ""
        error = codes[0] if codes else ErrorCode.NONE
        producer = self._refused or next(iter(self._producers))
        id_ = self._request.transactional_id or ""
        self._broker.transactions.events.add(
            TraceStep.PRODUCE, id_, *producer, error, self._context.client, self._partitions, note
        )
