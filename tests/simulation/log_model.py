"""Partitions as a broker keeps them, as far as a producer can tell: sequences, epochs, duplicates. Without I/O."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from semel.client.producer.batches import Identity, Place
from semel.protocol.batch import next_sequence, read_header
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.records import PartitionProduceResponse, ProduceRequest
from semel.protocol.rows import decode_batch

Responses = dict[Place, PartitionProduceResponse]
REMEMBERED = 5  # batches of a producer, by which a retry is recognised


class StoredRecord(NamedTuple):
    value: bytes | None
    producer: Identity
    is_transactional: bool


class _Producer:
    """What a partition knows of a producer id."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.next_sequence = -1  # of the next batch; -1: any
        self.recent: deque[tuple[int, int, int]] = deque(maxlen=REMEMBERED)  # sequence, count, base offset


class PartitionModel:
    def __init__(self) -> None:
        self.records: list[StoredRecord] = []
        self._producers: dict[int, _Producer] = {}

    def values(self) -> list[bytes | None]:
        return [record.value for record in self.records]

    def append(self, data: bytes) -> tuple[ErrorCode, int]:
        header = read_header(data)
        identity = Identity(header.producer_id, header.producer_epoch)
        if header.producer_id < 0:
            return ErrorCode.NONE, self._store(data, identity, False)
        known = self._producers.setdefault(header.producer_id, _Producer(header.producer_epoch))
        if header.producer_epoch < known.epoch:
            return ErrorCode.INVALID_PRODUCER_EPOCH, -1
        if header.producer_epoch > known.epoch:
            known = self._producers[header.producer_id] = _Producer(header.producer_epoch)
            known.next_sequence = 0
        for sequence, count, offset in known.recent:
            if (sequence, count) == (header.base_sequence, header.record_count):
                return ErrorCode.NONE, offset
        if known.next_sequence not in (-1, header.base_sequence):
            return ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, -1
        offset = self._store(data, identity, header.is_transactional)
        known.next_sequence = next_sequence(header.base_sequence, header.record_count)
        known.recent.append((header.base_sequence, header.record_count, offset))
        return ErrorCode.NONE, offset

    def _store(self, data: bytes, identity: Identity, transactional: bool) -> int:
        offset = len(self.records)
        self.records += [StoredRecord(record.value, identity, transactional) for record in decode_batch(data).records]
        return offset

    def fence(self, identity: Identity) -> None:
        """Batches of an earlier epoch are refused from here on."""
        known = self._producers.setdefault(identity.producer_id, _Producer(identity.epoch))
        if known.epoch < identity.epoch:
            fresh = self._producers[identity.producer_id] = _Producer(identity.epoch)
            fresh.next_sequence = 0


class LogModel:
    """The partitions of one broker."""

    def __init__(self) -> None:
        self.partitions: dict[Place, PartitionModel] = {}
        self.refusals: dict[Place, ErrorCode] = {}  # what a partition answers to everything, if it does not store
        self._last_producer_id = 100

    def partition(self, topic: str, index: int) -> PartitionModel:
        return self.partitions.setdefault((topic, index), PartitionModel())

    def new_identity(self) -> Identity:
        self._last_producer_id += 1
        return Identity(self._last_producer_id, 0)

    def fence(self, identity: Identity) -> None:
        for partition in self.partitions.values():
            partition.fence(identity)

    def produce(self, request: ProduceRequest) -> Responses:
        responses: Responses = {}
        for topic in request.topic_data:
            for part in topic.partition_data:
                place = (topic.name, part.index)
                code, offset = self.refusals.get(place), -1
                if code is None:
                    assert part.records is not None
                    code, offset = self.partition(*place).append(bytes(part.records))
                responses[place] = PartitionProduceResponse(part.index, int(code), offset)
        return responses

    def refuse(self, request: ProduceRequest, code: ErrorCode) -> Responses:
        """Stores nothing."""
        return {
            (topic.name, part.index): PartitionProduceResponse(part.index, int(code), -1)
            for topic in request.topic_data
            for part in topic.partition_data
        }
