"""Offsets in topics, as Spark's checkpoint holds them: {"topic": {"0": 23}, "$ids": {"topic": "..."}}.

The ids say which topic of that name is meant: one that is deleted and created anew has another, and offsets of the old
one say nothing about it. Offsets without ids (of earlier versions, of Spark's own source) are taken as they are.

The first end offset of a query carries the start that was resolved for it under "$start" (no topic can have that name).
Spark does not log the start of batch 0 and requests it again after a crash; "latest" would be another place by then.

Ranges of offsets are what a micro-batch reads; how they are shared among tasks is pure arithmetic.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

Offsets = dict[str, dict[int, int]]

TopicIds = dict[str, str]

START = "$start"
INITIAL = "$initial"
IDS = "$ids"


class Edge(NamedTuple):
    """Offsets, and of which topics; a topic has no id where the broker does not say it."""

    offsets: Offsets
    ids: TopicIds


def to_json(offsets: Mapping[str, Mapping[int, int]], ids: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Sorted, so that equal offsets are equal text."""
    value = {topic: {str(p): offsets[topic][p] for p in sorted(offsets[topic])} for topic in sorted(offsets)}
    known = {topic: ids[topic] for topic in value if topic in ids} if ids else {}
    return {**value, IDS: known} if known else value


def from_json(value: Mapping[str, Any]) -> Offsets:
    """Raises TypeError, ValueError or AttributeError for what is not {"topic": {"0": 23}}."""
    return {topic: {int(p): int(o) for p, o in parts.items()} for topic, parts in value.items() if topic[0] != "$"}


def edge_of(value: Mapping[str, Any]) -> Edge:
    """As `from_json`, with the ids."""
    ids = value.get(IDS)
    return Edge(from_json(value), dict(ids) if isinstance(ids, dict) else {})


def recreated(before: Mapping[str, str], now: Mapping[str, str]) -> set[str]:
    """Topics that have another id now: deleted and created anew."""
    return {topic for topic, topic_id in before.items() if now.get(topic, topic_id) != topic_id}


def parse(text: str | None) -> Offsets | None:
    """The offsets in one line of an offset log, or None if it is not a line of a Kafka source."""
    found = parse_edge(text)
    return None if found is None else found.offsets


def parse_edge(text: str | None) -> Edge | None:
    """The same with the ids of the topics."""
    try:
        value = json.loads(text or "")
        if isinstance(value, dict) and _looks_like_offsets(value):
            return edge_of(value)
    except (ValueError, TypeError, AttributeError):
        pass
    return None


def lowest(lines: Iterable[str | None]) -> Edge:
    """The offsets in all lines of a batch. One topic in two sources: the lower offset."""
    merged = Edge({}, {})
    for line in lines:
        offsets, ids = parse_edge(line) or Edge({}, {})
        merged.ids.update(ids)
        for topic, parts in offsets.items():
            for partition, offset in parts.items():
                known = merged.offsets.setdefault(topic, {}).get(partition, offset)
                merged.offsets[topic][partition] = min(known, offset)
    return merged


def _looks_like_offsets(value: Mapping[str, Any]) -> bool:
    topics = [parts for topic, parts in value.items() if not topic.startswith("$")]
    return bool(topics) and all(isinstance(parts, dict) and all(p.isdecimal() for p in parts) for parts in topics)


def start_of(end: Mapping[str, Any], start: Mapping[str, Any]) -> Edge:
    """Where a batch begins: where the batch before ended, or, for the first one, what its end says was resolved.

    A topic that was created anew in between is read from 0 on.
    """
    resolved = end[START] if START in end and INITIAL in start else start
    begin, last = edge_of(resolved), edge_of(end)
    for topic in recreated(begin.ids, last.ids):
        begin.offsets[topic] = dict.fromkeys(last.offsets.get(topic, {}), 0)
    return Edge(begin.offsets, {**begin.ids, **last.ids})


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
    """What lies between two sets of offsets. A partition that the start does not name begins at 0."""
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
