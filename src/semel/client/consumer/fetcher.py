"""What to fetch next, and what a response means. No I/O: the consumer sends the requests and hands in the responses.

As soon as a response is here, its last batch says where the next fetch starts; the next request leaves before the
records of this one are looked at. So the socket is busy while the program works.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from semel.client.consumer.assigned_partitions import AssignedPartitions, PartitionState
from semel.client.settings import ConsumerSettings
from semel.client.types import PartitionError, TopicPartition
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.records import (
    AbortedTransaction,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    PartitionData,
)
from semel.protocol.schema import NO_UUID

_BATCH_START = struct.Struct(">qii")  # base offset, length, leader epoch
_LAST_OFFSET_DELTA = struct.Struct(">i")
_LOG_OVERHEAD, _HEADER_SIZE, _LAST_DELTA_AT = 12, 61, 23
FIRST_VERSION_WITH_TOPIC_IDS = 13


class RequestedFetch(NamedTuple):
    """What a request fetches from one partition."""

    state: PartitionState
    version: int
    offset: int

    @property
    def is_current(self) -> bool:
        """False if the consumer has jumped since, or has the records: of two requests to two brokers, as the leader
        moved in between, both may return them."""
        return self.version == self.state.version and self.offset == self.state.fetch_offset


class FetchPlan(NamedTuple):
    """One request to one broker."""

    node_id: int
    request: FetchRequest
    requested: dict[TopicPartition, RequestedFetch]
    names: dict[bytes, str]  # by topic id


class Chunk:
    """Fetched batches of one partition, waiting to be read."""

    __slots__ = ("aborted", "leader_epoch", "next_offset", "records", "start", "state", "version")

    def __init__(
        self, requested: RequestedFetch, data: PartitionData, records: memoryview, end: tuple[int, int]
    ) -> None:
        self.state = requested.state
        self.version = requested.version
        self.start = requested.offset  # a batch may begin before it; earlier records are dropped
        self.records = records
        self.aborted: list[AbortedTransaction] = data.aborted_transactions or []
        self.next_offset, self.leader_epoch = end

    @property
    def is_current(self) -> bool:
        return self.version == self.state.version

    @property
    def is_readable(self) -> bool:
        return self.is_current and not self.state.paused


class FetchFailure(NamedTuple):
    """A partition that could not be fetched."""

    state: PartitionState
    code: ErrorCode
    data: PartitionData


class Fetcher:
    """Plans fetches for the partitions of `assigned` and keeps what came until it is read."""

    def __init__(self, assigned: AssignedPartitions, settings: ConsumerSettings) -> None:
        self._assigned = assigned
        self._settings = settings
        self._chunks: deque[Chunk] = deque()

    # -- requests ------------------------------------------------------------------------------------------------------
    def plan(
        self,
        leader_of: Callable[[TopicPartition], tuple[int, int] | None],
        topic_ids: Mapping[str, bytes],
        busy_nodes: Iterable[int],
        now_s: float,
        draining: bool = False,
    ) -> list[FetchPlan]:
        """One request for each idle broker that leads a partition that may hold more. `leader_of`: (node, epoch).

        `draining`: all that can be read now is about to be handed out, and takes no memory any more."""
        self._drop_stale()
        waiting = {} if draining else self._waiting_bytes()
        if sum(waiting.values()) >= self._settings.prefetch_bytes:
            return []
        busy = set(busy_nodes)
        by_node: dict[int, list[tuple[PartitionState, int]]] = {}
        for state in self._assigned.rotate():
            if not state.is_ready or state.paused or state.retry_at_s > now_s:
                continue
            if waiting.get(state.topic_partition, 0) >= self._settings.max_partition_fetch_bytes:
                continue
            leader = leader_of(state.topic_partition)
            if leader is not None and leader[0] not in busy:
                by_node.setdefault(leader[0], []).append((state, leader[1]))
        return [self._request(node_id, wanted, topic_ids) for node_id, wanted in by_node.items()]

    def _request(
        self, node_id: int, wanted: list[tuple[PartitionState, int]], topic_ids: Mapping[str, bytes]
    ) -> FetchPlan:
        topics: dict[str, FetchTopic] = {}
        requested: dict[TopicPartition, RequestedFetch] = {}
        for state, leader_epoch in wanted:
            name, index = state.topic_partition
            topic = topics.setdefault(name, FetchTopic(topic=name, topic_id=topic_ids.get(name, NO_UUID)))
            topic.partitions.append(
                FetchPartition(
                    partition=index,
                    current_leader_epoch=leader_epoch,
                    fetch_offset=state.fetch_offset,
                    last_fetched_epoch=state.fetch_epoch,
                    partition_max_bytes=self._settings.max_partition_fetch_bytes,
                )
            )
            requested[state.topic_partition] = RequestedFetch(state, state.version, state.fetch_offset)
        request = FetchRequest(
            max_wait_ms=self._settings.fetch_max_wait_ms,
            min_bytes=self._settings.fetch_min_bytes,
            max_bytes=self._settings.fetch_max_bytes,
            isolation_level=self._settings.isolation,
            topics=list(topics.values()),
        )
        return FetchPlan(node_id, request, requested, {topic.topic_id: topic.topic for topic in topics.values()})

    # -- receiving -----------------------------------------------------------------------------------------------------
    def absorb(self, plan: FetchPlan, response: FetchResponse) -> list[FetchFailure]:
        """Keeps the records, moves the fetch offsets on, and returns what went wrong."""
        failures = []
        for topic in response.responses:
            name = topic.topic or plan.names.get(topic.topic_id, "")
            for data in topic.partitions:
                requested = plan.requested.get(TopicPartition(name, data.partition_index))
                if requested is None or not requested.is_current:
                    continue
                code = ErrorCode.of(data.error_code)
                if code is ErrorCode.NONE and data.diverging_epoch.end_offset >= 0:
                    self._truncate(requested.state, data)
                elif code is ErrorCode.NONE:
                    self._keep(requested, data)
                else:
                    failures.append(FetchFailure(requested.state, code, data))
        return failures

    def _keep(self, requested: RequestedFetch, data: PartitionData) -> None:
        state = requested.state
        state.unknown_since_s = None
        state.high_watermark, state.last_stable_offset = data.high_watermark, data.last_stable_offset
        if data.last_stable_offset < 0:
            state.last_stable_offset = data.high_watermark
        records = memoryview(data.records) if isinstance(data.records, (bytes, bytearray, memoryview)) else None
        if not records:
            return
        end = end_of(records)
        if end is None:
            raise PartitionError(
                f"{state.topic_partition} at offset {requested.offset}: {len(records)} bytes hold no whole "
                f"batch; raise max.partition.fetch.bytes (now {self._settings.max_partition_fetch_bytes})",
                ErrorCode.MESSAGE_TOO_LARGE,
                state.topic_partition,
                requested.offset,
            )
        if end[0] <= requested.offset:
            return  # a batch from before the position, as compaction may leave; the next fetch goes on
        state.fetch_offset, state.fetch_epoch = end
        self._chunks.append(Chunk(requested, data, records, end))

    def _truncate(self, state: PartitionState, data: PartitionData) -> None:
        """The log was cut after an unclean election: go on where the histories part (KIP-320). What was fetched before
        that place and not handed out yet is fetched again."""
        end_offset, epoch = data.diverging_epoch.end_offset, data.diverging_epoch.epoch
        position = state.fetch_offset if state.position is None else state.position
        if position < end_offset:
            state.seek(position)  # without an epoch: that of the batch before it is not known any more
        else:
            state.seek(end_offset, epoch)

    # -- reading -------------------------------------------------------------------------------------------------------
    @property
    def has_chunks(self) -> bool:
        return any(chunk.is_readable for chunk in self._chunks)

    def take(self) -> Chunk | None:
        """The next chunk to read; what a jump has made stale is thrown away, paused ones stay where they are."""
        self._drop_stale()
        for index, chunk in enumerate(self._chunks):
            if chunk.is_readable:
                del self._chunks[index]
                return chunk
        return None

    def readable(self) -> list[Chunk]:
        """All chunks that can be read now, in their order. They stay until `drop_readable`."""
        self._drop_stale()
        return [chunk for chunk in self._chunks if chunk.is_readable]

    def drop_readable(self) -> None:
        """All that can be read has been."""
        self._chunks = deque(chunk for chunk in self._chunks if not chunk.is_readable)

    def _drop_stale(self) -> None:
        if all(chunk.is_current for chunk in self._chunks):
            return
        self._chunks = deque(chunk for chunk in self._chunks if chunk.is_current)

    def _waiting_bytes(self) -> dict[TopicPartition, int]:
        """What waits to be read. Paused partitions do not count: they would keep the others from being fetched."""
        waiting: dict[TopicPartition, int] = {}
        for chunk in self._chunks:
            if chunk.is_readable:
                partition = chunk.state.topic_partition
                waiting[partition] = waiting.get(partition, 0) + len(chunk.records)
        return waiting


def end_of(records: memoryview) -> tuple[int, int] | None:
    """(next offset, leader epoch) after the last whole batch of a record set; None if there is no whole one."""
    at, size, last = 0, len(records), -1
    while size - at >= _HEADER_SIZE:
        length = _BATCH_START.unpack_from(records, at)[1] + _LOG_OVERHEAD
        if length < _HEADER_SIZE or length > size - at:
            break  # cut short, as the end of a response may be; or broken, which the decoder will say
        last, at = at, at + length
    if last < 0:
        return None
    base_offset, _, leader_epoch = _BATCH_START.unpack_from(records, last)
    (last_delta,) = _LAST_OFFSET_DELTA.unpack_from(records, last + _LAST_DELTA_AT)
    return base_offset + last_delta + 1, leader_epoch
