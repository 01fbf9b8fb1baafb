"""The quick scan that compaction uses says the same as the plain codec, and refuses what is not a record."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.protocol.batch import HEADER_SIZE, read_header
from semel.protocol.errors import DecodeError
from semel.protocol.rows import Record, decode_batch, encode_batch
from semel.storage.cleaner import max_timestamp_of, scan_batch, smaller_batch
from tests.unit.storage.helpers import batch

small = st.one_of(st.none(), st.binary(max_size=300))
headers = st.lists(st.tuples(st.text(max_size=5), small), max_size=3).map(tuple)
fields = st.tuples(st.integers(0, 2**45), small, small, headers)


@given(rows=st.lists(fields, min_size=1, max_size=30), gaps=st.integers(1, 200), compression=st.integers(0, 4))
def test_scan_finds_what_the_plain_codec_finds(rows: list, gaps: int, compression: int) -> None:
    records = [Record(7 + number * gaps, *row) for number, row in enumerate(rows)]
    data = bytes(encode_batch(records, compression=compression))
    header = read_header(data)
    body, found = scan_batch(data, header)
    decoded = decode_batch(data).records
    assert [(f.offset, f.key, f.has_value) for f in found] == [
        (record.offset, record.key, record.value is not None) for record in decoded
    ]
    assert [header.base_timestamp + f.timestamp_delta for f in found] == [record.timestamp for record in decoded]
    kept = found[::2]
    smaller = smaller_batch(header, kept, b"".join(body[f.start : f.end] for f in kept))
    again = decode_batch(smaller)
    assert again.records == decoded[::2]
    assert again.header.last_offset == header.last_offset
    assert again.header.max_timestamp == max(record.timestamp for record in again.records)
    assert max_timestamp_of(header, kept) == again.header.max_timestamp


@given(position=st.integers(HEADER_SIZE, HEADER_SIZE + 120), value=st.integers(0, 255))
def test_damaged_records_are_refused_or_read_but_never_run_wild(position: int, value: int) -> None:
    data = bytearray(batch([b"value%d" % number for number in range(10)]))
    data[min(position, len(data) - 1)] = value
    try:
        body, found = scan_batch(bytes(data), read_header(data))
    except DecodeError:
        return
    assert [f.end for f in found][-1] == len(body)
    assert all(f.start < f.end for f in found)


@pytest.mark.parametrize("length", [1, 5, 20])
def test_a_cut_body_is_refused(length: int) -> None:
    data = batch([b"v"] * 3)
    header = read_header(data)
    shorter = header._replace(length=header.length - length)
    with pytest.raises(DecodeError):
        scan_batch(bytes(data[:-length]), shorter)
