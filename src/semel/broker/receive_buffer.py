"""Bytes from a socket, cut into frames: a 32-bit size and as many bytes.

All connections read into one buffer, one after the other: whole frames are worked on right there, while they are in the
processor's cache, and only the start of a frame that has not come whole is kept aside. So an idle connection costs
nothing and two hundred busy ones are as fast as one. A large frame gets memory of its own, which grows with what has
come, not with what a size claims, so that a hostile client cannot make it cost much.
"""

from __future__ import annotations

import struct

LARGE_BYTES = 256 << 10  # of the shared buffer: what is read at once
OWN_FROM_BYTES = LARGE_BYTES // 2  # a frame of this size is gathered in memory of its own
SMALL_BYTES = 16 << 10  # of it to begin with
SPARE_BYTES = 2 << 20  # memory of a large frame up to this size is kept for the next one
GROWTH = 4
_SIZE = struct.Struct(">i")


class FrameSizeError(Exception):
    """A frame that says it is larger than allowed, or has a negative length."""


class SharedBuffer:
    """Where the connections of one event loop read to, in turns: taken, read into and emptied without a pause."""

    __slots__ = ("data", "spare", "view")

    def __init__(self, size: int = LARGE_BYTES) -> None:
        self.data = bytearray(size)
        self.view = memoryview(self.data)
        self.spare: bytearray | None = None  # fresh memory costs as much as filling it

    def memory(self, size: int) -> bytearray:
        """For a large frame: the spare, if it is large enough."""
        spare, self.spare = self.spare, None
        return spare if spare is not None and len(spare) >= size else bytearray(size)


class ReceiveBuffer:
    """Memory for the socket to write into, and the frames that have come whole.

    `writable`, `add`, then `next_frame` until there is none; in between, no buffer that shares the memory may be used.
    """

    __slots__ = ("_end", "_max_frame_bytes", "_own", "_own_end", "_own_size", "_rest", "_shared", "_start")

    def __init__(self, max_frame_bytes: int, shared: SharedBuffer) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._shared = shared
        self._start = self._end = 0  # of the bytes in the shared buffer that were not taken yet
        self._rest = b""  # the start of a small frame
        self._own: bytearray | None = None  # the start of a large frame, its size included
        self._own_end = self._own_size = 0

    @property
    def capacity_bytes(self) -> int:
        """What this connection takes for itself."""
        return len(self._rest) + (0 if self._own is None else len(self._own))

    def writable(self) -> memoryview:
        """Where the next bytes go; never empty."""
        if self._own is not None:
            if self._own_end == len(self._own):
                self._grow(self._own)
            return memoryview(self._own)[self._own_end : self._own_size]
        kept = len(self._rest)
        if not kept:
            return self._shared.view
        self._shared.view[:kept] = self._rest
        return self._shared.view[kept:]

    def add(self, count: int) -> None:
        """So many bytes were written into `writable`."""
        if self._own is not None:
            self._own_end += count
        else:
            self._start, self._end = 0, len(self._rest) + count
            self._rest = b""

    def next_frame(self) -> memoryview | None:
        """The next whole frame without its size, a view that is valid until `writable` is called; None: not yet."""
        if self._own is not None:
            return self._own_frame(self._own)
        at, held = self._start, self._end - self._start
        if held >= 4:
            (size,) = _SIZE.unpack_from(self._shared.data, at)
            if not 0 <= size <= self._max_frame_bytes:
                raise FrameSizeError(f"a request of {size} bytes; allowed are {self._max_frame_bytes}")
            if held - 4 >= size:
                self._start = at + 4 + size
                return self._shared.view[at + 4 : at + 4 + size]
            if size >= OWN_FROM_BYTES:
                self._move_out(at, held, 4 + size)
                return None
        if held:
            self._rest = bytes(self._shared.view[at : at + held])
            self._start = self._end = 0
        return None

    def _own_frame(self, own: bytearray) -> memoryview | None:
        if self._own_end < self._own_size:
            return None
        self._own = None
        self._start = self._end = 0
        if len(own) <= SPARE_BYTES:
            self._shared.spare = own  # nobody takes it before the frame was handled
        return memoryview(own)[4 : self._own_size]

    def _move_out(self, at: int, held: int, size: int) -> None:
        self._own = self._shared.memory(min(size, max(SMALL_BYTES, GROWTH * held)))
        self._own[:held] = self._shared.view[at : at + held]
        self._own_end, self._own_size = held, size
        self._start = self._end = 0

    def _grow(self, own: bytearray) -> None:
        self._own = self._shared.memory(min(self._own_size, GROWTH * len(own)))
        self._own[: len(own)] = own
