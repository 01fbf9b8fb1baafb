"""Entries of a ledger, as they are in its topic: one JSON object for each committed batch."""

from __future__ import annotations

import json
from typing import Any

import msgspec

SUFFIX = ".ledger"
KNOWN_FORMAT = 1
Place = tuple[str, int]
Positions = dict[Place, int]


class UnreadableEntryError(ValueError):
    """What is in the ledger is no entry of a known format."""


class Written(msgspec.Struct, frozen=True):
    """What a batch says that it wrote into one partition."""

    topic: str
    partition: int
    count: int
    first_offset: int
    last_offset: int


class Entry(msgspec.Struct, frozen=True):
    """One committed batch. A source's start or end is a text: positions in topics as JSON, or whatever it uses."""

    sequence: int
    query_id: str
    batch_id: int
    starts: list[str | None]
    ends: list[str | None]
    run_id: str = ""
    written: list[Written] = []
    rows: int = 0  # all that was written, dead letters among them
    dead_letters: int = 0
    attempts: int = 1
    committed_at_ms: int = 0
    format: int = 0

    @property
    def has_sources(self) -> bool:
        """A batch job has none: it is no link of the chain."""
        return bool(self.starts or self.ends)


def decode(value: bytes, offset: int) -> Entry:
    try:
        entry = msgspec.json.decode(value, type=Entry)
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
