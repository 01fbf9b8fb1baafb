"""Whether the bytes of a batch are the records that its header counts, without making records of them.

A client's batch holds records with the offset deltas 0, 1, 2 and so on, which fill it; the fields of a record fill the
record. Four ways to check it: records of the same shape are compared with the first of them as rows of bytes
(`record_rows`); few others are read one by one, which costs less than the steps of numpy; more of them by words of
eight bytes (`check_words`); and what neither of these decides as columns (`record_fields`). `rows.decode_records` is
the plain form that this one is tested against.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from semel.protocol.batch import SMALLEST_RECORD, Buffer
from semel.protocol.errors import CorruptBatchError
from semel.protocol.varints import read_varint, write_varint

FEW_RECORDS = 12  # not worth a step of numpy
SOME_RECORDS = 192  # read one by one where nothing else decides
WORDS_FROM_RECORDS = 40  # where words of eight bytes are the cheapest way
SLICE_ROWS = 64 * 1024  # of records whose fields are read together: the numbers stay in the processor's cache


class RecordFacts(NamedTuple):
    """What is known of the records of a batch that was checked."""

    min_timestamp_delta: int  # or a lower bound of it, where `is_exact` is False
    max_timestamp_delta: int
    is_exact: bool
    keyless: Sequence[int]  # numbers of the records without a key


def facts_of(timestamp_bytes: int, max_timestamp_delta: int, keyless: Sequence[int]) -> RecordFacts:
    """By the bytes of the longest timestamp delta."""
    return RecordFacts(-1 << (7 * timestamp_bytes - 1), max_timestamp_delta, False, keyless)


def _offset_delta(number: int) -> bytes:
    out = bytearray()
    write_varint(out, number)
    return bytes(out)


_OFFSET_DELTAS = tuple(map(_offset_delta, range(SOME_RECORDS)))


_LOWEST = -(2**63)  # timestamp delta
_is_loaded = False  # numpy, and what needs it


def is_ready(record_count: int) -> bool:
    """Whether a check need not load modules first, which takes a tenth of a second."""
    return _is_loaded or record_count <= FEW_RECORDS


def check_records(body: Buffer, record_count: int, *, exact: bool = False) -> RecordFacts:
    """Raises CorruptBatchError unless the decompressed records of a client's batch are what it says. With `exact` the
    timestamp deltas are not bounds, at a higher price."""
    if record_count * SMALLEST_RECORD > len(body):
        raise CorruptBatchError(f"batch says it has {record_count} records, but its records take {len(body)} bytes")
    if exact:
        return _check_columns(body, record_count)
    if record_count > FEW_RECORDS:
        global _is_loaded
        from semel.protocol.record_rows import LONG_LIMIT, check_alike, check_words

        _is_loaded = True
        facts = check_alike(body, record_count)
        if facts is None and WORDS_FROM_RECORDS <= record_count <= LONG_LIMIT:
            facts = check_words(body, record_count)
        if facts is not None:
            return facts
        if record_count > SOME_RECORDS:
            return _check_columns(body, record_count)
    return _check_one_by_one(bytes(body), record_count)


def _check_one_by_one(body: bytes, record_count: int) -> RecordFacts:
    keyless: list[int] = []
    try:
        at, timestamp_bytes, highest = _walk(body, record_count, keyless)
    except IndexError:  # past the end: records that are wrong, or a length in a longer spelling that was taken for one
        keyless.clear()
        at, timestamp_bytes, highest = _walk_plainly(body, record_count, keyless)
    if at != len(body):
        raise CorruptBatchError(f"{len(body) - at} bytes are left after the {record_count} records of a batch")
    return facts_of(timestamp_bytes, highest, keyless)


def _walk(body: bytes, record_count: int, keyless: list[int]) -> tuple[int, int, int]:
    """(position after the records, bytes of the longest timestamp delta, the highest one). What most records are like
    is checked here; any other record is left to `_check_record`."""
    at, timestamp_bytes, highest = 0, 1, _LOWEST
    for number in range(record_count):
        start, low = at, body[at]
        if not low & 0x81:  # a length of one byte
            end, at = at + 1 + (low >> 1), at + 2
        elif not low & 1 and (high := body[at + 1]) < 0x80:  # of two
            end, at = at + 2 + ((low & 0x7F) >> 1 | high << 6), at + 3
        else:
            end = 0
        delta = _OFFSET_DELTAS[number]
        stamp = body[at]
        if end and stamp < 0x80 and body.startswith(delta, at + 1):  # a timestamp delta of one byte
            at += 1 + len(delta)
            key = body[at]
            at += 1 if key & 1 else 1 + (key >> 1)
            low = body[at]
            if not low & 0x81:
                at += 1 + (low >> 1)
            elif not low & 1 and (high := body[at + 1]) < 0x80:
                at += 2 + ((low & 0x7F) >> 1 | high << 6)
            else:
                at += 1 if low == 1 else end
            if at == end - 1 and not body[at] and key < 0x80 and (key == 1 or not key & 1):
                if key == 1:
                    keyless.append(number)
                stamp = ~(stamp >> 1) if stamp & 1 else stamp >> 1
                if stamp > highest:
                    highest = stamp
                at = end
                continue
        at, width, stamp = _check_record(body, start, number, keyless)
        timestamp_bytes = max(timestamp_bytes, width)
        highest = max(highest, stamp)
    return at, timestamp_bytes, highest


def _walk_plainly(body: bytes, record_count: int, keyless: list[int]) -> tuple[int, int, int]:
    at, timestamp_bytes, highest = 0, 1, _LOWEST
    for number in range(record_count):
        at, width, stamp = _check_record(body, at, number, keyless)
        timestamp_bytes = max(timestamp_bytes, width)
        highest = max(highest, stamp)
    return at, timestamp_bytes, highest


def _check_record(body: bytes, at: int, number: int, keyless: list[int]) -> tuple[int, int, int]:
    """(position after it, bytes of its timestamp delta, the delta) of the record at a position."""
    length, at = read_varint(body, at, len(body))
    end = at + length
    if length < SMALLEST_RECORD - 1 or end > len(body):
        raise CorruptBatchError(f"a record says it takes {length} bytes, but {len(body) - at} are left in its batch")
    timestamp_at = at + 1
    stamp, at = read_varint(body, timestamp_at, end, 64)
    width = at - timestamp_at
    offset_delta, at = read_varint(body, at, end)
    if offset_delta != number:
        raise _wrong_offset(number, offset_delta)
    key_length, at = read_varint(body, at, end)
    if key_length < 0:
        keyless.append(number)
    value_length, at = read_varint(body, at + max(key_length, 0), end)
    if key_length < -1 or value_length < -1:
        raise CorruptBatchError("the key or value of a record has a negative length")
    _check_headers(body, at + max(value_length, 0), end)
    return end, width, stamp


def _check_headers(body: bytes, at: int, end: int) -> None:
    count, at = read_varint(body, at, end)
    if not 0 <= count <= (end - at) // 2:
        raise CorruptBatchError(f"a record says it has {count} headers in the {end - at} bytes that are left")
    for _ in range(count):
        length, at = read_varint(body, at, end)
        if length < 0:
            raise CorruptBatchError("a header without a name")
        length, at = read_varint(body, at + length, end)
        if length < -1:
            raise CorruptBatchError("a header's value has a negative length")
        at += max(length, 0)
    if at != end:
        raise CorruptBatchError(f"a record ends at byte {end}, but its fields end at byte {at}")


def _check_columns(body: Buffer, record_count: int) -> RecordFacts:
    import numpy as np

    from semel.protocol.record_fields import Bodies, find_record_starts, read_fields, read_headers
    from semel.protocol.vector_varints import VarintReader

    reader = VarintReader(np.frombuffer(body, np.uint8))
    one = [np.array([number], np.int64) for number in (0, len(body), record_count, record_count - 1)]
    starts = find_record_starts(reader, Bodies(*one))
    ends = np.append(starts[1:], len(body))
    lowest, highest = [], []
    keyless: list[int] = []
    for row in range(0, record_count, SLICE_ROWS):
        rows = slice(row, row + SLICE_ROWS)
        fields = read_fields(reader, starts[rows], ends[rows])
        wrong = fields.offset_deltas != np.arange(row, row + len(fields.offset_deltas))
        if wrong.any():
            first = int(wrong.argmax())
            raise _wrong_offset(row + first, int(fields.offset_deltas[first]))
        if fields.header_counts is not None:
            read_headers(reader, fields.header_starts, fields.header_counts, fields.ends)
        lowest.append(int(fields.timestamp_deltas.min()))
        highest.append(int(fields.timestamp_deltas.max()))
        if int(fields.key_lengths.min()) < 0:
            keyless += (np.flatnonzero(fields.key_lengths < 0) + row).tolist()
    return RecordFacts(min(lowest), max(highest), True, keyless)


def _wrong_offset(number: int, delta: int) -> CorruptBatchError:
    return CorruptBatchError(f"record {number} of a batch has the offset delta {delta}, expected {number}")
