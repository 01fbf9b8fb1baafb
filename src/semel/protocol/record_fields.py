"""The fields of many records at once, once it is known where the records start."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from semel.protocol.batch import NO_TIMESTAMP, BatchHeader, Buffer, check_batch, read_body, read_header
from semel.protocol.errors import CorruptBatchError
from semel.protocol.record_starts import Bodies, find_record_starts
from semel.protocol.vector_varints import Int64s, VarintReader


class Fields(NamedTuple):
    """The numbers of some records. Lengths are -1 for null."""

    timestamp_deltas: Int64s
    offset_deltas: Int64s
    key_starts: Int64s
    key_lengths: Int64s
    value_starts: Int64s
    value_lengths: Int64s
    header_starts: Int64s
    header_counts: Int64s | None  # None if there are none
    ends: Int64s

    def only(self, rows: npt.NDArray[np.bool_]) -> Fields:
        return Fields(*(None if numbers is None else numbers[rows] for numbers in self))  # type: ignore[arg-type]


def read_fields(reader: VarintReader, starts: Int64s, ends: Int64s) -> Fields:
    """All fields up to the number of headers. Every step goes forward, so it is enough to check the end."""
    timestamp_deltas, offset_deltas, key_lengths, key_starts = reader.read_front(starts)
    value_lengths, value_starts = reader.read(key_starts + np.maximum(key_lengths, 0))
    if min(int(key_lengths.min()), int(value_lengths.min())) < -1:
        raise CorruptBatchError("the key or value of a record has a negative length")
    header_counts, at = _read_header_counts(reader, value_starts + np.maximum(value_lengths, 0), ends)
    return Fields(
        timestamp_deltas, offset_deltas, key_starts, key_lengths, value_starts, value_lengths, at, header_counts, ends
    )


def _read_header_counts(reader: VarintReader, at: Int64s, ends: Int64s) -> tuple[Int64s | None, Int64s]:
    """(numbers of headers or None where no record has any, positions after them)."""
    if (at == ends - 1).all() and not reader.data[at].any():
        return None, ends
    counts, at = reader.read(at)
    if int(counts.min()) < 0:
        raise CorruptBatchError("a record has a negative number of headers")
    if ((at > ends) | ((counts == 0) & (at != ends))).any():
        raise CorruptBatchError("the fields of a record do not end where the record ends")
    return counts, at


def first_at_or_after(batch: Buffer, timestamp_ms: int, start_offset: int) -> tuple[int, int] | None:
    """(timestamp, offset) of the first record of a batch, from an offset on, that has at least this timestamp."""
    header = read_header(batch)
    check_batch(batch, header)
    body = read_body(batch, header)
    if not header.record_count:
        return None
    timestamp_deltas, offset_deltas = _read_deltas(body, header)
    right = offset_deltas >= start_offset - header.base_offset
    if header.is_log_append_time:
        timestamps = np.full(len(timestamp_deltas), header.max_timestamp)
    else:
        timestamps = header.base_timestamp + timestamp_deltas
    right &= timestamps >= timestamp_ms
    if not right.any():
        return None
    row = int(right.argmax())
    return int(timestamps[row]), header.base_offset + int(offset_deltas[row])


def timestamps_outside(body: Buffer, header: BatchHeader, earliest_ms: int, latest_ms: int) -> list[tuple[int, int]]:
    """(number, timestamp) of every record of a batch that has a timestamp, but none of this range. The records were
    checked."""
    base = header.base_timestamp
    deltas, _ = _read_deltas(body, header)
    lowest, highest, none = (
        min(max(timestamp - base, -(2**63)), 2**63 - 1) for timestamp in (earliest_ms, latest_ms, NO_TIMESTAMP)
    )
    rows = np.flatnonzero(((deltas < lowest) | (deltas > highest)) & (deltas != none))
    return [(row, base + delta) for row, delta in zip(rows.tolist(), deltas[rows].tolist(), strict=True)]


def _read_deltas(body: Buffer, header: BatchHeader) -> tuple[Int64s, Int64s]:
    """The timestamp deltas and the offset deltas of a batch's records."""
    reader = VarintReader(np.frombuffer(body, np.uint8))
    numbers = (0, len(body), header.record_count, header.last_offset_delta)
    starts = find_record_starts(reader, Bodies(*(np.array([number], np.int64) for number in numbers)))
    timestamp_deltas, offset_deltas, _, _ = reader.read_front(starts)
    return timestamp_deltas, offset_deltas
