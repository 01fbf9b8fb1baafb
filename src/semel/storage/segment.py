"""One segment of a log: a file of batches with its sparse indexes. Knows batches, not producers."""

from __future__ import annotations

import os
from collections.abc import Iterator

from crc32c import crc32c

from semel.protocol.batch import CRC_START, HEADER, HEADER_SIZE, LOG_OVERHEAD, MAGIC, NO_TIMESTAMP, BatchHeader
from semel.storage.files import FileCache, Files, Handle
from semel.storage.index import OFFSET_ENTRY, TIME_ENTRY, SparseIndex
from semel.storage.txnindex import TransactionIndex

LOG, OFFSET_INDEX, TIME_INDEX, TXN_INDEX, SNAPSHOT = ".log", ".index", ".timeindex", ".txnindex", ".snapshot"
DELETED, CLEANED, SWAP = ".deleted", ".cleaned", ".swap"
SEGMENT_FILES = (LOG, OFFSET_INDEX, TIME_INDEX, TXN_INDEX)
RELATIVE_OFFSET_MAX = 2**31 - 1
_SCAN_BYTES = 1 << 20
_unpack_header = HEADER.unpack_from


def file_name(offset: int, suffix: str) -> str:
    return f"{offset:020d}{suffix}"


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
    def files(self) -> Files:
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
        self.offset_index.reset()
        self.time_index.reset()
        self.txn_index.reset()
        self.suspect = False
        self._forget_times()

    def _forget_times(self) -> None:
        """They come back with the batches that are counted from now on."""
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
        """The position of a batch at or before the one with an offset. An index that lies is rebuilt."""
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

    def rebuild_indexes(self, index_interval_bytes: int = 4096) -> None:
        """Offset and time index from the batches themselves."""
        size, self.size = self.size, 0
        self.offset_index.reset()
        self.time_index.reset()
        self._forget_times()
        for _, header in self.batches(0, size):
            self.note_found(header, index_interval_bytes)
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

    def handles(self) -> list[Handle]:
        """The files that exist, for syncing."""
        some = [self.log, self.offset_index.handle, self.time_index.handle]
        return [*some, self.txn_index.handle] if self.txn_index.count else some

    def close(self) -> None:
        for handle in (self.log, self.offset_index.handle, self.time_index.handle, self.txn_index.handle):
            self.cache.close(handle)

    def paths(self) -> list[str]:
        return [
            handle.path
            for handle in (self.log, self.offset_index.handle, self.time_index.handle, self.txn_index.handle)
        ]


def _indexes_missing_or_torn(sizes: dict[str, int]) -> bool:
    wanted = ((OFFSET_INDEX, OFFSET_ENTRY.size), (TIME_INDEX, TIME_ENTRY.size))
    return bool(sizes.get(LOG)) and any(suffix not in sizes or sizes[suffix] % size for suffix, size in wanted)


def scan(files: Files, fd: int, start: int, end: int, *, verify: bool = False) -> Iterator[tuple[int, BatchHeader]]:
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
