"""What a batch must be like before it is appended.

A client's batch: the header is checked in one quick expression, and only if that fails in Kafka's order, for the error.
Then the records are checked: `inspect` touches nothing but the batch, so that a thread can do it for large ones.

Batches of the broker's own coordinators must be whole and not above max.message.bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from semel.protocol import compression, record_check
from semel.protocol.batch import (
    COMPRESSION_MASK,
    CONTROL_BIT,
    CRC_START,
    HEADER,
    HEADER_SIZE,
    LOG_OVERHEAD,
    MAGIC,
    TIMESTAMP_TYPE_BIT,
    BatchHeader,
    Buffer,
    iter_headers,
    patch_max_timestamp,
    read_body,
    read_header,
)
from semel.protocol.crc import crc32c
from semel.protocol.errors import CorruptBatchError, DecodeError, ErrorCode, TooLargeError
from semel.protocol.record_check import RecordFacts, check_records
from semel.storage.config import LogConfig
from semel.storage.results import StorageError

COMPRESSION_MAX = 4  # none, gzip, snappy, lz4, zstd
PLAIN_ATTRIBUTES = 0x07 | 0x10  # a client may set the compression and the transactional bit
LIGHT_COMPRESSED_BYTES = 64 << 10  # of a batch that is decompressed, and perhaps compressed again, on the event loop
LIGHT_DECOMPRESSED_BYTES = 1 << 20
LIGHT_PLAIN_BYTES = 4 << 20
INT64_MAX = 2**63 - 1
MOST_DECOMPRESSED_BYTES = 256 << 20  # more in one batch is a bomb
MOST_RECORD_ERRORS = 1000  # that a response lists
_NOT_PLAIN = ~PLAIN_ATTRIBUTES
_unpack_header = HEADER.unpack_from


def refuse(code: ErrorCode, message: str) -> NoReturn:
    raise StorageError(code, message)


def refuse_size(size_bytes: int, config: LogConfig) -> NoReturn:
    refuse(
        ErrorCode.MESSAGE_TOO_LARGE,
        f"the batch takes {size_bytes} bytes, but max.message.bytes of the topic is {config.max_message_bytes}",
    )


def check_client_batch(
    data: memoryview, config: LogConfig, now_ms: int, inspection: Inspection | None, light_only: bool
) -> tuple[memoryview, tuple[int, ...]]:
    """The batch as it is to be stored, and the fields of its header. StorageError: it is refused. With `light_only`,
    HeavyBatch where a thread should `inspect` the records first, whose `inspection` is then given here."""
    size = len(data)
    if size < HEADER_SIZE:
        _explain(data, config)
    fields = _unpack_header(data)
    base, length, _, magic, crc, attributes, last_delta, base_timestamp, _ = fields[:9]
    producer_id, _, sequence, count = fields[9:]
    if (
        length + LOG_OVERHEAD != size
        or magic != MAGIC
        or base
        or size > config.max_message_bytes
        or count < 1
        or last_delta + 1 != count
        or attributes & _NOT_PLAIN
        or attributes & 7 > COMPRESSION_MAX
        or (sequence < 0 <= producer_id)
        or crc32c(data[CRC_START:]) != crc
    ):
        _explain(data, config)
    if inspection is None and not attributes & 7 and config.compression_type == "producer":
        if light_only and (size > LIGHT_PLAIN_BYTES or not record_check.is_ready(count)):
            raise HeavyBatch
        facts = _check_plain(data, count)
    else:
        facts, stored = inspection or inspect(data, attributes, count, config, light_only=light_only)
        if stored is not data:
            data, fields = stored, _unpack_header(stored)
    _check_facts(facts, data, base_timestamp, config, now_ms)
    if not config.log_append_time and base_timestamp + facts.max_timestamp_delta != fields[8]:
        # Some clients write the last record's. Searches by time and retention rely on it, and Kafka corrects it, too.
        patch_max_timestamp(data, base_timestamp + facts.max_timestamp_delta)
        fields = _unpack_header(data)
    return data, fields


def check_coordinator_batches(data: memoryview, config: LogConfig) -> list[tuple[int, BatchHeader]]:
    """Position and header of every batch. StorageError unless they are whole and not above max.message.bytes."""
    try:
        first = read_header(data)
        headers = [(0, first)] if first.size == len(data) else list(iter_headers(data))
    except CorruptBatchError as error:
        raise StorageError(error.code, str(error)) from error
    if not headers or headers[-1][0] + headers[-1][1].size != len(data):
        refuse(ErrorCode.CORRUPT_MESSAGE, f"{len(data)} bytes are not a sequence of whole batches")
    for _, header in headers:
        if header.size > config.max_message_bytes:
            refuse_size(header.size, config)
    return headers


def _explain(data: memoryview, config: LogConfig) -> None:
    """Raises for the first thing that is wrong with the header of what should be exactly one batch of a client."""
    header = _check_shape(data)
    if header.size > config.max_message_bytes:
        refuse_size(header.size, config)
    if crc32c(data[CRC_START : header.size]) != header.crc:
        refuse(ErrorCode.CORRUPT_MESSAGE, f"the batch does not have the CRC {header.crc:#010x} that its header says")
    _check_counts(header)
    _check_attributes(header)
    if header.has_producer_id and header.base_sequence < 0:
        refuse(
            ErrorCode.INVALID_RECORD,
            f"Invalid sequence number {header.base_sequence} in record batch with producerId {header.producer_id}",
        )


def _latest_timestamp(config: LogConfig, now_ms: int) -> int:
    return min(now_ms + config.message_timestamp_after_max_ms, INT64_MAX)


class HeavyBatch(Exception):
    """Checking the records of this batch would block the event loop for long: a thread should `inspect` it."""


class Inspection(NamedTuple):
    """What is known of a batch whose records were looked at."""

    facts: RecordFacts
    batch: memoryview  # as it is to be stored: the client's, or one in the topic's compression


def target_compression(config: LogConfig) -> int:
    """The compression of a topic that has one of its own."""
    kind = config.compression_type
    return 0 if kind == "uncompressed" else compression.Compression.parse(kind)


def is_light(data: memoryview, source: int, target: int, record_count: int) -> bool:
    """Whether a batch may be looked at on the event loop, as far as that can be said before it is opened."""
    most_bytes = LIGHT_COMPRESSED_BYTES if source or target else LIGHT_PLAIN_BYTES
    is_ready = compression.is_ready(source) and compression.is_ready(target) and record_check.is_ready(record_count)
    return is_ready and len(data) <= most_bytes


def _check_plain(data: memoryview, record_count: int) -> RecordFacts:
    """Looks at the records of a batch that is not compressed and whose header is right."""
    try:
        return check_records(data[HEADER_SIZE:], record_count)
    except CorruptBatchError as error:  # invalid, not corrupt, as in Kafka: the CRC says that they arrived as sent
        raise StorageError(ErrorCode.INVALID_RECORD, str(error)) from error


def inspect(
    data: memoryview, attributes: int, record_count: int, config: LogConfig, *, light_only: bool = False
) -> Inspection:
    """Looks at the records of a batch whose header is right. StorageError: they are not what the header says.
    With `light_only`, HeavyBatch where looking would take longer than a few milliseconds."""
    source = attributes & COMPRESSION_MASK
    target = source if config.compression_type == "producer" else target_compression(config)
    if light_only and not is_light(data, source, target, record_count):
        raise HeavyBatch
    try:
        body: Buffer = data[HEADER_SIZE:]
        if source:
            body = compression.decompress(
                source, body, LIGHT_DECOMPRESSED_BYTES if light_only else MOST_DECOMPRESSED_BYTES
            )
        facts = check_records(body, record_count)
        return Inspection(facts, data if target == source else _recompressed(data, body, target, config))
    except TooLargeError as error:
        if light_only:
            raise HeavyBatch from None
        raise StorageError(error.code, str(error)) from error
    except CorruptBatchError as error:
        raise StorageError(ErrorCode.INVALID_RECORD, str(error)) from error
    except DecodeError as error:
        raise StorageError(getattr(error, "code", ErrorCode.CORRUPT_MESSAGE), str(error)) from error


def _recompressed(data: memoryview, body: Buffer, target: int, config: LogConfig) -> memoryview:
    """The batch with its records in another compression."""
    from semel.protocol.rows import seal_batch

    level = {1: config.compression_gzip_level, 4: config.compression_zstd_level}.get(target)
    header = BatchHeader._make(HEADER.unpack_from(data))
    attributes = (header.attributes & ~COMPRESSION_MASK) | target
    return memoryview(seal_batch(header._replace(attributes=attributes), body, target, level))


def _check_facts(facts: RecordFacts, batch: memoryview, base_timestamp: int, config: LogConfig, now_ms: int) -> None:
    """What the topic's settings ask of records, and of the batch as it is stored."""
    if len(batch) > config.max_message_bytes:  # it grew when it was compressed again
        refuse_size(len(batch), config)
    keyless = facts.keyless if config.compact else ()
    outside: list[tuple[int, str]] = []
    earliest, latest = now_ms - config.message_timestamp_before_max_ms, _latest_timestamp(config, now_ms)
    if not config.log_append_time and not (
        base_timestamp + facts.max_timestamp_delta <= latest and earliest <= base_timestamp + facts.min_timestamp_delta
    ):
        outside = _timestamps_outside(batch, earliest, latest)
    if keyless or outside:
        _refuse_records(keyless, outside)


def _timestamps_outside(batch: memoryview, earliest_ms: int, latest_ms: int) -> list[tuple[int, str]]:
    """Record by record: facts may be bounds, and a record without a timestamp hides how old the others are."""
    from semel.protocol.record_fields import timestamps_outside

    header = BatchHeader._make(HEADER.unpack_from(batch))
    body = read_body(batch, header, limit_bytes=2 * MOST_DECOMPRESSED_BYTES)
    return [
        (
            number,
            f"Timestamp {timestamp} of message with offset {number} is out of range. The timestamp should be within "
            f"[{earliest_ms}, {latest_ms}]",
        )
        for number, timestamp in timestamps_outside(body, header, earliest_ms, latest_ms)
    ]


PARTITION_NAME = "{partition}"  # in the errors of records: who knows the name of the partition puts it there


def _refuse_records(keyless: Sequence[int], outside: Sequence[tuple[int, str]]) -> NoReturn:
    """One error for each record, as in Kafka: that of its timestamp counts where it has a key or needs none."""
    message = f"Compacted topic cannot accept message without key in topic partition {PARTITION_NAME}"
    errors = dict(outside) | dict.fromkeys(keyless, message)
    named = tuple(sorted(errors.items())[:MOST_RECORD_ERRORS])
    if len(errors) > len(keyless):
        message = "One or more records have been rejected due to invalid timestamp"
        raise StorageError(ErrorCode.INVALID_TIMESTAMP, message, named)
    raise StorageError(
        ErrorCode.INVALID_RECORD,
        f"One or more records have been rejected due to {len(keyless)} record errors in total: "
        "a compacted topic does not accept records without key",
        named,
    )


def _check_shape(data: memoryview) -> BatchHeader:
    """That there is exactly one whole batch of the right format."""
    if len(data) < HEADER_SIZE:
        if len(data) > 16 and data[16] < MAGIC:
            refuse(ErrorCode.INVALID_RECORD, f"message format {data[16]} is not supported, expected {MAGIC}")
        refuse(ErrorCode.CORRUPT_MESSAGE, f"{len(data)} bytes are too few for a record batch")
    header = BatchHeader._make(HEADER.unpack_from(data))
    if header.magic != MAGIC:
        code = ErrorCode.INVALID_RECORD if 0 <= header.magic < MAGIC else ErrorCode.CORRUPT_MESSAGE
        refuse(code, f"the batch has magic {header.magic}, only {MAGIC} is allowed")
    if header.length < HEADER_SIZE - LOG_OVERHEAD or header.size > len(data):
        refuse(ErrorCode.CORRUPT_MESSAGE, f"the batch says {header.size} bytes, but there are {len(data)}")
    if header.size < len(data):
        refuse(ErrorCode.INVALID_RECORD, "a produce request must carry exactly one record batch per partition")
    if header.base_offset != 0:
        refuse(
            ErrorCode.INVALID_RECORD,
            f"the base offset of a batch from a client should be 0, but it is {header.base_offset}",
        )
    return header


def _check_counts(header: BatchHeader) -> None:
    if header.last_offset_delta < 0 or header.record_count <= 0:
        refuse(
            ErrorCode.INVALID_RECORD,
            f"Invalid reported count for record batch: {header.record_count}, "
            f"last offset delta {header.last_offset_delta}",
        )
    if header.last_offset_delta + 1 != header.record_count:
        refuse(
            ErrorCode.INVALID_RECORD,
            f"Inconsistent batch offset range [0, {header.last_offset_delta}] and count of records "
            f"{header.record_count}",
        )


def _check_attributes(header: BatchHeader) -> None:
    if header.compression > COMPRESSION_MAX:
        refuse(ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, f"unknown compression type {header.compression}")
    if header.attributes & CONTROL_BIT:
        refuse(ErrorCode.INVALID_RECORD, "Clients are not allowed to write control records")
    if header.attributes & TIMESTAMP_TYPE_BIT:
        refuse(
            ErrorCode.INVALID_TIMESTAMP,
            "Invalid timestamp type in message. Producer should not set timestamp type to LogAppendTime.",
        )
    if header.attributes & ~PLAIN_ATTRIBUTES:
        refuse(ErrorCode.INVALID_RECORD, f"unknown attributes {header.attributes & 0xFFFF:#06x}")
