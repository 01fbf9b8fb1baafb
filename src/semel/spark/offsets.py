"""Positions in topics, as Spark's checkpoint holds them: {"topic": {"0": 23}}.

The first end offset of a query carries the start that was resolved for it under "$start" (no topic can have that name).
Spark does not log the start of batch 0 and asks for it again after a crash; "latest" would be another place by then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Offsets = dict[str, dict[int, int]]

START = "$start"
INITIAL = "$initial"


def to_json(offsets: Mapping[str, Mapping[int, int]]) -> dict[str, Any]:
    """Sorted, so that equal positions are equal text."""
    return {topic: {str(p): offsets[topic][p] for p in sorted(offsets[topic])} for topic in sorted(offsets)}


def from_json(value: Mapping[str, Any]) -> Offsets:
    """Raises TypeError, ValueError or AttributeError for what is not {"topic": {"0": 23}}."""
    return {topic: {int(p): int(o) for p, o in parts.items()} for topic, parts in value.items() if topic[0] != "$"}


def parse(text: str) -> Offsets | None:
    """The positions in one line of an offset log, or None if it is not a line of a Kafka source."""
    try:
        value = json.loads(text)
        return from_json(value) if isinstance(value, dict) and _looks_like_offsets(value) else None
    except (ValueError, TypeError, AttributeError):
        return None


def _looks_like_offsets(value: Mapping[str, Any]) -> bool:
    topics = [parts for topic, parts in value.items() if not topic.startswith("$")]
    return bool(topics) and all(isinstance(parts, dict) and all(p.isdecimal() for p in parts) for parts in topics)


def start_of(end: Mapping[str, Any], start: Mapping[str, Any]) -> Offsets:
    """Where a batch begins: where the batch before ended, or, for the first one, what its end says was resolved."""
    return from_json(end[START]) if START in end and INITIAL in start else from_json(start)
