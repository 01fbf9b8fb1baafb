"""Record batches: the columnar codec against the row codec, kafka-python's codec and confluent-kafka.

Keys of 16 bytes, values of random bytes and of varying length (half to one and a half times the stated size).

- encode: columns to batches of up to 1 MB, CRC included. confluent-kafka: `produce` for every record and a final
  `flush`, into librdkafka's own mock broker in the same process.
- decode: a record set of those batches to columns, CRC checked. confluent-kafka: `consume` from the mock broker, with
  queues that never make it pause, of four times as many messages, so that what was fetched before the clock starts
  (with the first message) is a part only; keys and values are not even asked for.
- decode in place: the same, keys and values left in the record set as Arrow views, as a pipeline that goes on in Arrow
  (or encodes again) takes them.
- the plain codecs work on a part of the records, as they are slower by an order of magnitude.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from benchmarks.harness import Report, compare, interleave, rate

PARTITIONS = 4  # of a mock broker's topic
TOPICS = ["decode-0", "decode-1", "decode-2", "decode-3"]  # filled with the workload, each
PARTITION_BYTES = 4_000_000  # the mock broker keeps about 5 MB of each
PLAIN_RECORDS = 10_000  # for the codecs that make an object of each record
BATCH_BYTES = 1_000_000
SIZES = {"100 B": 100, "1 KB": 1000}


class Workload(NamedTuple):
    keys: list[bytes]
    values: list[bytes]
    timestamps: list[int]

    @classmethod
    def of(cls, mean_bytes: int) -> Workload:
        """As many records as a mock broker keeps."""
        rng = random.Random(mean_bytes)
        count = PARTITIONS * PARTITION_BYTES // (mean_bytes + 30)
        values = [rng.randbytes(rng.randint(mean_bytes // 2, mean_bytes * 3 // 2)) for _ in range(count)]
        keys = [b"%016d" % (number % 100_000) for number in range(count)]
        return cls(keys, values, [1_700_000_000_000 + number // 100 for number in range(count)])

    def first(self, count: int) -> Workload:
        return Workload(self.keys[:count], self.values[:count], self.timestamps[:count])


def run(report: Report, quick: bool = False) -> None:
    runs = 5 if quick else 9
    for name, mean_bytes in SIZES.items():
        workload = Workload.of(mean_bytes)
        with mock_broker(workload) as mock:
            encoders = {
                "semel": columnar_encode(workload),
                "semel rows": row_encode(workload),
                "kafka-python": kafka_python_encode(workload),
                "confluent-kafka": mock.produce,
            }
            values = interleave(encoders, runs=runs)
            compare(report, bench="codec", case=f"encode {name}", unit="records/s", values=values)
            decoders = {
                "semel": columnar_decode(workload),
                "semel in place": columnar_decode(workload, views=True),
                "semel rows": row_decode(workload),
                "kafka-python": kafka_python_decode(workload),
                "confluent-kafka": mock.consume,
            }
            values = interleave(decoders, runs=runs)
            in_place = {"semel": values.pop("semel in place"), "confluent-kafka": values["confluent-kafka"]}
            compare(report, bench="codec", case=f"decode {name}", unit="records/s", values=values)
            compare(report, bench="codec", case=f"decode {name} in place", unit="records/s", values=in_place)


# --- semel


def _columns(workload: Workload) -> dict[str, Any]:
    import pyarrow as pa

    return {
        "value": pa.array(workload.values, pa.binary()),
        "key": pa.array(workload.keys, pa.binary()),
        "timestamp": pa.array(workload.timestamps, pa.int64()),
    }


def columnar_encode(workload: Workload) -> Callable[[], float]:
    from semel.protocol.columns import ColumnEncoder

    columns, count = _columns(workload), len(workload.keys)
    return lambda: rate(lambda: ColumnEncoder(**columns).encode(max_batch_bytes=BATCH_BYTES), count)


def columnar_decode(workload: Workload, views: bool = False) -> Callable[[], float]:
    from semel.protocol.batch import patch_offset
    from semel.protocol.columns import ColumnEncoder, decode_record_set

    batches, offset = ColumnEncoder(**_columns(workload)).encode(max_batch_bytes=BATCH_BYTES), 0
    for batch in batches:
        patch_offset(batch.buffer, offset, 0)
        offset += batch.record_count
    data = b"".join(batch.buffer for batch in batches)
    assert decode_record_set(data).table.num_rows == offset
    return lambda: rate(lambda: decode_record_set(data, views=views), offset)


def _rows(workload: Workload) -> list[Any]:
    from semel.protocol.rows import Record

    fields = zip(workload.timestamps, workload.keys, workload.values, strict=True)
    return [Record(offset, *parts) for offset, parts in enumerate(fields)][:PLAIN_RECORDS]


def row_encode(workload: Workload) -> Callable[[], float]:
    from semel.protocol.rows import encode_batch

    records = _rows(workload)
    return lambda: rate(lambda: encode_batch(records), len(records))


def row_decode(workload: Workload) -> Callable[[], float]:
    from semel.protocol.rows import decode_batch, encode_batch

    records = _rows(workload)
    data = encode_batch(records)
    return lambda: rate(lambda: decode_batch(data), len(records))


# --- kafka-python


def _kafka_python_batch(workload: Workload) -> bytes:
    from kafka.record.default_records import DefaultRecordBatchBuilder

    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=0,
        is_transactional=False,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=2**30,
    )
    fields = zip(workload.timestamps, workload.keys, workload.values, strict=True)
    for offset, (timestamp, key, value) in enumerate(fields):
        builder.append(offset, timestamp, key, value, [])
    return bytes(builder.build())


def kafka_python_encode(workload: Workload) -> Callable[[], float]:
    part = workload.first(PLAIN_RECORDS)
    return lambda: rate(lambda: _kafka_python_batch(part), len(part.keys))


def kafka_python_decode(workload: Workload) -> Callable[[], float]:
    from kafka.record.memory_records import MemoryRecords

    part = workload.first(PLAIN_RECORDS)
    data = _kafka_python_batch(part)

    def work() -> None:
        batch = MemoryRecords(data).next_batch()
        batch.validate_crc()
        for _ in batch:
            pass

    return lambda: rate(work, len(part.keys))


# --- confluent-kafka


class MockBroker:
    """librdkafka's mock cluster, which lives in a producer, and the two things that are measured with it."""

    def __init__(self, producer: Any, workload: Workload) -> None:
        self._producer = producer
        self._workload = workload
        broker = next(iter(producer.list_topics("warm-up", timeout=30).brokers.values()))
        self._address = f"{broker.host}:{broker.port}"

    def produce(self) -> float:
        return rate(self._produce_all, len(self._workload.keys))

    def _produce_all(self, topic: str = "encode") -> None:
        produce = self._producer.produce
        for number, (key, value) in enumerate(zip(self._workload.keys, self._workload.values, strict=True)):
            produce(topic, value, key, partition=number % PARTITIONS)
        if left := self._producer.flush(60):
            raise RuntimeError(f"{left} messages did not reach the mock broker within a minute")

    def consume(self) -> float:
        """Records per second from the first message on."""
        from confluent_kafka import Consumer, TopicPartition

        consumer = Consumer(
            {
                "bootstrap.servers": self._address,
                "group.id": "bench",
                "enable.auto.commit": False,
                "queued.min.messages": 10_000_000,
                "queued.max.messages.kbytes": 2_000_000,
                "log_level": 0,
            }
        )
        try:
            parts = [TopicPartition(topic, partition) for topic in TOPICS for partition in range(PARTITIONS)]
            total = 0
            for part in parts:
                part.offset, end = consumer.get_watermark_offsets(part, timeout=30)
                total += end - part.offset
            consumer.assign(parts)
            got = len(consumer.consume(1, timeout=30))
            started, first = time.perf_counter(), got
            while got < total:
                messages = consumer.consume(min(10_000, total - got), timeout=30)
                if not messages:
                    raise RuntimeError(f"the mock broker gave {got} of {total} messages, then none for 30 seconds")
                got += len(messages)
            return (got - first) / (time.perf_counter() - started)
        finally:
            consumer.close()

    def fill(self) -> None:
        for topic in TOPICS:
            self._produce_all(topic)


@contextmanager
def mock_broker(workload: Workload) -> Iterator[MockBroker]:
    from confluent_kafka import Producer

    producer = Producer(
        {
            "bootstrap.servers": "mock",
            "test.mock.num.brokers": 1,
            "queue.buffering.max.messages": 10_000_000,
            "queue.buffering.max.kbytes": 2_000_000,
            "log_level": 0,
        }
    )
    mock = MockBroker(producer, workload)
    mock.fill()
    yield mock
    producer.flush(10)
