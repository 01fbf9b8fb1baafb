"""One segment of a log: a file of batches with its indexes. It knows batches, not producers.

The sparse indexes map offset -> position (8-byte entries) and timestamp -> offset (12-byte entries). New entries stay
in memory first and are written in blocks. That is safe: after an unclean stop the indexes are rebuilt.

The transaction index (`.txnindex`) has 34 bytes per aborted transaction and exists only where there was one. Entries
are ordered by their last offset (the marker). A lookup starts with a binary search for the fetch offset; from there on
an entry counts only if its first offset is below the end of the fetch. A long transaction may be far behind, so the
lowest first offset of every block of entries is in memory and whole blocks are skipped.
"""

from __future__ import annotations

import contextlib
import os
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, NamedTuple

from semel.protocol.batch import CRC_START, HEADER, HEADER_SIZE, LOG_OVERHEAD, MAGIC, NO_TIMESTAMP, BatchHeader
from semel.protocol.crc import crc32c
from semel.storage.files import DiskFiles, FileCache, Handle, write_fully

if TYPE_CHECKING:
    from semel.protocol.rows import Marker

LOG, OFFSET_INDEX, TIME_INDEX, TXN_INDEX, SNAPSHOT = ".log", ".index", ".timeindex", ".txnindex", ".snapshot"
DELETED, CLEANED, SWAP = ".deleted", ".cleaned", ".swap"
SEGMENT_FILES = (LOG, OFFSET_INDEX, TIME_INDEX, TXN_INDEX)
RELATIVE_OFFSET_MAX = 2**31 - 1
_SCAN_BYTES = 1 << 20
_REBUILT_INTERVAL_BYTES = 4096  # between entries of an index that is made anew
_unpack_header = HEADER.unpack_from


def file_name(offset: int, suffix: str) -> str:
    return f"{offset:020d}{suffix}"


# Indexes

OFFSET_ENTRY = struct.Struct(">ii")
TIME_ENTRY = struct.Struct(">qi")
_PENDING_ENTRIES_MAX = 256
_SEARCH_BLOCK_ENTRIES = 256  # read at once where a binary search ends
_FIELDS = (itemgetter(0), itemgetter(1))


class IndexEntry(NamedTuple):
    """The two numbers of an entry, as stored: the offset part is relative to the segment's base offset."""

    first: int
    second: int


class SparseIndex:
    """Entries of two ascending numbers in a file, the last ones still in memory."""

    __slots__ = ("_cache", "_entry", "_found_bytes", "_pending", "_written", "count", "handle", "last")

    def __init__(self, cache: FileCache, path: str, entry: struct.Struct, size_bytes: int) -> None:
        self._cache = cache
        self.handle = Handle(path)
        self._entry = entry
        self._found_bytes = size_bytes
        self._written = size_bytes // entry.size  # entries in the file; a torn last one does not count
        self._pending: list[IndexEntry] = []
        self.count = self._written  # with those in memory
        self.last: IndexEntry | None = None  # known once something was appended or `load_last` ran

    def append(self, first: int, second: int) -> None:
        self.last = IndexEntry(first, second)
        self._pending.append(self.last)
        self.count += 1
        if len(self._pending) >= _PENDING_ENTRIES_MAX:
            with contextlib.suppress(OSError):  # a full disk: entries wait in memory, the log itself decides
                self.write_pending()

    def load_last(self) -> IndexEntry | None:
        if self.last is None and self.count:
            self.last = self.entry(self.count - 1)
        return self.last

    def entry(self, number: int) -> IndexEntry:
        if number >= self._written:
            return self._pending[number - self._written]
        size = self._entry.size
        data = self._cache.files.read_at(self._cache.fd(self.handle), size, number * size)
        return IndexEntry._make(self._entry.unpack(data))

    def floor(self, key: int, field: int = 0) -> IndexEntry | None:
        """The last entry whose `field` is at most `key`."""
        pending = self._pending
        if pending and pending[0][field] <= key:
            return pending[bisect_right(pending, key, key=_FIELDS[field]) - 1]
        low, high = 0, self._written  # entries [0, low) are at most key, entries [high, ...) are above
        while high - low > _SEARCH_BLOCK_ENTRIES:
            middle = (low + high) // 2
            if self.entry(middle)[field] <= key:
                low = middle + 1
            else:
                high = middle
        block_start = max(0, low - 1)
        block = self._block(block_start, high)
        count = bisect_right(block, key, key=_FIELDS[field])
        return block[count - 1] if count else None

    def entries(self) -> list[IndexEntry]:
        return self._block(0, self._written) + self._pending

    def write_pending(self) -> None:
        if not self._pending:
            return
        data = b"".join(self._entry.pack(*entry) for entry in self._pending)
        write_fully(self._cache.files, self._cache.fd(self.handle), data, self._written * self._entry.size)
        self._written += len(self._pending)
        self._pending = []

    def reset(self) -> None:
        """Forgets every entry, on disk too."""
        self._pending = []
        self.last = None
        if self._found_bytes or self._written:
            self._cache.files.truncate(self._cache.fd(self.handle), self.handle.path, 0)
        self._found_bytes = self._written = self.count = 0

    def _block(self, start: int, end: int) -> list[IndexEntry]:
        if end <= start:
            return []
        size = self._entry.size
        data = self._cache.files.read_at(self._cache.fd(self.handle), (end - start) * size, start * size)
        return [IndexEntry._make(pair) for pair in self._entry.iter_unpack(data[: len(data) // size * size])]


TXN_ENTRY = struct.Struct(">hqqqq")
_BLOCK_ENTRIES = 1024
_last_offset = attrgetter("last_offset")


class AbortedTxn(NamedTuple):
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

    __slots__ = ("_blocks", "_cache", "_open_block", "count", "handle")

    def __init__(self, cache: FileCache, path: str, size_bytes: int) -> None:
        self._cache = cache
        self.handle = Handle(path)
        self.count = size_bytes // TXN_ENTRY.size
        self._blocks: list[_Block] | None = None if self.count else []  # full blocks only; None: not read yet
        self._open_block: list[AbortedTxn] = []  # the entries after the last full block

    def append(self, aborted: AbortedTxn) -> None:
        self._load()
        data = TXN_ENTRY.pack(0, *aborted)
        write_fully(self._cache.files, self._cache.fd(self.handle), data, self.count * TXN_ENTRY.size)
        self.count += 1
        self._remember(aborted)

    def overlapping(self, fetch_offset: int, upper_offset: int) -> tuple[list[AbortedTxn], bool]:
        """Aborts that overlap [fetch_offset, upper_offset), and whether later segments need no look."""
        self._load()
        assert self._blocks is not None
        found: list[AbortedTxn] = []
        first = bisect_left(self._blocks, fetch_offset, key=_last_offset)  # its last marker is not before the fetch
        for number in range(first, len(self._blocks)):
            block = self._blocks[number]
            if block.first_offset_min < upper_offset:
                start = number * _BLOCK_ENTRIES
                found += _matching(self.entries(start, start + _BLOCK_ENTRIES), fetch_offset, upper_offset)
            if block.last_stable_offset >= upper_offset:
                return found, True
        found += _matching(self._open_block, fetch_offset, upper_offset)
        complete = bool(self._open_block) and self._open_block[-1].last_stable_offset >= upper_offset
        return found, complete

    def entries(self, start: int = 0, end: int | None = None) -> list[AbortedTxn]:
        end = self.count if end is None else min(end, self.count)
        if end <= start:
            return []
        fd = self._cache.fd(self.handle)
        data = self._cache.files.read_at(fd, (end - start) * TXN_ENTRY.size, start * TXN_ENTRY.size)
        whole = len(data) // TXN_ENTRY.size * TXN_ENTRY.size
        return [AbortedTxn._make(fields[1:]) for fields in TXN_ENTRY.iter_unpack(data[:whole])]

    def drop_last(self) -> None:
        """Takes the last entry back: its marker could not be written."""
        kept = self.entries(0, self.count - 1)
        self._cache.files.truncate(self._cache.fd(self.handle), self.handle.path, len(kept) * TXN_ENTRY.size)
        self.count = len(kept)
        self._blocks, self._open_block = [], []
        for entry in kept:
            self._remember(entry)

    def reset(self) -> None:
        self._blocks, self._open_block = [], []
        if self.count or self.handle.fd >= 0:
            self._cache.files.truncate(self._cache.fd(self.handle), self.handle.path, 0)
        self.count = 0

    def _load(self) -> None:
        if self._blocks is not None:
            return
        self._blocks = []
        for start in range(0, self.count, _BLOCK_ENTRIES):
            for entry in self.entries(start, start + _BLOCK_ENTRIES):
                self._remember(entry)

    def _remember(self, aborted: AbortedTxn) -> None:
        assert self._blocks is not None
        self._open_block.append(aborted)
        if len(self._open_block) == _BLOCK_ENTRIES:
            lowest = min(entry.first_offset for entry in self._open_block)
            self._blocks.append(_Block(lowest, aborted.last_offset, aborted.last_stable_offset))
            self._open_block = []


def _matching(entries: list[AbortedTxn], fetch_offset: int, upper_offset: int) -> list[AbortedTxn]:
    return [entry for entry in entries if entry.last_offset >= fetch_offset and entry.first_offset < upper_offset]


# Segments
class Segment:
    """`size` is the length of what counts: whole batches. Files are opened, and created, when first touched."""

    __slots__ = (
        "base_offset",
        "bytes_since_index",
        "cache",
        "created_ms",
        "folder",
        "log",
        "max_timestamp_ms",
        "max_timestamp_offset",
        "offset_index",
        "rolling_timestamp_ms",
        "size",
        "suspect",
        "time_index",
        "txn_index",
    )

    def __init__(
        self, cache: FileCache, folder: str, base_offset: int, sizes: dict[str, int], created_ms: int, suffix: str = ""
    ) -> None:
        stem = os.path.join(folder, f"{base_offset:020d}")
        self.cache = cache
        self.folder = folder
        self.base_offset = base_offset
        self.log = Handle(stem + LOG + suffix)
        self.size = sizes.get(LOG, 0)
        self.offset_index = SparseIndex(cache, stem + OFFSET_INDEX + suffix, OFFSET_ENTRY, sizes.get(OFFSET_INDEX, 0))
        self.time_index = SparseIndex(cache, stem + TIME_INDEX + suffix, TIME_ENTRY, sizes.get(TIME_INDEX, 0))
        self.txn_index = TransactionIndex(cache, stem + TXN_INDEX + suffix, sizes.get(TXN_INDEX, 0))
        self.suspect = _indexes_missing_or_torn(sizes)
        self.bytes_since_index = 0
        self.created_ms = created_ms  # of an existing file: when it was last written
        self.rolling_timestamp_ms: int | None = None  # of the first batch: the age of a segment counts from there
        self.max_timestamp_ms = -1
        self.max_timestamp_offset = -1  # last offset of the batch that has it

    @property
    def files(self) -> DiskFiles:
        return self.cache.files

    @property
    def fd(self) -> int:
        return self.cache.fd(self.log)

    def indexes_look_sound(self) -> bool:
        """What sizes and the last entry can tell. A wrong entry in the middle is found when it is used."""
        if self.suspect:
            return False
        last = self.offset_index.load_last()
        return last is None or (0 < last.second < self.size and last.first >= 0)

    # Writing

    def write(self, batch: bytes | bytearray | memoryview) -> None:
        """Puts bytes at the end, all or none. Does not count them: `note_batch` does, once they are accepted."""
        files, fd = self.cache.files, self.cache.fd(self.log)
        try:
            written = files.write_at(fd, batch, self.size)
            while written != len(batch):
                written += files.write_at(fd, memoryview(batch)[written:], self.size + written)
        except OSError:
            files.truncate(fd, self.log.path, self.size)
            raise

    def note_batch(self, last_offset: int, max_timestamp_ms: int, size: int, index_interval_bytes: int) -> None:
        """Counts a batch that was written at the end: the size, the highest timestamp, now and then an index entry."""
        if self.rolling_timestamp_ms is None and self.size == 0:
            self.rolling_timestamp_ms = max_timestamp_ms
        if max_timestamp_ms > self.max_timestamp_ms:
            self.max_timestamp_ms = max_timestamp_ms
            self.max_timestamp_offset = last_offset
        if self.bytes_since_index > index_interval_bytes:
            self.offset_index.append(last_offset - self.base_offset, self.size)
            self._index_time()
            self.bytes_since_index = 0
        self.bytes_since_index += size
        self.size += size

    def note_found(self, header: BatchHeader, index_interval_bytes: int) -> None:
        """Counts a batch that is there already. One that compaction emptied has no record with its timestamp."""
        timestamp_ms = header.max_timestamp if header.record_count else NO_TIMESTAMP
        self.note_batch(header.last_offset, timestamp_ms, header.size, index_interval_bytes)

    def _index_time(self) -> None:
        last = self.time_index.load_last()
        if self.max_timestamp_ms > (last.first if last else -1):
            self.time_index.append(self.max_timestamp_ms, self.max_timestamp_offset - self.base_offset)

    def seal(self) -> None:
        """The segment is complete: its highest timestamp goes into the time index, its indexes to their files."""
        if self.size:
            self._index_time()
        self.write_indexes()

    def write_indexes(self) -> None:
        self.cache.fd(self.offset_index.handle)  # Kafka's tools expect the files to be there
        self.cache.fd(self.time_index.handle)
        self.offset_index.write_pending()
        self.time_index.write_pending()

    def truncate(self, size: int) -> None:
        self.files.truncate(self.fd, self.log.path, size)
        self.size = size

    def reset_indexes(self) -> None:
        """Of offsets and times. They come back with the batches that are counted from now on."""
        self.offset_index.reset()
        self.time_index.reset()
        self.bytes_since_index = 0
        self.rolling_timestamp_ms = None
        self.max_timestamp_ms = -1
        self.max_timestamp_offset = -1

    # Reading

    def batches(
        self, start: int = 0, end: int | None = None, *, verify: bool = False
    ) -> Iterator[tuple[int, BatchHeader]]:
        """(position, header) of every whole batch; with `verify` it ends before the first whose CRC is wrong."""
        end = self.size if end is None else end
        if end <= start:
            return iter(())
        return scan(self.files, self.fd, start, end, verify=verify)

    def position_hint(self, offset: int) -> int:
        """The position of a batch at or before the one with an offset. A wrong index is rebuilt."""
        entry = self.offset_index.floor(offset - self.base_offset)
        if entry is not None and not self._is_batch(entry.second, entry.first + self.base_offset):
            self.rebuild_indexes()
            entry = self.offset_index.floor(offset - self.base_offset)
        return entry.second if entry is not None else 0

    def _is_batch(self, position: int, last_offset: int) -> bool:
        head = self.files.read_at(self.fd, HEADER_SIZE, position) if 0 < position < self.size else b""
        if len(head) < HEADER_SIZE:
            return False
        header = BatchHeader._make(_unpack_header(head))
        return header.magic == MAGIC and header.last_offset == last_offset

    def rebuild_indexes(self) -> None:
        """Offset and time index from the batches themselves."""
        size, self.size = self.size, 0
        self.reset_indexes()
        for _, header in self.batches(0, size):
            self.note_found(header, _REBUILT_INTERVAL_BYTES)
        self.seal()

    def find(self, offset: int) -> tuple[int, BatchHeader] | None:
        """The first batch that reaches the offset."""
        for position, header in self.batches(self.position_hint(offset)):
            if header.last_offset >= offset:
                return position, header
        return None

    def next_offset(self) -> int:
        """The offset after the last batch."""
        last = self.offset_index.load_last()
        result = self.base_offset
        for _, header in self.batches(last.second if last else 0):
            result = header.next_offset
        return result

    def read_batch(self, position: int, header: BatchHeader) -> bytes:
        return self.files.read_at(self.fd, header.size, position)

    def marker(self, position: int, header: BatchHeader) -> Marker | None:
        """The marker in a control batch; None if it holds none (any more)."""
        from semel.protocol.rows import decode_batch, decode_marker

        records = decode_batch(self.read_batch(position, header)).records
        return decode_marker(records[0]) if records else None

    def load_max_timestamp(self) -> int:
        """The highest timestamp of the segment, from the time index where it is not in memory."""
        if self.max_timestamp_ms < 0 and self.size:
            last = self.time_index.load_last()
            if last is not None:
                self.max_timestamp_ms, self.max_timestamp_offset = last.first, last.second + self.base_offset
        return self.max_timestamp_ms

    def check_max_timestamp(self) -> int:
        """As `load_max_timestamp`, from the batch itself: before records are deleted for their age."""
        claimed_ms = self.load_max_timestamp()
        if claimed_ms >= 0:
            found = self.find(self.max_timestamp_offset)
            if found is None or found[1].max_timestamp != claimed_ms:
                self.rebuild_indexes()
        return self.max_timestamp_ms

    def load_rolling_timestamp(self) -> int | None:
        if self.rolling_timestamp_ms is None and self.size:
            first = BatchHeader._make(HEADER.unpack(self.files.read_at(self.fd, HEADER_SIZE, 0)))
            self.rolling_timestamp_ms = first.max_timestamp
        return self.rolling_timestamp_ms

    # Files

    def _all_handles(self) -> list[Handle]:
        return [self.log, self.offset_index.handle, self.time_index.handle, self.txn_index.handle]

    def handles(self) -> list[Handle]:
        """The files that exist, for syncing."""
        return self._all_handles() if self.txn_index.count else self._all_handles()[:3]

    def close(self) -> None:
        for handle in self._all_handles():
            self.cache.close(handle)

    def paths(self) -> list[str]:
        return [handle.path for handle in self._all_handles()]


def _indexes_missing_or_torn(sizes: dict[str, int]) -> bool:
    wanted = ((OFFSET_INDEX, OFFSET_ENTRY.size), (TIME_INDEX, TIME_ENTRY.size))
    return bool(sizes.get(LOG)) and any(suffix not in sizes or sizes[suffix] % size for suffix, size in wanted)


def scan(files: DiskFiles, fd: int, start: int, end: int, *, verify: bool = False) -> Iterator[tuple[int, BatchHeader]]:
    """(position, header) of the whole batches in a part of a file, up to the first thing that is not one."""
    position, chunk_start, chunk = start, start, b""
    while end - position >= HEADER_SIZE:
        at = position - chunk_start
        if len(chunk) - at < HEADER_SIZE:
            chunk_start, chunk, at = position, files.read_at(fd, min(_SCAN_BYTES, end - position), position), 0
            if len(chunk) < HEADER_SIZE:
                return
        header = BatchHeader._make(_unpack_header(chunk, at))
        size = header.length + LOG_OVERHEAD
        if header.magic != MAGIC or size < HEADER_SIZE or size > end - position or header.last_offset_delta < 0:
            return
        if verify:
            if len(chunk) - at < size:
                chunk_start, chunk, at = (
                    position,
                    files.read_at(fd, max(size, min(_SCAN_BYTES, end - position)), position),
                    0,
                )
            if len(chunk) < size or crc32c(memoryview(chunk)[at + CRC_START : at + size]) != header.crc:
                return
        yield position, header
        position += size
