"""The requests of a small transaction as bytes: built once, then only the producer's id, epoch and sequence change.

So the client of a latency benchmark takes a small part of the time, and the broker the large one.
"""

from __future__ import annotations

import struct
import time
from typing import NamedTuple

from semel.protocol.api import api_of
from semel.protocol.batch import seal_crc
from semel.protocol.errors import ErrorCode
from semel.protocol.messages.records import PartitionProduceData, ProduceRequest, TopicProduceData
from semel.protocol.messages.transactions import AddPartitionsToTxnRequest, AddPartitionsToTxnTopic, EndTxnRequest
from semel.protocol.rows import Record, encode_batch
from semel.protocol.schema import Struct

_OWNER = struct.Struct(">qh")
_SEQUENCE = struct.Struct(">i")
_ERROR = struct.Struct(">h")
_ENDED = struct.Struct(">hqh")
_MARK = (0x1A2B3C4D5E6F7081, 0x1234)  # stands for the producer's id and epoch in a fresh frame
_PRODUCER_AT = 43  # in a batch
_VALUE_BYTES = 100


class Ended(NamedTuple):
    """The response to EndTxn: who the producer is from now on (TV2)."""

    error: ErrorCode
    producer_id: int
    epoch: int


class TransactionFrames:
    """For one producer that writes one record to one partition in each transaction."""

    def __init__(self, transactional_id: str, partition: tuple[str, int], *, is_v2: bool) -> None:
        topic, index = partition
        if len(topic) > 100:
            raise ValueError(f"{topic!r} is too long: its length must fit a byte")
        self.is_v2 = is_v2
        self._name_bytes = 1 + len(topic)
        producer_id, epoch = _MARK
        batch = encode_batch(
            [Record(0, time.time_ns() // 1_000_000, None, b"x" * _VALUE_BYTES)],
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=0,
            transactional=True,
        )
        data = TopicProduceData(topic, partition_data=[PartitionProduceData(index, batch)])
        self.produce = _frame(0, 12 if is_v2 else 11, ProduceRequest(transactional_id, -1, 30_000, [data]))
        self.end = _frame(26, 5 if is_v2 else 3, EndTxnRequest(transactional_id, producer_id, epoch, True))
        self.add = _frame(
            24,
            3,
            AddPartitionsToTxnRequest(
                v3_and_below_transactional_id=transactional_id,
                v3_and_below_producer_id=producer_id,
                v3_and_below_producer_epoch=epoch,
                v3_and_below_topics=[AddPartitionsToTxnTopic(topic, [index])],
            ),
        )
        self._places = [(frame, frame.index(_OWNER.pack(*_MARK))) for frame in (self.produce, self.end, self.add)]
        self._batch_at = self._places[0][1] - _PRODUCER_AT

    def stamp(self, producer_id: int, epoch: int, sequence: int) -> None:
        """Who sends, from now on."""
        for frame, at in self._places:
            _OWNER.pack_into(frame, at, producer_id, epoch)
        _SEQUENCE.pack_into(self.produce, self._batch_at + _PRODUCER_AT + _OWNER.size, sequence)
        seal_crc(self.produce, self._batch_at)

    # the responses, without their size: correlation id, tags, then as below

    def produce_error(self, response: bytes) -> ErrorCode:
        return ErrorCode.of(_ERROR.unpack_from(response, 5 + 1 + self._name_bytes + 1 + 4)[0])

    def add_error(self, response: bytes) -> ErrorCode:
        return ErrorCode.of(_ERROR.unpack_from(response, 5 + 4 + 1 + self._name_bytes + 1 + 4)[0])

    def ended(self, response: bytes) -> Ended:
        if not self.is_v2:
            return Ended(ErrorCode.of(_ERROR.unpack_from(response, 9)[0]), -1, -1)
        code, producer_id, epoch = _ENDED.unpack_from(response, 9)
        return Ended(ErrorCode.of(code), producer_id, epoch)


def _frame(key: int, version: int, request: Struct) -> bytearray:
    return bytearray(b"".join(api_of(key).frame_request(request, version, 1, "bench")))
