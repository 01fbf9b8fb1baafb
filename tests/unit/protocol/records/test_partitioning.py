"""Keys go where the Java client puts them. `java_hashes.json` was written by Kafka 4.3.1's own Utils class."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.protocol.partitioning import (
    NO_PARTITION,
    coordinator_partition,
    java_string_hash,
    murmur2,
    murmur2_column,
    partition_for_key,
    partitions_for_keys,
)

GOLDEN = json.loads(Path(__file__).with_name("java_hashes.json").read_text())
KEYS = [(bytes.fromhex(key), hash_ & 0xFFFFFFFF, by_7, by_50) for key, hash_, by_7, by_50 in GOLDEN["murmur2"]]
TEXTS = GOLDEN["string_hash"]


def test_murmur2_equals_java() -> None:
    assert len(KEYS) > 200
    for key, hash_, by_7, by_50 in KEYS:
        assert murmur2(key) == hash_
        assert partition_for_key(key, 7) == by_7
        assert partition_for_key(memoryview(key), 50) == by_50


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary_view()])
def test_murmur2_over_a_column_equals_java(kind: pa.DataType) -> None:
    column = pa.array([key for key, *_ in KEYS], kind)
    assert murmur2_column(column).tolist() == [hash_ for _, hash_, *_ in KEYS]
    chunked = pa.chunked_array([column.slice(3, 50), column.slice(53)])
    assert partitions_for_keys(chunked, 7).tolist() == [by_7 for _, _, by_7, _ in KEYS[3:]]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.none() | st.binary(max_size=70), max_size=120), st.integers(0, 5), st.integers(1, 1000))
def test_column_equals_scalar(keys: list[bytes | None], start: int, partitions: int) -> None:
    column = pa.array(keys, pa.binary()).slice(start)
    expected = [NO_PARTITION if key is None else partition_for_key(key, partitions) for key in keys[start:]]
    assert partitions_for_keys(column, partitions).tolist() == expected


def test_long_keys_among_many_short_ones() -> None:
    keys = [b"k" * (i % 40) for i in range(1000)] + [bytes(range(256)) * 500]
    assert murmur2_column(pa.array(keys)).tolist() == [murmur2(key) for key in keys]


def test_text_keys_hash_as_their_utf8() -> None:
    assert murmur2_column(pa.array(["é漢😀", "a"])).tolist() == [murmur2("é漢😀".encode()), murmur2(b"a")]


def test_string_hash_equals_java() -> None:
    assert any(ord(character) > 0xFFFF for text, *_ in TEXTS for character in text)
    for text, hash_, by_50 in TEXTS:
        assert java_string_hash(text) == hash_
        assert coordinator_partition(text, 50) == by_50


def test_smallest_hash_goes_to_partition_zero_as_in_kafka() -> None:
    assert java_string_hash("polygenelubricants") == -(2**31)
    assert coordinator_partition("polygenelubricants", 50) == 0


def test_scalars_need_no_numpy() -> None:
    code = (
        "import sys; import semel.protocol, semel.protocol.rows, semel.protocol.record_sets; "
        "from semel.protocol.partitioning import partition_for_key; partition_for_key(b'key', 3); "
        "from semel.protocol.rows import Record, encode_batch, decode_batch; "
        "decode_batch(encode_batch([Record(0, 0, b'k', b'v')])); "
        "assert not {'numpy', 'pyarrow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
