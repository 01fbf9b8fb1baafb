"""Bytes from a socket, cut into frames: a 32-bit size and as many bytes.

The buffer grows with what has come, not with what a size claims, and shrinks again, so that an idle connection costs
little and a hostile one cannot make it cost much.
"""

from __future__ import annotations

import struct

SMALL_BYTES = 16 << 10  # what an idle connection costs
LARGE_BYTES = 256 << 10  # what a busy one reads at once; a larger frame gets a larger buffer for its time
_SIZE = struct.Struct(">i")


class FrameSizeError(Exception):
    """A frame that says it is larger than allowed, or smaller than nothing."""


class ReceiveBuffer:
    """Room for the socket to write into, and the frames that have come whole."""

    __slots__ = ("_data", "_end", "_max_frame_bytes", "_start", "_view", "_was_full")

    def __init__(self, max_frame_bytes: int) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._data = bytearray(SMALL_BYTES)
        self._view = memoryview(self._data)
        self._start = self._end = 0
        self._was_full = False

    @property
    def capacity_bytes(self) -> int:
        return len(self._data)

    def room(self) -> memoryview:
        """Where the next bytes go; never empty."""
        if self._end == len(self._data):
            self._make_room(4)
        return self._view[self._end :]

    def add(self, count: int) -> None:
        """So many bytes were written into `room`."""
        self._end += count
        self._was_full = self._end == len(self._data)

    def next_frame(self) -> memoryview | None:
        """The next whole frame without its size, a view that is valid until `room` is asked for; None: not yet."""
        at, held = self._start, self._end - self._start
        if held >= 4:
            (size,) = _SIZE.unpack_from(self._data, at)
            if not 0 <= size <= self._max_frame_bytes:
                raise FrameSizeError(f"a request of {size} bytes; allowed are {self._max_frame_bytes}")
            if held - 4 >= size:
                self._start = at + 4 + size
                return self._view[at + 4 : at + 4 + size]
            self._make_room(4 + size)
        elif held == 0:
            self._start_over()
        return None

    def _start_over(self) -> None:
        """Everything was taken: the buffer takes the size that the traffic asks for."""
        self._start = self._end = 0
        size = len(self._data)
        if size > LARGE_BYTES:
            self._renew(LARGE_BYTES)
        elif self._was_full and size < LARGE_BYTES:
            self._renew(min(size * 4, LARGE_BYTES))
        self._was_full = False

    def _make_room(self, needed: int) -> None:
        """Room for the rest of a frame of this size."""
        size = len(self._data)
        if self._end - self._start == size and needed > size:
            size = min(max(needed, LARGE_BYTES), 2 * max(size, LARGE_BYTES))
        if self._start or size != len(self._data):
            self._renew(size)

    def _renew(self, size: int) -> None:
        """A buffer of another size, or the same one, with the bytes that were not taken yet at its start."""
        rest = self._view[self._start : self._end]
        if size == len(self._data) and len(rest) <= self._start:
            self._view[: len(rest)] = rest
        else:
            self._data = bytearray(size)
            view = memoryview(self._data)
            view[: len(rest)] = rest
            self._view = view
        self._start, self._end = 0, len(rest)
