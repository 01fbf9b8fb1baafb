"""Fetch (1): read record batches from partitions, waiting for new ones if the request says so."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any

from semel.broker.broker import BrokerNode
from semel.broker.dispatch import RequestContext
from semel.broker.fetch_sessions import (
    FINAL_EPOCH,
    INITIAL_EPOCH,
    NO_SESSION,
    CachedPartition,
    Key,
    Session,
    SessionError,
    requested_partitions,
    uses_topic_ids,
)
from semel.broker.handlers.logs import epoch_error
from semel.broker.topics import Partition
from semel.broker.turns import MANY, Turns
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.records import (
    AbortedTransaction,
    EpochEndOffset,
    FetchableTopicResponse,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    PartitionData,
)
from semel.storage import Isolation, StorageError

_READ_COMMITTED = 1
_RESPONSE_LIMIT_BYTES = 8 << 20  # a response is in memory until it is sent; a client may fetch again


def fetch(
    broker: BrokerNode, context: RequestContext, request: FetchRequest
) -> FetchResponse | asyncio.Future[Any] | Coroutine[Any, Any, FetchResponse]:
    try:
        session, is_full = _session_of(broker, context, request)
    except SessionError as error:
        return FetchResponse(error_code=error.code)
    work = Fetch(broker, context, request, session, is_full)
    if work.has_many:
        return work.run()
    results = work.read()
    if work.is_enough() or request.max_wait_ms <= 0:
        return work.respond(results)
    return work.wait()


def _session_of(broker: BrokerNode, context: RequestContext, request: FetchRequest) -> tuple[Session | None, bool]:
    """The session of a request, if it has one, and whether the request names all its partitions."""
    sessions, uses_ids, now_s = broker.fetches.sessions, uses_topic_ids(context.version), broker.clock.monotonic_s()
    if request.session_epoch not in (INITIAL_EPOCH, FINAL_EPOCH):
        return sessions.resume(request, uses_ids, now_s), False
    if request.session_id != NO_SESSION:
        sessions.close(request.session_id)
    if request.session_epoch == FINAL_EPOCH:
        return None, True
    return sessions.open(request, uses_ids, now_s), True


class Fetch:
    """A fetch request at work: it reads, and if that is too little it waits until one of its logs moves."""

    __slots__ = (
        "_broker", "_context", "_is_full", "_is_queued", "_limit_bytes", "_min_bytes", "_moved", "_partitions",
        "_request", "_response", "_session", "_timer", "_up_to", "_watched", "found_bytes", "has_error", "has_more",
    )  # fmt: skip

    def __init__(
        self, broker: BrokerNode, context: RequestContext, request: FetchRequest, session: Session | None, is_full: bool
    ) -> None:
        self._broker, self._context, self._request = broker, context, request
        self._session, self._is_full = session, is_full
        self._limit_bytes = min(request.max_bytes, broker.settings["fetch.max.bytes"], _RESPONSE_LIMIT_BYTES)
        self._min_bytes: int = min(request.min_bytes, self._limit_bytes)
        self._up_to: Isolation = "last_stable" if request.isolation_level == _READ_COMMITTED else "high_watermark"
        if session is None:
            requests = broker.fetches.in_turn(list(requested_partitions(request.topics)))
            self._partitions = [(key, requested, self._find(key)) for key, requested in requests]
        else:
            self._partitions = [self._find_cached(key, cached) for key, cached in session.partitions.items()]
        self.found_bytes = 0
        self.has_error = False
        self.has_more = False
        self._response: asyncio.Future[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._watched: dict[Partition, int] = {}
        self._is_queued = False
        self._moved: asyncio.Event | None = None  # of a fetch that takes turns: there may be something new

    @property
    def has_many(self) -> bool:
        """Whether reading all partitions at once would hold up others."""
        return len(self._partitions) > MANY

    def _find(self, key: Key) -> Partition | None:
        name, topic_id, index = key
        topics = self._broker.topics
        topic = topics.by_id(topic_id) if uses_topic_ids(self._context.version) else topics.get(name)
        return topic.partitions[index] if topic is not None and 0 <= index < len(topic.partitions) else None

    def _find_cached(self, key: Key, cached: CachedPartition) -> tuple[Key, FetchPartition, Partition | None]:
        partition = self._find(key)
        if partition is not None and not cached.topic_name:
            cached.topic_name = partition.topic.name
        return key, cached.requested, partition

    # -- reading -------------------------------------------------------------------------------------------------------
    def read(self) -> list[tuple[Key, PartitionData]]:
        self._forget()
        return [
            (key, self._read_partition(key, requested, partition)) for key, requested, partition in self._partitions
        ]

    def _forget(self) -> None:
        """What the last reading found."""
        self.found_bytes = 0
        self.has_error = self.has_more = False

    def is_enough(self) -> bool:
        """Whether it responds now. Where a partition has more than this response may take of it, waiting brings
        nothing: only whole batches of one segment fit in."""
        if self.found_bytes >= self._min_bytes or self.has_error or (self.has_more and self.found_bytes):
            return True
        return not any(partition is not None for _, _, partition in self._partitions)

    def _read_partition(self, key: Key, requested: FetchPartition, partition: Partition | None) -> PartitionData:
        if partition is None:
            unknown = _failed(requested, self._unknown(key))
            unknown.aborted_transactions = []
            return unknown
        code = epoch_error(partition.log, requested.current_leader_epoch)
        if code is not ErrorCode.NONE:
            self.has_error = True
            return _failed(requested, code)
        try:
            return self._read_log(requested, partition)
        except StorageError as error:
            self.has_error = True
            return _failed(requested, error.code)

    def _read_log(self, requested: FetchPartition, partition: Partition) -> PartitionData:
        log = partition.log
        diverging = _divergence(requested, partition) if requested.last_fetched_epoch >= 0 else None
        if diverging is not None:
            self.has_error = True
            return PartitionData(
                requested.partition, 0, log.high_watermark, -1, log.start_offset, diverging, records=b""
            )
        found = log.read(
            requested.fetch_offset,
            max(0, min(requested.partition_max_bytes, self._limit_bytes - self.found_bytes)),
            up_to=self._up_to,
            min_one_batch=not self.found_bytes,
        )
        self.found_bytes += len(found.records)
        self.has_more |= found.has_more
        aborted = None
        if self._up_to == "last_stable":
            aborted = [AbortedTransaction(producer, first) for producer, first in found.aborted or ()]
        return PartitionData(
            partition_index=requested.partition,
            high_watermark=found.high_watermark,
            last_stable_offset=found.last_stable_offset,
            log_start_offset=found.log_start_offset,
            aborted_transactions=aborted,
            records=found.records,
        )

    def _unknown(self, key: Key) -> ErrorCode:
        """A topic that a session has known by its id is missed by its name, which may be another topic's now."""
        topics = self._broker.topics
        if not uses_topic_ids(self._context.version) or topics.by_id(key[1]) is not None:
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        cached = None if self._session is None else self._session.partitions.get(key)
        if cached is None or not cached.topic_name:
            return ErrorCode.UNKNOWN_TOPIC_ID
        is_other = topics.get(cached.topic_name) is not None
        return ErrorCode.INCONSISTENT_TOPIC_ID if is_other else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION

    def respond(self, results: list[tuple[Key, PartitionData]]) -> FetchResponse:
        response = FetchResponse(session_id=NO_SESSION if self._session is None else self._session.id)
        self._add(response, results)
        return response

    def _add(self, response: FetchResponse, results: list[tuple[Key, PartitionData]]) -> None:
        if self._session is not None:
            changed = self._session.changes(results)
            results = results if self._is_full else changed
        current = response.responses[-1] if response.responses else None
        for (name, topic_id, _), data in results:
            if current is None or current.topic != name or current.topic_id != topic_id:
                current = FetchableTopicResponse(name, topic_id, [])
                response.responses.append(current)
            current.partitions.append(data)

    # -- many partitions -----------------------------------------------------------------------------------------------
    async def run(self) -> FetchResponse:
        """The response of a fetch of many partitions: it reads in turns with others."""
        self._moved = asyncio.Event()
        self._start_timer()
        try:
            turns = Turns()
            results = await turns.run(self._read_steps())
            while not self.is_enough() and self._timer is not None:
                await self._moved.wait()
                self._moved.clear()
                if self._timer is None or self._may_be_enough():
                    turns = Turns()
                    results = await turns.run(self._read_steps())
        finally:
            self.stop_waiting()
        response = self.respond(results[:MANY])
        for at in range(MANY, len(results), MANY):
            await turns.next()
            self._add(response, results[at : at + MANY])
        return response

    def _read_steps(self) -> Generator[None, None, list[tuple[Key, PartitionData]]]:
        self._forget()
        results = []
        may_wait = self._request.max_wait_ms > 0
        for at, (key, requested, _) in enumerate(self._partitions):
            partition = self._find(key)
            self._partitions[at] = (key, requested, partition)
            if may_wait and partition is not None and partition not in self._watched:
                self._watch(partition)  # before it is read, so that nothing is missed
            results.append((key, self._read_partition(key, requested, partition)))
            yield
        return results

    # -- waiting -------------------------------------------------------------------------------------------------------
    def wait(self) -> asyncio.Future[Any]:
        """A response as soon as there is enough, at the latest when max_wait_ms is over."""
        self._response = asyncio.get_running_loop().create_future()
        self._response.add_done_callback(lambda _: self.stop_waiting())  # also when the client went away
        self._start_timer()
        for _, _, partition in self._partitions:
            if partition is not None:
                self._watch(partition)
        return self._response

    def _start_timer(self) -> None:
        if self._request.max_wait_ms > 0:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._request.max_wait_ms / 1000, self.finish)
        self._broker.fetches.waiting[self] = None

    def _watch(self, partition: Partition) -> None:
        self._watched[partition] = partition.log.visible_bytes
        partition.waiters[self] = None

    def wake(self, partition: Partition) -> None:
        """A log moved. What came in the same turn of the event loop is looked at together."""
        if self._moved is not None:
            self._moved.set()
        elif not self._is_queued:
            self._is_queued = True
            asyncio.get_running_loop().call_soon(self._look_again)

    def _look_again(self) -> None:
        self._is_queued = False
        if self._response is None or self._response.done() or not self._may_be_enough():
            return
        self._find_all()
        results = self.read()
        if self.is_enough():
            self._complete(results)

    def _may_be_enough(self) -> bool:
        """Cheaper than reading: have the logs grown by what is missing? A moved LSO can reveal older bytes."""
        if self._up_to == "last_stable":
            return True
        if any(self._find(key) is not partition for key, _, partition in self._partitions):
            return True  # a topic is gone
        grown = [partition.log.visible_bytes - size for partition, size in self._watched.items()]
        if any(bytes_ < 0 for bytes_ in grown):
            return True  # retention took old segments: the sizes say nothing
        return self.found_bytes + sum(grown) >= self._min_bytes

    def finish(self) -> None:
        """Responds now, with whatever there is."""
        if self._moved is not None:
            self._stop_timer()
            self._moved.set()
        if self._response is not None and not self._response.done():
            self._find_all()
            self._complete(self.read())

    def _find_all(self) -> None:
        """Topics may have gone, or come again under the same name, while the fetch waited."""
        self._partitions = [(key, requested, self._find(key)) for key, requested, _ in self._partitions]

    def _complete(self, results: list[tuple[Key, PartitionData]]) -> None:
        assert self._response is not None
        self._response.set_result(self.respond(results))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def stop_waiting(self) -> None:
        self._stop_timer()
        self._broker.fetches.waiting.pop(self, None)
        for partition in self._watched:
            partition.waiters.pop(self, None)
        self._watched.clear()


def _failed(requested: FetchPartition, code: ErrorCode) -> PartitionData:
    return PartitionData(requested.partition, code, -1, -1, -1, aborted_transactions=None, records=b"")


def _divergence(requested: FetchPartition, partition: Partition) -> EpochEndOffset | None:
    """Whether the reader's past is not this log's past (it read what an unclean end took away)."""
    epoch, end_offset = partition.log.epoch_end_offset(requested.last_fetched_epoch)
    if epoch == -1:
        raise StorageError(
            ErrorCode.OFFSET_OUT_OF_RANGE, f"epoch {requested.last_fetched_epoch} is not in the history of the log"
        )
    if epoch < requested.last_fetched_epoch or end_offset < requested.fetch_offset:
        return EpochEndOffset(epoch, end_offset)
    return None
