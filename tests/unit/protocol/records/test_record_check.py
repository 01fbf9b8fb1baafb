"""The check of a batch's records agrees with the plain codec, whatever the bytes are."""

from __future__ import annotations

import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.protocol.batch import HEADER_SIZE, read_header, seal_crc
from semel.protocol.errors import CorruptBatchError, DecodeError
from semel.protocol.record_check import FEW_RECORDS, SOME_RECORDS, WORDS_FROM_RECORDS, check_records
from semel.protocol.record_rows import check_alike, check_words
from semel.protocol.rows import Record, decode_batch, encode_batch
from semel.protocol.varints import write_varint
from semel.protocol.vector_varints import SHORT_LIMIT

BASE_MS = 1_700_000_000_000
COUNTS = [1, 2, FEW_RECORDS, FEW_RECORDS + 1, WORDS_FROM_RECORDS, 64, 65, SOME_RECORDS, SOME_RECORDS + 1, 1500]


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
        times = random_.sample(range(count), count) if random_.random() < 0.5 else range(count)
        return [
            Record(
                n,
                BASE_MS + times[n] * step_ms,
                key if key is None else random_.randbytes(len(key)),
                random_.randbytes(size),
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
    st.sampled_from(COUNTS),
    st.booleans(),
)
def test_what_the_plain_codec_writes_passes_and_its_facts_are_known(seed: int, count: int, alike: bool) -> None:
    records = records_of(seed, count, alike)
    body = memoryview(encode_batch(records))[HEADER_SIZE:]
    base = records[0].timestamp
    deltas = [record.timestamp - base for record in records]
    facts, exact = check_records(body, count), check_records(body, count, exact=True)
    assert (exact.min_timestamp_delta, exact.max_timestamp_delta) == (min(deltas), max(deltas))
    assert facts.min_timestamp_delta <= min(deltas)
    assert facts.max_timestamp_delta == max(deltas)
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


def sized_records(seed: int, count: int) -> list[Record]:
    """Records without headers whose lengths differ: what words of eight bytes decide."""
    random_ = random.Random(seed)
    key_sizes = random_.choice([[None], [8], [None, 0, 3, 70, 200]])
    value_sizes = random_.choice([(0, 3), (20, 90), (50, 500), (0, 7900)])
    late_ms = random_.choice([0, 50, 1000, 8000])
    return [
        Record(
            number,
            BASE_MS + random_.randint(0, late_ms),
            None if (size := random_.choice(key_sizes)) is None else random_.randbytes(size),
            None if random_.random() < 0.05 else random_.randbytes(random_.randint(*value_sizes)),
        )
        for number in range(count)
    ]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 63, 64, 65, 200, 1500]))
def test_words_decide_about_records_of_different_lengths(seed: int, count: int) -> None:
    """The fast way must not leave such records to the slow one; what it finds out is what the exact way finds out."""
    records = sized_records(seed, count)
    body = memoryview(encode_batch(records))[HEADER_SIZE:]
    facts, exact = check_words(body, count), check_records(body, count, exact=True)
    assert facts is not None
    assert facts.min_timestamp_delta <= exact.min_timestamp_delta
    assert exact.max_timestamp_delta == facts.max_timestamp_delta
    assert list(facts.keyless) == list(exact.keyless)


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 40, 64, 70, 200]), st.data())
def test_words_never_pass_what_the_plain_codec_refuses(seed: int, count: int, data: st.DataObject) -> None:
    """Damage where the structure is: the first bytes and the last ones of records, and anywhere."""
    records = sized_records(seed, count)
    batch = encode_batch(records)
    ends = [len(encode_batch(records[:number])) for number in (0, count // 2, count - 1, count) if number] + [
        HEADER_SIZE
    ]
    for _ in range(data.draw(st.integers(1, 3))):
        near = data.draw(st.sampled_from(ends)) + data.draw(st.integers(-2, 9))
        anywhere = data.draw(st.integers(HEADER_SIZE, len(batch) - 1))
        position = data.draw(st.sampled_from([min(max(near, HEADER_SIZE), len(batch) - 1), anywhere]))
        batch[position] = data.draw(st.sampled_from([0, 1, 2, 3, 0x7F, 0x80, 0x81, 0xFF, batch[position] ^ 2]))
    claimed = max(1, count + data.draw(st.sampled_from([0, 0, 0, 0, 1, -1])))
    batch = sealed(batch, claimed)
    passed = check_words(memoryview(batch)[HEADER_SIZE:], claimed) is not None
    assert not passed or is_right(batch)
    assert passes(batch) == is_right(batch)


@pytest.mark.parametrize("victim", [0, 30, 79])
def test_every_changed_byte_of_a_record_between_others_of_other_lengths_is_judged_right(victim: int) -> None:
    records = [Record(number, BASE_MS + number, b"k" * (number % 7), b"v" * (60 + number % 11)) for number in range(80)]
    whole = encode_batch(records)
    assert check_words(memoryview(whole)[HEADER_SIZE:], len(records)) is not None
    start, end = (
        len(encode_batch(records[:victim])) if victim else HEADER_SIZE,
        len(encode_batch(records[: victim + 1])),
    )
    refused = 0
    for position in range(start, end):
        for bit in (0x01, 0x02, 0x40, 0x80):
            batch = bytearray(whole)
            batch[position] ^= bit
            assert passes(sealed(batch)) == is_right(batch), (position - start, bit)
            refused += not passes(batch)
    assert refused >= 12


def test_words_read_offset_deltas_up_to_two_bytes() -> None:
    records = [Record(number, BASE_MS, None, b"v" * (number % 3)) for number in range(SHORT_LIMIT)]
    body = memoryview(encode_batch(records))[HEADER_SIZE:]
    assert check_words(body, SHORT_LIMIT) is not None


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


@pytest.mark.parametrize("count", [8192, 8193, 20_000])
def test_words_decide_about_thousands_of_records_and_find_the_one_that_is_wrong(count: int) -> None:
    records = [Record(number, BASE_MS + number // 99, None, bytes(1 + number % 3)) for number in range(count)]
    batch = encode_batch(records)
    body = memoryview(batch)[HEADER_SIZE:]
    facts = check_words(body, count)
    assert facts is not None
    assert facts.keyless == range(count)
    last_record = len(encode_batch(records[:-1]))
    for position in range(last_record, len(batch) - 2 - (count - 1) % 3):  # all but its value
        wrong = bytearray(batch)
        wrong[position] ^= 2
        seems_right = check_words(memoryview(wrong)[HEADER_SIZE:], count) is not None
        assert seems_right == is_right(sealed(wrong, count)), position - last_record


@pytest.mark.parametrize("count", COUNTS)
def test_a_longer_spelling_of_a_keys_length_passes_in_every_record(count: int) -> None:
    def batch(longer: int) -> bytearray:
        head = encode_batch([Record(n, BASE_MS, b"k", b"v") for n in range(count)])[:HEADER_SIZE]
        body = bytearray()
        for number in range(count):
            fields = bytearray(b"\0\0")
            write_varint(fields, number)
            fields += (b"\xfe\0" if number == longer else b"\x7e") + b"k" * 63 + b"\x02v\0"
            write_varint(body, len(fields))
            body += fields
        return sealed(bytearray(head) + body)

    for longer in {0, count // 2, count - 1}:
        assert is_right(batch(longer))
        assert passes(batch(longer))
