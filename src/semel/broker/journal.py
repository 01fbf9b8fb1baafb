"""An internal topic as the memory of a coordinator: what it decided, in order, durable before anybody is told."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import TYPE_CHECKING, Any

from semel.broker.topics import TopicError
from semel.protocol.batch import iter_headers
from semel.protocol.partitioning import coordinator_partition
from semel.protocol.rows import DecodedBatch, Record, decode_batch, encode_batch, encode_single
from semel.storage import StorageError

if TYPE_CHECKING:
    from semel.broker.broker import Broker
    from semel.storage import PartitionLog

READ_SIZE_BYTES = 1 << 20

KeyValue = tuple[bytes | None, bytes | None]


class Journal:
    """One internal topic. It is created on first use, as Kafka does, and compacted."""

    def __init__(self, broker: Broker, topic: str) -> None:
        self._broker = broker
        self.topic = topic

    @property
    def partition_count(self) -> int:
        """As many as the topic has; before it exists, as many as it will get."""
        topic = self._broker.topics.get(self.topic)
        return len(topic.partitions) if topic else self._broker.topics.internal_partition_count(self.topic)

    def partition_for(self, key: str) -> int:
        """The partition that keeps a group or a transactional id."""
        return coordinator_partition(key, self.partition_count)

    def append(
        self, partition: int, records: list[KeyValue], *, producer: tuple[int, int] | None = None
    ) -> Coroutine[Any, Any, int]:
        """Writes one batch now, in the order of the calls; awaiting the result gives its base offset once durable.

        With `producer` (id, epoch) the batch belongs to that producer's transaction, as the positions that a
        transaction commits do. StorageError, raised here or from the await: nothing may be acknowledged.
        """
        log = self.log(partition)
        now_ms = self._broker.clock.now_ms()
        producer_id, producer_epoch = producer or (-1, -1)
        if len(records) == 1 and producer is None:
            batch = encode_single(now_ms, *records[0])
        else:
            batch = encode_batch(
                [Record(offset, now_ms, key, value) for offset, (key, value) in enumerate(records)],
                producer_id=producer_id,
                producer_epoch=producer_epoch,
                transactional=producer is not None,
            )
        guard = None
        if producer is not None and not log.has_open_transaction(producer_id, producer_epoch):
            guard = log.start_verification(producer_id, producer_epoch, -1, supports_epoch_bump=False)
        result = log.append_records(batch, now_ms=now_ms, guard=guard)
        is_durable = log.high_watermark > result.last_offset
        durable = None if is_durable else self._broker.sync.wait(log, result.last_offset + 1)
        return _once_durable(durable, result.base_offset)

    def replay(self, partition: int) -> Iterator[DecodedBatch]:
        """(header, records) of every batch from the start, control ones too. Nothing if there is no topic."""
        log = self._broker.topics.find_log(self.topic, partition)
        if log is None:
            return
        offset = log.start_offset
        while offset < log.end_offset:
            chunk = log.read(offset, READ_SIZE_BYTES, up_to="log_end").records
            for at, header in iter_headers(chunk):
                if header.last_offset >= offset:
                    yield decode_batch(chunk, at)
                offset = max(offset, header.next_offset)
            if not chunk:
                return

    def log(self, partition: int) -> PartitionLog:
        """The partition's log; creates the topic if it is not there yet."""
        try:
            return self._broker.topics.internal(self.topic).partitions[partition].log
        except TopicError as error:
            raise StorageError(error.code, str(error)) from error


async def _once_durable(durable: asyncio.Future[None] | None, base_offset: int) -> int:
    if durable is not None:
        await durable
    return base_offset
