"""Why a client's batch is refused, in Kafka's order. Runs only for batches that failed the one quick check."""

from __future__ import annotations

from typing import NoReturn

from crc32c import crc32c

from semel.protocol.batch import (
    CONTROL_BIT,
    CRC_START,
    HEADER_SIZE,
    LOG_OVERHEAD,
    MAGIC,
    NO_TIMESTAMP,
    TIMESTAMP_TYPE_BIT,
    BatchHeader,
)
from semel.protocol.errors import DecodeError, ErrorCode
from semel.storage.config import INT64_MAX, LogConfig
from semel.storage.errors import StorageError

COMPRESSION_MAX = 4  # none, gzip, snappy, lz4, zstd
PLAIN_ATTRIBUTES = 0x07 | 0x10  # a client may set the compression and the transactional bit


def refuse(code: ErrorCode, message: str) -> NoReturn:
    raise StorageError(code, message)


def refuse_size(size_bytes: int, config: LogConfig) -> NoReturn:
    refuse(
        ErrorCode.MESSAGE_TOO_LARGE,
        f"the batch takes {size_bytes} bytes, but max.message.bytes of the topic is {config.max_message_bytes}",
    )


def check_client_batch(data: memoryview, config: LogConfig, now_ms: int) -> None:
    """Raises for the first thing that is wrong with what should be exactly one batch of a client."""
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
    if not config.log_append_time:
        check_timestamp(header.max_timestamp, config, now_ms)


def check_timestamp(timestamp_ms: int, config: LogConfig, now_ms: int) -> None:
    if timestamp_ms == NO_TIMESTAMP:
        return
    earliest, latest = now_ms - config.message_timestamp_before_max_ms, now_ms + config.message_timestamp_after_max_ms
    if not earliest <= timestamp_ms <= latest:
        refuse(
            ErrorCode.INVALID_TIMESTAMP,
            f"Timestamp {timestamp_ms} of message is out of range: it should be within [{earliest}, {latest}] "
            "(message.timestamp.before.max.ms and message.timestamp.after.max.ms)",
        )


def needs_a_look_inside(config: LogConfig) -> bool:
    """Whether keys or single timestamps matter: compacted topics, and those with a limit to the past."""
    return config.compact or (config.message_timestamp_before_max_ms != INT64_MAX and not config.log_append_time)


def check_records(data: memoryview, config: LogConfig, now_ms: int) -> None:
    """Record by record: a compacted topic needs keys; every timestamp counts where the past is limited."""
    from semel.protocol.rows import decode_batch

    try:
        records = decode_batch(data).records
    except DecodeError as error:  # most of them know their code
        raise StorageError(getattr(error, "code", ErrorCode.CORRUPT_MESSAGE), str(error)) from error
    if config.compact:
        keyless = tuple(
            (number, "Compacted topic cannot accept message without key")
            for number, record in enumerate(records)
            if record.key is None
        )
        if keyless:
            raise StorageError(
                ErrorCode.INVALID_RECORD,
                f"One or more records have been rejected due to {len(keyless)} record errors in total: "
                "a compacted topic does not take records without key",
                keyless,
            )
    if not config.log_append_time:
        for record in records:
            check_timestamp(record.timestamp, config, now_ms)


def _check_shape(data: memoryview) -> BatchHeader:
    """That there is exactly one whole batch of the right format."""
    from semel.protocol.batch import HEADER

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
