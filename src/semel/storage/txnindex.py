"""The index of aborted transactions of a segment (`.txnindex`): 34 bytes per abort, written only where there was one.

Entries are ordered by their last offset (the marker). A lookup starts with a binary search for the fetch offset. From
there on an entry matters only if its first offset is below the end of the fetch; a long transaction may stand far
behind, so every block of entries has its lowest first offset in memory and whole blocks are passed over.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from semel.storage.files import FileCache, Handle, write_fully

ENTRY = struct.Struct(">hqqqq")
_BLOCK_ENTRIES = 1024


class AbortedTransaction(NamedTuple):
    producer_id: int
    first_offset: int
    last_offset: int  # of the marker
    last_stable_offset: int  # when the marker was written


class _Block(NamedTuple):
    first_offset_min: int
    last_offset: int
    last_stable_offset: int


class TransactionIndex:
    """A million aborts cost about 1,000 small tuples of memory."""

    __slots__ = ("_blocks", "_cache", "_handle", "_open_block", "count")

    def __init__(self, cache: FileCache, path: str, size_bytes: int) -> None:
        self._cache = cache
        self._handle = Handle(path)
        self.count = size_bytes // ENTRY.size
        self._blocks: list[_Block] | None = None if self.count else []  # full blocks only; None: not read yet
        self._open_block: list[AbortedTransaction] = []  # the entries after the last full block

    @property
    def handle(self) -> Handle:
        return self._handle

    def append(self, aborted: AbortedTransaction) -> None:
        self._load()
        data = ENTRY.pack(0, *aborted)
        write_fully(self._cache.files, self._cache.fd(self._handle), data, self.count * ENTRY.size)
        self.count += 1
        self._remember(aborted)

    def overlapping(self, fetch_offset: int, upper_offset: int) -> tuple[list[AbortedTransaction], bool]:
        """Aborts that overlap [fetch_offset, upper_offset), and whether later segments need no look."""
        self._load()
        assert self._blocks is not None
        found: list[AbortedTransaction] = []
        for number in range(self._first_block(fetch_offset), len(self._blocks)):
            block = self._blocks[number]
            if block.first_offset_min < upper_offset:
                start = number * _BLOCK_ENTRIES
                found += _matching(self.entries(start, start + _BLOCK_ENTRIES), fetch_offset, upper_offset)
            if block.last_stable_offset >= upper_offset:
                return found, True
        found += _matching(self._open_block, fetch_offset, upper_offset)
        complete = bool(self._open_block) and self._open_block[-1].last_stable_offset >= upper_offset
        return found, complete

    def entries(self, start: int = 0, end: int | None = None) -> list[AbortedTransaction]:
        end = self.count if end is None else min(end, self.count)
        if end <= start:
            return []
        fd = self._cache.fd(self._handle)
        data = self._cache.files.read_at(fd, (end - start) * ENTRY.size, start * ENTRY.size)
        whole = len(data) // ENTRY.size * ENTRY.size
        return [AbortedTransaction._make(fields[1:]) for fields in ENTRY.iter_unpack(data[:whole])]

    def drop_last(self) -> None:
        """Takes the last entry back: its marker could not be written."""
        kept = self.entries(0, self.count - 1)
        self._cache.files.truncate(self._cache.fd(self._handle), self._handle.path, len(kept) * ENTRY.size)
        self.count = len(kept)
        self._blocks, self._open_block = [], []
        for entry in kept:
            self._remember(entry)

    def is_sound(self, base_offset: int) -> bool:
        """Whether the entries are what this code writes: whole transactions, ascending markers of this segment."""
        last = base_offset - 1
        for entry in self.entries():
            if entry.last_offset <= last or entry.first_offset > entry.last_offset:
                return False
            last = entry.last_offset
        return True

    def reset(self) -> None:
        self._blocks, self._open_block = [], []
        if self.count or self._handle.fd >= 0:
            self._cache.files.truncate(self._cache.fd(self._handle), self._handle.path, 0)
        self.count = 0

    def close(self) -> None:
        self._cache.close(self._handle)

    def _load(self) -> None:
        if self._blocks is not None:
            return
        self._blocks = []
        for start in range(0, self.count, _BLOCK_ENTRIES):
            for entry in self.entries(start, start + _BLOCK_ENTRIES):
                self._remember(entry)

    def _remember(self, aborted: AbortedTransaction) -> None:
        assert self._blocks is not None
        self._open_block.append(aborted)
        if len(self._open_block) == _BLOCK_ENTRIES:
            lowest = min(entry.first_offset for entry in self._open_block)
            self._blocks.append(_Block(lowest, aborted.last_offset, aborted.last_stable_offset))
            self._open_block = []

    def _first_block(self, fetch_offset: int) -> int:
        """The first block whose last marker is not before the fetch."""
        assert self._blocks is not None
        low, high = 0, len(self._blocks)
        while low < high:
            middle = (low + high) // 2
            if self._blocks[middle].last_offset < fetch_offset:
                low = middle + 1
            else:
                high = middle
        return low


def _matching(entries: list[AbortedTransaction], fetch_offset: int, upper_offset: int) -> list[AbortedTransaction]:
    return [entry for entry in entries if entry.last_offset >= fetch_offset and entry.first_offset < upper_offset]
