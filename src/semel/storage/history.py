"""Producers as the files know them: the last batches of one, found in the tail of the log, and the ids of all.

A snapshot keeps only the last batch of each producer, but up to 5 may be in flight when a broker is stopped, and their
acknowledgements lost. Before such a retry is refused as out of order, the batches before the last are looked up here.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from semel.storage import snapshot
from semel.storage.producer_state import BATCHES_REMEMBERED, BatchInfo, ProducerEntry, ProducerStates
from semel.storage.segment import SNAPSHOT, Segment

_TAIL_BYTES_MAX = 64 << 20


def extend(entry: ProducerEntry, segments: list[Segment]) -> None:
    """Fills in the batches of the entry's epoch that precede the ones it knows. Reads headers only, and only once."""
    entry.history_cut = False
    if not entry.batches:
        return
    known_from = entry.batches[0].base_offset
    earlier: list[BatchInfo] = []
    budget = _TAIL_BYTES_MAX
    for segment in reversed(segments):
        if segment.base_offset > known_from:
            continue
        earlier = _batches_of(entry, segment, known_from, budget) + earlier
        budget -= segment.size
        if len(earlier) + len(entry.batches) >= BATCHES_REMEMBERED or budget <= 0:
            break
    entry.batches = (earlier + entry.batches)[-BATCHES_REMEMBERED:]


def _batches_of(entry: ProducerEntry, segment: Segment, before_offset: int, budget: int) -> list[BatchInfo]:
    start = 0
    if segment.size > budget:
        indexed = segment.offset_index.floor(segment.size - budget, field=1)
        start = indexed.second if indexed is not None else 0
    found: list[BatchInfo] = []
    for _, header in segment.batches(start):
        if header.base_offset >= before_offset:
            break
        if header.producer_id == entry.producer_id and not header.is_control:
            if header.producer_epoch == entry.epoch:
                found.append(
                    BatchInfo(
                        header.base_sequence,
                        header.last_sequence,
                        header.base_offset,
                        header.last_offset,
                        header.max_timestamp,
                    )
                )
            else:
                found = []
    return found[-BATCHES_REMEMBERED:]


def producer_ids(states: ProducerStates, folder: str, segments: list[Segment]) -> set[int]:
    """Every producer id that a log knows of. Producers expire from the state, and retention takes batches."""
    found = set(states.producers)
    for name in os.listdir(folder):
        if name.endswith(SNAPSHOT):
            with contextlib.suppress(snapshot.CorruptSnapshotError):
                entries = snapshot.decode(Path(folder, name).read_bytes(), 0)
                found.update(entry.producer_id for entry in entries)
    for segment in segments:
        found.update(header.producer_id for _, header in segment.batches() if header.has_producer_id)
    return found
