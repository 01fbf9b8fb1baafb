"""The check of a batch's records agrees with the plain codec, whatever the bytes are."""

from __future__ import annotations

import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.protocol.batch import HEADER_SIZE, read_header, seal_crc
from semel.protocol.errors import CorruptBatchError, DecodeError
from semel.protocol.record_check import FEW_RECORDS, SOME_RECORDS, check_records
from semel.protocol.record_rows import check_alike
from semel.protocol.rows import Record, decode_batch, encode_batch

BASE_MS = 1_700_000_000_000
COUNTS = [1, 2, FEW_RECORDS, FEW_RECORDS + 1, 64, 65, SOME_RECORDS, SOME_RECORDS + 1, 1500]


def is_right(batch: bytearray) -> bool:
    """By the plain codec: every record can be read, and has the next offset."""
    try:
        records = decode_batch(batch).records
    except DecodeError:
        return False
    return [record.offset for record in records] == list(range(len(records)))


def passes(batch: bytearray) -> bool:
    try:
        check_records(memoryview(batch)[HEADER_SIZE:], read_header(batch).record_count)
    except CorruptBatchError:
        return False
    return True


def sealed(batch: bytearray, count: int | None = None) -> bytearray:
    struct.pack_into(">i", batch, 8, len(batch) - 12)
    if count is not None:
        struct.pack_into(">i", batch, 23, count - 1)
        struct.pack_into(">i", batch, 57, count)
    seal_crc(batch)
    return batch


def records_of(seed: int, count: int, alike: bool) -> list[Record]:
    """Records of one shape, or of any."""
    random_ = random.Random(seed)
    size, key = (
        random_.choice([0, 5, 60, 100, 9000 if count < 200 else 70]),
        random_.choice([None, b"", b"k", b"k" * 90]),
    )
    if alike:
        step_ms = random_.choice([0, 1, 100])
        return [
            Record(
                n, BASE_MS + n * step_ms, key if key is None else random_.randbytes(len(key)), random_.randbytes(size)
            )
            for n in range(count)
        ]
    return [
        Record(
            number,
            BASE_MS + random_.choice([0, 0, -5, 70, 10**6]),
            random_.choice([None, random_.randbytes(random_.choice([0, 3, 70]))]),
            random_.choice([None, random_.randbytes(random_.randint(0, 2 * size))]),
            random_.choice([(), (), (("name", b"value"),), (("a", None), ("b" * 70, b"x" * 200))]),
        )
        for number in range(count)
    ]


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 2**32),
    st.sampled_from([1, 2, FEW_RECORDS, FEW_RECORDS + 1, 64, SOME_RECORDS, SOME_RECORDS + 1, 1500]),
    st.booleans(),
)
def test_what_the_plain_codec_writes_passes_and_its_facts_are_known(seed: int, count: int, alike: bool) -> None:
    records = records_of(seed, count, alike)
    body = memoryview(encode_batch(records))[HEADER_SIZE:]
    base = records[0].timestamp
    deltas = [record.timestamp - base for record in records]
    facts, exact = check_records(body, count), check_records(body, count, exact=True)
    assert (exact.min_timestamp_delta, exact.max_timestamp_delta) == (min(deltas), max(deltas))
    assert facts.min_timestamp_delta <= min(deltas) <= max(deltas) <= facts.max_timestamp_delta
    keyless = [number for number, record in enumerate(records) if record.key is None]
    assert list(facts.keyless) == list(exact.keyless) == keyless


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32), st.sampled_from([1, 3, FEW_RECORDS + 1, 70, 100, 300]), st.booleans(), st.data())
def test_damaged_records_pass_only_if_the_plain_codec_reads_them(
    seed: int, count: int, alike: bool, data: st.DataObject
) -> None:
    batch = encode_batch(records_of(seed, count, alike))
    for _ in range(data.draw(st.integers(1, 3))):
        batch[data.draw(st.integers(HEADER_SIZE, len(batch) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([0, 0, 0, 1, 7]))
    batch = sealed(
        batch[: max(len(batch) - cut, HEADER_SIZE)], count + data.draw(st.sampled_from([0, 0, 0, 1, -1])) or 1
    )
    assert passes(batch) == is_right(batch)


@pytest.mark.parametrize("count", [5, 100])
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_one_wrong_byte_in_records_of_one_shape_is_found(count: int, place: str) -> None:
    """Lengths, offsets, the end: each byte of a record that holds structure, in a run of records that are alike."""
    records = [Record(number, BASE_MS, b"key", b"value" * 4) for number in range(count)]
    whole = encode_batch(records)
    assert count <= FEW_RECORDS or check_alike(memoryview(whole)[HEADER_SIZE:], count) is not None
    victim = {"first": 0, "middle": count // 2, "last": count - 1}[place]
    start = len(encode_batch(records[:victim], base_offset=0))
    size = len(encode_batch(records[: victim + 1])) - start
    found = 0
    for position in range(start, start + size):
        for bit in (0x01, 0x80):
            batch = bytearray(whole)
            batch[position] ^= bit
            assert passes(sealed(batch)) == is_right(batch), (position - start, bit)
            found += not passes(batch)
    assert found >= 8  # the length, the offset, two lengths, the number of headers


def test_offsets_of_three_bytes_are_checked_in_long_runs_too() -> None:
    records = [Record(number, BASE_MS, None, b"value") for number in range(20_000)]
    whole = encode_batch(records)
    assert check_alike(memoryview(whole)[HEADER_SIZE:], len(records)) is not None
    start = len(encode_batch(records[:15_000]))
    wrong = bytearray(whole)
    wrong[start + 3] ^= 0x02  # the lowest byte of the offset delta: after length, attributes and timestamp
    assert passes(whole)
    assert not passes(wrong)


def test_claims_that_cannot_be_are_refused_before_memory_is_taken() -> None:
    for count, size in ((2**31 - 1, 8), (1000, 32), (2, 13)):
        with pytest.raises(CorruptBatchError, match="says it has"):
            check_records(bytes(size), count)
