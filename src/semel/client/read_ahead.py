"""A thread that reads one large answer while the owner of the connection does something else.

It takes turns with the owner: `start` hands the reading side of the connection over, `take` gets it back together with
what was read. In between only the thread reads. All of a large answer but its first bytes is one call to the kernel,
so the thread and the owner hardly ever want Python's lock at the same time.

It has a descriptor of its own for the socket. So `stop` need not wait for it: the socket is shut down, which ends the
call, and no other file can get the number of the descriptor that it reads from.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Iterator

from semel.client.frames import Frames


class ReadAhead:
    def __init__(self, sock: socket.socket, frames: Frames) -> None:
        """`sock` must be in blocking mode. Raises RuntimeError if the system gives no thread."""
        self.busy = False  # whether the reading side is the thread's
        self._frames = frames
        self._whole: list[memoryview] = []
        self._error: Exception | None = None
        self._turns: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True: read an answer; False: end
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
        """Reads on until an answer is whole."""
        self.busy = True
        self._turns.put(True)

    def take(self) -> Iterator[memoryview]:
        """If the turn is over: the answers that it brought; then raises what it ran into. Else nothing."""
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
        """Ends the thread, also in the middle of an answer. The connection is of no use afterwards."""
        if os.getpid() != self._owner_pid:
            return  # a forked child: shutting down would cut the parent's connection
        with contextlib.suppress(OSError):  # the other side was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._turns.put(False)
        os.close(self.fd)

    def _run(self) -> None:
        while self._turns.get():
            try:
                self._read_answer()
            except Exception as error:  # whatever it is, the owner must hear of it
                self._error = error
            with contextlib.suppress(OSError):  # stopped
                os.write(self._signal, b"\0")
        self._release()

    def _read_answer(self) -> None:
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
