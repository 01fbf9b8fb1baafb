"""Record batches against codecs that we did not write: kafka-python's and aiokafka's, both ways, all compressions."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from semel.protocol import record_sets
from semel.protocol.columns import ColumnEncoder
from semel.protocol.compression import Compression
from semel.protocol.rows import MarkerType, Record, encode_batch, encode_marker
from tests.unit.protocol.records.samples import decode_both, random_records, table_of

OPTIONS = {"producer_id": 4000, "producer_epoch": 12, "base_sequence": 99}


def kafka_python() -> tuple[Any, Any]:
    from kafka.record.default_records import DefaultRecordBatchBuilder
    from kafka.record.memory_records import MemoryRecords

    return DefaultRecordBatchBuilder, MemoryRecords


def aiokafka() -> tuple[Any, Any]:
    from aiokafka.record.default_records import DefaultRecordBatchBuilder
    from aiokafka.record.memory_records import MemoryRecords

    return DefaultRecordBatchBuilder, MemoryRecords


foreign = pytest.mark.parametrize("codec", [kafka_python, aiokafka])
compressions = pytest.mark.parametrize("compression", list(Compression))


def sample(headers: bool = True) -> list[Record]:
    """More than one block of every compression format; records that shrink and records that do not."""
    rng = random.Random(11)
    records = random_records(rng, 1500, value_bytes=100, headers=headers)
    return [r._replace(value=b"again and again " * 20) if r.offset % 3 == 0 else r for r in records]


def build(codec: Callable[[], tuple[Any, Any]], records: list[Record], compression: int) -> bytes:
    builder_class, _ = codec()
    builder = builder_class(magic=2, compression_type=compression, is_transactional=True, batch_size=2**24, **OPTIONS)
    for record in records:
        added = builder.append(
            record.offset, record.timestamp, record.key, record.value, [(k, v) for k, v in record.headers]
        )
        assert added is not None
    return bytes(builder.build())


def read(codec: Callable[[], tuple[Any, Any]], data: bytes) -> list[Record]:
    _, records_class = codec()
    records, found = records_class(data), []
    while records.has_next():
        batch = records.next_batch()
        assert batch.validate_crc()
        found += [Record(r.offset, r.timestamp, r.key, r.value, tuple((k, v) for k, v in r.headers)) for r in batch]
    return found


@foreign
@compressions
def test_we_read_what_others_write(codec: Callable[[], tuple[Any, Any]], compression: Compression) -> None:
    records = sample()
    data = build(codec, records, compression)
    result = decode_both(data)
    assert isinstance(result, record_sets.RowSet)
    assert result.records == records
    ((_, header),) = record_sets.visible_batches(data, record_sets.Progress(0), None)
    assert header.compression == compression
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (4000, 12, 99)
    assert header.is_transactional


@foreign
@compressions
def test_others_read_what_we_write(codec: Callable[[], tuple[Any, Any]], compression: Compression) -> None:
    records = sample()
    assert read(codec, bytes(encode_batch(records, compression=compression, **OPTIONS))) == records
    encoder = ColumnEncoder(**table_of(records))
    (batch,) = encoder.encode(compression=compression, **OPTIONS)
    assert read(codec, bytes(batch.buffer)) == records
    small = encoder.encode(compression=compression, max_batch_bytes=5000, **OPTIONS)
    assert len(small) > 10
    found = read(codec, b"".join(batch.buffer for batch in small))
    assert [r[1:] for r in found] == [r[1:] for r in records]


@foreign
def test_uncompressed_bytes_are_equal(codec: Callable[[], tuple[Any, Any]]) -> None:
    records = sample()
    theirs = build(codec, records, 0)
    (ours,) = ColumnEncoder(**table_of(records)).encode(transactional=True, **OPTIONS)
    # Nobody reads a produced batch's leader epoch: we write -1, they write 0 or -1. The rest is the same.
    assert bytes(ours.buffer)[:12] + bytes(ours.buffer)[16:] == theirs[:12] + theirs[16:]


def test_kafka_python_reads_our_markers() -> None:
    for kind in MarkerType:
        marker = encode_marker(kind, offset=5, timestamp=1, producer_id=7, producer_epoch=2, coordinator_epoch=3)
        _, records_class = kafka_python()
        batch = records_class(bytes(marker)).next_batch()
        (record,) = list(batch)
        assert batch.is_control_batch
        assert batch.is_transactional
        assert (record.abort, record.commit) == (kind is MarkerType.ABORT, kind is MarkerType.COMMIT)


@pytest.mark.parametrize("size", [0, 1, 100, 70_000, 5_000_000])
def test_compressed_bytes_are_what_other_libraries_read_and_write(size: int) -> None:
    import cramjam
    import lz4.frame
    import snappy
    import zstandard

    from semel.protocol.compression import compress, decompress

    data = random.Random(size).randbytes(size // 2) + b"abc" * (size // 6)
    independent = lz4.frame.compress(data, block_linked=False, content_checksum=True, store_size=False)
    theirs = [
        (Compression.GZIP, bytes(cramjam.gzip.compress(data))),
        (Compression.SNAPPY, snappy.compress(data)),  # raw, as librdkafka writes it
        (Compression.LZ4, lz4.frame.compress(data)),
        (Compression.LZ4, independent),
        (Compression.ZSTD, zstandard.ZstdCompressor().compress(data)),
        (Compression.ZSTD, zstandard.ZstdCompressor(write_content_size=False).compress(data)),
    ]
    for kind, compressed in theirs:
        assert bytes(decompress(kind, compressed)) == data
    assert bytes(cramjam.gzip.decompress(bytes(compress(Compression.GZIP, data)))) == data
    assert lz4.frame.decompress(bytes(compress(Compression.LZ4, data))) == data
    zstd = zstandard.ZstdDecompressor().decompressobj()
    assert zstd.decompress(bytes(compress(Compression.ZSTD, data))) == data
