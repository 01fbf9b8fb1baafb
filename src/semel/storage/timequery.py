"""Offsets by time: the indexes find the batch, the batch is opened to find the record."""

from __future__ import annotations

from semel.protocol.batch import BatchHeader
from semel.storage.segment import Segment

Found = tuple[int, int, int]  # timestamp, offset, leader epoch


def first_at_or_after(segments: list[Segment], timestamp_ms: int, start_offset: int) -> Found | None:
    """The first record, by offset, whose timestamp is at least this."""
    for segment in segments:
        if segment.load_max_timestamp() < timestamp_ms:
            continue
        entry = segment.time_index.floor(timestamp_ms - 1)
        from_offset = max(start_offset, segment.base_offset + entry.second if entry else segment.base_offset)
        for position, header in segment.batches(segment.position_hint(from_offset)):
            if header.max_timestamp >= timestamp_ms and header.last_offset >= start_offset:
                found = _first_record(segment, position, header, timestamp_ms, start_offset)
                if found is not None:
                    return found
    return None


def highest(segments: list[Segment], start_offset: int) -> Found | None:
    """The first record that has the highest timestamp of the log."""
    with_time = [segment for segment in segments if segment.load_max_timestamp() >= 0]
    if not with_time:
        return None
    top = max(with_time, key=lambda segment: segment.max_timestamp_ms)
    place = top.find(top.max_timestamp_offset)
    if place is None:
        return None
    position, header = place
    return _first_record(top, position, header, header.max_timestamp, start_offset)


def _first_record(
    segment: Segment, position: int, header: BatchHeader, timestamp_ms: int, start_offset: int
) -> Found | None:
    from semel.protocol.record_fields import first_at_or_after

    batch = segment.files.read_at(segment.fd, header.size, position)
    found = first_at_or_after(batch, timestamp_ms, start_offset)
    return None if found is None else (*found, header.leader_epoch)
