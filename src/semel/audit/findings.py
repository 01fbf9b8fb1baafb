"""What can be wrong with a ledger and what it says, one rule each."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import pairwise
from typing import Any

import msgspec

SUFFIX = ".ledger"
KNOWN_FORMAT = 1
Place = tuple[str, int]
Positions = dict[Place, int]


class UnreadableEntryError(ValueError):
    """What is in the ledger is no entry of a known format."""


class AuditedWrite(msgspec.Struct, frozen=True):
    """What a batch says that it wrote into one partition."""

    topic: str
    partition: int
    count: int
    first_offset: int
    last_offset: int


class AuditEntry(msgspec.Struct, frozen=True):
    """One committed batch. A source's start or end is a text: positions in topics as JSON, or whatever it uses."""

    sequence: int
    query_id: str
    batch_id: int
    starts: list[str | None]
    ends: list[str | None]
    run_id: str = ""
    written: list[AuditedWrite] = []
    rows: int = 0  # all that was written, dead letters among them
    dead_letters: int = 0
    attempts: int = 1
    committed_at_ms: int = 0
    format: int = 0

    @property
    def has_sources(self) -> bool:
        """A batch job has none: it is no link of the chain."""
        return bool(self.starts or self.ends)


def decode(value: bytes, offset: int) -> AuditEntry:
    try:
        entry = msgspec.json.decode(value, type=AuditEntry)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UnreadableEntryError(f"offset {offset} of the ledger is no entry: {error}") from error
    if entry.format != KNOWN_FORMAT:
        raise UnreadableEntryError(
            f"offset {offset} of the ledger has format {entry.format}, this version reads {KNOWN_FORMAT}; use the "
            "semel that wrote it, or a newer one"
        )
    return entry


def positions(text: str | None) -> Positions | None:
    """{"topic": {"0": 23}} as positions; None for a source that is not Kafka. Names with "$" are the source's notes."""
    try:
        value = json.loads(text or "")
    except ValueError:
        return None
    if not _are_positions(value):
        return None
    return {
        (topic, int(partition)): int(offset)
        for topic, parts in value.items()
        if not topic.startswith("$")
        for partition, offset in parts.items()
    }


def topic_ids(text: str | None) -> dict[str, str]:
    """Which topics the offsets are of; nothing where the source does not say it."""
    try:
        value = json.loads(text or "")
    except ValueError:
        return {}
    found = value.get("$ids") if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}


def _are_positions(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    parts = [parts for topic, parts in value.items() if not topic.startswith("$")]
    return bool(parts) and all(isinstance(part, dict) and all(p.isdecimal() for p in part) for part in parts)


# --- the rules ---


class FindingKind(Enum):
    GAP = "gap"
    OVERLAP = "overlap"
    COUNT = "count"
    LEDGER = "ledger"
    POSITIONS = "positions"


class Finding(msgspec.Struct, frozen=True):
    """One thing that must not be. `sequence` is the ledger's number of the batch, -1 if it is about no batch."""

    kind: FindingKind
    sequence: int
    place: str
    detail: str

    def __str__(self) -> str:
        batch = f"entry {self.sequence}, " if self.sequence >= 0 else ""
        return f"{self.kind.value}: {batch}{self.place}: {self.detail}"


def named(place: Place) -> str:
    return f"{place[0]}-{place[1]}"


def chain(entries: Sequence[AuditEntry]) -> Iterator[Finding]:
    """Every batch starts where the one before ended, and no number is there twice or missing."""
    for before, entry in pairwise(entries):
        if entry.sequence == before.sequence:
            detail = f"batch {before.batch_id} and batch {entry.batch_id} have the same number: two writers"
            yield Finding(FindingKind.LEDGER, entry.sequence, "the ledger", detail)
        elif entry.sequence != before.sequence + 1:
            detail = f"the entry before it is {before.sequence}; those in between are gone"
            yield Finding(FindingKind.LEDGER, entry.sequence, "the ledger", detail)
    for before, entry in pairwise([entry for entry in entries if entry.has_sources]):
        yield from _between(before, entry)


def _between(before: AuditEntry, entry: AuditEntry) -> Iterator[Finding]:
    if len(before.ends) != len(entry.starts):
        detail = f"{len(entry.starts)} sources, the batch before had {len(before.ends)}"
        yield Finding(FindingKind.LEDGER, entry.sequence, "sources", detail)
        return
    for number, (end, start) in enumerate(zip(before.ends, entry.starts, strict=True)):
        old, new = positions(end), positions(start)
        if old is not None and new is not None:
            yield from _between_positions(before, entry, _of_the_same_topics(old, end, start), new)
        elif end != start and start is not None:
            detail = f"starts at {start}, the batch before ended at {end}"
            yield Finding(FindingKind.GAP, entry.sequence, f"source {number}", detail)


def _of_the_same_topics(ends: Positions, end: str | None, start: str | None) -> Positions:
    """Without topics that were created anew since: those begin anywhere."""
    before, now = topic_ids(end), topic_ids(start)
    others = {topic for topic, topic_id in before.items() if now.get(topic, topic_id) != topic_id}
    return {place: at for place, at in ends.items() if place[0] not in others}


def _between_positions(before: AuditEntry, entry: AuditEntry, old: Positions, new: Positions) -> Iterator[Finding]:
    for place, end in sorted(old.items()):
        start = new.get(place)
        if start is None:
            detail = f"entry {before.sequence} ended at {end}, this one does not read the partition"
            yield Finding(FindingKind.GAP, entry.sequence, named(place), detail)
        elif start > end:
            detail = f"offsets {end} to {start - 1} were skipped: entry {before.sequence} ended at {end}"
            yield Finding(FindingKind.GAP, entry.sequence, named(place), detail)
        elif start < end:
            detail = f"offsets {start} to {end - 1} were read before: entry {before.sequence} ended at {end}"
            yield Finding(FindingKind.OVERLAP, entry.sequence, named(place), detail)


def backwards(entries: Sequence[AuditEntry]) -> Iterator[Finding]:
    """No batch ends before it starts."""
    for entry in entries:
        for start, end in zip(entry.starts, entry.ends, strict=False):
            old, new = positions(start) or {}, positions(end) or {}
            for place, offset in sorted(old.items()):
                if new.get(place, offset) < offset:
                    detail = f"starts at {offset} and ends at {new[place]}"
                    yield Finding(FindingKind.LEDGER, entry.sequence, named(place), detail)


def by_place(entries: Sequence[AuditEntry]) -> dict[Place, list[tuple[AuditEntry, AuditedWrite]]]:
    found: dict[Place, list[tuple[AuditEntry, AuditedWrite]]] = defaultdict(list)
    for entry in entries:
        for part in entry.written:
            if part.count:
                found[part.topic, part.partition].append((entry, part))
    return dict(found)


def output_ranges(entries: Sequence[AuditEntry]) -> Iterator[Finding]:
    """What batches wrote into a partition lies one behind the other."""
    for place, parts in sorted(by_place(entries).items()):
        for (before, old), (entry, new) in pairwise(parts):
            if new.first_offset <= old.last_offset:
                detail = (
                    f"says that it wrote offsets {new.first_offset} to {new.last_offset}, entry {before.sequence} says "
                    f"{old.first_offset} to {old.last_offset}"
                )
                yield Finding(FindingKind.OVERLAP, entry.sequence, named(place), detail)


def sums(entries: Sequence[AuditEntry]) -> Iterator[Finding]:
    """The rows of a batch are the sum of its partitions."""
    for entry in entries:
        total = sum(part.count for part in entry.written)
        if total != entry.rows:
            detail = f"says {entry.rows} rows, its partitions add up to {total}"
            yield Finding(FindingKind.COUNT, entry.sequence, "the ledger", detail)


def counts(place: Place, parts: Sequence[tuple[AuditEntry, AuditedWrite]], found: Sequence[int]) -> Iterator[Finding]:
    """The records between a batch's offsets are as many as it says."""
    for (entry, part), there in zip(parts, found, strict=True):
        if there == part.count:
            continue
        why = (
            "records are missing"
            if there < part.count
            else "another producer writes to this partition, or rows were written twice"
        )
        detail = f"offsets {part.first_offset} to {part.last_offset} hold {there} records, it says {part.count}: {why}"
        yield Finding(FindingKind.COUNT, entry.sequence, named(place), detail)


def group(ends: Positions, committed: Positions) -> Iterator[Finding]:
    """The consumer group stands where the ledger ends."""
    for place, end in sorted(ends.items()):
        if committed.get(place, end) != end:
            detail = f"the group stands at {committed[place]}, the ledger ends at {end}: somebody moved the group"
            yield Finding(FindingKind.POSITIONS, -1, named(place), detail)


RULES = (chain, backwards, output_ranges, sums)
