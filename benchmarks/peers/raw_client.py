"""Single requests of the transaction protocol, in any version, right or wrong: for tests and benchmarks.

It has no state, no retries and no opinion. What a real client would never send, this one sends.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from semel.protocol.api import api_of
from semel.protocol.batch import iter_headers
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.cluster import FindCoordinatorRequest
from semel.protocol.messages.offsets import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
)
from semel.protocol.messages.records import (
    FetchPartition,
    FetchRequest,
    FetchTopic,
    PartitionProduceData,
    ProduceRequest,
    TopicProduceData,
)
from semel.protocol.messages.topics import CreatableTopic, CreatableTopicConfig, CreateTopicsRequest
from semel.protocol.messages.transactions import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnTopic,
    DescribeTransactionsRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    TransactionState,
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
)
from semel.protocol.rows import Record, decode_batch, encode_batch
from semel.protocol.schema import Struct

TopicPartition = tuple[str, int]
T = TypeVar("T")
NOT_READY = frozenset(
    {ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, ErrorCode.COORDINATOR_NOT_AVAILABLE, ErrorCode.NOT_COORDINATOR}
)
# The same request is sent again after these.
RETRIABLE = NOT_READY | {ErrorCode.CONCURRENT_TRANSACTIONS, ErrorCode.NOT_ENOUGH_REPLICAS}


class Owner(NamedTuple):
    """The identity that a producer gets."""

    error: ErrorCode
    producer_id: int
    epoch: int


class Appended(NamedTuple):
    error: ErrorCode
    offset: int


class Fetched(NamedTuple):
    """One fetch from an offset on: what a client would show, and what the broker said about the partition."""

    error: ErrorCode
    values: list[bytes | None]
    high_watermark: int
    last_stable_offset: int
    control_batches: list[tuple[int, int, bytes | None]]  # (producer id, epoch, key of the marker)


class RawClient:
    """One connection."""

    def __init__(self, bootstrap: str, timeout_s: float = 30) -> None:
        host, _, port = bootstrap.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._correlation_id = 0

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, key: int, version: int, request: Struct) -> Any:
        """Sends one request and waits for its response."""
        self.send(key, version, request)
        return self.receive(key, version)

    def send(self, key: int, version: int, request: Struct) -> None:
        self._correlation_id += 1
        frame = api_of(key).frame_request(request, version, self._correlation_id, "raw")
        self._socket.sendall(b"".join(frame))

    def receive(self, key: int, version: int) -> Any:
        (size,) = struct.unpack(">i", self._read(4))
        return api_of(key).read_response(self._read(size), version)[1]

    def ask(self, frame: bytes | bytearray) -> bytes:
        """Sends a frame that is ready and waits for the response's bytes; mostly they come with its size."""
        self._socket.sendall(frame)
        data = self._socket.recv(1 << 16)
        while len(data) < 4 or len(data) - 4 < int.from_bytes(data[:4], "big"):
            chunk = self._socket.recv(1 << 16)
            if not chunk:
                raise EOFError("the broker closed the connection")
            data += chunk
        return data[4:]

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            chunk = self._socket.recv(size - len(data))
            if not chunk:
                raise EOFError("the broker closed the connection")
            data += chunk
        return bytes(data)

    # --- transactions ---

    def init(
        self,
        transactional_id: str | None,
        *,
        timeout_ms: int = 60_000,
        expected: tuple[int, int] = (-1, -1),
        version: int = 4,
    ) -> Owner:
        request = InitProducerIdRequest(transactional_id, timeout_ms, *(expected if version >= 3 else (-1, -1)))
        response = self.call(22, version, request)
        return Owner(ErrorCode.of(response.error_code), response.producer_id, response.producer_epoch)

    def add_partitions(
        self,
        transactional_id: str,
        producer_id: int,
        epoch: int,
        partitions: Collection[TopicPartition],
        version: int = 3,
    ) -> dict[TopicPartition, ErrorCode]:
        topics = [AddPartitionsToTxnTopic(name, indexes) for name, indexes in _by_topic(partitions).items()]
        request = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=transactional_id,
            v3_and_below_producer_id=producer_id,
            v3_and_below_producer_epoch=epoch,
            v3_and_below_topics=topics,
        )
        response = self.call(24, version, request)
        return {
            (topic.name, result.partition_index): ErrorCode.of(result.partition_error_code)
            for topic in response.results_by_topic_v3_and_below
            for result in topic.results_by_partition
        }

    def add_offsets(
        self, transactional_id: str, producer_id: int, epoch: int, group: str, version: int = 3
    ) -> ErrorCode:
        response = self.call(25, version, AddOffsetsToTxnRequest(transactional_id, producer_id, epoch, group))
        return ErrorCode.of(response.error_code)

    def commit_offsets(
        self,
        transactional_id: str,
        producer_id: int,
        epoch: int,
        group: str,
        offsets: dict[TopicPartition, int],
        *,
        version: int = 3,
        member: tuple[int, str, str | None] = (-1, "", None),
        metadata: str = "",
    ) -> dict[TopicPartition, ErrorCode]:
        topics = [
            TxnOffsetCommitRequestTopic(
                name,
                [
                    TxnOffsetCommitRequestPartition(
                        index, offsets[name, index], committed_metadata=metadata, committed_leader_epoch=-1
                    )
                    for index in indexes
                ],
            )
            for name, indexes in _by_topic(offsets).items()
        ]
        generation, member_id, instance_id = member if version >= 3 else (-1, "", None)
        request = TxnOffsetCommitRequest(
            transactional_id, group, producer_id, epoch, generation, member_id, instance_id, topics
        )
        response = self.call(28, version, request)
        return {
            (topic.name, part.partition_index): ErrorCode.of(part.error_code)
            for topic in response.topics
            for part in topic.partitions
        }

    def end(self, transactional_id: str, producer_id: int, epoch: int, *, commit: bool, version: int = 3) -> Owner:
        """In version 5 the response says who the producer is from now on; before that it stays who it was."""
        response = self.call(26, version, EndTxnRequest(transactional_id, producer_id, epoch, commit))
        error = ErrorCode.of(response.error_code)
        return (
            Owner(error, response.producer_id, response.producer_epoch)
            if version >= 5
            else Owner(error, producer_id, epoch)
        )

    def describe(self, transactional_id: str) -> TransactionState:
        found: TransactionState = self.call(65, 0, DescribeTransactionsRequest([transactional_id])).transaction_states[
            0
        ]
        return found

    # --- records ---

    def produce(
        self,
        transactional_id: str | None,
        producer_id: int,
        epoch: int,
        partition: TopicPartition,
        values: Sequence[bytes],
        *,
        sequence: int = 0,
        transactional: bool = True,
        version: int = 11,
    ) -> Appended:
        now_ms = time.time_ns() // 1_000_000
        batch = encode_batch(
            [Record(n, now_ms, None, value) for n, value in enumerate(values)],
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
            transactional=transactional,
        )
        name, index = partition
        request = ProduceRequest(
            transactional_id, -1, 30_000, [TopicProduceData(name, partition_data=[PartitionProduceData(index, batch)])]
        )
        response = self.call(0, version, request).responses[0].partition_responses[0]
        return Appended(ErrorCode.of(response.error_code), response.base_offset)

    def fetch(self, partition: TopicPartition, offset: int = 0, *, committed: bool = True) -> Fetched:
        """Everything that one fetch gives from an offset on, filtered as a consumer does."""
        name, index = partition
        topics = [
            FetchTopic(name, partitions=[FetchPartition(index, fetch_offset=offset, partition_max_bytes=1 << 24)])
        ]
        response = self.call(
            1, 12, FetchRequest(max_wait_ms=0, min_bytes=0, isolation_level=int(committed), topics=topics)
        )
        data = response.responses[0].partitions[0]
        values, controls = _visible(bytes(data.records or b""), data.aborted_transactions or [] if committed else [])
        error = ErrorCode.of(response.error_code or data.error_code)
        return Fetched(error, values, data.high_watermark, data.last_stable_offset, controls)

    def committed(self, group: str, partition: TopicPartition, *, stable: bool = True) -> tuple[ErrorCode, int]:
        """A group's position."""
        name, index = partition
        topics = [OffsetFetchRequestTopics(name, partition_indexes=[index])]
        request = OffsetFetchRequest(groups=[OffsetFetchRequestGroup(group, topics=topics)], require_stable=stable)
        found = self.call(9, 8, request).groups[0]
        if found.error_code:
            return ErrorCode.of(found.error_code), -1
        part = found.topics[0].partitions[0]
        return ErrorCode.of(part.error_code), part.committed_offset

    # --- getting ready ---

    def create_topic(self, name: str, partitions: int = 1, **configs: str) -> None:
        settings = [CreatableTopicConfig(key.replace("_", "."), value) for key, value in configs.items()]
        response = self.call(
            19, 5, CreateTopicsRequest([CreatableTopic(name, partitions, 1, configs=settings)], 30_000)
        )
        code = ErrorCode.of(response.topics[0].error_code)
        if code is not ErrorCode.NONE:
            raise RuntimeError(f"cannot create topic {name}: {code.name}")
        for index in range(partitions):
            eventually(partial(self.fetch, (name, index)), done=lambda fetched: fetched.error is ErrorCode.NONE)

    def find_coordinator(self, key: str, kind: int) -> ErrorCode:
        """kind: 0 group, 1 transactional id. Makes the broker create its internal topic."""
        return ErrorCode.of(self.call(10, 4, FindCoordinatorRequest("", kind, [key])).coordinators[0].error_code)

    def ready(self, transactional_id: str, group: str) -> None:
        """Returns when both coordinators respond."""
        for key, kind in ((group, 0), (transactional_id, 1)):
            eventually(partial(self.find_coordinator, key, kind), done=lambda code: code is ErrorCode.NONE)
        eventually(lambda: self.committed(group, ("none", 0))[0], done=lambda code: code not in NOT_READY)
        eventually(
            lambda: ErrorCode.of(self.describe(transactional_id).error_code), done=lambda code: code not in NOT_READY
        )

    def settled(self, transactional_id: str) -> TransactionState:
        """The id's state, once no markers are on their way."""
        return eventually(
            lambda: self.describe(transactional_id),
            done=lambda state: not state.transaction_state.startswith("Prepare") and state.error_code not in NOT_READY,
        )


def eventually(
    call: Callable[[], T],
    done: Callable[[T], object],
    timeout_s: float = 120.0,
    otherwise: str = "it did not come to that",
) -> T:
    """Calls again until the result is as wanted: for codes that mean "not yet", such as CONCURRENT_TRANSACTIONS."""
    began_s = time.monotonic()
    deadline_s = began_s + timeout_s
    while not done(result := call()):
        now_s = time.monotonic()
        assert now_s < deadline_s, f"{otherwise}: still {result!r} after {timeout_s:g} s"
        time.sleep(max(0.002, now_s - began_s))  # what is expensive to call is called less often
        began_s = time.monotonic()
    return result


def _by_topic(partitions: Collection[TopicPartition]) -> dict[str, list[int]]:
    topics: dict[str, list[int]] = {}
    for name, index in partitions:
        topics.setdefault(name, []).append(index)
    return topics


def _visible(data: bytes, aborted: Sequence[Any]) -> tuple[list[bytes | None], list[tuple[int, int, bytes | None]]]:
    """What a consumer shows: no control records, nothing of aborted transactions."""
    starts = sorted((txn.first_offset, txn.producer_id) for txn in aborted)
    dropped: set[int] = set()
    values: list[bytes | None] = []
    controls: list[tuple[int, int, bytes | None]] = []
    for at, header in iter_headers(data):
        while starts and starts[0][0] <= header.last_offset:
            dropped.add(starts.pop(0)[1])
        records = decode_batch(data, at).records
        if header.is_control:
            controls.append((header.producer_id, header.producer_epoch, records[0].key))
            if records[0].key == b"\0\0\0\0":
                dropped.discard(header.producer_id)
        elif not (header.is_transactional and header.producer_id in dropped):
            values += [record.value for record in records]
    return values, controls
