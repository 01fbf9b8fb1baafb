"""fdatasync without a thread: io_submit starts it, an eventfd reports its end (Linux).

A thread that returns from fdatasync has to wait for Python's lock, which a busy event loop rarely releases. Here no
thread waits: one system call starts the syncs of many files, and the loop reads their ends as it reads sockets. Where
the system has no io_submit (`KernelSync.open` returns None), threads call fdatasync. Decision 82 has the figures.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import platform
import struct
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

_log = logging.getLogger("semel.storage")

SLOTS = 64  # syncs under way at a time


class _Numbers(NamedTuple):
    """Of the system calls; Python has no functions for them."""

    setup: int
    destroy: int
    submit: int
    get_events: int


_SYSTEM_CALLS = {"x86_64": _Numbers(206, 207, 209, 208), "aarch64": _Numbers(0, 1, 2, 4)}
_FDSYNC = 3
_RESULT_TO_FD = 1
# struct iocb: data, key, flags, operation, priority, fd, buffer, bytes, offset, reserved, flags, eventfd
_CONTROL_BLOCK = struct.Struct("<QIIHhIQQqQII")
_EVENT = struct.Struct("<QQqq")  # struct io_event: data, control block, result, second result


class KernelSync:
    """Syncs of up to SLOTS files. `on_done(key, error)` is called on the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_done: Callable[[Any, OSError | None], None]) -> None:
        self._loop = loop
        self._on_done = on_done
        self._numbers = _SYSTEM_CALLS[platform.machine()]
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._call.restype = ctypes.c_long
        self._control_blocks = ctypes.create_string_buffer(SLOTS * _CONTROL_BLOCK.size)
        self._pointers = (ctypes.c_void_p * SLOTS)()
        self._events = ctypes.create_string_buffer(SLOTS * _EVENT.size)
        self._free = list(range(SLOTS))
        self._keys: dict[int, Any] = {}  # slot: whose sync it is
        self._context = ctypes.c_ulong(0)
        self._system(self._numbers.setup, ctypes.c_long(SLOTS), ctypes.byref(self._context))
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # type: ignore[attr-defined,unused-ignore]
        loop.add_reader(self._eventfd, self._collect)

    @classmethod
    def open(cls, loop: asyncio.AbstractEventLoop, on_done: Callable[[Any, OSError | None], None]) -> KernelSync | None:
        """None where this system cannot do it."""
        is_known = sys.platform == "linux" and sys.byteorder == "little" and platform.machine() in _SYSTEM_CALLS
        if not is_known or not hasattr(os, "eventfd"):
            return None
        try:
            return cls(loop, on_done)
        except (OSError, NotImplementedError) as error:
            _log.info("fdatasync runs in threads: %s", error)
            return None

    def submit(self, wanted: list[tuple[int, Any]]) -> int:
        """Starts the syncs of (fd, key); returns how many of them, from the front: not all may fit."""
        count = min(len(wanted), len(self._free))
        base = ctypes.addressof(self._control_blocks)
        slots = self._free[:count]
        for number, slot in enumerate(slots):
            block = (slot, 0, 0, _FDSYNC, 0, wanted[number][0], 0, 0, 0, 0, _RESULT_TO_FD, self._eventfd)
            _CONTROL_BLOCK.pack_into(self._control_blocks, slot * _CONTROL_BLOCK.size, *block)
            self._pointers[number] = base + slot * _CONTROL_BLOCK.size
        try:
            taken = self._system(self._numbers.submit, self._context, ctypes.c_long(count), self._pointers)
        except OSError as error:
            _log.warning("cannot sync through the kernel: %s", error)
            return 0
        for number, slot in enumerate(slots[:taken]):
            self._keys[slot] = wanted[number][1]
        del self._free[:taken]
        return taken

    def _collect(self) -> None:
        try:
            os.eventfd_read(self._eventfd)  # type: ignore[attr-defined,unused-ignore]
        except BlockingIOError:
            return
        count = self._system(
            self._numbers.get_events, self._context, ctypes.c_long(0), ctypes.c_long(SLOTS), self._events, None
        )
        ended = [_EVENT.unpack_from(self._events, number * _EVENT.size) for number in range(count)]
        for slot, _, result, _ in ended:
            self._free.append(slot)
            error = OSError(-result, os.strerror(-result)) if result < 0 else None
            self._on_done(self._keys.pop(slot), error)

    def _system(self, number: int, *arguments: Any) -> int:
        result = int(self._call(ctypes.c_long(number), *arguments))
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return result

    def close(self) -> None:
        """Waits for what is under way."""
        if not self._loop.is_closed():
            self._loop.remove_reader(self._eventfd)
        self._system(self._numbers.destroy, self._context)
        os.close(self._eventfd)
