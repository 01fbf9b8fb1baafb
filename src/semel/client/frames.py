"""Bytes to whole frames: what has been read of a connection and is not yet a response; and reading ahead.

Small frames are cut out of chunks. A frame larger than a chunk gets memory of its own; the rest of it is read there.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Iterator

from semel.client.errors import ConnectionFailedError

MAX_FRAME_BYTES = 1 << 30
CHUNK_BYTES = 64 * 1024
HUGE_PAGE_BYTES = 2 * 1024 * 1024
_SIZE = struct.Struct(">i")

# What other servers say first, read as the size of a frame.
_FOREIGN_STARTS = {
    b"HTTP": "it responds in HTTP; is this the port of a web server?",
    b"\x15\x03\x01": "it responds in TLS; set security.protocol to SSL or SASL_SSL",
    b"\x15\x03\x03": "it responds in TLS; set security.protocol to SSL or SASL_SSL",
}
_FOREIGN = tuple(_FOREIGN_STARTS)


class Frames:
    """Takes what was read into `space` and gives out whole frames. Belongs to the reader."""

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
    """Memory for large frames, used again once nobody can see it: fresh memory costs as much as filling it.

    Each frame is a numpy array of its own over that memory, and its end returns the memory. Whatever shows a part of a
    frame (a view, another array, a buffer or a table of Arrow) holds the array, so it cannot end before them. The cycle
    collector does not know such arrays, so that not even garbage with a `__del__` sees its frame overwritten.
    Reference counts say none of this: what `sys.getrefcount` returns for the same situation differs between versions
    of Python."""

    KEPT = 3  # one being read, one being decoded, one to spare

    def __init__(self) -> None:
        # Filled by whichever thread lets go of a frame, emptied by the reader alone: each step is one call.
        self._free: deque[bytearray | mmap.mmap] = deque(maxlen=self.KEPT)

    def take(self, size: int) -> memoryview:
        import numpy as np  # not with the module: those who read no large responses do not need it

        memory = self._free_memory(size) or _fresh_memory(size + size // 8)  # the next frame is often a little larger
        frame = np.frombuffer(memory, np.uint8, size)
        weakref.finalize(frame, self._free.append, memory).atexit = False
        return memoryview(frame)  # type: ignore[arg-type]  # types know it from Python 3.12 on

    def _free_memory(self, size: int) -> bytearray | mmap.mmap | None:
        for _ in range(len(self._free)):
            memory = self._free.popleft()
            if len(memory) >= size:
                return memory
            self._free.append(memory)
        if self._free:
            self._free.popleft()  # too small, as all of them: the fresh one takes its place
        return None


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


class ReadAhead:
    """A thread that reads one large response while the owner of the connection does something else.

    It takes turns with the owner: `start` hands the reading side of the connection over, `take` gets it back together
    with what was read. In between only the thread reads. All of a large response but its first bytes is one call to
    the kernel, so the thread and the owner hardly ever want Python's lock at the same time.

    It has a descriptor of its own for the socket. So `stop` need not wait for it: the socket is shut down, which ends
    the call, and no other file can get the number of the descriptor that it reads from."""

    def __init__(self, sock: socket.socket, frames: Frames) -> None:
        """`sock` must be in blocking mode. Raises RuntimeError if the system gives no thread."""
        self.busy = False  # whether the reading side is the thread's
        self._frames = frames
        self._whole: list[memoryview] = []
        self._error: Exception | None = None
        self._turns: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True: read a response; False: end
        self._owner_pid = os.getpid()
        self._socket = sock.dup()
        self.fd, self._signal = os.pipe()  # readable when the turn is over
        os.set_blocking(self.fd, False)
        try:
            threading.Thread(target=self._run, name="semel-read-ahead", daemon=True).start()
        except RuntimeError:
            os.close(self.fd)
            self._release()
            raise

    def start(self) -> None:
        """Reads on until a response is whole."""
        self.busy = True
        self._turns.put(True)

    def take(self) -> Iterator[memoryview]:
        """If the turn is over: the responses that it brought; then raises what it ran into. Else nothing."""
        try:
            os.read(self.fd, 1)
        except BlockingIOError:
            return
        whole, error = self._whole, self._error
        self._whole, self._error, self.busy = [], None, False
        yield from whole
        if error is not None:
            raise error

    def stop(self) -> None:
        """Ends the thread, also in the middle of a response. The connection is of no use afterwards."""
        if os.getpid() != self._owner_pid:
            return  # a forked child: shutting down would cut the parent's connection
        with contextlib.suppress(OSError):  # the other side was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._turns.put(False)
        os.close(self.fd)

    def _run(self) -> None:
        while self._turns.get():
            try:
                self._read_response()
            except Exception as error:  # whatever it is, the owner must get it
                self._error = error
            with contextlib.suppress(OSError):  # stopped
                os.write(self._signal, b"\0")
        self._release()

    def _read_response(self) -> None:
        while not self._whole:
            flags = socket.MSG_WAITALL if self._frames.is_inside_large else 0
            space = self._frames.space()
            count = self._socket.recv_into(space, len(space), flags)
            if not count:
                raise ConnectionResetError
            self._whole.extend(self._frames.filled(count))

    def _release(self) -> None:
        self._socket.close()
        os.close(self._signal)
