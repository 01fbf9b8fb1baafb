"""A client that sends exactly what a test tells it to: one blocking socket, no retries, no metadata, no cleverness."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterable
from typing import Any

from semel.protocol.api import Api
from semel.protocol.batch import BatchHeader, iter_headers
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.cluster import FIND_COORDINATOR, FindCoordinatorRequest
from semel.protocol.messages.offsets import OFFSET_FETCH, OffsetFetchRequest, OffsetFetchRequestGroup
from semel.protocol.messages.records import (
    FETCH,
    LIST_OFFSETS,
    PRODUCE,
    FetchPartition,
    FetchRequest,
    FetchTopic,
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsTopic,
    PartitionData,
    PartitionProduceData,
    ProduceRequest,
    TopicProduceData,
)
from semel.protocol.messages.topics import (
    CREATE_TOPICS,
    CreatableTopic,
    CreatableTopicConfig,
    CreateTopicsRequest,
)
from semel.protocol.messages.transactions import (
    DESCRIBE_TRANSACTIONS,
    INIT_PRODUCER_ID,
    DescribeTransactionsRequest,
    InitProducerIdRequest,
)
from semel.protocol.rows import Record, encode_batch
from tests.support.waiting import PATIENCE_S, eventually


class DirectClient:
    """One connection to one broker."""

    def __init__(self, bootstrap: str, timeout_s: float = 20, client_id: str = "raw") -> None:
        host, port = bootstrap.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), timeout=timeout_s)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._client_id = client_id
        self._correlation = 0

    def __enter__(self) -> DirectClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, api: Api[Any, Any], request: Any, version: int) -> int:
        self._correlation += 1
        self.socket.sendall(b"".join(api.frame_request(request, version, self._correlation, self._client_id)))
        return self._correlation

    def receive(self, api: Api[Any, Any], version: int) -> Any:
        frame = self._read(struct.unpack(">i", self._read(4))[0])
        _, response = api.read_response(frame, version)
        return response

    def call(self, api: Api[Any, Any], request: Any, version: int) -> Any:
        self.send(api, request, version)
        return self.receive(api, version)

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            chunk = self.socket.recv(size - len(data))
            if not chunk:
                raise EOFError("the broker closed the connection")
            data += chunk
        return bytes(data)

    # --- the requests that tests of exactly-once need ---

    def create_topic(self, name: str, partitions: int = 1, **configs: str) -> None:
        topic = CreatableTopic(
            name=name,
            num_partitions=partitions,
            replication_factor=1,
            configs=[CreatableTopicConfig(name=k.replace("_", "."), value=v) for k, v in configs.items()],
        )
        answer = self.call(CREATE_TOPICS, CreateTopicsRequest(topics=[topic], timeout_ms=20_000), 5)
        assert answer.topics[0].error_code == 0, answer
        eventually(lambda: self._codes_of_partitions(name, partitions), lambda codes: codes == {0})

    def _codes_of_partitions(self, name: str, count: int) -> set[int]:
        """Apache Kafka responds before it leads the new partitions."""
        wanted = [ListOffsetsPartition(partition_index=each, timestamp=-1) for each in range(count)]
        request = ListOffsetsRequest(replica_id=-1, topics=[ListOffsetsTopic(name=name, partitions=wanted)])
        answer = self.call(LIST_OFFSETS, request, 5)
        return {each.error_code for topic in answer.topics for each in topic.partitions}

    def init_producer_id(
        self,
        transactional_id: str | None = None,
        pid: int = -1,
        epoch: int = -1,
        timeout_ms: int = 60_000,
        version: int = 4,
    ) -> tuple[ErrorCode, int, int]:
        request = InitProducerIdRequest(
            transactional_id=transactional_id,
            transaction_timeout_ms=timeout_ms,
            producer_id=pid,
            producer_epoch=epoch,
        )
        answer = self.call(INIT_PRODUCER_ID, request, version)
        return ErrorCode(answer.error_code), answer.producer_id, answer.producer_epoch

    def find_coordinator(self, key: str, kind: int) -> None:
        """Waits until somebody coordinates the group (kind 0) or transactional id (kind 1): Kafka starts lazily."""
        request = FindCoordinatorRequest(key_type=kind, coordinator_keys=[key])
        eventually(lambda: self.call(FIND_COORDINATOR, request, 4).coordinators[0].error_code, lambda code: code == 0)

    def new_producer(self, transactional_id: str | None = None) -> tuple[int, int]:
        """(id, epoch) of a fresh producer, asked for until the broker is ready to give one."""
        if transactional_id is not None:
            self.find_coordinator(transactional_id, kind=1)
        code, pid, epoch = eventually(lambda: self.init_producer_id(transactional_id), lambda r: not r[0].retriable)
        assert code == 0, code
        return pid, epoch

    def produce(
        self, topic: str, batch: bytes, *, partition: int = 0, transactional_id: str | None = None, version: int = 11
    ) -> tuple[ErrorCode, int]:
        """(error, base offset)"""
        request = produce_request(topic, batch, partition, transactional_id)
        found = self.call(PRODUCE, request, version).responses[0].partition_responses[0]
        return ErrorCode(found.error_code), found.base_offset

    def fetch(self, topic: str, offset: int = 0, *, partition: int = 0, committed: bool = False) -> PartitionData:
        wanted = FetchPartition(partition=partition, fetch_offset=offset, partition_max_bytes=64 << 20)
        request = FetchRequest(
            max_wait_ms=200,
            min_bytes=1,
            max_bytes=64 << 20,
            isolation_level=int(committed),
            topics=[FetchTopic(topic=topic, partitions=[wanted])],
        )
        data: PartitionData = self.call(FETCH, request, 12).responses[0].partitions[0]
        return data

    def headers(self, topic: str, *, partition: int = 0) -> list[BatchHeader]:
        """The headers of all batches in a partition, markers included."""
        found: list[BatchHeader] = []
        while True:
            data = self.fetch(topic, found[-1].next_offset if found else 0, partition=partition)
            assert data.error_code == 0, data
            new = [header for _, header in iter_headers(data.records or b"")]
            if not new:
                return found
            found += new


def await_coordinators(bootstrap: str) -> None:
    """Apache Kafka makes its internal topics when they are first needed. Until a partition of them is loaded, groups
    and transactional ids have no coordinator. These names are in every partition, in all likelihood."""
    with DirectClient(bootstrap, timeout_s=PATIENCE_S) as client:
        names = [f"first-{number}" for number in range(48)]
        client.find_coordinator(names[0], 0)
        client.find_coordinator(names[0], 1)
        offsets = OffsetFetchRequest(groups=[OffsetFetchRequestGroup(name, topics=None) for name in names])
        eventually(
            lambda: {each.error_code for each in client.call(OFFSET_FETCH, offsets, 8).groups},
            lambda codes: codes == {ErrorCode.NONE},
        )
        ids = DescribeTransactionsRequest(transactional_ids=names)
        eventually(
            lambda: {each.error_code for each in client.call(DESCRIBE_TRANSACTIONS, ids, 0).transaction_states},
            lambda codes: codes == {ErrorCode.TRANSACTIONAL_ID_NOT_FOUND},
        )


def produce_request(
    topic: str, batch: bytes, partition: int = 0, transactional_id: str | None = None
) -> ProduceRequest:
    data = TopicProduceData(name=topic, partition_data=[PartitionProduceData(index=partition, records=batch)])
    return ProduceRequest(transactional_id=transactional_id, acks=-1, timeout_ms=20_000, topic_data=[data])


def batch_of(
    values: Iterable[bytes], *, pid: int = -1, epoch: int = -1, sequence: int = -1, transactional: bool = False
) -> bytes:
    """A record batch with these values, as an idempotent or transactional producer sends it."""
    now_ms = int(time.time() * 1000)
    records = [Record(offset=i, timestamp=now_ms, key=None, value=v, headers=()) for i, v in enumerate(values)]
    return encode_batch(
        records, producer_id=pid, producer_epoch=epoch, base_sequence=sequence, transactional=transactional
    )
