"""What a log returns and raises."""

from __future__ import annotations

import sys
from typing import Literal, NamedTuple

from semel.protocol.batch import BatchHeader
from semel.protocol.errors import CorruptBatchError, ErrorCode

Isolation = Literal["high_watermark", "last_stable", "log_end"]


class StorageError(Exception):
    """A refused or failed operation on a log. `code` is the error code of the wire protocol."""

    def __init__(self, code: ErrorCode, message: str, record_errors: tuple[tuple[int, str], ...] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.record_errors = record_errors  # (index of the record in its batch, what is wrong with it)


class DataDirLockedError(Exception):
    """Another process (or another broker in this one) uses the data folder."""


class AppendResult(NamedTuple):
    """Where a batch was appended. Under fsync=commit it is visible and durable once `high_watermark > last_offset`."""

    base_offset: int
    last_offset: int
    append_time_ms: int  # -1 unless the topic uses LogAppendTime (for a duplicate: as Kafka, the batch's timestamp)
    duplicate: bool  # the batch was already there; offsets are those of the first time
    log_start_offset: int


class ReadResult(NamedTuple):
    """Whole batches, from the one that holds the requested offset; empty where nothing may be read yet."""

    records: bytes | memoryview
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    aborted: list[tuple[int, int]] | None  # (producer id, first offset); only for up_to="last_stable"
    has_more: bool = False  # that may be read: behind these batches, in the next segment, or too large for what is left


class TimestampOffset(NamedTuple):
    timestamp_ms: int
    offset: int
    leader_epoch: int


_FEW_RECORDS = 1_000
_FEW_BYTES = 16 << 10
_RECORD_FINDER = "semel.protocol.record_fields"


class TimedBatch(NamedTuple):
    """A batch that may hold the first record, from an offset on, with at least a timestamp. It is a copy: any thread
    may decode it."""

    batch: bytes
    header: BatchHeader
    timestamp_ms: int
    start_offset: int

    @property
    def is_large(self) -> bool:
        """Whether it takes long to find the record. That of the first one does: it loads NumPy."""
        is_first = _RECORD_FINDER not in sys.modules
        return is_first or self.header.record_count > _FEW_RECORDS or len(self.batch) > _FEW_BYTES

    def first_record(self) -> TimestampOffset | None:
        from semel.protocol.record_fields import first_at_or_after

        try:
            found = first_at_or_after(self.batch, self.timestamp_ms, self.start_offset)
        except CorruptBatchError as error:
            raise StorageError(ErrorCode.CORRUPT_MESSAGE, str(error)) from error
        return None if found is None else TimestampOffset(*found, self.header.leader_epoch)
