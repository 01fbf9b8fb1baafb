"""The only place that touches files: plain system calls.

`semel.prove.powercut` has the same calls with a journal of what was synced: kill -9 leaves the page cache alive, so it
cannot show a missing fsync; `cut_power` puts a folder back to what was fsynced.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from semel import faults

_READ_WRITE = os.O_RDWR | os.O_CLOEXEC


class DiskFiles:
    """Files on a real disk. Paths are absolute strings."""

    write_at: Callable[[int, bytes | bytearray | memoryview, int], int] = staticmethod(os.pwrite)
    read_at: Callable[[int, int, int], bytes] = staticmethod(os.pread)

    def open(self, path: str, *, create: bool = True) -> int:
        """A descriptor for reading and writing; the file is created if need be."""
        return os.open(path, _READ_WRITE | os.O_CREAT if create else _READ_WRITE, 0o644)

    def sync_file(self, fd: int, path: str) -> None:
        """Back only when the file's bytes and its length are on the disk. May run on any thread."""
        os.fdatasync(fd)

    def sync_dir(self, path: str) -> None:
        """Back only when the names in a folder (created, renamed, removed) are on the disk. May run on any thread."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def sync_all(self, folder: str) -> None:
        """Syncs everything below a folder at once: for thousands of files much faster than one by one."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _sync_file_system(fd)
        finally:
            os.close(fd)

    def truncate(self, fd: int, path: str, size: int) -> None:
        os.ftruncate(fd, size)

    def make_dir(self, path: str) -> None:
        os.mkdir(path, 0o755)

    def rename(self, old: str, new: str) -> None:
        os.replace(old, new)

    def remove(self, path: str) -> None:
        os.unlink(path)

    def remove_dir(self, path: str) -> None:
        os.rmdir(path)

    def write_whole(self, path: str, content: bytes, *, sync: bool = True) -> None:
        """Replaces a small file so that a reader, also one after a crash, finds the old content or the new one."""
        aside = path + ".tmp"
        fd = self.open(aside)
        try:
            self.truncate(fd, aside, 0)
            write_fully(self, fd, content, 0)
            if sync:
                self.sync_file(fd, aside)
        finally:
            os.close(fd)
        self.rename(aside, path)
        if sync:
            self.sync_dir(os.path.dirname(path))

    def remove_tree(self, path: str) -> None:
        """Removes a folder of plain files."""
        with os.scandir(path) as entries:
            for entry in list(entries):
                self.remove(entry.path)
        self.remove_dir(path)


def files_for(data_dir: str | Path) -> DiskFiles:
    """Files on a real disk, unless a test or `semel prove` has injected others."""
    files: DiskFiles | None = faults.files(data_dir) if faults.armed else None
    return files or DiskFiles()


def _sync_file_system(fd: int) -> None:
    """syncfs(2), which Python does not have. It reports write errors (Linux 5.8), os.sync() does not."""
    import ctypes

    try:
        syncfs = ctypes.CDLL(None, use_errno=True).syncfs
    except (OSError, AttributeError):
        os.sync()
        return
    if syncfs(fd) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def write_fully(files: DiskFiles, fd: int, content: bytes | bytearray | memoryview, position: int) -> None:
    """pwrite until everything is written: the system may take less than it was given."""
    written = files.write_at(fd, content, position)
    if written != len(content):
        rest = memoryview(content)
        while written < len(content):
            written += files.write_at(fd, rest[written:], position + written)


@dataclass(slots=True, eq=False)
class Handle:
    """A file that may or may not be open at the moment. `fd` is -1 while it is closed."""

    path: str
    fd: int = -1
    pins: int = 0  # in use by another thread: must not be closed
    recent: bool = False
    close_unpinned: bool = False  # to be closed by the last unpin


class FileCache:
    """Keeps a bounded number of files open. When one more is needed, one that was not used lately is closed."""

    def __init__(self, files: DiskFiles, limit: int = 1024, *, create: bool = True) -> None:
        self.files = files
        self._create = create
        self._limit = limit
        self._open: OrderedDict[Handle, None] = (
            OrderedDict()
        )  # in the order of the next look; thousands are closed one by one

    def fd(self, handle: Handle) -> int:
        handle.recent = True
        if handle.fd >= 0:
            return handle.fd
        if len(self._open) >= self._limit:
            self._close_unused()
        handle.fd = self.files.open(handle.path, create=self._create)
        self._open[handle] = None
        return handle.fd

    def close(self, handle: Handle) -> None:
        """Closes a file for good, before it is renamed or removed."""
        if handle.pins:
            handle.close_unpinned = True
        elif handle.fd >= 0:
            self._open.pop(handle, None)
            os.close(handle.fd)
            handle.fd = -1

    def close_all(self) -> None:
        """Closes every file, in use or not: whoever uses them has ended."""
        while self._open:
            handle, _ = self._open.popitem()
            os.close(handle.fd)
            handle.fd = -1

    def pin(self, handle: Handle) -> int:
        """Opens a file for another thread: it stays open until `unpin`. Both are called on the owner's thread."""
        fd = self.fd(handle)
        handle.pins += 1
        return fd

    def unpin(self, handle: Handle) -> None:
        handle.pins -= 1
        if not handle.pins and (handle.close_unpinned or len(self._open) > self._limit):
            handle.close_unpinned = False
            self.close(handle)

    def _close_unused(self) -> None:
        """Second chance: passes over files used since the last look; after two rounds the rest is pinned."""
        for _ in range(2 * len(self._open)):
            handle, _ = self._open.popitem(last=False)
            if handle.recent or handle.pins:
                handle.recent = False
                self._open[handle] = None
            else:
                os.close(handle.fd)
                handle.fd = -1
                if len(self._open) < self._limit:
                    return
