"""The row codec and the columnar codec: the same bytes from the same records, the same records from the same bytes."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from semel.protocol import record_sets
from semel.protocol.batch import seal_crc
from semel.protocol.columns import ColumnEncoder
from semel.protocol.errors import CorruptBatchError, DecodeError, EncodeError
from semel.protocol.rows import Record, TimestampType, decode_batch, encode_batch
from tests.unit.protocol.records.samples import (
    NOW,
    decode_both,
    random_records,
    record_lists,
    table_of,
    timestamps,
)

common = settings(max_examples=150, deadline=None)


def renumbered(records: list[Record]) -> list[Record]:
    return [record._replace(offset=offset) for offset, record in enumerate(records)]


def encode_rows(records: list[Record], **options: object) -> bytes | EncodeError:
    try:
        return bytes(encode_batch(renumbered(records), base_offset=0, **options))
    except EncodeError as error:
        return error


@common
@given(
    record_lists(gaps=False),
    st.none() | timestamps,
    st.integers(0, 4),
    st.booleans(),
    st.sampled_from([pa.binary(), pa.large_binary(), pa.binary_view()]),
)
def test_same_records_give_the_same_bytes(
    records: list[Record], base_timestamp: int | None, compression: int, transactional: bool, kind: pa.DataType
) -> None:
    options = {
        "producer_id": 77,
        "producer_epoch": 3,
        "base_sequence": 2**31 - 2,
        "base_timestamp": base_timestamp,
        "compression": compression,
        "transactional": transactional,
    }
    expected = encode_rows(records, **options)
    try:
        encoder = ColumnEncoder(**table_of(records, key=kind, value=kind))
        (batch,) = encoder.encode(max_batch_bytes=2**30, **options)
    except EncodeError:
        assert isinstance(expected, EncodeError)
        return
    assert batch.record_count == len(records)
    assert bytes(batch.buffer) == expected


@common
@given(
    st.lists(record_lists(max_size=12), min_size=1, max_size=4),
    st.integers(0, 4),
    st.sampled_from(list(TimestampType)),
    st.integers(0, 60),
    st.integers(0, 40),
)
def test_same_bytes_give_the_same_records(
    batches: list[list[Record]], compression: int, timestamp_type: TimestampType, cut: int, skip: int
) -> None:
    data, offset, expected = b"", 0, []
    for records in batches:
        moved = [record._replace(offset=record.offset - records[0].offset + offset) for record in records]
        try:
            data += encode_batch(moved, compression=compression, timestamp_type=timestamp_type)
        except EncodeError:
            return  # timestamps that are too far apart for one batch
        offset = moved[-1].offset + 1
        expected += moved
    result = decode_both(data, start_offset=skip)
    assert isinstance(result, record_sets.RowSet)
    if timestamp_type is TimestampType.CREATE_TIME:
        assert result.records == [record for record in expected if record.offset >= skip]
    assert result.next_offset == max(offset, skip)
    decode_both(data[: len(data) - cut], start_offset=skip)


@common
@given(st.binary(max_size=400))
@example(b"")
def test_any_body_is_accepted_by_both_or_refused_by_both(body: bytes) -> None:
    """Behind a header that is right in itself, so that the records are what is judged."""
    for count in (0, 1, 2, 7):
        decode_both(batch_around(body, count))


@common
@given(record_lists(max_size=6), st.data())
def test_a_changed_byte_under_a_right_crc_is_judged_alike(records: list[Record], data: st.DataObject) -> None:
    try:
        batch = encode_batch(records)
    except EncodeError:
        return
    for _ in range(data.draw(st.integers(1, 3))):
        batch[data.draw(st.integers(61, len(batch) - 1))] = data.draw(st.integers(0, 255))
    seal_crc(batch)
    decode_both(bytes(batch))


def batch_around(body: bytes, count: int, last_offset_delta: int | None = None) -> bytes:
    batch = encode_batch([], base_offset=5)
    batch[8:12] = (49 + len(body)).to_bytes(4, "big")
    batch[23:27] = (max(count - 1, 0) if last_offset_delta is None else last_offset_delta).to_bytes(4, "big")
    batch[57:61] = count.to_bytes(4, "big")
    batch += body
    seal_crc(batch)
    return bytes(batch)


# length, attributes, timestamp, offset, key, value, headers
GOOD = bytes([2 * 6, 0, 0, 0, 1, 1, 0])

HOSTILE = {
    "empty body": b"",
    "length of zero": b"\0" * 7,
    "negative length": bytes([1, 0, 0, 0, 1, 1, 0]),
    "length past the batch": bytes([2 * 7, 0, 0, 0, 1, 1, 0]),
    "length that ends early": bytes([2 * 5, 0, 0, 0, 1, 1, 0]),
    "length of six bytes": b"\x8c\x80\x80\x80\x80\x00" + GOOD[1:],
    "length of 2^31-1": b"\xfe\xff\xff\xff\x0f" + GOOD[1:],
    "length of -2^31": b"\xff\xff\xff\xff\x0f" + GOOD[1:],
    "length of more than 32 bits": b"\xfe\xff\xff\xff\x1f" + GOOD[1:],
    "varint without an end": b"\xff" * 7,
    "timestamp of eleven bytes": bytes([2 * 16]) + b"\0" + b"\x80" * 10 + b"\0" + GOOD[3:],
    "timestamp of more than 64 bits": bytes([2 * 15]) + b"\0" + b"\xff" * 9 + b"\x02" + GOOD[3:],
    "key length of -2": bytes([2 * 6, 0, 0, 0, 3, 1, 0]),
    "value length of -2": bytes([2 * 6, 0, 0, 0, 1, 3, 0]),
    "key over the value": bytes([2 * 6, 0, 0, 0, 4, 1, 0]),
    "negative number of headers": bytes([2 * 6, 0, 0, 0, 1, 1, 1]),
    "headers that are not there": bytes([2 * 6, 0, 0, 0, 1, 1, 2]),
    "a billion headers": bytes([2 * 10, 0, 0, 0, 1, 1]) + b"\x80\xa8\xd6\xb9\x07",
    "a header without a name": bytes([2 * 8, 0, 0, 0, 1, 1, 2, 1, 1]),
    "offset before its batch": bytes([2 * 6, 0, 0, 1, 1, 1, 0]),
    "offset after its batch": bytes([2 * 6, 0, 0, 2, 1, 1, 0]),
    "bytes after the last record": GOOD + b"\0",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_record_is_refused(name: str) -> None:
    assert isinstance(decode_both(batch_around(GOOD, 1)), record_sets.RowSet)
    assert isinstance(decode_both(batch_around(HOSTILE[name], 1)), DecodeError)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_record_among_many_good_ones_is_refused(name: str) -> None:
    """As above, deep in a batch that is long enough for the fast path's lanes."""
    many = [record_bytes(offset) for offset in range(4000)]
    assert isinstance(decode_both(batch_around(b"".join(many), 4000)), record_sets.RowSet)
    hostile = HOSTILE[name]
    many[2500] = b"" if hostile == GOOD + b"\0" else hostile
    assert isinstance(decode_both(batch_around(b"".join(many), 4000)), DecodeError)


def record_bytes(offset: int) -> bytes:
    return bytes(encode_batch([Record(offset, NOW, b"key", b"value")], base_offset=0)[61:])


def test_longer_spellings_of_small_numbers_are_read() -> None:
    fine = b"\0" + b"\x80\x80\0" + b"\x80\0" + b"\x81\0" + b"\x81\0" + b"\x80\0"
    fine = bytes([0x80 | 2 * len(fine), 0]) + fine
    result = decode_both(batch_around(fine, 1))
    assert isinstance(result, record_sets.RowSet)
    assert result.records == [Record(5, -1, None, None)]


def test_offsets_that_do_not_rise_are_refused() -> None:
    twice = GOOD + GOOD
    assert isinstance(decode_both(batch_around(twice, 2, last_offset_delta=5)), DecodeError)


def test_batches_are_split_by_size_and_by_count() -> None:
    records = random_records(random.Random(1), 5000, headers=True)
    encoder = ColumnEncoder(**table_of(records))
    for options in ({"max_batch_bytes": 4096}, {"max_batch_records": 17}, {"max_batch_bytes": 100}):
        batches = encoder.encode(base_sequence=2**31 - 1000, producer_id=1, producer_epoch=0, **options)
        decoded = [decode_batch(batch.buffer) for batch in batches]
        assert [r[1:] for d in decoded for r in d.records] == [r[1:] for r in records]
        sequence = 2**31 - 1000
        for batch, one in zip(batches, decoded, strict=True):
            assert batch.base_sequence == one.header.base_sequence == sequence
            assert batch.record_count == one.header.record_count
            sequence = (sequence + batch.record_count) % 2**31
            assert len(batch.buffer) <= options.get("max_batch_bytes", 2**30) or batch.record_count == 1
            assert batch.record_count <= options.get("max_batch_records", 2**30)


def test_rows_are_chosen_by_index_slice_and_group() -> None:
    records = random_records(random.Random(2), 3000, headers=True)
    encoder = ColumnEncoder(**table_of(records))
    rng = np.random.default_rng(3)
    order = rng.permutation(3000)

    def read(batches: list) -> list:
        return [record[1:] for batch in batches for record in decode_batch(batch.buffer).records]

    assert read(encoder.encode(order)) == [records[i][1:] for i in order]
    assert read(encoder.encode(slice(100, 200))) == [r[1:] for r in records[100:200]]
    assert read(encoder.encode(slice(None, None, 7))) == [r[1:] for r in records[::7]]
    assert encoder.encode(np.array([], np.int64)) == []
    groups = encoder.encode_groups(order, [1000, 0, 1999, 1], [0, 5, 10, 2**31 - 1], max_batch_bytes=9000)
    assert [sum(b.record_count for b in group) for group in groups] == [1000, 0, 1999, 1]
    assert [group[0].base_sequence for group in groups if group] == [0, 10, 2**31 - 1]
    assert [r for group in groups for r in read(group)] == [records[i][1:] for i in order]


def test_columns_may_be_sliced_chunked_and_of_many_types() -> None:
    texts = [None if i % 7 == 0 else "é" * (i % 20) for i in range(500)]
    stamps = pa.array([NOW * 1000 + i * 999 for i in range(500)], pa.timestamp("us", "UTC"))
    expected = [(NOW * 1000 + i * 999) // 1000 for i in range(500)]
    for kind in (pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())):
        column = pa.array(texts, pa.string()).cast(kind)
        chunked = pa.chunked_array([column.slice(10, 90), column.slice(100, 0), column.slice(100)])
        for value, times in ((column.slice(10), stamps.slice(10)), (chunked, stamps.slice(10))):
            (batch,) = ColumnEncoder(value, key=value, timestamp=times).encode()
            records = decode_batch(batch.buffer).records
            assert [r.value for r in records] == [None if t is None else t.encode() for t in texts[10:]]
            assert [r.key for r in records] == [r.value for r in records]
            assert [r.timestamp for r in records] == expected[10:]


def test_negative_times_in_microseconds_round_down() -> None:
    (batch,) = ColumnEncoder(pa.array([b"x"]), timestamp=pa.array([-1500], pa.timestamp("us"))).encode()
    assert decode_batch(batch.buffer).records[0].timestamp == -2


def test_mark_in_the_base_timestamp_keeps_record_times_exact() -> None:
    records = random_records(random.Random(4), 200)
    batches = ColumnEncoder(**table_of(records)).encode(base_timestamp=42, max_batch_records=50)
    decoded = [decode_batch(batch.buffer) for batch in batches]
    assert [d.header.base_timestamp for d in decoded] == [42] * 4
    assert [r.timestamp for d in decoded for r in d.records] == [r.timestamp for r in records]


@pytest.mark.parametrize(
    "columns",
    [
        {"value": pa.array([b"a"]), "key": pa.array([b"a", b"b"])},
        {"value": pa.array([1, 2])},
        {"value": pa.array([b"a"]), "timestamp": pa.array([None], pa.int64())},
        {"value": pa.array([b"a"]), "headers": pa.array([[{"key": None, "value": b""}]])},
        {"value": pa.array([b"a"]), "timestamp": pa.array(["soon"])},
        {"value": pa.array([b"a"]), "headers": pa.array([b"h"])},
    ],
)
def test_columns_that_cannot_be_records_are_refused(columns: dict) -> None:
    with pytest.raises(EncodeError):
        ColumnEncoder(**columns).encode()


def test_a_header_name_that_is_not_utf8_is_read_with_a_replacement() -> None:
    body = bytes([2 * 12, 0, 0, 0, 1, 1, 2, 4, 0xFF, 0x41, 4, 1, 2])
    result = decode_both(batch_around(body, 1))
    assert isinstance(result, record_sets.RowSet)
    assert result.records[0].headers == (("\ufffdA", b"\x01\x02"),)


def test_payload_that_looks_like_records_is_read_right() -> None:
    """The fast path cuts long batches at places that look like records; values made of records mislead it."""
    inner = bytes(encode_batch([Record(i, NOW, b"k", b"v" * 30) for i in range(50)])[61:])
    records = [Record(i, NOW + i, None, inner) for i in range(3000)]
    result = decode_both(bytes(encode_batch(records)))
    assert isinstance(result, record_sets.RowSet)
    assert result.records == records


def test_payload_of_zeros_is_read_right() -> None:
    records = [Record(i, NOW, bytes(i % 9), bytes(i % 300)) for i in range(5000)]
    result = decode_both(bytes(encode_batch(records)))
    assert isinstance(result, record_sets.RowSet)
    assert result.records == records


def test_wrong_crc_is_refused_with_both_values() -> None:
    batch = encode_batch([Record(0, NOW, b"k", b"v")])
    batch[-1] ^= 1
    with pytest.raises(CorruptBatchError, match=r"CRC 0x[0-9a-f]{8}, its header says 0x[0-9a-f]{8}"):
        decode_batch(batch)
    assert isinstance(decode_both(bytes(batch)), DecodeError)


def test_fields_of_every_width_stand_beside_each_other() -> None:
    """Length, timestamp, offset and key length are mostly read from one word, which they fit or do not fit."""
    deltas_ms = (0, -64, 64, -8193, 8192, 2**20, 2**27, 2**40)
    sizes = (None, 0, 63, 64, 8191, 8192)
    records = []
    for region in (0, 64, 8192, 2**20, 2**27):
        for number, (delta_ms, size, value) in enumerate(itertools.product(deltas_ms, sizes, (None, b"v" * 5000))):
            key = None if size is None else bytes([1 + number % 255]) * size
            records.append(Record(region + number, NOW + delta_ms, key, value))
    records.sort(key=lambda record: record.offset)
    unique = [r for r, after in itertools.pairwise([*records, None]) if after is None or r.offset != after.offset]
    result = decode_both(bytes(encode_batch(unique, base_timestamp=NOW)))
    assert isinstance(result, record_sets.RowSet)
    assert result.records == unique
    assert len(unique) > 400


def test_a_second_batch_may_not_begin_before_its_offset() -> None:
    good = encode_batch([Record(number, NOW, None, b"v") for number in range(3)])
    bad = encode_batch([Record(3, NOW, None, b"v")])
    assert bad[61 + 3] == 0  # the offset of its record
    bad[61 + 3] = 1  # -1
    seal_crc(bad)
    assert isinstance(decode_both(bytes(good + bad)), DecodeError)
