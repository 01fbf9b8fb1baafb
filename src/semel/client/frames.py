"""Bytes to whole frames: what has been read of a connection and is not yet an answer.

Small frames are cut out of chunks. A frame larger than a chunk gets memory of its own; the rest of it is read there.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
import sys
from collections.abc import Iterator

from semel.client.errors import ConnectionFailedError

MAX_FRAME_BYTES = 1 << 30
CHUNK_BYTES = 64 * 1024
HUGE_PAGE_BYTES = 2 * 1024 * 1024
_SIZE = struct.Struct(">i")

# What other servers say first, read as the size of a frame.
_FOREIGN_STARTS = {
    b"HTTP": "it answers in HTTP; is this the port of a web server?",
    b"\x15\x03\x01": "it answers in TLS; set security.protocol to SSL or SASL_SSL",
    b"\x15\x03\x03": "it answers in TLS; set security.protocol to SSL or SASL_SSL",
}
_FOREIGN = tuple(_FOREIGN_STARTS)


class Frames:
    """Takes what was read into `space` and gives out whole frames. Belongs to the one who reads."""

    def __init__(self) -> None:
        self.last_bytes = 0  # the size of the last whole frame
        self._chunk = memoryview(bytearray(CHUNK_BYTES))
        self._rest = b""  # the start of a frame that has not come whole
        self._large: memoryview | None = None  # a frame larger than a chunk, read in place
        self._large_at = 0
        self._pool = FramePool()

    @property
    def is_inside_large(self) -> bool:
        """Whether `space` is exactly what is missing of a large frame."""
        return self._large is not None

    def space(self) -> memoryview:
        """Where the next bytes should be read to."""
        return self._chunk if self._large is None else self._large[self._large_at :]

    def filled(self, count: int) -> Iterator[memoryview]:
        """Takes `count` bytes that were read into `space()`; yields the frames that are whole now."""
        if self._large is None:
            yield from self._split(self._rest + bytes(self._chunk[:count]))
            return
        self._large_at += count
        if self._large_at == len(self._large):
            frame, self._large = self._large, None
            self.last_bytes = len(frame)
            yield frame

    def _split(self, data: bytes) -> Iterator[memoryview]:
        view, at = memoryview(data), 0
        while len(data) - at >= 4:
            (size,) = _SIZE.unpack_from(data, at)
            if not 4 <= size <= MAX_FRAME_BYTES or (not self.last_bytes and data.startswith(_FOREIGN)):
                raise _not_kafka(data[at : at + 4], size)
            if len(data) - at - 4 < size:
                if size > CHUNK_BYTES:
                    self._large, self._large_at = self._pool.take(size), len(data) - at - 4
                    self._large[: self._large_at] = view[at + 4 :]
                    self._rest = b""
                    return
                break
            self.last_bytes = size
            yield view[at + 4 : at + 4 + size]
            at += 4 + size
        self._rest = data[at:]


class FramePool:
    """Memory for large frames, used again once nobody looks at it: fresh memory costs as much as filling it."""

    KEPT = 3  # one being read, one being decoded, one to spare
    _FREE = 3  # references to a buffer that is in the list, in the loop below and an argument, and nowhere else

    def __init__(self) -> None:
        self._buffers: list[bytearray | mmap.mmap] = []

    def take(self, size: int) -> memoryview:
        for buffer in self._buffers:
            if len(buffer) >= size and sys.getrefcount(buffer) == self._FREE:
                return memoryview(buffer)[:size]
        fresh = _fresh_memory(size + size // 8)  # the next frame is often a little larger
        self._buffers = [*self._buffers[1 - self.KEPT :], fresh]
        return memoryview(fresh)[:size]


def _fresh_memory(size: int) -> bytearray | mmap.mmap:
    """Large pieces come from the kernel, in huge pages where it has them; a bytearray would be filled with zeros first,
    for nothing, which takes as long as receiving it."""
    if size < HUGE_PAGE_BYTES:
        return bytearray(size)
    memory = mmap.mmap(-1, -(-size // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _not_kafka(start: bytes, size: int) -> ConnectionFailedError:
    for foreign, hint in _FOREIGN_STARTS.items():
        if start.startswith(foreign):
            return ConnectionFailedError(f"the other side does not speak Kafka's protocol: {hint}")
    return ConnectionFailedError(
        f"the other side does not speak Kafka's protocol: a frame of {size} bytes was announced; check host and port"
    )
