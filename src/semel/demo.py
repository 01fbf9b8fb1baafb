"""`semel demo`: the codecs at work, in a few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import pyarrow as pa

    from semel.protocol.rows import Record

BATCH_RECORDS = 1_000
PARTITIONS = 6
START_MS = 1_700_000_000_000

T = TypeVar("T")


def run(records: int) -> int:
    """Encodes, decodes, compresses and routes that many bank transfers, and says how long it took."""
    print(f"{records:,} bank transfers, in Kafka's own record batches of {BATCH_RECORDS:,} records\n")
    keys, values = transfers(records)
    row_s = _rows(keys, values)
    column_s = _columns(keys, values)
    print(f"  columns against rows: {row_s / column_s:.0f} times as fast, and both read and write the same bytes")
    _compression(keys, values)
    _routing(keys)
    return 0


def transfers(count: int) -> tuple[list[bytes], list[bytes]]:
    """Keys and values that look like life: a few thousand accounts, small JSON documents."""
    keys = [b"account-%04d" % (number * 7919 % 4999) for number in range(count)]
    values = [
        b'{"id": %d, "from": "account-%04d", "to": "account-%04d", "amount": %d.%02d}'
        % (number, number * 7919 % 4999, number * 104729 % 4999, number % 900, number % 100)
        for number in range(count)
    ]
    return keys, values


def _rows(keys: list[bytes], values: list[bytes]) -> float:
    """Record by record, with the codec that reads like the specification."""
    from semel.protocol.rows import decode_batch, encode_batch

    parts = list(row_batches(keys, values))
    batches, encode_s = timed(lambda: [encode_batch(part) for part in parts])
    decoded, decode_s = timed(lambda: [decode_batch(batch).records for batch in batches])
    assert decoded == parts, "what was read is not what was written"
    _speed("row codec, encode", len(keys), encode_s)
    _speed("row codec, decode", len(keys), decode_s)
    return encode_s + decode_s


def _columns(keys: list[bytes], values: list[bytes]) -> float:
    """Whole Arrow columns at a time, without a Python object per record."""
    import pyarrow as pa

    from semel.protocol.columns import ColumnEncoder, decode_record_set
    from semel.protocol.rows import encode_batch

    key, value = pa.array(keys, pa.binary()), pa.array(values, pa.binary())
    timestamp = pa.array(range(START_MS, START_MS + len(keys)), pa.int64())

    def encode() -> list[memoryview]:
        encoder = ColumnEncoder(value, key, timestamp=timestamp)
        return [batch.buffer for batch in encoder.encode(max_batch_records=BATCH_RECORDS)]

    batches, encode_s = timed(encode)
    record_set = b"".join(batches)
    decoded, decode_s = timed(lambda: decode_record_set(record_set).table)
    assert decoded["key"].combine_chunks() == key, "what was read is not what was written"
    assert decoded["value"].combine_chunks() == value, "what was read is not what was written"
    assert batches[0] == encode_batch(next(row_batches(keys, values))), "the two codecs disagree"
    _speed("column codec, encode", len(keys), encode_s)
    _speed("column codec, decode", len(keys), decode_s)
    return encode_s + decode_s


def row_batches(keys: list[bytes], values: list[bytes]) -> Iterator[list[Record]]:
    from semel.protocol.rows import Record

    for first in range(0, len(keys), BATCH_RECORDS):
        numbers = range(first, min(first + BATCH_RECORDS, len(keys)))
        yield [Record(number, START_MS + number, keys[number], values[number]) for number in numbers]


def _compression(keys: list[bytes], values: list[bytes]) -> None:
    from semel.protocol.compression import Compression
    from semel.protocol.rows import encode_batch

    sample = next(row_batches(keys, values))
    plain = len(encode_batch(sample))
    print(f"\none batch of {len(sample):,} records")
    for kind in Compression:
        size_bytes = len(encode_batch(sample, compression=kind))
        print(f"  {kind.name.lower():<8}{size_bytes:>10,} bytes {size_bytes / plain:>6.0%}")


def _routing(keys: list[bytes]) -> None:
    """Where any Kafka producer would put these keys."""
    import numpy as np
    import pyarrow as pa

    from semel.protocol.partitioning import partition_for_key, partitions_for_keys

    column: pa.Array = pa.array(keys, pa.binary())
    partitions, route_s = timed(lambda: partitions_for_keys(column, PARTITIONS))
    assert partitions[0] == partition_for_key(keys[0], PARTITIONS)
    shares = " ".join(f"{share:,}" for share in np.bincount(partitions, minlength=PARTITIONS))
    print(f"\nKafka's murmur2 over the whole column of keys: records in each of {PARTITIONS} partitions: {shares}")
    _speed("murmur2", len(keys), route_s)


def timed(work: Callable[[], T]) -> tuple[T, float]:
    started = time.perf_counter()
    result = work()
    return result, time.perf_counter() - started


def _speed(what: str, records: int, duration_s: float) -> None:
    print(f"  {what:<24}{records / duration_s:>14,.0f} records/s {duration_s:>8.2f} s", flush=True)
