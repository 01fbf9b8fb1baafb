"""Which part of which partition a micro-batch reads, and how that is shared among tasks. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from semel.spark.offsets import Offsets


class Range(NamedTuple):
    """The offsets from `start` up to, not including, `end` of one partition."""

    topic: str
    partition: int
    start: int
    end: int
    topic_id: str = ""  # of the topic that was planned; "" where nobody knows it

    @property
    def size(self) -> int:
        return self.end - self.start


def ranges(start: Offsets, end: Offsets, ids: Mapping[str, str] | None = None) -> Iterator[Range]:
    """What lies between two positions. A partition that the start does not name begins at 0."""
    ids = ids or {}
    for topic in sorted(end):
        for partition in sorted(end[topic]):
            first, last = start.get(topic, {}).get(partition, 0), end[topic][partition]
            if last > first:
                yield Range(topic, partition, first, last, ids.get(topic, ""))


def limited(start: Offsets, latest: Offsets, max_offsets: int) -> Offsets:
    """The end of a batch of at most about `max_offsets`: each partition gives in proportion to what waits in it.

    A partition with anything to give gives at least one, so that none starves.
    """
    waiting = {(r.topic, r.partition): r for r in ranges(start, latest)}
    total = sum(r.size for r in waiting.values())
    if total <= max_offsets:
        return latest
    end = {topic: dict(parts) for topic, parts in latest.items()}
    for (topic, partition), r in waiting.items():
        share = r.size * max_offsets / total
        end[topic][partition] = min(r.end, r.start + (math.ceil(share) if share < 1 else math.floor(share)))
    return end


def split(whole: list[Range], min_partitions: int | None, max_records: int | None) -> list[Range]:
    """Cuts ranges for more parallelism (`minPartitions`) or smaller tasks (`maxRecordsPerPartition`).

    Without either, one task reads one partition, and rows stay in the order of the partition.
    """
    pieces = dict.fromkeys(whole, 1)
    if max_records:
        pieces = {r: math.ceil(r.size / max_records) for r in whole}
    if min_partitions and sum(pieces.values()) < min_partitions:
        total = sum(r.size for r in whole)
        pieces = {r: max(n, math.ceil(r.size / total * min_partitions)) for r, n in pieces.items()}
    return [piece for r, n in pieces.items() for piece in _cut(r, min(n, r.size))]


def _cut(r: Range, pieces: int) -> Iterator[Range]:
    for i in range(pieces):
        start, end = r.start + r.size * i // pieces, r.start + r.size * (i + 1) // pieces
        if end > start:
            yield r._replace(start=start, end=end)
