"""Compression of a batch's records, in the framings that Kafka's clients write, with a limit on what comes out.

    gzip    one or more gzip members                       (zlib)
    snappy  written in snappy-java's blocks, as the Java client does; read in these or as one raw block
    lz4     the frame format with independent blocks: Kafka's Java reader refuses linked ones, which is why frames are
            put together here from raw blocks
    zstd    one or more zstd frames

pyarrow does the work and is imported at the first use, so that a process without compressed topics never loads it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from enum import IntEnum
from typing import Any

from semel.protocol.batch import DEFAULT_LIMIT_BYTES, Buffer
from semel.protocol.errors import (
    CorruptBatchError,
    DecodeError,
    EncodeError,
    TooLargeError,
    UnsupportedCompressionError,
)


class Compression(IntEnum):
    """The lowest three bits of a batch's attributes."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4

    @classmethod
    def parse(cls, name: str) -> Compression:
        """From the names of Kafka's `compression.type`."""
        try:
            return cls[name.upper()]
        except KeyError:
            known = ", ".join(member.name.lower() for member in cls)
            raise UnsupportedCompressionError(f"unknown compression {name!r}, expected one of {known}") from None


def is_ready(kind: int) -> bool:
    """Whether a compression can be used without loading pyarrow first, which takes tenths of a second."""
    return _is_loaded or kind in (0, 1)  # none and gzip need nothing


def compress(kind: int, data: Buffer, level: int | None = None) -> Buffer:
    """`data` compressed as Kafka's clients expect it. `level` where the format has levels (gzip, zstd)."""
    try:
        compressor = _COMPRESSORS[kind]
    except KeyError:
        raise _unsupported(kind) from None
    try:
        return compressor(data, level)
    except (OSError, ValueError, zlib.error) as error:
        raise EncodeError(f"{Compression(kind).name.lower()} could not compress {len(data)} bytes: {error}") from error


def decompress(kind: int, data: Buffer, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> Buffer:
    """The records again. More than `limit_bytes` of them is refused before the memory for them is taken."""
    try:
        decompressor = _DECOMPRESSORS[kind]
    except KeyError:
        raise _unsupported(kind) from None
    try:
        return decompressor(data, limit_bytes)
    except DecodeError:
        raise
    except (OSError, ValueError, OverflowError, zlib.error) as error:  # ArrowInvalid is a ValueError
        raise CorruptBatchError(
            f"{len(data)} bytes are not valid {Compression(kind).name.lower()}: {str(error) or type(error).__name__}"
        ) from error
    except MemoryError as error:
        raise TooLargeError(
            f"no memory to decompress {len(data)} bytes of {Compression(kind).name.lower()}; lower the limit"
        ) from error


def _unsupported(kind: int) -> UnsupportedCompressionError:
    known = ", ".join(f"{member.value} ({member.name.lower()})" for member in Compression)
    return UnsupportedCompressionError(f"unknown compression type {kind}, expected one of {known}")


def _refuse(limit_bytes: int) -> TooLargeError:
    return TooLargeError(f"a batch decompresses to more than the limit of {limit_bytes} bytes")


_is_loaded = False  # pyarrow


def _arrow_codec(name: str, level: int | None = None) -> Any:
    global _is_loaded
    from pyarrow import Codec

    _is_loaded = True
    return Codec(name, compression_level=level)


# --- none
def _compress_none(data: Buffer, level: int | None) -> Buffer:
    return data


def _decompress_none(data: Buffer, limit_bytes: int) -> Buffer:
    if len(data) > limit_bytes:
        raise TooLargeError(f"a batch of {len(data)} bytes is over the limit of {limit_bytes} bytes")
    return data


# --- gzip

_GZIP_WINDOW_BITS = 31  # zlib's way to say: gzip header and trailer
_MOST_GZIP_MEMBERS = 1024  # clients write one; each costs a copy of the rest


def _compress_gzip(data: Buffer, level: int | None) -> Buffer:
    compressor = zlib.compressobj(-1 if level is None else level, zlib.DEFLATED, _GZIP_WINDOW_BITS)
    return compressor.compress(data) + compressor.flush()


def _decompress_gzip(data: Buffer, limit_bytes: int) -> Buffer:
    out = bytearray()
    rest: Buffer = data
    for _ in range(_MOST_GZIP_MEMBERS):
        member = zlib.decompressobj(_GZIP_WINDOW_BITS)
        out += member.decompress(rest, limit_bytes + 1 - len(out))
        if len(out) > limit_bytes:
            raise _refuse(limit_bytes)
        if not member.eof:
            raise CorruptBatchError(f"gzip data ends in the middle, after {len(out)} decompressed bytes")
        rest = member.unused_data
        if not rest:
            return out
    raise CorruptBatchError(f"gzip data of more than {_MOST_GZIP_MEMBERS} members")


# --- snappy

_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEADER = _XERIAL_MAGIC + struct.pack(">ii", 1, 1)  # version, oldest version that can read it
_XERIAL_BLOCK_BYTES = 32 * 1024
_BLOCK_SIZE = struct.Struct(">i")


def _compress_snappy(data: Buffer, level: int | None) -> Buffer:
    codec = _arrow_codec("snappy")
    view = memoryview(data)
    out = bytearray(_XERIAL_HEADER)
    for start in range(0, len(view), _XERIAL_BLOCK_BYTES):
        block = codec.compress(view[start : start + _XERIAL_BLOCK_BYTES], asbytes=True)
        out += _BLOCK_SIZE.pack(len(block))
        out += block
    return out


def _decompress_snappy(data: Buffer, limit_bytes: int) -> Buffer:
    view = memoryview(data)
    codec = _arrow_codec("snappy")
    if bytes(view[: len(_XERIAL_MAGIC)]) != _XERIAL_MAGIC:
        return _snappy_block(codec, view, 0, limit_bytes)
    if len(view) < len(_XERIAL_HEADER):
        raise CorruptBatchError(f"snappy header takes {len(_XERIAL_HEADER)} bytes, but only {len(view)} are there")
    out = bytearray()
    at = len(_XERIAL_HEADER)
    while at < len(view):
        if len(view) - at < _BLOCK_SIZE.size:
            raise CorruptBatchError(f"snappy data ends inside a block's size, at byte {at}")
        (size,) = _BLOCK_SIZE.unpack_from(view, at)
        at += _BLOCK_SIZE.size
        if not 0 < size <= len(view) - at:
            raise CorruptBatchError(f"a snappy block says it takes {size} bytes, but {len(view) - at} are left")
        out += _snappy_block(codec, view[at : at + size], len(out), limit_bytes)
        at += size
    return out


def _snappy_block(codec: Any, block: memoryview, before_bytes: int, limit_bytes: int) -> Buffer:
    """A raw snappy block. It starts with its decompressed size, so the limit is checked before anything is written."""
    size = shift = 0
    for byte in block[:5]:
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    else:
        raise CorruptBatchError(f"a snappy block of {len(block)} bytes does not start with its size")
    if before_bytes + size > limit_bytes:
        raise _refuse(limit_bytes)
    return memoryview(codec.decompress(block, decompressed_size=size))


# --- lz4

# Magic, then version 1 with independent blocks and no checksums, 64 KiB or 4 MiB blocks, and the descriptor's checksum.
_LZ4_HEADER_64K = bytes.fromhex("04224d18604082")
_LZ4_HEADER_4M = bytes.fromhex("04224d18607073")
_LZ4_SMALL_BLOCK_BYTES = 64 * 1024
_LZ4_LARGE_BLOCK_BYTES = 4 * 1024 * 1024
_LZ4_STORED = 0x80000000  # this block did not shrink and is stored as it is
_LZ4_END = bytes(4)
_LZ4_SIZE = struct.Struct("<I")


def _compress_lz4(data: Buffer, level: int | None) -> Buffer:
    codec = _arrow_codec("lz4_raw")
    view = memoryview(data)
    small = len(view) <= _LZ4_SMALL_BLOCK_BYTES
    block_bytes = _LZ4_SMALL_BLOCK_BYTES if small else _LZ4_LARGE_BLOCK_BYTES
    out = bytearray(_LZ4_HEADER_64K if small else _LZ4_HEADER_4M)
    for start in range(0, len(view), block_bytes):
        plain = view[start : start + block_bytes]
        block = codec.compress(plain, asbytes=True)
        if len(block) < len(plain):
            out += _LZ4_SIZE.pack(len(block))
            out += block
        else:
            out += _LZ4_SIZE.pack(len(plain) | _LZ4_STORED)
            out += plain
    out += _LZ4_END
    return out


# --- zstd
def _compress_zstd(data: Buffer, level: int | None) -> Buffer:
    compressed: bytes = _arrow_codec("zstd", level).compress(memoryview(data), asbytes=True)
    return compressed


# --- lz4 and zstd are read as streams

_FIRST_READ_BYTES = 64 * 1024
_LARGEST_READ_BYTES = 16 * 1024 * 1024


def _decompress_stream(name: str) -> Callable[[Buffer, int], Buffer]:
    def decompressor(data: Buffer, limit_bytes: int) -> Buffer:
        global _is_loaded
        import pyarrow as pa

        _is_loaded = True
        if not len(data):
            raise CorruptBatchError(f"no bytes, where {name} data was expected")
        parts: list[bytes] = []
        total = 0
        read_bytes = max(_FIRST_READ_BYTES, 4 * len(data))
        with pa.CompressedInputStream(pa.BufferReader(memoryview(data)), name) as stream:
            while part := stream.read(min(read_bytes, _LARGEST_READ_BYTES, limit_bytes + 1 - total)):
                parts.append(part)
                total += len(part)
                if total > limit_bytes:
                    raise _refuse(limit_bytes)
                read_bytes *= 2
        return parts[0] if len(parts) == 1 else b"".join(parts)

    return decompressor


_COMPRESSORS: dict[int, Callable[[Buffer, int | None], Buffer]] = {
    Compression.NONE: _compress_none,
    Compression.GZIP: _compress_gzip,
    Compression.SNAPPY: _compress_snappy,
    Compression.LZ4: _compress_lz4,
    Compression.ZSTD: _compress_zstd,
}

_DECOMPRESSORS: dict[int, Callable[[Buffer, int], Buffer]] = {
    Compression.NONE: _decompress_none,
    Compression.GZIP: _decompress_gzip,
    Compression.SNAPPY: _decompress_snappy,
    Compression.LZ4: _decompress_stream("lz4"),
    Compression.ZSTD: _decompress_stream("zstd"),
}
