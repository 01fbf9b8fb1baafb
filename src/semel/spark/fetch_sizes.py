"""How much of a partition a range is: what to ask for, and what of an answer to keep.

A fetch names bytes, a range offsets. A small range that asked for a large answer would read, check and decode several
times what it needs. So a worker remembers what the records of a topic took, for its next ranges.
"""

from __future__ import annotations

from typing import NamedTuple

from semel.protocol.batch import iter_headers

LEAST_BYTES = 64 * 1024
KEPT_TOPICS = 256


class Needed(NamedTuple):
    """The part of an answer that lies before the end of a range: whole batches, of which the last may reach beyond."""

    records: memoryview
    first_offset: int  # of the first batch, which may begin before the position
    next_offset: int  # where the next fetch starts; the position itself if no batch is whole
    largest_batch_bytes: int


def needed(records: memoryview, position: int, end: int) -> Needed:
    used_bytes = largest_bytes = 0
    first_offset = position
    for at, header in iter_headers(records):
        if header.base_offset >= end:
            position = max(position, end)  # whatever was in between has been compacted away
            break
        first_offset = min(first_offset, header.base_offset)
        position = max(position, header.next_offset)
        used_bytes = at + header.size
        largest_bytes = max(largest_bytes, header.size)
    return Needed(records[:used_bytes], first_offset, position, largest_bytes)


class TopicSizes:
    """What the records of topics took on the wire, when they were last read."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[float, int]] = {}  # bytes per offset, bytes of the largest batch

    def learn(self, topic: str, found: Needed) -> None:
        if found.largest_batch_bytes:
            while len(self._of) >= KEPT_TOPICS:
                self._of.pop(next(iter(self._of)))
            bytes_per_offset = len(found.records) / (found.next_offset - found.first_offset)
            self._of[topic] = (bytes_per_offset, found.largest_batch_bytes)

    def bytes_for(self, topic: str, offsets: int, most: int) -> int:
        """Enough for so many offsets, as far as anyone knows: with a batch to spare, as answers end in half batches."""
        if topic not in self._of:
            return most
        bytes_per_offset, largest_batch_bytes = self._of[topic]
        return min(most, max(LEAST_BYTES, int(offsets * bytes_per_offset) + largest_batch_bytes))
