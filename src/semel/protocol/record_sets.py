"""Which batches of a fetch response a reader sees: whole ones, with the right CRC, not control, not of an aborted
transaction, not before its position. Both codecs read record sets through this.

The rule of read_committed: the broker sends, beside raw batches, (producer id, first offset) of every aborted
transaction that touches them. From that first offset on, that producer's transactional batches are not visible, up to
its ABORT marker. A response brings along all that is needed to read it, so nothing is kept between responses but the
next offset.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from semel.protocol.batch import DEFAULT_LIMIT_BYTES, BatchHeader, Buffer, check_batch, iter_headers, read_body
from semel.protocol.rows import MarkerType, Record, decode_batch, decode_marker, decode_records

AbortedTransactions = Iterable[tuple[int, int]]  # (producer id, first offset)


@dataclass(slots=True)
class Progress:
    """How far a reader has come in a record set."""

    next_offset: int  # where the next fetch starts
    bytes_read: int = 0  # of the record set; the rest is a partial batch, or was left for another call
    leader_epoch: int = -1  # of the last batch

    def advance(self, at: int, header: BatchHeader) -> None:
        self.next_offset = max(self.next_offset, header.next_offset)
        self.bytes_read = at + header.size
        self.leader_epoch = header.leader_epoch


def visible_batches(
    data: Buffer, progress: Progress, aborted: AbortedTransactions | None, limit_bytes: int = DEFAULT_LIMIT_BYTES
) -> Iterator[tuple[int, BatchHeader]]:
    """(position, header) of the batches to decode. `aborted` is None for read_uncommitted.

    A batch counts as read in `progress` when the next one is requested."""
    start_offset = progress.next_offset
    filter_ = None if aborted is None else _AbortFilter(aborted)
    for at, header in iter_headers(data):
        check_batch(data, header, at)
        if header.is_control:
            if filter_ is not None:
                filter_.see_control_batch(decode_batch(data, at, limit_bytes).records, header)
        elif header.last_offset >= start_offset and (filter_ is None or filter_.shows(header)):
            yield at, header
        progress.advance(at, header)


class _AbortFilter:
    """Follows a record set in order and finds whose batches belong to aborted transactions."""

    __slots__ = ("_aborting", "_upcoming")

    def __init__(self, aborted: AbortedTransactions) -> None:
        self._upcoming = sorted(((first, producer_id) for producer_id, first in aborted), reverse=True)
        self._aborting: set[int] = set()

    def shows(self, header: BatchHeader) -> bool:
        self._start_those_up_to(header.last_offset)
        return not (header.is_transactional and header.producer_id in self._aborting)

    def see_control_batch(self, records: list[Record], header: BatchHeader) -> None:
        self._start_those_up_to(header.last_offset)
        marker = decode_marker(records[0]) if records else None  # a compacted control batch may be empty
        if marker is not None and marker.type is MarkerType.ABORT:
            self._aborting.discard(header.producer_id)

    def _start_those_up_to(self, offset: int) -> None:
        while self._upcoming and self._upcoming[-1][0] <= offset:
            self._aborting.add(self._upcoming.pop()[1])


class RowSet(NamedTuple):
    records: list[Record]
    next_offset: int


def decode_record_set(
    data: Buffer,
    *,
    start_offset: int = 0,
    aborted: AbortedTransactions | None = None,
    limit_bytes: int = DEFAULT_LIMIT_BYTES,
) -> RowSet:
    """A fetch response as rows; `columns.decode_record_set` is the fast one."""
    progress = Progress(start_offset)
    records: list[Record] = []
    for at, header in visible_batches(data, progress, aborted, limit_bytes):
        decoded = decode_records(header, read_body(data, header, at, limit_bytes), limit_bytes)
        records += [record for record in decoded if record.offset >= start_offset]
    return RowSet(records, progress.next_offset)
