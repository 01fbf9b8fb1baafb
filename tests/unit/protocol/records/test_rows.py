"""The row codec against the specification."""

from __future__ import annotations

import pytest

from semel.protocol.batch import HEADER_SIZE, TRANSACTIONAL_BIT, patch_log_append_time, patch_offset, read_header
from semel.protocol.errors import CorruptBatchError, DecodeError, EncodeError
from semel.protocol.rows import (
    Marker,
    MarkerType,
    Record,
    TimestampType,
    decode_batch,
    decode_marker,
    encode_batch,
    encode_marker,
    encode_single,
    records_from,
)
from semel.protocol.varints import read_varint, write_varint
from tests.support.batches import decode_batches


@pytest.mark.parametrize("compression", [0, 1])
def test_records_from_an_offset_on_are_those_of_the_whole_batch(compression: int) -> None:
    records = [Record(100 + 2 * number, 5, b"k", b"%d" % number, (("h", b"v"),)) for number in range(50)]
    data = encode_batch(records, compression=compression)
    whole = decode_batch(data).records
    for offset in (0, 100, 101, 150, 198, 199):
        assert list(records_from(data, 0, offset)) == [record for record in whole if record.offset >= offset]
    some = records_from(data, 0, 120)
    assert next(some).offset == 120
    data[-1] ^= 1
    with pytest.raises(CorruptBatchError):
        next(records_from(data, 0, 0))


def test_bytes_of_a_batch_are_those_of_the_specification() -> None:
    records = [
        Record(7, 1000, b"k", b"vv", (("h", b"x"), ("n", None))),
        Record(9, 998, None, None),
    ]
    batch = encode_batch(records, producer_id=5, producer_epoch=6, base_sequence=8, leader_epoch=3, transactional=True)
    expected = (
        "0000000000000007"  # base offset
        "00000049"  # length: 85 - 12
        "00000003"  # leader epoch
        "02"  # magic
        "{crc}"
        "0010"  # transactional
        "00000002"  # last offset delta
        "00000000000003e8"  # base timestamp
        "00000000000003e8"  # max timestamp
        "0000000000000005"  # producer id
        "0006"  # producer epoch
        "00000008"  # base sequence
        "00000002"  # records
        "20"
        "00"
        "00"
        "00"
        "02"
        "6b"
        "04"
        "7676"
        "04"
        "02"
        "68"
        "02"
        "78"
        "02"
        "6e"
        "01"
        "0c"
        "00"
        "03"
        "04"
        "01"
        "01"
        "00"
    )
    assert bytes(batch).hex() == expected.format(crc=bytes(batch[17:21]).hex())
    assert decode_batch(batch).records == records


@pytest.mark.parametrize("value", [0, -1, 1, 63, 64, -64, -65, 8191, 8192, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63)])
def test_varints_round_trip_at_every_width(value: int) -> None:
    out = bytearray()
    write_varint(out, value)
    assert read_varint(bytes(out), 0, len(out), bits=64) == (value, len(out))
    if abs(value) > 2**31:
        with pytest.raises(CorruptBatchError):
            read_varint(bytes(out), 0, len(out))


def test_compacted_batch_keeps_its_offsets() -> None:
    batch = encode_batch([Record(12, 5, b"k", b"v")], base_offset=10, last_offset=19, base_timestamp=0)
    decoded = decode_batch(batch)
    assert (decoded.header.base_offset, decoded.header.last_offset) == (10, 19)
    assert decoded.records[0].offset == 12
    empty = decode_batch(encode_batch([], base_offset=10, last_offset=19))
    assert (empty.header.next_offset, empty.records) == (20, [])


def test_delete_horizon_takes_the_place_of_the_base_timestamp() -> None:
    batch = encode_batch([Record(0, 5000, b"k", None)], base_timestamp=90_000, delete_horizon=True)
    decoded = decode_batch(batch)
    assert decoded.header.has_delete_horizon
    assert decoded.header.base_timestamp == 90_000
    assert decoded.records[0].timestamp == 5000


def test_log_append_time_is_the_time_of_all_records() -> None:
    batch = encode_batch([Record(0, 5, None, b"a"), Record(1, 6, None, b"b")])
    patch_log_append_time(batch, 777)
    patch_offset(batch, 100, 4)
    decoded = decode_batch(batch)
    assert [(r.offset, r.timestamp) for r in decoded.records] == [(100, 777), (101, 777)]
    again = encode_batch(decoded.records, timestamp_type=TimestampType.LOG_APPEND_TIME)
    assert [r.timestamp for r in decode_batch(again).records] == [777, 777]


@pytest.mark.parametrize("key", [None, b"", b"k" * 70])
@pytest.mark.parametrize("value", [None, b"", b"v" * 9000])
def test_a_single_record_is_encoded_as_any_batch_is(key: bytes | None, value: bytes | None) -> None:
    assert encode_single(5, key, value) == encode_batch([Record(0, 5, key, value)])
    by_hand = encode_single(
        5, key, value, offset=7, attributes=TRANSACTIONAL_BIT, leader_epoch=3, producer_id=9, producer_epoch=2
    )
    plain = encode_batch(
        [Record(7, 5, key, value)], transactional=True, leader_epoch=3, producer_id=9, producer_epoch=2
    )
    assert by_hand == plain


@pytest.mark.parametrize("kind", list(MarkerType))
def test_markers_round_trip(kind: MarkerType) -> None:
    batch = encode_marker(kind, offset=3, timestamp=9, producer_id=1, producer_epoch=2, coordinator_epoch=4)
    header, (record,) = decode_batch(batch)
    assert header.is_control
    assert header.is_transactional
    assert header.base_sequence == -1
    assert record.key == bytes([0, 0, 0, kind])
    assert record.value == bytes([0, 0, 0, 0, 0, 4])
    assert decode_marker(record) == Marker(kind, 4)


def test_control_records_of_other_kinds_are_no_markers() -> None:
    assert decode_marker(Record(0, 0, bytes([0, 0, 0, 2]), b"leader change")) is None
    for key, value in ((None, b"123456"), (b"\0\0\0", b"123456"), (b"\xff\xff\0\0", b"123456"), (bytes(4), b"12345")):
        with pytest.raises(CorruptBatchError):
            decode_marker(Record(0, 0, key, value))


@pytest.mark.parametrize(
    ("records", "options"),
    [
        ([], {}),
        ([Record(5, 0, None, None), Record(5, 0, None, None)], {}),
        ([Record(5, 0, None, None)], {"base_offset": 6}),
        ([Record(0, 0, None, None), Record(2**31, 0, None, None)], {}),
        ([Record(0, 2**63 - 1, None, None)], {"base_timestamp": -1}),
        ([Record(0, 0, None, None)], {"producer_epoch": 2**15}),
        ([Record(0, 0, None, None, (("\ud800", None),))], {}),
        ([Record(0, 0, None, None)], {"compression": 6}),
    ],
)
def test_records_that_make_no_batch_are_refused(records: list[Record], options: dict) -> None:
    with pytest.raises((EncodeError, DecodeError)):
        encode_batch(records, **options)


def test_truncated_batch_is_refused_and_a_partial_last_one_left_out() -> None:
    first = bytes(encode_batch([Record(0, 0, b"k", b"v")]))
    second = bytes(encode_batch([Record(1, 0, b"k", b"v")]))
    assert [len(b.records) for b in decode_batches(first + second)] == [1, 1]
    for cut in range(1, len(second)):
        assert [b.records[0].offset for b in decode_batches(first + second[:-cut])] == [0]
        with pytest.raises(CorruptBatchError):
            decode_batch(second[:-cut])


def test_older_formats_and_impossible_lengths_are_refused() -> None:
    batch = encode_batch([Record(0, 0, b"k", b"v")])
    old = bytearray(batch)
    old[16] = 1
    with pytest.raises(CorruptBatchError, match="magic 1, expected 2"):
        read_header(old)
    for length in (-1, 0, 48):
        short = bytearray(batch)
        short[8:12] = length.to_bytes(4, "big", signed=True)
        with pytest.raises(CorruptBatchError, match=str(length)):
            read_header(short)
    assert read_header(batch).size == len(batch) > HEADER_SIZE
