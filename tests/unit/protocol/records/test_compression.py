"""Compression: round trips, refusals, and a bomb that never gets its memory."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys

import pytest

from semel.protocol import columns, record_sets
from semel.protocol.batch import seal_crc
from semel.protocol.compression import Compression, compress, decompress
from semel.protocol.errors import CorruptBatchError, DecodeError, TooLargeError, UnsupportedCompressionError
from semel.protocol.rows import Record, decode_batch, encode_batch

REAL = [kind for kind in Compression if kind]
MIB = 1024 * 1024


@pytest.mark.parametrize("kind", list(Compression))
@pytest.mark.parametrize("size", [0, 1, 31_999, 32_768, 65_536, 65_537, 4 * MIB + 1])
def test_what_was_compressed_comes_out_again(kind: Compression, size: int) -> None:
    data = random.Random(size).randbytes(min(size, 1000)) * (size // 1000 + 1)
    data = data[:size]
    assert bytes(decompress(kind, compress(kind, data), limit_bytes=size)) == data


@pytest.mark.parametrize("kind", list(Compression))
def test_one_byte_more_than_the_limit_is_refused(kind: Compression) -> None:
    data = b"0123456789" * 10_000
    compressed = compress(kind, data)
    assert len(decompress(kind, compressed, limit_bytes=100_000)) == 100_000
    with pytest.raises(TooLargeError, match="99999"):
        decompress(kind, compressed, limit_bytes=99_999)


@pytest.mark.parametrize("kind", REAL)
def test_damaged_data_is_refused_or_differs_but_raises_nothing_else(kind: Compression) -> None:
    rng = random.Random(5)
    whole = bytes(compress(kind, rng.randbytes(3000) + b"ab" * 20_000))
    for cut in (0, 1, 3, 7, 15, 19, len(whole) // 2, len(whole) - 1):
        with pytest.raises(DecodeError):
            decompress(kind, whole[:cut], limit_bytes=10**6)
    with pytest.raises(CorruptBatchError):
        decompress(kind, whole + b"garbage", limit_bytes=10**6)
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        with contextlib.suppress(DecodeError):
            assert len(decompress(kind, damaged, limit_bytes=10**6)) <= 10**6


@pytest.mark.parametrize("kind", REAL)
def test_random_bytes_raise_nothing_but_decode_errors(kind: Compression) -> None:
    rng = random.Random(6)
    for size in range(200):
        with contextlib.suppress(DecodeError):
            decompress(kind, rng.randbytes(size), limit_bytes=10**6)


@pytest.mark.parametrize("code", [5, 6, 7])
def test_unknown_compression_is_refused_by_name(code: int) -> None:
    with pytest.raises(UnsupportedCompressionError, match=f"{code}, expected one of 0 .none., 1 .gzip."):
        decompress(code, b"x")
    batch = encode_batch([Record(0, 0, b"k", b"v")])
    batch[22] |= code
    seal_crc(batch)
    with pytest.raises(UnsupportedCompressionError):
        decode_batch(batch)
    with pytest.raises(UnsupportedCompressionError):
        columns.decode_record_set(batch)


def test_names_of_compression_types() -> None:
    assert Compression.parse("zstd") is Compression.ZSTD
    with pytest.raises(UnsupportedCompressionError, match="'brotli', expected one of none, gzip, snappy, lz4, zstd"):
        Compression.parse("brotli")


def test_lz4_blocks_are_independent_as_the_java_reader_demands() -> None:
    for size in (10, 200_000, 9 * MIB):
        frame = bytes(compress(Compression.LZ4, b"x" * size))
        assert frame[:4] == b"\x04\x22\x4d\x18"
        assert frame[4] & 0x20


def bomb(kind: Compression, size: int) -> bytes:
    """A valid batch of one record of `size` zeros."""
    return bytes(encode_batch([Record(0, 0, None, bytes(size))], compression=kind))


@pytest.mark.parametrize("kind", REAL)
def test_a_bomb_is_refused_by_both_codecs(kind: Compression) -> None:
    data = bomb(kind, 20 * MIB)
    limit = {"limit_bytes": 10 * MIB}
    with pytest.raises(TooLargeError):
        record_sets.decode_record_set(data, **limit)
    with pytest.raises(TooLargeError):
        columns.decode_record_set(data, **limit)
    assert len(record_sets.decode_record_set(data, limit_bytes=21 * MIB).records) == 1


def test_a_bomb_of_records_is_refused_by_both_codecs() -> None:
    """Seven bytes make a record; a million of them compress to nothing."""
    batch = encode_batch([Record(i, 0, None, None) for i in range(5000)], compression=Compression.ZSTD)
    with pytest.raises(TooLargeError):
        record_sets.decode_record_set(batch, limit_bytes=100_000)
    with pytest.raises(TooLargeError):
        columns.decode_record_set(batch, limit_bytes=100_000)


def test_a_bomb_of_headers_is_refused_by_both_codecs() -> None:
    headers = (("", None),) * 5000
    batch = encode_batch([Record(0, 0, None, None, headers)], compression=Compression.ZSTD)
    assert len(record_sets.decode_record_set(batch, limit_bytes=1_000_000).records[0].headers) == 5000
    with pytest.raises(TooLargeError):
        record_sets.decode_record_set(batch, limit_bytes=100_000)
    with pytest.raises(TooLargeError):
        columns.decode_record_set(batch, limit_bytes=100_000)


MEASURE = """
import resource, sys
import numpy, pyarrow
from semel.protocol import columns, record_sets
from semel.protocol.compression import compress
from semel.protocol.errors import TooLargeError
compress(int(sys.argv[2]), b"warm up")
data = open(sys.argv[1], "rb").read()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for decode in (record_sets.decode_record_set, columns.decode_record_set):
    try:
        decode(data, limit_bytes=16 * 1024 * 1024)
    except TooLargeError:
        print("refused")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.parametrize("kind", REAL)
def test_a_bomb_takes_no_more_memory_than_the_limit_allows(kind: Compression, tmp_path) -> None:
    """300 MiB in a few kilobytes, a limit of 16 MiB: the process grows by the limit twice (parts, and their sum)
    and the codec's own window, not by 300 MiB."""
    path = tmp_path / "bomb"
    path.write_bytes(bomb(kind, 300 * MIB))
    command = [sys.executable, "-c", MEASURE, str(path), str(int(kind))]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout.split()
    assert lines[:2] == ["refused", "refused"]
    assert int(lines[2]) < 60
