"""The sparse indexes of a segment: offset -> position (8-byte entries) and timestamp -> offset (12-byte entries).

New entries wait in memory and are written in blocks. That is safe: after an unclean stop the indexes are rebuilt.
"""

from __future__ import annotations

import contextlib
import struct
from typing import NamedTuple

from semel.storage.files import FileCache, Handle, write_fully

OFFSET_ENTRY = struct.Struct(">ii")
TIME_ENTRY = struct.Struct(">qi")
_PENDING_ENTRIES_MAX = 256
_BLOCK_ENTRIES = 256  # read at once where a binary search ends


class IndexEntry(NamedTuple):
    """The two numbers of an entry, as stored: the offset part is relative to the segment's base offset."""

    first: int
    second: int


class SparseIndex:
    """Entries of two ascending numbers in a file, the last ones still in memory."""

    __slots__ = ("_cache", "_entry", "_found_bytes", "_handle", "_pending", "_written", "last")

    def __init__(self, cache: FileCache, path: str, entry: struct.Struct, size_bytes: int) -> None:
        self._cache = cache
        self._handle = Handle(path)
        self._entry = entry
        self._found_bytes = size_bytes
        self._written = size_bytes // entry.size  # entries in the file; a torn last one does not count
        self._pending: list[IndexEntry] = []
        self.last: IndexEntry | None = None  # known once something was appended or `load_last` ran

    def __len__(self) -> int:
        return self._written + len(self._pending)

    @property
    def size_bytes(self) -> int:
        return len(self) * self._entry.size

    @property
    def handle(self) -> Handle:
        return self._handle

    def append(self, first: int, second: int) -> None:
        self.last = IndexEntry(first, second)
        self._pending.append(self.last)
        if len(self._pending) >= _PENDING_ENTRIES_MAX:
            with contextlib.suppress(OSError):  # a full disk: entries wait in memory, the log itself decides
                self.write_pending()

    def load_last(self) -> IndexEntry | None:
        if self.last is None and len(self):
            self.last = self.entry(len(self) - 1)
        return self.last

    def entry(self, number: int) -> IndexEntry:
        if number >= self._written:
            return self._pending[number - self._written]
        size = self._entry.size
        data = self._cache.files.read_at(self._cache.fd(self._handle), size, number * size)
        return IndexEntry._make(self._entry.unpack(data))

    def floor(self, key: int, field: int = 0) -> IndexEntry | None:
        """The last entry whose `field` is at most `key`."""
        pending = self._pending
        if pending and pending[0][field] <= key:
            return pending[_count_up_to(pending, key, field) - 1]
        low, high = 0, self._written  # entries [0, low) are at most key, entries [high, ...) are above
        while high - low > _BLOCK_ENTRIES:
            middle = (low + high) // 2
            if self.entry(middle)[field] <= key:
                low = middle + 1
            else:
                high = middle
        block_start = max(0, low - 1)
        block = self._block(block_start, high)
        count = _count_up_to(block, key, field)
        return block[count - 1] if count else None

    def entries(self) -> list[IndexEntry]:
        return self._block(0, self._written) + self._pending

    def write_pending(self) -> None:
        if not self._pending:
            return
        data = b"".join(self._entry.pack(*entry) for entry in self._pending)
        write_fully(self._cache.files, self._cache.fd(self._handle), data, self._written * self._entry.size)
        self._written += len(self._pending)
        self._pending = []

    def reset(self) -> None:
        """Forgets every entry, on disk too."""
        self._pending = []
        self.last = None
        if self._found_bytes or self._written:
            self._cache.files.truncate(self._cache.fd(self._handle), self._handle.path, 0)
        self._found_bytes = self._written = 0

    def close(self) -> None:
        self._cache.close(self._handle)

    def _block(self, start: int, end: int) -> list[IndexEntry]:
        if end <= start:
            return []
        size = self._entry.size
        data = self._cache.files.read_at(self._cache.fd(self._handle), (end - start) * size, start * size)
        return [IndexEntry._make(pair) for pair in self._entry.iter_unpack(data[: len(data) // size * size])]


def _count_up_to(entries: list[IndexEntry], key: int, field: int) -> int:
    """How many entries have a `field` of at most `key`."""
    low, high = 0, len(entries)
    while low < high:
        middle = (low + high) // 2
        if entries[middle][field] <= key:
            low = middle + 1
        else:
            high = middle
    return low
