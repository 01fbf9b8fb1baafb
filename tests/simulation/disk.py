"""The disk of a simulated broker: it forgets what was not synced, syncs of it can fail, and it can be full for a while.

After a failed fsync the kernel takes the pages for clean: the next sync succeeds and does not write them. So what
was not durable then stays lost at a power cut until it is written again, whatever is synced afterwards.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

from semel import faults
from semel.prove.powercut import JournaledFiles, cut_power

Content = bytes | bytearray | memoryview


class SimulatedDisk(faults.Injector):
    """What outlives a process of the broker. `note_fault` is called for each sync that fails, and once each time that
    it is full."""

    def __init__(self, data: Path, note_fault: Callable[[str], None]) -> None:
        self._data = data
        self._note_fault = note_fault
        self.on_hit: Callable[[], None] = lambda: None  # at points of the code where a process may be killed
        self.failures = 0
        self.failing_syncs = 0  # so many of the next ones fail
        self.free_bytes: int | None = None  # None: enough
        self._is_full = False  # and it was counted
        self.synced_bytes: dict[str, int] = {}  # of each file that was opened
        self.lost: dict[str, tuple[int, int]] = {}  # of each file: from, to; not durable, although a sync may say so

    def hit(self, point: str) -> None:
        self.on_hit()

    def files(self, data_dir: str | Path) -> JournaledFiles:
        return _SimulatedFiles(data_dir, self)

    def fill(self, free_bytes: int | None) -> None:
        """So many bytes are left; None: enough."""
        self.free_bytes, self._is_full = free_bytes, False

    def repair(self) -> None:
        """From here on nothing fails."""
        self.failing_syncs = 0
        self.fill(None)

    def cut_power(self, luck: random.Random | None) -> int:
        """As `semel.prove.powercut.cut_power`."""
        self.synced_bytes.clear()
        self.lost.clear()
        return cut_power(self._data, luck)

    def check_sync(self, path: str) -> None:
        if self.failing_syncs:
            self.failing_syncs -= 1
            self._note_fault(f"fsync of {self._name(path)} fails")
            raise self._failure(errno.EIO)

    def take(self, wanted_bytes: int, path: str) -> int:
        """How much of it can be written."""
        if self.free_bytes is None:
            return wanted_bytes
        taken = min(wanted_bytes, self.free_bytes)
        if taken < wanted_bytes and not self._is_full:
            self._is_full = True
            self._note_fault(f"no space for {self._name(path)}")
        if not taken:
            raise self._failure(errno.ENOSPC)
        self.free_bytes -= taken
        return taken

    def _failure(self, number: int) -> OSError:
        self.failures += 1
        return OSError(number, os.strerror(number))

    def _name(self, path: str) -> str:
        return os.path.relpath(path, self._data)


class _SimulatedFiles(JournaledFiles):
    def __init__(self, data_dir: str | Path, disk: SimulatedDisk) -> None:
        super().__init__(data_dir, real_sync=False)
        self._disk = disk
        self._paths: dict[int, str] = {}
        self.write_at = self._write_at  # type: ignore[method-assign]

    def open(self, path: str, *, create: bool = True) -> int:
        disk = self._disk
        exists = os.path.exists(path)
        if create and not exists and disk.free_bytes == 0:
            disk.take(1, path)
        fd = super().open(path, create=create)
        if not exists or path not in disk.synced_bytes:
            disk.synced_bytes[path] = os.fstat(fd).st_size
            disk.lost.pop(path, None)
        self._paths[fd] = path
        return fd

    def _write_at(self, fd: int, content: Content, position: int) -> int:
        path = self._paths[fd]
        over_bytes = max(0, min(len(content), os.fstat(fd).st_size - position))  # what it has needs no space
        count = (
            over_bytes + self._disk.take(len(content) - over_bytes, path) if over_bytes < len(content) else over_bytes
        )
        written = os.pwrite(fd, content if count == len(content) else memoryview(content)[:count], position)
        start, end = self._disk.lost.get(path, (0, 0))
        if position <= start < position + written:
            self._set_lost(path, position + written, end)
        self._disk.synced_bytes[path] = min(self._disk.synced_bytes[path], position)
        return written

    def truncate(self, fd: int, path: str, size: int) -> None:
        super().truncate(fd, path, size)
        start, end = self._disk.lost.get(path, (0, 0))
        self._set_lost(path, start, min(end, size))
        self._disk.synced_bytes[path] = min(self._disk.synced_bytes[path], size)

    def sync_file(self, fd: int, path: str) -> None:
        disk, size = self._disk, os.fstat(fd).st_size
        start, _ = disk.lost.get(path, (size, size))
        synced = disk.synced_bytes.get(path, size)
        try:
            disk.check_sync(path)
        except OSError:
            disk.lost[path] = (min(start, synced), size)
            raise
        self._journal.note("sync", path, str(min(start, size)))
        disk.synced_bytes[path] = min(start, size)

    def sync_dir(self, path: str) -> None:
        self._disk.check_sync(path)
        super().sync_dir(path)

    def rename(self, old: str, new: str) -> None:
        super().rename(old, new)
        disk = self._disk
        disk.synced_bytes[new] = disk.synced_bytes.pop(old, 0)
        disk.lost.pop(new, None)
        if old in disk.lost:
            disk.lost[new] = disk.lost.pop(old)

    def remove(self, path: str) -> None:
        super().remove(path)
        self._disk.synced_bytes.pop(path, None)
        self._disk.lost.pop(path, None)

    def _set_lost(self, path: str, start: int, end: int) -> None:
        if start < end:
            self._disk.lost[path] = (start, end)
        else:
            self._disk.lost.pop(path, None)
